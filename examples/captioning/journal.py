"""Records on disk: a shard of JSON lines per process, what is done already, the merged result, the manifest.

A record is one line, written at once. Of a line that was torn by a kill nothing is kept, so it is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

__all__ = ["Journal", "Record", "export", "fingerprint", "lock", "replace_file"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One caption, or why there is none. key and prompt say of what; run and bytes, whether it still holds.

    run: fingerprint of model and settings. bytes: size of the file, None where unknown. tokens: generated.
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


_NAMES = tuple(field.name for field in fields(Record))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short name for model and settings: equal settings have equal names, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file or, if it is interrupted, none of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    part.replace(path)


@contextmanager
def lock(folder: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Keeps other runs out of a folder for the length of a with block, however it ends.

    alone: nobody else is in it (then ValueError); else others of the same run may be. Yields what ends being alone.
    Where the file system or the operating system has no locks, nobody is kept out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # pragma: no cover, on Windows there is none
        yield lambda: None
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {folder}; wait for it, or name another output") from None
        except OSError:
            yield lambda: None
        else:
            yield lambda: fcntl.flock(file, fcntl.LOCK_SH)


class Journal:
    """The records of an output folder: `captions-00000.jsonl` and so on, one per process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """The shards there are, of this run and of earlier ones with any number of processes."""
        return sorted(self.folder.glob("captions-*.jsonl"))

    def repair(self) -> None:
        """Cuts off lines that were torn by a kill. Nobody may be writing."""
        for shard in self.shards():
            with shard.open("rb+") as file:
                end = file.seek(0, 2)
                while end:
                    start = max(0, end - 65536)
                    file.seek(start)
                    found = file.read(end - start).rfind(b"\n")
                    end = start + found + 1 if found >= 0 else start
                    if found >= 0:
                        break
                file.truncate(end)

    def clear(self) -> None:
        """Removes all records."""
        for shard in self.shards():
            shard.unlink()

    def records(self) -> Iterator[Record]:
        """All records, in the order of their shards. Lines that are no records (torn ones) are passed over."""
        for shard in self.shards():
            yield from _read(shard)

    def drop(self, stale: Callable[[Record], bool]) -> None:
        """Removes records, so that what replaces them is the only one. Nobody may be writing."""
        for shard in self.shards():
            records = list(_read(shard))
            kept = [record for record in records if not stale(record)]
            if len(kept) < len(records):
                replace_file(shard, _lines(kept))

    def append(self, process: int, records: Iterable[Record]) -> None:
        """Adds records to a process's shard, in one write."""
        data = _lines(records).encode("utf-8", errors="backslashreplace")
        with (self.folder / f"captions-{process:05d}.jsonl").open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    def merged(self, run: str | None = None) -> list[Record]:
        """One record per key and prompt of the newest run (or the one named), sorted by key."""
        run = run or self.manifest()["runs"][-1]["run"]
        found = {(record.key, record.prompt): record for record in self.records() if record.run == run}
        return [found[name] for name in sorted(found)]

    def manifest(self) -> dict[str, Any]:
        """What is known of the runs into this folder."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return {"runs": []}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def note(self, entry: Mapping[str, Any]) -> None:
        """Adds a run to the manifest."""
        manifest = self.manifest()
        manifest["runs"].append(dict(entry))
        replace_file(self.folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _read(shard: Path) -> Iterator[Record]:
    with shard.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):  # whole as it may look, `repair` will cut it off
                return
            try:
                found = json.loads(line)
                yield Record(**{name: found[name] for name in _NAMES})
            except (ValueError, KeyError, TypeError):
                continue


def _lines(records: Iterable[Record]) -> str:
    # A file name that is no valid UTF-8 holds lone surrogates; whoever encodes this makes JSON's own escapes of them.
    return "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)


def export(records: list[Record], path: Path) -> None:
    """Writes merged records as JSON lines or parquet, by the suffix, or as text files into a folder that is there.

    Raises ValueError for another suffix, and if two items would have the same text file or one outside of the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        for file, captions in _texts(records, path).items():
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, "\n".join(captions) + "\n")
    elif path.suffix == ".jsonl":
        replace_file(path, _lines(records))
    elif path.suffix == ".parquet":
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
        types = {int: pa.int64(), str: pa.string()}
        kinds = {"width": int, "height": int, "tokens": int, "bytes": int}
        schema = pa.schema([(name, types[kinds.get(name, str)]) for name in _NAMES])
        part = path.with_name(f".{path.name}.{os.getpid()}")
        rows = [{name: _valid(value) for name, value in asdict(record).items()} for record in records]
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), part)
        part.replace(path)
    else:
        raise ValueError(f"expected a folder, or a name that ends in .jsonl or .parquet, got {path}")


def _valid(value: Any) -> Any:
    # Parquet's strings are valid UTF-8, names of files need not be.
    return value.encode("utf-8", errors="backslashreplace").decode() if isinstance(value, str) else value


def _texts(records: Iterable[Record], folder: Path) -> dict[Path, list[str]]:
    """The captions of every item, under the name of a text file beside it."""
    keys: dict[Path, str] = {}
    texts: dict[Path, list[str]] = {}
    for record in records:
        if record.caption is None:
            continue
        file = (folder / record.key).with_suffix(".txt")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{record.key!r} is not within {folder}")
        if keys.setdefault(file, record.key) != record.key:
            raise ValueError(f"the captions of {keys[file]!r} and {record.key!r} would both be {file}")
        texts.setdefault(file, []).append(record.caption)
    return texts
