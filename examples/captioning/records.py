"""What is known of one caption, as an object, as a line of JSON and as a row of a parquet file; and whole files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from media.files import part_of

__all__ = [
    "Record",
    "json_lines",
    "read_line",
    "read_table",
    "write_table",
    "write_whole",
]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One caption, or why there is none. key and prompt say of what; run and bytes, whether it still holds.

    asked: the prompt with its fields filled in. source and row: the shard or table that it is from, and the row there.
    run: fingerprint of model and settings. bytes: size of the file (of a row's whole table), None where unknown.
    checksum: CRC-32 of the picture's bytes. stamp: what tells without reading them that they are the same.
    tokens: generated.
    """

    key: str
    prompt: str
    status: Literal["ok", "error"]
    caption: str | None = None
    error: str | None = None
    width: int | None = None
    height: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    run: str = ""
    asked: str | None = None
    source: str | None = None
    row: int | None = None
    checksum: str | None = None
    stamp: str | None = None


_NAMES = tuple(field.name for field in fields(Record))
_LATER = ("asked", "source", "row", "checksum", "stamp")  # not in the records of the first version
_NUMBERS = ("width", "height", "tokens", "bytes", "row")
_AT_ONCE = 10_000  # rows that are read
_LINE = "line"
"""Column of files that are read again: the JSON of a record whose strings, as names of files may be, are no UTF-8."""


def json_lines(records: Iterable[Record]) -> str:
    """A line of JSON for every record."""
    # A file name that is no valid UTF-8 holds lone surrogates; whoever encodes this makes JSON's own escapes of them.
    return "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)


def read_line(line: str) -> Record | None:
    """The record of a line of JSON; None for another line."""
    try:
        found = json.loads(line)
        return Record(**{name: found[name] for name in _NAMES if name not in _LATER or name in found})
    except (ValueError, KeyError, TypeError):
        return None


def write_table(path: Path, records: Sequence[Record]) -> None:
    """Writes a parquet file for others. Lone surrogates become JSON's escapes. ValueError without pyarrow."""
    _pyarrow().write_table(_table(records), path)


def write_whole(path: Path, parts: Iterable[Sequence[Record]]) -> None:
    """Writes a parquet file that `read_table` reads to the same records, or none if it is interrupted."""
    pq = _pyarrow()
    with part_of(path) as part, pq.ParquetWriter(part, _exact([]).schema) as writer:
        for records in parts:
            writer.write_table(_exact(records))


def read_table(path: Path) -> Iterator[Record]:
    """The records of a parquet file that `write_whole` wrote. ValueError and OSError for a damaged one."""
    with _pyarrow().ParquetFile(path) as file:
        for batch in file.iter_batches(_AT_ONCE):
            for row in batch.to_pylist():
                line = row.pop(_LINE)
                record = Record(**row) if line is None else read_line(line)
                assert record is not None
                yield record


def _table(records: Sequence[Record]) -> Any:
    import pyarrow as pa

    schema = pa.schema([(name, pa.int64() if name in _NUMBERS else pa.string()) for name in _NAMES])
    rows = [{name: _valid(value) for name, value in asdict(record).items()} for record in records]
    return pa.Table.from_pylist(rows, schema=schema)


def _exact(records: Sequence[Record]) -> Any:
    import pyarrow as pa

    lines = [json_lines([record]) for record in records]
    exact = [None if _valid(line) == line else _valid(line) for line in lines]
    return _table(records).append_column(_LINE, pa.array(exact, pa.string()))


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    return pyarrow.parquet


def _valid(value: Any) -> Any:
    # Parquet's strings are valid UTF-8, names of files need not be.
    return value.encode("utf-8", errors="backslashreplace").decode() if isinstance(value, str) else value
