"""Who is timed: the tower patched with each backend, and stock transformers in its best known set-ups (`baselines`).

A contender is opened on a tower of its own for one grid and yields a `Run`. A tower whose parameters require gradients
is one that is trained: it asks for what has a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_vit_accel import backends
from hf_vit_accel.api import patched, warmup
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools.bench.baselines import BASELINES, Open, Run, grid_tensor, request_of, trained

_GRAPH, _FP8 = "+graph", "+fp8"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One set-up. against: why it cannot run here, empty if it can. baseline: stock rather than patched.

    bound: the largest error that passes where it is not that of the dtype.
    """

    name: str
    open: Open | None
    against: tuple[str, ...] = ()
    baseline: bool = False
    bound: float | None = None


def choose(
    tower: Any, attentions: Sequence[str] | None, baselines: Sequence[str], *, device: torch.device | None = None
) -> list[Contender]:
    """The contenders for a tower, baselines first. attentions: None for "auto" and each backend that can serve it.

    A backend's name or "auto" with "+graph" after it is replayed from a CUDA graph of the size's exact shape; with
    "+fp8" before that it attends in FP8 where that pays.

    device: where the tower will be; by default where it is. Raises ValueError for unknown names.
    """
    check_names(attentions or (), baselines)
    request = request_of(tower, device)
    against = {backend.name: tuple(backend.reasons_against(request)) for backend in backends.BACKENDS}
    if attentions is None:
        graphed = [f"auto{_GRAPH}"] if request.device.type == "cuda" else []
        attentions = ["auto", *graphed, *(name for name, reasons in against.items() if not reasons)]
    contenders = []
    for name in baselines:
        found = BASELINES[name](tower)
        able = None if isinstance(found, list) else found
        reasons = tuple(found) if isinstance(found, list) else ()
        contenders.append(Contender(name=f"stock {name}", open=able, against=reasons, baseline=True))
    for name in attentions:
        attention, graph, fp8 = _parts(name)
        reasons = against.get(attention, ())
        if graph and (why := why_not_graphs(request.device)):
            reasons = (*reasons, why)
        if fp8:
            reasons = (*reasons, *backends.FP8.reasons_against(replace(request, packed=True)))
        able = None if reasons else partial(_patched, name)
        # Rows at a cosine similarity of 0.995 are a tenth of their length apart.
        contenders.append(Contender(name=name, open=able, against=reasons, bound=0.1 if fp8 else None))
    return contenders


def _parts(name: str) -> tuple[str, bool, bool]:
    """A contender's backend, and whether it is replayed from a graph and attends in FP8."""
    plain = name.removesuffix(_GRAPH)
    return plain.removesuffix(_FP8), plain != name, plain.endswith(_FP8)


def check_names(attentions: Sequence[str], baselines: Sequence[str]) -> None:
    """Raise ValueError for a backend or a baseline that does not exist."""
    for name in attentions:
        if (attention := _parts(name)[0]) != "auto":
            backends.backend_named(attention)
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise ValueError(f"expected baselines out of {', '.join(BASELINES)}, got {', '.join(unknown)}")


@contextmanager
def _patched(name: str, tower: Any, grid: Grid) -> Iterator[Run]:
    """Our tower; strict, so that nothing but what is named is ever timed."""
    grid_thw = grid_tensor(grid, tower)
    attention, graph, fp8 = _parts(name)
    every: Any = dict(exact_after=1, max_tokens=1 << 20, budgets=(1280,), max_training_bytes=1 << 40)
    graphs = GraphConfig(**every) if graph else False
    with patched(tower, attention=attention, cuda_graphs=graphs, fp8=fp8, strict=True):
        if not (graph or trained(tower)):
            warmup(tower, [grid], progress=False)
        yield Run(tower, lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw))
