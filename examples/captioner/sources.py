"""Find pictures and videos in folders, globs, lists, tar shards, parquet files and data sets."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import Path
from typing import Literal

from captioner import tables
from captioner.items import METADATA_SUFFIXES, Item, stamp
from captioner.places import PassedOver, key_of, matches, read_list, root_of, walk

# Pillow reads HEIC only with a plugin, yet it is listed: an error record is better than a picture that goes unnoticed.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_COLUMNS = ("image", "img", "picture", "jpg", "jpeg", "png", "webp", "video", "mp4", "bytes", "path", "file_name")
_COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz")
_COMPANION_SUFFIXES = (".caption", ".csv", ".db", ".ini", ".json", ".jsonl", ".md", ".txt", ".xmp")
"""Suffixes of files that often lie beside pictures. They are passed over without a message."""
Kind = Literal["image", "video"]


@dataclass
class Found:
    """The items of all inputs."""

    items: list[Item] = field(default_factory=list)
    root: str | None = None
    passed_over: PassedOver = field(default_factory=lambda: PassedOver(list))
    clashes: list[str] = field(default_factory=list)


def find(inputs: list[str], *, column: str | None = None, split: str = "train", root: str | None = None) -> Found:
    """Find all items of the inputs. Items that share a key are replaced by one item, whose problem says so."""
    found_items = Found(root=root or root_of(inputs))
    item_by_key: dict[str, Item] = {}
    for name in inputs:
        items = list(_find(name, column, split, found_items))
        if not items:
            hint = "".join(f"; passed over: {len(paths)} {why}" for why, paths in found_items.passed_over.items())
            raise ValueError(f"no images or videos in {name}{hint}")
        for item in items:
            other = item_by_key.setdefault(item.key, item)
            if (item.split, item.row, item.offset) != (other.split, other.row, other.offset):
                item_by_key[item.key] = replace(other, problem="more than one item has this name")
                found_items.clashes.append(item.key)
    found_items.items = [item_by_key[key] for key in sorted(item_by_key)]
    return found_items


def _find(name: str, column: str | None, split: str, result: Found) -> Iterator[Item]:
    path = Path(name)
    if not name:
        raise ValueError("an input is empty; to search the current folder, name .")
    if name.startswith("dataset:"):
        yield from _in_dataset(name.removeprefix("dataset:"), column, split, result.root)
    elif path.is_dir():
        for file in walk(str(path.resolve()), result.passed_over):
            if file.name.lower().endswith((".tar", ".parquet", *_COMPRESSED_SUFFIXES)):
                result.passed_over["shards (name them, or a glob of them, to read them)"].append(str(file))
            else:
                yield from _in_file(file, column, result, is_named=False)
    elif has_magic(name) and not path.exists():
        for match in matches(name, result.passed_over):
            yield from _in_file(match, column, result, is_named=False)
    elif path.is_file():
        yield from _in_file(path, column, result, is_named=True)
    elif path.is_symlink():
        raise ValueError(f"{name} is a link to {path.readlink()}, which is not there")
    else:
        raise ValueError(f"there is no file, folder or match for {name}")


def in_shard(path: Path, key: str, column: str | None) -> Iterator[Item]:
    """Yield the items of a tar shard or a parquet file that has this key."""
    yield from _in_tar(path, key) if path.suffix.lower() == ".tar" else _in_parquet(path, column, key)


def _in_file(path: Path, column: str | None, result: Found, *, is_named: bool) -> Iterator[Item]:
    """Yield the items of a file. Files that the user named are never passed over without an error."""
    root = result.root or ""
    suffix = path.suffix.lower()
    kind = _kind(suffix)
    key = key_of(path, root)
    if path.name.lower().endswith(_COMPRESSED_SUFFIXES):
        problem = "compressed tar shards cannot be read at any place; decompress it"
        yield Item(key=key, file=str(path), problem=problem)
    elif suffix in (".tar", ".parquet"):
        yield from in_shard(path, key, column)
    elif suffix == ".txt" and is_named:
        for name in read_list(path):
            file = path.parent / name
            yield Item(key=key_of(file, root), file=str(file), kind=_kind(file.suffix) or "image")
    elif path.name.startswith("._"):
        result.passed_over["macOS's notes on files (._NAME)"].append(str(path))
    elif kind and not path.is_file():
        result.passed_over["pipes, sockets and devices"].append(str(path))
    elif kind:
        yield Item(key=key, file=str(path), kind=kind)
    elif is_named:
        raise ValueError(
            f"{path} is no picture or video by its name, nor a .txt list, .tar shard or .parquet file; "
            "a picture of any name is read if a .txt list names it"
        )
    elif suffix not in _COMPANION_SUFFIXES and not path.name.startswith("."):
        result.passed_over[f"{suffix} files" if suffix else "files without a suffix"].append(str(path))


def _kind(suffix: str) -> Kind | None:
    suffix = suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def _in_tar(path: Path, key: str) -> Iterator[Item]:
    """Yield the pictures and videos of a shard. Members that share a name up to its first dot belong together."""
    pictures: list[tuple[str, tarfile.TarInfo]] = []
    metadata: dict[str, list[tuple[str, int, int]]] = {}
    listed_stamp = stamp(Item(key=key, file=str(path)))
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                sample = f"{folder}/{stem}"
                if not member.isfile() or base.startswith("._"):  # macOS's notes on files
                    continue
                if _kind("." + suffix.rpartition(".")[2]):
                    pictures.append((sample, member))
                elif suffix.lower() in METADATA_SUFFIXES:
                    metadata.setdefault(sample, []).append((suffix.lower(), member.offset_data, member.size))
            end = archive.offset
        with path.open("rb") as file:
            file.seek(end)
            if file.read(512) != bytes(512):  # tarfile takes a broken header for the end of the archive
                raise tarfile.ReadError("it does not end as an archive does")
    except (tarfile.TarError, OSError, EOFError) as error:
        problem = f"the shard is damaged, only members before the damage are read: {error}"
        yield Item(key=key, file=str(path), problem=problem)
    for sample, member in pictures:
        yield Item(
            key=f"{key}/{member.name}",
            file=str(path),
            kind=_kind(Path(member.name).suffix) or "image",
            source=key,
            offset=member.offset_data,
            length=member.size,
            stamp=listed_stamp,
            extra=tuple(metadata.get(sample, ())),
        )


def _in_parquet(path: Path, column: str | None, key: str) -> Iterator[Item]:
    listed_stamp = stamp(Item(key=key, file=str(path)))
    try:
        file = tables.parquet_file(str(path))
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    except Exception as error:  # pyarrow raises its own errors and OSError for damaged files
        yield Item(key=key, file=str(path), problem=f"{type(error).__name__}: {error}")
        return
    column, kind = _column(file.schema_arrow.names, column, str(path))
    row = 0
    for group in range(file.metadata.num_row_groups):
        for index in range(file.metadata.row_group(group).num_rows):
            yield Item(
                key=f"{key}#{row:09d}",
                file=str(path),
                kind=kind,
                row=(group, index),
                column=column,
                source=key,
                number=row,
                stamp=listed_stamp and f"{listed_stamp} {column}",
            )
            row += 1


def _in_dataset(name: str, column: str | None, split: str, root: str | None) -> Iterator[Item]:
    rows = tables.dataset(name, split)
    column, kind = _column(list(rows.column_names), column, name)
    is_folder = root and os.path.isdir(name)
    source = f"{key_of(os.path.normpath(name), root) if root and is_folder else name}/{split}"
    data_fingerprint = getattr(rows, "_fingerprint", None)
    for index in range(len(rows)):
        yield Item(
            key=f"{source}#{index:09d}",
            file=name,
            kind=kind,
            row=(0, index),
            column=column,
            split=split,
            source=source,
            number=index,
            stamp=f"{data_fingerprint} {column}" if data_fingerprint else None,
        )


def _column(names: list[str], column: str | None, place: str) -> tuple[str, Kind]:
    """Choose the column of the pictures: the requested one, or the first known name that occurs once."""
    for name in [column] if column else _COLUMNS:
        if names.count(name) == 1:
            return name, "video" if name in ("video", "mp4") else "image"
    expected = repr(column) if column else "one of " + ", ".join(_COLUMNS)
    raise ValueError(f"expected a column {expected} in {place}, it has {', '.join(names)}; name it with --column")
