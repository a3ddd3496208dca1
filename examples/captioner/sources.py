"""Find pictures and videos in folders, lists, tar shards and parquet files."""

from __future__ import annotations

import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from captioner.items import METADATA_SUFFIXES, Item, parquet_file, stamp

# Pillow reads HEIC only with a plugin, yet it is listed: an error record is better than a picture that goes unnoticed.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_COLUMNS = ("image", "img", "picture", "jpg", "jpeg", "png", "webp", "video", "mp4", "bytes", "path", "file_name")
_COMPANION_SUFFIXES = (".caption", ".csv", ".db", ".ini", ".json", ".jsonl", ".md", ".txt", ".xmp")
"""Suffixes of files that often lie beside pictures. They are passed over without a message."""
Kind = Literal["image", "video"]


@dataclass
class Found:
    items: list[Item] = field(default_factory=list)
    root: str = ""
    passed_over: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by reason
    clashes: list[str] = field(default_factory=list)


def find(inputs: list[str], *, column: str | None = None, root: str | None = None) -> Found:
    """Find all items of the inputs. Items that share a key are replaced by one item, whose problem says so."""
    found_items = Found(root=root or os.path.commonpath([_folder_of(Path(name)) for name in inputs]))
    item_by_key: dict[str, Item] = {}
    for name in inputs:
        items = list(_find(name, column, found_items))
        if not items:
            hint = "".join(f"; passed over: {len(paths)} {why}" for why, paths in found_items.passed_over.items())
            raise ValueError(f"no images or videos in {name}{hint}")
        for item in items:
            other = item_by_key.setdefault(item.key, item)
            if (item.row, item.offset) != (other.row, other.offset):
                item_by_key[item.key] = replace(other, problem="more than one item has this name")
                found_items.clashes.append(item.key)
    found_items.items = [item_by_key[key] for key in sorted(item_by_key)]
    return found_items


_real_folder = cache(os.path.realpath)  # the folder of every picture is looked up


def key_of(path: str | Path, root: str) -> str:
    """Return the path of a file relative to the root: different for every file, equal for all spellings of one."""
    folder = _real_folder(os.path.join(os.getcwd(), os.path.dirname(path)))
    real = os.path.join(folder, os.path.basename(path))
    return os.path.relpath(real, root)


def _folder_of(path: Path) -> str:
    if path.is_dir():
        return os.path.realpath(path)
    folder = os.path.realpath(path.parent)
    if path.suffix.lower() != ".txt" or not path.is_file():
        return folder
    file_folders = {os.path.realpath((path.parent / line).parent) for line in _read_list(path)}
    common_folder = os.path.commonpath(file_folders or {folder})
    return folder if Path(common_folder).is_relative_to(folder) else common_folder


def _read_list(path: Path) -> Iterator[str]:
    """Yield the lines of a list of paths. Names may hold bytes that are no UTF-8, and other line ends."""
    for line in path.read_bytes().decode("utf-8-sig", errors="surrogateescape").split("\n"):
        if line.strip():
            yield line.strip()


def _walk(folder: str, found_items: Found) -> Iterator[Path]:
    """Yield all files below a folder. Linked folders are not searched, since links may lead in circles."""

    def pass_over(error: OSError) -> None:
        found_items.passed_over[f"unreadable folders ({error.strerror})"].append(str(error.filename))

    for current, folders, names in os.walk(folder, onerror=pass_over):
        folders.sort()
        links = [os.path.join(current, name) for name in folders if os.path.islink(os.path.join(current, name))]
        if links:
            found_items.passed_over["linked folders (name them to search them)"] += links
        for name in sorted(names):
            yield Path(current, name)


def _find(name: str, column: str | None, found_items: Found) -> Iterator[Item]:
    path = Path(name)
    if not name:
        raise ValueError("an input is empty; to search the current folder, name .")
    if path.is_dir():
        for file in _walk(os.path.realpath(path), found_items):
            if file.suffix.lower() in (".tar", ".parquet"):
                found_items.passed_over["shards (name them to read them)"].append(str(file))
            else:
                yield from _in_file(file, column, found_items, is_named=False)
    elif path.is_file():
        yield from _in_file(path, column, found_items, is_named=True)
    elif path.is_symlink():
        raise ValueError(f"{name} is a link to {path.readlink()}, which is not there")
    else:
        raise ValueError(f"there is no file or folder {name}")


def _in_file(path: Path, column: str | None, found_items: Found, *, is_named: bool) -> Iterator[Item]:
    """Yield the items of a file. Files that the user named are never passed over without an error."""
    suffix = path.suffix.lower()
    kind = _kind(suffix)
    key = key_of(path, found_items.root)
    if suffix == ".tar":
        yield from _in_tar(path, key)
    elif suffix == ".parquet":
        yield from _in_parquet(path, column, key)
    elif suffix == ".txt" and is_named:
        for name in _read_list(path):
            file = path.parent / name
            yield Item(key=key_of(file, found_items.root), file=str(file), kind=_kind(file.suffix) or "image")
    elif path.name.startswith("._"):
        found_items.passed_over["macOS's notes on files (._NAME)"].append(str(path))
    elif kind and not path.is_file():
        found_items.passed_over["links to nowhere, pipes, sockets and devices"].append(str(path))
    elif kind:
        yield Item(key=key, file=str(path), kind=kind)
    elif is_named:
        raise ValueError(
            f"{path} is no picture or video by its name, nor a .txt list, an uncompressed .tar shard or a .parquet "
            "file; a picture of any name is read if a .txt list names it"
        )
    elif suffix not in _COMPANION_SUFFIXES and not path.name.startswith("."):
        found_items.passed_over[f"{suffix} files" if suffix else "files without a suffix"].append(str(path))


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
        file = parquet_file(str(path))
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    except Exception as error:  # pyarrow raises its own errors and OSError for damaged files
        yield Item(key=key, file=str(path), problem=f"{type(error).__name__}: {error}")
        return
    column, kind = _column(file.schema_arrow.names, column, str(path))
    number = 0
    for group in range(file.metadata.num_row_groups):
        for index in range(file.metadata.row_group(group).num_rows):
            yield Item(
                key=f"{key}#{number:09d}",
                file=str(path),
                kind=kind,
                row=(group, index),
                column=column,
                source=key,
                number=number,
                stamp=listed_stamp and f"{listed_stamp} {column}",
            )
            number += 1


def _column(names: list[str], column: str | None, place: str) -> tuple[str, Kind]:
    """Choose the column of the pictures: the requested one, or the first known name that occurs once."""
    for name in [column] if column else _COLUMNS:
        if names.count(name) == 1:
            return name, "video" if name in ("video", "mp4") else "image"
    expected = repr(column) if column else "one of " + ", ".join(_COLUMNS)
    raise ValueError(f"expected a column {expected} in {place}, it has {', '.join(names)}; name it with --column")
