"""Represent a caption as an object, as a line of JSON and as a row of a parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from captioner.files import part_of

if TYPE_CHECKING:
    from pyarrow import Table

__all__ = ["Record", "json_lines", "read_line", "read_table", "write_table", "write_whole"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One caption, or the error that stands in its place.

    Args:
        key: Name of the picture or video in the run.
        prompt: The prompt, unfilled.
        status: Whether there is a caption.
        caption: The caption; None for an error.
        error: The error; None for a caption.
        width: Upright width of the picture.
        height: Upright height of the picture.
        tokens: Generated tokens.
        bytes: Size of the file, of a row its whole table; None where unknown.
        run: Fingerprint of model and settings.
        asked: The prompt with its fields filled in.
        source: The shard, table or data set that holds the picture.
        row: The row there.
        checksum: CRC-32 of the picture's bytes.
        stamp: Equal as long as the bytes are, without reading them.
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

    @property
    def has_text(self) -> bool:
        """Whether there is a caption, and it is not empty."""
        return bool(self.caption and self.caption.strip())


_NAMES = tuple(field.name for field in fields(Record))
_LATER_NAMES = ("asked", "source", "row", "checksum", "stamp")  # records of the first version lack these
_NUMBERS = ("width", "height", "tokens", "bytes", "row")
_ROWS_PER_READ = 10_000
_LINE = "line"
"""Column of the JSON of records whose strings, as names of files may be, are no valid UTF-8."""


def json_lines(records: Iterable[Record]) -> str:
    """Return a line of JSON for every record.

    Names of files that are no valid UTF-8 hold lone surrogates. Encode the text with `errors="backslashreplace"`, which
    turns them into JSON's own escapes.
    """
    return "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)


def read_line(line: str) -> Record | None:
    """Return the record of a line of JSON; None for another line."""
    try:
        values = json.loads(line)
        return Record(**{name: values[name] for name in _NAMES if name not in _LATER_NAMES or name in values})
    except (ValueError, KeyError, TypeError):
        return None


def write_table(path: Path, records: Sequence[Record]) -> None:
    """Write a parquet file for other programs. Lone surrogates become JSON's escapes. ValueError without pyarrow."""
    _pyarrow().write_table(_table(records), path)


def write_whole(path: Path, groups: Iterable[Sequence[Record]]) -> None:
    """Write a parquet file that `read_table` reads to equal records. If that is interrupted, nothing is written."""
    pq = _pyarrow()
    with part_of(path) as part, pq.ParquetWriter(part, _table_with_lines([]).schema) as writer:
        for records in groups:
            writer.write_table(_table_with_lines(records))


def read_table(path: Path) -> Iterator[Record]:
    """Yield the records of a parquet file that `write_whole` wrote. ValueError and OSError for a damaged one."""
    with _pyarrow().ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_PER_READ):
            for row in batch.to_pylist():
                line = row.pop(_LINE)
                record = Record(**row) if line is None else read_line(line)
                assert record is not None
                yield record


def _table(records: Sequence[Record]) -> Table:
    import pyarrow as pa

    schema = pa.schema([(name, pa.int64() if name in _NUMBERS else pa.string()) for name in _NAMES])
    rows = []
    for record in records:
        values = asdict(record).items()
        rows.append({name: _valid_utf8(value) if isinstance(value, str) else value for name, value in values})
    return pa.Table.from_pylist(rows, schema=schema)


def _table_with_lines(records: Sequence[Record]) -> Table:
    import pyarrow as pa

    lines: list[str | None] = []
    for record in records:
        line = json_lines([record])
        valid_line = _valid_utf8(line)
        lines.append(None if valid_line == line else valid_line)
    return _table(records).append_column(_LINE, pa.array(lines, pa.string()))


def _pyarrow() -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    return pyarrow.parquet


def _valid_utf8(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode()
