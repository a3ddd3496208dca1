"""Towers trained in every way that people train them: forward and backward of stock sdpa beside patched.

    python examples/benchmark/ways.py --json build/ways.json
    torchrun --nproc-per-node 2 examples/benchmark/ways.py      DDP and FSDP2 over two GPUs

Random weights, one step without an optimiser. difference: relative L2 between the gradients of both, which round
differently. calls: how the patched tower was served. slower: how much longer than stock a step took, in percent.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, parse_size, weight_of
from hf_vit_accel.tools.bench.work import milliseconds

DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)
"""A CPU, with tiny towers, is for trying this out."""

MOST_APART = 0.05
Way = Callable[[Any], Any]


def layers(tower: Any) -> list[Any]:
    """The modules of its layers."""
    return [block.module for block in family_of_tower(tower).parts(tower).blocks]


def checkpointed(tower: Any, *, reentrant: bool) -> Any:
    """Layers run again in the backward; by the name that this transformers has for it."""
    word = "activation" if hasattr(tower, "activation_checkpointing_enable") else "gradient"
    getattr(tower, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}})
    return tower


def partly(tower: Any) -> Any:
    """The last quarter of the layers, and what comes after them."""
    blocks = layers(tower)
    first = len(blocks) - max(1, len(blocks) // 4)
    frozen = {id(p) for block in blocks[:first] for p in block.parameters()}
    of_blocks = frozen | {id(p) for block in blocks for p in block.parameters()}
    before = [p for name, p in tower.named_parameters() if id(p) not in of_blocks and "merger" not in name]
    for parameter in [*before, *(p for p in tower.parameters() if id(p) in frozen)]:
        parameter.requires_grad_(False)
    return tower


def sharded(tower: Any, *, mixed: bool) -> Any:
    """Every layer, and the tower around them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    for block in layers(tower):
        fully_shard(block, mp_policy=policy)
    return fully_shard(tower, mp_policy=policy)


def compiled(tower: Any) -> Any:
    """As a user does; without what is known of towers before, of which torch remembers eight."""
    torch._dynamo.reset()
    return torch.compile(tower)


WAYS: dict[str, tuple[torch.dtype, bool, Way]] = {
    "all weights": (torch.bfloat16, False, lambda tower: tower),
    "the last quarter of the layers": (torch.bfloat16, False, partly),
    "autocast, bf16 weights": (torch.bfloat16, True, lambda tower: tower),
    "autocast, fp32 weights": (torch.float32, True, lambda tower: tower),
    "checkpointed": (torch.bfloat16, False, partial(checkpointed, reentrant=False)),
    "checkpointed, reentrant": (torch.bfloat16, False, partial(checkpointed, reentrant=True)),
    "torch.compile": (torch.bfloat16, False, compiled),
    "DDP": (torch.bfloat16, False, DistributedDataParallel),
    "FSDP2": (torch.bfloat16, False, partial(sharded, mixed=False)),
    "FSDP2, fp32 weights in bf16": (torch.float32, False, partial(sharded, mixed=True)),
}
"""A name to the weights' dtype, whether autocast is on, and what is done to a tower."""


def gradients(module: Any) -> torch.Tensor:
    """All of them as one; of a sharded tower those of this rank."""
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.cat([(each.to_local() if hasattr(each, "to_local") else each).float().flatten() for each in found])


def measure(model: str, size: str, way: str, rounds: int) -> list[dict[str, Any]]:
    """A row for stock and one for patched."""
    name, grid = parse_size(size)
    dtype, autocast, make = WAYS[way]
    torch.manual_seed(0)
    tower = build_tower(model, DEVICE, dtype).requires_grad_(True).train()
    tower.set_attn_implementation("sdpa")
    towers = {"stock sdpa": tower, "auto": copy.deepcopy(tower)}
    hf_vit_accel.patch(towers["auto"])
    modules = {contender: make(each) for contender, each in towers.items()}
    tensors_of = family_of_tower(tower).tensors_of
    pixels = torch.randn(rows_of(grid), weight_of(tower)[0].numel(), device=DEVICE).to(dtype)
    grid_thw, wanted = torch.tensor(grid, device=DEVICE), list[torch.Tensor]()
    cuda = DEVICE.type == "cuda"

    def step(contender: str) -> None:
        within: AbstractContextManager[Any] = nullcontext()
        if autocast:
            within = torch.autocast(DEVICE.type, torch.bfloat16)
        with within:
            outputs = tensors_of(modules[contender](pixels, grid_thw=grid_thw))
        wanted.extend(map(torch.randn_like, outputs[len(wanted) :]))
        torch.autograd.backward(outputs, [each.to(made.dtype) for each, made in zip(wanted, outputs, strict=True)])

    def clear(contender: str) -> None:
        modules[contender].zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {contender: [] for contender in modules}
    peaks: dict[str, float | None] = dict.fromkeys(modules)
    found: dict[str, torch.Tensor] = {}
    for index in range(2 * rounds):
        for contender in list(modules)[:: -1 if index % 2 else 1]:
            if index == 0:
                for _ in range(2):  # what is compiled, tried or recorded is over
                    clear(contender)
                    step(contender)
                found[contender] = gradients(modules[contender])
                clear(contender)
                if cuda:
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    step(contender)
                    peaks[contender] = (torch.cuda.max_memory_allocated() - before) / 1e9
            dist.barrier()
            times[contender].append(milliseconds(partial(step, contender), cuda=cuda, before=partial(clear, contender)))
    difference = float((found["auto"] - found["stock sdpa"]).norm() / found["stock sdpa"].norm())
    assert difference <= MOST_APART, f"{model}, {size}, {way}: gradients are {difference:.2g} apart"
    (status,) = hf_vit_accel.status(towers["auto"]).towers
    calls = dict(fast=status.calls, stock=status.stock_calls)
    medians = {contender: statistics.median(each) for contender, each in times.items()}
    common = dict(model=model, size=name, patches=rows_of(grid), way=way, ranks=dist.get_world_size())
    return [
        common
        | dict(contender=contender, ms=medians[contender], ms_low=min(each), ms_high=max(each))
        | dict(peak_gb=peaks[contender])
        | (dict(difference=difference, calls=calls, slower=slower(medians)) if contender == "auto" else {})
        for contender, each in times.items()
    ]


def slower(medians: dict[str, float]) -> float:
    """Percent; below zero where patched is faster."""
    return 100 * (medians["auto"] / medians["stock sdpa"] - 1)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    sizes: Annotated[str, typer.Option(help="Comma-separated, as `hf-vit-accel bench` takes them.")] = (
        "one 448²,16 x 512²"
    ),
    ways: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(WAYS),
    rounds: int = 2,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and write what was found."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    result: dict[str, Any] = {"device": name, "dtype": "bfloat16", "versions": machine.versions(), "rows": []}
    result |= {"machine": bench.host(), "gpus": dist.get_world_size()}
    for model in models.split(","):
        for size in sizes.split(","):
            for way in ways.split(";"):
                result["rows"] += measure(model, size, way, rounds)
                if dist.get_rank():
                    continue
                stock, ours = result["rows"][-2:]
                told = f"{stock['ms']:.1f} and {ours['ms']:.1f} ms, apart {ours['difference']:.1e}, {ours['calls']}"
                print(f"{model}, {size}, {way}: {told}", flush=True)
                if json_path is not None:
                    json_path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
