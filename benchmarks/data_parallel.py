"""Time towers whose calls several GPUs of one machine share, beside one GPU.

torchrun --nproc-per-node 4 benchmarks/data_parallel.py --json results.json

Weights and pixels are random. Every possible number of ranks (1, 2, 4, 8) is timed in turns, in one run. Outputs are
compared with those of one GPU.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hf_vit_accel
from hf_vit_accel.families.interface import named_tensors
from hf_vit_accel.options.split import Assignment, cost, split
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench import build_tower, draw_pixels, family_of_tower, largest_error

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import Grid, Row, document_of, take_turns, write_json

SIZES = {
    "16 x 512²": [(1, 32, 32)] * 16,
    "64 x 512²": [(1, 32, 32)] * 64,
    "256 x 512²": [(1, 32, 32)] * 256,
    "video 64 x 36x64": [(64, 36, 64)],
    "32 pages": [(1, 136, 106)] * 32,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A CPU suffices to try this out with tiny towers."""
LARGEST_ERROR = 2e-2

Groups = Mapping[int, dist.ProcessGroup]
"""Process groups by their number of ranks."""


def outputs_of(tower: nn.Module, pixels: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """Call a tower; return every output."""
    return list(named_tensors(tower(pixels, grid_thw=torch.tensor(grid))).values())


def difference(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative error; 0.0 if all outputs are bit-equal."""
    if all(torch.equal(output, other) for output, other in zip(outputs, expected, strict=True)):
        return 0.0
    return largest_error(outputs, expected)


def milliseconds(act: Callable[[], object]) -> list[float]:
    """Time one call that all ranks begin together; return the time of every rank."""
    dist.barrier()
    elapsed = torch.tensor(bench.milliseconds(act, cuda=DEVICE.type == "cuda"), device=DEVICE)
    by_rank = [torch.empty_like(elapsed) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, elapsed)
    return [float(of_rank) for of_rank in by_rank]


def in_turns(tower: nn.Module, grid: Grid, groups: Groups, rounds: int) -> dict[int, Row]:
    """Time a call on every number of ranks, in turns.

    Args:
        tower: the tower
        grid: frames, height and width of every input
        groups: the process groups; one rank is timed without a group
        rounds: the number of turns

    Returns:
        By number of ranks: the slowest rank's median time, and the difference of its outputs from those of one rank.
    """
    pixels = draw_pixels(tower, grid, 0)
    counts = (1, *groups)
    rows: dict[int, Row] = {count: {"rows": len(pixels), "difference": 0.0} for count in counts}
    expected: list[torch.Tensor] = []

    def turn(count: int) -> list[float]:
        takes_part = count == 1 or dist.get_rank() < count

        def call() -> list[torch.Tensor]:
            return outputs_of(tower, pixels, grid) if takes_part else []

        error = 0.0
        if takes_part:
            hf_vit_accel.patch(tower, data_parallel=groups.get(count, False))
            outputs = call()  # computes layouts and plans
            if not expected:  # the first turn is that of one rank
                expected.extend(outputs)
            error = difference(outputs, expected)
            del outputs
        slowest = max(milliseconds(call))
        worst = torch.tensor(error, device=DEVICE)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        row = rows[count]
        row["difference"] = max(row["difference"], float(worst))
        status = hf_vit_accel.status(tower).towers[0]
        row |= {"status": status.ranks, "fallbacks": dict(status.fallbacks)}
        assert row["difference"] < LARGEST_ERROR, row
        return [slowest]

    for count, times in take_turns(counts, turn, rounds).items():
        rows[count]["ms"] = statistics.median(times)
    return rows


def compared(rows: dict[int, Row], count: int) -> Row:
    """Return the row of the JSON file that compares `count` ranks with one."""
    shared = rows[count]
    alone_ms = rows[1]["ms"]
    row = {key: shared[key] for key in ("rows", "difference", "status", "fallbacks")}
    return row | {"alone_ms": alone_ms, "shared_ms": shared["ms"], "shared_by_alone": shared["ms"] / alone_ms}


def balance(tower: nn.Module, grid: Grid, count: int) -> dict[str, float]:
    """Return the load of the slowest rank, divided by the mean load.

    Returns:
        `balance`, as the split computes it, and `balance_measured`, from the time of every rank's share alone.
    """
    family = family_of_tower(tower)
    parts = family.parts(tower)
    full = sum(parts.full(index) for index in range(len(parts.blocks))) / len(parts.blocks)
    shares = split(tuple(grid), count, full=full)
    costs = []
    for share_of_rank in shares:
        costs.append(sum(piece.frames * cost(piece.height * piece.width, full) for piece in share_of_rank))
    rank = dist.get_rank()
    share = list(Assignment(tuple(grid), shares).grid_of(rank)) if rank < count else []
    pixels = draw_pixels(tower, share, 0) if share else None
    hf_vit_accel.patch(tower)

    def encode_share() -> None:
        if pixels is not None:
            outputs_of(tower, pixels, share)

    for _ in range(2):
        by_rank = milliseconds(encode_share)[:count]
    return {"balance": max(costs) / statistics.mean(costs), "balance_measured": max(by_rank) / statistics.mean(by_rank)}


def measure(arguments: argparse.Namespace) -> None:
    """Check and time every model; rank 0 prints and writes the rows."""
    size = dist.get_world_size()
    groups = {count: dist.new_group(list(range(count))) for count in (2, 4, 8) if count <= size}
    runs: dict[int, Row] = {count: {"ranks": count, "towers": []} for count in groups}
    document = document_of([], runs=list(runs.values()))

    def report(row: Row) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)
            write_json(arguments.json, document)  # after every row: a run that is stopped keeps them

    for model in arguments.models.split(","):
        tower = build_tower(model, DEVICE, torch.bfloat16)
        for name in arguments.sizes.split(","):
            by_count = in_turns(tower, SIZES[name], groups, arguments.rounds)
            for count, run in runs.items():
                row = {"model": model, "size": name, "graphs": False} | balance(tower, SIZES[name], count)
                run["towers"].append(row | compared(by_count, count))
                report({"ranks": count} | run["towers"][-1])
        del tower


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen2.5-vl-7b,qwen3-vl-8b")
    parser.add_argument("--sizes", default=",".join(SIZES), help="names of SIZES, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    with torch.inference_mode():
        measure(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
