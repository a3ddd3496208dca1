"""Read parquet files and data sets of the `datasets` library, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile


_reading = Lock()
"""A `ParquetFile` serves one thread at a time. Readers of one row group wait until it is read, once."""


@lru_cache(maxsize=16)
def parquet_file(file: str) -> ParquetFile:
    """Open a parquet file, once."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(file)


@lru_cache(maxsize=4)
def dataset(name: str, split: str) -> Any:
    """Load a split of a data set, once, with pictures and videos undecoded."""
    try:
        import datasets
    except ImportError:
        raise ValueError("dataset: inputs need the datasets library: pip install datasets") from None
    rows = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, split=split)
    if isinstance(rows, Mapping):
        if split not in rows:
            raise ValueError(f"dataset:{name} has no split {split}; it has {', '.join(rows)}: see --split")
        rows = rows[split]
    media_types = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    for column, feature in dict(rows.features).items():
        if isinstance(feature, media_types):
            rows = rows.cast_column(column, type(feature)(decode=False))
    return rows


@lru_cache(maxsize=8)
def _row_group(file: str, group: int) -> Table:
    return parquet_file(file).read_row_group(group)


def row_readers(file: str, group: int, index: int, split: str | None) -> dict[str, Callable[[], object]]:
    """Return a function for every column of a row, which reads the value."""
    with _reading:
        table = _row_group(file, group) if split is None else dataset(file, split)
    if split is not None:
        row = table[index]
        return {name: _reader(row, name) for name in row}
    return {name: column[index].as_py for name, column in zip(table.column_names, table.columns, strict=True)}


def _reader(row: Mapping[str, object], name: str) -> Callable[[], object]:
    return lambda: row[name]


def clear_caches() -> None:
    """Forget all open files and data sets."""
    parquet_file.cache_clear()
    dataset.cache_clear()
    _row_group.cache_clear()
