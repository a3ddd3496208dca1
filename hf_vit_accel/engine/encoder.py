"""The fast path: pixels to features, through operations and attention that were decided before.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hf_vit_accel.backends import Attend
from hf_vit_accel.engine.route import Route
from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops import LayerOps, Ops


@dataclass(frozen=True)
class Checkpoint:
    """Run a layer again in the backward pass, as transformers does, instead of keeping what its gradient needs.

    Attributes:
        function: what transformers calls with a function and its arguments.
        block: the module of the layer.
    """

    function: Callable[..., Tensor]
    block: nn.Module

    @property
    def reentrant(self) -> bool:
        """Whether it makes a gradient only where the rows require one."""
        return bool(getattr(self.function, "keywords", {}).get("use_reentrant", True))

    def needed(self, x_TE: Tensor, delta_TE: Tensor | None) -> bool:
        """Whether the layer has a gradient at all: frozen after frozen ones, it keeps nothing."""
        if x_TE.requires_grad or (delta_TE is not None and delta_TE.requires_grad):
            return True
        return any(parameter.requires_grad for parameter in self.block.parameters())


def checkpoints_of(parts: Parts) -> list[Checkpoint | None]:
    """Return the checkpoint of every layer; None for a layer that transformers does not run again."""
    checkpoints: list[Checkpoint | None] = []
    for block in parts.blocks:
        module = block.module
        runs_again = module.training and getattr(module, "gradient_checkpointing", False)
        checkpoints.append(Checkpoint(module._gradient_checkpointing_func, module) if runs_again else None)
    return checkpoints


def encode(
    route: Route,
    pixels_TP: Tensor,
    checkpoints: Sequence[Checkpoint | None] = (),
    through: Mapping[int, nn.Module] = MappingProxyType({}),
    into: Sequence[Tensor] = (),
    is_embedded: bool = False,
) -> list[Tensor]:
    """Encode pixels: return the last rows, the merged features if the tower merges them, and deepstack features.

    The layers only compute: the route holds all decisions, also whether gradients flow. Without gradients nothing is
    held longer than it is needed, for that decides how many rows fit.

    Args:
        route: the operations, the attention of every layer, and the metadata on the device.
        pixels_TP: the pixels, or their embedded rows (T, E).
        checkpoints: by layer, None for a layer that keeps what its gradient needs.
        through: layers that run through their block, so that hooks on it bring the weights.
        into: where the outputs of a pass will lie. Deepstack features go there at once.
        is_embedded: whether embedded rows came, which are kept: nothing is written to them.

    Returns:
        Tensors that belong to the caller.

    Shapes:
        rows: (T, E), or as they are downsampled.
        features: (M, width of the text), merged and of every deepstack layer that ran.
    """
    ops = route.spec.ops
    tensors = route.tensors
    request = route.spec.request
    assert ops is not None
    x_TE = pixels_TP.clone() if is_embedded else ops.embed(pixels_TP)
    x_TE, cos_TD, sin_TD = _placed(ops, tensors, x_TE)
    heads = 3, request.heads, request.head_dim
    merged_by_layer: list[Tensor] = []
    deepstack_places = iter(into[len(into) - len(ops.deepstack) :])
    delta_TE: Tensor | None = None  # what the residual stream is still to receive: the next norm adds it
    for index, (layer, attend, node) in enumerate(zip(ops.layers, route.attends, route.nodes, strict=True)):
        if not request.grad and index not in through:
            handed_over = [delta_TE]
            delta_TE = None  # nobody but the layer holds it
            x_TE, delta_TE = _layer(layer, attend, heads, cos_TD, sin_TD, x_TE, handed_over)
        else:
            run = node or partial(_layer_of_rows, layer, attend)
            if index in through:
                run = partial(_through, through[index], run)
            checkpoint = checkpoints[index] if checkpoints else None
            if checkpoint is not None and checkpoint.needed(x_TE, delta_TE):
                run = partial(run, heads, cos_TD, sin_TD)
                x_TE, delta_TE = _checkpointed(checkpoint, run, x_TE, delta_TE)
            else:
                x_TE, delta_TE = run(heads, cos_TD, sin_TD, x_TE, delta_TE)
        if index in ops.deepstack:
            x_TE, merged = ops.deepstack[index](x_TE, delta_TE)
            merged_by_layer.append(next(deepstack_places).copy_(merged) if into else merged)
            del merged
            delta_TE = None
    outputs = list(ops.finish(x_TE, delta_TE))
    if "window_index" in tensors:
        outputs[-1] = outputs[-1][tensors["inverse_index"]]
    return outputs + merged_by_layer


def _placed(ops: Ops, tensors: Mapping[str, Tensor], x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add learned positions to embedded rows, in the order of the windows; also return the tables of the rotation."""
    if ops.add_positions is not None:
        x_TE = ops.add_positions(x_TE, tensors["interp_indices"], tensors["interp_weights"])
    positions_T2 = tensors["position_ids"]
    window_index_M = tensors.get("window_index")
    if window_index_M is not None:  # whole merge blocks of rows go to the order of the windows
        merges = len(window_index_M), -1
        x_TE = x_TE.unflatten(0, merges)[window_index_M].flatten(0, 1)
        positions_T2 = positions_T2.unflatten(0, merges)[window_index_M].flatten(0, 1)
    cos_TD, sin_TD = ops.tables(x_TE, positions_T2)
    return x_TE, cos_TD.contiguous(), sin_TD.contiguous()


def _layer(
    layer: LayerOps,
    attend: Attend,
    heads: tuple[int, ...],
    cos_TD: Tensor,
    sin_TD: Tensor,
    x_TE: Tensor,
    handed_over: list[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Run one layer: return the residual stream and what it is still to receive.

    Args:
        layer: its operations.
        attend: its attention.
        heads: 3, heads, head dim.
        cos_TD: table of the rotation.
        sin_TD: table of the rotation.
        x_TE: the residual stream.
        handed_over: a list with delta, (T, E), emptied here: after torch.compile, callers' frames hold arguments.
    """
    x_TE, normed_TE = layer.norm1(x_TE, handed_over.pop())
    delta_TE = layer.proj(attend(layer.qkv(normed_TE).view(-1, *heads), cos_TD, sin_TD).flatten(1))
    x_TE, normed_TE = layer.norm2(x_TE, delta_TE)
    del delta_TE
    return x_TE, layer.mlp(normed_TE)


def _layer_of_rows(
    layer: LayerOps, attend: Attend, heads: Any, cos_TD: Any, sin_TD: Any, x_TE: Any, delta_TE: Any
) -> tuple[Tensor, Tensor | None]:
    return _layer(layer, attend, heads, cos_TD, sin_TD, x_TE, [delta_TE])


def _through(block: nn.Module, run: Any, heads: Any, cos_TD: Any, sin_TD: Any, x_TE: Any, delta_TE: Any) -> Any:
    """Run a layer in the place of its block's forward, also when it runs again for a gradient."""
    vars(block)["forward"] = partial(run, heads, cos_TD, sin_TD)
    try:
        return nn.Module.__call__(block, x_TE, delta_TE)
    finally:
        del vars(block)["forward"]


def _checkpointed(checkpoint: Checkpoint, run: Any, x_TE: Tensor, delta_TE: Any) -> tuple[Tensor, None]:
    """Run a layer as stock checkpoints it: one tensor goes in, one comes out."""
    x_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if checkpoint.reentrant and not x_TE.requires_grad:
        x_TE = x_TE.detach().requires_grad_()

    def one(x_TE: Tensor) -> Tensor:
        x_TE, delta_TE = run(x_TE, None)
        return x_TE if delta_TE is None else x_TE + delta_TE

    return checkpoint.function(one, x_TE), None
