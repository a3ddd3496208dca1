"""Reasons why a call is not fast: in the tower, its config, the modes of torch, or the arguments.

Reasons are lists of sentences, empty where there is none.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.nn.modules import module as torch_module

from hf_vit_accel import versions
from hf_vit_accel.config import Settings
from hf_vit_accel.families import Family, Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.machine import autocast_dtype, is_upstream, reasons_untraceable
from hf_vit_accel.tower import fsdp, proof
from hf_vit_accel.tower.code import names_of_forwards
from hf_vit_accel.tower.differences import CallDtypes
from hf_vit_accel.tower.slots import name_of
from hf_vit_accel.tower.snapshot import HOOKS, Snapshot, WeightMemory, is_output_marker
from hf_vit_accel.versions import POPPED

HooksOf = Callable[[dict[str, Any]], Mapping[int, Callable[..., object]]]
"""Reads the hooks of one kind from the dictionary of a module."""

_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
)


class Reasons(NamedTuple):
    """Why a call does not run our operations, and what was read of its tower to know.

    Attributes:
        stock: Why it must reach the stock forward as it is. If there are any, nothing else was read.
        slow: Why its blocks must be called one by one.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
        hidden_states: Whether hidden states are returned, too.
        hooked_parts: The `id` of every callable part with hooks: these run as modules.
    """

    stock: Sequence[str] = ()
    slow: Sequence[str] = ()
    parameters: Sequence[nn.Parameter] = ()
    weights: WeightMemory | None = None
    hidden_states: bool = False
    hooked_parts: frozenset[int] = frozenset()


def reasons_of(
    tower: Tower,
    family: Family,
    snapshot: Snapshot,
    former_forward: Any,
    name: str | None,
    options: Mapping[str, object],
    *,
    grad: bool,
    between_calls: bool = False,
) -> Reasons:
    """Return why a call with these options does not run our operations.

    Args:
        former_forward: A forward of others on the instance, which does not call the class's; None for none.
        name: The attention name of the config, or the one that it will have.
        between_calls: Whether no call is under way, so that FSDP2 has not gathered the weights.
    """
    reasons = list(snapshot.reasons_stock)
    if former_forward is not None:
        reasons.append(f"the tower has a forward of its own: {name_of(former_forward)} does not call the class's")
    if any(popped in options for popped in POPPED):
        reasons.append("the caller supplies sequence metadata")
    is_own_code = snapshot.is_copy and name == "eager"  # which the proof of a copy ran
    if name not in proof.NAMES and not is_own_code:
        reasons += reasons_custom_attention(tower, name)
    if is_tracing():  # a trace does not record tensors that numpy makes
        reasons.append("torch.jit.trace is at work")
    if reasons:
        return Reasons(reasons)
    parameters, weights = snapshot.weights()
    if between_calls:
        weights = _as_gathered(tower, snapshot, weights)
    if snapshot.is_copy:
        reasons = _reasons_of_copy(tower, family, snapshot, weights, options)
        if reasons:
            return Reasons(reasons)
    requested = options.get("output_hidden_states", getattr(tower.config, "output_hidden_states", False))
    hooked_parts: set[int] = set()
    slow = [*snapshot.reasons_slow, *weights.reasons]
    if grad and snapshot.proof.why_not_gradients is not None:
        slow.append(snapshot.proof.why_not_gradients)
    if any(_GLOBAL_HOOKS):
        slow.append("global module hooks")
    for hooks_of in HOOKS if grad else HOOKS[:2]:  # without gradients, hooks of the forward alone
        if any(map(hooks_of, snapshot.attributes_inside)):
            slow += _reasons_hooked(snapshot, hooks_of, hooked_parts)
    if hooked_parts and grad and snapshot.outputs_require_grad():
        slow.append("hooks inside, and one of transformers that our patch embedding does not run")
    if hooked_parts and requested and getattr(tower, "_output_capturing_hooks_installed", False):
        slow.append("hooks inside, and older ones of transformers that capture hidden states")
    if snapshot.sharded_layers:
        slow += fsdp.reasons_against(snapshot.sharded_layers.values(), weights.dtype)
    if requested and snapshot.proof.why_not_hidden_states is not None:
        slow.append(snapshot.proof.why_not_hidden_states)
    elif requested and requested is not True:  # newer towers take a number, or several, to select some
        slow.append(f"output_hidden_states={requested!r} selects hidden states of the tower")
    if options.get("output_attentions", getattr(tower.config, "output_attentions", False)):
        slow.append("output_attentions is requested")
    if snapshot.dropout and any(block.attention.training for block in snapshot.parts.blocks):
        slow.append("attention weights are dropped out")
    if weights.mixed is not None or snapshot.proof.why_not_autocast is not None:
        autocast = autocast_dtype(snapshot.parts.projection.weight.device, weights.dtype)
        if autocast is None and weights.mixed is not None and weights.mixed not in slow:
            slow.append(f"{weights.mixed} without autocast")
        if snapshot.proof.why_not_autocast is not None and autocast is not None and weights.dtypes != {autocast}:
            slow.append(snapshot.proof.why_not_autocast)
    slow += reasons_untraceable()
    hidden_states = bool(requested) and snapshot.proof.returns_hidden_states
    return Reasons((), slow, parameters, weights, hidden_states, frozenset(hooked_parts))


def _as_gathered(tower: Tower, snapshot: Snapshot, weights: WeightMemory) -> WeightMemory:
    """Return the weights as calls will see them: FSDP2 gathers sharded weights, in the dtype of its policy.

    If a parent of the tower is sharded with it, the policy of the layers counts. The parent's is unknown here.
    """
    if not snapshot.uses_fsdp or not (weights.reasons or weights.mixed):
        return weights
    holder = tower if isinstance(tower, fsdp.wrapper()) else next(iter(snapshot.sharded_layers.values()))
    gathered = copy.copy(weights)
    gathered.dtype = fsdp.gathered_dtype(holder, weights.dtype)
    gathered.reasons = []
    gathered.mixed = None
    return gathered


def _reasons_of_copy(
    tower: Tower, family: Family, snapshot: Snapshot, weights: WeightMemory, options: Mapping[str, object]
) -> list[str]:
    """Return why a call of a copy must reach its own forward."""
    assert isinstance(family, CopyFamily)
    if weights.mixed is not None:
        return [weights.mixed]
    device = snapshot.parts.projection.weight.device
    dtypes = CallDtypes(weights.dtype, autocast_dtype(device, weights.dtype))
    reasons = proof.reasons_of_call(tower, family, snapshot.proof, dtypes, options)
    # Blocks that are checkpointed themselves are served; older code checkpoints them in the tower's forward.
    blocks = [block.module for block in snapshot.parts.blocks]
    is_checkpointed = tower.training and getattr(tower, "gradient_checkpointing", False)
    if is_checkpointed and not any(getattr(block, "gradient_checkpointing", False) for block in blocks):
        reasons.append("gradient checkpointing in the copy's own forward")
    return reasons


def reasons_without_segments(tower: Tower, arguments: Mapping[str, object], names: tuple[str, ...]) -> list[str]:
    """Return why a tower whose attention alone is ours gets no segments from us, and must compute them itself."""
    name = tower.config._attn_implementation
    if name not in proof.NAMES:
        return reasons_custom_attention(tower, name) or [f"its attention is {name!r}"]
    if any(popped in arguments for popped in POPPED):
        return ["the caller supplies sequence metadata"]
    pixels = arguments.get(names[0])
    grid = arguments.get(names[1])
    has_grid = isinstance(grid, Tensor) and grid.dim() == 2 and not grid.is_floating_point()
    if not has_grid or not isinstance(pixels, Tensor) or is_tracing():
        return ["the arguments are not those that are known, or torch.jit.trace is at work"]
    return []


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

    Args:
        settings: What `patch` was given.
    """
    if settings.attention != "auto":
        return proof.name_for(settings.attention)
    if former_name == "eager" or reasons_custom_attention(tower, former_name):
        return former_name
    names = names_of_forwards({type(module) for module in tower.modules()})
    if former_name == "flash_attention_2" and not versions.knows_segments(names):
        return former_name  # under our names, layers that run as modules would attend once a segment
    return proof.name_for("auto")


def _reasons_hooked(snapshot: Snapshot, hooks_of: HooksOf, hooked_parts: set[int]) -> list[str]:
    """Return a sentence about the first module inside with a hook that the fast path would skip; empty for none.

    Hooks inside a part that can run as a module add it to `hooked_parts` instead.
    """
    sharded_ids = {id(vars(block)) for block in snapshot.sharded_layers.values()}
    for name, attributes in zip(snapshot.names_inside, snapshot.attributes_inside, strict=True):
        is_sharded = id(attributes) in sharded_ids
        part = snapshot.callable_parts.get(id(attributes))
        for hook in hooks_of(attributes).values():
            if is_inert(hook) or (is_sharded and fsdp.hooked_by_fsdp(hook)):
                continue
            if part is None:
                return [f"hooks on {name}"]
            hooked_parts.add(part)
    return []


def is_inert(hook: Callable[..., object]) -> bool:
    """Return whether a hook is one of transformers' that does nothing unless hidden states or attentions are requested.

    Output-capturing hooks stay on after one use.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or is_output_marker(hook)
