"""Verifies every contender, then times those that passed, interleaved.

A step is one forward, or one forward and backward of a tower whose parameters require gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_vit_accel import machine
from hf_vit_accel.engine.inputs import Expected, read
from hf_vit_accel.families import Tower
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tools.bench.baselines import Run, is_trained
from hf_vit_accel.tools.bench.contenders import Contender, check_names, choose
from hf_vit_accel.tools.bench.profile import Part, profile
from hf_vit_accel.tools.bench.timing import Say, TimedStep, time_in_turns
from hf_vit_accel.tools.bench.towers import SHAPES, build_tower, family_of_tower, matrix_flops
from hf_vit_accel.tools.bench.verify import ErrorVerdict, Problem, Status, problem_of, reference_of, twin_of, verify
from hf_vit_accel.tools.bench.work import Batch, peak_gigabytes, work

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one contender on one input of one model.

    Attributes:
        model: The model's name.
        size: The input's name.
        patches: Patch rows of the input.
        contender: The contender's name.
        status: "timed", "wrong" or "skipped".
        floor_ms: The input's matrix FLOPs at peak speed, None without a peak.
        bound: The largest error that passes, of `worst`.
        ms: Median milliseconds of a step.
        ms_low: Least milliseconds.
        ms_high: Most milliseconds.
        ratio: ms / floor_ms.
        speedup: Over the first contender of the input.
        error: The relative L2 error of `worst`.
        worst: The output or gradient whose error comes nearest to its bound.
        error_ratio: The largest error over stock's own in the dtype, None where stock has none.
        error_ratio_mean: The mean of these.
        peak_gb: Most memory beyond the weights, of a training on CUDA.
        problem: Why it is wrong or was skipped.
        parts: Its profile, if asked for.
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
    """Return the current CUDA device, or the CPU."""
    return torch.device("cuda" if machine.has_cuda() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 on CUDA, fp32 on a CPU."""
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
    say: Say = lambda _: None,
) -> Iterator[list[Row]]:
    """Build each model's tower, choose the contenders and measure them.

    Args:
        models: Built-in shapes, checkpoints or config files.
        attentions: Names of backends and "auto"; None for "auto" and each that can run.
        dtype: Of the towers; by default bf16 on CUDA, fp32 on a CPU.
        rounds: Rounds of timing; a GPU takes more for short steps.
        peak: TFLOP/s of the floor, None for no floor.
        say: Takes what cannot run, before anything does, and then what runs.

    Returns:
        The rows of one model and size at a time.

    Raises:
        ValueError: Before anything runs: a model, contender or size does not exist or fit, or no named backend can run.
    """
    check_names(attentions or (), baselines)
    if attentions is not None and not [*attentions, *baselines]:
        raise ValueError("nothing to time: there are neither backends nor baselines; name at least one")
    device = device_of_choice()
    dtype = dtype or default_dtype(device)
    for model in models:
        if weights and (model in SHAPES or Path(model).is_file()):
            raise ValueError(f"{model!r} has no weights to load: pass a checkpoint's folder or hub id")
        outline = _prepared(build_tower(model, torch.device("meta"), dtype), train, checkpointing)
        _check_model(model, outline, sizes, attentions, device, say)

    def blocks() -> Iterator[list[Row]]:
        for model in models:
            say(f"{model}: building the tower")
            tower = _prepared(build_tower(model, device, dtype, weights=weights), train, checkpointing)
            contenders = choose(tower, attentions, baselines)
            yield from measure(
                model, tower, sizes, contenders, rounds=rounds, peak=peak, with_profile=with_profile, say=say
            )

    return blocks()


def _check_model(
    model: str,
    outline: Tower,
    sizes: Mapping[str, Grid],
    attentions: Sequence[str] | None,
    device: torch.device,
    say: Say,
) -> None:
    """Raise ValueError for sizes that do not fit a model, and if no named backend can run it. Say which cannot."""
    for grid in sizes.values():
        _check_grid(outline, grid)
    unusable = [contender for contender in choose(outline, attentions, (), device=device) if contender.against]
    reasons = [f"{contender.name} cannot run: {'; '.join(contender.against)}" for contender in unusable]
    if attentions and len(unusable) == len(attentions):
        raise ValueError("; ".join(reasons))
    for reason in reasons:
        say(f"{model}: {reason}")


def _check_grid(tower: Tower, grid: Grid) -> None:
    """Raise ValueError for a grid that the tower does not take."""
    family = family_of_tower(tower)
    expected = Expected(merge=family.geometry(tower).merge, width=None, device=None)
    read(expected, None, torch.empty(rows_of(grid), 1, device="meta"), torch.tensor(grid))
    if not family.videos and any(t > 1 for t, _, _ in grid):
        raise ValueError(f"{family.name} takes videos frame by frame, but a size is {grid}: pass images")


def _prepared(tower: Tower, train: bool, checkpointing: bool) -> Tower:
    """Turn on training and gradient checkpointing, where asked for."""
    if checkpointing:
        # Newer transformers call it activation checkpointing.
        enable = getattr(tower, "activation_checkpointing_enable", None) or tower.gradient_checkpointing_enable
        enable()
    return tower.requires_grad_(True).train() if train else tower


def measure(
    model: str,
    tower: Tower,
    sizes: Mapping[str, Grid],
    contenders: Sequence[Contender],
    *,
    rounds: int,
    peak: float | None = None,
    with_profile: bool = False,
    say: Say = lambda _: None,
) -> Iterator[list[Row]]:
    """Verify and time contenders on a stock tower.

    Every contender gets modules of its own, and sees no other's traces. Parameters and gradients are shared, since
    copies for all contenders would not fit a GPU.

    Args:
        peak: TFLOP/s of the floor, None for no floor.
        with_profile: Profile the first patched contender that was timed, else the first baseline.

    Yields:
        The rows of one size.
    """
    reference = reference_of(tower)
    passes = 3 if is_trained(tower) else 1  # a backward takes twice the products of a forward
    for size, grid in sizes.items():
        measured = _measure_size(
            contenders, reference, tower, grid, rounds, with_profile, _prefixed(say, f"{model}, {size}")
        )
        floor_ms = passes * matrix_flops(tower, grid) / (peak * 1e9) if peak else None
        first_name = contenders[0].name if contenders else None
        first = measured.times.get(first_name) if first_name else None
        rows = []
        for name in measured.verdicts:
            fields = _fields(measured, name, floor_ms, None if first is None else statistics.median(first))
            rows.append(Row(model=model, size=size, patches=rows_of(grid), contender=name, **fields))
        yield rows


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda line: say(f"{prefix}: {line}")


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The raw results of one input: all by the contender's name, parts of the profiled one."""

    verdicts: Mapping[str, ErrorVerdict]
    problems: Mapping[str, Problem]
    times: Mapping[str, list[float]]
    peaks: Mapping[str, float | None]
    profiled: str | None
    parts: tuple[Part, ...] | None


def _measure_size(
    contenders: Sequence[Contender],
    reference: Tower,
    tower: Tower,
    grid: Grid,
    rounds: int,
    with_profile: bool,
    say: Say,
) -> _Measured:
    """Open, verify, time and profile all contenders on one input."""
    is_training = is_trained(tower)
    with ExitStack() as stack:
        runs, problems = _open(stack, contenders, tower, grid)
        verdicts, batch = verify(runs, problems, contenders, reference, tower, grid, say)
        peaks = {name: peak_gigabytes(run, batch) if is_training else None for name, run in runs.items()}
        steps: dict[str, TimedStep] = {name: _Work(run, batch) for name, run in runs.items()}
        clear: dict[str, TimedStep] = {name: _Clear(run) for name, run in runs.items()} if is_training else {}
        is_cuda = batch.pixels_TP.is_cuda
        times = time_in_turns(steps, rounds, cuda=is_cuda, now=say, before=clear)
        profiled = _profiled(contenders, runs)
        parts = None
        if with_profile and profiled is not None:
            layers = len(family_of_tower(tower).parts(tower).blocks)
            parts = profile(steps[profiled], layers, cuda=is_cuda)
        tower.zero_grad(set_to_none=True)  # gradients may lie in the memory of a graph, which goes now
    return _Measured(verdicts=verdicts, problems=problems, times=times, peaks=peaks, profiled=profiled, parts=parts)


@dataclass(frozen=True)
class _Work:
    """A contender's step."""

    run: Run
    batch: Batch

    def __call__(self) -> object:
        return work(self.run, self.batch)


@dataclass(frozen=True)
class _Clear:
    """Drops the gradients of a contender."""

    run: Run

    def __call__(self) -> None:
        self.run.tower.zero_grad(set_to_none=True)


def _profiled(contenders: Sequence[Contender], runs: Mapping[str, Run]) -> str | None:
    """Return the name of the first patched contender that runs, else of the first baseline."""
    for is_baseline in (False, True):
        for contender in contenders:
            if contender.baseline == is_baseline and contender.name in runs:
                return contender.name
    return None


def _fields(measured: _Measured, name: str, floor_ms: float | None, first_ms: float | None) -> dict[str, Any]:
    """Return the fields of a row beside its input and name. first_ms: the first contender's median."""
    verdict = measured.verdicts[name]
    status, problem = measured.problems.get(name, ("timed", None))
    fields: dict[str, Any] = dict(
        status=status,
        problem=problem,
        floor_ms=floor_ms,
        bound=verdict.bound,
        worst=verdict.worst,
        peak_gb=measured.peaks.get(name),
        parts=measured.parts if name == measured.profiled else None,
    )
    if name in measured.times:
        times = measured.times[name]
        ms = statistics.median(times)
        fields |= dict(ms=ms, ms_low=min(times), ms_high=max(times))
        fields["ratio"] = ms / floor_ms if floor_ms else None
        fields["speedup"] = None if first_ms is None else first_ms / ms
    if math.isfinite(verdict.error):
        fields["error"] = verdict.error
        if verdict.ratios:
            fields |= dict(error_ratio=max(verdict.ratios), error_ratio_mean=statistics.fmean(verdict.ratios))
    return fields


def _open(
    stack: ExitStack, contenders: Sequence[Contender], tower: Tower, grid: Grid
) -> tuple[dict[str, Run], dict[str, Problem]]:
    """Open every contender that can run, on a tower of its own; return the runs, and why others cannot."""
    runs: dict[str, Run] = {}
    problems: dict[str, Problem] = {}
    for contender in contenders:
        if contender.open is None:
            problems[contender.name] = "skipped", "; ".join(contender.against)
            continue
        try:
            runs[contender.name] = stack.enter_context(contender.open(twin_of(tower), grid))
        except Exception as raised:
            problems[contender.name] = problem_of(contender, raised)
    return runs, problems
