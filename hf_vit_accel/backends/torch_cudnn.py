"""cuDNN's attention as built into torch, forward and backward. For training it is the fastest one without a package.

Neighbouring segments of equal length are one batch, called a group. `T` packed rows, `H` heads, `D` head dim, `B`
segments of a group, `L` rows of each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Attend, Backend, Plan, Request, reasons_from_trial, trial_scale
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.base import FunctionContext, Rotate
from hf_vit_accel.ops.embedding import rope_, rope_gather_back
from hf_vit_accel.ops.embedding import rotate as our_rotation
from hf_vit_accel.ops.training.nodes import OpWithBackward

Groups = Sequence[tuple[int, int]]
"""(segments, rows of each) of every group."""

_rotate_ = machine.guarded(machine.KERNELS, rope_)
_cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

MOST_GROUPS = 16
"""The largest number of groups. Every group is a launch in both directions; beyond it, one varlen call is faster."""
TILE = 128
"""Rows of a tile of cuDNN's forward kernel."""
MOST_WASTE = 0.06
"""The largest share of empty rows in tiles. 28 segments of 576 rows (10%) take 179 us, in FlashAttention-3 144 us."""


class TorchCudnn(Backend):
    """Attend group by group, each in a call of its own. With gradients q, k and v are packed in one tensor."""

    name = "torch_cudnn"
    needs = replace(HALF, differentiable=True)
    replays_other_layouts = False

    def lacks(self) -> tuple[str, ...]:
        return () if torch.backends.cudnn.is_available() else ("this torch has no cuDNN",)

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if request.replay == "padded":
            reasons.append("its launches depend on the layout, and a CUDA graph must replay others, too")
        if not reasons and request.grad:
            reasons = list(_reasons_from_gradients(request.device, request.dtype, request.head_dim))
        return reasons

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        count = len(_groups(segments))
        return [] if count <= MOST_GROUPS else [f"the lengths form {count} groups, it takes {MOST_GROUPS}"]

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        if request.grad:
            return None
        groups = _groups(segments)
        if len(groups) > 1:
            return f"{len(groups)} batches of equal lengths, each a launch of its own"
        waste = max((_waste(length) for _, length in groups), default=0.0)
        return f"{waste:.0%} of its tiles would be empty" if waste > MOST_WASTE and request.rows >= 4096 else None

    def plan(self, segments: Segments, request: Request) -> Plan:
        return Plan(backend=self, request=request, host={"groups": _groups(segments)})

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        groups = plan.host["groups"]
        scale = plan.request.scale
        if not plan.request.grad:
            return _forward((q_THD, k_THD, v_THD), groups, scale, needs_lse=False)[0]
        return _Attention.apply(torch.stack((q_THD, k_THD, v_THD), dim=1), None, None, groups, scale)

    def attend_layers(self, plan: Plan, layers: int, rotate: Rotate) -> list[Attend]:
        groups = plan.host["groups"]
        scale = plan.request.scale
        if plan.request.grad and getattr(rotate, "__wrapped__", rotate) is our_rotation:
            # Our own rotation: `_Attention` fuses it and its gradient.
            return [OpWithBackward(function=_Attention, settings=(groups, scale), fault=self.name)] * layers

        def attend(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
            rotated_T3HD = rotate(qkv_T3HD, cos_TD, sin_TD)
            if plan.request.grad:
                return _Attention.apply(rotated_T3HD, None, None, groups, scale)
            return _forward(rotated_T3HD, groups, scale, needs_lse=False)[0]

        return [attend] * layers


def _groups(segments: Segments) -> tuple[tuple[int, int], ...]:
    """Return (segments, rows of each) of every run of equal lengths."""
    lengths = segments.lengths_S[segments.lengths_S > 0].tolist()
    return tuple((len(list(run)), length) for length, run in groupby(lengths))


def _waste(length: int) -> float:
    """Return the share of empty rows in the tiles of a segment."""
    tiles = -(-length // TILE)
    return 1 - length / (tiles * TILE)


def _rows(x: Tensor, start: int, count: int) -> Tensor:
    return x if count == x.shape[0] else x[start : start + count]


def _batch(x_THD: Tensor, start: int, count: int, length: int) -> Tensor:
    """Return the rows of one group as a view (B, H, L, D)."""
    return _rows(x_THD, start, count * length).view(count, length, *x_THD.shape[1:]).transpose(1, 2)


def _batches(qkv: Tensor | Sequence[Tensor], start: int, count: int, length: int) -> Sequence[Tensor]:
    """Return the rows of one group of q, k and v as views (B, H, L, D). qkv: (T, 3, H, D), or three of (T, H, D)."""
    if not isinstance(qkv, Tensor):
        return [_batch(x_THD, start, count, length) for x_THD in qkv]
    qkv_BL3HD = _rows(qkv, start, count * length).view(count, length, *qkv.shape[1:])
    return qkv_BL3HD.permute(2, 0, 3, 1, 4).unbind(0)  # fewer views than of each alone, which the host pays for


Saved = list[Tensor | None]
"""logsumexp, seed and offset of every group, as torch calls them: the tensors that its backward needs."""
Sizes = list[tuple[Tensor | int, ...]]
"""cum_seq_q, cum_seq_k, max_q and max_k of every group."""


def _forward(
    qkv: Tensor | Sequence[Tensor], groups: Groups, scale: float, *, needs_lse: bool
) -> tuple[Tensor, Saved, Sizes]:
    """Attend every group of q, k and v, (T, 3, H, D) or three of (T, H, D); also return what a backward needs."""
    outs_THD = []
    saved: Saved = []
    sizes: Sizes = []
    start = 0
    for count, length in groups:
        if length == 1:  # the row attends to itself alone, and cuDNN has no backward for it
            v_THD = qkv[:, 2] if isinstance(qkv, Tensor) else qkv[2]
            outs_THD.append(v_THD[start : start + count].contiguous())
            saved += [None, None, None]
            sizes.append(())
        else:
            batches_BHLD = _batches(qkv, start, count, length)
            out_BHLD, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, *_ = _cudnn_attention(
                *batches_BHLD, None, needs_lse, 0.0, False, False, scale=scale
            )
            outs_THD.append(out_BHLD.transpose(1, 2).flatten(0, 1))
            saved += [logsumexp, seed, offset]
            sizes.append((cum_seq_q, cum_seq_k, max_q, max_k))
        start += count * length
    out_THD = outs_THD[0] if len(outs_THD) == 1 else torch.cat(outs_THD)
    return out_THD, saved, sizes


class _Attention(torch.autograd.Function):
    """Packed projection (T, 3, H, D) to attended rows (T, H, D).

    With cos and sin, q and k are first rotated in place, and their gradients are rotated back.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        qkv_T3HD: Tensor,
        cos_TD: Tensor | None,
        sin_TD: Tensor | None,
        groups: Groups,
        scale: float,
    ) -> Tensor:
        if cos_TD is not None and sin_TD is not None:
            _rotate_(qkv_T3HD, cos_TD, sin_TD)
        out_THD, saved, ctx.sizes = _forward(qkv_T3HD, groups, scale, needs_lse=any(ctx.needs_input_grad))
        ctx.groups = groups
        ctx.scale = scale
        ctx.save_for_backward(qkv_T3HD, out_THD, cos_TD, sin_TD, *saved)
        return out_THD

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        rotated_T3HD, out_THD, cos_TD, sin_TD, *tensors = ctx.saved_tensors
        dout_THD = dout_THD.contiguous()
        dqkv_T3HD = torch.empty_like(rotated_T3HD)
        start = 0
        for index, (count, length) in enumerate(ctx.groups):
            rows = count * length
            if length == 1:
                dqkv_T3HD[start : start + rows, :2] = 0
                dqkv_T3HD[start : start + rows, 2] = dout_THD[start : start + rows]
                start += rows
                continue
            logsumexp, seed, offset = tensors[3 * index : 3 * index + 3]
            gradients_BHLD = _cudnn_attention_backward(
                _batch(dout_THD, start, count, length),
                *_batches(rotated_T3HD, start, count, length),
                _batch(out_THD, start, count, length),
                logsumexp,
                seed,
                offset,
                None,
                *ctx.sizes[index],
                0.0,
                False,
                scale=ctx.scale,
            )
            if cos_TD is None:
                for part, gradient_BHLD in enumerate(gradients_BHLD):
                    _batch(dqkv_T3HD[:, part], start, count, length).copy_(gradient_BHLD)
            else:
                rope_gather_back(
                    gradients_BHLD,
                    _rows(cos_TD, start, rows),
                    _rows(sin_TD, start, rows),
                    _rows(dqkv_T3HD, start, rows),
                )
            start += rows
        return dqkv_T3HD, None, None, None, None


@machine.probe
def _reasons_from_gradients(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Run the gradients once on this machine and list what is wrong with them."""
    groups = ((2, 96), (3, 1), (1, 200))
    lengths = [length for count, length in groups for _ in range(count)]

    def attend(qkv_T3HD: Tensor) -> Tensor:
        return _Attention.apply(qkv_T3HD, None, None, groups, trial_scale(head_dim))

    return reasons_from_trial(attend, lengths, device, dtype, head_dim, grad=True)
