"""The attempts to serve one call: without a backend or a kernel that failed, or with memory that was given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.engine import call
from hf_vit_accel.graphs import memory
from hf_vit_accel.machine import KERNELS, Fault, raise_if_any
from hf_vit_accel.tower.state import TowerState


@dataclass(kw_only=True)
class Attempt(call.Attempt):
    """One attempt to serve a call of a tower.

    Attributes:
        state: Of the tower.
        faults_at_call: What was disabled when the first attempt began.
        faults: What was disabled when this one began.
        stores_given_up: See `graphs.memory`; the number when this attempt began.
        is_prepared: Whether the cause of an error was disabled, so that another attempt follows.
    """

    state: TowerState
    faults_at_call: Mapping[str, str]
    faults: Mapping[str, str]
    stores_given_up: int
    is_prepared: bool = False

    @property
    def has_new_room(self) -> bool:
        """Whether graphs gave memory back since the attempt began."""
        return memory.stores_given_up > self.stores_given_up

    def prepare_another(self, error: Exception) -> None:
        """Disable the backend or kernel that failed; else raise what the caller gets."""
        if self.is_prepared:
            return
        if isinstance(error, Fault):
            self._disable(error)
            self.is_prepared = True
        elif not isinstance(error, torch.OutOfMemoryError) or self.exchanged is not None or not self.has_new_room:
            raise error

    def _disable(self, fault: Fault) -> None:
        state = self.state
        if fault.name in state.faults and fault.name not in self.faults:
            return  # another thread disabled it meanwhile
        error = fault.__cause__ or fault
        needs_backend = state.settings.score_mod is not None and fault.name != KERNELS  # only its backend applies it
        is_last_resort = fault.name == Sdpa.name
        if needs_backend or is_last_resort or fault.name in self.faults:  # disabling it gains nothing
            if state.faults != self.faults_at_call:  # earlier attempts disabled others in vain: enable them again
                failures = "; ".join(f"{name} {why}" for name, why in state.faults.items())
                error.add_note(f"Earlier attempts of this call failed, too: {failures}.")
                state.set_faults(dict(self.faults_at_call))
            raise error
        if state.settings.strict:
            raise_if_any([f"{fault.name} {fault.why}"])
        state.set_faults({**state.faults, fault.name: fault.why})
