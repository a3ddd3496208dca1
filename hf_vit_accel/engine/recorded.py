"""Record the state of modules during a forward, to run it again for its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.base import ABSENT, Slots, replaced
from hf_vit_accel.watch import Attributes, Watch, place_of, version_of

_COPIED = 1 << 20
"""Bytes of the largest tensor that is copied. A table of frequencies has some hundred."""

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""The attributes by which PEFT chooses and scales the adapters of a Linear."""


def slots_of(modules: Iterable[nn.Module], *, with_weights: bool) -> Slots:
    """Return where modules store buffers and plain tensors, and parameters if they are included."""
    slots: list[tuple[Attributes, str]] = []
    for module in modules:
        attributes = vars(module)
        for dictionary in (attributes["_buffers"], attributes["_parameters"], attributes):
            if dictionary is attributes["_parameters"] and not with_weights:
                continue
            names = [name for name, value in dictionary.items() if isinstance(value, Tensor)]
            slots += [(dictionary, name) for name in names]
            if dictionary is not attributes:  # a plain attribute of that name would hide it
                slots += [(attributes, name) for name in names]
    return slots


class _Entry:
    """An entry of a module's dictionary during a forward: a tensor, a plain value, or `ABSENT` for none.

    A parameter is not copied: stock keeps it for the gradient, and raises if it is written to. Stock does not keep
    small buffers, so they are copied.
    """

    def __init__(self, dictionary: Attributes, name: str) -> None:
        self.dictionary = dictionary
        self.name = name
        self.is_copied = False
        self._former = self.value = former = dictionary.get(name, ABSENT)
        if isinstance(former, Tensor):
            self.is_weight = isinstance(former, nn.Parameter)
            self.is_copied = not (self.is_weight or former.requires_grad or former.nbytes > _COPIED)
            # An alias keeps memory and version counter, even if a program assigns to `tensor.data`.
            self.value = former.clone() if self.is_copied else former.detach().requires_grad_(former.requires_grad)
            self._place = place_of(former)
            self._counted = former if self.is_copied else self.value
            self._version = version_of(self._counted)

    @property
    def is_written(self) -> bool:
        """Whether a tensor's memory was written to since the forward."""
        return isinstance(self.value, Tensor) and version_of(self._counted) != self._version

    @property
    def is_still_held(self) -> bool:
        """Whether the module still holds this value; a tensor over the same memory, and trained alike."""
        former = self._former
        if self.dictionary.get(self.name, ABSENT) is not former:
            return False
        if not isinstance(former, Tensor):
            return True
        return former.requires_grad == self.value.requires_grad and place_of(former) == self._place


class Recorded(AbstractContextManager[None]):
    """What modules held during a forward; within the context they hold it again, to run it for its gradients."""

    def __init__(self, slots: Slots) -> None:
        self._entries = [_Entry(dictionary, name) for dictionary, name in slots]

    def is_unchanged(self) -> bool:
        """Return whether modules hold the same tensors, at the same addresses, and none was written to."""
        return all(entry.is_still_held and not entry.is_written for entry in self._entries)

    def reason_lost(self) -> str | None:
        """Return why the forward cannot run again as it did, or None."""
        for entry in self._entries:
            if entry.is_written and not entry.is_copied:
                kind = "weight" if entry.is_weight else "buffer"
                return f"a {kind} of the vision tower ({entry.name}) was modified in place"
        return None

    def __enter__(self) -> None:
        """Put back what modules held during the forward; at the end, what they hold now.

        Programs may have assigned, frozen or removed weights meanwhile, or called `model.eval()`. Copies are always put
        back, since some writes go unseen. It is entered by each backward, with `retain_graph` again and again.
        """
        reason = self.reason_lost()
        if reason is not None:
            raise RuntimeError(f"{reason} since its forward, which runs again for its gradients; call backward first")
        changed = [entry for entry in self._entries if entry.is_copied or not entry.is_still_held]
        slots = [(entry.dictionary, entry.name) for entry in changed]
        self._replaced = replaced(slots, [entry.value for entry in changed])
        self._replaced.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replaced.__exit__(*error)


class RecordedModules(Recorded):
    """The tensors, training flags and adapters of modules during a forward whose passes run again for its gradients."""

    def __init__(self, parts: Parts, *, has_adapters: bool) -> None:
        modules = list(parts.modules())
        super().__init__([*slots_of(modules, with_weights=True), *((vars(module), "training") for module in modules)])
        self._adapters = Watch()
        for module in modules:
            if has_adapters and "base_layer" in module._modules:
                self._adapters.add("an adapter", vars(module).get, _ADAPTER_STATE)
        self._adapters.remember()

    def reason_lost(self) -> str | None:
        """Return why the forward cannot run again as it did, or None."""
        return "an adapter was switched or scaled" if not self._adapters.unchanged() else super().reason_lost()
