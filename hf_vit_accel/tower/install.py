"""How a tower gets the accelerated forward, and loses it again."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import STATE, TowerState, state_of

_SLOTS = ("forward", "_old_forward")


def former_of(tower: Any) -> tuple[str | None, Any]:
    """The attention name and the instance forward that a tower has, or had before it was patched."""
    state = state_of(tower)
    if state is not None:
        return state.former_name, state.former_forward
    return tower.config._attn_implementation, vars(tower).get(_forward_slot(tower))


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and, on the instance, the accelerated forward. Replaces the state of a patched one."""
    patched = state_of(tower)
    vars(tower)[STATE] = state
    ours = next((slot for slot in _SLOTS if isinstance(vars(tower).get(slot), AcceleratedForward)), None)
    slot = ours or _forward_slot(tower)
    if patched is None or ours is None:  # someone may have wrapped ours since, and is not to be lost
        state.former_forward = vars(tower).get(slot)
    else:
        state.former_forward = patched.former_forward
    if patched is not None and patched is not state:
        patched.close()
    vars(tower)[slot] = AcceleratedForward(tower, state)


def uninstall(tower: nn.Module) -> TowerState | None:
    """Take state and forward off a tower and put back an instance forward that was there before."""
    state: TowerState | None = vars(tower).pop(STATE, None)
    if state is None:
        return None
    for slot in _SLOTS:
        if isinstance(vars(tower).get(slot), AcceleratedForward):
            if state.former_forward is not None:
                vars(tower)[slot] = state.former_forward
            elif slot == "forward":
                del vars(tower)[slot]
            else:  # accelerate's hook calls what it holds: give it the class's forward, as it would have found
                vars(tower)[slot] = type(tower).forward.__get__(tower)
    state.close()
    for backend in BACKENDS:
        backend.close()
    return state


def _forward_slot(tower: nn.Module) -> str:
    """Where the forward is: accelerate's hooks keep the one they wrap in `_old_forward`, and so run before it."""
    return "_old_forward" if "_old_forward" in vars(tower) else "forward"
