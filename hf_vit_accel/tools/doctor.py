"""What runs on this machine, and whether it computes the right thing: the logic of `hf-vit-accel doctor`.

`T` packed rows, `H` heads, `D` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product
from typing import Literal, get_args

import numpy as np
import torch

import hf_vit_accel
from hf_vit_accel import backends, machine
from hf_vit_accel.backends import Backend, Kind, Request
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.window_attention import attention_reference

LENGTHS = (1, 64, 64, 37, 200)
"""Rows of the segments: a single one, two equal ones that stand together, and ones that fill no tile of a kernel."""
HEADS = 4
HEAD_DIMS = (64, 72, 80)
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}
BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative L2 error: a few times what rounding the weights and the result to the dtype costs."""
SEED = 20240229

Status = Literal["usable", "unusable", "wrong", "unchecked"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device. capability: "major.minor". memory: bytes."""

    index: int
    name: str
    capability: str
    memory: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """One run of a backend. error: relative L2, None without a finite one. problem: None where it passed."""

    device: str
    dtype: str
    head_dim: int
    packed: bool
    bound: float
    error: float | None
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came out for one backend. reasons: everything that stands against running or checking it."""

    name: str
    status: Status
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Auto:
    """What attention="auto" takes for each kind of layer; problem: why that could not be told, or None."""

    device: str
    dtype: str
    head_dim: int
    layers: Mapping[str, str]
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that doctor found; its fields are the keys of `doctor --json`."""

    ok: bool
    versions: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    devices: Mapping[str, tuple[str, ...]]
    backends: tuple[Verdict, ...]
    auto: Auto


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one CPU thread: for work this small, several on busy cores took 4.2 s instead of 0.08 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def examine() -> Report:
    """Ask the machine, run every backend of `backends.BACKENDS` that is usable on it, and resolve "auto"."""
    gpus, gpu_problem, best = _gpus()
    devices = [torch.device("cpu")] + ([best] if best.type == "cuda" else [])
    lost: dict[torch.device, str] = {}
    verdicts = tuple(_examine_backend(backend, devices, lost) for backend in backends.BACKENDS)
    return Report(
        ok=gpu_problem is None and all(verdict.status != "wrong" for verdict in verdicts),
        versions={**machine.versions(), "hf-vit-accel": hf_vit_accel.__version__},
        gpus=gpus,
        gpu_problem=gpu_problem,
        devices={str(device): tuple(_name(dtype) for dtype in DTYPES[device.type]) for device in devices},
        backends=verdicts,
        auto=_resolve_auto(best),
    )


def _gpus() -> tuple[tuple[Gpu, ...], str | None, torch.device]:
    """The CUDA devices, why they cannot be used although torch sees them, and the device to run on."""
    if not machine.has_cuda():
        return (), None, torch.device("cpu")
    try:
        gpus = tuple(
            Gpu(
                index=index,
                name=machine.cuda_device_name(index),
                capability="{}.{}".format(*machine.cuda_capability(index)),
                memory=torch.cuda.get_device_properties(index).total_memory,
            )
            for index in range(torch.cuda.device_count())
        )
        return gpus, None, torch.device("cuda", torch.cuda.current_device())
    except Exception as error:  # a GPU that is full or taken exclusively: the rest can still be told
        return (), machine.one_line(error), torch.device("cpu")


def _examine_backend(backend: Backend, devices: Sequence[torch.device], lost: dict[torch.device, str]) -> Verdict:
    """Run one backend on every device, dtype, head dim and layout that it takes.

    lost: devices that no longer work and why; one on which this backend breaks everything is added.
    """
    try:
        against = backend.reasons_against_machine()
    except Exception as error:
        return Verdict(name=backend.name, status="wrong", reasons=(machine.one_line(error),), checks=())
    if against:
        return Verdict(name=backend.name, status="unusable", reasons=tuple(against), checks=())
    checks: list[Check] = []
    reasons: dict[str, None] = {}  # in order, each once
    cases = (case for at in devices for case in product([at], DTYPES[at.type], HEAD_DIMS, (False, True)))
    for device, dtype, head_dim, packed in cases:
        request = _request(device, dtype, head_dim, packed=packed)
        if backend.reasons_against(request):
            continue
        if device in lost:
            reasons[lost[device]] = None
            continue
        checks.append(_check(backend, request))
        if checks[-1].problem is not None and not _still_works(device):
            lost[device] = f"{device} stopped working while {backend.name} ran; nothing more was run on it"
    if not checks and not reasons:
        reasons["it takes none of the devices, dtypes and head dims that are checked"] = None
    status: Status = "usable" if checks else "unchecked"
    status = "wrong" if any(check.problem is not None for check in checks) else status
    return Verdict(name=backend.name, status=status, reasons=tuple(reasons), checks=tuple(checks))


def _request(device: torch.device, dtype: torch.dtype, head_dim: int, *, packed: bool, kind: Kind = "full") -> Request:
    return Request(
        device=device, dtype=dtype, heads=HEADS, head_dim=head_dim, scale=head_dim**-0.5, kind=kind, packed=packed
    )


def _check(backend: Backend, request: Request) -> Check:
    """Run a backend once on random rows and compare; whatever it raises becomes the check's problem."""
    bound, error, problem = BOUNDS[request.dtype], None, None
    try:
        error = _relative_error(backend, request)
        if not math.isfinite(error):
            error, problem = None, "the result holds NaN or infinity"
        elif error > bound:
            problem = f"relative error {error:.1e}, at most {bound:.0e} is allowed"
    except Exception as raised:
        problem = machine.one_line(raised)
    return Check(
        device=str(request.device),
        dtype=_name(request.dtype),
        head_dim=request.head_dim,
        packed=request.packed,
        bound=bound,
        error=error,
        problem=problem,
    )


@torch.no_grad()
def _relative_error(backend: Backend, request: Request) -> float:
    """|out - reference| / |reference| in L2; inputs are rounded to the dtype first, the reference is float64 on CPU."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    shape = sum(LENGTHS), 3, request.heads, request.head_dim
    host_T3HD = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(request.dtype)
    qkv = host_T3HD.to(request.device).unbind(1)
    q_THD, k_THD, v_THD = qkv if request.packed else (x_THD.contiguous() for x_THD in qkv)

    segments = Segments(np.array(LENGTHS, dtype=np.int32))
    out_THD = backends.plan_alone(backend, segments, request).attend(q_THD, k_THD, v_THD)
    if out_THD.shape != q_THD.shape or out_THD.dtype != q_THD.dtype:
        raise ValueError(
            f"expected {_name(q_THD.dtype)} of shape {tuple(q_THD.shape)}, "
            f"got {_name(out_THD.dtype)} of shape {tuple(out_THD.shape)}"
        )
    expected_THD = attention_reference(host_T3HD.double(), LENGTHS, request.scale)
    difference_THD = out_THD.cpu().double() - expected_THD
    return float(difference_THD.norm() / expected_THD.norm())


def _still_works(device: torch.device) -> bool:
    """Whether a device survived a failed check: after a fault in a kernel every later CUDA call fails too."""
    try:
        return bool(torch.ones(1, device=device).item() == 1)
    except Exception:
        return False


def _resolve_auto(device: torch.device) -> Auto:
    """What "auto" takes on the device, in bf16 on CUDA and fp32 on CPU, without gradients."""
    dtype, head_dim = torch.bfloat16 if device.type == "cuda" else torch.float32, HEAD_DIMS[-1]
    layers, problem = {}, None
    try:
        for kind in get_args(Kind):
            request = _request(device, dtype, head_dim, packed=True, kind=kind)
            layers[kind] = backends.resolve("auto", request).backend.name
    except Exception as error:
        problem = machine.one_line(error)
    return Auto(device=str(device), dtype=_name(dtype), head_dim=head_dim, layers=layers, problem=problem)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lines(report: Report) -> Iterator[str]:
    """The report as plain text."""
    yield "Versions"
    width = max(map(len, report.versions))
    for name, version in report.versions.items():
        yield f"  {name:{width}}  {version or 'none'}"

    yield "GPU"
    if report.gpu_problem is not None:
        yield f"  not usable: {report.gpu_problem}"
    elif not report.gpus:
        yield "  none (torch finds no CUDA device)"
    for gpu in report.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        yield f"  cuda:{gpu.index}  {gpu.name}, compute capability {gpu.capability}, {memory}"

    yield "Checked (each backend in what it takes; the largest relative L2 error allowed in parentheses)"
    for device, dtypes in report.devices.items():
        yield f"  {device:9}  " + ", ".join(f"{dtype} ({BOUNDS[getattr(torch, dtype)]:.0e})" for dtype in dtypes)
    yield f"  segments   {', '.join(map(str, LENGTHS))} rows"
    yield f"  head dims  {', '.join(map(str, HEAD_DIMS))}; {HEADS} heads; q, k, v separate and packed"

    yield "Backends"
    width = max(len(verdict.name) for verdict in report.backends)
    for verdict in report.backends:
        yield f"  {verdict.name:{width}}  {'WRONG' if verdict.status == 'wrong' else verdict.status}"
        yield from (f"    - {reason}" for reason in verdict.reasons)
        for (device, dtype), group in groupby(verdict.checks, key=lambda check: (check.device, check.dtype)):
            yield from (f"    {device:6}  {dtype:8}  {outcome}" for outcome in _outcomes(list(group)))

    auto, wrong = report.auto, [verdict.name for verdict in report.backends if verdict.status == "wrong"]
    yield f'attention="auto" takes on {auto.device} in {auto.dtype}'
    if auto.problem is not None:
        yield f"  unknown: {auto.problem}"
    for kind, name in auto.layers.items():
        yield f"  {kind + ' layers':13}  {name}{' (WRONG here, name another)' if name in wrong else ''}"

    yield "Result"
    if wrong:
        yield f"  wrong or crashed: {', '.join(wrong)}"
    else:
        yield "  every backend that was run agrees with the reference"
    if report.gpu_problem is not None:
        yield "  the GPU that is here cannot be used"


def _outcomes(checks: Sequence[Check]) -> Iterator[str]:
    """One line for all checks that passed, and one for each distinct problem with where it arose."""
    errors = [check.error for check in checks if check.problem is None and check.error is not None]
    if errors:
        yield f"{len(errors)} of {len(checks)} passed, largest error {max(errors):.1e}"
    where: dict[str, list[str]] = {}
    for check in checks:
        if check.problem is not None:
            where.setdefault(check.problem, []).append(f"{check.head_dim} {'packed' if check.packed else 'separate'}")
    yield from (f"{problem} [head dim {', '.join(places)}]" for problem, places in where.items())
