"""Which functions and values a tower's forward depends on, and which names of attributes they contain.

Python code names every attribute that it reads (`co_names`), so the names say what a change can matter to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.machine import is_upstream
from hf_vit_accel.versions import ADAPTERS
from hf_vit_accel.watch import Attributes, Watch, stamp_of

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


def reasons_foreign_forward(tower: nn.Module) -> list[str]:
    """Return a reason if the forward of a tower's class is not transformers'."""
    if is_upstream(type(tower).forward):
        return []
    return [f"the forward of {type(tower).__name__} is not transformers' own"]


def why_not_reached(forward: Callable[..., object]) -> str:
    """Describe a forward of others on the instance that does not call the class's."""
    return f"the tower has a forward of its own: {name_of(forward)} does not call the class's, as far as patch sees"


def name_of(forward: Callable[..., object]) -> str:
    """Return the name of a forward of others, and where it is written; `functools.wraps` borrows names."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return f"{type(forward).__module__}.{type(forward).__qualname__}"
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


# --- the state of copies
# The proof of a copy depends on more than modules and methods: buffers, options, constants. It draws parameters anew.

_CONSTANT = bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None)
_BY_IDENTITY = type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module
_DESCRIPTOR = property, staticmethod, classmethod
_KNOWN_PACKAGES = {"torch", "transformers", "logging", "functools", "typing", ADAPTERS}
"""Packages whose objects do not act on results."""


def watch_state(watch: Watch, tower: nn.Module) -> None:
    """Watch the buffers of a copy, its tensors that are plain attributes, and the values that its code reads.

    ValueError if changes of one cannot be seen. A write through `tensor.data` goes unseen, as it does for autograd.
    """
    dictionaries = [module._buffers for module in tower.modules()]
    for module in tower.modules():
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            dictionaries.append(vars(module))
    watch.add("a buffer", _stamps_in, dictionaries)
    values: list[tuple[str, object]] = []
    for owner in dict.fromkeys(owner for module in tower.modules() for owner in type(module).__mro__):
        values += _constants_of(watch, owner)
    for module in tower.modules():
        # A copy may call `super().forward`. A forward on an instance is watched with the modules, or ours.
        names = names_in_class(type(module)) & vars(module).keys() - vars(nn.Module()).keys() - {"forward"}
        values += [(name, vars(module)[name]) for name in names if not isinstance(vars(module)[name], Tensor)]
    holders: dict[int, object] = {}
    for name, value in values:
        _find_holders(value, name, holders)
    for holder in holders.values():
        watch.add(f"a field of a {type(holder).__name__}", dict, [vars(holder)])
    watch.remember()


def _stamps_in(attributes: Attributes) -> list[object]:
    """Return the stamps of all tensors in a dictionary."""
    tensors = [value for value in attributes.values() if isinstance(value, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError("a buffer was made in inference mode, where torch does not count its changes")
    return [stamp_of(tensor) for tensor in tensors]


def _constants_of(watch: Watch, owner: type) -> list[tuple[str, object]]:
    """Watch the constants of a class, those of its file that its methods read, and the values that methods hold."""
    if owner.__module__.partition(".")[0] in _KNOWN_PACKAGES | sys.stdlib_module_names:
        return []
    methods = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    watch.add("a constant of the code", _held_by, methods)
    file = vars(sys.modules[owner.__module__])
    own_names = {name for name in vars(owner) if not name.startswith("__")}
    constants: list[tuple[str, object]] = []
    for values, names in ((vars(owner), own_names), (file, names_in_class(owner) & file.keys())):
        watch.add("a constant of the code", values.get, names)
        constants += [(name, values[name]) for name in names]
    return constants


def _held_by(function: FunctionType) -> list[object]:
    """Return the default values of a method and the variables around it, which may change in place."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def _find_holders(value: object, name: str, holders: dict[int, object]) -> None:
    """Add a config or another object with fields, and those inside; ValueError if its changes cannot be seen."""
    is_config = isinstance(value, transformers.PretrainedConfig)
    is_known = type(value).__module__.partition(".")[0] in _KNOWN_PACKAGES and not isinstance(value, Tensor)
    if isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            _find_holders(item, name, holders)
    elif is_config or not (is_known or isinstance(value, (*_CONSTANT, *_BY_IDENTITY, *_DESCRIPTOR))):
        if not hasattr(value, "__dict__") or isinstance(value, Tensor) or hasattr(type(value), "__slots__"):
            raise ValueError(f"its forward reads {name}, a {type(value).__name__}, whose changes cannot be seen")
        if id(value) not in holders:
            holders[id(value)] = value
            for field, item in vars(value).items():
                if not is_config or isinstance(item, transformers.PretrainedConfig | dict | list):
                    _find_holders(item, f"{name}.{field}", holders)
