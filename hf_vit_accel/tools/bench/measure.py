"""Compare every way to run a tower with fp32, then time those that are right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.families import Tower
from hf_vit_accel.families.interface import Expected, read
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tools.bench.timing import nothing, time_in_turns
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of
from hf_vit_accel.tools.bench.ways import Run, Way, stock

ROUNDING: Mapping[torch.dtype, float] = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.float32: 1e-5,  # the reference is itself rounded to fp32, layer after layer
}
"""Dtype -> an error that passes in any case."""
PROMISED = 1.1
"""Times stock's own error in the dtype that ours may have."""
PEERS = 2.0
"""The same for other libraries, which promise less; a wrong result is many times off."""
BATCHES = 3
"""By default the second call of a small input is replayed padded, the third as it is. All must be right."""

Row = dict[str, Any]
"""One way on one input of one model, as JSON holds it; the command line documents the keys."""
KEYS = (
    *("model", "size", "patches", "contender", "status", "problem"),
    *("ms", "ms_low", "ms_high", "speedup", "error", "bound"),
)


def check_grid(tower: Tower, grid: Grid) -> None:
    """Raise ValueError for a grid that the tower does not take."""
    family = family_of_tower(tower)
    expected = Expected(merge=family.geometry(tower).merge, width=None, device=None)
    read(expected, None, torch.empty(rows_of(grid), 1, device="meta"), torch.tensor(grid))
    if not family.videos and any(t > 1 for t, _, _ in grid):
        raise ValueError(f"{family.name} takes videos frame by frame, but a size is {grid}: pass images")


def draw_pixels(tower: Tower, grid: Grid, seed: int) -> Tensor:
    """Draw random pixels (T, P) in the tower's dtype."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), device=weight.device, generator=generator)
    return family_of_tower(tower).pixels(tower, pixels_TP.to(weight.dtype))


def outputs_of(output: Any) -> list[Tensor]:
    """Return the features that a model takes: merged rows (or a tower's last rows) and deepstack features."""
    if isinstance(output, Tensor):
        return [output]
    if type(output) is tuple:
        return [output[0], *output[1]]
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def forward(run: Run, pixels_TP: Tensor) -> list[Tensor]:
    """Run what is timed."""
    with torch.no_grad():
        return outputs_of(run(pixels_TP))


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return |value - expected| / |expected| in L2: infinite for another shape, and for what is not finite."""
    if value.shape != expected.shape:
        return math.inf
    difference = (value.float() - expected).norm()
    norm = expected.norm()
    error = float(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of an output."""
    if len(outputs) != len(expected):
        return math.inf
    return max(relative_error(output, exact) for output, exact in zip(outputs, expected, strict=True))


def twin_of(tower: Tower) -> Tower:
    """Return the same tower again: modules and buffers are copies, parameters are shared."""
    return deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})


def measure(
    model: str,
    tower: Tower,
    sizes: Mapping[str, Grid],
    ways: Sequence[Way],
    *,
    rounds: int,
    say: Callable[[str], None] = nothing,
) -> Iterator[list[Row]]:
    """Verify and time all ways on a stock tower; yield the rows of one size at a time.

    Every way gets modules of its own, and sees no other's traces. Parameters are shared: copies would not fit a GPU.
    """
    reference = deepcopy(tower).float()
    for size, grid in sizes.items():
        rows = {way.name: new_row(model, size, grid, way) for way in ways}
        with ExitStack() as stack:
            runs = open_all(stack, ways, rows, tower, grid)
            pixels_TP = _verify(runs, rows, ways, reference, tower, grid, say)
            steps = {name: partial(forward, run, pixels_TP) for name, run in runs.items()}
            add_times(rows, time_in_turns(steps, rounds, cuda=pixels_TP.is_cuda, say=say))
        yield list(rows.values())


def new_row(model: str, size: str, grid: Grid, way: Way) -> Row:
    """Return the row of a way before anything is measured."""
    row: Row = dict.fromkeys(KEYS)
    row |= {"model": model, "size": size, "patches": rows_of(grid), "contender": way.name, "status": "timed"}
    return row if way.open else row | {"status": "skipped", "problem": "; ".join(way.reasons)}


def open_all(
    stack: ExitStack, ways: Sequence[Way], rows: Mapping[str, Row], tower: Tower, grid: Grid
) -> dict[str, Run]:
    """Open every way that can run, each on a twin of the tower."""
    runs: dict[str, Run] = {}
    for way in ways:
        if way.open is not None:
            try:
                runs[way.name] = stack.enter_context(way.open(twin_of(tower), grid))
            except Exception as raised:
                rows[way.name] |= {"status": "skipped", "problem": machine.one_line(raised)[:300]}
    return runs


def add_times(rows: Mapping[str, Row], times: Mapping[str, list[float]]) -> None:
    """Write medians and speed-ups over the first way into the rows."""
    for name, of_way in times.items():
        rows[name] |= {"ms": statistics.median(of_way), "ms_low": min(of_way), "ms_high": max(of_way)}
    first_ms = next((row["ms"] for row in rows.values()), None)
    for name in times:
        rows[name]["speedup"] = first_ms and first_ms / rows[name]["ms"]


def fail(row: Row, way: Way, raised: Exception) -> None:
    """Note that a call raised: a backend is wrong, but a stock set-up may not fit the installed versions."""
    row |= {"status": "skipped" if way.is_stock else "wrong", "problem": machine.one_line(raised)[:300]}


def _verify(
    runs: dict[str, Run],
    rows: Mapping[str, Row],
    ways: Sequence[Way],
    reference: Tower,
    tower: Tower,
    grid: Grid,
    say: Callable[[str], None],
) -> Tensor:
    """Compare all runs with stock in fp32, drop those that are wrong, and return pixels to time with."""
    stock_errors: list[float] = []
    errors: dict[str, list[float]] = {way.name: [] for way in ways}
    with stock("sdpa", reference, grid) as exact, stock("sdpa", twin_of(tower), grid) as same:
        for seed in range(BATCHES):
            pixels_TP = draw_pixels(tower, grid, seed)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products have no TF32 by default
                expected = forward(exact, pixels_TP.float())
            stock_errors.append(largest_error(forward(same, pixels_TP), expected))
            for way in ways:
                if way.name in runs:
                    say(f"verifying {way.name}, {seed + 1} of {BATCHES}")
                    try:
                        errors[way.name].append(largest_error(forward(runs[way.name], pixels_TP), expected))
                    except Exception as raised:
                        del runs[way.name]
                        fail(rows[way.name], way, raised)
    for way in ways:
        row = rows[way.name]
        factor = PEERS if way.is_stock else PROMISED
        row["bound"] = way.bound or max(factor * max(stock_errors), ROUNDING[weight_of(tower).dtype])
        error = max(errors[way.name], default=math.inf)
        row["error"] = error if math.isfinite(error) else None
        if way.name in runs and not error <= row["bound"]:
            del runs[way.name]
            problem = f"relative error {error:.1e}, at most {row['bound']:.1e} is allowed"
            row |= {"status": "wrong", "problem": problem}
    return pixels_TP
