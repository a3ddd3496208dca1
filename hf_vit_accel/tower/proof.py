"""Proof, by running, that our operations compute what transformers' code computes.

The fast path computes what a tower, its blocks and its attention compute without calling them. Whether they still
compute that is not read from their code: a tiny tower of the same class, the twin, runs beside our operations.
Outputs and gradients are compared, over grids that tell layouts apart.

The twin sees nothing of the process around it. It lives on the CPU in fp64, which no matmul precision reduces, in a
thread of its own, which inherits no mode. Its parameters are drawn anew, wherever a patched torch has put them. Its
attention is plain torch, since the choice of SDP kernels is process-wide. Its modules skip global hooks.

Code that other libraries put in transformers' place may run on a GPU only, such as Liger's Triton function for the
rotation. Then the twin lives on the device of the tower, and the proof holds for that kind of device alone.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import transformers
from torch import nn

from hf_vit_accel import machine, versions
from hf_vit_accel.engine.encoder import CalledBlock, encode
from hf_vit_accel.engine.route import ROUTE, make_route
from hf_vit_accel.families import Config, Family, Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.families.interface import Form, named_tensors
from hf_vit_accel.machine import one_line
from hf_vit_accel.tower.code import Code, watch_state
from hf_vit_accel.tower.differences import CallDtypes, Report, Results, furthest
from hf_vit_accel.tower.exchanged import form_of, place_of
from hf_vit_accel.tower.trials import (
    Subject,
    Trial,
    all_trials,
    compare,
    first_trial,
    grids_of,
    trial_of_small_weights,
)
from hf_vit_accel.tower.twin import (
    ARGUMENTS,
    STOCK,
    Isolated,
    build_twin,
    clone_of,
    draw_weights,
    exact_products,
    shrink_weights,
)

NAMES = {"flashinfer_cudnn": "flashinfer_cudnn", "flash_vit_auto": "auto"}
"""Name that is registered with transformers -> the `attention` of `patch` that it stands for."""


def name_for(attention: str) -> str:
    """Return the registered name under which a tower with this `attention` runs: both reach the same function."""
    return attention if attention in NAMES else "flash_vit_auto"


Exchanged = Mapping[str, Sequence[nn.Module]]
"""Modules that other code put in, by their place: see `tower.exchanged`."""
_DTYPES = (torch.float64, torch.float32)
"""Of twins: no setting reduces the precision of products in fp64; the grouped products of experts take fp32 only."""


class Key(NamedTuple):
    """What a proof is for: a class, the fields of its config that the run depended on, and the kind of device.

    A proof on the CPU serves all devices. `exchanged` has the forms of modules that other code put in, by their place.
    """

    kind: type
    fields: str
    exchanged: frozenset[tuple[str, Hashable]] = frozenset()
    device_type: str = "cpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """The result of running towers of a class, or a copy, beside our operations.

    Attributes:
        why_not_fast: Why our operations may not take the place of its forward; None where that is proven. So are the
            other reasons: against metadata of ours, autocast, gradients and hidden states.
        taken: The keyword arguments of ours that its forward takes.
        form: The form of its outputs; None where it could not be run.
        replaced: The places of modules that other code put in, which our operations did without.
        returns_hidden_states: Whether its forward returns them at all. Older ones ignore the request.
        block_arguments: The names of the keyword arguments that it passes to blocks; None where ours are not equal.
        is_verdict: Whether numbers were compared. A verdict stands; else the next reading tries again.
        trusted: Classes of other code than torch's and transformers' that the run covers, for a copy.
        reasons_by_dtypes: Why calls of a copy in these dtypes must run its own forward; None where they need not.
    """

    key: Key
    why_not_fast: str | None
    why_not_metadata: str | None
    code: Code
    why_not_autocast: str | None = None
    why_not_gradients: str | None = None
    why_not_hidden_states: str | None = "output_hidden_states is requested"
    taken: frozenset[str] = frozenset()
    form: Form | None = None
    replaced: frozenset[str] = frozenset()
    returns_hidden_states: bool = False
    block_arguments: frozenset[str] | None = None
    is_verdict: bool = True
    trusted: frozenset[type] = frozenset()
    reasons_by_dtypes: dict[CallDtypes, str | None] = field(default_factory=dict)
    report: Report = field(default_factory=Report)


_PROOFS: dict[Key, Proof] = {}
_WARNED: set[str] = set()


def prove(tower: nn.Module, family: Family, exchanged: Exchanged | None = None) -> Proof:
    """Return the proof for a tower's class and config, made once per process and code in 50 to 150 ms.

    The caller's random numbers stay as they are. Two threads may both make a proof: nothing is locked, so forks are
    safe. If the modules that other code put in keep our operations from running, they are left out.
    """
    exchanged = exchanged or {}
    kind = family.tower_class(tower)
    assert kind is not None, f"`towers` names no class of {type(tower).__name__} that has a forward"
    config: Config = tower.config
    unread_fields = _UNREAD_FIELDS | family.tiny.keys()
    fields = repr(sorted((name, repr(value)) for name, value in config.to_dict().items() if name not in unread_fields))
    device = next((parameter.device for parameter in tower.parameters()), torch.device("meta"))
    devices = [torch.device("cpu")] + ([] if device.type in ("cpu", "meta") else [device])
    forms = frozenset((place, form_of(modules[0])) for place, modules in exchanged.items())
    keys = {Key(kind, fields, forms, device.type): device for device in devices}
    proof = next((_PROOFS[key] for key in keys if key in _PROOFS and _PROOFS[key].code.watch.unchanged()), None)
    if proof is None:
        for key, proving_device in keys.items():
            proof = machine.run_isolated(_prove, key, proving_device, config, family, exchanged)
            if proof.is_verdict:
                _PROOFS[key] = proof
                break
    assert proof is not None
    if exchanged and not (proof.is_verdict and proof.why_not_fast is None):
        return prove(tower, family)
    return proof


def warn_stock(kind: type, proof: Proof, reasons: list[str]) -> None:
    """Warn once per class and reason that towers of a class stay stock; `status` gives the same reason."""
    name = kind.__name__
    why = proof.why_not_metadata or proof.why_not_fast
    if why is None and reasons and kind is not proof.code.kind:
        text = f"{name} stays stock: {reasons[0]}. Only towers of transformers' own classes are accelerated."
    elif why is None:
        return
    elif not proof.is_verdict:
        if machine.has_cuda() and proof.key.device_type == "cpu":
            return  # patched on the CPU, with code of others that runs on a GPU only: the tower will move there
        text = f"{why}. {name} stays stock until it is patched again, or changes."
    else:
        text = f"transformers {transformers.__version__}: {why}. {name} stays stock; look for a newer hf_vit_accel."
    warn_once(text)


def warn_once(text: str) -> None:
    """Warn, unless the same was said before in this process."""
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, stacklevel=3)


# Fields of a config that choose between no ways to compute.
_UNREAD_FIELDS = {"dtype", "model_type", "transformers_version", "name_or_path", "_name_or_path", "architectures"}
_UNREAD_FIELDS |= {"initializer_range", "id2label", "label2id", "problem_type"}
# The twin and every call set or read these themselves.
_UNREAD_FIELDS |= {"attn_implementation", "attention_dropout"}
_UNREAD_FIELDS |= {"return_dict", "output_hidden_states", "output_attentions"}


def _prove(key: Key, device: torch.device, config: Config, family: Family, exchanged: Exchanged) -> Proof:
    """Run a twin beside our operations; an error on the way is no verdict."""
    kind = key.kind
    classes: frozenset[type] = frozenset()
    why = ""
    is_cuda = device.type == "cuda"
    # Threads share the precision of products: it is set only where products would be rounded.
    with torch.cuda.device(device) if is_cuda else nullcontext(), exact_products() if is_cuda else nullcontext():
        for dtype in _DTYPES:
            try:
                with Isolated():
                    twin = build_twin(kind, config, family, exchanged, device, dtype)
                    classes = frozenset(type(module) for module in twin.modules())
                    return _prove_twin(key, twin, family, Code(kind, classes), exchanged)
            except Exception as error:
                why = f"{kind.__name__} could not be run beside our operations: {one_line(error)}"
    code = Code(kind, classes)
    return Proof(key=key, why_not_fast=why, why_not_metadata=why, code=code, is_verdict=False)


def _prove_twin(key: Key, twin: Tower, family: Family, code: Code, exchanged: Exchanged) -> Proof:
    """Return why our operations are not the twin's forward, and which metadata of ours its forward takes."""
    parameters = inspect.signature(type(twin).forward).parameters
    unknown = [name for name in family.arguments if name not in parameters]
    why: str | None = None
    if unknown:
        why = f"{type(twin).__name__} takes other arguments than {family.name} is known for: no {unknown[0]}"
    else:
        try:
            family.parts(twin)
            family.geometry(twin)
        except (AttributeError, TypeError, ValueError) as error:
            why = f"{type(twin).__name__} is not built as {family.name} is known: {one_line(error)}"
    if why is not None:
        return Proof(key=key, why_not_fast=why, why_not_metadata=why, code=code)
    name = type(twin).__name__
    other = f"{name} computes something else than our operations"
    modules = {module: place for path, module in twin.named_modules() if (place := place_of(path)) in exchanged}
    subject = Subject(twin, family, CallDtypes(family.parts(twin).projection.weight.dtype), frozenset(modules))
    grids = grids_of(twin, family)
    first = first_trial(grids)
    why_not_fast: str | None = None
    try:
        expected, why_not_states = compare(subject, replace(first, hidden_states=True))
    except TypeError as error:
        why_not_states = f"{name} does not take the request ({one_line(error)})"
    if why_not_states is not None:
        expected, why_not_fast = compare(subject, first)
    why_not_gradients: str | None = None
    if why_not_fast is not None and exchanged:
        why_not_gradients = why_not_fast
        expected, why_not_fast = compare(subject, replace(first, grad=False))
    taken, why_not_metadata = _injectable(subject, first, expected, versions.popped_by(code.called_names()))
    block_arguments = _block_arguments(subject, first)
    if why_not_fast is None:
        one_image = Trial({"one image": grids["one image"]}, training=False, grad=False)
        why_not_fast = compare(subject, one_image)[1]
    why_not_autocast: str | None = None
    if why_not_fast is None:
        cast = replace(subject, tower=twin.float(), dtypes=CallDtypes(torch.float32, torch.bfloat16))
        trial = replace(first, grad=False, hidden_states=why_not_states is None)
        why_not_autocast = compare(cast, trial)[1]
        if why_not_autocast is not None and why_not_states is None:
            why_not_states = why_not_autocast
            why_not_autocast = compare(cast, replace(trial, hidden_states=False))[1]
        shrink_weights(twin.to(subject.dtypes.weights_dtype))
        why_not_fast = compare(replace(subject), trial_of_small_weights(grids))[1]
    return Proof(
        key=key,
        why_not_fast=why_not_fast and f"{other}: {why_not_fast}",
        why_not_metadata=why_not_metadata,
        why_not_autocast=why_not_autocast and f"{other} under autocast: {why_not_autocast}",
        why_not_gradients=why_not_gradients and f"proven without gradients alone: {why_not_gradients}",
        replaced=_places_replaced(subject, first, modules) if why_not_fast is None else frozenset(),
        taken=taken,
        form=expected.form,
        code=code,
        why_not_hidden_states=why_not_states and f"output_hidden_states is requested: {why_not_states}",
        returns_hidden_states=any(name.startswith("hidden_states") for name in _outputs(expected)),
        block_arguments=block_arguments,
    )


def _outputs(results: Results) -> dict[str, torch.Tensor]:
    """Return the outputs of a trial of one condition."""
    [outputs] = results.outputs.values()
    return outputs


def _injectable(
    subject: Subject, trial: Trial, expected: Results, popped: frozenset[str]
) -> tuple[frozenset[str], str | None]:
    """Return the keyword arguments that stock takes of us, and why it takes none that it should."""
    first: str | None = None
    for taken in (popped | {ROUTE}, frozenset({ROUTE}), frozenset[str]()):
        why = _compare_injected(subject, trial, expected, taken)
        if why is None:
            return taken, None
        first = first or why
    return frozenset(), first


@torch.no_grad()
def _compare_injected(subject: Subject, trial: Trial, expected: Results, taken: frozenset[str]) -> str | None:
    """Return why stock may not be given our metadata: it raises, or computes something else."""
    twin = subject.tower
    name = type(twin).__name__
    [grid] = trial.grids.values()
    metadata = make_route(grid, replace(subject.spec, ops=None)).bound.injected(taken)
    twin.config._attn_implementation_internal = "flash_vit_auto"
    try:
        outputs = named_tensors(subject.call(subject.draw_pixels(grid), grid, **metadata))
    except Exception as error:
        return f"{name} does not take our metadata: {one_line(error)}"
    finally:
        twin.config._attn_implementation_internal = STOCK
    stock = {field: tensor for field, tensor in _outputs(expected).items() if not field.startswith("hidden_states")}
    if outputs.keys() != stock.keys():
        return f"{name} returns {', '.join(outputs)} with our metadata, instead of {', '.join(stock)}"
    largest = furthest(outputs, stock)[1]
    if largest <= subject.dtypes.bound:
        return None
    return f"{name} computes something else with our metadata (relative error {largest:.1e})"


@torch.no_grad()
def _places_replaced(subject: Subject, trial: Trial, places: Mapping[nn.Module, str]) -> frozenset[str]:
    """Return the places of those modules that our operations never call."""
    for module in places:
        vars(module).pop(ARGUMENTS, None)
    [grid] = trial.grids.values()
    encode(make_route(grid, subject.spec).bound, subject.draw_pixels(grid))
    called = {place for module, place in places.items() if ARGUMENTS in vars(module)}
    return frozenset(places.values()) - called


@torch.no_grad()
def _block_arguments(subject: Subject, trial: Trial) -> frozenset[str] | None:
    """Return the names of the keyword arguments that blocks got in the last run; None where ours are not equal."""
    calls = [vars(block.module)[ARGUMENTS] for block in subject.parts.blocks[:2]]  # of both kinds
    if ROUTE not in calls[0][1]:
        return None
    names = frozenset(calls[0][1]) - {ROUTE}
    ours: list[object] = []

    def keep_arguments(x_TE: torch.Tensor, **arguments: object) -> torch.Tensor:
        ours.append([x_TE.clone(), arguments])
        return calls[1][0][0].clone()

    [grid] = trial.grids.values()
    route = make_route(grid, subject.spec).bound
    blocks = {layer: CalledBlock(keep_arguments, route.block_arguments(layer, names)) for layer in (0, 1)}
    encode(route, subject.draw_pixels(grid), blocks_to_call=blocks)
    bound = subject.dtypes.bound
    try:
        stock = [[x_TE, {name: kwargs[name] for name in kwargs if name != ROUTE}] for (x_TE,), kwargs in calls]
        torch.testing.assert_close(ours, stock, rtol=bound, atol=bound)
    except (AssertionError, TypeError, ValueError):
        return None
    return names


# --- copies -------------------------------------------------------------------------------------------------------
# The class of a copy may act on anything. So a clone of the copy itself runs, at its own depth, with its own buffers
# and config: see `tower/trials.py`. Calls in another dtype, or under autocast, are proven when the first of them comes.


def prove_copy(tower: Tower, family: CopyFamily) -> Proof:
    """Run the proof of a copy as it is now, for calls in the dtype of its weights without autocast."""
    kind = next(owner for owner in type(tower).__mro__ if "forward" in vars(owner))
    code = Code(kind, frozenset(type(module) for module in tower.modules()))
    report = Report()
    form: Form | None = None
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
    returns_fields = proof.form is not None and bool(proof.form.fields)
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
) -> tuple[Form | None, str | None]:
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
) -> tuple[Form | None, str | None]:
    """Compare a copy with our operations, in fp32 and in the dtypes of calls; return its form, and how it differs."""
    with torch.cuda.stream(stream):  # which may still write the weights
        trusted = family.trusted_classes(tower)
        exact = Subject(clone_of(tower, torch.float32), family, CallDtypes(torch.float32), trusted, report)
        own = None if dtypes == exact.dtypes else Subject(clone_of(tower), family, dtypes, trusted, report)
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
                draw_weights(exact.tower, exact.parts.projection.weight.device, torch.float32)
                why = compare(exact, first_trial(grids))[1]
                if why is None:
                    shrink_weights(exact.tower)
                    why = compare(exact, trial_of_small_weights(grids))[1]
            why = why and f"with random weights, {why}"
        return theirs.form, why
