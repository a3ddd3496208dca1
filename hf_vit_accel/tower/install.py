"""How a tower gets the accelerated forward, and loses it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.families import FAMILIES_OF_COPIES, Family, Tower, family_of
from hf_vit_accel.families.copies import CopyFamily, class_in, copy_family, misfits
from hf_vit_accel.tower.forward import (
    FORWARD_ATTRIBUTES,
    AcceleratedForward,
    is_our_forward,
    our_forward_attribute,
    own_hooks,
    redirect_shallow_copies,
)
from hf_vit_accel.tower.state import STATE, TowerState, attributes_of, state_of


def towers_in(model: nn.Module, like: Mapping[str, str]) -> list[tuple[str, Tower, Family]]:
    """Return (path, tower, family) of every tower in a model: of known classes, of patched copies and of new ones.

    Args:
        model: The model.
        like: The family of every class that is a copy, by name. A copy that is patched needs no entry.

    Raises:
        ValueError: A name is that of no class in the model, or a tower is not built as its family is.
    """
    towers: list[tuple[str, Tower, Family]] = []
    unseen = set(like)
    for path, module in model.named_modules():
        state = state_of(module)
        copied = class_in(like, module)
        family = family_of(module)
        if copied is not None:
            unseen.discard(copied)
            family = _family_of_copy(module, copied, like[copied])
        elif state is not None and isinstance(state.family, CopyFamily):
            family = state.family
        if family is not None:
            towers.append((path, module, family))
    if unseen:
        raise ValueError(
            f"like names {', '.join(sorted(unseen))}, but {type(model).__name__} has no module of that class"
        )
    return towers


def _family_of_copy(tower: Tower, copied: str, name: str) -> CopyFamily:
    """Return the family of a copy; ValueError with every part that is missing or different."""
    base = next(family for family in FAMILIES_OF_COPIES if family.name == name)
    problems = misfits(tower, base)
    if problems:
        raise ValueError(f"{type(tower).__name__} is not built as {name} is: {'; '.join(problems)}")
    return copy_family(tower, base, copied)


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
        former_state.drop_caches()
    vars(tower)[attribute] = AcceleratedForward(tower, state)
    state.attributes = attributes_of(tower)
    if redirect_shallow_copies not in tower._forward_pre_hooks.values():
        tower.register_forward_pre_hook(redirect_shallow_copies, prepend=True, with_kwargs=True)


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
        if hook is redirect_shallow_copies:
            del tower._forward_pre_hooks[key]
            tower._forward_pre_hooks_with_kwargs.pop(key, None)
    state.drop_caches()
    for backend in BACKENDS:
        backend.close()
    return state


def _forward_attribute(tower: nn.Module) -> str:
    """Return the attribute that holds the forward of a tower: accelerate's hooks move it, and so run before it."""
    return "_old_forward" if "_old_forward" in vars(tower) else "forward"
