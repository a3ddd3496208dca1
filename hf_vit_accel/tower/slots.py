"""Find the class's own forward below wrappers that other code put around it.

Frameworks replace `visual.forward` on the instance by a function that calls the forward that was there. A wrapper keeps
that forward where its code finds it: in a closure, a partial, a default, an attribute of the tower (ms-swift,
accelerate's hooks) or of an object. A `Slot` is one such place. Our forward goes into the slots that hold the class's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from hf_vit_accel.machine import is_upstream
from hf_vit_accel.tower.code import names_in_code

_MOST_SLOTS = 2000
"""Wrappers have some ten slots. The names in their code may also lead to functions of their file."""


class Slot(NamedTuple):
    """A place that holds a callable, None for a tower without a forward on the instance, and what replaces it."""

    value: Any
    put: Callable[[Any], None]


def slots_of(tower: nn.Module, is_leaf: Callable[[object], bool]) -> Iterator[Slot]:
    """Yield the slots that calls of a tower may reach, its own `forward` first; in leaves there is nothing to find."""
    pending = [Slot(vars(tower).get("forward"), partial(vars(tower).__setitem__, "forward"))]
    followed: dict[int, object] = {}
    while pending and len(followed) < _MOST_SLOTS:
        slot = pending.pop(0)
        yield slot
        if id(slot.value) not in followed and not is_leaf(slot.value):
            followed[id(slot.value)] = slot.value
            inner = _slots_in(slot.value, tower)
            pending += [slot for slot in inner if callable(slot.value) or isinstance(slot.value, dict)]


def _slots_in(value: Any, tower: nn.Module) -> Iterator[Slot]:
    """Yield the slots in a callable, or in a dictionary of callables. Of a module, code names what it calls."""
    if isinstance(value, type | nn.Module):
        return
    if isinstance(value, dict):
        yield from _entries(value, list(value))
    elif isinstance(value, partial):
        for index, item in enumerate([value.func, *value.args]):
            yield Slot(item, partial(_put_in_partial, value, index))
        yield from _slots_in(value.keywords, tower)
    elif isinstance(value, MethodType):
        yield from _slots_in(value.__func__, tower)
        yield from _slots_in(_attributes_of(value.__self__), tower)
    elif isinstance(value, FunctionType):
        yield from _slots_of_function(value, tower)
    elif callable(value):
        yield from _slots_in(_attributes_of(value), tower)
        call: Any = type(value).__call__
        if isinstance(call, FunctionType):  # written in Python
            yield from _slots_of_function(call, tower)


def _slots_of_function(function: FunctionType, tower: nn.Module) -> Iterator[Slot]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield Slot(cell.cell_contents, partial(setattr, cell, "cell_contents"))
    for index, value in enumerate(function.__defaults__ or ()):
        yield Slot(value, partial(_put_default, function, index))
    yield from _slots_in(function.__kwdefaults__ or {}, tower)
    names = names_in_code(function.__code__)
    for entries in (vars(function), vars(tower), {} if is_upstream(function) else function.__globals__):
        yield from _entries(entries, names & entries.keys())


def _put_default(function: FunctionType, index: int, value: object) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[index] = value
    function.__defaults__ = tuple(defaults)


def _put_in_partial(holder: Any, index: int, value: object) -> None:
    items = [holder.func, *holder.args]
    items[index] = value
    holder.__setstate__((items[0], tuple(items[1:]), holder.keywords, vars(holder)))


def _attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object that is no module; `list[int]`, say, shows those of a class."""
    attributes = {} if isinstance(value, type | nn.Module) else getattr(value, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}


def _entries(entries: dict[str, Any], names: Iterable[str]) -> Iterator[Slot]:
    for name in names:
        yield Slot(entries[name], partial(entries.__setitem__, name))


def name_of(forward: Callable[..., object]) -> str:
    """Return the name of a forward of others, and where it is written; `functools.wraps` borrows names."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return f"{type(forward).__module__}.{type(forward).__qualname__}"
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
