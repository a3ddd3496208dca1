"""Open stock transformers in its best set-ups: flash attentions that only torch or a module has, compiled without host
syncs, from CUDA graphs.

`BASELINES` is the registry: the package's own, and those here. A tower whose parameters require gradients is trained,
and needs set-ups that have a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vit_accel.backends.flash_attention_3 import FlashAttention3, varlen_attention
from hf_vit_accel.backends.torch_varlen import TorchVarlen
from hf_vit_accel.families import Tower
from hf_vit_accel.layout import Grid, build, to_device
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench import CannotRunError, Forward, Open, family_of_tower, grid_tensor, request_of, weight_of
from hf_vit_accel.tower.proof import prove
from hf_vit_accel.versions import METADATA, keyword_arguments

OpenFlash: TypeAlias = Callable[[str, Tower, Grid], AbstractContextManager[Forward]]
"""Opens a set-up with a named attention."""


def is_trained(tower: nn.Module) -> bool:
    """Return whether any parameter requires a gradient."""
    return any(parameter.requires_grad for parameter in tower.parameters())


@contextmanager
def stock(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the stock tower with one of transformers' attentions, or ours in its place, called as users call it."""
    set_attention(tower, attention)
    yield partial(tower, grid_thw=grid_tensor(grid, tower))


@contextmanager
def _stock_without_syncs(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the stock tower with all sequence metadata passed in, so that it never waits for the device."""
    set_attention(tower, attention)
    kwargs = {"grid_thw": grid_tensor(grid, tower), **_metadata(tower, grid)}
    yield partial(tower, **kwargs)


@contextmanager
def _compiled(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the same, compiled as a whole."""
    set_attention(tower, attention)
    kwargs = {"grid_thw": grid_tensor(grid, tower), **_metadata(tower, grid)}
    try:
        yield partial(torch.compile(tower, dynamic=False), **kwargs)
    finally:
        torch.compiler.reset()  # the next size would count against the limit of recompiles


@contextmanager
def _compiled_blocks(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the same with each block compiled on its own, as programs that train compile models."""
    blocks = [block.module for block in family_of_tower(tower).parts(tower).blocks]
    # All blocks share their code: beyond the limit they would silently run eagerly.
    limit = max(64, 4 * len(blocks))
    with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit):
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        try:
            with _stock_without_syncs(attention, tower, grid) as run:
                yield run
        finally:
            torch.compiler.reset()


class _Replay:
    """Captures a forward in a CUDA graph at its first call, and replays it; a call copies the pixels in."""

    def __init__(self, run: Forward) -> None:
        self._run = run
        self._graph = torch.cuda.CUDAGraph()
        self._pixels_TP: Tensor | None = None
        self._output: Any = None

    def __call__(self, pixels_TP: Tensor) -> Any:
        if self._pixels_TP is None:
            self._pixels_TP = pixels_TP.clone()
            self._capture(self._pixels_TP)
        self._pixels_TP.copy_(pixels_TP)
        self._graph.replay()
        return self._output

    def _capture(self, pixels_TP: Tensor) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a capture forbids to compile, and to allocate library workspaces
            for _ in range(3):
                self._run(pixels_TP)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            self._output = self._run(pixels_TP)

    def close(self) -> None:
        """Give back the graph and its memory."""
        self._pixels_TP = None
        self._output = None
        self._graph.reset()


@contextmanager
def _graphed(open_inner: OpenFlash, attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open another set-up, replayed from a CUDA graph."""
    with open_inner(attention, tower, grid) as run:
        replay = _Replay(run)
        try:
            yield replay
        finally:
            replay.close()


@contextmanager
def _of_attention(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the stock tower with one of transformers' attentions, if that can run."""
    reasons = reasons_against_attention(attention, tower)
    if reasons:
        raise CannotRunError("; ".join(reasons))
    with stock(attention, tower, grid) as forward:
        yield forward


@contextmanager
def _of_flash(open_flash: OpenFlash, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open a set-up with the best flash attention."""
    with open_flash(_best_flash(tower), tower, grid) as forward:
        yield forward


@contextmanager
def _of_graph(open_flash: OpenFlash, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Replay a set-up with the best flash attention from a CUDA graph."""
    if is_trained(tower):
        raise CannotRunError("a CUDA graph of a forward has no backward")
    with _graphed(open_flash, _best_flash(tower), tower, grid) as forward:
        yield forward


BASELINES: Mapping[str, Open] = bench.BASELINES | {
    "flash_attention_2": partial(_of_attention, "flash_attention_2"),
    "flash_attention_3": partial(_of_attention, "flash_attention_3"),
    "compile": partial(_of_flash, _compiled),
    "compile_blocks": partial(_of_flash, _compiled_blocks),
    "compile+graph": partial(_of_graph, _compiled),
    "graph": partial(_of_graph, _stock_without_syncs),
}
"""Stock set-ups: transformers' attentions; torch.compile of the tower or of each block, a CUDA graph, and both, with
the best installed flash attention and all metadata passed in (no host syncs)."""


def _best_flash(tower: Tower) -> str:
    """Return the first flash attention that can run. Raises CannotRunError with the reasons against all of them."""
    reasons: list[str] = []
    for name in ("flash_attention_3", "flash_attention_2"):
        reasons_here = reasons_against_attention(name, tower)
        if not reasons_here:
            return name
        reasons += [f"{name}: {reason}" for reason in reasons_here]
    raise CannotRunError("; ".join(reasons))


def reasons_against_attention(attention: str, tower: Tower) -> list[str]:
    """Return why stock transformers cannot run a tower with this attention here."""
    weight = weight_of(tower)
    request = request_of(tower, weight.device)
    if attention == "flash_attention_3":
        # The package that transformers recognises has a backward; the operator of our backend has none.
        needs_gradient = is_trained(tower) and not is_flash_attn_3_available()
        return FlashAttention3().reasons_against(replace(request, grad=needs_gradient))
    if attention != "flash_attention_2":
        return []
    if not is_flash_attn_2_available():
        return TorchVarlen().reasons_against(request)
    if weight.dtype in (torch.bfloat16, torch.float16):
        return []
    return [f"the dtype is {str(weight.dtype).removeprefix('torch.')}, it takes bfloat16 or float16"]


def set_attention(tower: Tower, attention: str) -> None:
    """Let a stock tower attend by an attention of transformers, or by ours that stands for it."""
    substitute = None
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        substitute = _flash_attention_2
    if attention == "flash_attention_3" and not is_flash_attn_3_available():
        substitute = _flash_attention_3
    if substitute is None:
        tower.set_attn_implementation(attention)
        return
    name = f"{attention}_of_benchmarks"  # "flash" in a name makes it a varlen attention
    AttentionInterface.register(name, substitute)
    tower.config._attn_implementation_internal = name  # the public setter would ask the Hub for it


def _flash_attention_2(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run torch's varlen function behind transformers' interface: (1, H, T, D) to ((1, T, H, D), None)."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # stock's own sdpa repeats keys and values, too
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens = options["cu_seq_lens_q"]
    longest = int(options["max_length_q"])  # a tensor where stock computes it
    out_THD = varlen_attn(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, longest, longest, scale=options["scaling"])
    assert isinstance(out_THD, Tensor)
    return out_THD.unsqueeze(0), None


def _flash_attention_3(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run FlashAttention-3's varlen function behind transformers' interface: (1, H, T, D) to ((1, T, H, D), None)."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = torch.ops.benchmarks.flash_attention_3(
        q_THD, k_THD, v_THD, options["cu_seq_lens_q"], options["max_length_q"], options["scaling"]
    )
    return out_THD.unsqueeze(0), None


# An operator, which torch.compile can trace: a peer must not lose to a graph break. This file may be imported twice.
if not hasattr(torch.ops.benchmarks, "flash_attention_3"):
    torch.library.define(
        "benchmarks::flash_attention_3",
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale) -> Tensor",
    )
    torch.library.impl("benchmarks::flash_attention_3", "cuda", varlen_attention)
    torch.library.register_fake("benchmarks::flash_attention_3", lambda q_THD, *_: q_THD.new_empty(q_THD.shape))


def _metadata(tower: Tower, grid: Grid) -> dict[str, Tensor | int]:
    """Return the keyword arguments that a stock tower takes instead of computing them with host syncs."""
    family = family_of_tower(tower)
    metadata = build(grid, family.geometry(tower))
    arrays = {name: array for name, array in metadata.arrays().items() if name in METADATA}
    values: dict[str, Tensor | int] = dict(to_device(arrays, weight_of(tower).device))
    values["max_seqlen"] = metadata.full.max_seqlen
    if metadata.window is not None:
        values["max_window_seqlen"] = metadata.window.max_seqlen
    return keyword_arguments(values, prove(tower, family).taken)
