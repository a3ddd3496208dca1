"""Records on disk: a shard of JSON lines per process, what is done already, the manifest.

A record is one line, written at once. Of a line that was torn by a kill nothing is kept, so it is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

__all__ = ["SHARDS", "Journal", "Record", "Selection", "fingerprint", "json_lines", "lock", "part_of", "replace_file"]

SHARDS = "captions-*.jsonl"


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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The records of one run, sorted by key. prompts, runs: how many others there are, of other prompts and runs."""

    records: list[Record]
    prompts: int
    runs: int


_NAMES = tuple(field.name for field in fields(Record))
_LATER = ("asked", "source", "row", "checksum", "stamp")  # not in the records of the first version


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short name for model and settings: equal settings have equal names, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file or, if it is interrupted, none of it."""
    with part_of(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """A file to write into, that becomes `path` if all goes well. Its name is short, for `path` may be a long one."""
    part = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def lock(folder: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Keeps other runs out of a folder for the length of a with block, however it ends.

    alone: nobody else is in it (then ValueError); else others of the same run may be. Yields what ends being alone.
    Where the file system or the operating system has no locks, nobody is kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        try:
            import fcntl
        except ImportError:  # pragma: no cover, on Windows there is none
            yield lambda: None
            return
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
        return sorted(self.folder.glob(SHARDS))

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

    def records(self) -> Iterator[Record]:
        """All records, in the order of their shards. Lines that are no records (torn ones) are passed over."""
        for shard in self.shards():
            yield from _read(shard)

    def rewrite(self, change: Callable[[Record], Record | None]) -> None:
        """Replaces records or, for None, removes them, so that later ones are the only ones. Nobody may be writing.

        Captions that are removed go to `superseded.jsonl`.
        """
        for shard in self.shards():
            records = list(_read(shard))
            changed = [change(record) for record in records]
            if changed == records:
                continue
            gone = [record for record, now in zip(records, changed, strict=True) if now is None and record.caption]
            if gone:
                with (self.folder / "superseded.jsonl").open("ab") as file:
                    file.write(_encoded(gone))
            replace_file(shard, json_lines(record for record in changed if record is not None))

    def append(self, process: int, records: Iterable[Record]) -> None:
        """Adds records to a process's shard, in one write."""
        data = _encoded(records)
        with (self.folder / f"captions-{process:05d}.jsonl").open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    def select(self, run: str | None = None, *, all_prompts: bool = False) -> Selection:
        """One record per key and prompt of the newest run (or the one named), of the prompts last asked in it.

        Sorted by key; those of one key in the order of the prompts.
        """
        entry = self.newest(run)
        asked = entry.get("prompts")
        found: dict[tuple[str, str], Record] = {}
        others: set[tuple[str, str, str]] = set()
        for record in self.records():
            if record.run == entry["run"] and (all_prompts or asked is None or record.prompt in asked):
                found[record.key, record.prompt] = record
            else:
                others.add((record.run, record.key, record.prompt))
        ranks = {prompt: rank for rank, prompt in enumerate(asked or ())}
        order = sorted(found, key=lambda name: (name[0], ranks.get(name[1], len(ranks)), name[1]))
        of_run = sum(run == entry["run"] for run, _, _ in others)
        return Selection(records=[found[name] for name in order], prompts=of_run, runs=len(others) - of_run)

    def merged(self, run: str | None = None) -> list[Record]:
        """The records of `select`."""
        return self.select(run).records

    def newest(self, run: str | None = None) -> dict[str, Any]:
        """The manifest's last entry, of the run named; ValueError without one."""
        entries = [entry for entry in self.manifest()["runs"] if run in (None, entry["run"])]
        if not entries:
            raise ValueError(f"no run {run or ''} has written to {self.folder}".replace("  ", " "))
        last: dict[str, Any] = entries[-1]
        return last

    def manifest(self) -> dict[str, Any]:
        """What is known of the runs into this folder."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return {"runs": []}
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): mend it, or name another output") from None
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
                yield Record(**{name: found[name] for name in _NAMES if name not in _LATER or name in found})
            except (ValueError, KeyError, TypeError):
                continue


def _encoded(records: Iterable[Record]) -> bytes:
    return json_lines(records).encode("utf-8", errors="backslashreplace")


def json_lines(records: Iterable[Record]) -> str:
    # A file name that is no valid UTF-8 holds lone surrogates; whoever encodes this makes JSON's own escapes of them.
    return "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
