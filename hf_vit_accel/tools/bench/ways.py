"""Chooses who is timed: the tower patched with each backend, and stock transformers in its best set-ups (`baselines`).

A contender is opened on a tower of its own for one grid, and yields a `Run`. A tower whose parameters require gradients
is trained, and needs contenders that have a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hf_vit_accel import backends
from hf_vit_accel.api import patched, warmup
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.families import Tower
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools.bench.baselines import BASELINES, Open, Run, grid_tensor, is_trained, request_of

_GRAPH = "+graph"
_EAGER = "+eager"
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
        attentions: Names of backends, and "auto"; None for "auto" and each backend that can run it.
            "+graph" at the end of a name replays a CUDA graph of the size's exact shape, from the first call on.
            "+eager" replays none. Other names have `patch`'s default.
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
        attentions = ["auto", *usable]
    contenders = [_stock_contender(name, tower) for name in baselines]
    for name in attentions:
        parts = _parts(name)
        reasons = list(against.get(parts.attention, ()))
        why_not = why_not_graphs(request.device) if parts.graphs is _ALL_LAYOUTS else None
        if why_not:
            reasons.append(why_not)
        if parts.is_fp8:
            reasons += backends.FP8.reasons_against(replace(request, packed=True))
        bound = _FP8_BOUND if parts.is_fp8 else None
        opens = None if reasons else _opener(name)
        contenders.append(Contender(name=name, open=opens, against=tuple(reasons), bound=bound))
    return contenders


def _stock_contender(name: str, tower: Tower) -> Contender:
    """Return the contender of a baseline."""
    opens = BASELINES[name](tower)
    if isinstance(opens, list):
        return Contender(name=f"stock {name}", open=None, against=tuple(opens), baseline=True)
    return Contender(name=f"stock {name}", open=opens, baseline=True)


@dataclass(frozen=True)
class _Parts:
    """The options in a contender's name.

    Attributes:
        attention: The backend, or "auto".
        graphs: The option `cuda_graphs` of `patch`.
        is_fp8: Whether it attends in FP8.
    """

    attention: str
    graphs: GraphConfig | Literal["auto", False]
    is_fp8: bool


def _parts(name: str) -> _Parts:
    """Return the options in a contender's name."""
    graphs: GraphConfig | Literal["auto", False] = "auto"
    if name.endswith(_GRAPH):
        graphs = _ALL_LAYOUTS
    elif name.endswith(_EAGER):
        graphs = False
    plain = name.removesuffix(_GRAPH).removesuffix(_EAGER)
    return _Parts(attention=plain.removesuffix(_FP8), graphs=graphs, is_fp8=plain.endswith(_FP8))


def check_names(attentions: Sequence[str], baselines: Sequence[str]) -> None:
    """Raise ValueError for a backend or a baseline that does not exist."""
    for name in attentions:
        attention = _parts(name).attention
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
    parts = _parts(name)
    options: dict[str, Any] = dict(attention=parts.attention, cuda_graphs=parts.graphs, fp8=parts.is_fp8)
    with patched(tower, **options, strict=True):
        if parts.graphs is _ALL_LAYOUTS and not is_trained(tower):
            warmup(tower, [grid], progress=False)
        yield Run(tower, lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw))
