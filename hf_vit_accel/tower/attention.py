"""The attention function behind the registered names, for towers with a route, and for others without one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_vit_accel.backends import Plan, Request, ScoreMod, plan_alone, resolve
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import OFFSETS, ROUTE, SEGMENTS, KnownSegments, Route
from hf_vit_accel.layout import Segments
from hf_vit_accel.machine import FallbackError
from hf_vit_accel.tower import unknown
from hf_vit_accel.tower.checks import reasons_untraceable
from hf_vit_accel.tower.proof import NAMES


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to q, k, v (1, H, T, D); the function behind the registered names.

    A patched tower passes its route, in the keyword arguments or as an attribute of `cu_seq_lens_q`. The route holds
    the plan. A tower whose attention alone is ours passes `KnownSegments`, in the same two ways. A stock tower under
    one of our names gets a plan here, at the price of a host sync. Any other attention (of a text decoder that was
    loaded with one of our names) goes to transformers' own sdpa function, with its mask.

    Returns:
        The outputs (1, T, H, D), and None for the weights of attention.

    Raises:
        FallbackError: A score_mod cannot be applied to this call.
    """
    if cu_seq_lens_q is None or kwargs.get("is_causal", getattr(module, "is_causal", True)):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # slow; models have imported it

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    route = kwargs.get(ROUTE, getattr(cu_seq_lens_q, ROUTE, None))
    offsets: KnownSegments | None = getattr(cu_seq_lens_q, OFFSETS, None)
    if offsets is None:
        offsets = kwargs.get(SEGMENTS, {}).get(query.shape[2])
    if route is None and offsets is None:
        unknown.warn()
    settings: Settings | None = None
    if offsets is not None:
        settings = offsets.settings
    elif route is not None:
        settings = route.spec.settings
    score_mod = None if settings is None else settings.score_mod
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # every head of keys and values belongs to several heads of queries
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    reasons = ["attention weights are dropped out"] if dropout else reasons_untraceable()
    if len(query) > 1:
        reasons = [*reasons, "the images are not packed into one row of a batch"]
    if reasons:
        if score_mod is not None:
            raise FallbackError(f"the score_mod cannot be applied to this call: {reasons[0]}")
        return _attend_as_stock(module, (query, key, value), cu_seq_lens_q, dropout, scaling), None
    return _attend_packed(module, (query, key, value), cu_seq_lens_q, scaling, route, offsets, score_mod), None


def _attend_packed(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_S1: Tensor,
    scaling: float | None,
    route: Route | None,
    offsets: KnownSegments | None,
    score_mod: ScoreMod | None,
) -> Tensor:
    """Attend by the plan of a route, or by one that is made here.

    Args:
        qkv: Queries, keys and values (1, H, T, D).
        scaling: The scale of the scores; None for the usual one.
        route: The route of the tower's forward; None for a tower without one.
        offsets: The segments, where the tower's forward knows them without a route.
        score_mod: A function of the user's that changes scores; None without one.

    Returns:
        The outputs (1, T, H, D).
    """
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in qkv)
    dtype = q_THD.dtype
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    # With `device_map`, this layer may be on another GPU than the one that the tower's forward made current.
    with torch.cuda.device(q_THD.device) if q_THD.is_cuda else nullcontext():
        plan: Plan | None = route.plan_for(cu_seqlens_S1) if route is not None else None
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
        fits = plan is not None and (plan.request.heads, plan.request.head_dim) == q_THD.shape[1:]
        if plan is None or not fits or (needs_grad and not plan.request.grad):
            plan = _plan_without_route(
                module, q_THD, cu_seqlens_S1, offsets, scale, grad=needs_grad, score_mod=score_mod
            )
        elif plan.request.scale != scale:
            plan = replace(plan, request=replace(plan.request, scale=scale))
        # PEFT and quantisation upcast norms: attention computes in the dtype of the weights, as transformers' does.
        q_THD, k_THD, v_THD = (x.to(plan.request.dtype) for x in (q_THD, k_THD, v_THD))
        return plan.attend(q_THD, k_THD, v_THD).to(dtype).unsqueeze(0)


def _attend_as_stock(
    module: Any, qkv: tuple[Tensor, ...], cu_seqlens_S1: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Attend segment by segment, as stock does without varlen kernels: torch can drop out, transform and trace that."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # slow; models have imported it

    lengths = cu_seqlens_S1.diff().tolist()
    segments = zip(*(x.split(lengths, dim=2) for x in qkv), strict=True)
    outs = [
        sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=scaling, is_causal=False)[0]
        for q, k, v in segments
    ]
    return torch.cat(outs, dim=1)


def _plan_without_route(
    module: Any,
    q_THD: Tensor,
    cu_seqlens_S1: Tensor,
    offsets: KnownSegments | None,
    scale: float,
    *,
    grad: bool,
    score_mod: ScoreMod | None,
) -> Plan:
    """Return a plan for offsets that no route has planned; it is kept for other layers that get the very same tensor.

    Args:
        offsets: The segments, where they are known.
        score_mod: A function of the user's that changes scores; None without one.
    """
    name = "flex" if score_mod else NAMES.get(getattr(module.config, "_attn_implementation", ""), "auto")
    name = offsets.settings.attention if offsets else name
    request = Request(
        device=q_THD.device,
        dtype=q_THD.dtype,
        heads=q_THD.shape[1],
        head_dim=q_THD.shape[2],
        scale=scale,
        grad=grad,
        rows=len(q_THD),
        score_mod=score_mod,
    )
    stream = torch.cuda.current_stream(q_THD.device).cuda_stream if q_THD.is_cuda else 0
    key = request, stream, name
    if offsets is not None:
        plan = offsets.plans.get(key)
        if plan is None:
            if offsets.segments.rows != len(q_THD):
                raise ValueError(f"expected {offsets.segments.rows} rows for this grid_thw, got {len(q_THD)}")
            request = replace(request, kind=offsets.kind, max_seqlen=offsets.segments.max_seqlen)
            backend = resolve(name, request, offsets.segments, offsets.faults).backend
            offsets.plans[key] = plan = plan_alone(backend, offsets.segments, request)
        offsets.backends[offsets.kind] = plan.backend.name
        return plan
    if cu_seqlens_S1.is_inference():  # such tensors count no versions, so a change of them would go unseen
        return _plan_offsets(name, request, len(q_THD), cu_seqlens_S1)
    if not hasattr(_KNOWN, "plans"):
        _KNOWN.plans = WeakIdKeyDictionary()
    version, plans = _KNOWN.plans.get(cu_seqlens_S1, (None, {}))
    if version != cu_seqlens_S1._version:
        plans = {}
        _KNOWN.plans[cu_seqlens_S1] = cu_seqlens_S1._version, plans
    if key not in plans:
        plans[key] = _plan_offsets(name, request, len(q_THD), cu_seqlens_S1)
    return plans[key]


_KNOWN = threading.local()
"""Of each thread, `plans`: the version of offsets that came without a plan, and the plans that were made of them.

They go with the offsets. A tower has two kinds of them, for windows and for whole frames, which its layers alternate.
"""


def _plan_offsets(name: str, request: Request, rows: int, cu_seqlens_S1: Tensor) -> Plan:
    """Read offsets from the device, check them, and plan them for the named backend, or for another if it cannot."""
    host_S1 = cu_seqlens_S1.detach().cpu().numpy()
    lengths_S = np.diff(host_S1)
    if host_S1[0] != 0 or host_S1[-1] != rows or (lengths_S < 0).any():
        raise ValueError(
            f"expected cu_seqlens to rise from 0 to the number of rows {rows}, got it from {host_S1[0]} to "
            f"{host_S1[-1]}; pass the offsets of all rows"
        )
    segments = Segments(np.ascontiguousarray(lengths_S[lengths_S > 0], dtype=np.int32))
    request = replace(request, max_seqlen=segments.max_seqlen)
    return plan_alone(resolve(name, request, segments).backend, segments, request)
