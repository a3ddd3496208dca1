"""How a tower gets the accelerated forward, and loses it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from hf_vit_accel.attached import OurHooks
from hf_vit_accel.families import FAMILIES_OF_COPIES, Family, Tower, family_of
from hf_vit_accel.families.copies import CopyFamily, class_in, copy_family, misfits
from hf_vit_accel.ops.base import is_class_forward
from hf_vit_accel.tower.code import name_of, names_in_code
from hf_vit_accel.tower.forward import AcceleratedForward, is_our_forward, redirect_shallow_copies
from hf_vit_accel.tower.processors import leave_to_tower, put_back
from hf_vit_accel.tower.proof import warn_once
from hf_vit_accel.tower.state import HOOKS, STATE, TowerState, state_of

Forward = Callable[..., object]


def towers_in(model: nn.Module, like: Mapping[str, str]) -> list[tuple[str, Tower, Family]]:
    """Return (path, tower, family) of every tower in a model: of known classes, of patched copies and of new ones."""
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


def foreign_forward(tower: Tower) -> Forward | None:
    """Return the forward that other code gave a tower, if its calls cannot reach the class's; None otherwise."""
    for slot in _slots_for_ours(tower):
        former = _former_of(slot.value)
        if former is not None and not is_class_forward(former, tower):
            return former
    return None


def holds_ours(tower: Tower) -> bool:
    """Return whether calls of a patched tower reach our forward: other code may have taken it off since."""
    return any(is_our_forward(slot.value) for slot in _slots_for_ours(tower))


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and put the accelerated forward where the class's was. Replaces a former state."""
    former_state = state_of(tower)
    vars(tower)[STATE] = state
    if former_state is not None and former_state is not state:
        put_back(former_state.processors)
        former_state.drop_caches()
    leave_to_tower(state.processors)
    state.former_forward = foreign_forward(tower)
    if state.former_forward is not None:
        name = name_of(state.former_forward)
        warn_once(
            f"{type(tower).__name__} stays stock: {name} took the place of its forward, and holds no forward of the "
            f"class that could be exchanged. Call hf_vit_accel.patch before {name} is put there; it must call the "
            f"forward that it finds on the instance."
        )
    for slot in _slots_for_ours(tower):
        slot.put(AcceleratedForward(tower, state, _former_of(slot.value)))
    if HOOKS not in vars(tower):
        handle = tower.register_forward_pre_hook(redirect_shallow_copies, prepend=True, with_kwargs=True)
        vars(tower)[HOOKS] = OurHooks(handle)


def uninstall(tower: nn.Module) -> TowerState | None:
    """Take state and forward off a tower, and put back what was in the place of each forward of ours."""
    state: TowerState | None = vars(tower).pop(STATE, None)
    if state is None:
        return None
    for slot in _slots_for_ours(tower):
        is_direct = slot.value is vars(tower).get("forward")  # a shallow copy may hold that of the original
        if is_our_forward(slot.value) and (is_direct or slot.value.__self__ is tower):
            former = _former_of(slot.value)
            if former is None and is_direct:
                del vars(tower)["forward"]
            else:  # code that wrapped ours calls what it holds: give it the forward that it would have found
                slot.put(former or type(tower).forward.__get__(tower))
    vars(tower).pop(HOOKS, None)
    put_back(state.processors)
    state.drop_caches()
    return state


class Slot(NamedTuple):
    """A place that holds a callable, None for a tower without a forward on the instance, and what replaces it.

    Frameworks replace `visual.forward` on the instance by a function that calls the forward that was there. A wrapper
    keeps that forward in a closure (ms-swift, `torch.compiler.disable`), in an attribute of the tower (accelerate's
    hooks) or of an object (accelerate's mixed precision). Ours goes into the slots that hold the class's.
    """

    value: Any
    put: Callable[[object], None]


def _slots_in(value: Any, tower: nn.Module) -> Iterator[Slot]:
    """Yield the slots in a callable: of closures, and of the attributes that its code names."""
    if isinstance(value, partial):  # around accelerate's function, which names an attribute of the tower
        value = value.func
    function: Any = value if isinstance(value, FunctionType | MethodType) else type(value).__call__
    function = getattr(function, "__func__", function)
    if isinstance(value, type | nn.Module) or not isinstance(function, FunctionType):
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield Slot(cell.cell_contents, partial(setattr, cell, "cell_contents"))
    holder = getattr(value, "__self__", value)
    attributes = {} if isinstance(holder, FunctionType | type | nn.Module) else getattr(holder, "__dict__", {})
    for entries in (vars(tower), attributes):
        for name in entries.keys() & names_in_code(function.__code__):
            yield Slot(entries[name], partial(entries.__setitem__, name))


def _slots_for_ours(tower: nn.Module) -> list[Slot]:
    """Return the slots that hold the class's forward, or ours; the tower's own `forward` if its calls reach none."""
    slots = [Slot(vars(tower).get("forward"), partial(vars(tower).__setitem__, "forward"))]
    followed: set[int] = set()
    for slot in slots:  # which grows
        value = slot.value
        is_end = is_our_forward(value) or getattr(value, "__func__", value) is type(tower).forward
        if not is_end and id(value) not in followed:
            followed.add(id(value))
            slots += [inner for inner in _slots_in(value, tower) if callable(inner.value)]
    return [slot for slot in slots if _holds_forward(slot.value, tower)] or slots[:1]


def _holds_forward(value: Any, tower: nn.Module) -> bool:
    """Return whether a slot's value is the forward of this tower's class, or ours that took the place of one."""
    if is_our_forward(value):
        return value.__self__ is tower or _former_of(value) is type(tower).forward
    return value is None or is_class_forward(value, tower)


def _former_of(value: Any) -> Forward | None:
    """Return what a slot holds, or held before ours."""
    ours = getattr(value, "__func__", value)
    former: Forward | None = ours.former if isinstance(ours, AcceleratedForward) else value
    return former
