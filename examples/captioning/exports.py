"""Merged records as the files that people load. Nothing is overwritten that was not written here, unless asked for."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from media.files import FULL, part_of
from media.items import Item, open_item
from media.sources import IMAGE_SUFFIXES, VIDEO_SUFFIXES, find, in_shard
from PIL import Image

from captioning.journal import SHARDS
from captioning.plan import same_picture
from captioning.records import Record, json_lines, write_table

__all__ = ["Export", "Texts"]

FORMATS = "a folder, or a name that ends in .jsonl, .parquet or .tar"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How captions become text files."""

    extension: str = ".txt"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        plain = self.extension[:1] == "." and not {"/", "\\", "\0"} & set(self.extension) and len(self.extension) > 1
        if not plain or self.extension.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            raise ValueError(f"expected an extension of text files such as .txt or .caption, got {self.extension}")

    def __call__(self, record: Record) -> str:
        return f"{self.prefix}{record.caption}{self.suffix}"


@dataclass
class Export:
    """Writes the records of one run, and remembers in the folder of the records what it wrote.

    entry: the run's, from the manifest. written, absent, refused: what became of it: how many files, the keys of
    pictures that are not where the text would stand, and what was not written for another reason.
    """

    folder: Path
    entry: Mapping[str, Any]
    texts: Texts = field(default_factory=Texts)
    overwrite: bool = False
    samples: int = 10_000
    written: int = 0
    absent: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _read_from: set[Path] = field(default_factory=set)

    def __call__(self, records: Sequence[Record], path: Path) -> None:
        """Write to a folder (a text beside every picture in it), `metadata.jsonl`, or .jsonl, .parquet and .tar files.

        Raises ValueError for another name and for a file that is somebody else's, OSError if it cannot be written.
        """
        sources = {record.source for record in records if record.source}
        self._read_from = {Path(self.entry.get("root") or "", source).resolve() for source in sources}
        captions = [record for record in records if record.caption is not None]
        if path.is_dir():
            self._beside(captions, path)
        elif path.name == "metadata.jsonl":
            text = "".join(self._imagefolder(captions, path.parent))
            if text:
                self._whole(path, lambda part: part.write_bytes(_encoded(text)))
        elif path.suffix == ".jsonl":
            self._whole(path, lambda part: part.write_bytes(_encoded(json_lines(records))))
        elif path.suffix == ".parquet":
            self._whole(path, lambda part: write_table(part, records))
        elif path.suffix == ".tar":
            self._webdataset(captions, path)
        else:
            raise ValueError(f"expected {FORMATS}, got {path}")

    # --- whose a file is --------------------------------------------------------------------------------------------

    @property
    def _ledger(self) -> Path:
        return self.folder / ".written"

    def _ours(self) -> set[str]:
        try:
            return set(self._ledger.read_text().split())
        except OSError:
            return set()

    def _note(self, digest: str) -> None:
        """Before the file is written: after a kill between the two it still counts as ours."""
        try:
            with self._ledger.open("a") as file:
                file.write(f"\n{digest}")  # what a full disk cut off before is a line of its own
        except OSError as error:
            if error.errno in FULL:
                raise  # else somebody else's folder: what is written counts as theirs next time

    def _whole(self, path: Path, write: Callable[[Path], object]) -> None:
        if path.parent.resolve() == self.folder.resolve() and any(fnmatchcase(path.name, name) for name in SHARDS):
            names = "captions-00000.jsonl and captions-ray-00000.parquet"
            raise ValueError(f"names such as {names} are those of the records in {self.folder}; choose another")
        if path.resolve() in self._read_from:  # --overwrite, too: records and captions are not all that it holds
            raise ValueError(f"{path} is what the pictures were read from; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self.overwrite and _digest(path.name, path) not in self._ours():
            raise ValueError(
                f"{path} is there and was not written by merge from {self.folder}; --overwrite replaces it"
            )
        with part_of(path) as part:
            write(part)
            self._note(_digest(path.name, part))
        self.written += 1

    # --- texts beside pictures --------------------------------------------------------------------------------------

    def _beside(self, captions: Sequence[Record], folder: Path) -> None:
        files: dict[Path, dict[str, list[Record]]] = {}
        for record, picture in self._in_folder(captions, folder):
            file = picture.with_suffix(self.texts.extension)
            files.setdefault(file, {}).setdefault(record.key, []).append(record)
        ours = self._ours()
        for file, by_key in files.items():
            if len(by_key) > 1:
                self.refused.append(f"{file}: {' and '.join(by_key)} would both have it")
                continue
            ((key, found),) = by_key.items()
            self._text(file, key, _encoded("".join(self.texts(record) + "\n" for record in found)), ours)

    def _text(self, file: Path, key: str, data: bytes, ours: set[str]) -> None:
        try:
            if file.is_symlink() or file.exists():
                if file.is_file() and file.read_bytes() == data:
                    self.written += 1
                    return
                own = file.is_file() and not file.is_symlink() and _digest(key, file) in ours
                if not own and not (self.overwrite and not file.is_dir()):
                    self.refused.append(f"{file}: it is there, and was not written by merge")
                    return
            self._note(_digest(key, data))
            with part_of(file) as part:
                part.write_bytes(data)
            self.written += 1
        except OSError as error:
            if error.errno in FULL:
                raise
            self.refused.append(f"{file}: {error.strerror}")

    def _in_folder(self, records: Sequence[Record], folder: Path) -> Iterator[tuple[Record, Path]]:
        """The records whose pictures lie in a folder, and where; the others are reported."""
        for key, group in groupby(records, key=lambda record: record.key):
            found = list(group)
            try:
                picture = self._picture(found[0], folder)
            except (ValueError, OSError) as error:
                self.refused.append(str(error))
                continue
            if picture is None:
                self.absent.append(key)
            else:
                yield from ((record, picture) for record in found)

    def _picture(self, record: Record, folder: Path) -> Path | None:
        """Where the run found the picture, or the one of its name and size in a copy of the folder."""
        top, root = folder.resolve(), self.entry.get("root")
        if record.source is None and root:
            there = Path(os.path.normpath(os.path.join(root, record.key)))
            if there.is_relative_to(top) and there.is_file():
                return there if same_picture(record, Item(key=record.key, file=str(there))) else None
        copied = Path(os.path.normpath(top / record.key))
        inside = copied.is_relative_to(top)
        # Names in shards are anybody's; a folder's own links may lead elsewhere.
        if record.source is not None and not (inside and copied.resolve().is_relative_to(top)):
            raise ValueError(f"{record.key}: it would not be within {folder}")
        if not inside or not copied.is_file():
            return None
        # A name alone, such as 0001.jpg, may be another picture's.
        return copied if same_picture(record, Item(key=record.key, file=str(copied))) else None

    # --- data sets --------------------------------------------------------------------------------------------------

    def _imagefolder(self, captions: Sequence[Record], folder: Path) -> Iterator[str]:
        """Lines as the imagefolder builder of `datasets` reads them: the captions of several prompts are columns."""
        placed = list(self._in_folder(captions, folder))
        prompts = dict.fromkeys([*self.entry.get("prompts", ()), *(record.prompt for record, _ in placed)])
        columns = [name for name in prompts if any(record.prompt == name for record, _ in placed)]
        names = {prompt: f"text_{index}" if index > 1 else "text" for index, prompt in enumerate(columns, start=1)}
        top = folder.resolve()
        for picture, group in groupby(placed, key=lambda each: each[1]):
            line = {"file_name": picture.relative_to(top).as_posix()} | dict.fromkeys(names.values())
            line |= {names[record.prompt]: self.texts(record) for record, _ in group}
            yield json.dumps(line, ensure_ascii=False) + "\n"

    def _webdataset(self, captions: Sequence[Record], path: Path) -> None:
        """Shards of NUMBER.jpg, NUMBER.txt and NUMBER.json; with %d in the name, several of `samples` pictures each."""
        samples = enumerate(self._samples(captions))
        numbered = "%" in path.name
        for shard, group in groupby(samples, key=lambda each: each[0] // self.samples if numbered else 0):
            try:
                file = path.with_name(path.name % shard if numbered else path.name)
            except (TypeError, ValueError):
                raise ValueError(
                    f"expected a name with one number such as captioned-%05d.tar, got {path.name}"
                ) from None
            self._whole(file, partial(_write_tar, samples=group))
        # Whoever reads the shards takes all of these names.
        if numbered and self.written and (left := path.with_name(path.name % self.written)).exists():
            self.refused.append(f"{left}: it is of an earlier merge into more shards; remove it and those after it")

    def _samples(self, captions: Sequence[Record]) -> Iterator[dict[str, bytes]]:
        by_source: dict[str | None, list[Record]] = {}
        for record in captions:
            by_source.setdefault(record.source, []).append(record)
        for source, records in by_source.items():
            items = self._items(source) if source else None
            for key, group in groupby(records, key=lambda record: record.key):
                found = list(group)
                plain = Item(key=key, file=os.path.join(self.entry.get("root") or "", key))
                item = plain if items is None else items.get(key)
                try:
                    if item is None or not same_picture(found[0], item):
                        raise ValueError("gone, or another now")
                    with open_item(item) as file:
                        data = file.read()
                except (ValueError, OSError):
                    self.absent.append(key)
                    continue
                about = [{"prompt": each.prompt, "asked": each.asked, "caption": each.caption} for each in found]
                yield {
                    _suffix(key, data): data,
                    self.texts.extension[1:]: _encoded("".join(self.texts(record) + "\n" for record in found)),
                    "json": _encoded(json.dumps({"key": key, "captions": about}, ensure_ascii=False)),
                }

    def _items(self, source: str) -> dict[str, Item]:
        """The items of a shard, a table or a data set, by their keys."""
        column, split = self.entry.get("column"), self.entry.get("split") or "train"
        path = Path(self.entry.get("root") or "", source)
        try:
            if path.suffix.lower() in (".tar", ".parquet"):
                found = list(in_shard(path, source, column))
            else:
                root, name = self.entry.get("root"), source.removesuffix(f"/{split}")
                there = os.path.join(root or "", name)
                name = there if os.path.isdir(there) else name
                found = find([f"dataset:{name}"], column=column, split=split, root=root).items
        except (OSError, ValueError):
            return {}
        return {item.key: item for item in found}


def _digest(name: str, content: Path | bytes) -> str:
    """Of a file's name and content: what somebody has changed, or written under another name, is not ours."""
    found = hashlib.sha256(name.encode(errors="surrogatepass") + b"\0")
    if isinstance(content, bytes):
        found.update(content)
    else:
        with content.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.hexdigest()[:32]


def _encoded(text: str) -> bytes:
    # Lone surrogates, of file names that are no valid UTF-8, become JSON's own escapes.
    return text.encode("utf-8", errors="backslashreplace")


def _suffix(key: str, data: bytes) -> str:
    """By the name, or by the content for rows of a table."""
    suffix = Path(key).suffix.lower()
    if suffix in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
        return suffix[1:]
    try:
        with Image.open(io.BytesIO(data)) as image:
            return {"JPEG": "jpg", "TIFF": "tif"}.get(image.format or "", (image.format or "bin").lower())
    except Exception:
        return "mp4"


def _write_tar(part: Path, samples: Iterator[tuple[int, dict[str, bytes]]]) -> None:
    with tarfile.open(part, "w") as archive:
        for number, sample in samples:
            for suffix, data in sample.items():
                info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
