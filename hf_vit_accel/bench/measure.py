"""Verify every contender against an fp32 run of the stock tower, then time those that passed, interleaved.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from hf_vit_accel import env
from hf_vit_accel.bench.contenders import Contender, Run, check_names, choose, stock
from hf_vit_accel.bench.profile import Part, profile
from hf_vit_accel.bench.towers import build_tower, family_of_tower, matrix_flops, weight_of
from hf_vit_accel.inputs import Expected, read
from hf_vit_accel.metadata import Grid

__all__ = ["DTYPES", "Row", "bench", "default_dtype", "device_of_choice", "measure"]

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING: Mapping[torch.dtype, float] = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.float32: 1e-5,  # the reference is itself rounded to fp32, layer after layer
}
"""An error that passes in any case."""
WARM_UPS, TIMED = 2, 4
SEED = 1

Status = Literal["timed", "wrong", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out for one contender on one input of one model.

    ms, ms_low, ms_high: median, least and most milliseconds of a forward. floor_ms: the input's matrix FLOPs at peak
    speed, None without one. ratio: ms / floor_ms. speedup: over the first contender of the input. error: relative L2,
    the largest of all outputs; bound: the largest that passes. problem: why it is wrong or was skipped. parts: its
    profile, if asked for.
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
    problem: str | None = None
    parts: tuple[Part, ...] | None = None


def device_of_choice() -> torch.device:
    """The current CUDA device, or the CPU."""
    return torch.device("cuda" if env.has_cuda() else "cpu")


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
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """Build each model's tower, choose the contenders and measure; the rows of one model and size at a time.

    attentions: names of backends and "auto"; None for "auto" and each that can run. peak: TFLOP/s of the floor, None
    for no floor. say: is told what cannot run, before anything does, and then what runs.
    Raises ValueError, before anything runs, for models, contenders and sizes that do not exist or do not fit, and if
    none of the backends that are named can run.
    """
    check_names(attentions or (), baselines)
    if attentions is not None and not [*attentions, *baselines]:
        raise ValueError("expected at least one backend or baseline, got none; there is nothing to time")
    device = device_of_choice()
    chosen_dtype = dtype or default_dtype(device)
    for model in models:
        outline = build_tower(model, torch.device("meta"), chosen_dtype)
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
            tower = build_tower(model, device, chosen_dtype, weights=weights)
            contenders = choose(tower, attentions, baselines)
            yield from measure(
                model, tower, sizes, contenders, rounds=rounds, peak=peak, with_profile=with_profile, say=say
            )

    return blocks()


@torch.no_grad()
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
    """Verify and time contenders on a stock tower; every one gets a copy of it, so that none sees another's traces.

    with_profile: profile the first patched contender that was timed, else the first baseline.
    """
    reference = deepcopy(tower).float()
    for size, grid in sizes.items():
        pixels_TP = _pixels(tower, grid)
        say(f"{model}, {size}: running stock in fp32")
        expected, bound = _reference(reference, tower, grid, pixels_TP)
        floor_ms = matrix_flops(tower, grid) / (peak * 1e9) if peak else None
        with ExitStack() as stack:
            now = partial(_now, say, f"{model}, {size}")
            runs, errors, problems = _verify(stack, contenders, tower, grid, pixels_TP, expected, bound, now)
            del expected
            times = _time(runs, pixels_TP, rounds, now)
            profiled = next((c.name for c in sorted(contenders, key=lambda c: c.baseline) if c.name in runs), None)
            parts = None
            if with_profile and profiled is not None:
                parts = profile(runs[profiled], pixels_TP, len(family_of_tower(tower).parts(tower).blocks))
        first = times.get(contenders[0].name) if contenders else None
        rows = []
        for contender in contenders:
            name = contender.name
            problem = problems.get(name)
            ms = statistics.median(times[name]) if name in times else None
            rows.append(
                Row(
                    model=model,
                    size=size,
                    patches=len(pixels_TP),
                    contender=name,
                    status=problem.status if problem else "timed",
                    floor_ms=floor_ms,
                    bound=contender.bound or bound,
                    ms=ms,
                    ms_low=min(times[name]) if ms is not None else None,
                    ms_high=max(times[name]) if ms is not None else None,
                    ratio=ms / floor_ms if ms is not None and floor_ms else None,
                    speedup=statistics.median(first) / ms if ms is not None and first is not None else None,
                    error=errors.get(name),
                    problem=problem.text if problem else None,
                    parts=parts if name == profiled else None,
                )
            )
        yield rows


def _now(say: Callable[[str], None], where: str, what: str) -> None:
    say(f"{where}: {what}")


def _pixels(tower: Any, grid: Grid) -> torch.Tensor:
    """Random patches for a grid, in the shape and dtype that the tower takes."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(SEED)
    pixels_TP = torch.randn(_rows(grid), weight[0].numel(), device=weight.device, generator=generator)
    return family_of_tower(tower).pixels(tower, pixels_TP.to(weight.dtype))


def _check_grid(tower: Any, grid: Grid) -> None:
    """Raise ValueError for a grid that the tower does not take."""
    family = family_of_tower(tower)
    expected = Expected(merge=family.geometry(tower).merge, width=None, device=None)
    read(expected, torch.empty(_rows(grid), 1, device="meta"), torch.tensor(grid))
    if not family.clips and any(t > 1 for t, _, _ in grid):
        raise ValueError(f"expected images for {family.name}, which takes videos frame by frame, got {grid}")


def _rows(grid: Grid) -> int:
    return sum(t * h * w for t, h, w in grid)


def _reference(reference: Any, tower: Any, grid: Grid, pixels_TP: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """The outputs of stock in fp32, and the largest error that passes: a tenth above stock's own in the dtype."""
    with _without_tf32(), stock("sdpa", reference, grid) as run:
        expected = outputs_of(run(pixels_TP.float()))
    with stock("sdpa", deepcopy(tower), grid) as run:
        own = relative_error(outputs_of(run(pixels_TP)), expected)
    return expected, max(1.1 * own, ROUNDING[pixels_TP.dtype])


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Convolutions in full fp32: cuDNN takes TF32 by default, where matrix products do not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Merged features, or the last rows of a tower that merges nothing, and deepstack features."""
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative L2 error of the outputs; infinite for other shapes or a value that is not finite."""
    if [f.shape for f in found] != [e.shape for e in expected]:
        return math.inf
    errors = [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


@dataclass(frozen=True)
class _Problem:
    status: Status
    text: str


def _verify(
    stack: ExitStack,
    contenders: Sequence[Contender],
    tower: Any,
    grid: Grid,
    pixels_TP: torch.Tensor,
    expected: list[torch.Tensor],
    bound: float,
    now: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Run], dict[str, float], dict[str, _Problem]]:
    """Open every contender on the stack and compare; also the errors found, and what is wrong or cannot run.

    Two calls: the second meets whatever the first one cached. A backend that raises is wrong; a baseline is skipped,
    for it may be another library's that does not fit the installed versions.
    """
    runs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    problems: dict[str, _Problem] = {}
    for contender in contenders:
        name = contender.name
        if contender.open is None:
            problems[name] = _Problem("skipped", "; ".join(contender.against))
            continue
        now(f"verifying {name}")
        try:
            run = stack.enter_context(contender.open(deepcopy(tower), grid))
            error = max(relative_error(outputs_of(run(pixels_TP)), expected) for _ in range(2))
        except Exception as raised:
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
            problems[name] = _Problem("skipped" if contender.baseline else "wrong", text)
            continue
        if math.isfinite(error):
            errors[name] = error
        allowed = contender.bound or bound
        if error <= allowed:
            runs[name] = run
        else:
            problems[name] = _Problem("wrong", f"relative error {error:.1e}, at most {allowed:.1e} is allowed")
    return runs, errors, problems


def _time(
    runs: Mapping[str, Run], pixels_TP: torch.Tensor, rounds: int, now: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Milliseconds of every timed forward: each round gives each contender its turn, warmed up anew.

    Every other round goes backwards: a GPU near its power limit is slower after a neighbour that heats it more.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        now(f"timing, round {index + 1} of {rounds}")
        for name in list(runs)[:: -1 if index % 2 else 1]:
            for _ in range(WARM_UPS):
                runs[name](pixels_TP)
            times[name] += [_milliseconds(runs[name], pixels_TP) for _ in range(TIMED)]
    return times


def _milliseconds(run: Run, pixels_TP: torch.Tensor) -> float:
    """One forward: by CUDA events after a synchronisation, on CPU by the clock."""
    if not pixels_TP.is_cuda:
        begin = time.perf_counter()
        run(pixels_TP)
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run(pixels_TP)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
