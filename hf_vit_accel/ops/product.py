"""Linears side by side as one product, with LoRA adapters or without: x W^T + b + (x A^T) (s B)^T.

s is an adapter's scaling. PEFT computes the adapter's share as one tensor, scales it to a second one, adds it to a
third, and casts in between. Here one small product adds to the result of the large one, forward and backward. W has a
gradient only where it is trained.

`T` rows, `E` width of the input, `F` width of the output, `R` the ranks of all adapters of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block, Part
from hf_vit_accel.ops.base import Apply, Context, FunctionContext, Gradients
from hf_vit_accel.ops.lora import Adapter, JoinedLinears, Lora, LoraInputs, cat, lora_of, scaled
from hf_vit_accel.ops.training.column_sum import MANY_ROWS, column_sum
from hf_vit_accel.ops.training.nodes import OpWithBackward, ProductThen
from hf_vit_accel.ops.training.norm_backward import NormRecipe


def product_reference(x_TE: Tensor, *arguments: Any) -> Tensor:
    """Compute Linears side by side, (T, F), of the flat `LoraInputs`, `JoinedLinears`, and a recipe that is ignored."""
    *flat, linears, _ = arguments
    inputs = linears.unflatten(flat)
    out_TF = F.linear(x_TE, *linears.join(inputs.weights, inputs.biases))
    for a_RE, b_FR in zip(*linears.stack(inputs), strict=True):
        out_TF = out_TF + F.linear(F.linear(x_TE, a_RE), b_FR)
    return out_TF


class ProductFunction(torch.autograd.Function):
    """Run `product_reference`; the shares of all adapters are one sum of products, which is rounded once.

    Weights are saved only where x needs a gradient, x (or its recipe) only where a weight or A does.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, *arguments: Any) -> Tensor:
        *flat, linears, recipe = arguments
        return product_forward(ctx, x_TE, flat, linears, recipe)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TF: Tensor) -> Gradients:
        dx_TE, gradients = product_backward(ctx, dy_TF)
        return dx_TE, *gradients, None, None


def product_forward(
    ctx: FunctionContext,
    x_TE: Tensor,
    flat: Sequence[Any],
    linears: JoinedLinears,
    recipe: NormRecipe | None,
    *,
    joined: tuple[Tensor, Tensor | None] | None = None,
    saves_input: bool = True,
) -> Tensor:
    """Compute the product, and save for `product_backward`: x only if `saves_input`, else the caller computes it again.

    `joined` are weight and bias of the product, where the caller has joined them already.
    """
    inputs = linears.unflatten(flat)
    needs_x, *needs = ctx.needs_input_grad
    ctx.linears = linears
    ctx.adapters = inputs.adapters
    ctx.needs_x = needs_x
    ctx.needs = linears.unflatten(needs[: len(flat)])
    ctx.reads_x = any(ctx.needs.weights) or any(ctx.needs.a)
    out_TF = F.linear(x_TE, *(joined or linears.join(inputs.weights, inputs.biases)))
    a_RE = b_FR = u_TR = None
    if inputs.adapters:
        ctx.a_dtypes = [a_RE.dtype for a_RE in inputs.a]
        ctx.b_dtypes = [b_FR.dtype for b_FR in inputs.b]
        ctx.ranks = [len(a_RE) for a_RE in inputs.a]
        all_a, all_b = linears.stack(inputs)
        a_RE = cat(all_a)
        b_FR = cat(all_b, dim=1)
        u_TR = F.linear(x_TE, a_RE)
        out_TF.addmm_(u_TR, b_FR.t())
    ctx.norm_settings = None
    saved_input: tuple[Tensor | None, ...] = ()
    if saves_input and ctx.reads_x:
        saved_input = (x_TE,)
        if recipe is not None and x_TE.shape[0] >= MANY_ROWS:  # few rows need little memory: a launch takes longer
            saved_input = recipe.sum_TE.detach(), recipe.weight_E.detach(), recipe.bias_E
            ctx.norm_settings = recipe.eps, recipe.rms, recipe.dtype
    weights = inputs.weights if needs_x else [None] * len(inputs.weights)
    ctx.save_for_backward(a_RE, b_FR, u_TR, *weights, *saved_input)
    return out_TF


def product_backward(
    ctx: FunctionContext,
    dy_TF: Tensor,
    *,
    joined_weight: Tensor | None = None,
    compute_input: Callable[[Tensor], Tensor] | None = None,
    dbiases: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of x and of the flat `LoraInputs`.

    The caller may pass the joined weight and the gradients of all biases, if it has them. `compute_input` computes x
    again from the gradient of x, where the forward did not save it, and may overwrite that gradient.
    """
    linears: JoinedLinears = ctx.linears
    needs: LoraInputs = ctx.needs
    count = len(linears.widths)
    a_RE, b_FR, u_TR, *saved = ctx.saved_tensors
    weights = saved[:count]
    dy_TF = dy_TF.contiguous()
    du_TR = dy_TF @ b_FR if ctx.adapters and (ctx.needs_x or any(needs.a)) else None

    def input_gradient() -> Tensor:
        dx_TE = dy_TF @ (linears.join(weights, None)[0] if joined_weight is None else joined_weight)
        return dx_TE if du_TR is None else dx_TE.addmm_(du_TR, a_RE)

    dx_TE = x_TE = dweight_FE = dbias_F = da_RE = db_FR = None
    if compute_input is not None:
        dx_TE = input_gradient()
        x_TE = compute_input(dx_TE)
    elif ctx.reads_x and ctx.norm_settings is not None:
        # The rows of the norm, as many as make a row of the product: a merger's row holds several.
        x_TE = NormRecipe(*saved[count:], *ctx.norm_settings).rows().view(len(dy_TF), -1)
    elif ctx.reads_x:
        x_TE = saved[count]
    if x_TE is not None and any(needs.weights):
        dweight_FE = dy_TF.t() @ x_TE
    if x_TE is not None and du_TR is not None and any(needs.a):
        da_RE = _product_in(ctx.a_dtypes, du_TR.t(), x_TE)
    del x_TE
    if dbiases is None and any(needs.biases):
        dbias_F = column_sum(dy_TF)
    if dx_TE is None and ctx.needs_x:
        dx_TE = input_gradient()
    gradients = [dweight_FE, dbias_F]  # of one Linear, None where it needs none
    if not linears.is_single or dbiases is not None:
        gradients = _masked(_split(linears, dweight_FE), needs.weights)
        gradients += _masked(_split(linears, dbias_F) if dbiases is None else dbiases, needs.biases)
    gradients.append(None)  # of the adapters' tuple
    if ctx.adapters:
        if any(needs.b):
            db_FR = _product_in(ctx.b_dtypes, dy_TF.t(), u_TR)
        gradients += _adapter_gradients(ctx, da_RE, db_FR)
    return dx_TE, gradients


def _split(linears: JoinedLinears, gradient: Tensor | None) -> Sequence[Tensor | None]:
    """Split the gradient of the joined weight or bias among the Linears."""
    if gradient is None or linears.is_single:
        return [gradient] * len(linears.widths)
    parts: list[Tensor | None] = []
    for linear, width in enumerate(linears.widths):
        part = gradient if width == len(gradient) else gradient[linears.columns(linear)]
        if part.ndim == 2 and linears.extra_features:
            part = part[:, : linears.in_features].contiguous()
        parts.append(part)
    return parts


def _masked(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the needed gradients, None in the place of others."""
    return [gradient if is_needed else None for gradient, is_needed in zip(gradients, needs, strict=True)]


def _adapter_gradients(ctx: FunctionContext, da_RE: Tensor | None, db_FR: Tensor | None) -> list[Tensor | None]:
    """Split the gradients of the stacked A and B among the adapters: all of A, then all of B."""
    linears: JoinedLinears = ctx.linears
    all_da: list[Tensor | None] = []
    all_db: list[Tensor | None] = []
    first = 0
    for index, adapter in enumerate(ctx.adapters):
        last = first + ctx.ranks[index]
        da = db = None
        if ctx.needs.a[index] and da_RE is not None:
            da = da_RE[first:last, : linears.in_features].to(ctx.a_dtypes[index])
        if ctx.needs.b[index] and db_FR is not None:
            db = scaled(db_FR[linears.columns(adapter.linear), first:last].to(ctx.b_dtypes[index]), adapter.scaling)
        all_da.append(da)
        all_db.append(db)
        first = last + -last % 8  # every rank is padded to a multiple of 8
    return [*all_da, *all_db]


def _product_in(dtypes: Sequence[torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    """Multiply x by y; bf16 products keep their fp32 sum if all who receive a part of it have fp32 weights."""
    if x.is_cuda and x.dtype == torch.bfloat16 and set(dtypes) == {torch.float32}:
        return torch.mm(x, y, out_dtype=torch.float32)
    return x @ y


def product(loras: Sequence[Lora], context: Context, *, padded: bool = False, extra_features: int = 0) -> Apply:
    """Build the product of Linears with the same input, side by side: one product is faster than several.

    Every Linear may be padded to a multiple of 8. Rows have `extra_features` columns of zeros beyond E.
    """
    bases = [lora.base for lora in loras]
    widths = tuple(len(base.weight) for base in bases)
    linears = JoinedLinears(
        widths=widths,
        padding=tuple(-width % 8 if padded else 0 for width in widths),
        in_features=bases[0].in_features,
        extra_features=extra_features,
        dtype=context.dtype,
    )
    read = context.reader(*((base, name) for name in ("weight", "bias") for base in bases))
    has_adapters = any(lora.owner is not None for lora in loras)

    if not has_adapters and not context.trains_by_kernels:

        def run_joined(x_TE: Tensor) -> Tensor:
            weights = read()
            return F.linear(x_TE, *linears.join(weights[: len(bases)], weights[len(bases) :]))

        return bases[0].forward if linears.is_single else run_joined

    def flat_inputs() -> list[Any]:
        adapters: list[Adapter] = []
        a = []
        b = []
        for linear, lora in enumerate(loras):
            for name in lora.active():
                adapters.append(Adapter(linear, lora.owner.scaling[name]))
                a.append(lora.owner.lora_A[name].weight)
                b.append(lora.owner.lora_B[name].weight)
        return [*read(), tuple(adapters), *a, *b]  # read last: `active` may unmerge adapters from the weights

    if context.trains_by_kernels and not any(lora.has_dropout for lora in loras):
        weights = flat_inputs if has_adapters else lambda: [*read(), ()]
        return OpWithBackward(function=ProductFunction, weights=weights, settings=(linears,), takes_norm=True)

    def run(x_TE: Tensor) -> Tensor:
        dropouts = [lora.owner.lora_dropout[name] for lora in loras for name in lora.active()]
        inputs = linears.unflatten(flat_inputs())
        if context.trains_by_kernels:  # the function saves no padded copy of the weights
            out_TF: Tensor = ProductFunction.apply(x_TE, *inputs.weights, *inputs.biases, (), linears, None)
        else:
            out_TF = F.linear(x_TE, *linears.join(inputs.weights, inputs.biases))
        for dropout, a_RE, b_FR in zip(dropouts, *linears.stack(inputs), strict=True):
            out_TF.addmm_(F.linear(dropout(x_TE), a_RE), b_FR.t())
        return out_TF

    return run


def is_foreign(module: Part, context: Context) -> bool:
    """Return whether a module has weights that no plain Linear holds: autocast may not decide the dtypes inside."""
    inner_modules = [inner for inner in module.modules() if inner._parameters]
    return any(context.reasons_replaced(inner, nn.Linear) for inner in inner_modules)


def build_linear(module: Part, context: Context) -> Apply:
    """Build a projection: a product, or the module itself where it is none."""
    lora = lora_of(module, context)
    return context.called(module) if lora is None else product([lora], context)


def build_qkv(block: Block, context: Context, shape: Apply | None) -> Apply:
    """Build the projection of rows (T, E) to packed queries, keys and values; `shape` is applied to the result.

    Three Linears run as one product, unless one of them was replaced. Their weights are joined at every call: weights
    are smaller than the results, and one product is faster than three.
    """
    loras: list[Lora] = []
    for module in block.qkv:
        lora = lora_of(module, context)
        if lora is not None:
            loras.append(lora)
    if len(loras) < len(block.qkv):
        project = _called([build_linear(module, context) for module in block.qkv], context)
    else:
        project = product(loras, context)
    if shape is None:
        return project
    if isinstance(project, OpWithBackward):
        return ProductThen(product=project, then=shape)
    return lambda x_TE: shape(project(x_TE))


def _called(projections: Sequence[Apply], context: Context) -> Apply:
    """Build a projection some modules of which are called: in memory of its own, since a module may keep its output.

    Attention casts to the dtype of autocast.
    """
    dtype = context.rows_dtype

    def run(x_TE: Tensor) -> Tensor:
        results = []
        for projection in projections:
            is_called = dtype is None or isinstance(projection, nn.Module)
            results.append(projection(x_TE if is_called else x_TE.to(dtype)))
        qkv_TF = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return qkv_TF.to(dtype or qkv_TF.dtype, copy=len(results) == 1)

    return run
