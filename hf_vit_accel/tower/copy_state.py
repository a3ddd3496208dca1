"""Notice changes of a copy that its proof depends on, beside modules and their methods: of buffers, options, constants.

Parameters are left out. The proof draws them anew, so they may change.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.tower.code import names_in_class
from hf_vit_accel.versions import ADAPTERS
from hf_vit_accel.watch import Attributes, Watch, stamp_of

_CONSTANT = bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None)
_BY_IDENTITY = type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module
_DESCRIPTOR = property, staticmethod, classmethod
_KNOWN_PACKAGES = {"torch", "transformers", "logging", "functools", "typing", ADAPTERS}
"""Packages whose objects do not act on results."""


def watch_state(watch: Watch, tower: nn.Module) -> None:
    """Watch the buffers of a copy, its tensors that are plain attributes, and the values that its code reads.

    A write through `tensor.data` goes unseen, as it does for autograd.

    Raises:
        ValueError: A tensor was made in inference mode, where torch counts no versions. Or the code reads an object
            whose changes cannot be seen.
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
        names = names_in_class(type(module)) & vars(module).keys() - vars(nn.Module()).keys()
        values += [(name, vars(module)[name]) for name in names if not isinstance(vars(module)[name], Tensor)]
    holders: dict[int, Any] = {}
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


def _find_holders(value: Any, name: str, holders: dict[int, Any]) -> None:
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
