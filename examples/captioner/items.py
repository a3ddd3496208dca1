"""Read the bytes of pictures and videos, wherever they lie, and the texts that belong to them."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, Literal

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile


_FIELD = re.compile(r"\{(\w+)\}")


def named(prompts: Iterable[str]) -> set[str]:
    return {name for prompt in prompts for name in _FIELD.findall(prompt)}


class UnknownField(ValueError):
    """Report a field of a prompt that an item lacks."""


def fill(prompt: str, fields: Mapping[str, object]) -> str:
    """Replace every `{field}` of a prompt by its value. Braces around anything but a word stay."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise UnknownField(f"the prompt names {{{match[1]}}}; there are {', '.join(sorted(fields))}")
        return str(fields[match[1]])

    return _FIELD.sub(value_of, prompt)


METADATA_SUFFIXES = ("json", "txt")
Value = str | int | float


@dataclass(frozen=True, kw_only=True)
class Item:
    """One picture or video: a file, a member of a tar shard, or a row of a table."""

    key: str  # unique in a run
    file: str  # that holds its bytes
    kind: Literal["image", "video"] = "image"
    offset: int = 0  # in a tar shard
    length: int | None = None  # in a tar shard
    row: tuple[int, int] | None = None  # row group of a table, and index in it
    column: str | None = None  # of its bytes, in a table
    source: str | None = None  # key of the shard or table that it is a part of
    number: int | None = None  # row in its source
    stamp: str | None = None  # of its source's file when the source was listed
    extra: tuple[tuple[str, int, int], ...] = ()  # suffix, offset and length of members that belong to it
    problem: str | None = None  # why it cannot be read at all


def open_item(item: Item) -> BinaryIO:
    """Open the bytes of an item as a binary file, which the caller closes."""
    if item.problem is not None:
        raise ValueError(item.problem)
    if item.row is not None:
        return _open_value(_value_of_row(item), item)
    path = Path(item.file)
    file = path.open("rb")
    if item.length is None:
        return file
    with file:
        file.seek(item.offset)
        data = file.read(item.length)
    if len(data) < item.length:
        raise ValueError(f"the shard ends within the file ({len(data)} of {item.length} bytes)")
    return io.BytesIO(data)


def _open_value(value: object, item: Item) -> BinaryIO:
    if isinstance(value, str):
        return open_item(Item(key=item.key, file=str(Path(item.file).parent / value)))
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes or a path in column {item.column}, got {type(value).__name__}")
    return io.BytesIO(value)


def _value_of_row(item: Item) -> object:
    value = _row_readers(item)[item.column or ""]()
    if isinstance(value, Mapping):  # the form in which the datasets library stores pictures
        return value.get("bytes") or value.get("path")
    return value


_reading = Lock()
"""A `ParquetFile` serves one thread at a time. Readers of one row group wait until it is read, once."""


@lru_cache(maxsize=16)
def parquet_file(file: str) -> ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file)


@lru_cache(maxsize=8)
def row_group(file: str, group: int) -> Table:
    return parquet_file(file).read_row_group(group)


def _row_readers(item: Item) -> Mapping[str, Callable[[], object]]:
    """Return a function for every column of a row, which reads the value: an unreadable one harms no other."""
    assert item.row is not None
    group, index = item.row
    with _reading:
        table = row_group(item.file, group)
    return {name: column[index].as_py for name, column in zip(table.column_names, table.columns, strict=True)}


def size(item: Item) -> int | None:
    """Return the bytes of an item where they are known without reading it. A row has the size of its whole table."""
    if item.length is not None or item.problem is not None:
        return item.length
    try:
        return Path(item.file).stat().st_size
    except OSError:
        return None


def stamp(item: Item) -> str | None:
    """Return a text that is equal as long as an item's bytes are, without reading them; None where there is none.

    It holds size and time of the file. A member or row has the stamp of the file that was listed, even if that was
    replaced since.
    """
    if item.source is not None:
        return item.stamp
    try:
        status = os.stat(item.file)
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns}"


def holds_bytes(item: Item) -> bool:
    """Tell whether an item's file holds its bytes, and not a path to them."""
    return item.row is None or isinstance(_value_of_row(item), bytes)


def checksum(file: BinaryIO) -> str:
    """Compute the CRC-32 of all bytes of a file, and rewind it."""
    crc = 0
    file.seek(0)
    while chunk := file.read(1 << 20):
        crc = zlib.crc32(chunk, crc)
    file.seek(0)
    return f"{crc:08x}"


def fields(item: Item, named: set[str]) -> dict[str, Value]:
    """Return what a prompt may name: `name`, `stem`, `folder`, `key`, and metadata.

    Metadata of a row are its other columns. Metadata of a file are the keys of a `.json` file and the text of a `.txt`
    file (as `txt`) of its name. Only texts and numbers count. They are read only if `named` needs them, so a broken
    file or column harms no other prompt.
    """
    path = Path(item.key)
    by_name: dict[str, Value] = {"name": path.name, "stem": path.stem, "folder": path.parent.name, "key": item.key}
    if item.row is not None:
        readers = _row_readers(item) if named - {"key", "kind"} else {}
        by_name |= dict.fromkeys(readers.keys() - named, "")
        return by_name | _texts_and_numbers({name: readers[name]() for name in named & readers.keys()})
    if named <= by_name.keys() | {"kind"}:
        return by_name
    parts = [(suffix, replace(item, offset=offset, length=length)) for suffix, offset, length in item.extra]
    if item.length is None:
        files = [(suffix, Path(item.file).with_suffix("." + suffix)) for suffix in METADATA_SUFFIXES]
        parts = [(suffix, Item(key=item.key, file=str(file))) for suffix, file in files]
    metadata: dict[str, Value] = {}
    for suffix, part in parts:
        with suppress(FileNotFoundError), open_item(part) as file:
            text = file.read().decode("utf-8-sig")
            if suffix == "txt":
                metadata["txt"] = text.strip()
                continue
            values = json.loads(text)
            if isinstance(values, dict):
                metadata |= _texts_and_numbers(values)
    return metadata | by_name


def _texts_and_numbers(values: Mapping[str, object]) -> dict[str, Value]:
    """Select the values that a prompt can hold: no null, NaN, list or object."""
    return {name: value for name, value in values.items() if isinstance(value, Value) and value == value}
