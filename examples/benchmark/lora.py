"""Towers trained by LoRA on all Linears of their layers: forward and backward, stock sdpa and compiled beside patched.

    python examples/benchmark/lora.py --json build/lora.json

Random weights in bf16, adapters in fp32 under autocast, as PEFT and `Trainer(bf16=True)` have them. error: of outputs
and of all adapters' gradients together, the larger relative L2, against an fp32 run of stock.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import typer

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench.baselines import BASELINES
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, parse_size, weight_of
from hf_vit_accel.tools.bench.work import milliseconds


def adapted(model: str, device: torch.device, rank: int) -> Any:
    """A tower with adapters, of which alone a gradient is required."""
    torch.manual_seed(0)
    tower = build_tower(model, device, torch.bfloat16).requires_grad_(False)
    blocks = {id(each) for block in family_of_tower(tower).parts(tower).blocks for each in block.module.modules()}
    linears = [name for name, each in tower.named_modules() if type(each) is torch.nn.Linear and id(each) in blocks]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears, init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    for name, parameter in tower.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * parameter.data.float()
            parameter.requires_grad_()
    tower.set_attn_implementation("sdpa")
    return tower.train()


def measure(model: str, size: str, rank: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each way."""
    name, grid = parse_size(size)
    tower = adapted(model, device, rank)
    exact, tensors_of = copy.deepcopy(tower).float(), family_of_tower(tower).tensors_of
    pixels = torch.randn(rows_of(grid), weight_of(tower)[0].numel(), device=device)
    pixels, grid_thw = pixels.bfloat16(), torch.tensor(grid, device=device)
    wanted: list[torch.Tensor] = []

    def step(tower: Any, forward: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        wide = tower is exact
        with torch.autocast(device.type, torch.bfloat16, enabled=not wide):
            outputs = tensors_of(forward(pixels.float() if wide else pixels))
        wanted.extend(map(torch.randn_like, outputs[len(wanted) :]))
        torch.autograd.backward(outputs, [each.to(made.dtype) for each, made in zip(wanted, outputs, strict=True)])
        return [*(output.detach() for output in outputs)]

    def found(tower: Any, forward: Any) -> list[torch.Tensor]:
        tower.zero_grad(set_to_none=True)
        outputs = step(tower, forward)
        gradients = [p.grad.flatten() for p in tower.parameters() if p.grad is not None]
        return [*(output.cpu() for output in outputs), torch.cat(gradients).cpu()]

    def plain(tower: Any) -> tuple[Any, Any]:
        return tower, lambda pixels: tower(pixels, grid_thw=grid_thw)

    expected = found(*plain(exact))
    exact.cpu()  # for the memory
    rows, cuda = [], device.type == "cuda"
    with ExitStack() as stack:
        ways: dict[str, tuple[Any, Any]] = {"stock sdpa": plain(tower)}
        compiled = copy.deepcopy(tower)
        if not isinstance(opens := BASELINES["compile_blocks"](compiled), list):
            ways["stock compile_blocks"] = compiled, stack.enter_context(opens(compiled, grid))
        ways["auto"] = plain(copy.deepcopy(tower))
        hf_vit_accel.patch(ways["auto"][0], strict=True)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(2 * rounds):
            for way in list(ways)[:: -1 if index % 2 else 1]:
                which = ways[way]
                if index == 0:
                    made = found(*which)
                    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(made, expected, strict=True)]
                    which[0].zero_grad(set_to_none=True)
                    before = torch.cuda.memory_allocated() if cuda else 0
                    torch.cuda.reset_peak_memory_stats() if cuda else None
                    step(*which)
                    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
                    peak = (peak + sum(p.nbytes for p in which[0].parameters())) / 1e9 if cuda else None
                    row = dict(model=model, size=name, patches=rows_of(grid), contender=way, rank=rank, ms=0.0)
                    rows.append(row | dict(error=max(errors), peak_gb=peak))
                step(*which)
                clear = lambda: which[0].zero_grad(set_to_none=True)  # noqa: B023, E731
                times[way].append(milliseconds(lambda: step(*which), cuda=cuda, before=clear))  # noqa: B023
    for row in rows:
        row["ms"] = statistics.median(times[str(row["contender"])])
        print(row, flush=True)
    return rows


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    size: str = "16 x 512²",
    rank: int = 16,
    rounds: int = 4,
    device: str = "cuda",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and write what was found."""
    at = torch.device(device)
    name = torch.cuda.get_device_name() if at.type == "cuda" else device
    result: dict[str, Any] = {"device": name, "dtype": "bfloat16", "versions": machine.versions(), "rows": []}
    result["machine"] = bench.host()
    for model in models.split(","):
        result["rows"] += measure(model, size, rank, rounds, at)
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
