"""FlashAttention-3 for Hopper, through its `flash_attn_interface` module."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Backend, Plan

PACKAGE = machine.Package(
    module="flash_attn_interface",
    distribution="flash_attn_3",
    install="build FlashAttention-3: https://github.com/Dao-AILab/flash-attention, folder hopper",
)


class FlashAttention3(Backend):
    """Attend all segments in one call, with any row stride. Forward only: other backends run with gradients."""

    name = "flash_attention_3"
    needs = replace(HALF, packages=(PACKAGE,), capability=((9, 0), (10, 0)), head_dim_max=256)

    def lacks(self) -> tuple[str, ...]:
        from flash_attn_interface import flash_attn_varlen_func  # noqa: F401

        return ()

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        cu_seqlens_S1 = plan.tensors["cu_seqlens_S1"]
        return varlen_attention(q_THD, k_THD, v_THD, cu_seqlens_S1, plan.host["max_seqlen"], plan.request.scale)


def varlen_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens_S1: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Attend within segments, without gradients; causally every token to those before it. K divides H."""
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        q_THD,
        k_TKD,
        v_TKD,
        cu_seqlens_S1,
        cu_seqlens_S1,
        max_seqlen,
        max_seqlen,
        softmax_scale=scale,
        causal=causal,
    )
    return out[0] if isinstance(out, tuple) else out  # early releases return the log-sum-exp, too


causal_attention = partial(varlen_attention, causal=True)
