"""Time towers that LoRA trains on all Linears of their blocks: stock sdpa and compiled blocks beside patched.

    python benchmarks/lora.py --json build/lora.json

A step is forward and backward. Weights are random and in bf16. Adapters are in fp32 under autocast, as PEFT and
`Trainer(bf16=True)` leave them. In the JSON file, `error` is the largest relative L2 error against an fp32 run of
stock. It compares every output, and all adapters' gradients together.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import peft
import torch
from baselines import BASELINES
from measuring import (
    DEVICE,
    Forward,
    Grid,
    Row,
    Steps,
    clear,
    measure_models,
    peak_gigabytes,
    time_rows,
)
from torch import nn

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench import SIZES, CannotRunError, build_tower, family_of_tower, largest_error

SIZE = "16 x 512²"
RANK = 16


def add_adapters(tower: nn.Module, linears: list[str]) -> nn.Module:
    """Add adapters in fp32 to Linears; only the adapters require gradients."""
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=linears, init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    for name, parameter in tower.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * parameter.data.float()
            parameter.requires_grad_()
    return tower.train()


def adapted(model: str) -> nn.Module:
    """Build a tower with adapters on all Linears of its blocks."""
    torch.manual_seed(0)
    tower = build_tower(model, DEVICE, torch.bfloat16).requires_grad_(False)
    tower.set_attn_implementation("sdpa")
    in_blocks = {
        id(module) for block in family_of_tower(tower).parts(tower).blocks for module in block.module.modules()
    }
    linears = [name for name, module in tower.named_modules() if type(module) is nn.Linear and id(module) in in_blocks]
    return add_adapters(tower, linears)


@dataclass(frozen=True)
class Contender:
    """A tower and the function that runs its forward."""

    tower: nn.Module
    forward: Forward


def results(steps: Steps, contender: Contender, *, exact: bool = False) -> list[torch.Tensor]:
    """Run a step; return the outputs, then all gradients in one tensor, on the CPU."""
    clear(contender.tower)
    outputs = steps.step(contender.forward, exact=exact)
    gradients = [p.grad.flatten() for p in contender.tower.parameters() if p.grad is not None]
    clear(contender.tower)
    return [*(output.cpu() for output in outputs), torch.cat(gradients).cpu()]


def plain(steps: Steps, tower: nn.Module) -> Contender:
    """Return a contender that calls the tower's own forward."""
    return Contender(tower, steps.forward_of(tower))


def peak_with_weights(steps: Steps, contender: Contender) -> float | None:
    """Measure the peak memory of a step in GB, its weights included; None on a CPU."""
    peak = peak_gigabytes(partial(steps.step, contender.forward))
    return None if peak is None else peak + sum(weight.nbytes for weight in contender.tower.parameters()) / 1e9


def contenders(tower: nn.Module, grid: Grid, steps: Steps, stack: ExitStack) -> dict[str, Contender]:
    """Return stock, stock with compiled blocks (where that runs) and patched."""
    ways = {"stock sdpa": plain(steps, tower)}
    compiled = copy.deepcopy(tower)
    with suppress(CannotRunError):
        forward = stack.enter_context(BASELINES["compile_blocks"](compiled, grid))
        ways["stock compile_blocks"] = Contender(compiled, forward)
    ways["auto"] = plain(steps, hf_vit_accel.patch(copy.deepcopy(tower), strict=True))
    return ways


def measure(model: str, rounds: int) -> list[Row]:
    """Return a row for every contender."""
    grid = SIZES[SIZE]
    tower = adapted(model)
    steps = Steps(tower, grid)
    exact = copy.deepcopy(tower).float()
    expected = results(steps, plain(steps, exact), exact=True)
    del exact
    with ExitStack() as stack:
        ways = contenders(tower, grid, steps, stack)
        measured: dict[str, Row] = {}
        for way, contender in ways.items():
            error = largest_error(results(steps, contender), expected)
            measured[way] = dict(error=error, peak_gb=peak_with_weights(steps, contender))
        runs = {way: partial(steps.step, contender.forward) for way, contender in ways.items()}
        before = {way: partial(clear, contender.tower) for way, contender in ways.items()}
        common = dict(model=model, size=SIZE, patches=rows_of(grid), rank=RANK)
        rows = time_rows(runs, rounds, before=before, **common)
    return [row | measured[row["contender"]] for row in rows]


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b", measure)
