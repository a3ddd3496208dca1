"""Examines this machine for `hf-vit-accel doctor`: which backends run here, and whether their results are right.

`T` packed rows, `H` heads, `D` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

import hf_vit_accel
from hf_vit_accel import backends, machine
from hf_vit_accel.backends import Backend, LayerKind, Request
from hf_vit_accel.backends.base import TRIAL_HEADS, plan_alone, trial_error, trial_scale
from hf_vit_accel.layout import Segments
from hf_vit_accel.versions import untested

LENGTHS = (1, 64, 64, 37, 200)
"""Rows of the segments: a single row, two equal segments in a row, and lengths that fill no tile of a kernel."""
HEAD_DIMS = (64, 72, 80)
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}
BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative L2 error per dtype: a few times the error of rounding weights and results to it."""

Status = Literal["usable", "unusable", "wrong"]


# The help of `doctor` describes the fields of all reports: they are the keys of its JSON object.
@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device."""

    index: int
    name: str
    capability: str
    memory: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """One run of a backend, compared with the reference."""

    device: str
    dtype: str
    head_dim: int
    packed: bool
    grad: bool
    bound: float
    error: float | None
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class BackendVerdict:
    """The verdict on one backend, with all runs of it."""

    name: str
    status: Status
    reasons: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The backends that attention="auto" takes, by kind of layer."""

    device: str
    dtype: str
    head_dim: int
    layers: Mapping[str, str]
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `examine`."""

    ok: bool
    versions: Mapping[str, str | None]
    untested: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    devices: Mapping[str, tuple[str, ...]]
    backends: tuple[BackendVerdict, ...]
    auto: Auto


def examine() -> Report:
    """Probe the machine, run every backend of `backends.BACKENDS` that is usable on it, and resolve "auto"."""
    gpus, gpu_problem, best = _gpus()
    devices = [torch.device("cpu")]
    if best.type == "cuda":
        devices.append(best)
    verdicts = tuple(_examine_backend(backend, devices) for backend in backends.BACKENDS)
    return Report(
        ok=gpu_problem is None and all(verdict.status != "wrong" for verdict in verdicts),
        versions={**machine.versions(), "hf-vit-accel": hf_vit_accel.__version__},
        untested=tuple(untested()),
        gpus=gpus,
        gpu_problem=gpu_problem,
        devices={str(device): tuple(_name(dtype) for dtype in DTYPES[device.type]) for device in devices},
        backends=verdicts,
        auto=_resolve_auto(best),
    )


def _gpus() -> tuple[tuple[Gpu, ...], str | None, torch.device]:
    """Return the CUDA devices, why they cannot be used although torch sees them, and the device to run on."""
    if not machine.has_cuda():
        return (), None, torch.device("cpu")
    gpus = []
    try:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            capability = f"{found.major}.{found.minor}"
            gpus.append(Gpu(index=index, name=found.name, capability=capability, memory=found.total_memory))
        return tuple(gpus), None, torch.device("cuda", torch.cuda.current_device())
    except Exception as error:  # a full GPU, or another process holds it; the report goes on without it
        return (), machine.one_line(error), torch.device("cpu")


def _examine_backend(backend: Backend, devices: Sequence[torch.device]) -> BackendVerdict:
    """Run one backend on every device, dtype and head dim that it takes, with q, k and v packed and separate.

    A backend that serves gradients also runs with them.
    """
    reasons = backend.reasons_against_machine()
    if reasons:
        return BackendVerdict(name=backend.name, status="unusable", reasons=tuple(reasons))
    requests = [request for request in _requests(devices) if not backend.reasons_against(request)]
    if not requests:
        reason = "it takes none of the devices, dtypes and head dims that are checked"
        return BackendVerdict(name=backend.name, status="unusable", reasons=(reason,))
    checks = tuple(_check(backend, request) for request in requests)
    is_wrong = any(check.problem is not None for check in checks)
    return BackendVerdict(name=backend.name, status="wrong" if is_wrong else "usable", checks=checks)


def _requests(devices: Sequence[torch.device]) -> Iterator[Request]:
    """Yield every case that is checked."""
    for device in devices:
        for dtype in DTYPES[device.type]:
            for head_dim in HEAD_DIMS:
                for packed in (False, True):
                    for grad in (False, True):
                        yield _request(device, dtype, head_dim, packed=packed, grad=grad)


def _request(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    packed: bool,
    grad: bool = False,
    kind: LayerKind = "full",
) -> Request:
    return Request(
        device=device,
        dtype=dtype,
        heads=TRIAL_HEADS,
        head_dim=head_dim,
        scale=trial_scale(head_dim),
        kind=kind,
        packed=packed,
        grad=grad,
    )


def _check(backend: Backend, request: Request) -> Check:
    """Try a backend as the backends try themselves. An exception becomes the check's problem."""
    segments = Segments(np.array(LENGTHS, dtype=np.int32))

    def attend(qkv_T3HD: Tensor) -> Tensor:
        qkv = qkv_T3HD.unbind(1)
        q_THD, k_THD, v_THD = qkv if request.packed else (x_THD.contiguous() for x_THD in qkv)
        return plan_alone(backend, segments, request).attend(q_THD, k_THD, v_THD)

    bound = BOUNDS[request.dtype]
    error: float | None = None
    problem: str | None = None
    try:
        error = trial_error(attend, LENGTHS, request.device, request.dtype, request.head_dim, grad=request.grad)
    except Exception as raised:
        problem = machine.one_line(raised)
    if error is not None and not math.isfinite(error):
        error = None
        problem = "the result holds NaN or infinity"
    elif error is not None and error > bound:
        problem = f"relative error {error:.1e}, at most {bound:.0e} is allowed"
    return Check(
        device=str(request.device),
        dtype=_name(request.dtype),
        head_dim=request.head_dim,
        packed=request.packed,
        grad=request.grad,
        bound=bound,
        error=error,
        problem=problem,
    )


def _resolve_auto(device: torch.device) -> Auto:
    """Resolve "auto" for a device, in bf16 on CUDA and fp32 on CPU, without gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head_dim = HEAD_DIMS[-1]
    layers: dict[str, str] = {}
    problem = None
    try:
        for kind in get_args(LayerKind):
            request = _request(device, dtype, head_dim, packed=True, kind=kind)
            layers[kind] = backends.resolve("auto", request).backend.name
    except Exception as error:
        problem = machine.one_line(error)
    return Auto(device=str(device), dtype=_name(dtype), head_dim=head_dim, layers=layers, problem=problem)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_WITHOUT_VERSION = {"cuda": "none (torch is built without CUDA)", "cudnn": "not looked at without a CUDA device"}
"""The text in place of a version, where it is another than "none"."""


def lines(report: Report) -> Iterator[str]:
    """Yield the report as lines of plain text."""
    yield "Versions"
    width = max(len(name) for name in report.versions)
    for name, version in report.versions.items():
        yield f"  {name:{width}}  {version or _WITHOUT_VERSION.get(name, 'none')}"
    for line in report.untested:
        yield f"  not tested: {line}"

    yield "GPU"
    if report.gpu_problem is not None:
        yield f"  not usable: {report.gpu_problem}"
    elif not report.gpus:
        yield "  none (torch finds no CUDA device)"
    for gpu in report.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        yield f"  cuda:{gpu.index}  {gpu.name}, compute capability {gpu.capability}, {memory}"

    devices = "; ".join(f"{device} in {', '.join(dtypes)}" for device, dtypes in report.devices.items())
    yield f"Backends, each in what it takes: {devices}; head dims {', '.join(map(str, HEAD_DIMS))}"
    for verdict in report.backends:
        yield from _backend_lines(verdict)

    wrong = [verdict.name for verdict in report.backends if verdict.status == "wrong"]
    yield f'attention="auto" takes on {report.auto.device} in {report.auto.dtype}'
    if report.auto.problem is not None:
        yield f"  unknown: {report.auto.problem}"
    for kind, name in report.auto.layers.items():
        warning = " (WRONG here, name another)" if name in wrong else ""
        yield f"  {kind + ' layers':13}  {name}{warning}"

    yield "Result"
    if wrong:
        yield f"  wrong or crashed: {', '.join(wrong)}"
    else:
        yield "  every backend that was run agrees with the reference"
    if report.gpu_problem is not None:
        yield "  the GPU that is here cannot be used"


def _backend_lines(verdict: BackendVerdict) -> Iterator[str]:
    """Yield a backend's verdict: its reasons, how many checks passed, and every other check with its problem."""
    yield f"  {verdict.name:17}  {'WRONG' if verdict.status == 'wrong' else verdict.status}"
    for reason in verdict.reasons:
        yield f"    - {reason}"
    errors = [check.error for check in verdict.checks if check.problem is None and check.error is not None]
    if errors:
        yield f"    {len(errors)} of {len(verdict.checks)} passed, largest error {max(errors):.1e}"
    for check in verdict.checks:
        if check.problem is not None:
            layout = "packed" if check.packed else "separate"
            layout += ", with gradients" if check.grad else ""
            yield f"    {check.device}, {check.dtype}, head dim {check.head_dim} {layout}: {check.problem}"
