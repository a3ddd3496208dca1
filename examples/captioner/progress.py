"""Count the work of all processes, in small files beside the records: no process waits for another."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from tqdm import tqdm

from captioner.files import replace_file

_WRITE_EVERY = 1.0  # seconds between two files of counts, and two states of a bar on a terminal
_LINE_EVERY = 30.0  # seconds between two lines in a log file
_BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} items [{elapsed}{postfix}]"
_INSTANT = 1e-9


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The work of one process."""

    process: int
    of: int  # items of its share
    of_cost: float
    items: int = 0
    read: int = 0  # items that are decoded, or failed to be
    failed: int = 0
    cost: float = 0.0
    vision: int = 0  # tokens
    text: int = 0  # tokens
    halved: int = 0  # batches that the memory did not hold
    seconds: float = 0.0
    waited: float = 0.0  # seconds in which the model waited for pictures


class Tally(Counter[str]):
    """Counts of one batch, in place of a process's `Progress`."""

    def add(self, **increments: float) -> None:
        """Add to the counts, by their names."""
        self.update(increments)  # type: ignore[arg-type]

    def read(self, items: int) -> None:
        """Ignore decoded items: a batch is counted when it is done."""


class Progress:
    """Count the work of this process. The first process shows the sum of all: a bar, or lines in a log file."""

    def __init__(self, folder: Path, process: int, processes: int, of: int, of_cost: float) -> None:
        self.folder = folder
        self.processes = processes
        self.counts = Counts(process=process, of=of, of_cost=of_cost)
        self._begin = time.perf_counter()
        self._written_at = 0.0
        self._shown_at = 0.0
        self._lock = Lock()
        self._is_first = process == 0
        folder.mkdir(exist_ok=True)
        has_terminal = self._is_first and sys.stderr.isatty()
        self._bar = tqdm(total=of, disable=not has_terminal, bar_format=_BAR)
        self.add()

    def add(self, **increments: float) -> None:
        """Add to the counts, by their names."""
        with self._lock:
            now = time.perf_counter() - self._begin
            sums = {name: getattr(self.counts, name) + value for name, value in increments.items()}
            self.counts = replace(self.counts, **sums, seconds=now)  # type: ignore[arg-type]
            if not increments or now - self._written_at > _WRITE_EVERY:
                self._write(now)

    def read(self, items: int) -> None:
        """Count decoded items, which show that a run works before its first batch is done."""
        self.add(read=items)

    def _write(self, now: float) -> None:
        self._written_at = now
        replace_file(self.folder / f"{self.counts.process:05d}.json", json.dumps(asdict(self.counts)))
        if not self._is_first or not self.counts.of:
            return
        all_counts = read_counts(self.folder, self.processes)
        done = sum(counts.items for counts in all_counts)
        total = sum(counts.of for counts in all_counts)
        if not self._bar.disable:
            self._bar.total = total
            self._bar.n = done
            self._bar.set_postfix_str(state(all_counts), refresh=True)
        elif now - self._shown_at > _LINE_EVERY or not self._shown_at:
            self._shown_at = now
            print(f"{done} of {total} items after {now:.0f} s, {state(all_counts)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the last counts."""
        self._shown_at = 0.0
        self.add()
        self._bar.close()


def state(all_counts: Sequence[Counts]) -> str:
    """Describe the speed and the time left; before the first batch is done, the number of decoded items."""
    seconds = max(counts.seconds for counts in all_counts) or _INSTANT
    cost = sum(counts.cost for counts in all_counts)
    total_cost = sum(counts.of_cost for counts in all_counts)
    if not cost:
        return f"{sum(counts.read for counts in all_counts)} of them decoded for the first batches"
    items = sum(counts.items for counts in all_counts) / seconds
    vision = sum(counts.vision for counts in all_counts) / seconds
    text = sum(counts.text for counts in all_counts) / seconds
    seconds_left = max(0.0, total_cost - cost) * seconds / cost
    return f"{items:.1f} items/s, {vision:.0f} vision and {text:.0f} text tokens/s, about {seconds_left:.0f} s left"


def clear(folder: Path) -> None:
    """Delete the counts of earlier runs."""
    for path in folder.glob("*.json"):
        path.unlink()


def read_counts(folder: Path, processes: int) -> list[Counts]:
    """Read the last counts of the processes, without those that have written none."""
    all_counts = []
    for process in range(processes):
        path = folder / f"{process:05d}.json"
        if path.exists():
            all_counts.append(Counts(**json.loads(path.read_text())))
    return all_counts


def summary(all_counts: list[Counts]) -> str:
    """Describe the work: a line for every process, and one for all."""
    lines = []
    for counts in all_counts:
        line = f"  process {counts.process}: {counts.items} of {counts.of} items in {counts.seconds:.1f} s, "
        line += f"{counts.failed} records failed" + (f", {counts.halved} batches halved" if counts.halved else "")
        lines.append(line)
    seconds = max(counts.seconds for counts in all_counts) or _INSTANT
    items = sum(counts.items for counts in all_counts)
    vision = sum(counts.vision for counts in all_counts)
    text = sum(counts.text for counts in all_counts)
    total_seconds = sum(counts.seconds for counts in all_counts) or _INSTANT
    waited = sum(counts.waited for counts in all_counts) / total_seconds
    lines.append(
        f"  {items} items in {seconds:.1f} s: {items / seconds:.2f} items/s, {vision / seconds:.0f} vision tokens/s, "
        f"{text / seconds:.0f} text tokens/s"
        + (f"; models waited for pictures {waited:.0%} of the time" if waited else "")
    )
    return "\n".join(lines)
