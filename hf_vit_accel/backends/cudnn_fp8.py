"""cuDNN's attention in FP8 (e4m3), through FlashInfer as in `flashinfer_cudnn`; for full layers, where it is asked for.

On Hopper cuDNN writes FP8 attention in e4m3 only, and FlashInfer passes no scale for it. The output is a mix of rows of
v with weights that add up to one, so in v's quantised units it always fits and uses e4m3's range: v is declared to
have no scale, and the kernel that drops the padding multiplies by what v was divided by, head by head.

`T` packed rows, `S` segments, `H` heads, `D` head dim, `P` that dim padded.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from hf_vit_accel import env
from hf_vit_accel.backends.base import Attend, Needs, Plan, Request, attention_op
from hf_vit_accel.backends.flashinfer_cudnn import (
    CUDNN_FRONTEND,
    FLASHINFER,
    FlashinferCudnn,
    can_prepare,
    graph_for,
)
from hf_vit_accel.metadata import Segments
from hf_vit_accel.ops.e4m3 import E4M3, dequantize
from hf_vit_accel.ops.launch import why_not_triton
from hf_vit_accel.ops.quantize import quantize
from hf_vit_accel.scales import LayerScales, Scales, settle

MIN_SEQLEN = 5120
"""Rows of the segment that a row is in, on average, from which FP8 is faster than the best of the others (H200: a tower
of Qwen3-VL-8B with FlashAttention-3 and in FP8 takes 13.7 and 14.8 ms at 4096 rows, 19.3 and 18.6 at 5184)."""

_INT32_END = 2**31
_WEIGHTS_SCALE = 256.0
"""What softmax weights, at most 1, are multiplied by before they are rounded to e4m3: without it all those below 1/1000
of the largest would be lost, which in thousands of keys may be most of the sum."""


class CudnnFp8(FlashinferCudnn):
    """One kernel samples v's means, one rotates, quantises and pads q, k and v, one call attends, one kernel unpads."""

    name = "cudnn_fp8"
    attends_anew = True
    needs = Needs(
        packages=(FLASHINFER, CUDNN_FRONTEND),
        capability=((9, 0), (13, 0)),
        dtypes=(torch.bfloat16, torch.float16),
        head_dim_multiple=8,
        head_dim_max=128,
    )

    def probe(self) -> list[str]:
        if reasons := super().probe():
            return reasons
        return [] if can_prepare() else ["this FlashInfer lacks the pieces that FP8 needs (0.7.2 has them)"]

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if request.kind != "full":
            reasons.append("windows are faster without FP8")
        if not request.packed:
            reasons.append("the stock blocks run, which rotate q and k themselves")
        if why := why_not_triton(request.device, request.dtype):
            reasons.append(why)
        if request.fp8 is not None and (why := request.fp8.why_unfit()):
            reasons.append(why)
        return reasons

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        """Why another backend is faster for a layout, or the only one that serves it; None if FP8 is."""
        lengths_S = segments.lengths_S.astype(np.int64)
        mean, min_seqlen = float((lengths_S**2).sum() / lengths_S.sum()), MIN_SEQLEN
        if request.fp8 is not None and request.fp8.min_seqlen is not None:
            min_seqlen = request.fp8.min_seqlen
        if mean < min_seqlen:
            return f"rows attend to {mean:.0f} others on average, it is used from {min_seqlen} on"
        if not lengths_S.all():
            return "cuDNN's FP8 kernels crash on empty segments, which fill this graph's shape"
        if segments.rows * request.heads * _padded(request.head_dim) >= _INT32_END:
            return f"{segments.rows} rows are more than its int32 offsets reach"
        return None

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        return segments, rows

    def plan(self, segments: Segments, request: Request) -> Plan:
        # As many as there are: an empty segment that stands in for one is an illegal instruction to cuDNN 9.19 in FP8.
        cu_seqlens_S1 = segments.cu_seqlens_S1.astype(np.int64) * (request.heads * _padded(request.head_dim))
        arrays = {
            "lengths": segments.lengths_S.reshape(-1, 1, 1, 1),
            "offsets": cu_seqlens_S1.astype(np.int32).reshape(-1, 1, 1, 1),
            "used_1": np.array([segments.rows - segments.spare], dtype=np.int32),
        }
        host = {"max_seqlen": round_max_seqlen(segments.max_seqlen)}
        return Plan(backend=self, segments=segments, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        row_THP = torch.empty(1, request.heads, _padded(request.head_dim), dtype=E4M3, device=request.device)
        _constants(request.device)
        _built((row_THP,) * 3, plan.tensors["lengths"], plan.tensors["offsets"], *_fixed(plan))
        if request.fp8 is not None:
            request.fp8.allocate()

    def attend_layers(self, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        assert plan.request.fp8 is not None and plan.request.fp8.layers == layers
        return [partial(_attend_packed, plan, scales) for scales in plan.request.fp8.begin()]

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        # Alone, without a layer's history: by the amax of these very tensors.
        scales = Scales(device=q_THD.device, layers=1, heads=q_THD.shape[1]).begin()[0]
        still = q_THD.new_zeros(1, q_THD.shape[2]).expand(q_THD.shape[0], -1)
        return _attend_packed(plan, scales, torch.stack((q_THD, k_THD, v_THD), dim=1), still + 1, still.contiguous())


def round_max_seqlen(length: int) -> int:
    """The longest segment to declare: at most 1/32 more, so that lengths share plans.

    In FP8 cuDNN works for the length that is declared: 9216 rows declared as 16384 took 1245 us on an H200, as 9216
    718.
    """
    step = max(128, 1 << max(length.bit_length() - 6, 0))
    return -(-length // step) * step


def _padded(head_dim: int) -> int:
    """What is fastest on an H200, at any length: 128 for 72 and 80 (1736 us at 14416 rows; 96: 1837, 80: 2029)."""
    return 64 if head_dim <= 64 else 128


def _fixed(plan: Plan) -> tuple[int, float, torch.dtype]:
    """What a plan of cuDNN has built in: the longest segment, the factor of scores, the output's dtype."""
    request = plan.request
    writes_wide = env.cuda_capability(request.device.index)[0] >= 10
    return plan.host["max_seqlen"], request.scale, request.dtype if writes_wide else E4M3


def _attend_packed(
    plan: Plan, layer: LayerScales, qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> torch.Tensor:
    """One layer: packed projection (T, 3, H, D), cos and sin to attended rows (T, H, D)."""
    dim, heads = qkv_T3HD.shape[-1], qkv_T3HD.shape[-2]
    if qkv_T3HD.stride()[1:] != (heads * dim, dim, 1):
        qkv_T3HD = qkv_T3HD.contiguous()
    qkv_3THP, center_HD, scales_3H, descale_1 = quantize(
        qkv_T3HD,
        cos_TD,
        sin_TD,
        plan.tensors["used_1"],
        layer.scales_3H,
        layer.amax_3H,
        layer.amax_history_N3H,
        layer.position_1,
        _padded(dim),
    )
    descale_1 = layer.descale_1 if descale_1 is None else descale_1
    out_THP = _attend(*qkv_3THP.unbind(0), plan.tensors["lengths"], plan.tensors["offsets"], descale_1, *_fixed(plan))
    return dequantize(out_THP, scales_3H[2], center_HD, qkv_T3HD.dtype)


@lru_cache(maxsize=64)  # of devices
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """1, and the scale of softmax weights and what undoes it: made before any capture, kept while the process lives."""
    with torch.inference_mode(False):
        one = torch.ones(1, device=device)
        constants = one, one * _WEIGHTS_SCALE, one / _WEIGHTS_SCALE
    settle(device)
    return constants


def _built(qkv: Any, lengths: torch.Tensor, offsets: torch.Tensor, max_seqlen: int, scale: float, out: Any) -> Any:
    return graph_for(qkv, (lengths, offsets, offsets, offsets, offsets), max_seqlen, scale, out)


def _attend_cuda(
    q_THP: torch.Tensor,
    k_THP: torch.Tensor,
    v_THP: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    descale_1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    qkv, out_THP = (q_THP, k_THP, v_THP), torch.empty(q_THP.shape, dtype=out_dtype, device=q_THP.device)
    one, weights_scale, weights_descale = _constants(q_THP.device)
    graph = _built(qkv, lengths, offsets, max_seqlen, scale, out_dtype)
    # Of q and k only the product matters: it is declared for q. v's own units come back.
    fp8 = descale_1, one, one, weights_scale, weights_descale, one
    graph.run(qkv, (lengths, offsets, offsets, offsets, offsets), out_THP, fp8)
    return out_THP


def _attend_fake(q_THP: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q_THP.new_empty(q_THP.shape, dtype=rest[-1])


_attend = attention_op(
    "cudnn_attention_fp8(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor offsets, Tensor descale, int max_seqlen, "
    "float scale, ScalarType out_dtype) -> Tensor",
    _attend_cuda,
    _attend_fake,
)
