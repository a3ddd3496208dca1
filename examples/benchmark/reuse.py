"""Time equal pictures encoded once: a step of GRPO, a chat that sends all its pictures again, many questions about each
picture, and calls without any copy.

python examples/benchmark/reuse.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b] [--device cuda] [--seconds 2]

Towers alone, random weights in real shapes. Results are compared before anything is timed; times are medians, with and
without reuse in turn. `ratio` is the time with reuse over that without; `bar` is the highest ratio aimed at. Where
nothing can be reused, `again` is a second tower without reuse: it shows by how much two equal towers differ.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from hf_vit_accel import ReuseConfig, patch, status
from hf_vit_accel.tools.bench.towers import build_tower, weight_of
from hf_vit_accel.tools.bench.work import milliseconds, outputs_of

PICTURES = 8
COPIES = 8
OLD = 10
QUESTIONS = 16
SIDE = 32
"""Patches of a picture's side: 512 x 512 pixels, with 16 a patch."""

LARGE = 64
"""The same of 1024 x 1024 pixels."""

ACROSS = ReuseConfig(across_calls=True)
Step = Callable[[], Any]


def draw(tower: Any, count: int, seed: int = 0, side: int = SIDE) -> list[torch.Tensor]:
    """Return random pictures in patches."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    shape = count, side * side, weight[0].numel()
    return list(torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype))


def call(tower: Any, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the features of a call."""
    sides = [math.isqrt(len(picture)) for picture in pictures]
    grid = torch.tensor([(1, side, side) for side in sides], device=pictures[0].device)
    return outputs_of(tower(torch.cat(pictures), grid_thw=grid))


def forward(tower: Any, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the features of a call without gradients."""
    with torch.no_grad():
        return call(tower, pictures)


def train(tower: Any, pictures: list[torch.Tensor], seed: int = 1) -> None:
    """Run forward and backward, each copy with a gradient of its own."""
    tower.zero_grad(set_to_none=True)
    outputs = call(tower, pictures)
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    incoming = [torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in outputs]
    torch.autograd.backward(outputs, incoming)


def in_turn(steps: dict[str, Step], seconds: float, cuda: bool) -> dict[str, float]:
    """Return the median milliseconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in (*steps.values(), *steps.values()):
        step()
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        for name in list(steps)[:: -1 if rounds % 2 else 1]:
            times[name].append(milliseconds(steps[name], cuda=cuda))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def error(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative L2 difference."""
    errors = []
    for output, reference in zip(outputs, expected, strict=True):
        errors.append(float((output.double() - reference.double()).norm() / reference.double().norm()))
    return max(errors)


def all_equal(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether all outputs are equal."""
    return all(torch.equal(output, reference) for output, reference in zip(outputs, expected, strict=True))


def verify(plain: Any, within: Any, across: Any) -> dict[str, float]:
    """Check that copies equal distinct pictures alone, bit for bit; that gradients are near; that no feature is stale.

    Args:
        plain: A tower without reuse.
        within: An equal tower with `reuse=True`.
        across: An equal tower that keeps features across calls.

    Returns:
        The errors of outputs and gradients.
    """
    pictures = draw(plain, PICTURES, 7)
    copies = [pictures[index % PICTURES] for index in range(PICTURES * COPIES)]
    repeated = [output.repeat(COPIES, 1) for output in forward(plain, pictures)]
    assert all_equal(forward(within, copies), repeated)
    gradients = {}
    for name, tower in (("plain", plain), ("within", within)):
        tower.requires_grad_(True)
        train(tower, copies)
        gradients[name] = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
        tower.requires_grad_(False).zero_grad(set_to_none=True)
    before = forward(across, pictures)
    assert all_equal(forward(across, pictures), before)
    weight = list(across.parameters())[-1]
    former = weight.detach().clone()
    weight.data.view(-1)[-1].add_(1)  # no version counter sees it
    assert not all_equal(forward(across, pictures), before), "a stale feature"
    weight.data.copy_(former)
    assert all_equal(forward(across, pictures), before), "these weights were seen before"
    return {"outputs": 0.0, "gradients": error(gradients["within"], gradients["plain"])}


def chat(tower: Any, calls: int, cuda: bool, *, seed: int, side: int = SIDE) -> list[float]:
    """Return the milliseconds of each of so many calls, each of one new picture and the ten before it."""
    pictures = draw(tower, OLD, seed, side)
    times = []
    for index in range(calls):
        pictures = [*pictures[-OLD:], *draw(tower, 1, seed * 100_003 + index, side)]
        times.append(milliseconds(lambda: forward(tower, pictures), cuda=cuda))  # noqa: B023
    return times


def ask(tower: Any, pictures: int, cuda: bool, *, seed: int) -> list[float]:
    """Return the milliseconds of all questions about each of so many pictures, every question a call."""
    times = []
    for index in range(pictures):
        picture = draw(tower, 1, seed * 100_003 + index)
        times.append(sum(milliseconds(lambda: forward(tower, picture), cuda=cuda) for _ in range(QUESTIONS)))  # noqa: B023
    return times


class Measurement:
    """The rows of one model, measured with three equal towers: without reuse, within calls, and across calls."""

    def __init__(self, model: str, device: torch.device, seconds: float, calls: int, build: Any) -> None:
        self.model = model
        self.seconds = seconds
        self.calls = calls
        self.cuda = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.plain = build(model, device, torch.bfloat16)
        self.within = deepcopy(self.plain)
        self.across = deepcopy(self.plain)
        self.patch_all()

    def patch_all(self) -> None:
        """Patch the three towers with the default options."""
        patch(self.plain)
        patch(self.within, reuse=True, strict=True)
        patch(self.across, reuse=ACROSS, strict=True)

    def row(self, what: str, times: dict[str, float], bar: float | None = None, **more: Any) -> None:
        """Add a row and print it."""
        ratio = times["reuse"] / times["without"]
        self.rows.append({"model": self.model, "what": what, "ms": times, "ratio": ratio, "bar": bar, **more})
        milliseconds_by_name = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
        print(f"{self.model}, {what}: {milliseconds_by_name}; {ratio:.3f} (bar {bar})", flush=True)

    def compare(self, steps: dict[str, Step]) -> dict[str, float]:
        """Return the median milliseconds of each step, run in turn."""
        return in_turn(steps, self.seconds, self.cuda)

    def copies_within_a_call(self) -> None:
        """Measure a call of copies: forward, and forward and backward; then a step of GRPO."""
        pictures = draw(self.plain, PICTURES)
        copies = [pictures[index // COPIES] for index in range(PICTURES * COPIES)]
        errors = verify(self.plain, self.within, self.across)
        steps: dict[str, Step] = {
            "without": lambda: forward(self.plain, copies),
            "reuse": lambda: forward(self.within, copies),
        }
        self.row(f"{PICTURES} x {COPIES} copies, forward", self.compare(steps), 0.16, errors=errors)
        self.plain.requires_grad_(True)
        self.within.requires_grad_(True)
        steps = {"without": lambda: train(self.plain, copies), "reuse": lambda: train(self.within, copies)}
        self.row(f"{PICTURES} x {COPIES} copies, forward and backward", self.compare(steps), 0.18)

        # A step of GRPO: the policy is trained; the old policy and the reference are frozen. Pictures come again when
        # a batch is used for several updates, which is when the frozen towers have seen them.
        frozen_across = deepcopy(self.across)
        patch(frozen_across, reuse=ACROSS, strict=True)
        frozen_plain = deepcopy(self.plain).requires_grad_(False)

        def step(policy: Any, old_policy: Any, reference: Any) -> None:
            train(policy, copies)
            forward(old_policy, copies)
            forward(reference, copies)

        steps = {
            "without": lambda: step(self.plain, frozen_plain, frozen_plain),
            "reuse": lambda: step(self.within, self.across, frozen_across),
        }
        self.row("policy, old policy and reference, same pictures again", self.compare(steps))
        self.plain.requires_grad_(False).zero_grad(set_to_none=True)
        self.within.requires_grad_(False).zero_grad(set_to_none=True)

    def chats(self, side: int, suffix: str) -> None:
        """Measure a chat of pictures of one size."""
        for tower in (self.plain, self.across):
            chat(tower, 5, self.cuda, seed=1, side=side)
        times: dict[str, list[float]] = {"without": [], "reuse": []}
        for block in range(10):  # in turn
            times["without"] += chat(self.plain, max(self.calls // 100, 2), self.cuda, seed=2 + block, side=side)
            of_block = chat(self.across, max(self.calls // 10, 2), self.cuda, seed=2 + block, side=side)
            times["reuse"] += of_block[1:]  # the first call brings ten new pictures
        what = f"chat, 1 new picture and {OLD} old, {side * side} patches each{suffix}"
        medians = {name: statistics.median(values) for name, values in times.items()}
        counts = str(status(self.across).towers[0].reuse).split(maxsplit=1)[1]
        self.row(what, medians, 0.15, calls=len(times["reuse"]), reuse=counts)

    def questions(self, suffix: str) -> None:
        """Measure many questions about a picture, one after the other."""
        times: dict[str, list[float]] = {"without": [], "reuse": []}
        for block in range(3):
            times["without"] += ask(self.plain, max(self.calls // 100, 1), self.cuda, seed=20 + block)
            times["reuse"] += ask(self.across, max(self.calls // 100, 1), self.cuda, seed=20 + block)
        medians = {name: statistics.median(values) for name, values in times.items()}
        self.row(f"{QUESTIONS} questions about a picture, one after the other{suffix}", medians)

    def single_calls(self) -> None:
        """Measure calls of equal pictures, of no copies, and of one known picture."""
        again = patch(deepcopy(self.plain))
        questions = draw(self.plain, 1) * QUESTIONS
        steps: dict[str, Step] = {
            "without": lambda: forward(self.plain, questions),
            "reuse": lambda: forward(self.within, questions),
        }
        self.row(f"{QUESTIONS} questions about a picture, in one call", self.compare(steps))
        for count in (16, 2, 1):
            pictures = draw(self.plain, count)
            steps = {
                "without": lambda: forward(self.plain, pictures),  # noqa: B023
                "reuse": lambda: forward(self.within, pictures),  # noqa: B023
                "again": lambda: forward(again, pictures),  # noqa: B023
            }
            times = self.compare(steps)
            self.row(f"{count} pictures, no copies", times, 1.01, more_us=1e3 * (times["reuse"] - times["without"]))
        steps = {"without": lambda: forward(self.plain, pictures), "reuse": lambda: forward(self.across, pictures)}
        self.row("1 picture that is known (what telling the weights costs)", self.compare(steps))


def measure(
    model: str, device: torch.device, seconds: float, calls: int, build: Any = build_tower
) -> list[dict[str, Any]]:
    """Return all rows of one model."""
    measurement = Measurement(model, device, seconds, calls, build)
    measurement.copies_within_a_call()
    for graphs in (False, True) if measurement.cuda else (False,):
        suffix = ", graphs" if graphs else ""
        patch(measurement.plain, cuda_graphs=graphs)
        patch(measurement.across, reuse=ACROSS, cuda_graphs=graphs)
        measurement.chats(SIDE, suffix)
        measurement.chats(LARGE, suffix)
        measurement.questions(suffix)
    measurement.patch_all()
    measurement.single_calls()
    return measurement.rows


def main() -> None:
    """Measure every model and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="qwen3-vl-8b,qwen2.5-vl-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each comparison")
    parser.add_argument("--calls", type=int, default=1000, help="of the chat")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for model in arguments.models.split(","):
        rows += measure(model, device, arguments.seconds, arguments.calls)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
