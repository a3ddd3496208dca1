"""Notice changes of a copy that its proof depends on, beside modules and their methods: of buffers, options, constants.

Parameters are left out. The proof draws them anew, so they may change.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection
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
    """Watch the buffers of a copy, its tensors that are plain attributes, and the values that its code reaches.

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
    reached = _Reached(watch)
    for module in tower.modules():
        reached.add(type(module), type(module).__name__)
        for name in names_in_class(type(module)) & vars(module).keys() - vars(nn.Module()).keys():
            if not isinstance(vars(module)[name], Tensor):  # watched with its stamp
                reached.add(vars(module)[name], name)
    watch.remember()


def _stamps_in(attributes: Attributes) -> list[object]:
    """Return the stamps of all tensors in a dictionary."""
    tensors = [value for value in attributes.values() if isinstance(value, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError("a buffer was made in inference mode, where torch does not count its changes")
    return [stamp_of(tensor) for tensor in tensors]


_CONSTANT = bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None)
_BY_IDENTITY = BuiltinFunctionType, ModuleType, nn.Module, property, staticmethod, classmethod
_KNOWN_PACKAGES = {"torch", "transformers", "logging", ADAPTERS}


class _Reached:
    """The values that the code of a copy reaches. Objects of known packages do not act on results."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: dict[int, object] = {}

    def add(self, value: Any, name: str) -> None:
        """Watch what a value holds; ValueError if its changes cannot be seen."""
        if value is os.getenv or value is os.environ:
            raise ValueError(f"its forward reads {name}, whose changes cannot be seen")
        if isinstance(value, (*_CONSTANT, *_BY_IDENTITY)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, dict | list | tuple | set | frozenset):
            for item in value.values() if isinstance(value, dict) else value:
                self.add(item, name)
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords], name)
        elif isinstance(value, MethodType):
            self.add(value.__self__, name)
        elif isinstance(value, type):
            self._add_class(value)
        elif not isinstance(value, FunctionType):
            self._add_object(value, name)

    def _add_class(self, kind: type) -> None:
        """Add the constants and the methods of a class, and the names of its file that methods read."""
        for owner in kind.__mro__:
            if _package(owner) in _KNOWN_PACKAGES | sys.stdlib_module_names or issubclass(
                owner, transformers.PretrainedConfig
            ):
                continue
            self._add_constants(vars(owner), {name for name in vars(owner) if not name.startswith("__")})
            names = names_in_class(owner)
            file = getattr(sys.modules.get(owner.__module__), "__dict__", {})
            self._add_constants(file, names)
            for value in [file[name] for name in names & file.keys()]:
                if isinstance(value, ModuleType) and _may_hold_options(value, file):
                    self._add_constants(vars(value), names)
            for value in vars(owner).values():
                if isinstance(value, FunctionType):
                    self._add_held(value)

    def _add_constants(self, values: Any, names: Collection[str]) -> None:
        constants = sorted(values.keys() & names)
        self._watch.add("a constant of the code", values.get, constants)
        for name in constants:
            self.add(values[name], name)

    def _add_held(self, function: FunctionType) -> None:
        """Add the default values of a method and the variables around it, which may change in place."""
        held = [value for value in _held_by(function) if not isinstance(value, (*_CONSTANT, FunctionType, type))]
        if held:
            self._watch.add("a constant of the code", _held_by, [function])
            self.add(held, function.__name__)

    def _add_object(self, value: Any, name: str) -> None:
        is_config = isinstance(value, transformers.PretrainedConfig)
        if _package(type(value)) in _KNOWN_PACKAGES and not is_config and not isinstance(value, Tensor):
            return
        if not hasattr(value, "__dict__") or isinstance(value, Tensor) or hasattr(type(value), "__slots__"):
            raise ValueError(f"its forward reads {name}, a {type(value).__name__}, whose changes cannot be seen")
        kind = "a config" if is_config else f"a {type(value).__name__}"
        self._watch.add(f"a field of {kind}", dict, [vars(value)])
        self._add_class(type(value))
        for field, item in vars(value).items():
            if not is_config or isinstance(item, transformers.PretrainedConfig | dict | list):
                self.add(item, f"{name}.{field}")


def _held_by(function: FunctionType) -> list[object]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def _may_hold_options(module: ModuleType, names_of_file: dict[str, Any]) -> bool:
    """Return whether a module is `os`, or one in the folder of a file."""
    folder = Path(names_of_file.get("__file__") or os.devnull).parent
    return module is os or folder in Path(getattr(module, "__file__", None) or os.devnull).parents


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
