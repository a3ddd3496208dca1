"""FlashAttention-4, forward and backward: pure Python from pip, compiled by its package when it is first used.

`T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Attend, Backend, Plan, Request, attention_op, reasons_tried
from hf_vit_accel.ops.rope import rope_, rope_back_, rotate
from hf_vit_accel.ops.training.trained import Trained

PACKAGE = machine.Package(
    module="flash_attn.cute", distribution="flash-attn-4", install="pip install --pre flash-attn-4 (Hopper, Blackwell)"
)
_rotate_ = machine.guarded(machine.KERNELS, rope_)


class FlashAttention4(Backend):
    """One call for all segments, any row stride.

    Its first call for a dtype and head dim compiles for seconds. So it is tried, and compared with attention by its
    definition, when a route is laid out; the package keeps what it compiled in a folder for later processes.
    """

    name = "flash_attention_4"
    needs = replace(HALF, packages=(PACKAGE,), capability=((9, 0), (13, 0)), differentiable=True)

    def lacks(self) -> tuple[str, ...]:
        missing = [name for name in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(_interface(), name)]
        return (f"this flash-attn-4 has no {', '.join(missing)}",) if missing else ()

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        at = request.device, request.dtype, request.head_dim
        return reasons or list(_backward(*at)[1] if request.grad else _against_results(*at))

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        if not plan.request.grad:
            return _attend(q_THD, k_THD, v_THD, *_settings(plan))
        qkv_T3HD = torch.stack((q_THD, k_THD, v_THD), dim=1)
        return _Attention.apply(qkv_T3HD, None, None, *_settings(plan))

    def attend_layers(self, plan: Plan, layers: int, rotate_: Attend) -> list[Attend]:
        if not plan.request.grad or getattr(rotate_, "__wrapped__", rotate_) is not rotate:
            return super().attend_layers(plan, layers, rotate_)
        trained = Trained(function=_Attention, settings=_settings(plan), fault=self.name)
        return [trained] * layers


def _settings(plan: Plan) -> tuple[Any, ...]:
    """cu_seqlens, the longest segment, the scale and, with gradients, the backward."""
    request = plan.request
    settings = plan.tensors["cu_seqlens_S1"], plan.host["max_seqlen"], request.scale
    if not request.grad:
        return settings
    return *settings, _backward(request.device, request.dtype, request.head_dim)[0]


def _interface() -> Any:
    # What it compiles outlives the process, unless the user says otherwise.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    return interface


def _attend_cuda(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *rest: Any) -> Tensor:
    return _forward((q_THD, k_THD, v_THD), *rest, lse=False)[0]


_attend = attention_op("flash_attention_4", _attend_cuda)


def _lengths(cu_seqlens_S1: Tensor, max_seqlen: int) -> dict[str, Any]:
    both = {f"cu_seqlens_{side}": cu_seqlens_S1 for side in "qk"}
    return both | {f"max_seqlen_{side}": max_seqlen for side in "qk"}


def _forward(
    qkv: Sequence[Tensor], cu_seqlens_S1: Tensor, max_seqlen: int, scale: float, *, lse: bool
) -> tuple[Tensor, Tensor]:
    lengths = _lengths(cu_seqlens_S1, max_seqlen)
    out, lse_HT, *_ = _interface()._flash_attn_fwd(*qkv, softmax_scale=scale, return_lse=lse, **lengths)
    return out, lse_HT


class _Attention(torch.autograd.Function):
    """qkv to attended rows; rotated first, in place, where there are tables, and its gradient rotated back."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_T3HD: Tensor,
        cos_TD: Tensor | None,
        sin_TD: Tensor | None,
        cu_seqlens_S1: Tensor,
        max_seqlen: int,
        scale: float,
        backward: Callable[..., Any],
    ) -> Tensor:
        if cos_TD is not None and sin_TD is not None:
            _rotate_(qkv_T3HD, cos_TD, sin_TD)
        out_THD, lse_HT = _forward(qkv_T3HD.unbind(1), cu_seqlens_S1, max_seqlen, scale, lse=True)
        ctx.max_seqlen, ctx.scale, ctx.run = max_seqlen, scale, backward
        ctx.save_for_backward(qkv_T3HD, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1)
        return out_THD

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        rotated_T3HD, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1 = ctx.saved_tensors
        dqkv_T3HD = torch.empty_like(rotated_T3HD, memory_format=torch.contiguous_format)
        gradients = dict(zip(("dq", "dk", "dv"), dqkv_T3HD.unbind(1), strict=True))
        lengths = _lengths(cu_seqlens_S1, ctx.max_seqlen)
        ctx.run(*rotated_T3HD.unbind(1), out_THD, dout_THD, lse_HT, ctx.scale, **lengths, **gradients)
        if cos_TD is not None:
            rope_back_(dqkv_T3HD, cos_TD, sin_TD)
        return dqkv_T3HD, None, None, None, None, None, None


def _aligned() -> Callable[..., Any]:
    """The package's backward over functions that round head dims to multiples of 16, as on Hopper its main kernel does.

    Those that fill and read the accumulator of dQ round to 32 in 4.0.0b36, so that dQ is wrong for head dims of 72 and
    80 (flash-attention #2896). To go when a release has that fix.
    """
    interface = _interface()

    def rounding(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **(kwargs | {"hdim_multiple_of": 16}))

    names = {name: rounding(getattr(interface, name)) for name in ("_bwd_preprocess", "_bwd_postprocess_convert")}
    backward = interface._flash_attn_bwd
    aligned = FunctionType(backward.__code__, vars(interface) | names, argdefs=backward.__defaults__)
    aligned.__kwdefaults__ = backward.__kwdefaults__
    return aligned


_LENGTHS = 200, 130, 321


def _against(
    device: torch.device, dtype: torch.dtype, head_dim: int, make: Callable[[], Callable[..., Any]] | None
) -> tuple[str, ...]:
    """Why it is not used here: it is tried, against attention by its definition; so it is also compiled.

    make: its backward; None for its results alone.
    """
    cu_seqlens_S1 = torch.tensor((0, *_LENGTHS)).cumsum(0).to(device, torch.int32)

    def attend(qkv_T3HD: Tensor) -> Tensor:
        settings = cu_seqlens_S1, max(_LENGTHS), head_dim**-0.5
        if make is None:
            q_THD, k_THD, v_THD = qkv_T3HD.unbind(1)
            return _attend_cuda(q_THD, k_THD, v_THD, *settings)
        return _Attention.apply(qkv_T3HD, None, None, *settings, make())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler's, about its own code
        return reasons_tried(attend, _LENGTHS, device, dtype, head_dim, grad=make is not None)


@machine.probe
def _against_results(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    return _against(device, dtype, head_dim, None)


@machine.probe
def _backward(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """What of both is right here, the package's own first; or None, and what is wrong with that."""
    against_own: tuple[str, ...] = ()
    for make in (lambda: _interface()._flash_attn_bwd, _aligned):
        if not (reasons := _against(device, dtype, head_dim, make)):
            return make(), ()
        against_own = against_own or reasons
    return None, against_own
