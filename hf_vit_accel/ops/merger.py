"""How a tower ends: rows may be downsampled, then a merger adds, normalises and multiplies.

Downsampling is a convolution over each merge block, run as one matrix product. The patches of a block are consecutive
rows. `T` rows, `M` merged tokens, `E` width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.machine import KERNELS, guarded
from hf_vit_accel.ops import mlp as mlps
from hf_vit_accel.ops import norm as norms
from hf_vit_accel.ops.base import AddThen, Apply, Context, Operation
from hf_vit_accel.ops.embedding import READ_OF_CONVOLUTION, reasons_overlapping
from hf_vit_accel.ops.lora import Lora
from hf_vit_accel.ops.product import build_linear, is_foreign
from hf_vit_accel.ops.training import mlp as trained_mlp
from hf_vit_accel.ops.training.nodes import OpWithBackward, normed


def layers_of(merger: Part) -> tuple[Part, list[Part]] | None:
    """Return (norm, the modules after it), by the attribute names of the families."""
    if hasattr(merger, "ln_q"):
        return (merger.ln_q, list(merger.mlp)) if isinstance(merger.mlp, nn.Sequential | nn.ModuleList) else None
    if all(hasattr(merger, name) for name in ("norm", "linear_fc1", "act_fn", "linear_fc2")):
        return merger.norm, [merger.linear_fc1, merger.act_fn, merger.linear_fc2]
    return None


def _is_gated(merger: nn.Module) -> bool:
    """Return whether a merger is a product, its norm, an activation and a SwiGLU that `ops.mlp` knows."""
    return all(hasattr(merger, name) for name in ("proj", "post_projection_norm", "act1", "gate_proj"))


def _reasons_against(merger: Part, context: Context) -> list[str]:
    reasons = ["it has hooks"] if id(merger) in context.hooked_parts else context.reasons_replaced(merger)
    if reasons:
        return reasons
    if _is_gated(merger):
        return norms.reasons_against(merger.post_projection_norm, context) + mlps.reasons_against(merger, context)
    layers = layers_of(merger)
    if layers is None or not hasattr(merger, "hidden_size"):
        return [f"{type(merger).__name__} is not a merger that is known"]
    if isinstance(getattr(merger, "mlp", None), nn.Sequential):
        reasons = context.reasons_replaced(merger.mlp)
    if reasons:
        return reasons
    return norms.reasons_against(layers[0], context)


def fused(merger: Part, context: Context) -> AddThen:
    """Build (x, delta) to (x + delta, the merger's result)."""
    if _is_gated(merger):
        return _fused_gated(merger, context)
    layers = layers_of(merger)
    assert layers is not None
    norm, modules = layers
    has_foreign = any(is_foreign(module, context) for module in modules)
    add_norm = guarded(KERNELS, norms.fused(norm, context, in_rows_dtype=not has_foreign))
    width = norm.weight.shape[0]
    for module in modules:
        context.called(module)

    def run_modules(x_ME: Tensor) -> Tensor:
        for module in modules:
            x_ME = module(x_ME)
        return x_ME

    trained = _differentiable(modules, context) if context.trains_by_kernels else None
    add_norm_merge = normed(add_norm, trained or run_modules, width=context.read(merger, "hidden_size"))
    # A plain norm before may keep a reference to x: then x is cloned before the kernel writes to it.
    in_place = context.reference or "norms" in context.fused

    def merge(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TE = x_TE if in_place else x_TE.clone()
        shape = -1, width  # deepstack mergers normalise merged tokens, the others patches
        sum_TE, x_ME = add_norm_merge(x_TE.view(shape), None if delta_TE is None else delta_TE.reshape(shape))
        return sum_TE.view(x_TE.shape), x_ME

    return merge


def _fused_gated(merger: Part, context: Context) -> AddThen:
    add_norm = guarded(KERNELS, norms.fused(merger.post_projection_norm, context))
    project = build_linear(merger.proj, context)
    activate = context.called(merger.act1)
    gated = mlps.fused(merger, context)

    def merge(x_ME: Tensor, delta_ME: Tensor | None) -> tuple[Tensor, Tensor]:
        assert delta_ME is None, "downsampled rows are no residual stream"
        return x_ME, gated(activate(add_norm(project(x_ME), None)[1]))

    return merge


def _differentiable(modules: list[Part], context: Context) -> OpWithBackward | None:
    """Build product, GELU, product as an MLP that saves little for its gradient; None for other modules."""
    if len(modules) != 3:
        return None
    for module, expected in zip(modules, (nn.Linear, nn.GELU, nn.Linear), strict=True):
        if context.reasons_replaced(module, expected):
            return None
    first, activation, last = modules
    kind = "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    trained = trained_mlp.build([Lora(base=first)], Lora(base=last), kind, None, context)
    return trained if isinstance(trained, OpWithBackward) else None


def _plain(merger: nn.Module, context: Context) -> AddThen:
    merger = context.called(merger)

    def merge(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        # The next norm writes in place, and the module may keep its input or return it.
        return x_TE.clone(), merger(x_TE)

    return merge


OPERATION = Operation(
    name="mergers",
    summary="the residual addition before a merger and its normalisation in one kernel",
    subjects=Parts.mergers,
    reasons_against=_reasons_against,
    fused=fused,
    plain=_plain,
    guards=True,
)


def _fused_downsample(conv: Part, context: Context) -> Apply:
    read_weights = context.reader((conv, "weight"), (conv, "bias"))
    for name in READ_OF_CONVOLUTION:
        context.read(conv, name)

    def downsample(x_TE: Tensor) -> Tensor:
        weight, bias_E = read_weights()
        # Rows have their channels last, so the weight is copied in that order: a hundredth of the product's time.
        weight = weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(x_TE.reshape(-1, weight.shape[1]).to(weight.dtype), weight, bias_E)

    return downsample


def _plain_downsample(conv: Part, context: Context) -> Apply:
    conv = context.called(conv)

    def downsample(x_TE: Tensor) -> Tensor:
        x_MijE = x_TE.view(-1, *conv.kernel_size, x_TE.shape[-1])
        return Tensor.flatten(conv(x_MijE.permute(0, 3, 1, 2)), 1)

    return downsample


DOWNSAMPLE = Operation(
    name="downsample",
    summary="a convolution over each merge block as one matrix product",
    subjects=lambda parts: [] if parts.downsample is None else [parts.downsample],
    reasons_against=lambda conv, context: context.reasons_replaced(conv, nn.Conv2d) or reasons_overlapping(conv),
    fused=_fused_downsample,
    plain=_plain_downsample,
    triton=False,
    missing="the tower does not downsample",
)


Finish = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
"""The last layer's (x, delta) to the outputs of the tower."""


def finish(norm: AddThen | None, downsample: Apply | None, merge: AddThen | None, *, grad: bool) -> Finish:
    """Build the end of the tower. With gradients it returns the very rows that the merger gets, for hooks on them."""
    if norm is None and merge is not None and not grad:
        return merge

    def run(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, ...]:
        if norm is not None:
            _, x_TE = norm(x_TE, delta_TE)
            delta_TE = None
            if downsample is not None:
                x_TE = downsample(x_TE)
        if merge is None:
            return (x_TE if delta_TE is None else x_TE + delta_TE,)
        if not grad:
            return merge(x_TE, None)
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        return x_TE, merge(x_TE, None)[1]

    return run
