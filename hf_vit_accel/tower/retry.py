"""Disable what failed in a call, so that the next attempt to serve it goes without."""

from __future__ import annotations

from collections.abc import Mapping

from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.machine import KERNELS, Fault, raise_if_any
from hf_vit_accel.tower.state import TowerState


def disable(state: TowerState, faults_at_call: Mapping[str, str], faults: Mapping[str, str], fault: Fault) -> None:
    """Disable the backend or kernel that failed; else raise what the caller gets.

    Args:
        faults_at_call: What was disabled when the first attempt began.
        faults: What was disabled when this one began.
    """
    if fault.name in state.faults and fault.name not in faults:
        return  # another thread disabled it meanwhile
    error = fault.__cause__ or fault
    needs_backend = state.settings.score_mod is not None and fault.name != KERNELS  # only its backend applies it
    is_last_resort = fault.name == Sdpa.name
    if needs_backend or is_last_resort or fault.name in faults:  # disabling it gains nothing
        if state.faults != faults_at_call:  # earlier attempts disabled others in vain: enable them again
            failures = "; ".join(f"{name} {why}" for name, why in state.faults.items())
            error.add_note(f"Earlier attempts of this call failed, too: {failures}.")
            state.set_faults(dict(faults_at_call))
        raise error
    if state.settings.strict:
        raise_if_any([f"{fault.name} {fault.why}"])
    state.set_faults({**state.faults, fault.name: fault.why})
