"""Verifies contenders against an fp32 run of the stock tower, beside a stock run in the dtype itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from hf_vit_accel import machine
from hf_vit_accel.families import Tower
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools.bench.baselines import Run, is_trained, stock
from hf_vit_accel.tools.bench.contenders import Contender
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of
from hf_vit_accel.tools.bench.work import Batch, Errors, draw_batch, results

ROUNDING: Mapping[torch.dtype, float] = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.float32: 1e-5,  # the reference is itself rounded to fp32, layer after layer
}
"""Dtype -> an error that passes in any case."""
FORWARD_BATCHES = 3
"""Batches of a forward. By default the second of a small input is replayed padded, the third as it is."""
TRAINING_BATCHES = 5
"""Batches of a training in half precision, where errors of gradients scatter."""
_NEAR = 1.25
"""Errors up to so many times their bound are compared in more batches, up to four times as many."""
PROMISED = 1.1
"""Times stock's own error in the dtype that we promise at most."""
PEERS = 2.0
"""The same for gradients of other libraries, which promise less; a wrong gradient is many times off."""

Status = Literal["timed", "wrong", "skipped"]
Problem = tuple[Status, str]
"""A status other than "timed", and why."""


@dataclass(frozen=True)
class ErrorVerdict:
    """The errors of a contender.

    Attributes:
        bound: The largest error that passes, of `worst`.
        error: The error of `worst`; infinite if nothing was compared.
        worst: The output or gradient whose error comes nearest to its bound.
        ratios: All errors over stock's own in the dtype.
    """

    bound: float
    error: float = math.inf
    worst: str | None = None
    ratios: tuple[float, ...] = ()


def reference_of(tower: Tower) -> Tower:
    """Return a copy of a stock tower in fp32. In training it checkpoints its blocks, since fp32 may not fit a GPU."""
    reference = deepcopy(tower).float()
    if is_trained(tower):
        for block in family_of_tower(reference).parts(reference).blocks:
            block.module.forward = _checkpointed(block.module.forward)
    return reference


def _checkpointed(forward: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def twin_of(tower: Tower) -> Tower:
    """Return the same tower again: modules and buffers are copies, parameters are shared."""
    return deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})


def problem_of(contender: Contender, raised: Exception) -> Problem:
    """Return what an exception means: a backend is wrong, but a baseline may not fit the installed versions."""
    return "skipped" if contender.baseline else "wrong", machine.one_line(raised)[:300]


def verify(
    runs: dict[str, Run],
    problems: dict[str, Problem],
    contenders: Sequence[Contender],
    reference: Tower,
    tower: Tower,
    grid: Grid,
    say: Callable[[str], None],
) -> tuple[dict[str, ErrorVerdict], Batch]:
    """Compare every run with stock in fp32, beside stock in the dtype.

    Args:
        problems: Contender -> why it is not timed. Runs that fail are added.

    Returns:
        The verdict on every contender, and the batch to time with.
    """
    is_training = is_trained(tower)
    is_half_precision = ROUNDING[weight_of(tower).dtype] > 1e-4
    count = TRAINING_BATCHES if is_training and is_half_precision else FORWARD_BATCHES
    stock_errors = Errors()
    errors = {contender.name: Errors() for contender in contenders}
    verdicts: dict[str, ErrorVerdict] = {}
    with stock("sdpa", reference, grid) as exact, stock("sdpa", twin_of(tower), grid) as same:
        for seed in range(4 * count if is_training else count):
            if seed >= count and not _is_undecided(verdicts, runs, contenders):
                break
            say(f"running stock in fp32, {seed + 1} of {max(count, seed + 1)}")
            batch = draw_batch(same, grid, seed)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products have no TF32 by default
                expected = results(exact, batch.float())
            stock_errors.add(results(same, batch), expected)
            for contender in contenders:
                if contender.name not in runs:
                    continue
                say(f"verifying {contender.name}")
                try:
                    errors[contender.name].add(results(runs[contender.name], batch), expected)
                except Exception as raised:
                    del runs[contender.name]
                    problems[contender.name] = problem_of(contender, raised)
            stock_by_name = stock_errors.by_name()
            for contender in contenders:
                verdicts[contender.name] = judge(contender, errors[contender.name].by_name(), stock_by_name, tower)
    for name in list(runs):
        verdict = verdicts[name]
        if not verdict.error <= verdict.bound:
            del runs[name]
            problem = f"relative error {verdict.error:.1e}, at most {verdict.bound:.1e} is allowed"
            problems[name] = "wrong", problem + (f", of {verdict.worst}" if is_training else "")
    return verdicts, batch


def _is_undecided(
    verdicts: Mapping[str, ErrorVerdict], runs: Mapping[str, Run], contenders: Sequence[Contender]
) -> bool:
    """Return whether more batches may decide: errors of few values, as of a norm's weight, scatter by some percent."""
    for contender in contenders:
        if contender.baseline or contender.name not in runs:
            continue
        verdict = verdicts[contender.name]
        if verdict.bound < verdict.error < _NEAR * verdict.bound:
            return True
    return False


def judge(
    contender: Contender, errors: Mapping[str, float], stock_errors: Mapping[str, float], tower: Tower
) -> ErrorVerdict:
    """Return the error that comes nearest to its bound: a tenth above stock's own in the dtype, or a rounding.

    All outputs of a forward share one bound. In training, every output and gradient has its own.
    """
    rounding = ROUNDING[weight_of(tower).dtype]
    is_training = is_trained(tower)
    factor = PEERS if is_training and contender.baseline else PROMISED
    largest_stock_error = max(stock_errors.values())
    bounds = {}
    for name, stock_error in stock_errors.items():
        allowed = factor * (stock_error if is_training else largest_stock_error)
        bounds[name] = contender.bound or max(allowed, rounding)
    if not errors:
        return ErrorVerdict(max(bounds.values()))
    worst = max(errors, key=lambda name: errors[name] / bounds.get(name, rounding))
    ratios = tuple(errors[name] / error for name, error in stock_errors.items() if error and name in errors)
    return ErrorVerdict(bounds.get(worst, rounding), errors[worst], worst, ratios)
