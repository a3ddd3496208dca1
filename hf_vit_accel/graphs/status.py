"""Holds the counters of graphs of one kind, and prints them for `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GraphStatus:
    """Counters of a tower's graphs.

    Attributes:
        budgets: Merged tokens that graphs are captured for; empty for graphs of training steps.
        graphs: For every stored graph its label, the bytes that it added, and its replays.
        eager, stale, kept: Reason -> passes without graphs, times that all graphs went stale, or stayed unused.
        padding: Replayed rows per row of the calls.
        nbytes: Device memory of graphs, dropped ones included: only later graphs can take theirs.
    """

    budgets: tuple[int, ...] = ()
    graphs: tuple[tuple[str, int, int], ...] = ()
    replays: int = 0
    captures: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)
    stale: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    padding: float = 1.0
    nbytes: int = 0
    off: str | None = None
    last: str | None = None

    def __str__(self) -> str:
        is_training = not self.budgets
        name = "training" if is_training else "graphs"
        last_call = "last step" if is_training else "last call"
        counts = f"{len(self.graphs)} held ({self.nbytes / 2**20:.0f} MiB), {self.captures} captured"
        counts += f", {self.replays} replays"
        if not is_training:
            counts += f", {self.padding:.2f} rows replayed per row, budgets up to {self.budgets[-1]} tokens"
        lines = [f"  {name:<11}{counts}"]
        if self.last:
            lines.append(f"  {last_call}  {self.last}")
        if self.off:
            lines.append(f"  {name} off {self.off}")
        lines += [f"  stale      {count} x {why}" for why, count in self.stale.items()]
        lines += [f"  kept       {count} x {why}" for why, count in self.kept.items()]
        lines += [f"  eager      {count} x {why}" for why, count in self.eager.items()]
        return "\n".join(lines)
