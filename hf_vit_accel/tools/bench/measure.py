"""Verify every contender against an fp32 run of the stock tower, then time those that passed, interleaved.

A forward each, or a forward and backward of a tower whose parameters require gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from hf_vit_accel import machine
from hf_vit_accel.engine.inputs import Expected, read
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tools.bench.baselines import Run, stock, trained
from hf_vit_accel.tools.bench.contenders import Contender, check_names, choose
from hf_vit_accel.tools.bench.profile import Part, profile
from hf_vit_accel.tools.bench.towers import SHAPES, build_tower, family_of_tower, matrix_flops, weight_of
from hf_vit_accel.tools.bench.work import Batch, Errors, draw_batch, milliseconds, peak_gigabytes, results, work

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING: Mapping[torch.dtype, float] = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.float32: 1e-5,  # the reference is itself rounded to fp32, layer after layer
}
"""An error that passes in any case."""
WARM_UPS, TIMED = 2, 4
CALLS, STEPS = 2, 5
"""Batches to verify by: a second call meets what the first one cached; errors of gradients in half precision are
measured, which takes more of them than to see that nothing but rounding is wrong."""
_NEAR = 1.25
"""Errors above what is allowed by less than that are compared in more batches, up to four times as many."""
PROMISED, PEERS = 1.1, 2.0
"""Times stock's own error in the dtype: what is allowed, and what is allowed for the gradients of other libraries,
which promise less; a wrong gradient is many times off."""

Status = Literal["timed", "wrong", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out for one contender on one input of one model.

    ms, ms_low, ms_high: median, least and most milliseconds of a forward, or of a forward and backward. floor_ms: the
    input's matrix FLOPs at peak speed, None without one. ratio: ms / floor_ms. speedup: over the first contender of the
    input. worst: of all outputs and gradients the one whose error comes nearest to what passes; error: its relative L2
    error; bound: the largest that passes. error_ratio, error_ratio_mean: error over stock's own in the dtype, the
    largest and the mean of all; None where stock has none. peak_gb: most memory beyond the weights, of a training on
    CUDA. problem: why it is wrong or was skipped. parts: its profile, if asked for.
    """

    model: str
    size: str
    patches: int
    contender: str
    status: Status
    floor_ms: float | None
    bound: float
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    ratio: float | None = None
    speedup: float | None = None
    error: float | None = None
    worst: str | None = None
    error_ratio: float | None = None
    error_ratio_mean: float | None = None
    peak_gb: float | None = None
    problem: str | None = None
    parts: tuple[Part, ...] | None = None


def device_of_choice() -> torch.device:
    """The current CUDA device, or the CPU."""
    return torch.device("cuda" if machine.has_cuda() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 on CUDA, fp32 on CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def bench(
    models: Sequence[str],
    sizes: Mapping[str, Grid],
    *,
    attentions: Sequence[str] | None = None,
    baselines: Sequence[str] = ("sdpa",),
    dtype: torch.dtype | None = None,
    rounds: int = 5,
    peak: float | None = None,
    weights: bool = False,
    with_profile: bool = False,
    train: bool = False,
    checkpointing: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """Build each model's tower, choose the contenders and measure; the rows of one model and size at a time.

    attentions: names of backends and "auto"; None for "auto" and each that can run. peak: TFLOP/s of the floor, None
    for no floor. train: forward and backward, every parameter trained. checkpointing: with gradient checkpointing,
    stock and patched. say: is told what cannot run, before anything does, and then what runs.
    Raises ValueError, before anything runs, for models, contenders and sizes that do not exist or do not fit, and if
    none of the backends that are named can run.
    """
    check_names(attentions or (), baselines)
    if attentions is not None and not [*attentions, *baselines]:
        raise ValueError("expected at least one backend or baseline, got none; there is nothing to time")
    device = device_of_choice()
    chosen_dtype = dtype or default_dtype(device)
    for model in models:
        if weights and (model in SHAPES or Path(model).is_file()):
            raise ValueError(f"expected a checkpoint's folder or hub id for its weights, got {model!r}")
        outline = _prepared(build_tower(model, torch.device("meta"), chosen_dtype), train, checkpointing)
        for grid in sizes.values():
            _check_grid(outline, grid)
        against = [c for c in choose(outline, attentions, (), device=device) if c.against]
        reasons = [f"{contender.name} cannot run: {'; '.join(contender.against)}" for contender in against]
        if attentions and len(against) == len(attentions):
            raise ValueError("; ".join(reasons))
        for reason in reasons:
            say(f"{model}: {reason}")

    def blocks() -> Iterator[list[Row]]:
        for model in models:
            say(f"{model}: building the tower")
            tower = _prepared(build_tower(model, device, chosen_dtype, weights=weights), train, checkpointing)
            contenders = choose(tower, attentions, baselines)
            yield from measure(
                model, tower, sizes, contenders, rounds=rounds, peak=peak, with_profile=with_profile, say=say
            )

    return blocks()


def _prepared(tower: Any, train: bool, checkpointing: bool) -> Any:
    if checkpointing:  # by the name that it has in newer transformers, or in older ones
        (getattr(tower, "activation_checkpointing_enable", None) or tower.gradient_checkpointing_enable)()
    return tower.requires_grad_(True).train() if train else tower


def measure(
    model: str,
    tower: Any,
    sizes: Mapping[str, Grid],
    contenders: Sequence[Contender],
    *,
    rounds: int,
    peak: float | None = None,
    with_profile: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """Verify and time contenders on a stock tower; every one gets modules of its own, and sees no other's traces.

    Parameters, and so gradients, are the tower's own: a copy for each would not fit, where they take a tenth of a GPU.

    with_profile: profile the first patched contender that was timed, else the first baseline.
    """
    reference, train = deepcopy(tower).float(), trained(tower)
    blocks = [block.module for block in family_of_tower(reference).parts(reference).blocks]
    for block in blocks if train else ():  # in fp32 stock keeps more than a GPU may hold
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for size, grid in sizes.items():
        now: Any = lambda what, where=f"{model}, {size}": say(f"{where}: {what}")  # noqa: E731
        floor_ms = (3 if train else 1) * matrix_flops(tower, grid) / (peak * 1e9) if peak else None
        with ExitStack() as stack:
            runs, problems = _open(stack, contenders, tower, grid)
            verdicts, batch = _verify(runs, problems, contenders, reference, tower, grid, now)
            peaks = {name: peak_gigabytes(run, batch) if train else None for name, run in runs.items()}
            steps = {name: partial(work, run, batch) for name, run in runs.items()}
            clear = {name: partial(run.tower.zero_grad, set_to_none=True) for name, run in runs.items()}
            times = _time(steps, rounds, cuda=batch.pixels_TP.is_cuda, now=now, before=clear if train else {})
            profiled = next((c.name for c in sorted(contenders, key=lambda c: c.baseline) if c.name in runs), None)
            parts = None
            if with_profile and profiled is not None:
                layers = len(family_of_tower(tower).parts(tower).blocks)
                parts = profile(steps[profiled], layers, cuda=batch.pixels_TP.is_cuda)
            tower.zero_grad(set_to_none=True)  # a graph's memory may hold what its contenders have left
        first = times.get(contenders[0].name) if contenders else None
        found = []
        for name, verdict in verdicts.items():
            told: dict[str, Any] = dict(
                model=model, size=size, patches=rows_of(grid), contender=name, floor_ms=floor_ms
            )
            told |= dict(bound=verdict.bound, worst=verdict.worst, peak_gb=peaks.get(name))
            told["status"], told["problem"] = problems.get(name, ("timed", None))
            if name in times:
                ms, low, high = statistics.median(times[name]), min(times[name]), max(times[name])
                told |= dict(ms=ms, ms_low=low, ms_high=high, ratio=ms / floor_ms if floor_ms else None)
                told |= dict(speedup=None if first is None else statistics.median(first) / ms)
            if math.isfinite(verdict.error):
                mean = statistics.fmean(verdict.ratios) if verdict.ratios else None
                told |= dict(error=verdict.error, error_ratio=max(verdict.ratios, default=None), error_ratio_mean=mean)
            found.append(Row(**told, parts=parts if name == profiled else None))
        yield found


def _check_grid(tower: Any, grid: Grid) -> None:
    """Raise ValueError for a grid that the tower does not take."""
    family = family_of_tower(tower)
    expected = Expected(merge=family.geometry(tower).merge, width=None, device=None)
    read(expected, None, torch.empty(rows_of(grid), 1, device="meta"), torch.tensor(grid))
    if not family.videos and any(t > 1 for t, _, _ in grid):
        raise ValueError(f"expected images for {family.name}, which takes videos frame by frame, got {grid}")


def _twin(tower: Any) -> Any:
    """The same tower again: modules and buffers are copies, parameters are the same."""
    return deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})


Problem = tuple[Status, str]


@dataclass(frozen=True)
class _Verdict:
    """worst: the name of the output or gradient whose error comes nearest to its bound. ratios: over stock's errors."""

    bound: float
    error: float = math.inf
    worst: str | None = None
    ratios: tuple[float, ...] = ()


def _open(
    stack: ExitStack, contenders: Sequence[Contender], tower: Any, grid: Grid
) -> tuple[dict[str, Run], dict[str, Problem]]:
    """Every contender that can run, opened on the stack on a tower of its own; and why others cannot."""
    runs: dict[str, Run] = {}
    problems: dict[str, Problem] = {}
    for contender in contenders:
        if contender.open is None:
            problems[contender.name] = "skipped", "; ".join(contender.against)
            continue
        try:
            runs[contender.name] = stack.enter_context(contender.open(_twin(tower), grid))
        except Exception as raised:
            problems[contender.name] = _failed(contender, raised)
    return runs, problems


def _failed(contender: Contender, raised: Exception) -> Problem:
    """A backend that raises is wrong; a baseline may be another library's that does not fit the installed versions."""
    return "skipped" if contender.baseline else "wrong", machine.one_line(raised)[:300]


def _verify(
    runs: dict[str, Run],
    problems: dict[str, Problem],
    contenders: Sequence[Contender],
    reference: Any,
    tower: Any,
    grid: Grid,
    now: Callable[[str], None],
) -> tuple[dict[str, _Verdict], Batch]:
    """Compare every run with stock in fp32, beside stock in the dtype; those that fail leave `runs` for `problems`.

    Returns what was found of every contender, and the batch to time with.
    """
    train, own, errors = trained(tower), Errors(), {contender.name: Errors() for contender in contenders}
    verdicts: dict[str, _Verdict] = {}
    with stock("sdpa", reference, grid) as exact, stock("sdpa", _twin(tower), grid) as same:
        count = STEPS if train and ROUNDING[weight_of(tower).dtype] > 1e-4 else CALLS
        for seed in range(4 * count if train else count):
            if seed >= count and not _undecided(verdicts, runs, contenders):
                break
            now(f"running stock in fp32, {seed + 1} of {max(count, seed + 1)}")
            batch = draw_batch(same, grid, seed)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products have no TF32 by default
                expected = results(exact, batch.float())
            own.add(results(same, batch), expected)
            for contender in contenders:
                if (run := runs.get(contender.name)) is None:
                    continue
                now(f"verifying {contender.name}")
                try:
                    errors[contender.name].add(results(run, batch), expected)
                except Exception as raised:
                    del runs[contender.name]
                    problems[contender.name] = _failed(contender, raised)
            known = own.by_name()
            verdicts = {c.name: _judge(c, errors[c.name].by_name(), known, tower) for c in contenders}
    for contender in contenders:
        verdict = verdicts[contender.name]
        if contender.name in runs and not verdict.error <= verdict.bound:
            del runs[contender.name]
            told = f"relative error {verdict.error:.1e}, at most {verdict.bound:.1e} is allowed"
            problems[contender.name] = "wrong", told + (f", of {verdict.worst}" if train else "")
    return verdicts, batch


def _undecided(verdicts: Mapping[str, _Verdict], runs: Mapping[str, Run], contenders: Sequence[Contender]) -> bool:
    """Whether more batches may tell: what few numbers, as of a norm, say of an error scatters by some percent."""
    own = [verdicts[contender.name] for contender in contenders if not contender.baseline and contender.name in runs]
    return any(verdict.bound < verdict.error < _NEAR * verdict.bound for verdict in own)


def _judge(contender: Contender, errors: Mapping[str, float], own: Mapping[str, float], tower: Any) -> _Verdict:
    """The error that comes nearest to what is allowed: a tenth above stock's own in the dtype, or a rounding.

    Of a forward the outputs share one bound; of a training every gradient has its own.
    """
    rounding, train = ROUNDING[weight_of(tower).dtype], trained(tower)
    times = PEERS if train and contender.baseline else PROMISED
    bounds = {name: max(times * (error if train else max(own.values())), rounding) for name, error in own.items()}
    bounds = {name: contender.bound or bound for name, bound in bounds.items()}
    if not errors:
        return _Verdict(max(bounds.values()))
    worst = max(errors, key=lambda name: errors[name] / bounds.get(name, rounding))
    ratios = tuple(errors[name] / error for name, error in own.items() if error and name in errors)
    return _Verdict(bounds.get(worst, rounding), errors[worst], worst, ratios)


def _time(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    cuda: bool,
    now: Callable[[str], None] = lambda _: None,
    before: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Milliseconds of every timed call: each round gives each contender its turn, warmed up anew.

    before: what is done before each call, by name, and not timed.

    Every other round goes backwards: a GPU near its power limit is slower after a neighbour that heats it more.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        now(f"timing, round {index + 1} of {rounds}")
        for name in list(steps)[:: -1 if index % 2 else 1]:
            for _ in range(WARM_UPS):
                steps[name]()
            first = before.get(name, lambda: None)
            times[name] += [milliseconds(steps[name], cuda=cuda, before=first) for _ in range(TIMED)]
    return times
