"""Write merged records as files that people load. Files of others are overwritten only on request."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from PIL import Image

from captioner.files import FULL, part_of
from captioner.items import Item, open_item
from captioner.journal import SHARDS, SUPERSEDED, Entry, Record, json_lines, write_table
from captioner.plan import same_picture
from captioner.sources import IMAGE_SUFFIXES, VIDEO_SUFFIXES, find, in_shard

NOT_OURS = "it is there, and was not written by merge, or was edited since"
_BLOCK = 1 << 20
Sample = dict[str, bytes]
"""The files of one sample of a webdataset, by suffix."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How captions become text files."""

    extension: str = ".txt"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        has_dot = self.extension[:1] == "." and len(self.extension) > 1
        is_plain = has_dot and not {"/", "\\", "\0"} & set(self.extension)
        if not is_plain or self.extension.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            raise ValueError(f"expected an extension of text files such as .txt or .caption, got {self.extension}")

    def text_of(self, record: Record) -> str:
        """Return the caption of a record between prefix and suffix."""
        return f"{self.prefix}{record.caption}{self.suffix}"

    def file_of(self, records: Sequence[Record]) -> bytes:
        """Return the content of a text file: a line for every record."""
        return _encoded("".join(self.text_of(record) + "\n" for record in records))


@dataclass
class Export:
    """Write the records of one run, and note in their folder which files were written."""

    folder: Path
    entry: Entry
    texts: Texts = field(default_factory=Texts)
    overwrite: bool = False
    samples: int = 10_000  # in a .tar whose name holds a number
    written: int = 0
    contents: str = ""  # such as "12 records"
    absent: list[str] = field(default_factory=list)  # keys of pictures that are gone or changed
    refused: list[str] = field(default_factory=list)  # files that were not written, with the reasons
    outdated: list[str] = field(default_factory=list)  # texts of an earlier merge beside changed pictures
    _sources: set[Path] = field(default_factory=set)

    def __call__(self, records: Sequence[Record], path: Path) -> None:
        """Write the records to a folder (a text beside every picture), or a .jsonl, .parquet or .tar file."""
        source_names = {record.source for record in records if record.source}
        self._sources = {Path(self._root, name).resolve() for name in source_names}
        with_text = {record.key for record in records if record.has_text}
        captioned = [record for record in records if record.caption is not None and record.key in with_text]
        if path.is_dir():
            self._write_texts(captioned, path)
            current = with_text - set(self.absent)
            self._find_outdated([record for record in records if record.key not in current], path)
            self.contents = f"{self.written} text{'s' if self.written != 1 else ''}"
        elif path.name == "metadata.jsonl":
            lines = list(self._imagefolder_lines(captioned, path.parent))
            self.contents = f"lines for {len(lines)} pictures"
            if lines:
                self._write_file(path, lambda part: part.write_bytes(_encoded("".join(lines))))
        elif path.suffix == ".jsonl":
            self.contents = f"{len(records)} records"
            self._write_file(path, lambda part: part.write_bytes(_encoded(json_lines(records))))
        elif path.suffix == ".parquet":
            self.contents = f"{len(records)} records"
            self._write_file(path, lambda part: write_table(part, records))
        elif path.suffix == ".tar":
            self._write_webdataset(captioned, path)
            pictures = len({record.key for record in captioned}) - len(self.absent)
            self.contents = f"{pictures} pictures with captions in {self.written} file{'s' * (self.written != 1)}"
        else:
            raise ValueError(f"there is no folder {path}; names of files end in .jsonl, .parquet or .tar")

    @property
    def _root(self) -> str:
        """Return the folder that keys are relative to."""
        return self.entry.get("root") or ""

    # --- files that merge wrote --------------------------------------------------------------------------------------

    @property
    def _ledger(self) -> Path:
        return self.folder / ".written"

    def _own_digests(self) -> set[str]:
        """Read the digests of all files that `merge` wrote from this folder."""
        try:
            return set(self._ledger.read_text().split())
        except OSError:
            return set()

    def _note(self, digest: str) -> None:
        """Note a file before it is written, so that it counts as our own after a kill between the two steps."""
        try:
            with self._ledger.open("a") as file:
                file.write(f"\n{digest}")  # a digest that a full disk cut off stays a line of its own
        except OSError as error:
            if error.errno in FULL:
                raise  # a read-only folder keeps no notes, so later merges need --overwrite

    def _write_file(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write one file, unless it holds records or pictures, or `merge` did not write it."""
        is_in_folder = path.parent.resolve() == self.folder.resolve()
        if is_in_folder and any(fnmatchcase(path.name, pattern) for pattern in (SHARDS, SUPERSEDED)):
            names = f"captions-00000.jsonl and {SUPERSEDED}"
            raise ValueError(f"names such as {names} are those of the records in {self.folder}; choose another")
        if path.resolve() in self._sources:  # even with --overwrite: a shard holds more than records and captions
            raise ValueError(f"{path} is what the pictures were read from; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self.overwrite and _digest(path.name, path) not in self._own_digests():
            raise ValueError(
                f"{path} is there and was not written by merge from {self.folder}, or was edited since; --overwrite "
                "replaces it"
            )
        with part_of(path) as part:
            write(part)
            self._note(_digest(path.name, part))
        self.written += 1

    # --- texts beside pictures --------------------------------------------------------------------------------------

    def _write_texts(self, records: Sequence[Record], folder: Path) -> None:
        records_by_file: dict[Path, dict[str, list[Record]]] = {}
        for record, picture in self._in_folder(records, folder):
            file = picture.with_suffix(self.texts.extension)
            records_by_file.setdefault(file, {}).setdefault(record.key, []).append(record)
        own_digests = self._own_digests()
        for file, records_by_key in records_by_file.items():
            if len(records_by_key) > 1:
                self.refused.append(f"{file}: it would be the text of {' and '.join(records_by_key)}")
                continue
            ((key, records_of_key),) = records_by_key.items()
            try:
                self._write_text(file, key, self.texts.file_of(records_of_key), own_digests)
            except OSError as error:
                if error.errno in FULL:
                    raise
                self.refused.append(f"{file}: {error.strerror}")

    def _find_outdated(self, records: Sequence[Record], folder: Path) -> None:
        """Find the texts that an earlier merge wrote beside pictures that changed since or have no caption now."""
        own_digests = self._own_digests()
        for key, group in groupby(records, key=lambda record: record.key):
            with suppress(ValueError, OSError):
                place = self._place(next(group), folder)
                file = None if place is None else place.with_suffix(self.texts.extension)
                if file is not None and file.is_file() and _digest(key, file) in own_digests:
                    self.outdated.append(str(file))

    def _write_text(self, file: Path, key: str, data: bytes, own_digests: set[str]) -> None:
        if file.is_symlink() or file.exists():
            if file.is_file() and file.read_bytes() == data:
                self.written += 1
                return
            is_own = file.is_file() and not file.is_symlink() and _digest(key, file) in own_digests
            if not is_own and not (self.overwrite and not file.is_dir()):
                self.refused.append(f"{file}: {NOT_OURS}")
                return
        self._note(_digest(key, data))
        with part_of(file) as part:
            part.write_bytes(data)
        self.written += 1

    def _in_folder(self, records: Sequence[Record], folder: Path) -> Iterator[tuple[Record, Path]]:
        """Yield the records whose pictures are in a folder, with their paths, and note the others."""
        for key, group in groupby(records, key=lambda record: record.key):
            records_of_key = list(group)
            try:
                picture = self._picture(records_of_key[0], folder)
            except (ValueError, OSError) as error:
                self.refused.append(str(error))
                continue
            if picture is None:
                self.absent.append(key)
                continue
            for record in records_of_key:
                yield record, picture

    def _picture(self, record: Record, folder: Path) -> Path | None:
        """Return the picture's path as `_place` does; None if another picture is there, such as another 0001.jpg."""
        place = self._place(record, folder)
        is_same = place is not None and same_picture(record, Item(key=record.key, file=str(place)))
        return place if is_same else None

    def _place(self, record: Record, folder: Path) -> Path | None:
        """Return the path of a record's file where the run found it, or in a copy of the folder; None without one."""
        top = folder.resolve()
        if record.source is None and self._root:
            original = Path(os.path.normpath(os.path.join(self._root, record.key)))
            if original.is_relative_to(top) and original.is_file():
                return original
        copy = Path(os.path.normpath(top / record.key))
        is_inside = copy.is_relative_to(top)
        # A shard may hold any names. Links in the folder itself may lead elsewhere.
        if record.source is not None and not (is_inside and copy.resolve().is_relative_to(top)):
            raise ValueError(f"{record.key}: it would not be within {folder}")
        return copy if is_inside and copy.is_file() else None

    # --- data sets --------------------------------------------------------------------------------------------------

    def _imagefolder_lines(self, records: Sequence[Record], folder: Path) -> Iterator[str]:
        """Yield lines as the imagefolder builder of `datasets` reads them, with a column for every prompt."""
        placed = list(self._in_folder(records, folder))
        used_prompts = {record.prompt for record, _ in placed}
        all_prompts = dict.fromkeys([*self.entry.get("prompts", ()), *(record.prompt for record, _ in placed)])
        columns: dict[str, str] = {}
        for prompt in all_prompts:
            if prompt in used_prompts:
                columns[prompt] = f"text_{len(columns) + 1}" if columns else "text"
        top = folder.resolve()
        for picture, group in groupby(placed, key=lambda pair: pair[1]):
            line: dict[str, str | None] = {"file_name": picture.relative_to(top).as_posix()}
            line |= dict.fromkeys(columns.values())
            for record, _ in group:
                line[columns[record.prompt]] = self.texts.text_of(record)
            yield json.dumps(line, ensure_ascii=False) + "\n"

    def _write_webdataset(self, records: Sequence[Record], path: Path) -> None:
        """Write shards of NUMBER.jpg, NUMBER.txt and NUMBER.json. With %d in the name, there are several shards."""
        is_numbered = "%" in path.name
        numbered_samples = enumerate(self._samples(records))
        for shard, group in groupby(numbered_samples, key=lambda pair: pair[0] // self.samples if is_numbered else 0):
            file = _shard_path(path, shard) if is_numbered else path
            self._write_shard(file, group)
        if is_numbered and self.written:
            next_shard = _shard_path(path, self.written)
            if next_shard.exists():  # programs that read the shards would read all of these names
                self.refused.append(
                    f"{next_shard}: it is of an earlier merge into more shards; remove it and those after it"
                )

    def _write_shard(self, file: Path, numbered_samples: Iterator[tuple[int, Sample]]) -> None:
        self._write_file(file, lambda part: _write_tar(part, numbered_samples))

    def _samples(self, records: Sequence[Record]) -> Iterator[Sample]:
        """Yield the pictures with their texts and JSON, and note the pictures that are gone or have changed."""
        records_by_source: dict[str | None, list[Record]] = {}
        for record in records:
            records_by_source.setdefault(record.source, []).append(record)
        for source, records_of_source in records_by_source.items():
            item_by_key = self._items(source) if source else {}
            for key, group in groupby(records_of_source, key=lambda record: record.key):
                records_of_key = list(group)
                item = item_by_key.get(key) if source else Item(key=key, file=os.path.join(self._root, key))
                data = _read_unchanged(item, records_of_key[0])
                if data is None:
                    self.absent.append(key)
                    continue
                captions = [
                    {"prompt": record.prompt, "asked": record.asked, "caption": record.caption}
                    for record in records_of_key
                ]
                yield {
                    _suffix(key, data): data,
                    self.texts.extension[1:]: self.texts.file_of(records_of_key),
                    "json": _encoded(json.dumps({"key": key, "captions": captions}, ensure_ascii=False)),
                }

    def _items(self, source: str) -> dict[str, Item]:
        """Return the items of a shard, a table or a data set, by key."""
        column = self.entry.get("column")
        split = self.entry.get("split") or "train"
        path = Path(self._root, source)
        try:
            if path.suffix.lower() in (".tar", ".parquet"):
                items = list(in_shard(path, source, column))
            else:
                name = source.removesuffix(f"/{split}")
                folder = os.path.join(self._root, name)
                name = folder if os.path.isdir(folder) else name
                items = find([f"dataset:{name}"], column=column, split=split, root=self.entry.get("root")).items
        except (OSError, ValueError):
            return {}
        return {item.key: item for item in items}


def _read_unchanged(item: Item | None, record: Record) -> bytes | None:
    """Return the bytes of a picture; None if it is gone or has changed."""
    try:
        if item is None or not same_picture(record, item):
            return None
        with open_item(item) as file:
            return file.read()
    except (ValueError, OSError):
        return None


def _shard_path(path: Path, number: int) -> Path:
    try:
        return path.with_name(path.name % number)
    except (TypeError, ValueError):
        raise ValueError(f"expected a name with one number such as captioned-%05d.tar, got {path.name}") from None


def _digest(name: str, content: Path | bytes) -> str:
    """Return a digest of name and content: a file that was edited or renamed is not our own any more."""
    digest = hashlib.sha256(name.encode(errors="surrogatepass") + b"\0")
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with content.open("rb") as file:
            while chunk := file.read(_BLOCK):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def _encoded(text: str) -> bytes:
    # Names of files that are no valid UTF-8 hold lone surrogates, which become JSON's own escapes.
    return text.encode("utf-8", errors="backslashreplace")


def _suffix(key: str, data: bytes) -> str:
    """Return the suffix of a picture: by its name, or for rows of a table by its content."""
    suffix = Path(key).suffix.lower()
    if suffix in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
        return suffix[1:]
    try:
        with Image.open(io.BytesIO(data)) as image:
            image_format = image.format or "bin"
    except Exception:
        return "mp4"
    return {"JPEG": "jpg", "TIFF": "tif"}.get(image_format, image_format.lower())


def _write_tar(part: Path, numbered_samples: Iterator[tuple[int, Sample]]) -> None:
    with tarfile.open(part, "w") as archive:
        for number, sample in numbered_samples:
            for suffix, data in sample.items():
                info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
