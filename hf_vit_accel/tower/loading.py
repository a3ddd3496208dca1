"""The names that transformers knows us by, and how they are routed.

`flashinfer_cudnn` and `flash_vit_auto` are registered with the attention and mask interfaces. Two functions of
transformers are wrapped, for these names only: `lazy_import_flash_attention` would look for a Hub kernel for any name
that contains "flash" (there is no opt-out up to 5.23), and `PreTrainedModel.get_correct_attn_implementation` is where
each model of a composite learns its attention: a known tower is patched, a text decoder gets its own default.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_vit_accel.backends import BACKENDS, Plan, Request, ScoreMod, plan_alone, require, resolve
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import OFFSETS, PLANS, Offsets
from hf_vit_accel.families import FAMILIES, family_of, find_towers
from hf_vit_accel.layout import Segments
from hf_vit_accel.machine import FallbackError
from hf_vit_accel.tower.checks import reasons_untraceable
from hf_vit_accel.tower.install import install, uninstall
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.state import TowerState, state_of


def is_ours(name: object) -> bool:
    """Whether an attention implementation is one of the registered names (a dict or None is not)."""
    return isinstance(name, str) and name in NAMES


def register() -> None:
    """Register the names and wrap the two routing functions; once, however often it is called."""
    for name in NAMES:
        modeling_utils.AttentionInterface.register(name, vision_attention)
        AttentionMaskInterface.register(name, sdpa_mask)
    missing = [
        wrap(modeling_utils, "lazy_import_flash_attention", _guarded),
        wrap(modeling_utils.PreTrainedModel, "get_correct_attn_implementation", _routed),
    ]
    MISSING[:] = [why for why in missing if why is not None]
    if MISSING:
        wrap(modeling_utils.PreTrainedModel, "__init__", _refused)


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> str | None:
    """Put a wrapper around a function of transformers, once however often; or return what is missing."""
    original = getattr(owner, name, None)
    if original is None:
        return f"transformers {transformers.__version__} has no {getattr(owner, '__name__', owner)}.{name}"
    original = getattr(original, _ORIGINAL, original)
    wrapper = wraps(original)(make(original))
    setattr(wrapper, _ORIGINAL, original)
    setattr(owner, name, wrapper)
    return None


_ORIGINAL = "_hf_vit_accel_original"

MISSING: list[str] = []
"""What loading by name needs of transformers and does not find; `patch` needs none of it."""


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        for each in (config, *_sub_configs(config)):
            if is_ours(each._attn_implementation):
                _check_missing(each._attn_implementation)
        original(self, config, *args, **kwargs)

    return init


def _check_missing(name: str) -> None:
    if MISSING:
        raise ValueError(
            f"attn_implementation={name!r} cannot be loaded: {'; '.join(MISSING)}. Use hf_vit_accel.patch."
        )


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def lazy_import_flash_attention(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if is_ours(implementation) else original(implementation, *args, **kwargs)

    return lazy_import_flash_attention


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(requested_attention):
            same = requested_attention == self.config._attn_implementation  # as it is where a model's text gets another
            applicable = original(self, requested_attention, *args, **kwargs)
            for tower in () if same else (self, *_wrapped(self)):
                uninstall(tower)  # a patched tower was told to use another name
            return applicable
        assert requested_attention is not None
        _check_missing(requested_attention)
        family = family_of(self)
        if family is None:
            if _is_of_tower(self.config):  # a wrapper, with the config of the tower in it
                for tower in _wrapped(self):
                    tower.get_correct_attn_implementation(requested_attention, *args, **kwargs)
                return requested_attention
            if id(self.config) in _BESIDE:
                current = self.config._attn_implementation
                return original(self, None if is_ours(current) else current, *args, **kwargs)
            _check_composite(self.config, requested_attention)
            return requested_attention
        attention = NAMES[requested_attention]
        require(attention)
        patched, former = state_of(self), self.config._attn_implementation
        if patched is not None and former == requested_attention:
            return requested_attention
        if patched is not None:
            former = patched.former_name
        former_name = None if is_ours(former) else former
        install(self, TowerState(family, Settings(attention=attention), former_name=former_name))
        return requested_attention

    return get_correct_attn_implementation


def _wrapped(model: Any) -> list[Any]:
    """Towers inside a model that share its config, which transformers therefore leaves out; none while it is made."""
    inside = find_towers(model) if vars(model).get("_modules") else ()
    return [tower for _, tower, _ in inside if tower is not model and tower.config is model.config]


_BESIDE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The sub-configs without a tower of composites that were given one of our names: they keep attentions of their own."""


def _check_composite(config: Any, name: str) -> None:
    """Raise if a model that is given one of our names holds no supported tower, or the machine cannot run it.

    Otherwise its sub-models without a tower are given back their own attention.
    """
    subs = list(_sub_configs(config))
    if not any(map(_is_of_tower, subs)):
        supported = ", ".join(family.name for family in FAMILIES)
        raise ValueError(
            f"attn_implementation={name!r} accelerates the vision towers of {supported}; "
            f"{type(config).__name__} has none. Use another attn_implementation for this model."
        )
    require(NAMES[name])
    for sub in subs:
        if not any(map(_is_of_tower, (sub, *_sub_configs(sub)))):
            _BESIDE[id(sub)] = sub
            if is_ours(sub._attn_implementation):
                sub._attn_implementation_internal = None


def _is_of_tower(config: Any) -> bool:
    known = {module.replace(".modeling_", ".configuration_") for family in FAMILIES for module, _ in family.towers}
    return not config.sub_configs and any(
        kind.__module__ in known and "Vision" in kind.__name__ for kind in type(config).__mro__
    )


def _sub_configs(config: Any) -> Iterator[Any]:
    for key in getattr(config, "sub_configs", None) or ():
        sub = getattr(config, key, None)
        if sub is not None:
            yield sub
            yield from _sub_configs(sub)


def restore_name(model: nn.Module, former_name: str | None) -> None:
    """Give a model's config its former attention name, or stock's default, if it has one of ours now."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, modeling_utils.PreTrainedModel) and is_ours(config._attn_implementation):
        if former_name is None:
            text = config.get_text_config()._attn_implementation
            former_name = model.get_correct_attn_implementation(None if is_ours(text) else text)
        config._attn_implementation_internal = former_name


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
    """The attention function behind the registered names: q, k, v (1, H, T, D) to ((1, T, H, D), None).

    In a patched tower the forward's plan arrives in the keyword arguments. A stock tower that runs under one of our
    names without a plan gets one here, at the price of a host sync. Whatever is not varlen vision attention (a text
    decoder that slipped through the routing) goes to transformers' own sdpa function with its mask.

    Raises FallbackError for what a score_mod cannot be applied to.
    """
    if cu_seq_lens_q is None or kwargs.get("is_causal", getattr(module, "is_causal", True)):
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    route, known = kwargs.get(PLANS, getattr(cu_seq_lens_q, PLANS, None)), getattr(cu_seq_lens_q, OFFSETS, None)
    settings = known.settings if known else None if route is None else route.spec.settings
    score_mod = None if settings is None else settings.score_mod
    if key.shape[1] != query.shape[1]:  # fewer heads of keys and values, each for several of queries
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if dropout or reasons_untraceable():
        if score_mod is not None:
            why = "attention weights are dropped out" if dropout else reasons_untraceable()[0]
            raise FallbackError(f"the score_mod cannot be applied to this call: {why}")
        return _attend_as_stock(module, (query, key, value), cu_seq_lens_q, dropout, scaling), None
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # `device_map` may have brought this layer to another GPU than the one that its tower's forward made current.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        plan: Plan | None = route.plan_for(cu_seq_lens_q) if route is not None else None
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        fits = plan is not None and (plan.request.heads, plan.request.head_dim) == q_THD.shape[1:]
        if plan is None or not fits or (needs_grad and not plan.request.grad):
            plan = _plan_without_tower(module, q_THD, cu_seq_lens_q, scale, grad=needs_grad, score_mod=score_mod)
        elif plan.request.scale != scale:
            plan = replace(plan, request=replace(plan.request, scale=scale))
        dtype = q_THD.dtype
        if plan.request.dtype != dtype:  # norms upcast by PEFT or quantisation: compute as the weights are, as HF does
            q_THD, k_THD, v_THD = (x.to(plan.request.dtype) for x in (q_THD, k_THD, v_THD))
        return plan.attend(q_THD, k_THD, v_THD).to(dtype).unsqueeze(0), None


def _attend_as_stock(
    module: Any, qkv: tuple[Tensor, ...], cu_seqlens_S1: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """As stock attends without varlen kernels: segment by segment, by what torch can drop out, transform and trace."""
    lengths = cu_seqlens_S1.diff().tolist()
    segments = zip(*(x.split(lengths, dim=2) for x in qkv), strict=True)
    outs = [
        sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=scaling, is_causal=False)[0]
        for q, k, v in segments
    ]
    return torch.cat(outs, dim=1)


def _plan_without_tower(
    module: Any, q_THD: Tensor, cu_seqlens_S1: Tensor, scale: float, *, grad: bool, score_mod: ScoreMod | None
) -> Plan:
    """A plan for offsets that came without one, kept for the other layers that get the very same tensor."""
    known: Offsets | None = getattr(cu_seqlens_S1, OFFSETS, None)
    name = "flex" if score_mod else NAMES.get(getattr(module.config, "_attn_implementation", ""), "auto")
    name = known.settings.attention if known else name
    request = Request(
        device=q_THD.device,
        dtype=q_THD.dtype,
        heads=q_THD.shape[1],
        head_dim=q_THD.shape[2],
        scale=scale,
        grad=grad,
        score_mod=score_mod,
    )
    stream = torch.cuda.current_stream(q_THD.device).cuda_stream if q_THD.is_cuda else 0
    key = request, stream, name
    if known is not None:
        plan = known.plans.get(key)
        if plan is None:
            if known.segments.rows != len(q_THD):
                raise ValueError(f"expected {known.segments.rows} rows for this grid_thw, got {len(q_THD)}")
            request = replace(request, kind=known.kind, max_seqlen=known.segments.max_seqlen)
            backend = resolve(name, request, known.segments, known.faults).backend
            known.plans[key] = plan = plan_alone(backend, known.segments, request)
        known.served[known.kind] = plan.backend.name
        return plan
    # Inference tensors count no versions, so a change of theirs could not be seen: nothing is kept for them.
    version = None if cu_seqlens_S1.is_inference() else cu_seqlens_S1._version
    offsets, kept_version, kept_key, plan = getattr(_LAST, "plan", (lambda: None, None, None, None))
    if plan is None or offsets() is not cu_seqlens_S1 or version is None or (kept_version, kept_key) != (version, key):
        plan = _plan_offsets(name, request, q_THD.shape[0], cu_seqlens_S1)
        _LAST.plan = weakref.ref(cu_seqlens_S1), version, key, plan
    return plan


_LAST = threading.local()


def _plan_offsets(name: str, request: Request, rows: int, cu_seqlens_S1: Tensor) -> Plan:
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


assert set(NAMES.values()) - {"auto"} <= {backend.name for backend in BACKENDS}
