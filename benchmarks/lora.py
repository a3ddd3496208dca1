"""Time towers that LoRA trains on all Linears of their blocks: stock sdpa and compiled blocks beside patched.

    python benchmarks/lora.py --json build/lora.json

A step is forward and backward. Weights are random and in bf16. Adapters are in fp32 under autocast, as PEFT and
`Trainer(bf16=True)` leave them. In the JSON file, `error` is the largest relative L2 error against an fp32 run of
stock. It compares every output, and all adapters' gradients together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import peft
import torch
from baselines import BASELINES
from measuring import DEVICE, Grid, Row, largest_error, measure_models, time_rows
from torch import nn

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.towers import SIZES, build_tower, family_of_tower, weight_of

SIZE = "16 x 512²"
RANK = 16
Forward = Callable[..., object]


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

    def clear(self) -> None:
        """Drop the gradients."""
        self.tower.zero_grad(set_to_none=True)


class Steps:
    """Run training steps of several towers with the same pixels and the same incoming gradients.

    Args:
        tower: the adapted stock tower
        grid: frames, height and width of every input
        device: the device of the tower
    """

    def __init__(self, tower: nn.Module, grid: Grid, device: torch.device) -> None:
        self.device = device
        self.tensors_of = family_of_tower(tower).tensors_of
        self.grid = torch.tensor(grid, device=device)
        self.pixels_TP = torch.randn(rows_of(grid), weight_of(tower)[0].numel(), device=device).bfloat16()
        self.incoming: list[torch.Tensor] = []

    def plain(self, tower: nn.Module) -> Contender:
        """Return a contender that calls the tower's own forward."""
        return Contender(tower, lambda pixels_TP: tower(pixels_TP, grid_thw=self.grid))

    def run(self, contender: Contender, *, exact: bool = False) -> list[torch.Tensor]:
        """Run forward and backward; return the outputs.

        Args:
            contender: the tower to run
            exact: run in fp32, without autocast
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not exact):
            pixels_TP = self.pixels_TP.float() if exact else self.pixels_TP
            outputs = self.tensors_of(contender.forward(pixels_TP))
        if not self.incoming:
            self.incoming = [torch.randn_like(output) for output in outputs]
        gradients = [gradient.to(output.dtype) for gradient, output in zip(self.incoming, outputs, strict=True)]
        torch.autograd.backward(outputs, gradients)
        return [output.detach() for output in outputs]

    def results(self, contender: Contender, *, exact: bool = False) -> list[torch.Tensor]:
        """Run a step; return the outputs, then all gradients in one tensor, on the CPU."""
        contender.clear()
        outputs = self.run(contender, exact=exact)
        gradients = [p.grad.flatten() for p in contender.tower.parameters() if p.grad is not None]
        contender.clear()
        return [*(output.cpu() for output in outputs), torch.cat(gradients).cpu()]

    def peak_gigabytes(self, contender: Contender) -> float | None:
        """Measure the peak memory of a step, its weights included; None on a CPU."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(contender)
        peak = torch.cuda.max_memory_allocated() - before
        return (peak + sum(parameter.nbytes for parameter in contender.tower.parameters())) / 1e9


def contenders(tower: nn.Module, grid: Grid, steps: Steps, stack: ExitStack) -> dict[str, Contender]:
    """Return stock, stock with compiled blocks (where that runs) and patched."""
    ways = {"stock sdpa": steps.plain(tower)}
    compiled = copy.deepcopy(tower)
    opens = BASELINES["compile_blocks"](compiled)
    if not isinstance(opens, list):  # a list holds the reasons why it cannot run
        ways["stock compile_blocks"] = Contender(compiled, stack.enter_context(opens(compiled, grid)))
    ways["auto"] = steps.plain(hf_vit_accel.patch(copy.deepcopy(tower), strict=True))
    return ways


def measure(model: str, rounds: int) -> list[Row]:
    """Return a row for every contender."""
    grid = SIZES[SIZE]
    tower = adapted(model)
    steps = Steps(tower, grid, DEVICE)
    exact = copy.deepcopy(tower).float()
    expected = steps.results(steps.plain(exact), exact=True)
    del exact
    with ExitStack() as stack:
        ways = contenders(tower, grid, steps, stack)
        measured: dict[str, Row] = {}
        for way, contender in ways.items():
            error = largest_error(steps.results(contender), expected)
            measured[way] = dict(error=error, peak_gb=steps.peak_gigabytes(contender))
        runs = {way: partial(steps.run, contender) for way, contender in ways.items()}
        before = {way: contender.clear for way, contender in ways.items()}
        common = dict(model=model, size=SIZE, patches=rows_of(grid), rank=RANK)
        rows = time_rows(runs, rounds, DEVICE, before=before, **common)
    return [row | measured[row["contender"]] for row in rows]


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b", measure)
