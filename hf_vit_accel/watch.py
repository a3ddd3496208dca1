"""Notice what anybody may change: values, the memory of tensors, writes to them.

Proofs, readings, operations and graphs hold while the values that they were made from stay. Nobody reports a change, so
the values are read again and compared. A `Watch` compares values, and names the one that changed. `Memory` compares
where tensors lie. `version_of` and `stamp_of` tell whether a tensor was written to.
"""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Iterable,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from itertools import repeat
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Attributes = dict[str, Any]
"""The dictionary of a module or of another object."""
Read = Callable[[Any], object]
"""Reads a value of an owner: an attribute, its class, its length."""

_ATTRIBUTE = "an attribute of a module inside"
_ABSENT = object()
_EMPTY_MODULE = nn.Module()
# Only CUDA builds have it. `data_ptr` takes 25 us for 400 parameters, five times as long.
_SAME_POINTERS: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_NOT_COMPARABLE = (AttributeError, KeyError, RuntimeError, ValueError)
"""Raised where an attribute is gone, or where tensors or arrays are compared."""


class Watch:
    """Values with names, remembered to notice changes.

    Args:
        base: A watch whose values are watched, too, as it remembers them.
    """

    def __init__(self, base: Watch | None = None) -> None:
        self._added: list[tuple[str, Read, Iterable[Any]]] = [] if base is None else list(base._added)
        self._remembered: list[list[object]] = [] if base is None else base._values[: len(base._added)]
        self._names: dict[int, tuple[Attributes, dict[str, None]]] = {}
        self._reads: list[tuple[str, Read, Iterable[Any]]] = []
        self._values: list[list[object]] = [[]]  # nothing is remembered, so nothing is unchanged
        self._attributes: list[tuple[str, Callable[[], object], tuple[str, ...], list[object]]] = (
            [] if base is None else list(base._attributes)
        )

    def add(self, name: str, read: Read, owners: Iterable[Any]) -> None:
        """Watch the value that `read` returns for each owner. Where `read` is C code, so is the comparison."""
        self._added.append((name, read, owners))

    def add_attributes(self, name: str, get_owner: Callable[[], object], attributes: Iterable[str]) -> None:
        """Watch the values of attributes, or that there are none, of an object that the watch need not hold."""
        attributes = tuple(attributes)
        values = list(map(vars(get_owner()).get, attributes, repeat(_ABSENT)))
        self._attributes.append((name, get_owner, attributes, copied(values)))

    def read(self, module: nn.Module, name: str, default: object = None) -> Any:
        """Return an attribute of a module that is no weight, and watch it."""
        attributes = vars(module)
        if name in attributes:  # `Snapshot` counts attributes, and so notices one that appears
            self._names.setdefault(id(attributes), (attributes, {}))[1][name] = None
        return getattr(module, name, default)

    def read_all(self, module: nn.Module) -> None:
        """Watch all attributes of a module and of the modules inside it, except Linears.

        A Linear's forward reads its weights only.
        """
        for child in module.modules():
            if type(child) is not nn.Linear:
                for name in vars(child).keys() - vars(_EMPTY_MODULE).keys():
                    self.read(child, name)

    def remember(self) -> None:
        """Remember values as they are now: all attributes that were read, and what was added since the last time."""
        owners_by_names: dict[tuple[str, ...], list[Attributes]] = {}  # modules of a class share one read
        for attributes, names in self._names.values():
            owners_by_names.setdefault(tuple(names), []).append(attributes)
        attribute_reads = [(_ATTRIBUTE, itemgetter(*names), owners) for names, owners in owners_by_names.items()]
        self._remembered += copied(_values_of(self._added[len(self._remembered) :]))
        self._reads = [*self._added, *attribute_reads]
        self._values = [*self._remembered, *copied(_values_of(attribute_reads))]

    def unchanged(self) -> bool:
        """Return whether all values are as they were remembered."""
        try:
            for _, get_owner, attributes, former in self._attributes:
                owned = object.__getattribute__(get_owner(), "__dict__")  # `vars` of a config runs Python functions
                if list(map(owned.get, attributes, repeat(_ABSENT))) != former:
                    return False
            return [list(map(read, owners)) for _, read, owners in self._reads] == self._values
        except _NOT_COMPARABLE:
            return False

    def what_changed(self) -> str | None:
        """Return the name of the first value that changed; None if none did."""
        for (name, read, owners), former in zip(self._reads, self._values, strict=False):
            try:
                now = list(map(read, owners))
                if now != former:
                    return f"{name}{_key_in(now, former)} changed"
            except _NOT_COMPARABLE:
                return f"{name} changed"
        for name, get_owner, attributes, former in self._attributes:
            owned = vars(get_owner())
            for attribute, value in zip(attributes, former, strict=True):
                if _differs(owned.get(attribute, _ABSENT), value):
                    return f"{name} {attribute!r} changed"
        return None


Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
"""The address, dtype, shape and strides of a tensor."""


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor lies, and how: a write does not change it, but another memory or form does."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Memory:
    """Where tensors lay when they were read. It holds none of them, so that weights which are replaced can go.

    Attributes:
        places: Of all tensors; None if a tensor class has no memory, so that its changes go unseen.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        try:
            self.places: list[Place] | None = list(map(place_of, tensors))
        except RuntimeError:
            self.places = None
        self._indices = list(range(len(tensors)))
        self._pointers = [pointer for pointer, *_ in self.places or ()]
        # Transposed in place, a tensor with two equal sizes keeps address and shape.
        self._squares = [index for index in self._indices if len({*tensors[index].shape}) < tensors[index].dim()]
        self._are_contiguous = [tensors[index].is_contiguous() for index in self._squares]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors lie there. Every call asks, so it compares no more than people change.

        That is the addresses, the dtype of the first tensor, since `.half()` casts all of them, and whether tensors
        of two equal sizes are contiguous.
        """
        if self.places is None or len(tensors) != len(self.places):
            return False
        try:
            if _SAME_POINTERS is None:
                is_same = list(map(Tensor.data_ptr, tensors)) == self._pointers
            else:
                is_same = _SAME_POINTERS(tensors, self._pointers, self._indices)
        except (RuntimeError, TypeError):  # a tensor class without memory
            return False
        is_same = is_same and (not tensors or tensors[0].dtype == self.places[0][1])
        return is_same and [tensors[index].is_contiguous() for index in self._squares] == self._are_contiguous

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Memory) and self.places is not None and self.places == other.places)

    __hash__ = None  # type: ignore[assignment]


def _values_of(reads: Iterable[tuple[str, Read, Iterable[Any]]]) -> list[list[object]]:
    return [list(map(read, owners)) for _, read, owners in reads]


def stamp_of(tensor: Tensor) -> tuple[int, Tensor, int, int | None]:
    """Return what changes when another tensor takes this one's place, or other memory, or is written to.

    Its first item alone differs for another tensor: two tensors are never compared.
    """
    return id(tensor), tensor, tensor.data_ptr(), version_of(tensor)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for one of inference mode, whose writes torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _differs(now: object, former: object) -> bool:
    """Return whether two values are neither the same nor equal; tensors are never compared."""
    try:
        return [now] != [former]
    except _NOT_COMPARABLE:
        return True


def _key_in(now: list[object], former: list[object]) -> str:
    """Return the key of the value that differs, where attributes are watched together."""
    for value, earlier in zip(now, former, strict=False):
        if isinstance(value, dict) and isinstance(earlier, dict) and value != earlier:
            differing = [key for key in value | earlier if value.get(key, _ABSENT) != earlier.get(key, _ABSENT)]
            return f" {differing[0]!r}"
    return ""


def copied(value: Any) -> Any:
    """Copy nested containers, since callers may change them in place; other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, MutableSet | MutableSequence | MutableMapping):
        return copy.copy(value)
    return value


_OPAQUE = (nn.Module, type, FunctionType, ModuleType)


def watch_called(modules: Sequence[nn.Module]) -> Watch:
    """Watch the tensors that called modules hold, as attributes of whatever object, for graphs that read them.

    The watch keeps them alive, so that no other tensor takes their address.
    """
    watch = Watch()
    watch.add("the mode of a linear", attrgetter("training"), modules)
    pending: list[dict[str, Any]] = []
    for module in modules:
        pending += [module._parameters, module._buffers, vars(module)]
    slots: list[tuple[dict[str, Any], str, object]] = []
    seen: set[int] = set()
    for attributes in pending:  # which grows
        for name, value in attributes.items():
            holds_attributes = hasattr(value, "__dict__") and not isinstance(value, _OPAQUE)
            if holds_attributes and id(value) not in seen:
                seen.add(id(value))
                pending.append(vars(value))
            if holds_attributes or value is None or isinstance(value, Tensor):
                slots.append((attributes, name, value))
    watch.add("a tensor of a linear", _hold_the_same, [slots])
    watch.add("the memory of a linear", Tensor.data_ptr, [value for *_, value in slots if isinstance(value, Tensor)])
    watch.remember()
    return watch


def _hold_the_same(slots: Sequence[tuple[dict[str, Any], str, object]]) -> bool:
    """Return whether dictionaries hold these very values."""
    return all(attributes.get(name) is value for attributes, name, value in slots)
