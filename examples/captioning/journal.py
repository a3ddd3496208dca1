"""Records on disk: a shard of JSON lines per process, parquet files of a cluster, what is done already, the manifest.

A record is one line, written at once. Of a line that was torn by a kill nothing is kept, so it is written again.
A cluster writes a parquet file per batch into a folder of its run, whole, under the batch's number: written twice it is
the same one. In the end, or before the next run, they become one file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from media.files import replace_file

from captioning.records import Record, json_lines, read_line, read_table, write_whole

__all__ = [
    "SHARDS",
    "Batches",
    "Journal",
    "Record",
    "Selection",
    "json_lines",
]

_FOLDERS = "captions-ray-" + "[0-9]" * 5
SHARDS = ("captions-" + "[0-9]" * 5 + ".jsonl", _FOLDERS + ".parquet")
"""No other names: what is taken for a shard is repaired."""
_ROWS = 50_000  # records in a row group


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The records of one run, sorted by key. prompts, runs: how many others there are, of other prompts and runs."""

    records: list[Record]
    prompts: int
    runs: int


class Batches:
    """The records of a run on a cluster while it goes on: a folder with a parquet file for every batch.

    Its file, of the same name, has them all. Once that is there the folder is nothing but waste.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder.with_suffix(".parquet")

    @classmethod
    def of(cls, output: Path) -> list[Batches]:
        """Those of all runs into a folder, the oldest first."""
        files = {path.with_suffix("") for path in output.glob(_FOLDERS + ".parquet")}
        return [cls(path) for path in sorted(files | set(output.glob(_FOLDERS)))]

    @classmethod
    def new(cls, output: Path) -> Batches:
        """One more, in a folder of a number that none had."""
        number = max((int(each.folder.name.rpartition("-")[2]) for each in cls.of(output)), default=-1) + 1
        found = cls(output / f"captions-ray-{number:05d}")
        found.folder.mkdir()
        return found

    def append(self, batch: int, records: Sequence[Record]) -> None:
        """Writes the records of a batch, in place of any that it has."""
        write_whole(self._name(batch), [records])

    def read(self, batch: int) -> list[Record] | None:
        """The records of a batch; None if it has none yet."""
        path = self._name(batch)
        return list(read_table(path)) if path.exists() else None

    def _name(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.parquet"

    def records(self) -> Iterator[Record]:
        """All of them, each once."""
        for path in [self.file] if self.file.exists() else sorted(self.folder.glob("*.parquet")):
            yield from read_table(path)

    def replace(self, records: Iterable[Record]) -> None:
        """Writes the file that stands for all batches. Nobody may be writing."""
        write_whole(self.file, _groups(iter(records)))

    def fold(self) -> None:
        """Makes one file of the batches. Nobody may be writing."""
        if self.folder.exists():
            if not self.file.exists() and any(self.folder.glob("*.parquet")):
                self.replace(self.records())
            shutil.rmtree(self.folder, ignore_errors=True)


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _ROWS)):
        yield group


class Journal:
    """The records of an output folder: `captions-00000.jsonl` and so on, one per process, and `Batches` of clusters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """The JSON lines there are, of this run and of earlier ones with any number of processes."""
        return sorted(self.folder.glob(SHARDS[0]))

    def repair(self) -> None:
        """Cuts off lines that were torn by a kill, and folds what clusters left. Nobody may be writing."""
        for batches in Batches.of(self.folder):
            batches.fold()
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
        for batches in Batches.of(self.folder):
            yield from batches.records()

    def rewrite(self, change: Callable[[Record], Record | None]) -> None:
        """Replaces records or, for None, removes them, so that later ones are the only ones. Nobody may be writing.

        Captions that are removed go to `superseded.jsonl`.
        """
        parts = [(_read(shard), partial(_replace, shard)) for shard in self.shards()]
        parts += [(batches.records(), batches.replace) for batches in Batches.of(self.folder)]
        for part, write in parts:
            records = list(part)
            changed = [change(record) for record in records]
            if changed == records:
                continue
            gone = [record for record, now in zip(records, changed, strict=True) if now is None and record.caption]
            if gone:
                with (self.folder / "superseded.jsonl").open("ab") as file:
                    file.write(_encoded(gone))
            write([record for record in changed if record is not None])

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
            return found | {"runs": list(found["runs"])}
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is damaged, or none of these runs ({reason}): name another output") from None

    def begin(self, entry: Mapping[str, Any], change: Callable[[Record], Record | None]) -> None:
        """Makes the folder ready for a run: repaired, with the records that `rewrite` makes of those there are, noted.

        Nobody may be writing.
        """
        self.repair()
        self.rewrite(change)
        self.note(entry)

    def note(self, entry: Mapping[str, Any], *, instead: bool = False) -> None:
        """Adds a run to the manifest, or puts it in the place of the last one."""
        manifest = self.manifest()
        if instead:
            manifest["runs"].pop()
        manifest["runs"].append(dict(entry))
        replace_file(self.folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _read(shard: Path) -> Iterator[Record]:
    with shard.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):  # whole as it may look, `repair` will cut it off
                return
            if (record := read_line(line)) is not None:
                yield record


def _replace(shard: Path, records: Iterable[Record]) -> None:
    replace_file(shard, json_lines(records))


def _encoded(records: Iterable[Record]) -> bytes:
    return json_lines(records).encode("utf-8", errors="backslashreplace")
