"""Notice changes of a copy that its proof depends on, beside modules and code: of buffers, options and constants.

Parameters are left out. The proof draws them anew, so they may change.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.ops.base import copied
from hf_vit_accel.tower.code import names_in_class

TensorStamp = tuple[Tensor, int, int]
"""A tensor, the version of its values, and where they are stored."""


class CopyState:
    """The buffers of a copy, its tensors that are plain attributes, and the objects that its code reads, as proven.

    A write through `tensor.data` goes unseen, as it does for autograd.

    Args:
        tower: The copy.

    Raises:
        ValueError: A tensor was made in inference mode, where torch counts no versions. Or the code reads an object
            whose changes cannot be seen.
    """

    def __init__(self, tower: nn.Module) -> None:
        attributes = [vars(module) for module in tower.modules()]
        self._buffers = [values["_buffers"] for values in attributes]
        self._tensor_slots = [
            (values, name) for values in attributes for name in values if isinstance(values[name], Tensor)
        ]
        self._stamps = list(self._stamps_now())
        watched = _Watched()
        for module in tower.modules():
            watched.add_module(module)
        self._constants = watched.constants
        self._kinds = watched.kinds
        self._namespaces = list(watched.namespaces.values())
        self._fields = [copied(dict(values)) for values in self._namespaces]
        self._values = copied([values.get(name) for values, name in self._constants])

    def _tensors_now(self) -> Iterator[Tensor]:
        for buffers in self._buffers:
            if buffers:
                yield from (buffer for buffer in buffers.values() if buffer is not None)
        for attributes, name in self._tensor_slots:
            tensor = attributes.get(name)
            if isinstance(tensor, Tensor):
                yield tensor

    def _stamps_now(self) -> Iterator[TensorStamp]:
        for tensor in self._tensors_now():
            if tensor.is_inference():
                raise ValueError("a buffer was made in inference mode, where torch does not count its changes")
            yield tensor, tensor._version, tensor.data_ptr()

    def reason_changed(self) -> str | None:
        """Return what changed; None if nothing did."""
        if self._namespaces != self._fields:
            pairs = zip(self._namespaces, self._fields, self._kinds, strict=True)
            return f"a field of {next(kind for now, former, kind in pairs if now != former)} changed"
        if [values.get(name) for values, name in self._constants] != self._values:
            return "a constant of the code changed"
        stamps = list(self._stamps_now())
        is_same = len(stamps) == len(self._stamps)
        for stamp, former in zip(stamps, self._stamps):  # noqa: B905
            is_same = is_same and stamp[0] is former[0] and stamp[1:] == former[1:]
        return None if is_same else "a buffer changed"


_UNCHANGING = (bool, int, float, complex, str, bytes, range, slice, Enum, torch.dtype, torch.device, type(None))
_BY_IDENTITY = (BuiltinFunctionType, FunctionType, ModuleType, nn.Module, property, staticmethod, classmethod)
_KNOWN_PACKAGES = {"torch", "transformers", "peft", "logging"}


class _Watched:
    """The objects and constants that the code of a copy names. Objects of known packages do not act on results.

    Attributes:
        namespaces: The attributes of objects, by the object's id.
        kinds: What these objects are.
        constants: Where constants are stored: attributes of classes, and globals of their files.
    """

    def __init__(self) -> None:
        self.namespaces: dict[int, Mapping[str, Any]] = {}
        self.kinds: list[str] = []
        self.constants: list[tuple[Mapping[str, Any], str]] = []
        self._classes: set[type] = set()

    def add_module(self, module: nn.Module) -> None:
        """Add the attributes that the code of a module's class names, and the constants of the class."""
        names = self._add_class(type(module))
        for name in names & vars(module).keys() - vars(nn.Module()).keys():
            if not isinstance(vars(module)[name], Tensor):  # `CopyState` watches it
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
            for values in [*map(vars, owners), *files]:
                for name in sorted(names & values.keys()):
                    self._add_constant(values, name)
        return names

    def _add_constant(self, values: Mapping[str, Any], name: str) -> None:
        self.constants.append((values, name))
        if isinstance(values[name], type):
            self._add_class(values[name])
        else:
            self._add(values[name], name)

    def _add(self, value: Any, name: str) -> None:
        """Add what a value holds; ValueError if its changes cannot be seen."""
        if isinstance(value, (type, *_UNCHANGING, *_BY_IDENTITY)):
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
        if id(value) not in self.namespaces:
            self.namespaces[id(value)] = vars(value)
            self.kinds.append("a config" if is_config else f"a {type(value).__name__}")
            self._add_class(type(value))
            for field, item in vars(value).items():
                if not is_config or isinstance(item, transformers.PretrainedConfig | dict | list):
                    self._add(item, f"{name}.{field}")


def _is_of_copy(kind: type) -> bool:
    return _package(kind) not in _KNOWN_PACKAGES | sys.stdlib_module_names


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
