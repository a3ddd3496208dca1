"""Time forward and backward of towers whose parameters are all trained, once every gradient is right.

python benchmarks/training.py --json build/training.json
python benchmarks/training.py --checkpointing --sizes "16 x 512²" --baselines sdpa,compile_blocks

Outputs and gradients are compared with fp32, beside stock's own errors in the dtype. Errors of gradients scatter, so
five batches count, and up to twenty decide between close numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import shapes  # noqa: F401
import torch
from baselines import BASELINES
from measuring import (
    DEVICE,
    DTYPE,
    Row,
    clear,
    measure_models,
    outputs_of,
    peak_gigabytes,
    switch_checkpointing,
    timer_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.layout import Grid
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench import (
    Forward,
    Open,
    add_times,
    bound_of,
    build_tower,
    draw_pixels,
    fail,
    family_of_tower,
    new_row,
    parse_size,
    relative_error,
    stock,
    time_in_turns,
    twin_of,
    weight_of,
)

bench.BASELINES |= BASELINES
BATCHES = 5
NEAR = 1.25
"""Errors up to so many times their bound are compared in more batches, up to four times as many."""
Errors = dict[str, list[float]]
"""Errors of every output and gradient, one a batch."""
Incoming = Sequence[Tensor]
"""The gradients that come into the outputs."""


@dataclass(frozen=True)
class Run:
    """A tower that is open, and its forward."""

    tower: nn.Module
    forward: Forward


def step(run: Run, pixels_TP: Tensor, incoming: Incoming) -> list[Tensor]:
    """Run what is timed: forward and backward. Gradients are added up."""
    outputs = outputs_of(run.forward(pixels_TP))
    torch.autograd.backward(outputs, incoming)
    return outputs


def results(run: Run, pixels_TP: Tensor, incoming: Incoming, *, pixel_grad: bool = False) -> dict[str, Tensor]:
    """Run a batch; return outputs and all gradients by name, with `pixel_grad` also that of the pixels."""
    pixels_TP = pixels_TP.detach().clone().requires_grad_(pixel_grad)
    clear(run.tower)
    values = {f"output {index}": value.detach() for index, value in enumerate(step(run, pixels_TP, incoming))}
    leaves = {**dict(run.tower.named_parameters()), "pixels": pixels_TP}
    values |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    clear(run.tower)
    return values


def add_errors(errors: Errors, values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Add a batch's errors: infinite where a value is missing on either side."""
    for name in values.keys() | expected.keys():
        is_there = name in values and name in expected
        error = relative_error(values[name], expected[name]) if is_there else math.inf
        errors.setdefault(name, []).append(error)


def means(errors: Errors) -> dict[str, float]:
    """Return the root of the mean square over all batches."""
    return {name: math.sqrt(statistics.fmean(error**2 for error in batch)) for name, batch in errors.items()}


def judge(way: str, errors: Errors, stock_errors: Errors, dtype: torch.dtype) -> Row:
    """Return the error that comes nearest to its bound, and all errors over stock's own in the dtype."""
    stocks = means(stock_errors)
    bounds = {name: bound_of(way, error, dtype) for name, error in stocks.items()}
    rounding = bound_of(way, 0.0, dtype)
    ours = means(errors)
    worst = max(ours, key=lambda name: ours[name] / bounds.get(name, rounding))
    ratios = [ours[name] / error for name, error in stocks.items() if error and name in ours]
    row = {"bound": bounds.get(worst, rounding), "worst": worst, "error": ours[worst]}
    return row | {"error_ratio": max(ratios), "error_ratio_mean": statistics.fmean(ratios)} if ratios else row


def is_close(row: Row) -> bool:
    """Say whether more batches may decide."""
    return bool(row["bound"] < row["error"] < NEAR * row["bound"])


def verify(
    runs: dict[str, Run],
    rows: Mapping[str, Row],
    reference: nn.Module,
    tower: nn.Module,
    grid: Grid,
) -> tuple[Tensor, Incoming]:
    """Compare all runs with stock in fp32, drop those that are wrong, and return a batch to time with."""
    dtype = weight_of(tower).dtype
    same = twin_of(tower)
    stock_errors: Errors = {}
    errors: dict[str, Errors] = {name: {} for name in rows}
    with stock("sdpa", reference, grid) as exact_forward, stock("sdpa", same, grid) as same_forward:
        for seed in range(4 * BATCHES):
            if seed >= BATCHES and not any(is_close(rows[name]) for name in runs):
                break
            pixels_TP = draw_pixels(tower, grid, seed)
            with torch.no_grad():
                incoming = [torch.randn_like(output) for output in outputs_of(same_forward(pixels_TP))]
            pixel_grad = seed == 0  # a training needs none, and none is timed
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                wide = [gradient.float() for gradient in incoming]
                expected = results(Run(reference, exact_forward), pixels_TP.float(), wide, pixel_grad=pixel_grad)
            values = results(Run(same, same_forward), pixels_TP, incoming, pixel_grad=pixel_grad)
            add_errors(stock_errors, values, expected)
            for name in list(runs):
                try:
                    values = results(runs[name], pixels_TP, incoming, pixel_grad=pixel_grad)
                except Exception as raised:
                    del runs[name]
                    fail(rows[name], raised)
                else:
                    add_errors(errors[name], values, expected)
                    rows[name] |= judge(name, errors[name], stock_errors, dtype)
    for name in list(runs):
        row = rows[name]
        if not row["error"] <= row["bound"]:
            del runs[name]
            problem = f"relative error {row['error']:.1e}, at most {row['bound']:.1e} is allowed, of {row['worst']}"
            row |= {"status": "wrong", "problem": problem, "error": row["error"] if row["error"] < math.inf else None}
    return pixels_TP, incoming


def checkpointed(forward: Callable[..., object]) -> Callable[..., object]:
    """Compute a block again in the backward."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def measure(
    model: str, tower: nn.Module, sizes: Mapping[str, Grid], ways: Mapping[str, Open], rounds: int
) -> list[Row]:
    """Verify and time all ways to train a tower."""
    reference = deepcopy(tower).float()
    for block in family_of_tower(reference).parts(reference).blocks:  # fp32 may not fit a GPU
        block.module.forward = checkpointed(block.module.forward)
    measured: list[Row] = []
    for size, grid in sizes.items():
        rows = {name: new_row(model, size, grid, name) | {"peak_gb": None} for name in ways}
        with ExitStack() as stack:
            runs = {}
            for name, way in ways.items():
                twin = twin_of(tower)
                try:
                    runs[name] = Run(twin, stack.enter_context(way(twin, grid)))
                except Exception as raised:
                    fail(rows[name], raised)
            batch = verify(runs, rows, reference, tower, grid)
            timers = {}
            for name, run in runs.items():
                step_of_run = partial(step, run, *batch)
                rows[name]["peak_gb"] = peak_gigabytes(step_of_run)
                clear(run.tower)
                timers[name] = timer_of(step_of_run, before=partial(clear, run.tower))
            add_times(rows, time_in_turns(timers, rounds))
            tower.zero_grad(set_to_none=True)  # gradients may lie in the memory of a graph, which goes now
        for row in rows.values():
            print(row, flush=True)
        measured += rows.values()
    return measured


def measure_model(
    model: str, sizes: str, backends: str, baselines: str, rounds: int, *, checkpointing: bool
) -> list[Row]:
    """Verify and time all ways to train one model, with all sizes."""
    tower = build_tower(model, DEVICE, DTYPE).requires_grad_(True).train()
    if checkpointing:
        switch_checkpointing(tower, enable=True)
    ways = bench.choose(tower, backends.split(","), baselines.split(","))
    return measure(model, tower, dict(parse_size(size) for size in sizes.split(",")), ways, rounds)


def main() -> None:
    """Verify and time every model and size; exits with 1 if a gradient is wrong."""
    options: dict[str, int | str] = {
        "sizes": "one 448²,one 1024²,16 x 512²,one page",
        "backends": "auto",
        "baselines": "sdpa,flash_attention_2,compile_blocks",
        "checkpointing": False,
        "rounds": 5,
    }
    document = measure_models(__doc__, "qwen2.5-vl-7b,qwen3-vl-8b", measure_model, options=options, train=True)
    if any(row["status"] == "wrong" for row in document["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
