"""Write merged records as files that people load. Files of others are overwritten only on request."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from pathlib import Path

from captioner.files import FULL, encoded, replace_file
from captioner.items import Item
from captioner.journal import SHARDS, Entry, Record, json_lines
from captioner.plan import same_picture
from captioner.sources import IMAGE_SUFFIXES, VIDEO_SUFFIXES

LEDGER = ".written"
_NOT_OURS = (
    "it is there, and was not written by merge, or was edited since; --overwrite replaces it, and --extension .caption "
    "writes the texts of a folder under another name"
)


@dataclass
class Export:
    """Write the records of one run, and note in their folder which files were written."""

    folder: Path
    entry: Entry
    extension: str = ".txt"  # of text files
    overwrite: bool = False
    written: int = 0
    contents: str = ""  # such as "12 records"
    absent: list[str] = field(default_factory=list)  # keys of pictures that are not there
    refused: list[str] = field(default_factory=list)  # files that were not written, with the reasons

    def __post_init__(self) -> None:
        if self.extension.lower() in ("", *IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            raise ValueError(f"expected an extension of text files such as .txt or .caption, got {self.extension}")

    def __call__(self, records: Sequence[Record], path: Path) -> None:
        """Write the records to a folder (a text beside every picture), or a .jsonl file."""
        if path.is_dir():
            self._write_texts(records, path)
            self.contents = f"{self.written} text{'s' if self.written != 1 else ''}"
        elif path.name == "metadata.jsonl":
            lines = list(self._imagefolder_lines(records, path.parent))
            self.contents = f"lines for {len(lines)} pictures"
            if lines:
                self._write_file(path, encoded("".join(lines)))
        elif path.suffix == ".jsonl":
            self.contents = f"{len(records)} records"
            self._write_file(path, json_lines(records))
        else:
            raise ValueError(f"there is no folder {path}; names of files end in .jsonl")

    @cached_property
    def _own_digests(self) -> set[str]:
        try:
            return set((self.folder / LEDGER).read_text().split())
        except OSError:
            return set()

    def _note(self, digest: str) -> None:
        """Note a file before it is written, so that it counts as our own after a kill between the two steps."""
        try:
            with (self.folder / LEDGER).open("a") as file:
                file.write(f"\n{digest}")  # a digest that a full disk cut off stays a line of its own
        except OSError as error:
            if error.errno in FULL:
                raise  # a read-only folder keeps no notes, so later merges need --overwrite

    def _is_own(self, path: Path, name: str) -> bool:
        return path.is_file() and not path.is_symlink() and _digest(name, path.read_bytes()) in self._own_digests

    def _write(self, path: Path, name: str, data: bytes) -> None:
        """Write a file, with a digest of the name. ValueError if one is there that `merge` did not write."""
        if path.is_symlink() or path.exists():
            if path.is_file() and path.read_bytes() == data:
                self.written += 1
                return
            if path.is_dir() or not (self.overwrite or self._is_own(path, name)):
                raise ValueError(f"{path}: {_NOT_OURS}")
        self._note(_digest(name, data))
        replace_file(path, data)
        self.written += 1

    def _write_file(self, path: Path, data: bytes) -> None:
        if path.parent.resolve() == self.folder.resolve() and fnmatchcase(path.name, SHARDS):
            raise ValueError(f"{path} has a name of records, such as captions-00000.jsonl; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, path.name, data)

    def _write_texts(self, records: Sequence[Record], folder: Path) -> None:
        groups_by_file: dict[Path, list[list[Record]]] = {}
        for picture, group in self._pictures(records, folder):
            groups_by_file.setdefault(picture.with_suffix(self.extension), []).append(group)
        for file, groups in groups_by_file.items():
            captioned = [group for group in groups if any(record.has_text for record in group)]
            try:
                if len(captioned) > 1:
                    keys = " and ".join(group[0].key for group in captioned)
                    raise ValueError(f"{file}: it would be the text of {keys}")
                if captioned:
                    captions = [record.caption for record in captioned[0] if record.caption is not None]
                    data = encoded("".join(f"{caption}\n" for caption in captions))
                    self._write(file, captioned[0][0].key, data)
                elif self._is_own(file, groups[0][0].key):
                    raise ValueError(f"{file}: it is of an earlier merge, and its picture has no caption any more")
            except ValueError as error:
                self.refused.append(str(error))
            except OSError as error:
                if error.errno in FULL:
                    raise
                self.refused.append(f"{file}: {error.strerror}")

    def _imagefolder_lines(self, records: Sequence[Record], folder: Path) -> Iterator[str]:
        """Yield lines as the imagefolder builder of `datasets` reads them, with a column for every prompt."""
        prompts = self.entry["prompts"]
        columns = {prompt: f"text_{number}" if number > 1 else "text" for number, prompt in enumerate(prompts, 1)}
        top = folder.resolve()
        for picture, group in self._pictures(records, folder):
            if any(record.has_text for record in group):
                line: dict[str, str | None] = {"file_name": picture.relative_to(top).as_posix()}
                line |= dict.fromkeys(columns.values())
                line |= {columns[record.prompt]: record.caption for record in group}
                yield json.dumps(line, ensure_ascii=False) + "\n"

    def _pictures(self, records: Sequence[Record], folder: Path) -> Iterator[tuple[Path, list[Record]]]:
        """Yield the pictures in a folder with their records. Note those of captions that are absent or have changed."""
        for key, group in groupby(records, key=lambda record: record.key):
            records_of_key = list(group)
            has_text = any(record.has_text for record in records_of_key)
            try:
                place = self._place(records_of_key[0], folder)
            except (ValueError, OSError) as error:
                self.refused += [str(error)] if has_text else []
                continue
            if place is not None:
                yield place, records_of_key
            elif has_text:
                self.absent.append(key)

    def _place(self, record: Record, folder: Path) -> Path | None:
        """Return the path of a picture where the run found it, or in a copy of the folder; None without one."""
        top = folder.resolve()
        root = self.entry.get("root")
        if record.source is None and root:
            original = Path(os.path.normpath(os.path.join(root, record.key)))
            if original.is_relative_to(top) and original.is_file():
                if not same_picture(record, Item(key=record.key, file=str(original))):
                    raise ValueError(f"{original}: it changed after `caption`; run that again")
                return original
        copy = Path(os.path.normpath(top / record.key))
        is_inside = copy.is_relative_to(top)
        # A shard may hold any names. Links in the folder itself may lead elsewhere.
        if record.source is not None and not (is_inside and copy.resolve().is_relative_to(top)):
            raise ValueError(f"{record.key}: it would not be within {folder}")
        is_copy = is_inside and copy.is_file() and same_picture(record, Item(key=record.key, file=str(copy)))
        return copy if is_copy else None  # another folder may have another 0001.jpg


def _digest(name: str, content: bytes) -> str:
    """Return a digest of name and content: a file that was edited or renamed is not our own any more."""
    return hashlib.sha256(name.encode(errors="surrogatepass") + b"\0" + content).hexdigest()[:32]
