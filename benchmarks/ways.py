"""Time forward and backward of towers in the ways that people train them: stock sdpa beside patched.

    python benchmarks/ways.py --json build/ways.json
    torchrun --nproc-per-node 2 benchmarks/ways.py      DDP and FSDP2 over two GPUs

Weights are random; a step has no optimizer. In the JSON file, `difference` is the relative L2 difference of the
gradients, which stock and patched round differently. `calls` counts fast and stock calls of the patched tower. `slower`
is the extra time of a patched step in percent. `total_gb` is the memory of a patched tower in steady steps, with
`cuda_graphs=False` and by default: weights, gradients, activations and graphs.
"""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from measuring import (
    STEPS_UNTIL_STEADY,
    Grid,
    Row,
    Steps,
    clear,
    measure_models,
    peak_gigabytes,
    spread,
    switch_checkpointing,
    take_turns,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench import build_tower, family_of_tower, milliseconds, parse_size

DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)
"""A CPU suffices to try this out with tiny towers."""
LARGEST_DIFFERENCE = 0.05
LEAST_MS = 1300.0
"""The least milliseconds of all timed steps of a way together: short steps are timed more often."""
Wrap = Callable[[nn.Module], nn.Module]


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    """Return the tower's blocks."""
    return [block.module for block in family_of_tower(tower).parts(tower).blocks]


def same(tower: nn.Module) -> nn.Module:
    """Return the tower unchanged."""
    return tower


def checkpointed(tower: nn.Module, *, reentrant: bool) -> nn.Module:
    """Enable checkpointing."""
    switch_checkpointing(tower, enable=True, reentrant=reentrant)
    return tower


def partly(tower: nn.Module) -> nn.Module:
    """Train the last quarter of the blocks and the mergers only."""
    blocks = blocks_of(tower)
    quarter = max(1, len(blocks) // 4)
    trained = {id(parameter) for block in blocks[-quarter:] for parameter in block.parameters()}
    for name, parameter in tower.named_parameters():
        if id(parameter) not in trained and "merger" not in name:
            parameter.requires_grad_(False)
    return tower


def sharded(tower: nn.Module, *, mixed: bool) -> nn.Module:
    """Shard every block and the tower by FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    for block in blocks_of(tower):
        fully_shard(block, mp_policy=policy)
    return fully_shard(tower, mp_policy=policy)


@dataclass(frozen=True)
class Way:
    """Describe one way to train.

    Args:
        dtype: the dtype of the weights
        wrap: prepares the tower
        autocast: whether steps run under autocast to bf16
        batches: the batches of a step, whose gradients are added
    """

    dtype: torch.dtype = torch.bfloat16
    wrap: Wrap = same
    autocast: bool = False
    batches: int = 1


WAYS = {
    "all weights": Way(),
    "the last quarter of the layers": Way(wrap=partly),
    "gradients of two batches added": Way(batches=2),
    "autocast, bf16 weights": Way(autocast=True),
    "autocast, fp32 weights": Way(torch.float32, autocast=True),
    "checkpointed": Way(wrap=partial(checkpointed, reentrant=False)),
    "checkpointed, reentrant": Way(wrap=partial(checkpointed, reentrant=True)),
    "DDP": Way(wrap=DistributedDataParallel),
    "FSDP2": Way(wrap=partial(sharded, mixed=False)),
    "FSDP2, fp32 weights in bf16": Way(torch.float32, partial(sharded, mixed=True)),
}


def gradients(module: nn.Module) -> torch.Tensor:
    """Concatenate all gradients; those of a sharded module are this rank's."""
    flat = []
    for parameter in module.parameters():
        if parameter.grad is not None:
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            flat.append(local.float().flatten())
    return torch.cat(flat)


class StepsOfWay(Steps):
    """Run training steps of several modules in one way.

    Args:
        tower: a tower of the modules' class and weights
        grid: frames, height and width of every input
        way: the way to train
    """

    def __init__(self, tower: nn.Module, grid: Grid, way: Way) -> None:
        super().__init__(tower, grid, way.dtype, autocast=way.autocast)
        self.batches = way.batches

    def run(self, module: nn.Module) -> None:
        """Run forward and backward of every batch."""
        for _ in range(self.batches):
            self.step(self.forward_of(module))

    def warm_up(self, module: nn.Module) -> torch.Tensor:
        """Run two steps, which compile kernels; return the gradients of the second."""
        for _ in range(2):
            clear(module)
            self.run(module)
        result = gradients(module)
        clear(module)
        return result

    def total_gigabytes(self, tower: nn.Module, way: Way, cuda_graphs: Literal["auto", False]) -> float | None:
        """Measure the memory of a patched copy of a tower in steady steps; None on a CPU.

        It includes weights, gradients, activations and graphs, and free memory between tensors of earlier towers.
        Free blocks that torch only caches are given back first.
        """
        if DEVICE.type != "cuda":
            return None
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        module = way.wrap(hf_vit_accel.patch(copy.deepcopy(tower), cuda_graphs=cuda_graphs))
        for _ in range(STEPS_UNTIL_STEADY):
            clear(module)
            self.run(module)
        clear(module)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.run(module)
        return (torch.cuda.max_memory_reserved() - before) / 1e9

    def milliseconds(self, module: nn.Module) -> float:
        """Time a step that all ranks begin together."""
        dist.barrier()
        cuda = DEVICE.type == "cuda"
        clear(module)
        return milliseconds(lambda: self.run(module), cuda=cuda)


def number_of_turns(steps: StepsOfWay, modules: Mapping[str, nn.Module], rounds: int) -> int:
    """Return how often every module is timed: on a GPU until all took LEAST_MS together. All ranks return the same."""
    turns = torch.tensor(2 * rounds, device=DEVICE)
    if DEVICE.type == "cuda":
        milliseconds = sum(steps.milliseconds(module) for module in modules.values())
        turns.clamp_(min=math.ceil(LEAST_MS / milliseconds))
        dist.all_reduce(turns, dist.ReduceOp.MAX)
    return int(turns)


def measure(model: str, size: str, way: str, rounds: int) -> list[Row]:
    """Return a row for stock and one for patched.

    Raises:
        AssertionError: if the gradients differ by more than rounding
    """
    name, grid = parse_size(size)
    torch.manual_seed(0)
    tower = build_tower(model, DEVICE, WAYS[way].dtype).requires_grad_(True).train()
    tower.set_attn_implementation("sdpa")
    steps = StepsOfWay(tower, grid, WAYS[way])
    steps.run(tower)  # draws the incoming gradients, whose memory is no contender's
    clear(tower)
    totals = {
        "without graphs": steps.total_gigabytes(tower, WAYS[way], False),
        "default": steps.total_gigabytes(tower, WAYS[way], "auto"),
    }
    patched = hf_vit_accel.patch(copy.deepcopy(tower))
    modules = {"stock sdpa": WAYS[way].wrap(tower), "auto": WAYS[way].wrap(patched)}
    results: dict[str, torch.Tensor] = {}
    peaks: dict[str, float | None] = {}
    for contender, module in modules.items():
        results[contender] = steps.warm_up(module)
        peaks[contender] = peak_gigabytes(partial(steps.run, module))
    turns = number_of_turns(steps, modules, rounds)
    times = take_turns(modules, lambda contender: [steps.milliseconds(modules[contender])], turns)
    difference = float((results["auto"] - results["stock sdpa"]).norm() / results["stock sdpa"].norm())
    assert difference <= LARGEST_DIFFERENCE, f"{model}, {size}, {way}: gradients are {difference:.2g} apart"
    rows = []
    for contender, of_contender in times.items():
        row = dict(model=model, size=name, patches=rows_of(grid), way=way, ranks=dist.get_world_size())
        rows.append(row | dict(contender=contender, peak_gb=peaks[contender]) | spread(of_contender))
    status = hf_vit_accel.status(patched).towers[0]
    stock, ours = rows
    ours["difference"] = difference
    ours["calls"] = dict(fast=status.calls, stock=status.stock_calls)
    ours["total_gb"] = totals
    ours["slower"] = 100 * (ours["ms"] / stock["ms"] - 1)
    return rows


def measure_model(model: str, sizes: str, ways: str, rounds: int) -> list[Row]:
    """Return the rows of every size and way."""
    rows = []
    for size in sizes.split(","):
        for way in ways.split(";"):
            rows += measure(model, size, way, rounds)
            stock, ours = rows[-2:]
            line = f"{stock['ms']:.1f} and {ours['ms']:.1f} ms, apart {ours['difference']:.1e}, {ours['calls']}"
            if dist.get_rank() == 0:
                print(f"{model}, {size}, {way}: {line}, GB {ours['total_gb']}", flush=True)
    return rows


def main() -> None:
    """Start the processes' group, and time every model, size and way."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    options: dict[str, int | str] = {"sizes": "one 448²,16 x 512²", "ways": ";".join(WAYS), "rounds": 1}
    models = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b"
    measure_models(__doc__, models, measure_model, options=options, gpus=dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
