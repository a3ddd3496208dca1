"""Times the steps of all contenders in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hf_vit_accel.tools.bench.work import milliseconds

TURNS = 4
"""Turns of a contender in a round, on a GPU."""
WARM_UPS = 1, 10.0
"""The least number of steps in a turn before the first one is timed, and their least milliseconds together."""
TIMED = 1, 25.0
"""The least number of timed steps of a turn, and their least milliseconds: short steps are timed more often."""
ENOUGH_MS = 700.0
"""A contender on a GPU whose timed steps took so long leaves out the other turns of the round."""
SHORT_MS = 10.0
"""A GPU's step below it is short. The host is slow for longer than a round of such steps takes."""
ROUNDS_OF_SHORT_STEPS = 3
"""Short steps are timed in so many times the rounds."""
TURNS_ON_CPU = 1
WARM_UPS_ON_CPU = 1, 0.0
TIMED_ON_CPU = 2, 0.0
"""The same numbers on a CPU, where a step of a full-size tower may take seconds."""

TimedStep = Callable[[], object]
Say = Callable[[str], None]


def time_in_turns(
    steps: Mapping[str, TimedStep],
    rounds: int,
    *,
    cuda: bool,
    now: Say = lambda _: None,
    before: Mapping[str, TimedStep] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Time every contender in many short turns.

    All take a turn in a random order, then again in another one, and so on. After another contender's steps, which heat
    a GPU more or less, a step may take longer for some 100 ms. So none always follows the same one.

    Args:
        steps: Contender -> its step. Graphs have been captured: each step has run, as to be verified.
        rounds: Each has a turn of every contender, on a GPU up to four. More if the fastest step on a GPU is short.
        before: Contender -> what runs before each of its steps, and is not timed.

    Returns:
        Contender -> milliseconds of every timed step.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    warm_ups, timed, turns = (WARM_UPS, TIMED, TURNS) if cuda else (WARM_UPS_ON_CPU, TIMED_ON_CPU, TURNS_ON_CPU)
    names = list(steps)
    order = random.Random(0)

    def run(name: str, least: int, least_ms: float) -> list[float]:
        return _time_until(steps[name], least, least_ms, cuda=cuda, before=before.get(name, lambda: None))

    index = 0
    while index < rounds:
        now(f"timing, round {index + 1} of {rounds}")
        in_round: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(turns):
            order.shuffle(names)
            for name in names:
                if not cuda or sum(in_round[name]) < ENOUGH_MS:
                    run(name, *warm_ups)
                    in_round[name] += run(name, *timed)
        for name in steps:
            times[name] += in_round[name]
        index += 1
        medians = [statistics.median(of_contender) for of_contender in times.values()]
        if cuda and index == 1 and min(medians, default=SHORT_MS) < SHORT_MS:
            rounds *= ROUNDS_OF_SHORT_STEPS
    return times


def _time_until(step: TimedStep, least: int, least_ms: float, *, cuda: bool, before: TimedStep) -> list[float]:
    """Time a step until it was called so often, and its calls took so long together."""
    times: list[float] = []
    while len(times) < least or sum(times) < least_ms:
        times.append(milliseconds(step, cuda=cuda, before=before))
    return times
