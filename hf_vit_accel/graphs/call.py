"""What the runner is told of a call, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_vit_accel.backends import Request
from hf_vit_accel.metadata import Geometry, Grid, VisionMetadata
from hf_vit_accel.planning import Layout, Prepared

__all__ = ["Ahead", "Call", "Eager", "GraphStatus"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One forward. pointers, identity: all that a graph bakes in beside its layout; others make every graph stale.

    pointers: where weights and buffers lie. ahead: what `Runner.start` gave for this very call, if it was asked.
    lay_out: metadata to layout. encode: prepared layout and pixels to output tensors, the first of T rows, the others
    of M. dtype, width: of the static pixels (T, P), which are what `encode` would convert them to.
    """

    grid: Grid
    geometry: Geometry
    request: Request
    dtype: torch.dtype
    width: int
    pointers: list[int]
    identity: Sequence[object]
    lay_out: Callable[[VisionMetadata], Layout]
    encode: Callable[[Prepared, torch.Tensor], list[torch.Tensor]]
    ahead: Ahead | None = None


@dataclass(frozen=True, eq=False)
class Ahead:
    """A replay that was begun while its call was still being checked. chosen: the graphs and layouts replayed."""

    chosen: list[Any]
    outputs: list[torch.Tensor]


@dataclass(frozen=True)
class Eager:
    """A call that runs without graphs, and why. by_choice: it could be replayed, but that would not pay."""

    why: str
    by_choice: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphStatus:
    """What a tower's graphs did. budgets: merged tokens. graphs: (what it serves, bytes, replays) of each one held.

    replays: graph launches. captures: graphs made. eager: reason -> calls that ran without. padding: rows replayed per
    row asked for. nbytes: device memory of all graphs. off: why graphs are no longer tried.
    """

    budgets: tuple[int, ...]
    graphs: tuple[tuple[str, int, int], ...] = ()
    replays: int = 0
    captures: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)
    padding: float = 1.0
    nbytes: int = 0
    off: str | None = None

    def __str__(self) -> str:
        lines = [
            f"  graphs     {len(self.graphs)} held ({self.nbytes / 2**20:.0f} MiB), {self.captures} captured, "
            f"{self.replays} replays, {self.padding:.2f} rows replayed per row, budgets up to {self.budgets[-1]} tokens"
        ]
        lines += [f"  graphs off {self.off}"] if self.off else []
        return "\n".join(lines + [f"  eager      {count} x {why}" for why, count in self.eager.items()])
