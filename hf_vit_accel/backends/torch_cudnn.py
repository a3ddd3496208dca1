"""cuDNN's attention as built into torch, forward and backward; for training, where it is the fastest without a package.

Neighbouring segments of one length are one batch. `T` packed rows, `H` heads, `D` head dim, `B` segments of `L` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Attend, Backend, Plan, Request, reasons_tried
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.rope import rope_, rope_gather_back
from hf_vit_accel.ops.rope import rotate as rotation
from hf_vit_accel.ops.training.trained import Trained

Groups = Sequence[tuple[int, int]]

_rotate_ = machine.guarded(machine.KERNELS, rope_)
_sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_sdpa_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

MOST_GROUPS = 16
"""Batches from which one call for all segments is faster: each is a launch in both directions."""
TILE, MOST_WASTE = 128, 0.06


class TorchCudnn(Backend):
    """One call per run of equal lengths; q, k and v are attended, and their gradients written, in one packed tensor."""

    name = "torch_cudnn"
    needs = replace(HALF, differentiable=True)
    capturable = False

    def lacks(self) -> tuple[str, ...]:
        return () if torch.backends.cudnn.is_available() else ("this torch has no cuDNN",)

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if request.graphs:
            reasons.append("its launches depend on the layout, and a CUDA graph is to serve others, too")
        if not reasons and request.grad:
            reasons = list(_against_gradients(request.device, request.dtype, request.head_dim))
        return reasons

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        count = len(_groups(segments))
        return [] if count <= MOST_GROUPS else [f"the lengths change {count} times, it takes {MOST_GROUPS} batches"]

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        if request.grad:
            return None
        groups = _groups(segments)
        if len(groups) > 1:
            return f"{len(groups)} batches of equal lengths, each a launch of its own"
        # Its forward works in tiles of 128 rows: 28 segments of 576 rows take it 179 us, and FlashAttention-3 144.
        waste = max((1 - length / (-(-length // TILE) * TILE) for _, length in groups), default=0)
        return f"{waste:.0%} of its tiles would be empty" if waste > MOST_WASTE and request.rows >= 4096 else None

    def plan(self, segments: Segments, request: Request) -> Plan:
        return Plan(backend=self, segments=segments, request=request, host={"groups": _groups(segments)})

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        settings = plan.host["groups"], plan.request.scale
        if not plan.request.grad:
            return _forward((q_THD, k_THD, v_THD), *settings, False)[0]
        return _Attention.apply(torch.stack((q_THD, k_THD, v_THD), dim=1), None, None, *settings)

    def attend_layers(self, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        settings = plan.host["groups"], plan.request.scale
        if plan.request.grad and getattr(rotate, "__wrapped__", rotate) is rotation:  # then its gradient is fused, too
            return [Trained(function=_Attention, settings=settings, fault=self.name)] * layers

        def attend(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
            rotated_T3HD = rotate(qkv_T3HD, cos_TD, sin_TD)
            if not plan.request.grad:
                return _forward(rotated_T3HD, *settings, False)[0]
            return _Attention.apply(rotated_T3HD, None, None, *settings)

        return [attend] * layers


def _groups(segments: Segments) -> tuple[tuple[int, int], ...]:
    """(segments, rows of each) of every run of equal lengths."""
    lengths = segments.lengths_S[segments.lengths_S > 0].tolist()
    return tuple((len(list(same)), length) for length, same in groupby(lengths))


def _rows(x: Tensor, start: int, count: int) -> Tensor:
    return x if count == x.shape[0] else x[start : start + count]


def _batch(x_THD: Tensor, start: int, count: int, length: int) -> Tensor:
    """Rows of equal segments as (B, H, L, D), a view."""
    return _rows(x_THD, start, count * length).view(count, length, *x_THD.shape[1:]).transpose(1, 2)


def _batches(qkv: Tensor | Sequence[Tensor], *at: int) -> Sequence[Tensor]:
    """The same of q, k and v, that are packed or not."""
    if not isinstance(qkv, Tensor):
        return [_batch(x_THD, *at) for x_THD in qkv]
    start, count, length = at
    qkv_BL3HD = _rows(qkv, start, count * length).view(count, length, *qkv.shape[1:])
    return qkv_BL3HD.permute(2, 0, 3, 1, 4).unbind(0)


def _forward(qkv: Tensor | Sequence[Tensor], groups: Groups, scale: float, keep: bool) -> tuple[Tensor, list[Any]]:
    """(T, H, D), and what the backward of each group needs besides. qkv: (T, 3, H, D), or three of (T, H, D)."""
    outs_THD, kept, start = [], [], 0
    for count, length in groups:
        if length == 1:  # of which cuDNN has no backward: each row attends to itself
            v_THD = qkv[:, 2] if isinstance(qkv, Tensor) else qkv[2]
            outs_THD.append(v_THD[start : start + count].contiguous())
            kept.append([None] * 8)
            start += count
            continue
        out, *rest = _sdpa(*_batches(qkv, start, count, length), None, keep, 0.0, False, False, scale=scale)
        outs_THD.append(out.transpose(1, 2).flatten(0, 1))
        kept.append(rest)
        start += count * length
    out_THD: Tensor = outs_THD[0] if len(outs_THD) == 1 else torch.cat(outs_THD)
    return out_THD, kept


class _Attention(torch.autograd.Function):
    """qkv to attended rows; rotated first, in place, where there are tables, and its gradient rotated back."""

    @staticmethod
    def forward(
        ctx: Any, qkv_T3HD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, groups: Groups, scale: float
    ) -> Tensor:
        if cos_TD is not None and sin_TD is not None:
            _rotate_(qkv_T3HD, cos_TD, sin_TD)
        out_THD, kept = _forward(qkv_T3HD, groups, scale, any(ctx.needs_input_grad))
        ctx.groups, ctx.scale = groups, scale
        # Of each group: logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset.
        ctx.sizes = [group[1:5] for group in kept]
        ctx.save_for_backward(qkv_T3HD, out_THD, cos_TD, sin_TD, *(group[at] for group in kept for at in (0, 5, 6)))
        return out_THD

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Any, ...]:
        rotated_T3HD, out_THD, cos_TD, sin_TD, *tensors = ctx.saved_tensors
        dout_THD, dqkv_T3HD, start = dout_THD.contiguous(), torch.empty_like(rotated_T3HD), 0
        for index, ((count, length), sizes) in enumerate(zip(ctx.groups, ctx.sizes, strict=True)):
            at = start, count, length
            if length == 1:
                dqkv_T3HD[start : start + count, :2] = 0
                dqkv_T3HD[start : start + count, 2] = dout_THD[start : start + count]
                start += count
                continue
            lse, seed, offset = tensors[3 * index : 3 * index + 3]
            found = _sdpa_backward(
                _batch(dout_THD, *at),
                *_batches(rotated_T3HD, *at),
                _batch(out_THD, *at),
                lse,
                seed,
                offset,
                None,
                *sizes,
                0.0,
                False,
                scale=ctx.scale,
            )
            if cos_TD is not None:
                rope_gather_back(found, *(_rows(x, start, count * length) for x in (cos_TD, sin_TD, dqkv_T3HD)))
            else:
                for part, dx in enumerate(found):
                    _batch(dqkv_T3HD[:, part], *at).copy_(dx)
            start += count * length
        return dqkv_T3HD, None, None, None, None


@machine.probe
def _against_gradients(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Why its gradients are not used here: they are tried once, against attention by its definition."""
    groups, scale = ((2, 96), (3, 1), (1, 200)), head_dim**-0.5
    lengths = [length for count, length in groups for _ in range(count)]

    def attend(qkv_T3HD: Tensor) -> Tensor:
        return _Attention.apply(qkv_T3HD, None, None, groups, scale)

    return reasons_tried(attend, lengths, device, dtype, head_dim, grad=True)
