"""Why a call is not fast: the reasons against it that a tower, its config, torch's modes and the arguments give.

All reasons are lists of sentences, empty where nothing stands against.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from transformers import modeling_utils

from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import POPPED
from hf_vit_accel.machine import is_upstream
from hf_vit_accel.sharing.reuse import Facts
from hf_vit_accel.tower import fsdp as sharding
from hf_vit_accel.tower import proof as upstream
from hf_vit_accel.tower.modules import Weights
from hf_vit_accel.tower.snapshot import Snapshot


def autocast_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype | None:
    """Return the dtype that autocast computes in; None where it is off, and for fp64, which it does not change.

    Args:
        device: Of the rows.
        weights: The dtype of the weights.
    """
    kind = device.type
    if weights == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def reasons_fake() -> list[str]:
    """Return why neither tower nor inputs may be read: cached arrays would be fake, and reach the next real call.

    Modes that only observe (`FlopCounterMode`) do not matter: caches are made outside of them.
    """
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if mode.is_infra_mode()]
    return [f"{modes[0]} is active, as in torch.export"] if modes else []


def reasons_stock(
    tower: Any, former_forward: Any, name: str | None, snapshot: Snapshot, kwargs: Mapping[str, Any]
) -> list[str]:
    """List why a call must reach the stock forward as it is.

    Args:
        tower: The tower.
        former_forward: The forward that the instance had before; None for none.
        name: The name of the attention in its config.
        snapshot: The tower as it is now.
        kwargs: The keyword arguments of the call.
    """
    reasons = list(snapshot.stock)
    # accelerate leaves the class's forward on the instance when its hooks come off: that is no other forward.
    if former_forward is not None and getattr(former_forward, "__func__", None) is not type(tower).forward:
        reasons.append("the tower has a forward of its own")
    if any(popped in kwargs for popped in POPPED):
        reasons.append("the caller supplies sequence metadata")
    if name not in upstream.NAMES:
        reasons += reasons_own_attention(tower, name)
    if is_tracing():  # a trace does not record tensors that numpy makes
        reasons.append("torch.jit.trace is at work")
    return reasons


def reasons_own_segments(tower: Any, named: Mapping[str, Any], pixels: str) -> list[str]:
    """List why a tower must compute its segments itself, although its attention is ours.

    Args:
        tower: A tower of a family whose attention alone is accelerated.
        named: The arguments of the call by name.
        pixels: The name of the pixels among them.
    """
    name = tower.config._attn_implementation
    if name not in upstream.NAMES:
        return reasons_own_attention(tower, name) or [f"its attention is {name!r}"]
    if any(popped in named for popped in POPPED):
        return ["the caller supplies sequence metadata"]
    grid = named.get("grid_thw")
    has_grid = isinstance(grid, Tensor) and grid.dim() == 2 and not grid.is_floating_point()
    if not has_grid or not isinstance(named.get(pixels), Tensor) or is_tracing():
        return ["the arguments are not those that are known, or torch.jit.trace is at work"]
    return []


def reasons_untraceable() -> list[str]:
    """Return what kernels and backends do not support: torch.func, forward-mode gradients, tracing, fake tensors."""
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return ["a transform of torch.func or forward-mode differentiation is at work"]
    if is_tracing():
        return ["torch.jit.trace is at work"]
    return reasons_fake() if is_in_torch_dispatch_mode() else []


def reasons_own_attention(tower: Any, name: str | None) -> list[str]:
    """List why a tower's attention of that name may compute anything: it is a function of the user's.

    Functions of transformers compute attention, and so do ours and those from the Hub, whose names have a slash.
    """
    if name == "eager":  # not registered, but a function in the tower's file
        function: Any = getattr(sys.modules.get(type(tower).forward.__module__), "eager_attention_forward", None)
    else:
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or "/" in str(name) or str(function.__module__).startswith("hf_vit_accel."):
        return []
    if is_upstream(function):
        return []
    return [f"the attention {name!r} is a function of your own; patch(attention=...) with a backend's name replaces it"]


def attention_name(tower: Any, settings: Settings, former_name: str | None) -> str | None:
    """Return the attention name for the config of a patched tower.

    Under "auto", a function of the user's stays. So does "eager": a user who loads with it may ask for attention
    weights, which no other attention returns.

    Args:
        tower: The tower.
        settings: What `patch` was given.
        former_name: The attention name that the config had before.
    """
    if settings.attention == "auto" and (former_name == "eager" or reasons_own_attention(tower, former_name)):
        return former_name
    return upstream.name_for(settings.attention)


def reasons_slow(
    tower: Any, snapshot: Snapshot, weights: Weights, options: Mapping[str, Any], *, grad: bool
) -> list[str]:
    """List why a call's blocks must be called one by one.

    Args:
        tower: The tower.
        snapshot: The tower as it is now.
        weights: Its parameters as they are in memory.
        options: The keyword arguments of the call.
        grad: Whether the call records gradients.
    """
    reasons = [*snapshot.slow, *weights.reasons, *snapshot.reasons_hooked(grad=grad)]
    if snapshot.sharded:
        reasons += sharding.reasons_against(snapshot.sharded.values(), weights.dtype)
    for name in ("output_hidden_states", "output_attentions"):
        if options.get(name, getattr(tower.config, name, False)):
            reasons.append(f"{name} is requested")
    if snapshot.dropout and any(block.attention.training for block in snapshot.parts.blocks):
        reasons.append("attention weights are dropped out")
    return reasons + reasons_untraceable()


def facts_for_reuse(
    settings: Settings,
    snapshot: Snapshot,
    parameters: list[nn.Parameter],
    weights: Weights,
    device: torch.device,
    no_kernels: str | None,
) -> Facts:
    """Return the facts that decide which images of a call are reused.

    Args:
        settings: Of the tower.
        snapshot: The tower as it is now.
        parameters: Of the tower, as they are now.
        weights: Where they lie in memory.
        device: Of the pixels.
        no_kernels: Why Triton kernels are not tried; None if they are.
    """
    assert settings.reuse is not None
    trains = torch.is_grad_enabled()
    reasons = list(snapshot.mixing)
    if snapshot.foreign and snapshot.training() and not reasons:
        reasons.append(f"{snapshot.foreign}, and may be random in training")
    against_keeping: list[str] = []
    watched: list[Tensor] = []
    if settings.reuse.across_calls and not (trains and (snapshot.foreign or snapshot.trained(parameters))):
        if snapshot.foreign:
            against_keeping.append(f"{snapshot.foreign}, and might act otherwise at a later call")
        if settings.score_mod is not None:
            against_keeping.append("a score_mod may read what changes between calls")
        if snapshot.sharded or snapshot.offloaded or weights.pointers is None:
            against_keeping.append("weights are sharded, offloaded or of a class of their own: changes go unseen")
        if not against_keeping and snapshot.loose():
            against_keeping.append("a module holds a tensor that is neither parameter nor buffer")
        if not against_keeping:
            watched = [*parameters, *snapshot.buffers()]
    return Facts(
        applies=not reasons_untraceable(),
        reasons=reasons,
        reasons_against_keeping=against_keeping,
        watched=watched,
        context=autocast_dtype(device, weights.dtype),
        no_kernels=no_kernels,
    )
