"""torch.nn.attention.varlen: FlashAttention-2 as built into torch, with gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hf_vit_accel.backends.base import HALF, Backend, Plan


class TorchVarlen(Backend):
    """Attend all segments in one call. No package beside torch is needed."""

    name = "torch_varlen"
    needs = replace(HALF, head_dim_max=256, differentiable=True)

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        # FlashAttention-2 launches thread blocks for max_seqlen rows in every segment, so a large one is not free.
        segments, rows = super().graph_bounds(segments, max_seqlen, rows)
        return segments, min(rows, max(64, 1 << (max_seqlen - 1).bit_length()))

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu_seqlens_S1 = plan.tensors["cu_seqlens_S1"]
        max_seqlen = plan.host["max_seqlen"]
        out_THD = varlen_attn(
            q_THD, k_THD, v_THD, cu_seqlens_S1, cu_seqlens_S1, max_seqlen, max_seqlen, scale=plan.request.scale
        )
        assert isinstance(out_THD, Tensor)
        return out_THD
