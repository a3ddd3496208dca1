"""Counts of all processes, through small files beside the records: nobody waits for anybody."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from media.files import replace_file
from tqdm import tqdm

__all__ = ["Counts", "Progress", "Tally", "clear", "read_counts", "summary"]

_EVERY, _LINE_EVERY = 1.0, 30.0  # seconds; on a terminal, and in a log file


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one process has done. items: of `of`. failed: records without a caption. cost: of `of_cost`.
    read: items that are decoded, or could not be.

    vision, text: tokens. seconds: since it began to caption; waited: of them, those in which the model had no pictures.
    halved: batches that the memory did not hold.
    """

    process: int
    of: int
    of_cost: float
    items: int = 0
    read: int = 0
    failed: int = 0
    cost: float = 0.0
    vision: int = 0
    text: int = 0
    halved: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class Tally(Counter[str]):
    """Counts of one batch, in place of a process's `Progress`."""

    def add(self, **more: float) -> None:
        """Add to the counts, by their names."""
        self.update(more)  # type: ignore[arg-type]

    def read(self, items: int) -> None:
        """What is decoded is nothing done."""


class Progress:
    """Counts of this process, written at most once a second; the first process shows those of all.

    On a terminal as a bar, in a log file as a line twice a minute.
    """

    def __init__(self, folder: Path, process: int, processes: int, of: int, of_cost: float) -> None:
        self.folder, self.processes = folder, processes
        self.counts = Counts(process=process, of=of, of_cost=of_cost)
        self._begun, self._written, self._shown = time.perf_counter(), 0.0, 0.0
        self._lock = Lock()
        self._first = process == 0
        folder.mkdir(exist_ok=True)
        on_terminal = self._first and sys.stderr.isatty()
        bar = "{desc}{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} items [{elapsed}{postfix}]"
        self._bar = tqdm(total=of, disable=not on_terminal, bar_format=bar)
        self.add()

    def add(self, **more: float) -> None:
        """Add to the counts, by their names."""
        with self._lock:
            now = time.perf_counter() - self._begun
            added = {name: getattr(self.counts, name) + value for name, value in more.items()}
            self.counts = replace(self.counts, **added, seconds=now)  # type: ignore[arg-type]
            if not more or now - self._written > _EVERY:
                self._write(now)

    def read(self, items: int) -> None:
        """Count items that are decoded: they show that there is work, before the first batch is done."""
        self.add(read=items)

    def _write(self, now: float) -> None:
        self._written = now
        replace_file(self.folder / f"{self.counts.process:05d}.json", json.dumps(asdict(self.counts)))
        if not self._first or not self.counts.of:
            return
        all_counts = read_counts(self.folder, self.processes)
        done, of = (sum(getattr(counts, name) for counts in all_counts) for name in ("items", "of"))
        if not self._bar.disable:
            self._bar.total, self._bar.n = of, done
            self._bar.set_postfix_str(state(all_counts), refresh=True)
        elif now - self._shown > _LINE_EVERY or not self._shown:
            self._shown = now
            print(f"{done} of {of} items after {now:.0f} s, {state(all_counts)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the last counts."""
        self._shown = 0.0
        self.add()
        self._bar.close()


def state(all_counts: Sequence[Counts]) -> str:
    """How fast it goes and how long it will take; before the first batch is done, how many items are decoded."""
    seconds = max(counts.seconds for counts in all_counts) or 1e-9
    cost, of_cost = (sum(getattr(counts, name) for counts in all_counts) for name in ("cost", "of_cost"))
    if not cost:
        return f"{sum(counts.read for counts in all_counts)} of them decoded for the first batches"
    each = {name: sum(getattr(c, name) for c in all_counts) / seconds for name in ("items", "vision", "text")}
    left = max(0.0, of_cost - cost) * seconds / cost
    return (
        f"{each['items']:.1f} items/s, {each['vision']:.0f} vision and {each['text']:.0f} text tokens/s, "
        f"about {left:.0f} s left"
    )


def clear(folder: Path) -> None:
    """Forgets the counts of earlier runs."""
    for path in folder.glob("*.json"):
        path.unlink()


def read_counts(folder: Path, processes: int) -> list[Counts]:
    """What the processes last wrote. One that wrote nothing yet is left out."""
    found = []
    for process in range(processes):
        path = folder / f"{process:05d}.json"
        if path.exists():
            found.append(Counts(**json.loads(path.read_text())))
    return found


def summary(all_counts: list[Counts]) -> str:
    """A line per process, and one for all."""
    lines = [
        f"  process {c.process}: {c.items} of {c.of} items in {c.seconds:.1f} s, {c.failed} records failed"
        + (f", {c.halved} batches halved" if c.halved else "")
        for c in all_counts
    ]
    seconds = max(counts.seconds for counts in all_counts) or 1e-9
    items, vision, text = (sum(getattr(c, name) for c in all_counts) for name in ("items", "vision", "text"))
    waited = sum(c.waited for c in all_counts) / (sum(c.seconds for c in all_counts) or 1e-9)
    lines.append(
        f"  {items} items in {seconds:.1f} s: {items / seconds:.2f} items/s, {vision / seconds:.0f} vision tokens/s, "
        f"{text / seconds:.0f} text tokens/s"
        + (f"; models waited for pictures {waited:.0%} of the time" if waited else "")
    )
    return "\n".join(lines)
