"""Which functions of transformers a tower's forward depends on, and which names of attributes they contain.

Python code names every attribute that it reads (`co_names`), so the names say what a change can matter to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import transformers
from torch import nn

from hf_vit_accel.watch import Watch

_FUNCTION_TYPES = (FunctionType, property, staticmethod, classmethod)


class Code:
    """The functions that a proof ran: methods of all module classes, and the functions in the tower's file.

    Anyone may replace them, at any time: `watch` notices.
    """

    def __init__(self, kind: type, classes: frozenset[type]) -> None:
        self.kind = kind
        self.classes = classes
        self.methods = [name for name, value in vars(kind).items() if isinstance(value, FunctionType | property)]
        self.methods.remove("forward")  # `Snapshot` checks it
        file = vars(sys.modules[kind.__module__])
        functions = [name for name, value in file.items() if callable(value) and not isinstance(value, type)]
        self.watch = Watch()
        self.watch.add("a function in the tower's file", file.get, functions)
        self.watch.add("a method of the tower's class", vars(kind).get, self.methods)
        watch_methods(self.watch, classes)
        self.watch.remember()

    def reasons_overridden(self, tower: nn.Module) -> list[str]:
        """List the methods that the instance or a subclass overrides: the proof ran without them."""
        kind = type(tower)
        reasons = []
        for name in self.methods:
            if getattr(kind, name) is not vars(self.kind).get(name) or name in vars(tower):
                reasons.append(f"the tower has a {name} of its own")
        return reasons

    def called_names(self) -> frozenset[str]:
        """Return every name, and every string constant, in the forwards of all module classes."""
        return names_of_forwards((self.kind, *self.classes))


def names_of_forwards(kinds: Iterable[type]) -> frozenset[str]:
    """Return every name, and every string constant, in the forwards of classes and in the methods that they call."""
    return frozenset().union(*(names_of_method(kind, "forward") for kind in kinds))


def watch_methods(watch: Watch, kinds: Iterable[type]) -> None:
    """Watch the methods of classes that a forward may reach."""
    kinds_by_names: dict[tuple[str, ...], list[type]] = {}
    for kind in kinds:
        names = {"forward", *(name for owner in _own_classes(kind) for name in _methods(owner))}
        kinds_by_names.setdefault(tuple(sorted(names)), []).append(kind)
    for names_of_methods, owners in kinds_by_names.items():
        watch.add("a method of a module's class", attrgetter(*names_of_methods), owners)


def _own_classes(kind: type) -> list[type]:
    """List the classes that a class inherits, without those that all models share."""
    shared_classes = transformers.PreTrainedModel.__mro__
    return [owner for owner in kind.__mro__ if owner not in shared_classes]


def _methods(kind: type) -> list[str]:
    """List the methods in a class's own namespace that a forward may reach."""
    return [
        name
        for name, value in vars(kind).items()
        if isinstance(value, _FUNCTION_TYPES) and (name == "__call__" or not name.startswith("__"))
    ]


def names_in_class(kind: type) -> frozenset[str]:
    """Return every name in the methods of a class, also of inherited ones that not all models share."""
    names: set[str] = set()
    for owner in _own_classes(kind):
        for name in _methods(owner):
            names |= _names_in(vars(owner)[name])
    return frozenset(names)


@lru_cache(maxsize=256)
def names_of_method(kind: type, name: str) -> frozenset[str]:
    """Return every name, and every string constant, in a method of a class and in the methods that it calls."""
    names = set(_names_in(getattr(kind, name, None)))
    followed: set[str] = set()
    while pending := names - followed:
        followed |= pending
        for name in pending:
            method = getattr(kind, name, None)
            if method is not getattr(nn.Module, name, None):
                names |= _names_in(method)
    return frozenset(names)


def _names_in(function: Any) -> frozenset[str]:
    """Return the names of attributes in the code of a function or property, also of one inside a decorator."""
    if isinstance(function, property):
        function = function.fget
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return names_in_code(code) if isinstance(code, CodeType) else frozenset()


@lru_cache(maxsize=1024)
def names_in_code(code: CodeType) -> frozenset[str]:
    """Return all names in a piece of code and in the functions that it defines; string constants serve `getattr`."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in_code(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)
