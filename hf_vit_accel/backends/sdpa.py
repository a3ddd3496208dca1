"""torch's own scaled_dot_product_attention, one batched call per distinct segment length.

It runs on every device, in every dtype, with gradients. Stock transformers calls it once per segment: thousands of
calls for one page through Qwen2.5-VL. Grouped by length, the windows of that page take a handful.

`T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.backends.base import Backend, Needs, Plan, Request
from hf_vit_accel.layout import Segments


class Sdpa(Backend):
    """Attend segments of equal length as one batch. Rows are gathered only if segments are not sorted by length."""

    name = "sdpa"
    needs = Needs(cuda=False, differentiable=True)
    replays_other_layouts = False

    def plan(self, segments: Segments, request: Request) -> Plan:
        lengths, counts = np.unique(segments.lengths_S, return_counts=True)
        groups = tuple(zip(counts.tolist(), lengths.tolist(), strict=True))
        order_S = np.argsort(segments.lengths_S, kind="stable")
        arrays = {}
        if (order_S != np.arange(segments.count)).any():
            lengths_S = segments.lengths_S[order_S]
            starts_S = segments.cu_seqlens_S1[:-1][order_S]
            packed_starts_S = np.concatenate([[0], np.cumsum(lengths_S)[:-1]])
            order_T = np.arange(segments.rows) + np.repeat(starts_S - packed_starts_S, lengths_S)
            inverse_T = np.empty_like(order_T)
            inverse_T[order_T] = np.arange(segments.rows)
            arrays = {"order_T": order_T, "inverse_T": inverse_T}
        return Plan(backend=self, request=request, host={"groups": groups}, arrays=arrays)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        order_T = plan.tensors.get("order_T")
        if order_T is not None:
            q_THD = q_THD[order_T]
            k_THD = k_THD[order_T]
            v_THD = v_THD[order_T]
        outputs = []
        start = 0
        for count, length in plan.host["groups"]:
            rows = slice(start, start + count * length)
            q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
            out = F.scaled_dot_product_attention(q, k, v, scale=plan.request.scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            start = rows.stop
        out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out_THD if order_T is None else out_THD[plan.tensors["inverse_T"]]
