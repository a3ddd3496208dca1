"""The attention function behind the registered names, and the name that a patched tower has."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_vit_accel import versions
from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import PLANS_OF_OFFSETS, ROUTE, Route, SegmentPlans
from hf_vit_accel.families import FAMILIES, FAMILIES_OF_COPIES, Model, Tower, find_towers
from hf_vit_accel.families.copies import suggest_families
from hf_vit_accel.layout import Segments
from hf_vit_accel.machine import FallbackError, is_upstream, reasons_untraceable
from hf_vit_accel.tower.code import names_of_forwards
from hf_vit_accel.tower.proof import NAMES, name_for, warn_once
from hf_vit_accel.watch import version_of

if TYPE_CHECKING:
    from hf_vit_accel.tower.state import TowerState


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

    A patched tower's offsets have `SegmentPlans`, known by the offsets themselves or by its route. A stock tower under
    one of our names gets its own here, at the price of a host sync. Any other attention (of a text decoder that was
    loaded with one of our names) goes to transformers' own sdpa function, with its mask.

    Returns the outputs (1, T, H, D), and None for the weights of attention.
    """
    if cu_seq_lens_q is None or kwargs.get("is_causal", getattr(module, "is_causal", True)):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # slow; models have imported it

        if not torch.compiler.is_compiling():  # older towers attend to one image at a time, without offsets
            _warn_of_unknown()
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    reasons = ["attention weights are dropped out"] if dropout else reasons_untraceable()
    if len(query) > 1:
        reasons = [*reasons, "the images are not packed into one row of a batch"]
    route: Route | None = kwargs.get(ROUTE)
    plans: SegmentPlans | None = None
    if not torch.compiler.is_compiling():
        plans = PLANS_OF_OFFSETS.get(cu_seq_lens_q)
    faults: Mapping[str, str] = {}
    if plans is not None:
        settings = plans.settings
    elif route is not None:
        settings = route.spec.settings
        faults = route.spec.faults
    else:
        _warn_of_unknown()
        settings = Settings(attention=NAMES.get(getattr(module.config, "_attn_implementation", ""), "auto"))
        state = None if torch.compiler.is_compiling() else _state_of_config(module.config)
        if state is not None:
            settings = state.settings
            faults = state.faults
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # every head of keys and values belongs to several heads of queries
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if reasons:
        if settings.score_mod is not None:
            raise FallbackError(f"the score_mod cannot be applied to this call: {reasons[0]}")
        return _attend_as_stock(module, (query, key, value), cu_seq_lens_q, dropout, scaling), None
    plans = plans or _read_plans(settings, faults, route, cu_seq_lens_q, query.shape[2])
    return attend_packed((query, key, value), scaling, plans), None


def attend_packed(qkv: tuple[Tensor, Tensor, Tensor], scaling: float | None, plans: SegmentPlans) -> Tensor:
    """Attend queries, keys and values (1, H, T, D) within segments; return (1, T, H, D). No compiler may trace it."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in qkv)
    dtype = q_THD.dtype
    # With `device_map`, this layer may be on another GPU than the one that the tower's forward made current.
    with torch.cuda.device(q_THD.device) if q_THD.is_cuda else nullcontext():
        request = Request(
            device=q_THD.device,
            dtype=dtype,
            heads=q_THD.shape[1],
            head_dim=q_THD.shape[2],
            scale=q_THD.shape[-1] ** -0.5 if scaling is None else scaling,
            grad=torch.is_grad_enabled() and any(x.requires_grad for x in qkv),
            rows=len(q_THD),
        )
        plan = plans.plan(request)
        # PEFT and quantisation upcast norms: attention computes in the dtype of the weights, as transformers' does.
        q_THD, k_THD, v_THD = (x.to(plan.request.dtype) for x in (q_THD, k_THD, v_THD))
        return plan.attend(q_THD, k_THD, v_THD).to(dtype).unsqueeze(0)


_STATES = WeakIdKeyDictionary()
"""Of the config of a patched tower whose stock forward has run on its own arguments: a weak reference to its state."""


def note_state(config: object, state: TowerState) -> None:
    """Let layers that hold this config attend by the settings of its tower, and without the backends that failed."""
    _STATES[config] = weakref.ref(state)


def _state_of_config(config: object) -> TowerState | None:
    """Return the state of the patched tower that noted it for a config; None for a stock tower."""
    reference = _STATES.get(config)
    return None if reference is None else reference()


def _attend_as_stock(
    module: nn.Module, qkv: tuple[Tensor, ...], cu_seqlens_S1: Tensor, dropout: float, scaling: float | None
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


_READ = WeakIdKeyDictionary()
"""Of offsets that others made: their version and whose they are, and the plans for them, which go with the offsets.

A tower has two kinds of offsets, for windows and for whole frames, which its layers alternate.
"""


def _read_plans(
    settings: Settings, faults: Mapping[str, str], route: Route | None, cu_seqlens_S1: Tensor, rows: int
) -> SegmentPlans:
    """Return plans for offsets that we did not make, by one host sync for all layers that get the very same tensor.

    Within a call of ours (`route`) they stay as they are; elsewhere, not those whose changes would go unseen.
    """
    version = version_of(cu_seqlens_S1)
    key = version, rows, route, settings.attention, settings.score_mod, tuple(faults)
    known_key, plans = _READ.get(cu_seqlens_S1, (None, None))
    if plans is None or key != known_key or (version is None and route is None):
        plans = None if route is None else route.plans_of_equal(cu_seqlens_S1, rows)
        plans = plans or _plans_from_device(settings, faults, cu_seqlens_S1, rows)
        _READ[cu_seqlens_S1] = key, plans
    return plans


def _plans_from_device(settings: Settings, faults: Mapping[str, str], cu_seqlens_S1: Tensor, rows: int) -> SegmentPlans:
    """Read offsets from the device, and check them."""
    host_S1 = cu_seqlens_S1.detach().cpu().numpy()
    lengths_S = np.diff(host_S1)
    if host_S1[0] != 0 or host_S1[-1] != rows or (lengths_S < 0).any():
        raise ValueError(
            f"expected cu_seqlens to rise from 0 to the number of rows {rows}, got it from {host_S1[0]} to "
            f"{host_S1[-1]}; pass the offsets of all rows"
        )
    segments = Segments(np.ascontiguousarray(lengths_S[lengths_S > 0], dtype=np.int32))
    return SegmentPlans(kind="full", segments=segments, settings=settings, faults=faults)


_NOTED: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()


def note_unknown(model: Model) -> None:
    """Note a model that has the config of a tower, and is none of a known class: a wrapper, or an unknown tower.

    While it is made there is nothing inside, so it is looked at when a stock tower attends by one of our names.
    """
    _NOTED[id(model)] = model


def _warn_of_unknown() -> None:
    """Warn once per class of noted models in which no known tower was made: they stay stock."""
    for key, model in list(_NOTED.items()):
        del _NOTED[key]
        if model.config._attn_implementation in NAMES and not any(find_towers(model)):
            name = type(model).__name__
            families = ", ".join(family.name for family in FAMILIES)
            warn_once(
                f"{name} stays stock, but for its attention: it has the config of a supported vision tower, but is of "
                f"an unknown class. Known are the classes of transformers for {families}."
                + "".join(f" {sentence}." for sentence in suggest_families(model, FAMILIES_OF_COPIES))
            )


def reasons_custom_attention(tower: Tower, name: str | None) -> list[str]:
    """Return a reason if the attention of this name is a function of the user's, which may compute anything.

    Functions of transformers, ours, and those of the Hub (a name with a slash) compute attention.
    """
    if name == "eager":  # not registered, but a function in the tower's file
        function: Any = getattr(sys.modules.get(type(tower).forward.__module__), "eager_attention_forward", None)
    else:
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or "/" in str(name) or str(function.__module__).startswith("hf_vit_accel."):
        return []
    if is_upstream(function):
        return []
    return [f"the attention {name!r} is a function of your own; patch(attention=...) with a backend's name replaces it"]


def attention_name(tower: Tower, settings: Settings, former_name: str | None) -> str | None:
    """Return the attention name for the config of a patched tower.

    Under "auto", a function of the user's stays. So does "eager": a user who loads with it may ask for attention
    weights, which no other attention returns.
    """
    if settings.attention != "auto":
        return name_for(settings.attention)
    if former_name == "eager" or reasons_custom_attention(tower, former_name):
        return former_name
    names = names_of_forwards({type(module) for module in tower.modules()})
    if former_name == "flash_attention_2" and not versions.knows_segments(names):
        return former_name  # under our names, layers that run as modules would attend once a segment
    return name_for("auto")
