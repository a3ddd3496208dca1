"""FlashAttention-4, forward and backward: pure Python from pip, compiled by its package when it is first used.

`T` packed rows, `S` segments, `H` heads, `D` head dim, `P` that dim as its backward takes it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hf_vit_accel import env
from hf_vit_accel.backends.base import Attend, Backend, Needs, Plan, Request, attention_op, reasons_tried
from hf_vit_accel.ops.rope import fill_up, fill_up_reference, rope_back, rope_padded, rotate
from hf_vit_accel.ops.trained import Trained

PACKAGE = env.Package(
    module="flash_attn.cute", distribution="flash-attn-4", install="pip install --pre flash-attn-4 (Hopper, Blackwell)"
)
_rotate = env.guarded(env.KERNELS, rope_padded)
_fill_up = env.guarded(env.KERNELS, fill_up)


class FlashAttention4(Backend):
    """One call for all segments, any row stride.

    Its first call for a dtype and head dim compiles for seconds. So it is tried, and compared with attention by its
    definition, when a route is laid out; the package keeps what it compiled in a folder for later processes.
    """

    name = "flash_attention_4"
    needs = Needs(
        packages=(PACKAGE,),
        capability=((9, 0), (13, 0)),
        dtypes=(torch.bfloat16, torch.float16),
        head_dim_multiple=8,
        head_dim_max=128,
        differentiable=True,
    )

    def lacks(self) -> tuple[str, ...]:
        missing = [name for name in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(_interface(), name)]
        return (f"this flash-attn-4 has no {', '.join(missing)}",) if missing else ()

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        return reasons or list(_proven(request.device, request.dtype, request.head_dim, request.grad))

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        rest = plan.tensors["cu_seqlens_S1"], plan.host["max_seqlen"], plan.request.scale
        if not plan.request.grad:
            return _attend(q_THD, k_THD, v_THD, *rest)
        out_THD: torch.Tensor = _Attention.apply(torch.stack((q_THD, k_THD, v_THD), dim=1), None, None, *rest)
        return out_THD

    def attend_layers(self, plan: Plan, layers: int, rotate_: Attend) -> list[Attend]:
        if not plan.request.grad or getattr(rotate_, "__wrapped__", rotate_) is not rotate:
            return super().attend_layers(plan, layers, rotate_)
        settings = plan.tensors["cu_seqlens_S1"], plan.host["max_seqlen"], plan.request.scale
        return [Trained(alone=_Attention.apply, function=_Attention, settings=settings, fault=self.name)] * layers


def _interface() -> Any:
    # What it compiles outlives the process, unless the user says otherwise.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    return interface


def _attend_cuda(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _forward((q_THD, k_THD, v_THD), *rest, lse=False)[0]


_attend = attention_op("flash_attention_4", _attend_cuda)


def _lengths(cu_seqlens_S1: torch.Tensor, max_seqlen: int) -> dict[str, Any]:
    both = {f"cu_seqlens_{side}": cu_seqlens_S1 for side in "qk"}
    return both | {f"max_seqlen_{side}": max_seqlen for side in "qk"}


def _forward(
    qkv: Sequence[torch.Tensor], cu_seqlens_S1: torch.Tensor, max_seqlen: int, scale: float, *, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = _lengths(cu_seqlens_S1, max_seqlen)
    out, lse_HT, *_ = _interface()._flash_attn_fwd(*qkv, softmax_scale=scale, return_lse=lse, **lengths)
    return out, lse_HT


class _Attention(torch.autograd.Function):
    """qkv to attended rows; rotated first where there are tables, and its gradient rotated back.

    On Hopper the backward of 4.0.0b36 writes a wrong dQ where the head dim is no multiple of 32 (flash-attention
    #2896): heads are filled up with zeros by the rotation, which has to write them anyhow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_T3HD: torch.Tensor,
        cos_TD: torch.Tensor | None,
        sin_TD: torch.Tensor | None,
        cu_seqlens_S1: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        dim = qkv_T3HD.shape[-1]
        padded = -(-dim // 32) * 32
        if cos_TD is None or sin_TD is None:
            rotated_T3HP = F.pad(qkv_T3HD, (0, padded - dim))
        else:
            rotated_T3HP = _rotate(qkv_T3HD, cos_TD, sin_TD, padded)
        # Its forward is right, and faster, without what was filled up.
        qkv = rotated_T3HP[..., :dim].unbind(1)
        out_THD, lse_HT = _forward(qkv, cu_seqlens_S1, max_seqlen, scale, lse=True)
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        ctx.save_for_backward(rotated_T3HP, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rotated_T3HP, out_THD, lse_HT, cos_TD, sin_TD, cu_seqlens_S1 = ctx.saved_tensors
        dim, padded = out_THD.shape[-1], rotated_T3HP.shape[-1]
        fill = fill_up_reference if cos_TD is None else _fill_up
        dqkv_T3HP = torch.empty_like(rotated_T3HP)
        _interface()._flash_attn_bwd(
            *rotated_T3HP.unbind(1),
            *(fill(out_THD, dout_THD, padded) if padded > dim else (out_THD, dout_THD)),
            lse_HT,
            ctx.scale,
            **_lengths(cu_seqlens_S1, ctx.max_seqlen),
            **dict(zip(("dq", "dk", "dv"), dqkv_T3HP.unbind(1), strict=True)),
        )
        if cos_TD is None:
            return dqkv_T3HP[..., :dim], None, None, None, None, None
        return rope_back(dqkv_T3HP, cos_TD, sin_TD, dim), None, None, None, None, None


@env.probe
def _proven(device: torch.device, dtype: torch.dtype, head_dim: int, grad: bool) -> tuple[str, ...]:
    """Why it is not used here: it is tried once, against attention by its definition; so it is also compiled."""
    lengths, scale = (200, 130, 321), head_dim**-0.5
    cu_seqlens_S1 = torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)

    def attend(qkv_T3HD: torch.Tensor) -> torch.Tensor:
        rest = cu_seqlens_S1, max(lengths), scale
        if not grad:
            q_THD, k_THD, v_THD = qkv_T3HD.unbind(1)
            return _attend_cuda(q_THD, k_THD, v_THD, *rest)
        found: torch.Tensor = _Attention.apply(qkv_T3HD, None, None, *rest)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler's, about its own code
        return reasons_tried(attend, lengths, device, dtype, head_dim, grad=grad)
