"""Record what the modules of a tower hold during a forward, to run a pass again just so in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_vit_accel.families.base import Parts

_COPIED = 1 << 20  # bytes: a table of frequencies has some hundred


@dataclass(frozen=True, eq=False)
class _Slot:
    """A tensor that a module holds.

    Attributes:
        place: the dictionary of the module.
        name: the name in it.
        tensor: the very object.
        alias: its memory and version, whatever becomes of the object's `data`; or a copy of it.
        version: how often the alias was written to.
        is_weight: whether it is a parameter.
    """

    place: dict[str, Any]
    name: str
    tensor: Tensor
    alias: Tensor
    version: int
    is_weight: bool

    @property
    def is_held(self) -> bool:
        """Whether the module still holds this tensor, over the same memory and trained alike."""
        tensor = self.tensor
        if self.place.get(self.name) is not tensor or tensor.requires_grad != self.alias.requires_grad:
            return False
        return tensor.data_ptr() == self.alias.data_ptr()


class Recorded:
    """Record what modules hold during a forward whose passes run again for its gradients.

    Tensors are parameters, buffers, and those that are plain attributes. A parameter that was written to meanwhile
    raises, as in stock, which keeps it for the gradient. Of small buffers, which stock does not keep, there are copies.
    Training flags decide about dropout.

    Args:
        parts: the modules that passes run.
        has_adapters: whether there may be adapters of PEFT in them.
    """

    def __init__(self, parts: Parts, *, has_adapters: bool) -> None:
        self._slots: list[_Slot] = []
        self._training: list[tuple[dict[str, Any], bool]] = []
        modules = list(parts.modules())
        for module in modules:
            attributes = vars(module)
            self._slots += _slots_of(attributes["_parameters"], are_weights=True)
            for place in (attributes["_buffers"], attributes):
                self._slots += _slots_of(place, are_weights=False)
            self._training.append((attributes, attributes["training"]))
        self._adapted = [vars(module) for module in modules if has_adapters and "base_layer" in module._modules]
        self._adapters = self._active_adapters()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts in which a pass runs first, and again."""
        return nullcontext(), _Again(self)

    def check(self) -> None:
        """Raise RuntimeError where a pass cannot run again as it did."""
        reason = None
        for slot in self._slots:
            if _version(slot.alias) != slot.version:
                kind = "weight" if slot.is_weight else "buffer"
                reason = f"a {kind} of the vision tower ({slot.name}) was modified in place"
        if self._active_adapters() != self._adapters:
            reason = "an adapter was switched"
        if reason is not None:
            raise RuntimeError(
                f"{reason} since its forward, whose passes (max_rows) run again for its gradients; call backward first"
            )

    def differences(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield (dictionary, name, value) where modules hold something else than during the forward."""
        for slot in self._slots:
            if not slot.is_held:
                yield slot.place, slot.name, slot.alias
        for attributes, training in self._training:
            if attributes["training"] != training:
                yield attributes, "training", training

    def _active_adapters(self) -> list[Any]:
        """Return which adapters of PEFT act, Linear by Linear."""
        names = "_active_adapter", "_disable_adapters", "merged_adapters"
        return [copy.copy(attributes.get(name)) for attributes in self._adapted for name in names]


_GONE = object()  # stands for the value of a name that a module no longer has


class _Again(AbstractContextManager[None]):
    """Run a pass again with what modules held during its forward, then put back what they hold now.

    Programs may have assigned, frozen or removed weights meanwhile, or called `model.eval()`.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._current: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        self._recorded.check()
        for place, name, value in self._recorded.differences():
            self._current.append((place, name, place.get(name, _GONE)))
            place[name] = value

    def __exit__(self, *_: object) -> None:
        for place, name, value in self._current:
            if value is _GONE:
                del place[name]
            else:
                place[name] = value
        self._current.clear()


def _slots_of(place: dict[str, Any], *, are_weights: bool) -> list[_Slot]:
    """Return a slot for every tensor in a dictionary of a module."""
    slots = []
    for name, tensor in place.items():
        if isinstance(tensor, Tensor):
            is_copied = not (are_weights or tensor.requires_grad or tensor.nbytes > _COPIED)
            alias = tensor.clone() if is_copied else tensor.detach()
            alias = alias.requires_grad_() if tensor.requires_grad else alias
            slots.append(_Slot(place, name, tensor, alias, _version(alias), are_weights))
    return slots


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
