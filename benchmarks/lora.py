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
from pathlib import Path
from typing import Annotated

import peft
import torch
import typer
from baselines import BASELINES
from measuring import Grid, Row, document_of, largest_error, time_rows, write_json
from torch import nn

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, parse_size, weight_of

Forward = Callable[..., object]


def adapted(model: str, device: torch.device, rank: int) -> nn.Module:
    """Build a tower with adapters; only the adapters require gradients."""
    torch.manual_seed(0)
    tower = build_tower(model, device, torch.bfloat16).requires_grad_(False)
    in_blocks = {
        id(module) for block in family_of_tower(tower).parts(tower).blocks for module in block.module.modules()
    }
    linears = [name for name, module in tower.named_modules() if type(module) is nn.Linear and id(module) in in_blocks]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears, init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    for name, parameter in tower.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * parameter.data.float()
            parameter.requires_grad_()
    tower.set_attn_implementation("sdpa")
    return tower.train()


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


def measure(model: str, size: str, rank: int, rounds: int, device: torch.device) -> list[Row]:
    """Return a row for every contender."""
    name, grid = parse_size(size)
    tower = adapted(model, device, rank)
    steps = Steps(tower, grid, device)
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
        common = dict(model=model, size=name, patches=rows_of(grid), rank=rank)
        rows = time_rows(runs, rounds, device, before=before, **common)
    return [row | measured[row["contender"]] for row in rows]


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    size: str = "16 x 512²",
    rank: int = 16,
    rounds: int = 2,
    device: str = "cuda",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
) -> None:
    """Time every model, and print and write the rows."""
    place = torch.device(device)
    rows: list[Row] = []
    document = document_of(rows, place)
    for model in models.split(","):
        rows += measure(model, size, rank, rounds, place)
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
