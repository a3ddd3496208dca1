"""What is decided about a call at the tower's boundary: what it asks of a backend, and what stands against serving it.

Verdicts are lists of sentences, empty where nothing stands against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

from hf_vit_accel.backends import FP8, Request, ScoreMod
from hf_vit_accel.config import Fp8Config, GraphConfig
from hf_vit_accel.contract import own_attention
from hf_vit_accel.faults import KERNELS
from hf_vit_accel.fusion import PARTS, Fusion
from hf_vit_accel.metadata import Geometry
from hf_vit_accel.planning import POPPED, Layout, Prepared
from hf_vit_accel.scales import Maxima, Scales

__all__ = [
    "Settings",
    "against_call",
    "against_injection",
    "against_positions",
    "request_for",
    "transformed",
    "unserved",
]

_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for; see `hf_vit_accel.patch`. fuse: the parts, named one by one or not. graphs: or None.

    score_mod: what every layer's attention must apply. fp8: or None. maxima: what its file holds, if it names one.
    """

    attention: str = "auto"
    score_mod: ScoreMod | None = None
    fuse: frozenset[str] = frozenset(PARTS)
    fuse_named: bool = False
    graphs: GraphConfig | None = None
    fp8: Fp8Config | None = None
    maxima: Maxima | None = None
    strict: bool = False


def against_injection(tower: Any, name: str | None, former_forward: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """Why a call must reach the stock forward as it is, whatever it holds, without metadata of ours.

    name: of the attention that it runs under.
    """
    reasons = []
    # accelerate leaves the class's forward on the instance when its hooks come off: the same as none.
    if getattr(former_forward, "__func__", None) is not type(tower).forward and former_forward is not None:
        reasons.append("the tower has a forward of its own")
    if any(popped in kwargs for popped in POPPED):
        reasons.append("the caller supplies sequence metadata")
    if why := own_attention(tower, name):
        reasons.append(why)
    if is_tracing():  # which records no tensors that numpy makes
        reasons.append("torch.jit.trace is at work")
    return reasons


def against_positions(tower: Any, geometry: Geometry) -> list[str]:
    """Why metadata of ours would not be what the stock forward computes."""
    if geometry.table is None and hasattr(tower, "pos_embed"):
        return ["positions are interpolated in a way that is not known"]
    return []


def against_call(
    tower: Any, attentions: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], device: torch.device, grad: bool
) -> list[str]:
    """Why this call wants more than the fast path gives. attentions: the attributes of every attention module."""
    reasons = []
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(tower.config, name, False)):
            reasons.append(f"{name} is requested")
    if grad:
        reasons.append("gradients are required")
    if _autocast(device):
        reasons.append("autocast is on")
    if any(attention["training"] and attention.get("attention_dropout", 0.0) for attention in attentions):
        reasons.append("attention weights are dropped out")
    if len({attention["scaling"] for attention in attentions}) > 1:
        reasons.append("layers scale attention differently")
    if len({(attention["num_heads"], attention["head_dim"]) for attention in attentions}) > 1:
        reasons.append("layers have different heads")
    if transformed():
        reasons.append("a transform of torch.func or forward-mode differentiation is at work")
    return reasons


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which kernels and backends do not know."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def unserved(
    settings: Settings, fusion: Fusion | None, prepared: Prepared | Layout, faults: Mapping[str, str]
) -> list[str]:
    """What this call does not get: a backend or parts to fuse that the user named, and whatever failed when it ran."""
    reasons = []
    for choice in prepared.choices.values():
        for name, against in choice.rejected.items():
            if name in (settings.attention, FP8.name) or faults.get(name) in against:
                reasons += [f"{name} cannot serve the call: {why}" for why in against]
    if fusion is not None and faults.get(KERNELS) in fusion.unfused.values():
        reasons.append(f"no fused kernel can serve the call: one {faults[KERNELS]}")
    if settings.fuse_named and fusion is not None:
        reasons += [f"{part} is not fused: {why}" for part, why in fusion.unfused.items() if part in settings.fuse]
        if "window_attention" in settings.fuse & fusion.fused and "window" in prepared.plans:
            reasons.append("window_attention is not fused: the windows are longer than the kernel's")
    return list(dict.fromkeys(reasons))


def _autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def request_for(
    tower: Any,
    device: torch.device,
    *,
    grad: bool = False,
    packed: bool = True,
    score_mod: ScoreMod | None = None,
    fp8: Scales | None = None,
) -> Request:
    """What a tower's layers ask of a backend: its heads, and the dtype that its attention computes in."""
    attention = tower.blocks[0].attn
    dtype = getattr(getattr(attention.qkv, "weight", None), "dtype", None)
    if _autocast(device):
        dtype = torch.get_autocast_dtype(device.type)
    elif dtype not in _COMPUTE_DTYPES:  # quantised: the norms keep the dtype that activations have
        dtype = tower.blocks[0].norm1.weight.dtype
    return Request(
        device=device,
        dtype=dtype,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        packed=packed,
        grad=grad,
        score_mod=score_mod,
        fp8=fp8,
    )
