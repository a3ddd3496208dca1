"""Finds pictures and videos in folders, globs, lists, tar shards, parquet files and datasets, and reads their bytes."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from glob import has_magic
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

from media.places import PassedOver, key_of, matches, open_file, read_list, root_of, walk

__all__ = [
    "IMAGE_SUFFIXES",
    "VIDEO_SUFFIXES",
    "Found",
    "Item",
    "checksum",
    "fields",
    "find",
    "holds_bytes",
    "in_shard",
    "open_item",
    "read",
    "size",
    "stamp",
]

# HEIC is here although Pillow needs a plugin for it: an error record is better than a picture passed over in silence.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_COLUMNS = ("image", "img", "picture", "jpg", "jpeg", "png", "webp", "video", "mp4", "bytes", "path", "file_name")
_FIELD_SUFFIXES = ("json", "txt")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz")
_BESIDE = (".caption", ".csv", ".db", ".ini", ".json", ".jsonl", ".md", ".txt", ".xmp")
"""What often lies beside pictures, and is passed over in silence."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One picture or video. key: its name in records, unique in a run.

    file: where its bytes are: all of it, or `length` bytes from `offset` (tar), or a row (of a parquet file; with a
    split, of the dataset of that name). source: the key of the shard, table or dataset that it is a part of, and
    number the row there. stamp: of a part, what its file was before its index was read. extra: (suffix, offset, length)
    of the members of a tar that belong to it. problem: why it cannot be read at all.
    """

    key: str
    file: str
    kind: Literal["image", "video"] = "image"
    offset: int = 0
    length: int | None = None
    row: tuple[int, int] | None = None
    column: str | None = None
    split: str | None = None
    source: str | None = None
    number: int | None = None
    stamp: str | None = None
    extra: tuple[tuple[str, int, int], ...] = ()
    problem: str | None = None


@dataclass
class Found:
    """What there is to caption. items: sorted by key. root: the folder that keys of files are relative to.

    passed_over: what was left out, by its reason. clashes: keys that more than one item has.
    """

    items: list[Item] = field(default_factory=list)
    root: str | None = None
    passed_over: PassedOver = field(default_factory=lambda: PassedOver(list))
    clashes: list[str] = field(default_factory=list)


def find(inputs: list[str], *, column: str | None = None, split: str = "train", root: str | None = None) -> Found:
    """All items of the inputs.

    An input is a folder (searched recursively, by suffix), a glob, a picture or video, a `.txt` file with one path per
    line (relative to it), a `.tar` shard as webdataset writes them, a `.parquet` file, or `dataset:NAME`, a folder or
    hub name that `datasets` loads. column: of the pictures in parquet files and datasets; split: of datasets. root:
    keys are relative to it; by default to the folder that all inputs lie in.
    Of items that have one key none is read: one takes their place, with the problem. Raises ValueError for an input
    that is not there, and for one with no pictures.
    """
    found = Found(root=root or root_of(inputs))
    by_key: dict[str, Item] = {}
    for name in inputs:
        more = list(_find(name, column, split, found))
        if not more:
            hint = "".join(f"; passed over: {len(paths)} {why}" for why, paths in found.passed_over.items())
            raise ValueError(f"no images or videos in {name}{hint}")
        for item in more:
            other = by_key.setdefault(item.key, item)
            if (item.split, item.row, item.offset) != (other.split, other.row, other.offset):
                by_key[item.key] = replace(other, problem="more than one item has this name")
                found.clashes.append(item.key)
    found.items = [by_key[key] for key in sorted(by_key)]
    return found


def _find(name: str, column: str | None, split: str, found: Found) -> Iterator[Item]:
    path = Path(name)
    if not name:
        raise ValueError("an input is empty; for the folder that you are in name .")
    if name.startswith("dataset:"):
        yield from _in_dataset(name.removeprefix("dataset:"), column, split, found.root)
    elif path.is_dir():
        for file in walk(str(path.resolve()), found.passed_over):
            if file.name.lower().endswith((".tar", ".parquet", *_COMPRESSED)):
                found.passed_over["shards (name them, or a glob of them, to read them)"].append(str(file))
            else:
                yield from _in_file(file, column, found, listed=False)
    elif has_magic(name) and not path.exists():
        for match in matches(name, found.passed_over):
            yield from _in_file(match, column, found, listed=False)
    elif path.is_file():
        yield from _in_file(path, column, found, listed=True)
    else:
        raise ValueError(f"there is no file, folder or match for {name}")


def in_shard(path: Path, key: str, column: str | None) -> Iterator[Item]:
    """The items of a tar shard or a parquet file that has this key."""
    yield from _in_tar(path, key) if path.suffix.lower() == ".tar" else _in_parquet(path, column, key)


def _in_file(path: Path, column: str | None, found: Found, *, listed: bool) -> Iterator[Item]:
    root = found.root or ""
    suffix, key = path.suffix.lower(), key_of(path, root)
    if path.name.lower().endswith(_COMPRESSED):
        problem = "compressed tar shards cannot be read at any place; decompress it"
        yield Item(key=key, file=str(path), problem=problem)
    elif suffix in (".tar", ".parquet"):
        yield from in_shard(path, key, column)
    elif suffix == ".txt" and listed:
        for name in read_list(path):
            file = path.parent / name
            yield Item(key=key_of(file, root), file=str(file), kind=_kind(file.suffix) or "image")
    elif path.name.startswith("._"):
        found.passed_over["macOS's notes on files (._NAME)"].append(str(path))
    elif (kind := _kind(suffix)) and not path.is_file():
        found.passed_over["pipes, sockets and devices"].append(str(path))
    elif kind:
        yield Item(key=key, file=str(path), kind=kind)
    elif listed:
        raise ValueError(
            f"{path} is no picture or video by its name, nor a .txt list, .tar shard or .parquet file; "
            "a picture of any name is read if a .txt list names it"
        )
    elif suffix not in _BESIDE and not path.name.startswith("."):
        found.passed_over[f"{suffix} files" if suffix else "files without a suffix"].append(str(path))


def _kind(suffix: str) -> Literal["image", "video"] | None:
    suffix = suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def _in_tar(path: Path, key: str) -> Iterator[Item]:
    """Members that share a name up to its first dot belong together."""
    pictures: list[tuple[str, tarfile.TarInfo]] = []
    extras: dict[str, list[tuple[str, int, int]]] = {}
    listed = stamp(Item(key=key, file=str(path)))
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                name = f"{folder}/{stem}"
                if not member.isfile() or base.startswith("._"):  # macOS's notes on files
                    continue
                if _kind("." + suffix.rpartition(".")[2]):
                    pictures.append((name, member))
                elif suffix.lower() in _FIELD_SUFFIXES:
                    extras.setdefault(name, []).append((suffix.lower(), member.offset_data, member.size))
            end = archive.offset
        with path.open("rb") as file:
            file.seek(end)
            if file.read(512) != bytes(512):  # tarfile takes a broken header for the end of the archive
                raise tarfile.ReadError("it does not end as an archive does")
    except (tarfile.TarError, OSError, EOFError) as error:
        problem = f"the shard is damaged, only members before the damage are read: {error}"
        yield Item(key=key, file=str(path), problem=problem)
    for name, member in pictures:
        yield Item(
            key=f"{key}/{member.name}",
            file=str(path),
            kind=_kind(Path(member.name).suffix) or "image",
            source=key,
            offset=member.offset_data,
            length=member.size,
            stamp=listed,
            extra=tuple(extras.get(name, ())),
        )


def _in_parquet(path: Path, column: str | None, key: str) -> Iterator[Item]:
    listed = stamp(Item(key=key, file=str(path)))
    try:
        file = _parquet(str(path))
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    except Exception as error:  # pyarrow raises its own errors and OSError for damaged files
        yield Item(key=key, file=str(path), problem=f"{type(error).__name__}: {error}")
        return
    column, kind = _column(file.schema_arrow.names, column, str(path))
    row, listed = 0, listed and f"{listed} {column}"
    for group in range(file.metadata.num_row_groups):
        for index in range(file.metadata.row_group(group).num_rows):
            place = dict(row=(group, index), column=column, source=key, number=row, stamp=listed)
            yield Item(key=f"{key}#{row:09d}", file=str(path), kind=kind, **place)  # type: ignore[arg-type]
            row += 1


def _in_dataset(name: str, column: str | None, split: str, root: str | None) -> Iterator[Item]:
    rows = _dataset(name, split)
    column, kind = _column(list(rows.column_names), column, name)
    source = f"{key_of(os.path.normpath(name), root) if root and os.path.isdir(name) else name}/{split}"
    listed = f"{found} {column}" if (found := getattr(rows, "_fingerprint", None)) else None
    for index in range(len(rows)):
        place = dict(row=(0, index), column=column, split=split, source=source, number=index, stamp=listed)
        yield Item(key=f"{source}#{index:09d}", file=name, kind=kind, **place)  # type: ignore[arg-type]


def _column(names: list[str], column: str | None, where: str) -> tuple[str, Literal["image", "video"]]:
    found = next((name for name in ([column] if column else _COLUMNS) if names.count(name) == 1), None)
    if found is None:
        wanted = repr(column) if column else "one of " + ", ".join(_COLUMNS)
        raise ValueError(f"expected a column {wanted} in {where}, it has {', '.join(names)}; name it with --column")
    return found, "video" if found in ("video", "mp4") else "image"


@lru_cache(maxsize=16)
def _parquet(file: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file)


@lru_cache(maxsize=4)
def _dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("dataset: inputs need the datasets library: pip install datasets") from None
    rows = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, split=split)
    if isinstance(rows, Mapping):
        if split not in rows:
            raise ValueError(f"dataset:{name} has no split {split}; it has {', '.join(rows)}: see --split")
        rows = rows[split]
    undecoded = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    for column, feature in dict(rows.features).items():
        if isinstance(feature, undecoded):
            rows = rows.cast_column(column, type(feature)(decode=False))
    return rows


_reading = Lock()
"""A `ParquetFile` is for one thread at a time, and neighbours of a row group are to wait until it is read, once."""


@lru_cache(maxsize=8)
def _row_group(file: str, group: int) -> Any:
    return _parquet(file).read_row_group(group)


def _row(item: Item) -> Mapping[str, Callable[[], Any]]:
    """By column what reads its value: one that cannot be read is no matter to the others."""
    assert item.row is not None
    group, index = item.row
    with _reading:
        table = _row_group(item.file, group) if item.split is None else _dataset(item.file, item.split)
    if item.split is not None:
        row: Mapping[str, Any] = table[index]
        return {name: partial(row.__getitem__, name) for name in row}
    return {name: column[index].as_py for name, column in zip(table.column_names, table.columns, strict=True)}


def open_item(item: Item) -> BinaryIO:
    """Its bytes as a binary file, to be closed. Raises ValueError and OSError for what cannot be read."""
    if item.problem is None and item.row is None and item.length is None:
        return open_file(item.file)
    return io.BytesIO(read(item))


def read(item: Item) -> bytes:
    """Its bytes. Raises ValueError and OSError for what cannot be read."""
    if item.problem is not None:
        raise ValueError(item.problem)
    if item.row is not None:
        return _bytes_of(_row(item)[item.column or ""](), item)
    with open_file(item.file) as file:
        file.seek(item.offset)
        data = file.read() if item.length is None else file.read(item.length)
    if item.length is not None and len(data) < item.length:
        raise ValueError(f"the shard ends within the file ({len(data)} of {item.length} bytes)")
    return data


def _bytes_of(value: Any, item: Item) -> bytes:
    if isinstance(value, Mapping):  # as the datasets library stores pictures
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return read(Item(key=item.key, file=str(Path(item.file).parent / value)))
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"expected bytes or a path in column {item.column}, got {type(value).__name__}")
    return bytes(value)


def size(item: Item) -> int | None:
    """How many bytes it has, where that is known without reading it; of a row its whole table, which may be another."""
    if item.length is not None:
        return item.length
    if item.split is not None or item.problem is not None:
        return None
    try:
        return Path(item.file).stat().st_size
    except OSError:
        return None


def stamp(item: Item) -> str | None:
    """What is the same as long as its bytes are, without reading them: the size and time of its file, a data set's
    fingerprint. None where there is none. A part has that of the file that was listed, whatever is there by now."""
    if item.source is not None:
        return item.stamp
    try:
        stat = os.stat(item.file)
    except OSError:
        return None
    return f"{stat.st_size} {stat.st_mtime_ns}"


def holds_bytes(item: Item) -> bool:
    """Whether its file holds the bytes themselves, and not a path to them."""
    value = b"" if item.row is None else _row(item)[item.column or ""]()
    return isinstance(value.get("bytes") if isinstance(value, Mapping) else value, bytes | bytearray)


def checksum(file: BinaryIO) -> str:
    """Of all bytes; the file is at its begin before and after."""
    found = 0
    file.seek(0)
    while chunk := file.read(1 << 20):
        found = zlib.crc32(chunk, found)
    file.seek(0)
    return f"{found:08x}"


def fields(item: Item, named: set[str]) -> dict[str, Any]:
    """What a prompt may name, at least what of `named` there is: `name`, `stem`, `folder`, `key`, and metadata.

    Metadata are the other columns of a row, or the keys of a `.json` and the text of a `.txt` (as `txt`) of the same
    name: texts and numbers. They are read only if something else is named: a broken file or column is no matter to
    prompts that do not use it, and of columns that are not named there is nothing but the name.
    """
    path = Path(item.key)
    known: dict[str, Any] = {"name": path.name, "stem": path.stem, "folder": path.parent.name, "key": item.key}
    if item.row is not None:
        columns = _row(item) if named - {"key", "kind"} else {}
        known |= dict.fromkeys(columns.keys() - named, "")
        return known | _said({name: columns[name]() for name in named & columns.keys()})
    if named <= known.keys() | {"kind"}:
        return known
    found: dict[str, Any] = {}
    for suffix, read_text in _beside(item):
        with suppress(FileNotFoundError):
            text = read_text().decode("utf-8-sig")
            if suffix == "txt":
                found["txt"] = text.strip()
            elif isinstance(values := json.loads(text), dict):
                found |= _said(values)
    return found | known


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a prompt can hold: null and NaN stand for nothing, lists and objects are no text."""
    return {name: each for name, each in values.items() if isinstance(each, str | int | float) and each == each}


def _beside(item: Item) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Suffix and bytes of what belongs to a file, or to a member of a tar."""
    if item.length is None:
        for suffix in _FIELD_SUFFIXES:
            yield suffix, partial(read, Item(key=item.key, file=str(Path(item.file).with_suffix("." + suffix))))
    for suffix, offset, length in item.extra:
        yield suffix, partial(read, replace(item, offset=offset, length=length))
