"""Equal pictures encoded once: a step of GRPO, a chat that sends all its pictures again, many questions about each
picture, and calls without any copy.

python examples/benchmark/reuse.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b] [--device cuda] [--seconds 2]

Towers alone, random weights in real shapes. Results are compared before anything is timed; times are medians, with and
without reuse in turn. `ratio` is the time with reuse over that without; `bar` what is asked of it. Where nothing can be
reused, `again` is a second tower without reuse: what two equal towers differ by.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_vit_accel import ReuseConfig, patch, status
from hf_vit_accel.tools.bench.towers import build_tower, weight_of
from hf_vit_accel.tools.bench.work import milliseconds, outputs_of

PICTURES, COPIES, OLD, QUESTIONS = 8, 8, 10, 16
SIDE, LARGE = 32, 64
"""Patches of a picture's side: 512 x 512 pixels, and 1024 x 1024, with 16 a patch."""
ACROSS = ReuseConfig(across_calls=True)
Step = Callable[[], Any]


def draw(tower: Any, count: int, seed: int = 0, side: int = SIDE) -> list[torch.Tensor]:
    """Random pictures in patches."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    shape = count, side * side, weight[0].numel()
    return list(torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype))


def call(tower: Any, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Features of a call."""
    sides = [math.isqrt(len(picture)) for picture in pictures]
    grid = torch.tensor([(1, side, side) for side in sides], device=pictures[0].device)
    return outputs_of(tower(torch.cat(pictures), grid_thw=grid))


def forward(tower: Any, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same without gradients."""
    with torch.no_grad():
        return call(tower, pictures)


def train(tower: Any, pictures: list[torch.Tensor], seed: int = 1) -> None:
    """Forward and backward, each copy with a gradient of its own."""
    tower.zero_grad(set_to_none=True)
    outputs = call(tower, pictures)
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    incoming = [torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in outputs]
    torch.autograd.backward(outputs, incoming)


def in_turn(steps: dict[str, Step], seconds: float, cuda: bool) -> dict[str, float]:
    """Median milliseconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in (*steps.values(), *steps.values()):
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name in list(steps)[:: -1 if len(times[next(iter(steps))]) % 2 else 1]:
            times[name].append(milliseconds(steps[name], cuda=cuda))
    return {name: statistics.median(each) for name, each in times.items()}


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative L2 difference."""
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e.double()).norm() / e.double().norm()) for f, e in pairs)


def verify(plain: Any, reused: Any, kept: Any) -> dict[str, float]:
    """Copies are those of the distinct pictures alone, bit for bit; gradients are near; no feature is stale."""
    pictures = draw(plain, PICTURES, 7)
    copies = [pictures[index % PICTURES] for index in range(PICTURES * COPIES)]
    distinct, found = forward(plain, pictures), forward(reused, copies)
    assert all(torch.equal(f, d.repeat(COPIES, 1)) for f, d in zip(found, distinct, strict=True))
    gradients = {}
    for name, tower in (("plain", plain), ("reused", reused)):
        tower.requires_grad_(True)
        train(tower, copies)
        gradients[name] = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
        tower.requires_grad_(False).zero_grad(set_to_none=True)
    before = forward(kept, pictures)
    assert all(map(torch.equal, forward(kept, pictures), before))
    weight = next(reversed(list(kept.parameters())))
    former = weight.detach().clone()
    weight.data.view(-1)[-1].add_(1)  # no version counter sees it
    assert not all(map(torch.equal, forward(kept, pictures), before)), "a stale feature"
    weight.data.copy_(former)
    assert all(map(torch.equal, forward(kept, pictures), before)), "these weights were known"
    return {"outputs": 0.0, "gradients": error(gradients["reused"], gradients["plain"])}


def chat(tower: Any, calls: int, cuda: bool, *, seed: int, side: int = SIDE) -> list[float]:
    """Milliseconds of each of so many calls, each of one new picture and the ten before it."""
    pictures, times = draw(tower, OLD, seed, side), []
    for index in range(calls):
        pictures = [*pictures[-OLD:], *draw(tower, 1, seed * 100_003 + index, side)]
        times.append(milliseconds(lambda: forward(tower, pictures), cuda=cuda))  # noqa: B023
    return times


def ask(tower: Any, pictures: int, cuda: bool, *, seed: int) -> list[float]:
    """Milliseconds of all questions about each of so many pictures, every question a call."""
    times = []
    for index in range(pictures):
        picture = draw(tower, 1, seed * 100_003 + index)
        times.append(sum(milliseconds(lambda: forward(tower, picture), cuda=cuda) for _ in range(QUESTIONS)))  # noqa: B023
    return times


def measure(
    model: str, device: torch.device, seconds: float, calls: int, build: Any = build_tower
) -> list[dict[str, Any]]:
    """All rows of one model."""
    cuda, rows = device.type == "cuda", []
    plain = build(model, device, torch.bfloat16)
    reused, kept = deepcopy(plain), deepcopy(plain)
    patch(plain), patch(reused, reuse=True, strict=True), patch(kept, reuse=ACROSS, strict=True)
    errors = verify(plain, reused, kept)

    def row(what: str, times: dict[str, float], bar: float | None = None, **more: Any) -> None:
        one = {
            "model": model,
            "what": what,
            "ms": times,
            "ratio": times["reuse"] / times["without"],
            "bar": bar,
            **more,
        }
        rows.append(one)
        told = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
        print(f"{model}, {what}: {told}; {one['ratio']:.3f} (bar {bar})", flush=True)

    pictures = draw(plain, PICTURES)
    copies = [pictures[index // COPIES] for index in range(PICTURES * COPIES)]
    each = {"without": plain, "reuse": reused}
    steps: dict[str, Step] = {name: lambda tower=tower: forward(tower, copies) for name, tower in each.items()}
    row(f"{PICTURES} x {COPIES} copies, forward", in_turn(steps, seconds, cuda), 0.16, errors=errors)
    for tower in each.values():
        tower.requires_grad_(True)
    steps = {name: lambda tower=tower: train(tower, copies) for name, tower in each.items()}
    row(f"{PICTURES} x {COPIES} copies, forward and backward", in_turn(steps, seconds, cuda), 0.18)

    # A step of GRPO: the policy is trained; the old policy and the reference are frozen. Pictures come again when
    # a batch is used for several updates, which is when the frozen towers have seen them.
    frozen = deepcopy(kept)
    patch(frozen, reuse=ACROSS, strict=True)
    plain_frozen = deepcopy(plain).requires_grad_(False)

    def step(policy: Any, *others: Any) -> None:
        train(policy, copies)
        for other in others:
            forward(other, copies)

    steps = {
        "without": partial(step, plain, plain_frozen, plain_frozen),
        "reuse": partial(step, reused, kept, frozen),
    }
    row("policy, old policy and reference, same pictures again", in_turn(steps, seconds, cuda))
    for tower in each.values():
        tower.requires_grad_(False).zero_grad(set_to_none=True)

    for graphs in (False, True) if cuda else (False,):
        patch(plain, cuda_graphs=graphs), patch(kept, reuse=ACROSS, cuda_graphs=graphs)
        for side in (SIDE, LARGE):
            for tower in (plain, kept):
                chat(tower, 5, cuda, seed=1, side=side)
            times: dict[str, list[float]] = {"without": [], "reuse": []}
            for block in range(10):  # in turn
                times["without"] += chat(plain, max(calls // 100, 2), cuda, seed=2 + block, side=side)
                found = chat(kept, max(calls // 10, 2), cuda, seed=2 + block, side=side)
                times["reuse"] += found[1:]  # the first brings ten pictures
            what = f"chat, 1 new picture and {OLD} old, {side * side} patches each{', graphs' if graphs else ''}"
            told = status(kept).towers[0].reuse
            medians = {name: statistics.median(each) for name, each in times.items()}
            row(what, medians, 0.15, calls=len(times["reuse"]), reuse=str(told).split(maxsplit=1)[1])

        asked: dict[str, list[float]] = {"without": [], "reuse": []}
        for block in range(3):
            for name, tower in (("without", plain), ("reuse", kept)):
                asked[name] += ask(tower, max(calls // 100, 1), cuda, seed=20 + block)
        what = f"{QUESTIONS} questions about a picture, one after the other{', graphs' if graphs else ''}"
        row(what, {name: statistics.median(each) for name, each in asked.items()})

    patch(plain), patch(reused, reuse=True, strict=True), patch(kept, reuse=ACROSS, strict=True)
    pictures = draw(plain, 1) * QUESTIONS
    steps = {name: lambda tower=tower: forward(tower, pictures) for name, tower in each.items()}
    row(f"{QUESTIONS} questions about a picture, in one call", in_turn(steps, seconds, cuda))
    each["again"] = patch(deepcopy(plain))
    for count in (16, 2, 1):
        pictures = draw(plain, count)
        steps = {name: lambda tower=tower: forward(tower, pictures) for name, tower in each.items()}  # noqa: B023
        times_ms = in_turn(steps, seconds, cuda)
        row(f"{count} pictures, no copies", times_ms, 1.01, more_us=1e3 * (times_ms["reuse"] - times_ms["without"]))
    steps = {"without": lambda: forward(plain, pictures), "reuse": lambda: forward(kept, pictures)}
    row("1 picture that is known (what telling the weights costs)", in_turn(steps, seconds, cuda))
    return rows


def main() -> None:
    """Measure every model and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="qwen3-vl-8b,qwen2.5-vl-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each comparison")
    parser.add_argument("--calls", type=int, default=1000, help="of the chat")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for model in arguments.models.split(","):
        rows += measure(model, device, arguments.seconds, arguments.calls)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
