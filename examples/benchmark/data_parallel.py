"""Times towers whose calls are shared by the GPUs of one machine, beside one GPU alone, after checking their outputs.

torchrun --nproc-per-node 2 examples/benchmark/data_parallel.py [--json results.json]

Weights and pixels are random. First outputs, then 500 calls of random sizes and a rank that raises are checked, then
both ways are timed in turns. `exchange` times what brings features to all ranks: ours, and two ways of torch's own.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_vit_accel
from hf_vit_accel.bench.towers import build_tower, family_of_tower
from hf_vit_accel.tower import state_of

SIZES = {
    "16 x 512²": [(1, 32, 32)] * 16,
    "64 x 512²": [(1, 32, 32)] * 64,
    "256 x 512²": [(1, 32, 32)] * 256,
    "video 64 x 36x64": [(64, 36, 64)],
    "32 pages": [(1, 136, 106)] * 32,
}
SMALL = {f"{count} x 448²": [(1, 28, 28)] * count for count in (1, 2, 3, 4, 6, 8)}
"""Around the size from which sharing pays."""


def pixels_for(tower: Any, grid: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    """Random patches, the same on every rank."""
    weight = family_of_tower(tower).parts(tower).projection.weight
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grid)
    return torch.randn(rows, weight[0].numel(), generator=generator, device="cuda").to(weight.dtype)


def outputs_of(tower: Any, pixels: torch.Tensor, grid: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Every output of one call."""
    return family_of_tower(tower).tensors_of(tower(pixels, grid_thw=torch.tensor(grid)))


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error; 0.0 where all are bit-equal."""
    pairs = list(zip(found, expected, strict=True))
    if all(map(torch.equal, found, expected)):
        return 0.0
    return max(float((f.float() - e.float()).norm() / e.float().norm()) for f, e in pairs)


def milliseconds(act: Callable[[], Any]) -> float:
    """One call, all ranks beginning together; the slowest rank's."""
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    act()
    torch.cuda.synchronize()
    taken = torch.tensor(1e3 * (time.perf_counter() - begin), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def compare(tower: Any, grid: list[tuple[int, int, int]], rounds: int, **options: Any) -> dict[str, Any]:
    """One GPU's time and the shared one's, in turns, and how far their outputs differ."""
    pixels, ways = pixels_for(tower, grid), {"alone": False, "shared": True}
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected, row = [], {}
    for _ in range(2):
        for name, shared in ways.items():
            hf_vit_accel.patch(tower, data_parallel=shared, **options)
            outputs = [outputs_of(tower, pixels, grid) for _ in range(4)][-1]  # layouts, plans and graphs are made
            if not expected:
                expected = outputs
            elif not row:
                status = hf_vit_accel.status(tower).towers[0]
                row = dict(rows=len(pixels), difference=difference(outputs, expected), status=status.ranks)
                row["fallbacks"] = dict(status.fallbacks)
            del outputs
            times[name] += [milliseconds(lambda: outputs_of(tower, pixels, grid)) for _ in range(rounds)]
    row |= {f"{name}_ms": statistics.median(taken) for name, taken in times.items()}
    return row | {"shared_by_alone": row["shared_ms"] / row["alone_ms"]}


def random_calls(tower: Any, calls: int) -> dict[str, Any]:
    """Calls of random sizes, each beside one GPU's; how many were wrong, and whether a rank that raises is heard."""
    generator, wrong, equal = random.Random(0), 0, 0
    grids = [
        [
            (generator.choice((1, 1, 1, 2, 8)), *(2 * generator.randint(2, 24) for _ in "hw"))
            for _ in range(generator.randint(1, 9))
        ]
        for _ in range(calls)
    ]
    for begin in range(0, calls, 25):
        some = range(begin, min(begin + 25, calls))
        hf_vit_accel.patch(tower)
        expected = [outputs_of(tower, pixels_for(tower, grids[seed], seed), grids[seed]) for seed in some]
        hf_vit_accel.patch(tower, data_parallel=True)
        for seed, outputs in zip(some, expected, strict=True):
            off = difference(outputs_of(tower, pixels_for(tower, grids[seed], seed), grids[seed]), outputs)
            wrong, equal = wrong + (off > 2e-2), equal + (off == 0.0)
    heard, grid = "nothing", SIZES["16 x 512²"]
    pixels, state = pixels_for(tower, grid), state_of(tower)
    assert state is not None
    if dist.get_rank() == dist.get_world_size() - 1:
        get = state.routes.get

        def broken(*args: Any) -> Any:
            state.routes.get = get
            raise ValueError("raised on purpose")

        state.routes.get = broken
    try:
        outputs_of(tower, pixels, grid)
    except (ValueError, hf_vit_accel.RankError) as error:
        heard = f"{type(error).__name__}: {error}"
    outputs_of(tower, pixels, grid)  # and the next call is served
    return dict(calls=calls, wrong=wrong, equal=equal, heard=heard)


def exchanges(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of bringing so many megabytes a rank, of which the first has a third more, to all ranks."""
    from hf_vit_accel.ranks import ranks_of

    ranks, size, rank, found = ranks_of(True), dist.get_world_size(), dist.get_rank(), []
    assert ranks is not None
    for megabytes in (1, 10, 50, 200):
        sizes = [(megabytes << 20) * (4 if each == 0 else 3) // 3 for each in range(size)]
        mine = torch.zeros(sizes[rank], dtype=torch.uint8, device="cuda")
        room = [torch.empty(each, dtype=torch.uint8, device="cuda") for each in sizes]
        padded, largest = (
            torch.empty(size * max(sizes), dtype=torch.uint8, device="cuda"),
            torch.zeros(max(sizes), dtype=torch.uint8, device="cuda"),
        )
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: ranks.to_all(mine, room, when="timed"),  # noqa: B023
            "all_gather": lambda: dist.all_gather(room, mine),  # noqa: B023
            "padded": lambda: dist.all_gather_into_tensor(padded, largest),  # noqa: B023
            "words": lambda: ranks.words([0] * 64, when="timed"),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 2):
            for name, act in ways.items():
                times[name].append(milliseconds(act))
        found.append(dict(megabytes=megabytes) | {name: statistics.median(taken[2:]) for name, taken in times.items()})
    return found


def main() -> None:
    """All of it, told by rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen2.5-vl-7b,qwen3-vl-8b")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of those in SIZES, by name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    results: dict[str, Any] = {"ranks": dist.get_world_size(), "gpu": torch.cuda.get_device_name(), "towers": []}

    def tell(row: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)

    with torch.inference_mode():
        if dist.get_world_size() > 1:
            results["exchange"] = exchanges(arguments.rounds)
            tell({"exchange": results["exchange"]})
        for model in arguments.models.split(","):
            tower = build_tower(model, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
            if arguments.calls and dist.get_world_size() > 1:
                results[f"random calls, {model}"] = found = random_calls(tower, arguments.calls)
                tell({"model": model} | found)
            for graphs in (False, True):
                for name, grid in ({name: SIZES[name] for name in arguments.sizes.split(",")} | SMALL).items():
                    if graphs and name not in SMALL:
                        continue
                    row = {"model": model, "size": name, "graphs": graphs}
                    row |= compare(tower, grid, arguments.rounds, cuda_graphs=graphs)
                    results["towers"].append(row)
                    tell(row)
            del tower
    if arguments.json is not None and dist.get_rank() == 0:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
