"""Keep the records of an output folder: JSON lines per process, parquet files of a cluster, and the manifest.

A record is one line, written at once. A line that a kill tore is removed, so its item is captioned again.
A cluster writes a parquet file per batch into a folder of its run, under the batch's number: written twice, a batch is
there once. At the end of the run, or before the next one, the files become one file.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from captioner.files import replace_file
from captioner.records import Record, json_lines, read_line, read_table, write_whole

__all__ = ["SHARDS", "SUPERSEDED", "Batches", "Entry", "Journal", "Record", "Selection", "json_lines"]

_RAY_FOLDERS = "captions-ray-" + "[0-9]" * 5
SHARDS = ("captions-" + "[0-9]" * 5 + ".jsonl", _RAY_FOLDERS + ".parquet")
"""Patterns of the names of shards. `repair` cuts files of these names, so other files must not match."""
SUPERSEDED = "superseded.jsonl"
"""The file of captions that are outdated, or were made anew."""
_ROWS_PER_GROUP = 50_000
_BLOCK = 1 << 16  # bytes that are read at a time from the end of a shard
Entry = dict[str, Any]
"""Entry of a run in the manifest."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The records of one run.

    Args:
        records: The records, sorted by key.
        prompts: How many records of the run are not selected, since they answer other prompts.
        runs: How many records belong to other runs.
        by_prompt: How many items have captions of an unselected prompt of the run only, by that prompt.
        by_run: How many items have captions of another run only, by its name; the run that began last comes first.
        missing: How many records of the prompts are still to be written.
    """

    records: list[Record]
    prompts: int
    runs: int
    by_prompt: dict[str, int]
    by_run: dict[str, int]
    missing: int


class Batches:
    """The records of a cluster's run while it goes on: a folder with a parquet file for every batch.

    In the end one file of the same name holds them all, and the folder is no longer needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder.with_suffix(".parquet")

    @classmethod
    def of(cls, output: Path) -> list[Batches]:
        """Return the batches of all runs into a folder, the oldest run first."""
        folders = {path.with_suffix("") for path in output.glob(_RAY_FOLDERS + ".parquet")}
        folders |= set(output.glob(_RAY_FOLDERS))
        return [cls(folder) for folder in sorted(folders)]

    @classmethod
    def new(cls, output: Path) -> Batches:
        """Create the folder of a new run, under the next number."""
        numbers = [int(batches.folder.name.rpartition("-")[2]) for batches in cls.of(output)]
        batches = cls(output / f"captions-ray-{max(numbers, default=-1) + 1:05d}")
        batches.folder.mkdir()
        return batches

    def append(self, batch: int, records: Sequence[Record]) -> None:
        """Write the records of a batch. They replace records of an earlier try."""
        write_whole(self._path(batch), [records])

    def read(self, batch: int) -> list[Record] | None:
        """Return the records of a batch; None if it has none yet."""
        path = self._path(batch)
        return list(read_table(path)) if path.exists() else None

    def _path(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.parquet"

    def records(self) -> Iterator[Record]:
        """Yield all records, once."""
        for path in [self.file] if self.file.exists() else sorted(self.folder.glob("*.parquet")):
            yield from read_table(path)

    def replace(self, records: Iterable[Record]) -> None:
        """Write the file that stands for all batches. No other process may be writing."""
        write_whole(self.file, _groups(iter(records)))

    def fold(self) -> None:
        """Make one file of the batches. No other process may be writing."""
        if self.folder.exists():
            if not self.file.exists() and any(self.folder.glob("*.parquet")):
                self.replace(self.records())
            shutil.rmtree(self.folder, ignore_errors=True)


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    group = list(islice(records, _ROWS_PER_GROUP))
    while group:
        yield group
        group = list(islice(records, _ROWS_PER_GROUP))


class Journal:
    """The records of an output folder: `captions-00000.jsonl` and so on, one per process, and `Batches` of clusters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """Return the files of JSON lines, of this run and of earlier ones with any number of processes."""
        return sorted(self.folder.glob(SHARDS[0]))

    def repair(self) -> None:
        """Cut off lines that a kill tore, and fold the batches of clusters. No other process may be writing."""
        for batches in Batches.of(self.folder):
            batches.fold()
        for shard in self.shards():
            _cut_torn_line(shard)

    def records(self) -> Iterator[Record]:
        """Yield all records, in the order of their shards. Lines that are no records (torn ones) are skipped."""
        for shard in self.shards():
            yield from _read_shard(shard)
        for batches in Batches.of(self.folder):
            yield from batches.records()

    def rewrite(self, change: Callable[[Record], Record | None]) -> None:
        """Replace records, or remove those for which `change` returns None. No other process may be writing.

        Removed captions are appended to `superseded.jsonl`.
        """
        for shard in self.shards():
            records = list(_read_shard(shard))
            changed_records = self._changed(records, change)
            if changed_records != records:
                replace_file(shard, json_lines(changed_records))
        for batches in Batches.of(self.folder):
            records = list(batches.records())
            changed_records = self._changed(records, change)
            if changed_records != records:
                batches.replace(changed_records)

    def _changed(self, records: Sequence[Record], change: Callable[[Record], Record | None]) -> list[Record]:
        changed_records = []
        removed_captions = []
        for record in records:
            changed = change(record)
            if changed is not None:
                changed_records.append(changed)
            elif record.caption:
                removed_captions.append(record)
        if removed_captions:
            with (self.folder / SUPERSEDED).open("ab") as file:
                file.write(_encoded(removed_captions))
        return changed_records

    def append(self, process: int, records: Iterable[Record]) -> None:
        """Add records to the shard of a process, in one write."""
        data = _encoded(records)
        with (self.folder / f"captions-{process:05d}.jsonl").open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    def select(
        self, run: str | None = None, *, named: Sequence[str] | None = None, all_prompts: bool = False
    ) -> Selection:
        """Select one record per key and prompt, sorted by key; those of one key in the order of the prompts.

        Args:
            run: Name of a run, by default the newest one.
            named: Prompts to select, by default those of the run's last start.
            all_prompts: Select all prompts.

        Raises:
            ValueError: There is no such run, or it has no records of a named prompt.
        """
        entry = self.newest(run)
        run_name = entry["run"]
        prompts = named or entry.get("prompts")
        by_name: dict[tuple[str, str], Record] = {}
        unselected: set[tuple[str, str, str]] = set()
        prompt_keys: dict[str, set[str]] = {}  # keys of captions by an unselected prompt
        run_keys: dict[str, set[str]] = {}  # keys of captions by the name of another run
        for record in self.records():
            has_prompt = all_prompts or prompts is None or record.prompt in prompts
            if record.run == run_name and has_prompt:
                by_name[record.key, record.prompt] = record
                continue
            unselected.add((record.run, record.key, record.prompt))
            if record.caption is not None and record.run == run_name:
                prompt_keys.setdefault(record.prompt, set()).add(record.key)
            elif record.caption is not None and (has_prompt or not named):
                run_keys.setdefault(record.run, set()).add(record.key)
        others = Counter(prompt for name, _, prompt in unselected if name == run_name)
        counts = others + Counter(prompt for _, prompt in by_name)
        for prompt in named or ():
            if not counts[prompt]:
                raise ValueError(_without(prompt, run_name, list(counts), list(run_keys)))
        ranks = {prompt: rank for rank, prompt in enumerate(prompts or ())}
        order = sorted(by_name, key=lambda name: (name[0], ranks.get(name[1], len(ranks)), name[1]))
        keys = {key for key, _ in by_name}
        last_starts = {start["run"]: index for index, start in enumerate(self.manifest()["runs"])}
        newest_first = sorted(run_keys, key=lambda name: last_starts.get(name, -1), reverse=True)
        return Selection(
            records=[by_name[name] for name in order],
            prompts=others.total(),
            runs=len(unselected) - others.total(),
            by_prompt=_more_than(keys, prompt_keys),
            by_run=_more_than(keys, {name: run_keys[name] for name in newest_first}),
            missing=self._missing(run_name, prompts, counts),
        )

    def _missing(self, run: str, prompts: Sequence[str] | None, counts: Mapping[str, int]) -> int:
        """Count the records that the last starts with these prompts did not write.

        Args:
            run: Name of the run.
            prompts: The prompts; None for all.
            counts: How many records the run has, by prompt.
        """
        missing = 0
        remaining = set(counts if prompts is None else prompts)
        for entry in reversed(self.manifest()["runs"]):
            entry_prompts = set(entry.get("prompts") or counts)
            if entry["run"] == run and entry_prompts & remaining:
                if "records_by_prompt" in entry:
                    expected = entry["records_by_prompt"]
                    for prompt in entry_prompts & remaining:
                        missing += max(0, expected.get(prompt, 0) - counts.get(prompt, 0))
                else:  # a manifest of version 0.1
                    written = sum(counts.get(prompt, 0) for prompt in entry_prompts)
                    missing += max(0, entry.get("records", 0) - written)
                remaining -= entry_prompts
        return missing

    def can_go_on(self, entry: Entry) -> bool:
        """Tell whether a command can go on with a run. After a later `--overwrite` every command begins from that."""
        last_entry = self.newest()
        return bool(_times_anew(entry) >= _times_anew(last_entry))

    def merged(self, run: str | None = None) -> list[Record]:
        """Return the records of `select`."""
        return self.select(run).records

    def newest(self, run: str | None = None) -> Entry:
        """Return the manifest's last entry, or the last one of a run. ValueError if there is none."""
        all_entries = self.manifest()["runs"]
        entries = [entry for entry in all_entries if run in (None, entry["run"])]
        if not entries:
            names = ", ".join(dict.fromkeys(entry["run"] for entry in all_entries))
            others = f", but {names}" if names else ""
            raise ValueError(f"no run {run or ''} has written to {self.folder}".replace("  ", " ") + others)
        newest: Entry = entries[-1]
        return newest

    def manifest(self) -> dict[str, list[Entry]]:
        """Read the entries of all runs into this folder."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return {"runs": []}
        try:
            manifest: dict[str, list[Entry]] = json.loads(path.read_text(encoding="utf-8"))
            return manifest | {"runs": list(manifest["runs"])}
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path} is damaged, or no captioning run wrote it ({reason}): name another output"
            ) from None

    def begin(self, entry: Entry, change: Callable[[Record], Record | None]) -> None:
        """Repair the folder, rewrite its records and add a run to the manifest. No other process may be writing."""
        self.repair()
        self.rewrite(change)
        self.note(entry)

    def note(self, entry: Entry, *, instead: bool = False) -> None:
        """Add a run to the manifest, or with `instead` replace the last one."""
        manifest = self.manifest()
        if instead:
            manifest["runs"].pop()
        manifest["runs"].append(entry)
        replace_file(self.folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _times_anew(entry: Entry) -> int:
    """Return how often `--overwrite` had begun another run in the folder when a run began."""
    return int(entry.get("settings", {}).get("again", 0))


def _more_than(keys: set[str], others: Mapping[str, set[str]]) -> dict[str, int]:
    """Count the keys that only others have, by the name of the other; without names that have none."""
    return {name: len(other_keys - keys) for name, other_keys in others.items() if other_keys - keys}


def _without(prompt: str, run: str, prompts: Sequence[str], runs: Sequence[str]) -> str:
    """Return why a prompt cannot be selected.

    Args:
        prompt: The prompt.
        run: Name of the run that has no records of it.
        prompts: The prompts of that run.
        runs: Names of runs that have captions of the prompt.
    """
    own_prompts = f"; it has {', '.join(shlex.quote(other) for other in prompts)}" if prompts else ""
    elsewhere = f"; --run {runs[0]} has" if runs else ""
    return f"run {run} has no records of the prompt {shlex.quote(prompt)}{own_prompts}{elsewhere}"


def _cut_torn_line(shard: Path) -> None:
    """Truncate a file behind its last line end, searching from the end."""
    with shard.open("rb+") as file:
        end = file.seek(0, 2)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            line_end = file.read(end - start).rfind(b"\n")
            if line_end >= 0:
                end = start + line_end + 1
                break
            end = start
        file.truncate(end)


def _read_shard(shard: Path) -> Iterator[Record]:
    with shard.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):  # it may look complete, but `repair` will cut it off
                return
            record = read_line(line)
            if record is not None:
                yield record


def _encoded(records: Iterable[Record]) -> bytes:
    return json_lines(records).encode("utf-8", errors="backslashreplace")
