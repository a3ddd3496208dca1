"""Stock transformers in its best known set-ups: its attentions, torch.compile, CUDA graphs, Liger's kernels.

`BASELINES` is the registry: each entry looks at a tower and says how to open it there, or everything that stands
against it. A tower whose parameters require gradients is one that is trained, and asks for what has a backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vit_accel import machine
from hf_vit_accel.backends import Request
from hf_vit_accel.backends.flash_attention_3 import FlashAttention3
from hf_vit_accel.backends.torch_varlen import TorchVarlen
from hf_vit_accel.engine.route import POPPED
from hf_vit_accel.layout import Grid, build, to_device
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of
from hf_vit_accel.tower.snapshot import Snapshot

LIGER = machine.Package(module="liger_kernel", distribution="liger-kernel", install="pip install liger-kernel")
_NO_GRAPHS = "a CUDA graph of a forward has no backward"
_BY_MODULE = {"flash_attention_2": "flash_attention_2_of_torch", "flash_attention_3": "flash_attention_3_by_module"}
"""Our names in transformers for what it does not recognise: FlashAttention-2 as built into torch, FlashAttention-3 as a
module alone. "flash" in them makes them varlen attentions."""


@dataclass(frozen=True)
class Run:
    """A set-up that is open: pixels (T, P) to the output of its tower, whose parameters take part."""

    tower: nn.Module
    forward: Callable[[Tensor], Any]

    def __call__(self, pixels_TP: Tensor) -> Any:
        """The tower's output."""
        return self.forward(pixels_TP)


Open: TypeAlias = Callable[[Any, Grid], AbstractContextManager[Run]]
Baseline: TypeAlias = Callable[[Any], Open | list[str]]


def trained(tower: nn.Module) -> bool:
    """Whether gradients are asked for."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def request_of(tower: Any, device: torch.device | None = None, *, grad: bool | None = None) -> Request:
    """What a tower's layers ask of a backend; gradients where it is trained."""
    snapshot = Snapshot(tower, family_of_tower(tower))
    where = device or snapshot.parts.projection.weight.device
    return snapshot.request(where, grad=trained(tower) if grad is None else grad)


@contextmanager
def stock(attention: str, tower: Any, grid: Grid) -> Iterator[Run]:
    """The stock tower with one of transformers' attentions, called as users call it."""
    _set_attention(tower, attention)
    grid_thw = grid_tensor(grid, tower)
    yield Run(tower, lambda pixels_TP: tower(pixels_TP, grid_thw=grid_thw))


@contextmanager
def _stock_without_syncs(attention: str, tower: Any, grid: Grid, *, compiled: bool = False) -> Iterator[Run]:
    """The stock tower given all sequence metadata, so that it never waits for the device; compiled or not."""
    _set_attention(tower, attention)
    kwargs = {"grid_thw": grid_tensor(grid, tower), **_metadata(tower, grid)}
    if not compiled:
        yield Run(tower, lambda pixels_TP: tower(pixels_TP, **kwargs))
        return
    forward = torch.compile(tower, dynamic=False)
    try:
        yield Run(tower, lambda pixels_TP: forward(pixels_TP, **kwargs))
    finally:
        torch.compiler.reset()  # the next size would otherwise count against the limit of recompiles


@contextmanager
def _compiled_blocks(attention: str, tower: Any, grid: Grid) -> Iterator[Run]:
    """The same with each block compiled on its own, as models are compiled that train."""
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


@contextmanager
def _graphed(inner: Open, tower: Any, grid: Grid) -> Iterator[Run]:
    """Another contender recorded into a CUDA graph at its first call; a call copies the pixels in and replays."""
    graph = torch.cuda.CUDAGraph()
    held: dict[str, Any] = {}

    with inner(tower, grid) as run:

        def replay(pixels_TP: Tensor) -> Any:
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
            yield Run(tower, replay)
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
    own.train(tower.training)
    for parameter, other in zip(own.parameters(), tower.parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    functions = type(own.blocks[0].attn).forward.__code__.co_names
    if not any(type(part).__module__.startswith("liger_kernel") for part in own.modules()) and not any(
        name in functions for name in changed
    ):
        raise RuntimeError("Liger replaces nothing that this tower uses")
    with stock(attention, own, grid) as run:

        def swapped(pixels_TP: Tensor) -> Any:
            vars(module).update(changed)
            try:
                return run(pixels_TP)
            finally:
                vars(module).update(originals)

        yield Run(own, swapped)


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


def _baseline_of_flash(make: Callable[..., Any], tower: Any, *, graph: bool = False) -> Open | list[str]:
    """make: from the best flash attention's name how it is opened."""
    flash, against = _best_flash(tower)
    if graph and trained(tower):
        against = [_NO_GRAPHS, *against]
    if flash is None or against:
        return against
    inner = partial(make, flash)
    return partial(_graphed, inner) if graph else inner


def _baseline_liger(tower: Any) -> Open | list[str]:
    against = [] if machine.has_cuda() else ["it needs a CUDA device"]
    if missing := machine.why_missing(LIGER):
        return [*against, missing]
    if not hasattr(importlib.import_module("liger_kernel.transformers"), _liger_function(tower)):
        against.append(f"the installed Liger has no {_liger_function(tower)}")
    return against or partial(_liger, _best_flash(tower)[0] or "sdpa")


_compiled = partial(_stock_without_syncs, compiled=True)
BASELINES: Mapping[str, Baseline] = {
    "sdpa": partial(_baseline_of_attention, "sdpa"),
    "flash_attention_2": partial(_baseline_of_attention, "flash_attention_2"),
    "flash_attention_3": partial(_baseline_of_attention, "flash_attention_3"),
    "compile": partial(_baseline_of_flash, _compiled),
    "compile_blocks": partial(_baseline_of_flash, _compiled_blocks),
    "compile+graph": partial(_baseline_of_flash, _compiled, graph=True),
    "graph": partial(_baseline_of_flash, _stock_without_syncs, graph=True),
    "liger": _baseline_liger,
}
"""Stock set-ups: transformers' attentions; torch.compile of the tower or of each block, a CUDA graph and both with the
best installed flash attention and all metadata given (no host syncs); Liger's kernels."""


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
        # The package that transformers knows has a backward; the operator of our backend has none.
        return FlashAttention3().reasons_against(
            request_of(tower, grad=trained(tower) and not is_flash_attn_3_available())
        )
    if attention != "flash_attention_2":
        return []
    if not is_flash_attn_2_available():
        return TorchVarlen().reasons_against(request_of(tower))
    if weight.dtype in (torch.bfloat16, torch.float16):
        return []
    return [f"the dtype is {str(weight.dtype).removeprefix('torch.')}, it takes bfloat16 or float16"]


def _set_attention(tower: Any, attention: str) -> None:
    own = {
        "flash_attention_2": None if is_flash_attn_2_available() else _flash_attention_2,
        "flash_attention_3": None if is_flash_attn_3_available() else _flash_attention_3,
    }.get(attention)
    if own is None:
        tower.set_attn_implementation(attention)
        return
    AttentionInterface.register(_BY_MODULE[attention], own)
    tower.config._attn_implementation_internal = _BY_MODULE[attention]  # the public setter would ask the Hub for it


def _flash_attention_2(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """torch's varlen function behind transformers' interface: (1, H, T, D) to ((1, T, H, D), None)."""
    from torch.nn.attention.varlen import varlen_attn

    if (groups := query.shape[1] // key.shape[1]) > 1:  # which stock's own sdpa repeats, too
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens, longest = options["cu_seq_lens_q"], int(options["max_length_q"])  # a tensor where stock computes it
    out_THD = varlen_attn(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, longest, longest, scale=options["scaling"])
    assert isinstance(out_THD, Tensor)
    return out_THD.unsqueeze(0), None


def _flash_attention_3(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """FlashAttention-3's varlen function behind transformers' interface: (1, H, T, D) to ((1, T, H, D), None).

    Through the operator of our own backend, which torch.compile can trace: a peer must not lose to a graph break.
    """
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    rest = options["cu_seq_lens_q"], options["max_length_q"], options["scaling"]
    return torch.ops.hf_vit_accel.flash_attention_3(q_THD, k_THD, v_THD, *rest).unsqueeze(0), None


def _metadata(tower: Any, grid: Grid) -> dict[str, Any]:
    """The keyword arguments that a stock tower takes instead of computing them with host syncs."""
    metadata = build(grid, family_of_tower(tower).geometry(tower))
    arrays = {name: array for name, array in metadata.arrays().items() if name in POPPED}
    kwargs: dict[str, Any] = dict(to_device(arrays, weight_of(tower).device))
    kwargs["max_seqlen"] = metadata.full.max_seqlen
    if metadata.window is not None:
        kwargs["max_window_seqlen"] = metadata.window.max_seqlen
    return kwargs


def grid_tensor(grid: Grid, tower: Any) -> Tensor:
    """A grid as towers take it."""
    return torch.tensor(grid, device=weight_of(tower).device)
