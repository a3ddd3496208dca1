"""Time the reuse of equal pictures: a step of GRPO, a chat, many questions about a picture, and calls without copies.

python benchmarks/reuse.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b] [--rounds 2]

Towers run alone, with random weights in real shapes. Results are compared before anything is timed. Times are medians,
with and without reuse in turn. In the JSON file, `ratio` is the time with reuse over the time without, and `bar` is the
largest ratio that we accept. Calls that can reuse nothing also time `again`, a second tower without reuse: it shows the
difference between two equal towers.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
from measuring import DEVICE, Row, Step, clear, measure_models, outputs_of, take_turns, timer_of
from torch import nn

from hf_vit_accel import ReuseConfig, patch, status
from hf_vit_accel.tools.bench import build_tower, largest_error, milliseconds, time_in_turns, weight_of

PICTURES = 8
COPIES = 8
OLD = 10
QUESTIONS = 16
SIDE = 32
LARGE = 64
"""Patches of a picture's side: 512 x 512 pixels, and 1024 x 1024, with 16 a patch."""
ACROSS = ReuseConfig(across_calls=True)
CUDA = DEVICE.type == "cuda"

Pictures = list[torch.Tensor]
"""The patches of every picture."""


def draw(tower: nn.Module, count: int, seed: int = 0, side: int = SIDE) -> Pictures:
    """Draw random pictures."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    shape = (count, side * side, weight[0].numel())
    return list(torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype))


def call(tower: nn.Module, pictures: Pictures) -> list[torch.Tensor]:
    """Call a tower; return its features."""
    sides = [math.isqrt(len(picture)) for picture in pictures]
    grid = torch.tensor([(1, side, side) for side in sides], device=pictures[0].device)
    return outputs_of(tower(torch.cat(pictures), grid_thw=grid))


def forward(tower: nn.Module, pictures: Pictures) -> list[torch.Tensor]:
    """Call a tower without gradients; return its features."""
    with torch.no_grad():
        return call(tower, pictures)


def train(tower: nn.Module, pictures: Pictures, seed: int = 1) -> None:
    """Run forward and backward; every copy of a picture gets its own gradient."""
    tower.zero_grad(set_to_none=True)
    outputs = call(tower, pictures)
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    incoming = [torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in outputs]
    torch.autograd.backward(outputs, incoming)


def are_equal(features: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Compare features bit by bit."""
    return all(torch.equal(feature, other) for feature, other in zip(features, expected, strict=True))


def verify(plain: nn.Module, reused: nn.Module, across: nn.Module) -> dict[str, float]:
    """Check features and gradients; return the errors of both.

    Features of copies equal those of the distinct pictures bit by bit, and no feature outlives its weights.

    Args:
        plain: a tower without reuse
        reused: a tower with reuse within a call
        across: a tower with reuse across calls
    """
    pictures = draw(plain, PICTURES, 7)
    copies = [pictures[index % PICTURES] for index in range(PICTURES * COPIES)]
    repeated = [feature.repeat(COPIES, 1) for feature in forward(plain, pictures)]
    assert are_equal(forward(reused, copies), repeated)
    gradients = {}
    for name, tower in (("plain", plain), ("reused", reused)):
        tower.requires_grad_(True)
        train(tower, copies)
        gradients[name] = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
        tower.requires_grad_(False).zero_grad(set_to_none=True)
    before = forward(across, pictures)
    assert are_equal(forward(across, pictures), before)
    weight = list(across.parameters())[-1]
    former = weight.detach().clone()
    weight.data.view(-1)[-1].add_(1)  # writes through .data leave the version counter alone
    assert not are_equal(forward(across, pictures), before), "a stale feature was returned"
    weight.data.copy_(former)
    assert are_equal(forward(across, pictures), before), "the features of these weights were kept"
    return {"outputs": 0.0, "gradients": largest_error(gradients["reused"], gradients["plain"])}


def chat(tower: nn.Module, calls: int, *, seed: int, side: int = SIDE) -> list[float]:
    """Return the milliseconds of every call of a chat: one new picture and the ten before it."""
    pictures = draw(tower, OLD, seed, side)
    times = []
    for index in range(calls):
        pictures = [*pictures[-OLD:], *draw(tower, 1, seed * 100_003 + index, side)]
        times.append(milliseconds(partial(forward, tower, pictures), cuda=CUDA))
    return times


def ask(tower: nn.Module, pictures: int, *, seed: int) -> list[float]:
    """Return the milliseconds of all questions about every picture; every question is a call."""
    times = []
    for index in range(pictures):
        call = partial(forward, tower, draw(tower, 1, seed * 100_003 + index))
        times.append(sum(milliseconds(call, cuda=CUDA) for _ in range(QUESTIONS)))
    return times


def medians_of(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of every contender."""
    return {name: statistics.median(of_contender) for name, of_contender in times.items()}


class Comparison:
    """Time three towers of one model: without reuse, with reuse within a call, and across calls.

    Args:
        model: the model's name
        rounds: the rounds of every comparison
        calls: the calls of the chat
    """

    def __init__(self, model: str, rounds: int, calls: int) -> None:
        self.model = model
        self.rounds = rounds
        self.calls = calls
        self.rows: list[Row] = []
        self.plain = build_tower(model, DEVICE, torch.bfloat16)
        self.reused = patch(deepcopy(self.plain), reuse=True, strict=True)
        self.kept = patch(deepcopy(self.plain), reuse=ACROSS, strict=True)
        patch(self.plain)

    def add(self, what: str, times: dict[str, float], bar: float | None = None, **fields: object) -> None:
        """Add a row and print it."""
        ratio = times["reuse"] / times["without"]
        self.rows.append({"model": self.model, "what": what, "ms": times, "ratio": ratio, "bar": bar, **fields})
        milliseconds_of_ways = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
        print(f"{self.model}, {what}: {milliseconds_of_ways}; {ratio:.3f} (bar {bar})", flush=True)

    def time(self, **steps: Step) -> dict[str, float]:
        """Return the median milliseconds of every step, timed in turns."""
        for step in steps.values():
            step()
            step()
        return medians_of(time_in_turns({name: timer_of(step) for name, step in steps.items()}, self.rounds))

    def forwards(self, pictures: Pictures) -> dict[str, Step]:
        """Return the steps of a call without and with reuse."""
        return {"without": partial(forward, self.plain, pictures), "reuse": partial(forward, self.reused, pictures)}

    def copies(self) -> None:
        """Compare calls of which every picture occurs eight times, and a step of GRPO on them."""
        errors = verify(self.plain, self.reused, self.kept)
        pictures = draw(self.plain, PICTURES)
        copies = [pictures[index // COPIES] for index in range(PICTURES * COPIES)]
        self.add(f"{PICTURES} x {COPIES} copies, forward", self.time(**self.forwards(copies)), 0.16, errors=errors)
        for tower in (self.plain, self.reused):
            tower.requires_grad_(True)
        times = self.time(without=partial(train, self.plain, copies), reuse=partial(train, self.reused, copies))
        self.add(f"{PICTURES} x {COPIES} copies, forward and backward", times, 0.18)
        self._policies(copies)
        for tower in (self.plain, self.reused):
            clear(tower.requires_grad_(False))

    def _policies(self, copies: Pictures) -> None:
        """Compare a step of GRPO: the policy is trained, the old policy and the reference are frozen.

        Pictures come again when a batch is used for several updates, and the frozen towers have seen them then.
        """
        reference = patch(deepcopy(self.kept), reuse=ACROSS, strict=True)
        plain_frozen = deepcopy(self.plain).requires_grad_(False)

        def step(policy: nn.Module, old_policy: nn.Module, reference: nn.Module) -> None:
            train(policy, copies)
            forward(old_policy, copies)
            forward(reference, copies)

        times = self.time(
            without=partial(step, self.plain, plain_frozen, plain_frozen),
            reuse=partial(step, self.reused, self.kept, reference),
        )
        self.add("policy, old policy and reference, same pictures again", times)

    def conversations(self) -> None:
        """Compare chats, and questions about a picture one after the other."""
        towers = {"without": self.plain, "reuse": self.kept}
        seeds = itertools.count(1)  # no two chats have a picture in common
        for side in (SIDE, LARGE):
            for tower in towers.values():
                chat(tower, 5, seed=next(seeds), side=side)

            def talk(name: str, side: int = side) -> list[float]:
                if name == "without":
                    return chat(self.plain, max(self.calls // 100, 2), seed=next(seeds), side=side)
                times = chat(self.kept, max(self.calls // 10, 2), seed=next(seeds), side=side)
                return times[1:]  # all pictures of the first call are new

            times = take_turns(towers, talk, 10)
            hits = str(status(self.kept).towers[0].reuse).split(maxsplit=1)[1]
            what = f"chat, 1 new picture and {OLD} old, {side * side} patches each"
            self.add(what, medians_of(times), 0.15, calls=len(times["reuse"]), reuse=hits)
        pictures = max(self.calls // 100, 1)
        times = take_turns(towers, lambda name: ask(towers[name], pictures, seed=next(seeds)), 3)
        self.add(f"{QUESTIONS} questions about a picture, one after the other", medians_of(times))

    def questions(self) -> None:
        """Compare a call in which one picture occurs once per question."""
        steps = self.forwards(draw(self.plain, 1) * QUESTIONS)
        self.add(f"{QUESTIONS} questions about a picture, in one call", self.time(**steps))

    def no_copies(self) -> None:
        """Compare calls that can reuse nothing, and a call of one known picture."""
        again = patch(deepcopy(self.plain))
        for count in (16, 2, 1):
            pictures = draw(self.plain, count)
            times = self.time(**self.forwards(pictures), again=partial(forward, again, pictures))
            microseconds = 1e3 * (times["reuse"] - times["without"])
            self.add(f"{count} pictures, no copies", times, 1.01, more_us=microseconds)
        known = self.time(without=partial(forward, self.plain, pictures), reuse=partial(forward, self.kept, pictures))
        self.add("1 picture that is known (what telling the weights costs)", known)


def measure(model: str, rounds: int, calls: int) -> list[Row]:
    """Return all rows of one model."""
    comparison = Comparison(model, rounds, calls)
    comparison.copies()
    comparison.conversations()
    comparison.questions()
    comparison.no_copies()
    return comparison.rows


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b", measure, options={"rounds": 2, "calls": 1000})
