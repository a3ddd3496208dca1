"""Ways to run a tower: stock with the attentions of transformers or compiled, and patched with each backend.

A tower whose parameters require gradients is trained, and needs ways that have a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vit_accel import backends
from hf_vit_accel.api import patched
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.families import Tower
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of
from hf_vit_accel.tower.snapshot import Snapshot

OPTIONS: dict[str, dict[str, Any]] = {
    "graph": {
        "cuda_graphs": GraphConfig(exact_after=1, max_tokens=1 << 20, budgets=(1280,), max_training_bytes=1 << 40)
    },
    "eager": {"cuda_graphs": False},
    "fp8": {"fp8": True},
}
"""Options of `patch` by the end of a name: "auto+graph" captures every size at its first call."""
FP8_BOUND = 0.1
"""Largest relative error that passes in FP8: of rows whose cosine similarity is 0.995."""


@dataclass(frozen=True)
class Run:
    """A tower that is ready to run: `tower` holds its parameters, `forward` takes pixels (T, P)."""

    tower: nn.Module
    forward: Callable[[Tensor], Any]

    def __call__(self, pixels_TP: Tensor) -> Any:
        """Return the tower's output."""
        return self.forward(pixels_TP)


Open: TypeAlias = Callable[[Tower, Grid], AbstractContextManager[Run]]
Baseline: TypeAlias = Callable[[Tower], Open | list[str]]
"""Looks at a tower, and returns how to open stock on it, or all reasons against that."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a tower. `open` is None where it cannot run: `reasons` say why. `bound` is that of its errors."""

    name: str
    open: Open | None
    reasons: Sequence[str] = ()
    is_stock: bool = False
    bound: float | None = None


def choose(
    tower: Tower, attentions: Sequence[str] | None, baselines: Sequence[str], *, device: torch.device | None = None
) -> list[Way]:
    """Return the ways to run a tower, baselines first. Raises ValueError for a name that does not exist.

    Args:
        attentions: "auto" and names of backends, with ends of `OPTIONS`; None for "auto" and each that can run it.
        device: Where the tower will be; by default where it is.
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(f"unknown baselines {', '.join(unknown)}: choose out of {', '.join(BASELINES)}")
    request = request_of(tower, device)
    if attentions is None:
        usable = [backend.name for backend in backends.BACKENDS if not backend.reasons_against(request)]
        attentions = ["auto", *usable]
    ways = []
    for name in baselines:
        looked = BASELINES[name](tower)
        reasons, opens = (looked, None) if isinstance(looked, list) else ([], looked)
        ways.append(Way(name=f"stock {name}", open=opens, reasons=reasons, is_stock=True))
    return [*ways, *(_patched_way(name, request) for name in attentions)]


def _patched_way(name: str, request: backends.Request) -> Way:
    attention, *ends = name.split("+")
    unknown = [end for end in ends if end not in OPTIONS]
    if unknown:
        raise ValueError(f"unknown option +{unknown[0]} in {name}: choose out of {', '.join(OPTIONS)}")
    options = {key: value for end in ends for key, value in OPTIONS[end].items()}
    reasons = [] if attention == "auto" else backends.backend_named(attention).reasons_against(request)
    why_not = why_not_graphs(request.device) if "graph" in ends else None
    if reasons or why_not:
        return Way(name=name, open=None, reasons=[*reasons, *([why_not] if why_not else [])])

    @contextmanager
    def opened(tower: Tower, grid: Grid) -> Iterator[Run]:
        # Strict: where a call would fall back, the way is wrong rather than timed.
        with patched(tower, attention=attention, strict=True, **options):
            yield run_with(tower, grid_thw=grid_tensor(grid, tower))

    return Way(name=name, open=opened, bound=FP8_BOUND if "fp8" in ends else None)


def is_trained(tower: nn.Module) -> bool:
    """Return whether any parameter requires a gradient."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def request_of(tower: Tower, device: torch.device | None = None, *, grad: bool | None = None) -> backends.Request:
    """Return what a tower's layers ask of a backend, by default where the tower is and with its gradients."""
    snapshot = Snapshot(tower, family_of_tower(tower))
    return snapshot.request(device or weight_of(tower).device, grad=is_trained(tower) if grad is None else grad)


def run_with(tower: Tower, **kwargs: Any) -> Run:
    """Return a run that passes the same arguments in every call."""
    return Run(tower, lambda pixels_TP: tower(pixels_TP, **kwargs))


@contextmanager
def stock(attention: str, tower: Tower, grid: Grid) -> Iterator[Run]:
    """Open the stock tower with one of transformers' attentions, called as users call it."""
    tower.set_attn_implementation(attention)
    yield run_with(tower, grid_thw=grid_tensor(grid, tower))


@contextmanager
def _compiled(tower: Tower, grid: Grid) -> Iterator[Run]:
    """Open the stock tower compiled as a whole, as users compile it."""
    grid_thw = grid_tensor(grid, tower)
    forward = torch.compile(tower, dynamic=False)
    try:
        yield Run(tower, lambda pixels_TP: forward(pixels_TP, grid_thw=grid_thw))
    finally:
        torch.compiler.reset()  # the next size would count against the limit of recompiles


def _with_attention(attention: str, is_installed: Callable[[], bool] = lambda: True) -> Baseline:
    """Return the baseline of one of transformers' attentions. All but sdpa take half precision alone."""

    def look(tower: Tower) -> Open | list[str]:
        reasons = [] if is_installed() else [f"transformers finds no package for {attention}"]
        if attention != "sdpa" and weight_of(tower).dtype == torch.float32:
            reasons.append("the dtype is float32, it takes bfloat16 or float16")
        return reasons or (lambda tower, grid: stock(attention, tower, grid))

    return look


BASELINES: dict[str, Baseline] = {
    "sdpa": _with_attention("sdpa"),
    "flash_attention_2": _with_attention("flash_attention_2", is_flash_attn_2_available),
    "flash_attention_3": _with_attention("flash_attention_3", is_flash_attn_3_available),
    "compile": lambda tower: _compiled if weight_of(tower).is_cuda else ["it needs a CUDA device"],
}
"""Stock set-ups by name: transformers' attentions, and torch.compile of the tower."""


def grid_tensor(grid: Grid, tower: Tower) -> Tensor:
    """Return a grid as towers take it."""
    return torch.tensor(grid, device=weight_of(tower).device)
