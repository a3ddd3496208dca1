"""Prepares a call to be run again: without a backend or a kernel that failed, or in shorter passes."""

from __future__ import annotations

from collections.abc import Mapping

from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.graphs import memory
from hf_vit_accel.layout import rows_of
from hf_vit_accel.machine import KERNELS, Fault, raise_if_any
from hf_vit_accel.tower.plan import CallPlan, FastPlan
from hf_vit_accel.tower.state import TowerState


def can_retry_out_of_memory(state: TowerState, plan: CallPlan | None, stores_given_up: int) -> bool:
    """Prepare a call whose memory ran out for another attempt; return False if none can help.

    Args:
        plan: The decisions of the attempt that failed; None if there were none yet.
        stores_given_up: See `graphs.memory`; the number when that attempt began.
    """
    has_new_room = memory.stores_given_up > stores_given_up
    if plan is None:
        return has_new_room
    if not isinstance(plan, FastPlan):
        return False
    is_shared = plan.shared.assignment is not None
    if is_shared and (state.sharing is None or not state.sharing.others_wait):
        return False  # the other ranks are through, and would not answer another attempt
    return has_new_room or halve_passes(state, plan)


def halve_passes(state: TowerState, plan: FastPlan) -> bool:
    """Halve the rows of a pass after memory ran out; return False if that is impossible."""
    if plan.most_rows is None or not plan.passes:
        return False
    longest = max((one_pass.grid for one_pass in plan.passes), key=rows_of)
    is_halved = state.pass_limit.halve(longest, plan.spec)
    if is_halved:
        state.drop_graphs()
    return is_halved


def disable(state: TowerState, at_call: Mapping[str, str], at_attempt: Mapping[str, str], fault: Fault) -> None:
    """Disable the failed backend or kernel for the retry, or re-raise its error."""
    if fault.name in state.faults and fault.name not in at_attempt:
        return  # another thread disabled it meanwhile
    error = fault.__cause__ or fault
    needs_backend = state.settings.score_mod is not None and fault.name != KERNELS  # only its backend applies it
    is_last_resort = fault.name == BACKENDS[-1].name  # sdpa
    if needs_backend or is_last_resort or fault.name in at_attempt:  # disabling it gains nothing
        if state.faults is not at_call:  # earlier attempts disabled others in vain: enable them again
            failures = "; ".join(f"{name} {why}" for name, why in state.faults.items())
            error.add_note(f"Earlier attempts of this call failed, too: {failures}.")
            state.set_faults(dict(at_call))
        raise error
    if state.settings.strict:
        raise_if_any([f"{fault.name} {fault.why}"])
    state.set_faults({**state.faults, fault.name: fault.why})
