"""Chooses who is timed: the tower patched with each backend, and stock transformers in its best set-ups (`baselines`).

A contender is opened on a tower of its own for one grid, and yields a `Run`. A tower whose parameters require gradients
is trained, and needs contenders that have a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hf_vit_accel import backends
from hf_vit_accel.api import patched, warmup
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools.bench.baselines import BASELINES, Open, Run, grid_tensor, request_of, trained
from hf_vit_accel.tools.bench.towers import Tower

_GRAPH = "+graph"
_FP8 = "+fp8"
_FP8_BOUND = 0.1
"""Largest relative error that passes in FP8: of rows whose cosine similarity is 0.995."""
_ALL_LAYOUTS = GraphConfig(exact_after=1, max_tokens=1 << 20, budgets=(1280,), max_training_bytes=1 << 40)
"""Captures every layout at its first call, in its exact shape."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One set-up.

    Attributes:
        name: As rows and tables name it.
        open: Opens it on a tower, for one grid; None if it cannot run here.
        against: Why it cannot run here; empty if it can.
        baseline: Whether it is stock rather than patched.
        bound: The largest error that passes, if it is not that of the dtype.
    """

    name: str
    open: Open | None
    against: tuple[str, ...] = ()
    baseline: bool = False
    bound: float | None = None


def choose(
    tower: Tower, attentions: Sequence[str] | None, baselines: Sequence[str], *, device: torch.device | None = None
) -> list[Contender]:
    """Return the contenders for a tower, baselines first.

    Args:
        tower: The tower.
        attentions: Names of backends, and "auto"; None for "auto" and each backend that can run it.
            "+graph" at the end of a name replays a CUDA graph of the size's exact shape.
            "+fp8" before it attends in FP8 where that pays.
        baselines: Names of `BASELINES`.
        device: Where the tower will be; by default where it is.

    Raises:
        ValueError: A name is unknown.
    """
    check_names(attentions or (), baselines)
    request = request_of(tower, device)
    against = {backend.name: tuple(backend.reasons_against(request)) for backend in backends.BACKENDS}
    if attentions is None:
        usable = [name for name, reasons in against.items() if not reasons]
        graphed = [f"auto{_GRAPH}"] if request.device.type == "cuda" else []
        attentions = ["auto", *graphed, *usable]
    contenders = [_stock_contender(name, tower) for name in baselines]
    for name in attentions:
        attention, is_graph, is_fp8 = _parts(name)
        reasons = list(against.get(attention, ()))
        why_not = why_not_graphs(request.device) if is_graph else None
        if why_not:
            reasons.append(why_not)
        if is_fp8:
            reasons += backends.FP8.reasons_against(replace(request, packed=True))
        bound = _FP8_BOUND if is_fp8 else None
        opens = None if reasons else _opener(name)
        contenders.append(Contender(name=name, open=opens, against=tuple(reasons), bound=bound))
    return contenders


def _stock_contender(name: str, tower: Tower) -> Contender:
    """Return the contender of a baseline."""
    opens = BASELINES[name](tower)
    if isinstance(opens, list):
        return Contender(name=f"stock {name}", open=None, against=tuple(opens), baseline=True)
    return Contender(name=f"stock {name}", open=opens, baseline=True)


def _parts(name: str) -> tuple[str, bool, bool]:
    """Return a contender's backend, whether it replays a graph, and whether it attends in FP8."""
    plain = name.removesuffix(_GRAPH)
    return plain.removesuffix(_FP8), plain != name, plain.endswith(_FP8)


def check_names(attentions: Sequence[str], baselines: Sequence[str]) -> None:
    """Raise ValueError for a backend or a baseline that does not exist."""
    for name in attentions:
        attention, _, _ = _parts(name)
        if attention != "auto":
            backends.backend_named(attention)
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(f"unknown baselines {', '.join(unknown)}: choose out of {', '.join(BASELINES)}")


def _opener(name: str) -> Open:
    """Return how a patched contender is opened."""
    return lambda tower, grid: _patched(name, tower, grid)


@contextmanager
def _patched(name: str, tower: Tower, grid: Grid) -> Iterator[Run]:
    """Open our tower; strict, so that only what is named is ever timed."""
    grid_thw = grid_tensor(grid, tower)
    attention, is_graph, is_fp8 = _parts(name)
    graphs = _ALL_LAYOUTS if is_graph else False
    with patched(tower, attention=attention, cuda_graphs=graphs, fp8=is_fp8, strict=True):
        if not (is_graph or trained(tower)):
            warmup(tower, [grid], progress=False)
        yield Run(tower, lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw))
