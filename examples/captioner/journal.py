"""Keep the records of an output folder: JSON lines, a shard for every process of every start, and the manifest.

Files of records are only added to. The latest record of a picture and prompt counts. A line that a kill or a full disk
tore is passed over, so its item is captioned again.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from captioner.files import encoded, replace_file


@dataclass(frozen=True, kw_only=True)
class Record:
    key: str
    prompt: str
    status: Literal["ok", "error", "outdated"]
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
        return bool(self.caption and self.caption.strip())


_NAMES = frozenset(field.name for field in fields(Record))
SHARDS = "captions-" + "[0-9]" * 5 + "*.jsonl"
"""Pattern of the names of shards."""
Entry = dict[str, Any]
"""Entry of a start in the manifest."""


def json_lines(records: Iterable[Record]) -> bytes:
    return encoded("".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records))


@dataclass(frozen=True, kw_only=True)
class Selection:
    entry: Entry  # of the run's last start
    records: list[Record]  # sorted by key, those of one key in the order of the prompts
    missing: int  # records that are still to be written
    others: Counter[tuple[str, str]]  # by run and prompt: captions of pictures that the records lack


class Journal:
    """The records of an output folder: `captions-00000-00000.jsonl` and so on, by start and process."""

    def __init__(self, folder: Path, start: int = 0) -> None:
        self.folder = folder
        self.start = start  # number of the start that `append` writes for

    def shards(self) -> list[Path]:
        # Shards of earlier versions have no start in their names. They come first.
        return sorted(self.folder.glob(SHARDS), key=lambda shard: (shard.name.count("-"), shard.name))

    def records(self) -> list[Record]:
        """Return the latest record of every picture and prompt, without the outdated ones."""
        latest: dict[tuple[str, str, str], Record] = {}
        for shard in self.shards():
            for record in _read_shard(shard):
                latest[record.run, record.key, record.prompt] = record
        return [record for record in latest.values() if record.status != "outdated"]

    def append(self, process: int, records: Iterable[Record]) -> None:
        data = json_lines(records)
        name = f"captions-{self.start:05d}-{process:05d}.jsonl"
        with (self.folder / name).open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    def select(self, run: str | None = None, prompts: Sequence[str] | None = None) -> Selection:
        """Select the records of a run: by default of the newest one, and of the prompts of its last start.

        Raises ValueError for a run or a prompt that is named and has no records.
        """
        entry = self.newest(run)
        selected_prompts = list(prompts or entry["prompts"])
        selected = []
        others = []
        for record in self.records():
            is_selected = record.run == entry["run"] and record.prompt in selected_prompts
            (selected if is_selected else others).append(record)
        for prompt in set(prompts or ()) - {record.prompt for record in selected}:
            known = dict.fromkeys(record.prompt for record in [*selected, *others] if record.run == entry["run"])
            there = ", ".join(shlex.quote(other) for other in known)
            raise ValueError(f"run {entry['run']} has no records of the prompt {shlex.quote(prompt)}, but of {there}")
        selected.sort(key=lambda record: (record.key, selected_prompts.index(record.prompt)))
        keys = {record.key for record in selected}
        lacking = [record for record in others if record.caption is not None and record.key not in keys]
        return Selection(
            entry=entry | {"prompts": selected_prompts},
            records=selected,
            missing=self._missing(entry["run"], selected_prompts, selected),
            others=Counter((record.run, record.prompt) for record in lacking),
        )

    def _missing(self, run: str, prompts: Sequence[str], records: Sequence[Record]) -> int:
        """Count the records that the last start with each prompt did not write."""
        expected: dict[str, int] = {}
        for entry in self.manifest()["runs"]:
            if entry["run"] == run:
                expected |= entry.get("records_by_prompt", {})
        written = Counter(record.prompt for record in records)
        return sum(max(0, expected.get(prompt, 0) - written[prompt]) for prompt in prompts)

    def newest(self, run: str | None = None) -> Entry:
        """Return the manifest's last entry, or the last one of a run. ValueError if there is none."""
        all_entries = self.manifest()["runs"]
        entries = [entry for entry in all_entries if run in (None, entry["run"])]
        if entries:
            return entries[-1]
        names = ", ".join(dict.fromkeys(entry["run"] for entry in all_entries))
        others = f", but {names}" if names else ""
        which = "no run" if run is None else f"no run {run}"
        raise ValueError(f"{which} has written to {self.folder}{others}")

    def manifest(self) -> dict[str, list[Entry]]:
        path = self.folder / "manifest.json"
        if not path.exists():
            return {"runs": []}
        try:
            manifest: dict[str, list[Entry]] = json.loads(path.read_text(encoding="utf-8"))
            return manifest | {"runs": list(manifest["runs"])}
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{path} is damaged, or no captioning run wrote it ({type(error).__name__}: {error})"
            raise ValueError(f"{reason}: name another output") from None

    def note(self, entry: Entry) -> None:
        """Add a start to the manifest. No other process may be writing."""
        manifest = self.manifest()
        manifest["runs"].append(entry)
        replace_file(self.folder / "manifest.json", encoded(json.dumps(manifest, indent=2) + "\n"))


def _read_shard(shard: Path) -> Iterator[Record]:
    with shard.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                values = json.loads(line)
                record = Record(**{name: values[name] for name in _NAMES & values.keys()})
            except (ValueError, TypeError, AttributeError):  # no record
                continue
            if line.endswith("\n"):  # a torn line may look complete
                yield record
