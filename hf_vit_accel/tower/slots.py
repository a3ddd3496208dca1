"""Find the class's own forward below wrappers that other code put around it.

Frameworks replace `visual.forward` on the instance by a function that calls the forward that was there. A wrapper keeps
that forward in a closure (ms-swift, `torch.compiler.disable`), in an attribute of the tower (accelerate's hooks) or of
an object (accelerate's mixed precision). A `Slot` is one such place. Ours goes into the slots that hold the class's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from hf_vit_accel.tower.code import names_in_code


class Slot(NamedTuple):
    """A place that holds a callable, None for a tower without a forward on the instance, and what replaces it."""

    value: Any
    put: Callable[[Any], None]


def slots_of(tower: nn.Module, is_leaf: Callable[[object], bool]) -> Iterator[Slot]:
    """Yield the slots that calls of a tower may reach, its own `forward` first; in leaves there is nothing to find."""
    pending = [Slot(vars(tower).get("forward"), partial(vars(tower).__setitem__, "forward"))]
    followed: set[int] = set()
    for slot in pending:  # which grows
        yield slot
        if id(slot.value) not in followed and not is_leaf(slot.value):
            followed.add(id(slot.value))
            pending += [inner for inner in _slots_in(slot.value, tower) if callable(inner.value)]


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


def name_of(forward: Callable[..., object]) -> str:
    """Return the name of a forward of others, and where it is written; `functools.wraps` borrows names."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return f"{type(forward).__module__}.{type(forward).__qualname__}"
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
