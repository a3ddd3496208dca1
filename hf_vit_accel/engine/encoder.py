"""The fast path: pixels to features, through operations and attention that were decided before.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, MethodType

import torch
from torch import Tensor, nn

from hf_vit_accel import versions
from hf_vit_accel.backends.base import Attend
from hf_vit_accel.engine.route import Route
from hf_vit_accel.ops import LayerOps
from hf_vit_accel.ops.base import AddThen

Residual = tuple[Tensor, Tensor | None]
"""The residual stream: x (T, E), and delta (T, E), which the next norm adds to it."""
RunLayer = Callable[[Tensor, Tensor | None], Residual]
"""(x, delta) to the residual stream after one layer."""
AfterLayer = Callable[[int, Residual], Residual]
"""(index of the layer, its residual stream) to the residual stream that the next layer takes."""


@dataclass(frozen=True)
class Checkpoint:
    """Run a layer or merger again in the backward, as stock does, instead of keeping what its gradient needs."""

    function: Callable[..., Tensor]
    module: nn.Module

    @property
    def is_reentrant(self) -> bool:
        """Whether gradients may reach weights only if the module's input requires one.

        `use_reentrant` tells only of torch's own function: ms-swift puts one in its place that decides for itself.
        """
        names = getattr(getattr(self.function, "func", None), "__globals__", {})  # `functools.wraps` copies all others
        is_torchs = names.get("__name__") in ("torch._compile", "torch.utils.checkpoint")
        return not is_torchs or bool(getattr(self.function, "keywords", {}).get("use_reentrant", True))

    def has_gradient(self, x_TE: Tensor, delta_TE: Tensor | None) -> bool:
        """Return whether any gradient flows through the module; a frozen layer after frozen ones has none."""
        if x_TE.requires_grad or (delta_TE is not None and delta_TE.requires_grad):
            return True
        return any(parameter.requires_grad for parameter in self.module.parameters())


Checkpoints = Mapping[nn.Module, Checkpoint]
"""The blocks and mergers that stock runs again in the backward, and how."""


@dataclass(frozen=True)
class CalledBlock:
    """A block that runs by its own call, since hooks are on it or inside; stock's arguments but rows and tables."""

    block: Callable[..., Tensor]
    arguments: Mapping[str, object]


def _call_block(called: CalledBlock, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Return the rows after a block. Its own call checkpoints it."""
    with versions.without_capture():
        out_TE = called.block(x_TE, position_embeddings=(cos_TD, sin_TD), **called.arguments)
    if out_TE.shape != x_TE.shape:  # kernels would read beyond its rows
        raise ValueError(f"expected rows {tuple(x_TE.shape)} from the hooks of a block, got {tuple(out_TE.shape)}")
    if torch.is_grad_enabled():
        return out_TE.contiguous()
    return out_TE.clone(memory_format=torch.contiguous_format)  # kernels write to it, and a hook may keep it


def encode(
    route: Route,
    pixels_TP: Tensor,
    checkpoints: Checkpoints = MappingProxyType({}),
    blocks_to_call: Mapping[int, nn.Module | CalledBlock] = MappingProxyType({}),
    output_slices: Sequence[Tensor] = (),
    after_layer: AfterLayer | None = None,
    *,
    hidden_states: bool = False,
) -> list[Tensor]:
    """Encode pixels: return last rows, merged features if the tower merges them, deepstack features, hidden states.

    The layers only compute: the route holds all decisions, also whether gradients flow. Without gradients, tensors
    are freed as early as possible, since they limit the rows that fit. The returned tensors belong to the caller.

    A block to call surrounds its layer, since hooks on it gather the weights; a `CalledBlock` runs in its place.
    Deepstack features and hidden states are written at once to `output_slices`, those of a call's outputs for a pass.

    Shapes:
        rows: (T, E), or as they are downsampled.
        features: (M, width of the text), merged and of every deepstack layer that ran.
        hidden states: (T, E), the rows that every layer takes; only where they are requested.
    """
    ops = route.spec.ops
    tensors = route.tensors
    assert ops is not None
    x_TE = ops.embed(pixels_TP)
    if ops.add_positions is not None:
        x_TE = ops.add_positions(x_TE, tensors["interp_indices"], tensors["interp_weights"])
    positions_T2 = tensors["position_ids"]
    window_index_M = tensors.get("window_index")
    if window_index_M is not None:  # complete merge blocks of rows go to the order of the windows
        merges = len(window_index_M), -1
        x_TE = x_TE.unflatten(0, merges)[window_index_M].flatten(0, 1)
        positions_T2 = positions_T2.unflatten(0, merges)[window_index_M].flatten(0, 1)
    cos_TD, sin_TD = map(Tensor.contiguous, ops.tables(x_TE, positions_T2))
    qkv_shape = 3, route.spec.request.heads, route.spec.request.head_dim
    merged_by_layer: list[Tensor] = []
    delta_TE: Tensor | None = None
    states_count = len(ops.layers) if hidden_states else 0
    first_state = len(output_slices) - states_count
    deepstack_slices = output_slices[first_state - len(ops.deepstack) : first_state]
    state_slices = output_slices[first_state:]
    states: list[Tensor] = []
    if states_count:
        x_TE, delta_TE = _keep_state(route, x_TE, delta_TE, states, state_slices)
    for index, (layer, attend, trained) in enumerate(zip(ops.layers, route.attends, route.trained, strict=True)):
        checkpoint = checkpoints.get(ops.parts.blocks[index].module)
        block = blocks_to_call.get(index)
        if checkpoint is not None and not checkpoint.has_gradient(x_TE, delta_TE):
            checkpoint = None
        if isinstance(block, CalledBlock):
            x_TE = _call_block(block, x_TE if delta_TE is None else x_TE + delta_TE, cos_TD, sin_TD)
            delta_TE = None
        elif checkpoint is not None or block is not None:
            run = partial(trained or partial(_in_steps, layer, attend), qkv_shape, cos_TD, sin_TD)
            if block is not None:
                run = partial(_run_through, block, run)
            if checkpoint is None:
                x_TE, delta_TE = run(x_TE, delta_TE)
            else:
                x_TE = _run_checkpointed(checkpoint, run, x_TE, delta_TE)
                delta_TE = None
        elif trained is not None:
            x_TE, delta_TE = trained(qkv_shape, cos_TD, sin_TD, x_TE, delta_TE)
        else:
            handed_over = [delta_TE]
            delta_TE = None  # only the layer refers to it now
            x_TE, delta_TE = _layer(layer, attend, qkv_shape, cos_TD, sin_TD, x_TE, handed_over)
        if index + 1 < states_count:
            x_TE, delta_TE = _keep_state(route, x_TE, delta_TE, states, state_slices)
        if index in ops.deepstack:
            merge = ops.deepstack[index]
            merger_checkpoint = checkpoints.get(ops.parts.deepstack[index])
            if merger_checkpoint is not None:
                merge = _checkpointed(merge, merger_checkpoint)
            x_TE, merged = merge(x_TE, delta_TE)
            merged_by_layer.append(deepstack_slices[len(merged_by_layer)].copy_(merged) if output_slices else merged)
            del merged
            delta_TE = None
        if after_layer is not None:
            x_TE, delta_TE = after_layer(index, (x_TE, delta_TE))
    finish = ops.finish
    merger_checkpoint = None if ops.parts.merger is None else checkpoints.get(ops.parts.merger)
    if ops.merge is not None and merger_checkpoint is not None:
        finish = ops.finish_by(_checkpointed(ops.merge, merger_checkpoint))
    outputs = list(finish(x_TE, delta_TE))
    if window_index_M is not None:
        outputs[-1] = outputs[-1][tensors["inverse_index"]]
    return outputs + merged_by_layer + states


def _keep_state(
    route: Route, x_TE: Tensor, delta_TE: Tensor | None, states: list[Tensor], slices: Sequence[Tensor]
) -> Residual:
    """Append the rows that the next layer takes to `states`; return the residual stream to go on with."""
    if route.spec.request.grad:  # the very rows: their gradient includes that of later layers
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        states.append(x_TE)
        return x_TE, None
    state_TE = slices[len(states)] if slices else torch.empty_like(x_TE)  # apart from x, to which kernels write
    states.append(state_TE.copy_(x_TE) if delta_TE is None else torch.add(x_TE, delta_TE, out=state_TE))
    return x_TE, delta_TE


def _layer(
    layer: LayerOps,
    attend: Attend,
    qkv_shape: tuple[int, ...],
    cos_TD: Tensor,
    sin_TD: Tensor,
    x_TE: Tensor,
    handed_over: list[Tensor | None],
) -> Residual:
    """Run one layer, operation by operation. Delta is popped from a list, so that no caller holds it.

    Its memory is freed then: after torch.compile, the frames of callers keep arguments alive.
    """
    x_TE, normed_TE = layer.norm1(x_TE, handed_over.pop())
    delta_TE = layer.proj(attend(layer.qkv(normed_TE).view(-1, *qkv_shape), cos_TD, sin_TD).flatten(1))
    x_TE, normed_TE = layer.norm2(x_TE, delta_TE)
    del delta_TE
    return x_TE, layer.mlp(normed_TE)


def _in_steps(
    layer: LayerOps,
    attend: Attend,
    qkv_shape: tuple[int, ...],
    cos_TD: Tensor,
    sin_TD: Tensor,
    x_TE: Tensor,
    delta_TE: Tensor | None,
) -> Residual:
    """Run one layer, operation by operation, whose caller keeps delta."""
    return _layer(layer, attend, qkv_shape, cos_TD, sin_TD, x_TE, [delta_TE])


def _run_through(block: nn.Module, run: RunLayer, x_TE: Tensor, delta_TE: Tensor | None) -> Residual:
    """Run a layer in the place of its block's forward. The block's hooks run, also if the layer runs again."""
    vars(block)["forward"] = run
    try:
        residual: Residual = nn.Module.__call__(block, x_TE, delta_TE)
        return residual
    finally:
        del vars(block)["forward"]


def _run_checkpointed(checkpoint: Checkpoint, run: RunLayer, x_TE: Tensor, delta_TE: Tensor | None) -> Tensor:
    """Run a layer as stock checkpoints it: one tensor goes in, one comes out.

    The function is a method of the module: LLaMA-Factory's and ms-swift's checkpoint functions ask for `__self__`.
    """
    x_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if checkpoint.is_reentrant and not x_TE.requires_grad:
        x_TE = x_TE.detach().requires_grad_()

    def run_rows(_: nn.Module, x_TE: Tensor, **ignored: object) -> Tensor:
        x_TE, delta_TE = run(x_TE, None)
        return x_TE if delta_TE is None else x_TE + delta_TE

    return checkpoint.function(MethodType(run_rows, checkpoint.module), x_TE)


def _checkpointed(merge: AddThen, checkpoint: Checkpoint) -> AddThen:
    """Return a merger that runs as stock checkpoints it."""

    def run(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        if not checkpoint.has_gradient(x_TE, delta_TE):
            return merge(x_TE, delta_TE)
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        return x_TE, _run_checkpointed(checkpoint, lambda x_TE, _: (merge(x_TE, None)[1], None), x_TE, None)

    return run
