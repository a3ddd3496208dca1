"""cuDNN's attention in FP8 (e4m3), through FlashInfer as in `flashinfer_cudnn`; for full layers, on request.

On Hopper cuDNN writes FP8 attention in e4m3 only, and FlashInfer passes no scale for the output. The output is a convex
mix of the rows of v. So in v's quantised units it always fits and uses the range of e4m3: v is declared to have no
scale. The kernel that drops the padding multiplies by the divisor of v, head by head.

`T` packed rows, `S` segments, `H` heads, `D` head dim, `P` that dim padded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import Attend, Plan, Request
from hf_vit_accel.backends.flashinfer_cudnn import INT32_END, CudnnPlan, FlashinferCudnn, Tensors, cudnn_plan_for
from hf_vit_accel.config import Amax, Settings
from hf_vit_accel.families.base import Parts
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.base import Rotate
from hf_vit_accel.ops.fp8.quantize import dequantize, quantize
from hf_vit_accel.ops.fp8.scales import E4M3, Scales

MIN_SEQLEN = 8192
"""Rows that a row attends to, on average, from which attention runs in FP8. On an H200 a tower of 8,464 rows takes
35.4 ms in FP8 and 35.3 without (Qwen3-VL-8B), 44.9 and 44.2 (Qwen2-VL-7B): nearly equal. At 14,416 rows it takes 75.0
and 84.8, 95.2 and 100."""

_WEIGHTS_SCALE = 256.0
"""Factor of softmax weights (at most 1) before they are rounded to e4m3. Without it, weights below 1/1000 of the
largest would be lost; among thousands of keys, these may be most of the sum."""


class CudnnFp8(FlashinferCudnn):
    """Attend in FP8 in four launches: sample maxima; rotate, quantise and pad; attend; drop padding and scale of v."""

    name = "cudnn_fp8"
    needs = replace(FlashinferCudnn.needs, capability=((9, 0), (13, 0)), kernels=True)

    def check(self, settings: Settings, family: str, parts: Parts, path: str) -> None:
        """Raise ValueError if the amax in the file of the option do not fit a tower."""
        if settings.fp8 is None or settings.amax is None:
            return
        amax = settings.amax
        expected = (len(parts.blocks), parts.blocks[0].attention.num_heads)
        in_file = tuple(amax.amax_L3H.shape[::2])
        silent = ", ".join(str(layer) for layer in silent_layers(amax, parts))
        if amax.model not in ("", family):
            problem = f"of {family}, got those of {amax.model!r}"
        elif in_file != expected:
            name = path or "the tower"
            problem = f"for the {expected[0]} layers of {expected[1]} heads of {name}, got {in_file[0]} of {in_file[1]}"
        elif silent:
            problem = f"of every layer that attends per frame, got zeros for layers {silent}"
        else:
            return
        file = settings.fp8.amax_file
        raise ValueError(f"expected FP8 amax {problem} in {file}; make them with this model by hf_vit_accel.calibrate")

    def keep(self, settings: Settings, device: torch.device, layers: int, heads: int) -> Scales:
        """Return the scales that are kept for a tower between calls."""
        fp8 = settings.fp8
        assert fp8 is not None
        return Scales(
            device=device,
            layers=layers,
            heads=heads,
            fixed=settings.amax,
            min_seqlen=fp8.min_seqlen,
            source="the amax of each call" if fp8.amax_file is None else f"the amax in {fp8.amax_file}",
        )

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if not request.packed:
            # So `attend` is never called, which takes rotated q and k.
            reasons.append("the stock blocks run, which rotate q and k themselves")
        return reasons

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        return []  # `why_not_worth` has them: nobody asks for FP8 in every layout

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        """Return why a layout must or should run in another backend; None if FP8 is the fastest."""
        lengths_S = segments.lengths_S.astype(np.int64)
        mean = float((lengths_S**2).sum() / lengths_S.sum())
        min_seqlen = MIN_SEQLEN
        if request.kept is not None and request.kept.min_seqlen is not None:
            min_seqlen = request.kept.min_seqlen
        if mean < min_seqlen:
            return f"rows attend to {mean:.0f} others on average, it is used from {min_seqlen} on"
        if not lengths_S.all():
            return "cuDNN's FP8 kernels crash on empty segments, which fill this graph's shape"
        if segments.rows * request.heads * _padded(request.head_dim) >= INT32_END:
            return f"{segments.rows} rows are more than its int32 offsets reach"
        return None

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        return segments, rows

    def plan(self, segments: Segments, request: Request) -> Plan:
        # The number of segments is exact: an empty segment is an illegal instruction to cuDNN 9.19 in FP8.
        cu_seqlens_S1 = segments.cu_seqlens_S1.astype(np.int64) * (request.heads * _padded(request.head_dim))
        arrays = {
            "lengths": segments.lengths_S.reshape(-1, 1, 1, 1),
            "offsets": cu_seqlens_S1.astype(np.int32).reshape(-1, 1, 1, 1),
            "used_1": np.array([segments.rows - segments.spare], dtype=np.int32),
            "one": np.ones(1, dtype=np.float32),
            "weights_scale": np.full(1, _WEIGHTS_SCALE, dtype=np.float32),
            "weights_descale": np.full(1, 1 / _WEIGHTS_SCALE, dtype=np.float32),
        }
        host = {"max_seqlen": round_max_seqlen(segments.max_seqlen)}
        return Plan(backend=self, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        row_THP = torch.empty(1, request.heads, _padded(request.head_dim), dtype=E4M3, device=request.device)
        _cudnn_plan(plan, (row_THP, row_THP, row_THP))

    def attend_layers(self, plan: Plan, layers: int, rotate: Rotate) -> list[Attend]:
        scales = plan.request.kept
        assert scales is not None and scales.layers == layers
        return [partial(_attend_packed, plan, scales, layer) for layer in range(layers)]


def silent_layers(amax: Amax, parts: Parts) -> list[int]:
    """List the layers that run FP8 but whose maxima are all zero, as if they had never run it."""
    return [index for index, amax_3H in enumerate(amax.amax_L3H) if parts.full(index) and not amax_3H.any()]


def round_max_seqlen(length: int) -> int:
    """Return the max_seqlen to declare: at most 1/32 more, so that lengths share cuDNN plans.

    In FP8 cuDNN computes for the declared length: 9216 rows declared as 16384 took 1245 us on an H200, declared as 9216
    718 us.
    """
    step = max(128, 1 << max(length.bit_length() - 6, 0))
    return -(-length // step) * step


def _padded(head_dim: int) -> int:
    """Return the padded head dim P that is fastest: for 72 and 80 it is 128.

    On an H200, 14416 rows take 1736 us with P = 128, 1837 with 96 and 2029 with 80.
    """
    return 64 if head_dim <= 64 else 128


def _written(request: Request) -> torch.dtype:
    """Return the dtype of cuDNN's output. Hopper can write e4m3 only."""
    return request.dtype if machine.cuda_capability(request.device.index)[0] >= 10 else E4M3


def _cudnn_plan(plan: Plan, qkv: Tensors) -> tuple[CudnnPlan, Tensors]:
    """Return cuDNN's plan for q, k and v (T, H, P), and its lengths and offsets."""
    offsets = plan.tensors["offsets"]
    sequences = (plan.tensors["lengths"], offsets, offsets, offsets, offsets)
    request = plan.request
    cudnn_plan = cudnn_plan_for(qkv, sequences, plan.host["max_seqlen"], request.scale, _written(request))
    return cudnn_plan, sequences


def _attend_packed(plan: Plan, scales: Scales, layer: int, qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Attend in one layer: packed projection (T, 3, H, D), cos and sin to attended rows (T, H, D)."""
    heads, dim = qkv_T3HD.shape[-2:]
    if qkv_T3HD.stride()[1:] != (heads * dim, dim, 1):
        qkv_T3HD = qkv_T3HD.contiguous()
    scaling_43H = scales.scaling_of(layer)
    has_file = scales.fixed is not None
    used_1 = plan.tensors["used_1"]
    qkv_3THP, center_HD = quantize(qkv_T3HD, cos_TD, sin_TD, used_1, scaling_43H, _padded(dim), fixed_scales=has_file)
    out_THP = torch.empty_like(qkv_3THP[0], dtype=_written(plan.request))
    qkv = qkv_3THP.unbind(0)
    cudnn_plan, sequences = _cudnn_plan(plan, qkv)
    one = plan.tensors["one"]
    # Only the product of q's and k's scales matters, so it is declared for q. v has none: its units come back.
    descale_1 = scaling_43H[3, 0, :1]
    cudnn_plan.run(
        qkv,
        sequences,
        out_THP,
        (descale_1, one, one, plan.tensors["weights_scale"], plan.tensors["weights_descale"], one),
    )
    return dequantize(out_THP, scaling_43H[2, 2], center_HD, qkv_T3HD.dtype)
