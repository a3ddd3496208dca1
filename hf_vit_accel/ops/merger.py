"""The residual addition before a merger, its norm, and the products that follow.

`T` rows, `M` merged tokens, `E` width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.machine import KERNELS, guarded
from hf_vit_accel.ops import linear
from hf_vit_accel.ops import mlp as mlps
from hf_vit_accel.ops import norm as norms
from hf_vit_accel.ops.base import AddNorm, Context, Operation
from hf_vit_accel.ops.training.gelu_backward import GeluMlp
from hf_vit_accel.ops.training.norm_recipe import attached_recipe
from hf_vit_accel.ops.training.trained import Trained


def layers_of(merger: Any) -> tuple[Any, list[Any]] | None:
    """(norm, the modules that follow it), by the names that the families use."""
    if hasattr(merger, "ln_q"):
        return (merger.ln_q, list(merger.mlp)) if isinstance(merger.mlp, nn.Sequential | nn.ModuleList) else None
    if all(hasattr(merger, name) for name in ("norm", "linear_fc1", "act_fn", "linear_fc2")):
        return merger.norm, [merger.linear_fc1, merger.act_fn, merger.linear_fc2]
    return None


def _gated(merger: Any) -> bool:
    """Whether it is a product, its norm, an activation, and a SwiGLU by the names that `ops.mlp` knows."""
    return all(hasattr(merger, name) for name in ("proj", "post_projection_norm", "act1", "gate_proj"))


def _reasons_against(merger: Any, context: Context) -> list[str]:
    if reasons := context.reasons_replaced(merger):
        return reasons
    if _gated(merger):
        return norms.reasons_against(merger.post_projection_norm, context) + mlps.reasons_against(merger, context)
    layers = layers_of(merger)
    if layers is None or not hasattr(merger, "hidden_size"):
        return [f"{type(merger).__name__} is not a merger that is known"]
    if isinstance(getattr(merger, "mlp", None), nn.Sequential) and (reasons := context.reasons_replaced(merger.mlp)):
        return reasons
    return norms.reasons_against(layers[0], context)


def fused(merger: Any, context: Context) -> AddNorm:
    """(x, delta) to (x + delta, what the merger makes of it)."""
    if _gated(merger):
        return _fused_gated(merger, context)
    norm, rest = layers_of(merger) or (None, [])
    assert norm is not None
    add_norm = guarded(KERNELS, norms.fused(norm, context))
    width, merged_width = norm.weight.shape[0], context.read(merger, "hidden_size")
    for module in rest:
        context.called(module)
    trained = _differentiable(rest, context) if context.trains_by_kernels else None
    # Norms that are not fused have been shown x, and may keep it: then nothing is written to it in place.
    in_place = context.reference or "norms" in context.fused

    def merge(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TE = x_TE if in_place else x_TE.clone()
        shape = -1, width  # deepstack mergers normalise merged tokens, the others patches
        sum_TE, normed_TE = add_norm(x_TE.view(shape), None if delta_TE is None else delta_TE.reshape(shape))
        x_ME = normed_TE.view(-1, merged_width)
        if trained is not None:
            return sum_TE.view(x_TE.shape), trained(x_ME, recipe=attached_recipe(normed_TE))
        for each in rest:
            x_ME = each(x_ME)
        return sum_TE.view(x_TE.shape), x_ME

    return merge


def _fused_gated(merger: Any, context: Context) -> AddNorm:
    add_norm = guarded(KERNELS, norms.fused(merger.post_projection_norm, context))
    project, activate = linear.build(merger.proj, context), context.called(merger.act1)
    gated = mlps.fused(merger, context)

    def merge(x_ME: Tensor, delta_ME: Tensor | None) -> tuple[Tensor, Tensor]:
        assert delta_ME is None, "rows that were downsampled are no residual stream"
        return x_ME, gated(activate(add_norm(project(x_ME), None)[1]))

    return merge


def _differentiable(rest: list[Any], context: Context) -> Trained | None:
    """Product, GELU, product as an MLP that keeps little for its gradient; None for anything else."""
    kinds = nn.Linear, nn.GELU, nn.Linear
    if len(rest) != 3 or any(map(context.reasons_replaced, rest, kinds)):
        return None
    kind, weights = "gelu_tanh" if rest[1].approximate == "tanh" else "gelu", mlps.places(rest[:1], rest[2])
    return Trained(function=GeluMlp, weights=context.reader(*weights), settings=(kind,), takes_norm=True)


def _call(merger: nn.Module, x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
    x_TE = x_TE if delta_TE is None else x_TE + delta_TE
    # The module may keep what it is given or hand it on, and the next norm writes in place.
    return x_TE.clone(), merger(x_TE)


def _plain(merger: nn.Module, context: Context) -> AddNorm:
    return partial(_call, context.called(merger))


OPERATION = Operation(
    name="mergers",
    summary="the residual addition before a merger and its normalisation in one kernel",
    subjects=Parts.mergers,
    reasons_against=_reasons_against,
    fused=fused,
    plain=_plain,
    guards=True,
)
