"""Notice changes of a copy that its proof depends on, beside modules and code: of buffers, options and constants.

Parameters are left out. The proof draws them anew, so they may change.
"""

from __future__ import annotations

import functools
import os
import sys
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.tower.code import names_in_class
from hf_vit_accel.versions import ADAPTERS
from hf_vit_accel.watch import Attributes, Watch, stamp_of


def watch_state(watch: Watch, tower: nn.Module) -> None:
    """Watch the buffers of a copy, its tensors that are plain attributes, and the objects that its code reads.

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
    objects = _Objects(watch)
    for module in tower.modules():
        objects.add_module(module)
    watch.remember()


def _stamps_in(attributes: Attributes) -> list[object]:
    """Return the stamps of all tensors in a dictionary."""
    tensors = [value for value in attributes.values() if isinstance(value, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError("a buffer was made in inference mode, where torch does not count its changes")
    return [stamp_of(tensor) for tensor in tensors]


_UNCHANGING = (bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None))
_BY_IDENTITY = (BuiltinFunctionType, FunctionType, ModuleType, nn.Module, property, staticmethod, classmethod)
_CONSTANT = (type, *_UNCHANGING, *_BY_IDENTITY)
_KNOWN_PACKAGES = {"torch", "transformers", "logging", ADAPTERS}


def _held_by(function: FunctionType) -> list[object]:
    """Return the default values of a function and the variables around it."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


class _Objects:
    """Watches the objects and constants that the code of a copy names.

    Objects of known packages do not act on results.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._ids: set[int] = set()
        self._classes: set[type] = set()

    def add_module(self, module: nn.Module) -> None:
        """Add the attributes that the code of a module's class names, and the constants of the class."""
        names = self._add_class(type(module))
        for name in names & vars(module).keys() - vars(nn.Module()).keys():
            if not isinstance(vars(module)[name], Tensor):  # watched with its stamp
                self._add(vars(module)[name], name)

    def _add_class(self, kind: type) -> frozenset[str]:
        """Return the names in the code of a class; empty for classes of known packages."""
        if not _is_of_copy(kind):
            return frozenset()
        names = names_in_class(kind)
        if not issubclass(kind, nn.Module):  # others read its constants
            names |= {name for name in dir(kind) if not name.startswith("__")}
        if kind not in self._classes:
            self._classes.add(kind)
            owners = [owner for owner in kind.__mro__ if _is_of_copy(owner)]
            files = [vars(sys.modules[owner.__module__]) for owner in owners if owner.__module__ in sys.modules]
            for function in [value for owner in owners for value in vars(owner).values()]:
                self._add_function(function)
            imported = [
                value
                for values in files
                for name, value in values.items()
                if name in names and _is_beside(value, values)
            ]
            for values in [*map(vars, owners), *files, *map(vars, imported)]:
                constants = sorted(names & values.keys())
                self._watch.add("a constant of the code", values.get, constants)
                for name in constants:
                    if isinstance(values[name], type):
                        self._add_class(values[name])
                    else:
                        self._add(values[name], name)
        return names

    def _add_function(self, function: Any) -> None:
        """Add the default values of a method and the variables around it, which may change in place."""
        if isinstance(function, FunctionType):
            held = [value for value in _held_by(function) if not isinstance(value, _CONSTANT)]
            if held:
                self._watch.add("a constant of the code", _held_by, [function])
                self._add(held, function.__name__)

    def _add(self, value: Any, name: str) -> None:
        """Add what a value holds; ValueError if its changes cannot be seen."""
        if value is os.getenv or isinstance(value, type(os.environ)):
            raise ValueError(f"its forward reads {name}, whose changes cannot be seen")
        if isinstance(value, _CONSTANT):
            return
        if isinstance(value, functools.partial):
            value = [value.func, value.args, value.keywords]
        if isinstance(value, MethodType):
            value = [value.__self__]
        if isinstance(value, dict | list | tuple | set | frozenset):
            for item in value.values() if isinstance(value, dict) else value:
                self._add(item, name)
            return
        is_config = isinstance(value, transformers.PretrainedConfig)
        if _package(type(value)) in _KNOWN_PACKAGES and not is_config and not isinstance(value, Tensor):
            return
        if not hasattr(value, "__dict__") or isinstance(value, Tensor) or hasattr(type(value), "__slots__"):
            raise ValueError(f"its forward reads {name}, a {type(value).__name__}, whose changes cannot be seen")
        if id(value) not in self._ids:
            self._ids.add(id(value))
            kind = "a config" if is_config else f"a {type(value).__name__}"
            self._watch.add(f"a field of {kind}", dict, [vars(value)])
            self._add_class(type(value))
            for field, item in vars(value).items():
                if not is_config or isinstance(item, transformers.PretrainedConfig | dict | list):
                    self._add(item, f"{name}.{field}")


def _is_beside(value: object, names_of_file: dict[str, Any]) -> bool:
    """Return whether a value is a module that may hold options: one in the folder of a file, or `os`."""
    if not isinstance(value, ModuleType):
        return False
    folder = Path(names_of_file.get("__file__") or os.devnull).parent
    return value is os or folder in Path(getattr(value, "__file__", None) or os.devnull).parents


def _is_of_copy(kind: type) -> bool:
    return _package(kind) not in _KNOWN_PACKAGES | sys.stdlib_module_names


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
