"""An MLP that is trained: two products with an activation between them, or a SwiGLU; Linears may have LoRA adapters.

The first product's result is saved, the activation is computed again: its result would need as much memory. The kernel
of the activation's gradient computes the same factors, so it writes the activation, too.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8, `P` partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import ACTIVATIONS, cut_off, pad_swiglu, quick_gelu_to, swiglu, swiglu_reference
from hf_vit_accel.ops.base import Apply, Context, FunctionContext, Gradients
from hf_vit_accel.ops.launch import device_function, kernel, tl
from hf_vit_accel.ops.lora import Lora
from hf_vit_accel.ops.product import product, product_backward, product_forward, product_reference
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, add_up, runs, store_sum
from hf_vit_accel.ops.training.nodes import InnerContext, OpWithBackward


def activated_reference(z: Tensor, kind: str, limit: float | None = None) -> Tensor:
    """Compute the activation of rows (T, F); kind "silu" is a SwiGLU of gate and up side by side, (T, 2 F)."""
    if kind == "silu":
        return swiglu_reference(*z.chunk(2, dim=-1), limit=limit)
    return ACTIVATIONS[kind](z)


def _activate(z: Tensor, kind: str, limit: float | None) -> Tensor:
    """Compute the activation like stock, from the rounded result of the first product."""
    if kind == "silu":
        return swiglu(*z.chunk(2, dim=-1), limit=limit)
    return quick_gelu_to(z, torch.empty_like(z)) if kind == "quick_gelu" else ACTIVATIONS[kind](z)


@kernel
def _activation_backward_kernel(
    z,
    dh,
    dz,
    h,
    partial,
    rows,
    length,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    WIDTH: tl.constexpr,
    NEED_H: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    # For "silu", z and dz hold gate and up side by side, (T, 2 WIDTH). dh may also be dz of a GELU, or h of "silu".
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = z.dtype.element_ty
    is_swiglu: tl.constexpr = KIND == "silu"
    z_width: tl.constexpr = 2 * WIDTH if is_swiglu else WIDTH
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up_total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for start in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + start + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * WIDTH + f
        z_cell = t.to(tl.int64) * z_width + f
        x = tl.load(z + z_cell, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dh + cell, mask=inside, other=0.0).to(tl.float32)
        if is_swiglu:
            up = tl.load(z + z_cell + WIDTH, mask=inside, other=0.0).to(tl.float32)
            if LIMITED:
                x_flows = x <= limit
                up_flows = (up <= limit) & (up >= -limit)
                x, up = cut_off(x, up, limit)
        gate, slope = _gate_and_slope(x, KIND)
        if is_swiglu:
            dup = gradient * (x * gate)
            gradient = gradient * up
            if LIMITED:
                gradient = tl.where(x_flows, gradient, 0.0)
                dup = tl.where(up_flows, dup, 0.0)
            tl.store(dz + z_cell + WIDTH, dup.to(dtype), mask=inside)
            if NEED_BIAS:
                up_total += dup
        if NEED_H:
            if is_swiglu:
                result = (x * gate).to(dtype).to(tl.float32) * up
            elif KIND == "quick_gelu":  # it rounds its gate before the product; so does its forward
                result = x * gate.to(dtype).to(tl.float32)
            else:
                result = x * gate
            tl.store(h + cell, result.to(dtype), mask=inside)
        dx = gradient * (gate + x * slope)
        tl.store(dz + z_cell, dx.to(dtype), mask=inside)
        if NEED_BIAS:
            total += dx
    if NEED_BIAS:
        store_sum(partial, total, f, tl.program_id(1), WIDTH)
        if is_swiglu:
            store_sum(partial, up_total, f, tl.num_programs(1) + tl.program_id(1), WIDTH)


@device_function
def _gate_and_slope(x, KIND: tl.constexpr):
    """Return gate and slope of an activation x * gate, whose derivative is gate + x * slope."""
    if KIND == "gelu":
        gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, without tanh's cancellation.
        gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "quick_gelu":
        gate = 1.0 / (1.0 + tl.exp(-1.702 * x))
        slope = gate * (1.0 - gate) * 1.702
    else:
        gate = 1.0 / (1.0 + tl.exp(-x))
        slope = gate * (1.0 - gate)
    return gate, slope


def activation_gradient_(
    z: Tensor, dh_TF: Tensor, kind: str, limit: float | None, *, needs_h: bool = False, needs_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of an activation's input; `dh_TF` is overwritten.

    Returns that gradient and, if they are needed, the activation again, and partial sums of the gradient: (1, P, F), or
    (2, P, F) for "silu".
    """
    rows, width = dh_TF.shape
    is_swiglu = kind == "silu"
    dz = torch.empty_like(z) if is_swiglu else dh_TF
    h_TF = dh_TF if is_swiglu or not needs_h else torch.empty_like(z)
    columns = -(-width // BLOCK_F)
    length, count = runs(rows, columns, z.device, programs_per_sm=16)
    size = 2 if is_swiglu else 1, count if needs_bias else 0, width
    partial = torch.empty(size, dtype=torch.float32, device=z.device)
    _activation_backward_kernel[(columns, count)](
        z,
        dh_TF,
        dz,
        h_TF,
        partial,
        rows,
        length,
        limit or 0.0,
        KIND=kind,
        LIMITED=limit is not None,
        WIDTH=width,
        NEED_H=needs_h,
        NEED_BIAS=needs_bias,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        STAGES=3,
        num_warps=4 if is_swiglu else 8,
    )
    return dz, h_TF, partial


class Activated(torch.autograd.Function):
    """Run `activated_reference` as one kernel in each direction; only its input is saved."""

    @staticmethod
    def forward(ctx: FunctionContext, z: Tensor, kind: str, limit: float | None = None) -> Tensor:
        ctx.save_for_backward(z)
        ctx.kind = kind
        ctx.limit = limit
        return _activate(z, kind, limit)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dh_TF: Tensor) -> Gradients:
        (z,) = ctx.saved_tensors
        own_dh_TF = dh_TF.clone(memory_format=torch.contiguous_format)  # the kernel overwrites it
        return activation_gradient_(z, own_dh_TF, ctx.kind, ctx.limit)[0], None, None


def mlp_reference(x_TE: Tensor, *arguments: Any) -> Tensor:
    """Compute an MLP, (T, E), as two products with an activation between them; see `build` for its arguments."""
    count, *flat, first, last, kind, limit, recipe = arguments
    z = product_reference(x_TE, *flat[:count], first, recipe)
    return product_reference(activated_reference(z, kind, limit), *flat[count:], last, None)


class MlpFunction(torch.autograd.Function):
    """Run `mlp_reference` as one node of autograd's graph.

    The widths of a SwiGLU's products are multiples of 8, in both directions: cuBLAS takes three times as long for
    others. Weights are padded in every call (26 MB at 1280 x 3420, about 25 us on an H200) and not kept.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, *arguments: Any) -> Tensor:
        count, *flat, first, last, kind, limit, recipe = arguments
        needs_x, _, *needs = ctx.needs_input_grad
        ctx.first = InnerContext((needs_x, *needs[:count]))
        needs_z = any(ctx.first.needs_input_grad)
        ctx.last = InnerContext((needs_z, *needs[count : len(flat)]))
        ctx.kind = kind
        ctx.limit = limit
        first_joined: Any = None
        last_joined = None
        if kind == "silu":
            (gate_FE, up_FE), (gate_F, up_F), *_ = first.unflatten(flat[:count])
            *first_joined, down_EG = pad_swiglu(gate_FE, up_FE, gate_F, up_F, flat[count])
            last_joined = down_EG, flat[count + 1]
        z = product_forward(ctx.first, x_TE, flat[:count], first, recipe, joined=first_joined)
        del first_joined
        h_TF = _activate(z, kind, limit)
        out_TE = product_forward(ctx.last, h_TF, flat[count:], last, None, joined=last_joined, saves_input=not needs_z)
        ctx.saved_of_first = len(ctx.first.saved_tensors)
        ctx.save_for_backward(z if needs_z else None, *ctx.first.saved_tensors, *ctx.last.saved_tensors)
        ctx.first.saved_tensors = ctx.last.saved_tensors = ()
        return out_TE

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TE: Tensor) -> Gradients:
        z, *saved = ctx.saved_tensors
        first: FunctionContext = ctx.first
        last: FunctionContext = ctx.last
        first.saved_tensors = saved[: ctx.saved_of_first]
        last.saved_tensors = saved[ctx.saved_of_first :]
        first_weight = down_EG = None
        if ctx.kind == "silu" and first.needs_x:
            gate_FE, up_FE = first.saved_tensors[3:5]
            first_weight, _, down_EG = pad_swiglu(gate_FE, up_FE, None, None, last.saved_tensors[3])
        dz = dbiases = None

        def compute_h(dh_TF: Tensor) -> Tensor:
            nonlocal dz, dbiases
            needs_bias = any(first.needs.biases)
            dz, h_TF, partial = activation_gradient_(
                z, dh_TF, ctx.kind, ctx.limit, needs_h=last.reads_x, needs_bias=needs_bias
            )
            if needs_bias:
                dbiases = add_up(partial, z.dtype, first.linears.widths[0])
            return h_TF

        compute_input = None if z is None else compute_h
        last_gradients = product_backward(last, dy_TE, joined_weight=down_EG, compute_input=compute_input)[1]
        del down_EG
        dx_TE = None
        first_gradients: list[Tensor | None] = [None] * (len(first.needs_input_grad) - 1)
        if dz is not None:
            dx_TE, first_gradients = product_backward(first, dz, joined_weight=first_weight, dbiases=dbiases)
        first.saved_tensors = last.saved_tensors = ()
        return dx_TE, None, *first_gradients, *last_gradients, *[None] * 5


def build(before: Sequence[Lora], after: Lora, kind: str, limit: float | None, context: Context) -> Apply:
    """Build an MLP with gradients or adapters; `before` are gate and up for kind "silu"."""
    is_swiglu = kind == "silu"
    first = product(before, context, padded=is_swiglu)
    last = product([after], context, extra_features=-len(before[0].base.weight) % 8 if is_swiglu else 0)
    if isinstance(first, OpWithBackward) and isinstance(last, OpWithBackward):
        read_first = first.weights
        read_last = last.weights

        def weights() -> list[Any]:
            first_flat = read_first()
            return [len(first_flat), *first_flat, *read_last()]

        settings = *first.settings, *last.settings, kind, limit
        return OpWithBackward(function=MlpFunction, weights=weights, settings=settings, takes_norm=True)
    activate = activated_reference if context.reference else Activated.apply
    return lambda x_TE: last(activate(first(x_TE), kind, limit))
