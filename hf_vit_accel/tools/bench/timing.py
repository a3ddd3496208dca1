"""Times the steps of all contenders in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hf_vit_accel.tools.bench.work import milliseconds

WARM_UPS = 2, 30.0
"""The least number of steps before a contender's turn that are not timed, and their least milliseconds together."""
TIMED = 4, 100.0
"""The least number of timed steps of a turn, and their least milliseconds: short steps are timed more often."""
SHORT_MS = 10.0
"""A GPU's step below it is short. The host is slow for longer than a turn of such steps takes."""
ROUNDS_OF_SHORT_STEPS = 3
"""Short steps are timed in so many times the rounds."""
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
    """Time every contender in turns, warmed up anew in each round.

    Every other round goes backwards: a GPU near its power limit is slower after a neighbour that heats it more.

    Args:
        steps: Contender -> its step.
        rounds: Turns of each contender; more if the fastest step on a GPU is short.
        cuda: Whether steps run on a GPU.
        now: Takes the round that begins.
        before: Contender -> what runs before each of its steps, and is not timed.

    Returns:
        Contender -> milliseconds of every timed step.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    index = 0
    while index < rounds:
        now(f"timing, round {index + 1} of {rounds}")
        names = list(steps)
        if index % 2:
            names.reverse()
        for name in names:
            first = before.get(name, lambda: None)
            _time_until(steps[name], *(WARM_UPS if cuda else WARM_UPS_ON_CPU), cuda=cuda, before=first)
            times[name] += _time_until(steps[name], *(TIMED if cuda else TIMED_ON_CPU), cuda=cuda, before=first)
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
