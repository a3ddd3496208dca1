"""Who is timed: the tower patched with each backend, and stock transformers in its best known set-ups.

A contender is opened on a tower of its own for one grid and yields a callable from pixels (T, P) to the tower's
output. `BASELINES` is the registry of stock set-ups: each entry looks at a tower and says how to open it there, or
everything that stands against it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vit_accel import backends, env
from hf_vit_accel.api import patched
from hf_vit_accel.backends import Request
from hf_vit_accel.backends.flash_attention_3 import FlashAttention3
from hf_vit_accel.bench.towers import family_of_tower, weight_of
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.guard import Snapshot
from hf_vit_accel.metadata import Grid, build, to_device
from hf_vit_accel.route import POPPED

__all__ = ["BASELINES", "Contender", "Open", "Run", "check_names", "choose", "stock"]

Run: TypeAlias = Callable[[torch.Tensor], Any]
Open: TypeAlias = Callable[[Any, Grid], AbstractContextManager[Run]]
Baseline: TypeAlias = Callable[[Any], Open | list[str]]

LIGER = env.Package(module="liger_kernel", distribution="liger-kernel", install="pip install liger-kernel")
_GRAPH, _FP8 = "+graph", "+fp8"
_FLASH_3 = "flash_attention_3_by_module"
"""Our name in transformers for a FlashAttention-3 that it does not recognise; "flash" makes it a varlen attention."""


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
    request = _request(tower, device)
    against = {backend.name: tuple(backend.reasons_against(request)) for backend in backends.ORDER}
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
            reasons = (*reasons, *backends.FP8.reasons_against(request))
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
    grid_thw = _tensor(grid, tower)
    attention, graph, fp8 = _parts(name)
    graphs = GraphConfig(exact_after=1) if graph else False
    with patched(tower, attention=attention, cuda_graphs=graphs, fp8=fp8, strict=True):
        yield lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw)


def _request(tower: Any, device: torch.device | None = None) -> Request:
    """What a tower's layers ask of a backend."""
    snapshot = Snapshot(tower, family_of_tower(tower))
    return snapshot.request(device or snapshot.parts.projection.weight.device)


@contextmanager
def stock(attention: str, tower: Any, grid: Grid) -> Iterator[Run]:
    """The stock tower with one of transformers' attentions, called as users call it."""
    _set_attention(tower, attention)
    grid_thw = _tensor(grid, tower)
    yield lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw)


@contextmanager
def _stock_without_syncs(attention: str, compiled: bool, tower: Any, grid: Grid) -> Iterator[Run]:
    """The stock tower given all sequence metadata, so that it never waits for the device; compiled or not."""
    _set_attention(tower, attention)
    kwargs = {"grid_thw": _tensor(grid, tower), **_metadata(tower, grid)}
    if not compiled:
        yield lambda pixels_TP: tower(pixels_TP, **kwargs)
        return
    forward = torch.compile(tower, dynamic=False)
    try:
        yield lambda pixels_TP: forward(pixels_TP, **kwargs)
    finally:
        torch.compiler.reset()  # the next size would otherwise count against the limit of recompiles


@contextmanager
def _graphed(inner: Open, tower: Any, grid: Grid) -> Iterator[Run]:
    """Another contender recorded into a CUDA graph at its first call; a call copies the pixels in and replays."""
    graph = torch.cuda.CUDAGraph()
    held: dict[str, Any] = {}

    with inner(tower, grid) as run:

        def replay(pixels_TP: torch.Tensor) -> Any:
            if not held:
                held["pixels"] = pixels_TP.clone()
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # compiles and allocates what must exist before the capture
                    for _ in range(3):
                        run(held["pixels"])
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph):
                    held["output"] = run(held["pixels"])
            held["pixels"].copy_(pixels_TP)
            graph.replay()
            return held["output"]

        try:
            yield replay
        finally:
            held.clear()
            graph.reset()


@contextmanager
def _liger(attention: str, tower: Any, grid: Grid) -> Iterator[Run]:
    """The stock tower with Liger's kernels for its family.

    Liger replaces names in the modeling module: classes count when a tower is built, functions when it runs. So the
    tower is built again under them, and they stand there only while it runs: other contenders use the same module.
    """
    module = importlib.import_module(type(tower).__module__)
    changed = _apply_liger(tower)
    originals = {name: vars(module)[name] for name in changed}
    vars(module).update(changed)
    try:
        with weight_of(tower).device:
            own = type(tower)(tower.config)
    finally:
        vars(module).update(originals)
    own.to(weight_of(tower).dtype)
    own.rotary_pos_emb = tower.rotary_pos_emb  # its frequencies stay fp32
    own.load_state_dict(tower.state_dict())
    own.eval().requires_grad_(False)
    functions = type(own.blocks[0].attn).forward.__code__.co_names
    if not any(type(part).__module__.startswith("liger_kernel") for part in own.modules()) and not any(
        name in functions for name in changed
    ):
        raise RuntimeError("Liger replaces nothing that this tower uses")
    with stock(attention, own, grid) as run:

        def swapped(pixels_TP: torch.Tensor) -> Any:
            vars(module).update(changed)
            try:
                return run(pixels_TP)
            finally:
                vars(module).update(originals)

        yield swapped


def _apply_liger(tower: Any) -> dict[str, Any]:
    """What Liger's function for the tower's family replaces in the modeling module; the module is left as it was."""
    liger = importlib.import_module("liger_kernel.transformers")
    module = importlib.import_module(type(tower).__module__)
    before = dict(vars(module))
    try:
        getattr(liger, _liger_function(tower))(fused_linear_cross_entropy=False)
        return {name: value for name, value in vars(module).items() if name in before and value is not before[name]}
    finally:
        for name in vars(module).keys() - before.keys():
            del vars(module)[name]
        vars(module).update(before)


def _liger_function(tower: Any) -> str:
    return f"apply_liger_kernel_to_{type(tower).__module__.split('.')[-2]}"


def _baseline_of_attention(attention: str, tower: Any) -> Open | list[str]:
    return _against_attention(attention, tower) or partial(stock, attention)


def _baseline_without_syncs(compiled: bool, graph: bool, tower: Any) -> Open | list[str]:
    flash, against = _best_flash(tower)
    if flash is None:
        return against
    inner = partial(_stock_without_syncs, flash, compiled)
    return partial(_graphed, inner) if graph else inner


def _baseline_liger(tower: Any) -> Open | list[str]:
    against = [] if env.has_cuda() else ["it needs a CUDA device"]
    if missing := env.why_missing(LIGER):
        return [*against, missing]
    if not hasattr(importlib.import_module("liger_kernel.transformers"), _liger_function(tower)):
        against.append(f"the installed Liger has no {_liger_function(tower)}")
    return against or partial(_liger, _best_flash(tower)[0] or "sdpa")


BASELINES: Mapping[str, Baseline] = {
    "sdpa": partial(_baseline_of_attention, "sdpa"),
    "flash_attention_2": partial(_baseline_of_attention, "flash_attention_2"),
    "flash_attention_3": partial(_baseline_of_attention, "flash_attention_3"),
    "compile": partial(_baseline_without_syncs, True, False),
    "compile+graph": partial(_baseline_without_syncs, True, True),
    "graph": partial(_baseline_without_syncs, False, True),
    "liger": _baseline_liger,
}
"""Stock set-ups: transformers' attentions; torch.compile, a CUDA graph and both with the best installed flash
attention and all metadata given (no host syncs); Liger's kernels."""


def _best_flash(tower: Any) -> tuple[str | None, list[str]]:
    """The first flash attention that can run, or None and everything against all of them."""
    against = []
    for name in ("flash_attention_3", "flash_attention_2"):
        reasons = _against_attention(name, tower)
        if not reasons:
            return name, []
        against += [f"{name}: {reason}" for reason in reasons]
    return None, against


def _against_attention(attention: str, tower: Any) -> list[str]:
    """Why stock transformers cannot run a tower with this attention here."""
    weight = weight_of(tower)
    if attention == "flash_attention_3":
        return FlashAttention3().reasons_against(_request(tower))
    reasons = []
    if attention == "flash_attention_2":
        if not is_flash_attn_2_available():
            reasons.append("the package `flash-attn` is not usable (pip install flash-attn, beside a CUDA device)")
        if weight.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"the dtype is {str(weight.dtype).removeprefix('torch.')}, it takes bfloat16 or float16")
    return reasons


def _set_attention(tower: Any, attention: str) -> None:
    if attention == "flash_attention_3" and not is_flash_attn_3_available():
        AttentionInterface.register(_FLASH_3, _flash_attention_3)
        tower.config._attn_implementation_internal = _FLASH_3  # the public setter would look for it on the Hub
    else:
        tower.set_attn_implementation(attention)


def _flash_attention_3(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention-3's varlen function behind transformers' interface: (1, H, T, D) to ((1, T, H, D), None).

    Through the operator of our own backend, which torch.compile can trace: a peer must not lose to a graph break.
    """
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = torch.ops.hf_vit_accel.flash_attention_3(q_THD, k_THD, v_THD, cu_seq_lens_q, max_length_q, scaling)
    return out_THD.unsqueeze(0), None


def _metadata(tower: Any, grid: Grid) -> dict[str, Any]:
    """The keyword arguments that a stock tower takes instead of computing them with host syncs."""
    metadata = build(grid, family_of_tower(tower).geometry(tower))
    arrays = {name: array for name, array in metadata.arrays().items() if name in POPPED}
    kwargs: dict[str, Any] = dict(to_device(arrays, weight_of(tower).device))
    kwargs["max_seqlen"] = metadata.full.max_seqlen
    if metadata.window is not None:
        kwargs["max_window_seqlen"] = metadata.window.max_seqlen
    return kwargs


def _tensor(grid: Grid, tower: Any) -> torch.Tensor:
    return torch.tensor(grid, device=weight_of(tower).device)
