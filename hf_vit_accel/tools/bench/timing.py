"""Time steps in turns: the one way to time of `hf-vit-accel bench` and of benchmarks/."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

TURNS = 4
"""Turns of a step in a round, on a GPU. A CPU, where a step of a full-size tower may take seconds, has one."""
WARM_UP_MS = 10.0
TIMED_MS = 25.0
"""The least milliseconds of a turn before anything is timed, and timed: short steps run more often."""
ENOUGH_MS = 700.0
"""A step on a GPU that was timed for so long leaves out the other turns of the round."""
SHORT_MS = 10.0
ROUNDS_OF_SHORT_STEPS = 3
"""Steps below `SHORT_MS` get so many times the rounds: the host is slow for longer than a round of them takes."""

Step = Callable[[], object]


def nothing(*_: object) -> None:
    """Do nothing."""


def milliseconds(step: Step, *, cuda: bool, before: Step = nothing) -> float:
    """Time one call by CUDA events after a synchronisation, or on a CPU by the clock. `before` is not timed."""
    before()
    if not cuda:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def time_in_turns(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    cuda: bool,
    say: Callable[[str], None] = nothing,
    before: Mapping[str, Step] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Return the milliseconds of every timed call, by name. All steps have run before, so graphs are captured.

    All take a short turn in a random order, then again in another one. After another step, which heats a GPU more or
    less, a step may take longer for some 100 ms. So none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    order = random.Random(0)
    index = 0
    while index < rounds:
        say(f"timing, round {index + 1} of {rounds}")
        in_round: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(TURNS if cuda else 1):
            order.shuffle(names)
            for name in names:
                if sum(in_round[name]) < ENOUGH_MS:
                    in_round[name] += _turn(steps[name], cuda, before.get(name, nothing))
        for name in steps:
            times[name] += in_round[name]
        index += 1
        medians = [statistics.median(of_step) for of_step in times.values()]
        if cuda and index == 1 and min(medians, default=SHORT_MS) < SHORT_MS:
            rounds *= ROUNDS_OF_SHORT_STEPS
    return times


def _turn(step: Step, cuda: bool, before: Step) -> list[float]:
    """Warm a step up, then time it: on a CPU two calls."""
    warm_ups: list[float] = []
    timed: list[float] = []
    while not warm_ups or (cuda and sum(warm_ups) < WARM_UP_MS):
        warm_ups.append(milliseconds(step, cuda=cuda, before=before))
    while len(timed) < (1 if cuda else 2) or (cuda and sum(timed) < TIMED_MS):
        timed.append(milliseconds(step, cuda=cuda, before=before))
    return timed
