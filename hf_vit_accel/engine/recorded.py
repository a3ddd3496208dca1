"""Record the state of modules during a forward, to run it again for its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.base import ABSENT, replaced
from hf_vit_accel.watch import Attributes, Watch, version_of

_COPIED = 1 << 20
"""Bytes of the largest tensor that is copied. A table of frequencies has some hundred."""

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""The attributes by which PEFT chooses and scales the adapters of a Linear."""


class Change(NamedTuple):
    """An entry of a module's dictionary that differs from the forward.

    Attributes:
        dictionary: The dictionary.
        name: The name in it.
        value: The value during the forward; `ABSENT` for none.
    """

    dictionary: Attributes
    name: str
    value: object


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """The dictionary and the name under which a module stores a tensor. (`ops.base.Slots` are for parameters alone.)

    Attributes:
        attributes: The dictionary of the module.
        dictionary: The dictionary that holds the tensor: `_parameters`, `_buffers`, or `attributes` itself.
        name: The name in it.
        is_weight: Whether the tensor is a parameter.
    """

    attributes: Attributes
    dictionary: Attributes
    name: str
    is_weight: bool


def slots_of(module: nn.Module, *, with_weights: bool) -> list[Slot]:
    """Return the slots of a module's buffers and plain attributes, and of its parameters if they are included."""
    attributes = vars(module)
    dictionaries = [attributes["_buffers"], attributes]
    if with_weights:
        dictionaries.append(attributes["_parameters"])
    slots = []
    for dictionary in dictionaries:
        is_weight = dictionary is attributes["_parameters"]
        for name, value in dictionary.items():
            if isinstance(value, Tensor):
                slots.append(Slot(attributes=attributes, dictionary=dictionary, name=name, is_weight=is_weight))
    return slots


class _RecordedTensor:
    """A tensor of a module during a forward.

    A parameter is not copied: stock keeps it for the gradient, and raises if it is written to. Stock does not keep
    small buffers, so they are copied.

    Args:
        slot: Where the module stores it.
        tensor: The tensor.

    Attributes:
        slot: Where the module stores it.
        is_copied: Whether `value` is a copy.
        value: The tensor to run the forward with again.
    """

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.is_copied = not (slot.is_weight or tensor.requires_grad or tensor.nbytes > _COPIED)
        # An alias keeps memory and version counter, even if a program assigns to `tensor.data`.
        self.value = tensor.clone() if self.is_copied else _alias(tensor)
        self._tensor = tensor
        self._pointer = tensor.data_ptr()
        self._version_source = tensor if self.is_copied else self.value
        self._version = version_of(self._version_source)

    @property
    def is_written(self) -> bool:
        """Whether the memory was written to since the forward."""
        return version_of(self._version_source) != self._version

    @property
    def is_still_held(self) -> bool:
        """Whether the module still holds this tensor, over the same memory and trained alike."""
        tensor = self._tensor
        if self.slot.dictionary.get(self.slot.name) is not tensor:
            return False
        return tensor.requires_grad == self.value.requires_grad and tensor.data_ptr() == self._pointer

    @property
    def is_shadowed(self) -> bool:
        """Whether a plain attribute now hides a parameter or buffer."""
        slot = self.slot
        return slot.dictionary is not slot.attributes and slot.name in slot.attributes


class RecordedTensors:
    """The tensors of modules during a forward that may run again for its gradients.

    Args:
        slots: Where modules store the tensors.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._tensors = []
        for slot in slots:
            tensor = slot.dictionary.get(slot.name)
            if isinstance(tensor, Tensor):
                self._tensors.append(_RecordedTensor(slot, tensor))

    def is_unchanged(self) -> bool:
        """Return whether modules hold the same tensors, at the same addresses, and none was written to."""
        return all(tensor.is_still_held and not tensor.is_written for tensor in self._tensors)

    def restored(self) -> AbstractContextManager[None]:
        """Return a context in which modules hold what they held during the forward.

        It raises RuntimeError if the state of the forward is lost.
        """
        return _Restored(self)

    def reason_lost(self) -> str | None:
        """Return why the forward cannot run again as it did, or None."""
        for tensor in self._tensors:
            if not tensor.is_copied and tensor.is_written:
                kind = "weight" if tensor.slot.is_weight else "buffer"
                return f"a {kind} of the vision tower ({tensor.slot.name}) was modified in place"
        return None

    def changes(self) -> Iterator[Change]:
        """Yield every entry that differs from the forward. Copied tensors count, since some writes go unseen."""
        for tensor in self._tensors:
            slot = tensor.slot
            if tensor.is_copied or not tensor.is_still_held:
                yield Change(slot.dictionary, slot.name, tensor.value)
            if tensor.is_shadowed:
                yield Change(slot.attributes, slot.name, ABSENT)


class RecordedModules(RecordedTensors):
    """The tensors, training flags and adapters of modules during a forward whose passes run again for its gradients.

    Args:
        parts: The modules that passes run.
        has_adapters: Whether adapters of PEFT may be among them.
    """

    def __init__(self, parts: Parts, *, has_adapters: bool) -> None:
        modules = list(parts.modules())
        slots: list[Slot] = []
        for module in modules:
            slots += slots_of(module, with_weights=True)
        super().__init__(slots)
        self._training = [(vars(module), module.training) for module in modules]
        self._adapters = Watch()
        for module in modules:
            if has_adapters and "base_layer" in module._modules:
                self._adapters.add("an adapter", vars(module).get, _ADAPTER_STATE)
        self._adapters.remember()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts in which a pass runs first, and again."""
        return nullcontext(), self.restored()

    def reason_lost(self) -> str | None:
        """Return why the forward cannot run again as it did, or None."""
        if not self._adapters.unchanged():
            return "an adapter was switched or scaled"
        return super().reason_lost()

    def changes(self) -> Iterator[Change]:
        """Yield every entry that differs from the forward."""
        yield from super().changes()
        for attributes, is_training in self._training:
            if attributes["training"] != is_training:
                yield Change(attributes, "training", is_training)


class _Restored(AbstractContextManager[None]):
    """Put back what modules held during the forward; at the end, what they hold now. It can be entered again.

    Programs may have assigned, frozen or removed weights meanwhile, or called `model.eval()`.
    """

    def __init__(self, recorded: RecordedTensors) -> None:
        self._recorded = recorded
        self._stack = ExitStack()

    def __enter__(self) -> None:
        reason = self._recorded.reason_lost()
        if reason is not None:
            raise RuntimeError(f"{reason} since its forward, which runs again for its gradients; call backward first")
        changes = list(self._recorded.changes())
        slots = [(change.dictionary, change.name) for change in changes]
        self._stack.enter_context(replaced(slots, [change.value for change in changes]))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _alias(tensor: Tensor) -> Tensor:
    """Return a leaf over the memory of a tensor, with the same version counter."""
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad else alias
