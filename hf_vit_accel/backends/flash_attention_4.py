"""FlashAttention-4, forward and backward: a pure Python package that compiles its kernels at their first call.

`T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Attend, Backend, Plan, Request, reasons_from_trial, trial_scale
from hf_vit_accel.ops.base import FunctionContext, Rotate
from hf_vit_accel.ops.embedding import rope_
from hf_vit_accel.ops.embedding import rotate as our_rotation
from hf_vit_accel.ops.training.nodes import OpWithBackward

PACKAGE = machine.Package(
    module="flash_attn.cute",
    distribution="flash-attn-4",
    install="on Hopper or Blackwell: pip install --pre flash-attn-4",
)
Kernel = Callable[..., object]
"""A function of the package that launches kernels."""

_rotate_ = machine.guarded(machine.KERNELS, rope_)


class FlashAttention4(Backend):
    """Attend all segments in one call, with any row stride.

    The first call for a dtype and head dim compiles for seconds. So a trial runs before the backend is chosen, and is
    compared with the plain-torch reference. The package caches compiled kernels in a folder for later processes.
    """

    name = "flash_attention_4"
    needs = replace(HALF, packages=(PACKAGE,), capability=((9, 0), (13, 0)), differentiable=True)

    def lacks(self) -> tuple[str, ...]:
        missing = [name for name in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(_interface(), name)]
        return (f"this flash-attn-4 has no {', '.join(missing)}",) if missing else ()

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if reasons:
            return reasons
        if request.grad:
            backward = _find_backward(request.device, request.dtype, request.head_dim)
            return list(backward) if isinstance(backward, tuple) else []
        return list(_trial(request.device, request.dtype, request.head_dim, None))

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        if not plan.request.grad:
            return _forward((q_THD, k_THD, v_THD), *_settings(plan), needs_lse=False)[0]
        qkv_T3HD = torch.stack((q_THD, k_THD, v_THD), dim=1)
        return _Attention.apply(qkv_T3HD, None, None, *_settings(plan))

    def attend_layers(self, plan: Plan, layers: int, rotate: Rotate) -> list[Attend]:
        if not plan.request.grad or getattr(rotate, "__wrapped__", rotate) is not our_rotation:
            return super().attend_layers(plan, layers, rotate)
        attention = OpWithBackward(function=_Attention, settings=_settings(plan), fault=self.name)
        return [attention] * layers


def _settings(plan: Plan) -> tuple[Any, ...]:
    """Return the arguments after q, k and v: cu_seqlens, max_seqlen, the scale and, with gradients, the backward."""
    request = plan.request
    settings = plan.tensors["cu_seqlens_S1"], plan.host["max_seqlen"], request.scale
    if not request.grad:
        return settings
    return *settings, _find_backward(request.device, request.dtype, request.head_dim)


def _interface() -> ModuleType:
    # Cache compiled kernels for later processes, unless the user decided otherwise.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    return interface


def _lengths(cu_seqlens_S1: Tensor, max_seqlen: int) -> dict[str, Tensor | int]:
    """Return the package's arguments for the segments, which are the same for queries and keys."""
    return {
        "cu_seqlens_q": cu_seqlens_S1,
        "cu_seqlens_k": cu_seqlens_S1,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
    }


def _forward(
    qkv: Sequence[Tensor], cu_seqlens_S1: Tensor, max_seqlen: int, scale: float, *, needs_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return attended rows (T, H, D) and, if needed, the log-sum-exp (H, T). qkv holds three of (T, H, D)."""
    lengths = _lengths(cu_seqlens_S1, max_seqlen)
    out_THD, lse_HT, *_ = _interface()._flash_attn_fwd(*qkv, softmax_scale=scale, return_lse=needs_lse, **lengths)
    return out_THD, lse_HT


class _Attention(torch.autograd.Function):
    """Packed projection (T, 3, H, D) to attended rows.

    With cos and sin, q and k are first rotated in place, and their gradients are rotated back.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        qkv_T3HD: Tensor,
        cos_TD: Tensor | None,
        sin_TD: Tensor | None,
        cu_seqlens_S1: Tensor,
        max_seqlen: int,
        scale: float,
        backward: Kernel,
    ) -> Tensor:
        if cos_TD is not None and sin_TD is not None:
            _rotate_(qkv_T3HD, cos_TD, sin_TD)
        out_THD, lse_HT = _forward(qkv_T3HD.unbind(1), cu_seqlens_S1, max_seqlen, scale, needs_lse=True)
        ctx.max_seqlen = max_seqlen
        ctx.scale = scale
        ctx.backward_kernel = backward
        ctx.save_for_backward(qkv_T3HD, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1)
        return out_THD

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        rotated_T3HD, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1 = ctx.saved_tensors
        dqkv_T3HD = torch.empty_like(rotated_T3HD, memory_format=torch.contiguous_format)
        q_THD, k_THD, v_THD = rotated_T3HD.unbind(1)
        dq_THD, dk_THD, dv_THD = dqkv_T3HD.unbind(1)
        lengths = _lengths(cu_seqlens_S1, ctx.max_seqlen)
        ctx.backward_kernel(
            q_THD, k_THD, v_THD, out_THD, dout_THD, lse_HT, ctx.scale, **lengths, dq=dq_THD, dk=dk_THD, dv=dv_THD
        )
        if cos_TD is not None:
            rope_(dqkv_T3HD, cos_TD, sin_TD, back=True)
        return dqkv_T3HD, None, None, None, None, None, None


def _aligned_backward() -> Kernel:
    """Return the package's backward with helpers that round head dims to multiples of 16, as its main kernel does.

    In 4.0.0b36 the helpers that fill and read the accumulator of dQ round to 32. So dQ is wrong for the head dims 72
    and 80 on Hopper (flash-attention #2896). Remove this once a release has that fix.
    """
    interface = _interface()
    helpers = {}
    for name in ("_bwd_preprocess", "_bwd_postprocess_convert"):
        helpers[name] = _rounding_to_16(getattr(interface, name))
    backward = interface._flash_attn_bwd
    # The same code with other globals: a copy that finds our helpers under their names.
    aligned = FunctionType(backward.__code__, vars(interface) | helpers, argdefs=backward.__defaults__)
    aligned.__kwdefaults__ = backward.__kwdefaults__
    return aligned


def _rounding_to_16(function: Kernel) -> Kernel:
    return lambda *args, **kwargs: function(*args, **(kwargs | {"hdim_multiple_of": 16}))


_TRIAL_LENGTHS = (200, 130, 321)


@machine.probe
def _trial(
    device: torch.device, dtype: torch.dtype, head_dim: int, backward_of: Callable[[], Kernel] | None
) -> tuple[str, ...]:
    """Run the kernels once, which also compiles them, and list what is wrong; without a backward the forward alone."""
    cu_seqlens_S1 = torch.tensor((0, *_TRIAL_LENGTHS)).cumsum(0).to(device, torch.int32)
    max_seqlen = max(_TRIAL_LENGTHS)
    scale = trial_scale(head_dim)

    def attend(qkv_T3HD: Tensor) -> Tensor:
        if backward_of is None:
            return _forward(qkv_T3HD.unbind(1), cu_seqlens_S1, max_seqlen, scale, needs_lse=False)[0]
        return _Attention.apply(qkv_T3HD, None, None, cu_seqlens_S1, max_seqlen, scale, backward_of())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's compiler warns about its own code
        return reasons_from_trial(attend, _TRIAL_LENGTHS, device, dtype, head_dim, grad=backward_of is not None)


@machine.probe
def _find_backward(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel | tuple[str, ...]:
    """Return the package's own backward if it is right here, else the aligned one; else reasons against the first."""
    reasons_against_own = _trial(device, dtype, head_dim, _own_backward)
    if not reasons_against_own:
        return _own_backward()
    return reasons_against_own if _trial(device, dtype, head_dim, _aligned_backward) else _aligned_backward()


def _own_backward() -> Kernel:
    run: Kernel = _interface()._flash_attn_bwd
    return run
