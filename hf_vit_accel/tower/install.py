"""How a tower gets the accelerated forward, and loses it again."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.families import Tower
from hf_vit_accel.tower.forward import (
    FORWARD_ATTRIBUTES,
    AcceleratedForward,
    is_our_forward,
    our_forward_attribute,
    own_hooks,
    redirect_copies,
)
from hf_vit_accel.tower.state import STATE, TowerState, attributes_of, state_of


def former_of(tower: Tower) -> tuple[str | None, Any]:
    """Return the attention name and the instance forward that a tower has, or had before it was patched."""
    state = state_of(tower)
    if state is not None:
        return state.former_name, state.former_forward
    return tower.config._attn_implementation, vars(tower).get(_forward_attribute(tower))


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and, on the instance, the accelerated forward. Replaces the state of a patched one."""
    former_state = state_of(tower)
    vars(tower)[STATE] = state
    our_attribute = our_forward_attribute(tower)
    attribute = our_attribute or _forward_attribute(tower)
    if former_state is None or our_attribute is None:  # other code may have wrapped our forward: keep its wrapper
        state.former_forward = vars(tower).get(attribute)
    else:
        state.former_forward = former_state.former_forward
    if former_state is not None and former_state is not state:
        former_state.close()
    vars(tower)[attribute] = AcceleratedForward(tower, state)
    state.attributes = attributes_of(tower)
    if redirect_copies not in tower._forward_pre_hooks.values():
        tower.register_forward_pre_hook(redirect_copies, prepend=True, with_kwargs=True)


def uninstall(tower: nn.Module) -> TowerState | None:
    """Take state and forward off a tower, and put back an instance forward that was there before."""
    state: TowerState | None = vars(tower).pop(STATE, None)
    if state is None:
        return None
    for attribute in FORWARD_ATTRIBUTES:
        if is_our_forward(vars(tower).get(attribute)):
            if state.former_forward is not None:
                vars(tower)[attribute] = state.former_forward
            elif attribute == "forward":
                del vars(tower)[attribute]
            else:  # accelerate's hook calls what it holds: give it the forward that it would have found
                vars(tower)[attribute] = type(tower).forward.__get__(tower)
    own_hooks(tower)
    for key, hook in list(tower._forward_pre_hooks.items()):
        if hook is redirect_copies:
            del tower._forward_pre_hooks[key]
            tower._forward_pre_hooks_with_kwargs.pop(key, None)
    state.close()
    for backend in BACKENDS:
        backend.close()
    return state


def _forward_attribute(tower: nn.Module) -> str:
    """Return the attribute that holds the forward of a tower: accelerate's hooks move it, and so run before it."""
    return "_old_forward" if "_old_forward" in vars(tower) else "forward"
