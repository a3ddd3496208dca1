"""The MLP of a layer: two products with an activation between them, in the first product's kernel or in its own.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.activation import (
    ACTIVATIONS,
    cut_off,
    linear_gelu_tanh,
    pad_swiglu,
    quick_gelu_,
    swiglu,
    swiglu_reference,
)
from hf_vit_accel.ops.base import Apply, Context, Operation, ReadWeights
from hf_vit_accel.ops.launch import descriptor_of, device_function, kernel, next_power_of_2, tl, why_not_descriptors
from hf_vit_accel.ops.lora import Lora, lora_of
from hf_vit_accel.ops.lora import reasons_against as lora_reasons
from hf_vit_accel.ops.training import mlp as trained_mlp

KINDS = "gelu_tanh", "quick_gelu", "silu"
"""The activations of layers for which there are kernels."""


def activation_of(activation: nn.Module, context: Context) -> str | None:
    """Return the name of `ACTIVATIONS` that a module computes, by trying it; None for any other function."""
    key = type(activation), getattr(activation.forward, "__func__", None), activation.extra_repr()
    if key not in context.activations:
        kind = _try_activation(activation, torch.device("cpu"))
        context.activations[key] = kind or _try_activation(activation, context.device)  # kernels run on a GPU only
    return context.activations[key]


def _try_activation(activation: nn.Module, device: torch.device) -> str | None:
    x = torch.linspace(-6, 6, 97, device=device, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            y = activation.forward(x.clone())
        except Exception:  # a third-party module may raise anything
            return None
        for kind, function in ACTIVATIONS.items():
            if torch.allclose(y, function(x), rtol=1e-6, atol=1e-7):
                return kind
    return None


def layers_of(mlp: Part) -> tuple[list[Part], Part, Part] | None:
    """Return (Linears before the activation, activation, Linear after it), by the attribute names of the families."""
    for before, activation, after in _NAMES:
        if all(hasattr(mlp, name) for name in (*before, activation, after)):
            return [getattr(mlp, name) for name in before], getattr(mlp, activation), getattr(mlp, after)
    if all(hasattr(mlp, name) for name in ("fc1", "fc3", "fc2")):  # the code of dots.ocr calls silu, a function
        return [mlp.fc1, mlp.fc3], _SILU, mlp.fc2
    return None


_SILU = nn.SiLU()
_NAMES = (
    (("gate_proj", "up_proj"), "act_fn", "down_proj"),
    (("linear_fc1",), "act_fn", "linear_fc2"),
    (("fc1",), "act", "fc2"),
    (("fc1",), "activation_fn", "fc2"),
)


def reasons_against(mlp: Part, context: Context) -> list[str]:
    """Report why a module is neither two products with an activation between them nor a SwiGLU."""
    layers = layers_of(mlp)
    reasons = context.reasons_replaced(mlp)
    if reasons or layers is None:
        return reasons or [f"{type(mlp).__name__} is not an MLP that is known"]
    before, activation, after = layers
    for linear in (*before, after):
        reasons += lora_reasons(linear, context)
    if reasons:
        return reasons
    missing = [linear.bias is None for linear in before]
    if any(missing) and (len(before) == 1 or not all(missing)):
        return ["a Linear of the MLP has no bias"]
    reasons = [] if activation is _SILU else context.reasons_replaced(activation)
    if reasons:
        return reasons
    kind = activation_of(activation, context)
    if kind not in KINDS or (kind == "silu") != (len(before) == 2):
        return [f"the activation {type(activation).__name__} is not one that the kernels know for this MLP"]
    return []


def fused(mlp: Part, context: Context) -> Apply:
    """Build an MLP whose activation is computed by a kernel."""
    layers = layers_of(mlp)
    assert layers is not None
    before, activation, after = layers
    context.watch.read_all(activation)
    kind = str(activation_of(activation, context))
    limit = context.read(mlp, "swiglu_limit")
    loras: list[Lora] = []
    for linear in (*before, after):
        lora = lora_of(linear, context)
        if lora is not None:
            loras.append(lora)
    if context.reference or context.grad or any(lora.owner is not None for lora in loras):
        return trained_mlp.build(loras[:-1], loras[-1], kind, limit, context)
    names = [*((linear, "weight") for linear in before), *((linear, "bias") for linear in before)]
    weights = context.reader(*names, (after, "weight"), (after, "bias"))
    if kind == "gelu_tanh":
        return _gelu(weights, linear_gelu_tanh)
    if kind == "quick_gelu":
        return _gelu(weights, _linear_quick_gelu)
    fits_descriptors = why_not_descriptors(context.device) is None and before[0].weight.shape[1] % 8 == 0
    return _swiglu_in_one_launch(weights, limit) if fits_descriptors else _swiglu(weights, limit)


def _gelu(weights: ReadWeights, linear_activation: Callable[..., Tensor]) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        weight_FE, bias_F, weight_EF, bias_E = weights()
        return F.linear(linear_activation(x_TE, weight_FE, bias_F), weight_EF, bias_E)

    return run


def _linear_quick_gelu(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    return quick_gelu_(F.linear(x_TE, weight_FE, bias_F))


# Qwen2.5-VL's width of 3420 sends cuBLAS to kernels of a third of the speed (H200, 16384 rows: 616-650 us a product
# against 203 at 3424). So either the kernel reads weights whose alignment does not matter, or the weights are padded
# with zeros into scratch memory of this layer. Parameters stay as they are, and no copy is kept that could go stale.
# (Parameters as views of padded storage would cost nothing, but safetensors and fused optimizers reject them.)


def _swiglu_in_one_launch(weights: ReadWeights, limit: float | None) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        *first, down_E = weights()
        h_TG, down_EG = linear_swiglu(x_TE, *first, limit=limit)
        return F.linear(h_TG, down_EG, down_E)

    return run


def _swiglu(weights: ReadWeights, limit: float | None) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        gate_FE, up_FE, gate_F, up_F, down_EF, down_E = weights()
        if gate_FE.shape[0] % 8 == 0:
            gate_TF = F.linear(x_TE, gate_FE, gate_F)
            up_TF = F.linear(x_TE, up_FE, up_F)
            return F.linear(swiglu(gate_TF, up_TF, limit=limit), down_EF, down_E)
        weight, bias, down_EG = pad_swiglu(gate_FE, up_FE, gate_F, up_F, down_EF)
        gate_and_up = F.linear(x_TE, weight, bias).chunk(2, dim=-1)
        h_TG = swiglu(*gate_and_up, limit=limit)
        del gate_and_up
        return F.linear(h_TG, down_EG, down_E)

    return run


def linear_swiglu_reference(
    x_TE: Tensor,
    gate_FE: Tensor,
    up_FE: Tensor,
    gate_F: Tensor | None,
    up_F: Tensor | None,
    down_EF: Tensor,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what the last product of a SwiGLU MLP takes: its rows (T, G) and its weight (E, G), zeros beyond F.

    Rounding happens once, at the end (stock rounds both products, silu and the result).
    """
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    gate_TF, up_TF = (
        F.linear(x_TE.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        for weight, bias in ((gate_FE, gate_F), (up_FE, up_F))
    )
    padding = -gate_FE.shape[0] % 8
    h_TF = swiglu_reference(gate_TF, up_TF, limit=limit).to(x_TE.dtype)
    return F.pad(h_TF, (0, padding)), F.pad(down_EF, (0, padding))


MANY_ROWS = 8192
"""From so many rows on a program computes many tiles of twice the size: most of a wave is full then."""


@kernel
def _linear_swiglu_kernel(
    x,
    gate,
    up,
    gate_bias,
    up_bias,
    out,
    down,
    out_down,
    rows,
    limit,
    turns,
    LOOPS: tl.constexpr,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    # x, gate, up and out are descriptors: outside their tensors they read zeros and write nothing.
    tiles_t = tl.cdiv(rows, BLOCK_T)
    tiles_f = tl.cdiv(PADDED, BLOCK_F)
    for turn in tl.range(0, turns if LOOPS else 1):  # a constant turn is no loop: less shared memory
        part = tl.program_id(0) + turn * tl.num_programs(0)
        if part < tiles_t * tiles_f:
            # GROUP tiles of rows run one after the other, so that they find the weights' tiles in the L2 cache.
            group = part // (GROUP * tiles_f)
            in_group = min(tiles_t - group * GROUP, GROUP)
            t = (group * GROUP + part % (GROUP * tiles_f) % in_group) * BLOCK_T
            f = part % (GROUP * tiles_f) // in_group * BLOCK_F
            a = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
            b = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
            for e in tl.range(0, INNER, BLOCK_E, num_stages=STAGES):
                rows_TE = x.load([t, e])
                a = tl.dot(rows_TE, gate.load([f, e]).T, a)
                b = tl.dot(rows_TE, up.load([f, e]).T, b)
            columns = f + tl.arange(0, BLOCK_F)
            if BIASED:
                a += tl.load(gate_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
                b += tl.load(up_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
            if LIMITED:
                a, b = cut_off(a, b, limit)
            out.store([t, f], (a * _sigmoid(a) * b).to(out.dtype))
        elif PADDED > WIDTH:
            # After the tiles, which do not fill the last wave, come rows of the next product's weight.
            row = (part - tiles_t * tiles_f) * COPY_ROWS + tl.arange(0, COPY_ROWS)
            column = tl.arange(0, COPY_BLOCK)
            inside = (row < OUTER)[:, None] & (column < PADDED)[None, :]
            real = inside & (column < WIDTH)[None, :]
            values = tl.load(down + row[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
            tl.store(out_down + row[:, None] * PADDED + column[None, :], values, mask=inside)


@device_function
def _sigmoid(x):
    # The squared reciprocal root takes half as many instructions as a division; both agree to 2^-21.
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


def linear_swiglu(
    x_TE: Tensor,
    gate_FE: Tensor,
    up_FE: Tensor,
    gate_F: Tensor | None,
    up_F: Tensor | None,
    down_EF: Tensor,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `linear_swiglu_reference` as one kernel; E must be a multiple of 8.

    Gate and up are read as they are, for any F. The same launch copies `down_EF`, if F is not a multiple of 8. With
    tiles of the smaller size 16384 rows of Qwen2.5-VL took 460 us, by the library and `swiglu` 486, padding 25 (H200).
    """
    rows, inner = x_TE.shape
    width = gate_FE.shape[0]
    outer = down_EF.shape[0]
    padded = -(-width // 8) * 8
    down_EF = down_EF.contiguous()
    down_EG = down_EF if padded == width else down_EF.new_empty(outer, padded)
    out_TG = x_TE.new_empty(rows, padded)
    assert out_TG.data_ptr() % 16 == 0  # its descriptor must not be of a copy
    loops = rows >= MANY_ROWS
    block_t = 128
    block_f = 128 if loops else 64
    block_e = 64
    copy_rows = 4
    tiles = -(-rows // block_t) * -(-padded // block_f)
    # Programs share a multiprocessor, so that one's activation overlaps with another's product. With two stages three
    # programs fit, with three stages two. Two stages pay only where all tiles then run at once. 784 rows of Qwen2.5-VL
    # are 378 tiles: 33 us with two stages, 40 with three. 1024 rows are 432 tiles: 51 and 37 us (132 multiprocessors).
    multiprocessors = machine.multiprocessors(x_TE.device)
    # With many rows one program with larger tiles is alone on a multiprocessor, and computes many: it takes less power.
    # 32 images of 34x46 take 129 ms instead of 133, 16 images of 36x36 54.1 instead of 56.0, one page 45.6 and 46.3.
    stages = 2 if not loops and 2 * multiprocessors < tiles <= 3 * multiprocessors else 3
    copies = 0 if padded == width else -(-outer // copy_rows)
    parts = tiles + copies
    programs = min(parts, multiprocessors) if loops else parts
    _linear_swiglu_kernel[(programs,)](
        descriptor_of(x_TE, [block_t, block_e]),
        descriptor_of(gate_FE, [block_f, block_e]),
        descriptor_of(up_FE, [block_f, block_e]),
        gate_FE if gate_F is None else gate_F.contiguous(),  # not read without biases
        up_FE if up_F is None else up_F.contiguous(),
        descriptor_of(out_TG, [block_t, block_f]),
        down_EF,
        down_EG,
        rows,
        limit or 0.0,
        -(-parts // programs),
        LOOPS=loops,
        LIMITED=limit is not None,
        BIASED=gate_F is not None,
        INNER=inner,
        WIDTH=width,
        PADDED=padded,
        OUTER=outer,
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_E=block_e,
        STAGES=stages,
        GROUP=16,
        COPY_ROWS=copy_rows,
        COPY_BLOCK=next_power_of_2(padded if copies else min(padded, 8192)),
        num_warps=8 if loops else 4,
    )
    return out_TG, down_EG


def is_faster_in_one_launch(rows: int, weight_FE: Tensor) -> bool:
    """Return whether `linear_swiglu` takes less time than the library's products and `swiglu`.

    A call that embeds 13280 tokens: 399 ms, not 406, with Qwen2.5-VL-7B; 413, not 420, with Qwen3-VL-8B (H200, whose
    clock goes down under either). A few products alone are faster by the library.
    """
    is_aligned = all(size % 8 == 0 for size in weight_FE.shape)
    return rows >= MANY_ROWS and is_aligned and why_not_descriptors(weight_FE.device) is None


def is_mixture_of_experts(mlp: nn.Module) -> bool:
    """Return whether an MLP is a mixture of experts, which is called as a module."""
    return hasattr(mlp, "experts")


def _subjects(parts: Parts) -> list[nn.Module]:
    return [block.mlp for block in parts.blocks if not is_mixture_of_experts(block.mlp)]


OPERATION = Operation(
    name="mlp",
    summary="the activation in its product's kernel, or as one of its own",
    subjects=_subjects,
    reasons_against=reasons_against,
    fused=fused,
    plain=lambda mlp, context: context.called(mlp),
    missing="every layer has a mixture of experts",
)
