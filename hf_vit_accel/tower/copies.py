"""Proof, by running, that a copy of a tower computes what our operations compute.

`tower/proof.py` runs a tiny tower of a class of transformers, since that class is known. The class of a copy may act on
anything. So a clone of the copy itself runs, at its own depth, with its own buffers and config: see `tower/trials.py`.

Calls in another dtype, or under autocast, are proven when the first of them comes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.families import Tower
from hf_vit_accel.families.copies import CopyFamily, Form
from hf_vit_accel.machine import one_line
from hf_vit_accel.tower.code import Code
from hf_vit_accel.tower.copy_state import watch_state
from hf_vit_accel.tower.differences import CallDtypes, Report
from hf_vit_accel.tower.exact import exact_products
from hf_vit_accel.tower.proof import Key, Proof, warn_once
from hf_vit_accel.tower.trials import (
    Subject,
    all_trials,
    compare,
    first_trial,
    grids_of,
    trial_of_small_weights,
)
from hf_vit_accel.tower.twin import clone_of, draw_weights, shrink_weights


def prove(tower: Tower, family: CopyFamily) -> Proof:
    """Run the proof of a copy as it is now, for calls in the dtype of its weights without autocast."""
    kind = next(owner for owner in type(tower).__mro__ if "forward" in vars(owner))
    code = Code(kind, frozenset(type(module) for module in tower.modules()))
    report = Report()
    form: Form | type | None = None
    reasons_by_dtypes: dict[CallDtypes, str | None] = {}
    try:
        watch_state(code.watch, tower)
        dtypes = CallDtypes(family.parts(tower).projection.weight.dtype)
        form, why = _compare(tower, family, dtypes, report, is_first=True)
        reasons_by_dtypes[dtypes] = None  # compared; `why_not_fast` holds the verdict
    except ValueError as error:
        why = str(error)
    if why is not None:
        why = _refusal(tower, family, why)
    return Proof(
        key=Key(type(tower), ""),
        why_not_fast=why,
        why_not_metadata=why,
        classes=code.classes,
        code=code,
        trusted=family.trusted_classes(tower),
        form=form,
        reasons_by_dtypes=reasons_by_dtypes,
        report=report,
    )


def reasons_of_call(
    tower: Tower, family: CopyFamily, proof: Proof, dtypes: CallDtypes, options: Mapping[str, object]
) -> list[str]:
    """Return why a call must run the copy's own forward: unknown arguments, or a dtype that was refused."""
    unknown = [name for name in options if name not in family.arguments]
    returns_fields = isinstance(proof.form, Form) and bool(proof.form.fields)
    if returns_fields and options.get("return_dict") is True:  # that is what it returns anyway
        unknown.remove("return_dict")
    if unknown:
        return [f"the argument {unknown[0]} is given, which the proof of a copy does not cover"]
    if dtypes not in proof.reasons_by_dtypes:
        try:
            why = _compare(tower, family, dtypes, proof.report, is_first=False)[1]
        except ValueError as error:
            why = str(error)
        proof.reasons_by_dtypes[dtypes] = why and _refusal(tower, family, why)
        if why is not None:
            warn_once(f"{type(tower).__name__} stays stock in {dtypes}: {proof.reasons_by_dtypes[dtypes]}")
    reason = proof.reasons_by_dtypes[dtypes]
    return [] if reason is None else [reason]


def _refusal(tower: nn.Module, family: CopyFamily, why: str) -> str:
    return f"{type(tower).__name__} is no copy of {family.name}: {why}"


def _compare(
    tower: Tower, family: CopyFamily, dtypes: CallDtypes, report: Report, *, is_first: bool
) -> tuple[Form | type | None, str | None]:
    """Run the trials apart from the caller's modes; ValueError where the copy cannot be run."""
    started = time.perf_counter()
    device = family.parts(tower).projection.weight.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    try:
        return machine.run_isolated(_run_trials, stream, tower, family, dtypes, report, is_first)
    except Exception as error:  # remote code may raise anything
        raise ValueError(f"it could not be run beside our operations in {dtypes}: {one_line(error)}") from error
    finally:
        report.seconds += time.perf_counter() - started


def _run_trials(
    stream: torch.cuda.Stream | None,
    tower: Tower,
    family: CopyFamily,
    dtypes: CallDtypes,
    report: Report,
    is_first: bool,
) -> tuple[Form | type | None, str | None]:
    """Compare a copy with our operations, in fp32 and in the dtypes of calls.

    Args:
        stream: The stream that may still write the weights; None for none.

    Returns:
        The form of its results; and how far it is off, and where. None if it is not.
    """
    with torch.cuda.stream(stream):
        exact = Subject(clone_of(tower, torch.float32), family, CallDtypes(torch.float32), report=report)
        own = None if dtypes == exact.dtypes else Subject(clone_of(tower), family, dtypes, report=report)
        grids = grids_of(exact.tower, family)
        for trial in all_trials(grids):
            if not is_first and not trial.is_of_rounding:
                continue
            with exact_products():
                theirs, why = compare(exact, trial)
                if why is not None:
                    return theirs.form, why
            if own is not None and (dtypes.is_exact or trial.is_of_rounding):
                why = compare(own, trial, None if dtypes.is_exact else theirs)[1]
                if why is not None:
                    return theirs.form, why
        if is_first:
            with exact_products():
                draw_weights(exact.tower)
                why = compare(exact, first_trial(grids))[1]
                if why is None:
                    shrink_weights(exact.tower)
                    why = compare(exact, trial_of_small_weights(grids))[1]
            why = why and f"with random weights, {why}"
        return theirs.form, why
