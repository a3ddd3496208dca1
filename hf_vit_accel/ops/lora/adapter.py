"""Linears with LoRA adapters: x W^T + b + (x A^T) (s B)^T, where s is an adapter's scaling.

PEFT computes the adapter's share as one tensor, scales it to a second one, adds it to a third, and casts in between.
Here one small product adds to the result of the large one, forward and backward. W has a gradient only where it is
trained.

`T` rows, `E` width of the input, `F` width of the output, `R` the ranks of all adapters of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.lora.inputs import Adapter, JoinedLinears, LoraInputs, rounded_rank, scaled
from hf_vit_accel.ops.lora.modules import Lora
from hf_vit_accel.ops.training.column_sum import column_sum
from hf_vit_accel.ops.training.context import FunctionContext, Gradients
from hf_vit_accel.ops.training.nodes import OpWithBackward
from hf_vit_accel.ops.training.norm_recipe import NormRecipe, load_input, save_input


def adapted_reference(x_TE: Tensor, *arguments: Any) -> Tensor:
    """Compute Linears with adapters side by side, (T, F); one PEFT module's result, if it is one.

    Args:
        arguments: `LoraInputs.flat`, `JoinedLinears`, and a `NormRecipe` or None.
    """
    *flat, linears, _ = arguments
    adapters = linears.adapters(flat)
    inputs = linears.unflatten(flat, len(adapters))
    out_TF = F.linear(x_TE, *linears.join(inputs.weights, inputs.biases))
    all_a, all_b = linears.stack(adapters, inputs.a, inputs.b)
    for a_RE, b_FR in zip(all_a, all_b, strict=True):
        out_TF = out_TF + F.linear(F.linear(x_TE, a_RE), b_FR)
    return out_TF


class AdaptedFunction(torch.autograd.Function):
    """Run `adapted_reference` with one sum of products for all adapters, which is rounded once."""

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, *arguments: Any) -> Tensor:
        *flat, linears, recipe = arguments
        return adapted_forward(ctx, x_TE, flat, linears, recipe)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TF: Tensor) -> Gradients:
        dx_TE, gradients = adapted_backward(ctx, dy_TF)
        return dx_TE, *gradients, None, None


def adapted_forward(
    ctx: FunctionContext,
    x_TE: Tensor,
    flat: Sequence[Any],
    linears: JoinedLinears,
    recipe: NormRecipe | None,
    *,
    joined: tuple[Tensor, Tensor | None] | None = None,
    saves_input: bool = True,
) -> Tensor:
    """Compute the product, and save for `adapted_backward`.

    Args:
        flat: `LoraInputs.flat`.
        joined: weight and bias of the product, where the caller has joined them already.
        saves_input: whether x is saved; otherwise the caller computes it again.
    """
    adapters = linears.adapters(flat)
    inputs = linears.unflatten(flat, len(adapters))
    needs_x, *needs_flat = ctx.needs_input_grad
    ctx.linears = linears
    ctx.adapters = adapters
    ctx.needs_x = needs_x
    ctx.needs = linears.unflatten(needs_flat, len(adapters))
    ctx.a_dtypes = [a_RE.dtype for a_RE in inputs.a]
    ctx.b_dtypes = [b_FR.dtype for b_FR in inputs.b]
    ctx.ranks = [len(a_RE) for a_RE in inputs.a]
    out_TF = F.linear(x_TE, *(joined or linears.join(inputs.weights, inputs.biases)))
    ctx.input_settings = None
    input_tensors: tuple[Tensor | None, ...] = ()
    if saves_input and (any(ctx.needs.weights) or any(ctx.needs.a)):
        input_tensors, ctx.input_settings = save_input(x_TE, recipe)
    a_RE = b_FR = u_TR = None
    if adapters:
        a_RE, b_FR = linears.matrices(adapters, inputs.a, inputs.b)
        u_TR = F.linear(x_TE, a_RE)
        out_TF.addmm_(u_TR, b_FR.t())
    weights = inputs.weights if needs_x else [None] * len(inputs.weights)
    ctx.save_for_backward(a_RE, b_FR, u_TR, *weights, *input_tensors)
    return out_TF


def adapted_backward(
    ctx: FunctionContext,
    dy_TF: Tensor,
    *,
    joined_weight: Tensor | None = None,
    compute_input: Callable[[Any], Tensor] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of x and of `LoraInputs.flat`.

    Args:
        joined_weight: weight of the product, where the caller has joined it already.
        compute_input: computes x again, from the gradient of x, where the forward did not save it. It may overwrite
            that gradient.
    """
    linears: JoinedLinears = ctx.linears
    needs: LoraInputs[bool] = ctx.needs
    a_RE, b_FR, u_TR, *saved = ctx.saved_tensors
    weights = saved[: len(linears.widths)]
    input_tensors = saved[len(linears.widths) :]
    dy_TF = dy_TF.contiguous()
    dx_TE = du_TR = x_TE = dweight_FE = dbias_F = da_RE = db_FR = None
    if ctx.adapters and (ctx.needs_x or any(needs.a)):
        du_TR = dy_TF @ b_FR
    if ctx.needs_x:
        weight_FE = linears.join(weights, None)[0] if joined_weight is None else joined_weight
        dx_TE = dy_TF @ weight_FE
        if du_TR is not None:
            dx_TE.addmm_(du_TR, a_RE)
    if any(needs.b):
        db_FR = _product_in(ctx.b_dtypes, dy_TF.t(), u_TR)
    if any(needs.biases):
        dbias_F = column_sum(dy_TF)
    if compute_input is not None:
        x_TE = compute_input(dx_TE)
    elif any(needs.weights) or any(needs.a):
        x_TE = load_input(input_tensors, ctx.input_settings, len(dy_TF))
    if any(needs.weights):
        assert x_TE is not None
        dweight_FE = dy_TF.t() @ x_TE
    if du_TR is not None and any(needs.a):
        assert x_TE is not None
        da_RE = _product_in(ctx.a_dtypes, du_TR.t(), x_TE)
    return dx_TE, _split_gradients(ctx, dweight_FE, dbias_F, da_RE, db_FR)


def _split_gradients(
    ctx: FunctionContext, dweight_FE: Tensor | None, dbias_F: Tensor | None, da_RE: Tensor | None, db_FR: Tensor | None
) -> list[Tensor | None]:
    """Split the gradients of the joined matrices among Linears and adapters, in the order of `LoraInputs.flat`."""
    linears: JoinedLinears = ctx.linears
    needs: LoraInputs[bool] = ctx.needs
    dweights: list[Tensor | None] = []
    dbiases: list[Tensor | None] = []
    for linear, (needs_weight, needs_bias) in enumerate(zip(needs.weights, needs.biases, strict=True)):
        columns = linears.columns(linear)
        dweight = dbias = None
        if needs_weight and dweight_FE is not None:
            dweight = dweight_FE[columns, : linears.in_features].contiguous()
        if needs_bias and dbias_F is not None:
            dbias = dbias_F[columns]
        dweights.append(dweight)
        dbiases.append(dbias)
    all_da: list[Tensor | None] = []
    all_db: list[Tensor | None] = []
    first = 0
    for index, adapter in enumerate(ctx.adapters):
        last = first + ctx.ranks[index]
        da = db = None
        if needs.a[index] and da_RE is not None:
            da = da_RE[first:last, : linears.in_features].to(ctx.a_dtypes[index])
        if needs.b[index] and db_FR is not None:
            db = scaled(db_FR[linears.columns(adapter.linear), first:last].to(ctx.b_dtypes[index]), adapter.scaling)
        all_da.append(da)
        all_db.append(db)
        first += rounded_rank(ctx.ranks[index])
    return LoraInputs(weights=dweights, biases=dbiases, a=all_da, b=all_db).flat(None)


def _product_in(dtypes: Sequence[torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    """Multiply x by y; bf16 products keep their fp32 sum if all who receive a part of it have fp32 weights."""
    if x.is_cuda and x.dtype == torch.bfloat16 and set(dtypes) == {torch.float32}:
        return torch.mm(x, y, out_dtype=torch.float32)
    return x @ y


def product(loras: Sequence[Lora], context: Context, in_features: int | None = None) -> Apply:
    """Build the product of Linears with the same input, side by side; of several each is padded to a multiple of 8.

    Args:
        in_features: columns of the rows, where those after E are zeros; None for E.
    """
    widths = tuple(len(lora.base.weight) for lora in loras)
    width_in = loras[0].base.in_features
    linears = JoinedLinears(
        widths=widths,
        padding=tuple(-width % 8 if len(loras) > 1 else 0 for width in widths),
        in_features=width_in,
        extra_features=(in_features or width_in) - width_in,
        dtype=context.dtype,
    )
    read = context.reader(*((lora.base, name) for name in ("weight", "bias") for lora in loras))

    def flat_inputs() -> list[Any]:
        adapters: list[Adapter] = []
        a = []
        b = []
        for linear, lora in enumerate(loras):
            for active in lora.active():
                adapters.append(Adapter(linear, active.scaling))
                a.append(active.a.weight)
                b.append(active.b.weight)
        return [*read(), tuple(adapters), *a, *b]  # read last: `active` may unmerge adapters from the weights

    if context.trains_by_kernels and not any(lora.has_dropout for lora in loras):
        return OpWithBackward(function=AdaptedFunction, weights=flat_inputs, settings=(linears,), takes_norm=True)

    def run(x_TE: Tensor) -> Tensor:
        dropouts = [active.dropout for lora in loras for active in lora.active()]
        flat = flat_inputs()
        adapters = linears.adapters(flat)
        inputs = linears.unflatten(flat, len(adapters))
        if context.trains_by_kernels:  # the function saves no padded copy of the weights
            out_TF: Tensor = AdaptedFunction.apply(x_TE, *inputs.weights, *inputs.biases, (), linears, None)
        else:
            out_TF = F.linear(x_TE, *linears.join(inputs.weights, inputs.biases))
        all_a, all_b = linears.stack(adapters, inputs.a, inputs.b)
        for dropout, a_RE, b_FR in zip(dropouts, all_a, all_b, strict=True):
            out_TF.addmm_(F.linear(dropout(x_TE), a_RE), b_FR.t())
        return out_TF

    return run
