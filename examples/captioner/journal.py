"""Keep the records of an output folder: JSON lines, a shard for every process, and the manifest.

A record is one line, written at once. A line that a kill tore is removed, so its item is captioned again.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from captioner.files import replace_file

if TYPE_CHECKING:
    from pyarrow import Table


@dataclass(frozen=True, kw_only=True)
class Record:
    """One caption, or the error that stands in its place."""

    key: str
    prompt: str
    status: Literal["ok", "error"]
    caption: str | None = None
    error: str | None = None
    width: int | None = None
    height: int | None = None
    tokens: int | None = None
    bytes: int | None = None  # size of the file, of a row its whole table
    run: str = ""  # fingerprint of model and settings
    asked: str | None = None  # the prompt with its fields filled in
    source: str | None = None  # the shard, table or data set that holds the picture
    row: int | None = None
    checksum: str | None = None  # CRC-32 of the picture's bytes
    stamp: str | None = None  # equal as long as the bytes are, without reading them

    @property
    def has_text(self) -> bool:
        """Whether there is a caption, and it is not empty."""
        return bool(self.caption and self.caption.strip())


_NAMES = tuple(field.name for field in fields(Record))
_LATER_NAMES = ("asked", "source", "row", "checksum", "stamp")  # records of the first version lack these
_NUMBERS = ("width", "height", "tokens", "bytes", "row")


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
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install pyarrow") from None
    pq.write_table(_table(records), path)


def _table(records: Sequence[Record]) -> Table:
    import pyarrow as pa

    schema = pa.schema([(name, pa.int64() if name in _NUMBERS else pa.string()) for name in _NAMES])
    rows = []
    for record in records:
        values = asdict(record).items()
        rows.append({name: _valid_utf8(value) if isinstance(value, str) else value for name, value in values})
    return pa.Table.from_pylist(rows, schema=schema)


def _valid_utf8(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode()


SHARDS = "captions-" + "[0-9]" * 5 + ".jsonl"
"""Pattern of the names of shards. `repair` cuts files of these names, so other files must not match."""
SUPERSEDED = "superseded.jsonl"
"""The file of captions that are outdated, or were made anew."""
_BLOCK = 1 << 16  # bytes that are read at a time from the end of a shard
Entry = dict[str, Any]
"""Entry of a run in the manifest."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The records of one run."""

    records: list[Record]  # sorted by key
    prompts: int  # records of other prompts
    runs: int  # records of other runs
    by_prompt: dict[str, int]  # items with captions of an unselected prompt only
    by_run: dict[str, int]  # items with captions of another run only; the run that began last comes first
    missing: int  # records that are still to be written


class Journal:
    """The records of an output folder: `captions-00000.jsonl` and so on, one per process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """Return the files of JSON lines, of this run and of earlier ones with any number of processes."""
        return sorted(self.folder.glob(SHARDS))

    def repair(self) -> None:
        """Cut off lines that a kill tore. No other process may be writing."""
        for shard in self.shards():
            _cut_torn_line(shard)

    def records(self) -> Iterator[Record]:
        """Yield all records, in the order of their shards. Lines that are no records (torn ones) are skipped."""
        if any(self.folder.glob("captions-ray-*")):
            reason = f"{self.folder} holds parquet files that an earlier version wrote on Ray"
            raise ValueError(f"{reason}: merge them with that version, and name another output")
        records = {}  # a cluster may caption a batch twice
        for shard in self.shards():
            for record in _read_shard(shard):
                records[record.run, record.key, record.prompt] = record
        yield from records.values()

    def new_shard(self) -> int:
        """Create the shard of a worker that has no number of its own; return its number."""
        for number in count(len(self.shards())):
            with suppress(FileExistsError):
                (self.folder / f"captions-{number:05d}.jsonl").open("x").close()
                return number
        raise AssertionError

    def rewrite(self, change: Callable[[Record], Record | None]) -> None:
        """Replace records, or remove those for which `change` returns None. No other process may be writing.

        Removed captions are appended to `superseded.jsonl`.
        """
        for shard in self.shards():
            records = list(_read_shard(shard))
            changed_records = self._changed(records, change)
            if changed_records != records:
                replace_file(shard, json_lines(changed_records))

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
        """Select one record per key and prompt, sorted by key; those of one key in the order of the prompts."""
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
        """Count the records that the last starts with these prompts did not write."""
        missing = 0
        remaining = set(counts if prompts is None else prompts)
        for entry in reversed(self.manifest()["runs"]):
            entry_prompts = set(entry.get("prompts") or counts)
            if entry["run"] == run and entry_prompts & remaining:
                for prompt in entry_prompts & remaining:
                    missing += max(0, entry.get("records_by_prompt", {}).get(prompt, 0) - counts.get(prompt, 0))
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
    """Return why a prompt cannot be selected."""
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
