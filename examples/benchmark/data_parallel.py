"""Times towers whose calls are shared by the GPUs of one machine, beside one GPU alone, after checking their outputs.

torchrun --nproc-per-node 4 examples/benchmark/data_parallel.py --json results.json
python examples/benchmark/data_parallel.py --plot results.png --json results.json     draws what was measured

Weights and pixels are random. First calls of random sizes and a rank that raises are checked, then every number of
ranks that there is (1, 2, 4, 8) is timed in turns, in one run. `pays` shares small calls, too, and says what that
takes; `exchange` times what brings features to all ranks: ours, and two ways of torch's own.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.sharing import data_parallel
from hf_vit_accel.sharing.data_parallel import checksum
from hf_vit_accel.sharing.split import Places, loads, split
from hf_vit_accel.tools.bench import require_matplotlib
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower
from hf_vit_accel.tower.state import state_of

SIZES = {
    "16 x 512²": [(1, 32, 32)] * 16,
    "64 x 512²": [(1, 32, 32)] * 64,
    "256 x 512²": [(1, 32, 32)] * 256,
    "video 64 x 36x64": [(64, 36, 64)],
    "32 pages": [(1, 136, 106)] * 32,
}
SMALL = (2, 3, 4, 6, 8)
"""Images of 448², around the size from which on sharing pays."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A CPU, with tiny towers, is for trying this out."""


def pixels_for(tower: Any, grid: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    """Random patches, the same on every rank."""
    weight = family_of_tower(tower).parts(tower).projection.weight
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grid)
    return torch.randn(rows, weight[0].numel(), generator=generator, device=DEVICE).to(weight.dtype)


def outputs_of(tower: Any, pixels: torch.Tensor, grid: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Every output of one call."""
    return family_of_tower(tower).tensors_of(tower(pixels, grid_thw=torch.tensor(grid)))


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error; 0.0 where all are bit-equal."""
    pairs = list(zip(found, expected, strict=True))
    if all(map(torch.equal, found, expected)):
        return 0.0
    return max(float((f.float() - e.float()).norm() / e.float().norm()) for f, e in pairs)


def synchronize() -> None:
    """Until the GPU is through, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(act: Callable[[], Any]) -> list[float]:
    """One call, all ranks beginning together; of each rank."""
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    act()
    synchronize()
    taken = torch.tensor(1e3 * (time.perf_counter() - begin), device=DEVICE)
    by_rank = [torch.empty_like(taken) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, taken)
    return [float(each) for each in by_rank]


def in_turns(
    tower: Any, grid: list[tuple[int, int, int]], groups: dict[int, Any], rounds: int, repeats: int = 1, **options: Any
) -> dict[int, dict[str, Any]]:
    """By number of ranks: the slowest rank's median time, and how far its outputs are from those of one rank."""
    pixels, rank = pixels_for(tower, grid), dist.get_rank()
    found: dict[int, dict[str, Any]] = {}
    times: dict[int, list[float]] = {count: [] for count in (1, *groups)}
    expected: list[torch.Tensor] = []
    for _ in range(rounds):
        for count in times:
            off = 0.0
            if rank < count or count == 1:
                hf_vit_accel.patch(tower, data_parallel=groups.get(count, False), **options)
                warm = 4 if options.get("cuda_graphs") else 1  # layouts and plans are made, and graphs
                outputs = [outputs_of(tower, pixels, grid) for _ in range(warm)][-1]
                expected = expected or outputs
                off = difference(outputs, expected)
                del outputs
            for _ in range(repeats):
                taken = milliseconds(lambda: outputs_of(tower, pixels, grid) if rank < count or count == 1 else None)  # noqa: B023
                times[count].append(max(taken))
            worst = torch.tensor(off, device=DEVICE)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            row = found.setdefault(count, {"rows": len(pixels), "difference": 0.0})
            row["difference"] = max(row["difference"], float(worst))
            status = hf_vit_accel.status(tower).towers[0]
            row |= {"status": status.ranks, "fallbacks": dict(status.fallbacks)}
            assert row["difference"] < 2e-2, row
    for count, all_ in times.items():
        found[count]["ms"] = statistics.median(all_)
    return found


def compared(found: dict[int, dict[str, Any]], count: int) -> dict[str, Any]:
    """A row of the file: so many ranks beside one."""
    shared, alone = found[count], found[1]["ms"]
    row = {key: shared[key] for key in ("rows", "difference", "status", "fallbacks")}
    return row | {"alone_ms": alone, "shared_ms": shared["ms"], "shared_by_alone": shared["ms"] / alone}


def balance(tower: Any, grid: list[tuple[int, int, int]], count: int) -> dict[str, float]:
    """Slowest rank by the mean: as the split takes it to be, and by the time of each one's share, encoded alone."""
    family = family_of_tower(tower)
    parts, clips = family.parts(tower), family.geometry(tower).clips
    full = sum(map(parts.full, range(len(parts.blocks)))) / len(parts.blocks)
    shares = split(tuple(grid), count, clips=clips, full=full)
    costs, rank = loads(tuple(grid), shares, clips=clips, full=full), dist.get_rank()
    mine = list(Places(tuple(grid), shares).grid_of(rank)) if rank < count else []
    pixels = pixels_for(tower, mine) if mine else None
    hf_vit_accel.patch(tower)
    for _ in range(2):
        taken = milliseconds(lambda: outputs_of(tower, pixels, mine) if mine else None)[:count]
    return {"balance": max(costs) / statistics.mean(costs), "balance_measured": max(taken) / statistics.mean(taken)}


def pays(tower: Any, groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Small calls, shared however small they are: rows that the slowest rank is spared, and milliseconds."""
    least, found = data_parallel.LEAST, []
    data_parallel.LEAST = dict.fromkeys(least, 1e-9)
    try:
        for graphs in (False, True):
            for images in SMALL:
                rounds = 1 if graphs else 3  # a graph is captured anew each time
                grid = [(1, 28, 28)] * images
                by_count = in_turns(tower, grid, groups, rounds, 18 // rounds, cuda_graphs=graphs)
                for count in groups:
                    spared = (images - -(-images // count)) * 784
                    row = dict(graphs=graphs, images=images, ranks=count, spared_rows=spared)
                    found.append(row | {key: compared(by_count, count)[key] for key in ("alone_ms", "shared_ms")})
    finally:
        data_parallel.LEAST = least
    return found


def random_calls(tower: Any, calls: int) -> dict[str, Any]:
    """Calls of random sizes, each beside one GPU's; how many were wrong, and whether a rank that raises is heard.

    Images and videos, also fewer than ranks; every 50th call holds none, which is the user's mistake on every rank.
    """
    generator, wrong, equal, empty, shared = random.Random(0), 0, 0, 0, 0
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
            if seed % 50 == 0:
                try:
                    tower(pixels_for(tower, grids[seed])[:0], grid_thw=torch.empty(0, 3, dtype=torch.long))
                except ValueError:
                    empty += 1
            off = difference(outputs_of(tower, pixels_for(tower, grids[seed], seed), grids[seed]), outputs)
            wrong, equal = wrong + (off > 2e-2), equal + (off == 0.0)
        state = state_of(tower)
        assert state is not None and state.sharing is not None
        shared += state.sharing.counts["shared"]
    counts = torch.tensor([wrong, calls - equal], device=DEVICE)
    dist.all_reduce(counts)  # of all ranks
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
    told = dict(calls=calls, shared=shared, empty=empty, wrong=int(counts[0]), unequal=int(counts[1]))
    return told | dict(outputs_compared=calls * dist.get_world_size(), heard=heard)


def exchanges(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of bringing so many megabytes a rank, of which the first has a third more, to all ranks."""
    from hf_vit_accel.sharing.ranks import ranks_of

    ranks, size, rank, found = ranks_of(True), dist.get_world_size(), dist.get_rank(), []
    assert ranks is not None
    for megabytes in (1, 10, 50, 200):
        sizes = [(megabytes << 20) * (4 if each == 0 else 3) // 3 for each in range(size)]
        mine = torch.zeros(sizes[rank], dtype=torch.uint8, device=DEVICE)
        room = [torch.empty(each, dtype=torch.uint8, device=DEVICE) for each in sizes]
        padded, largest = (
            torch.empty(size * max(sizes), dtype=torch.uint8, device=DEVICE),
            torch.zeros(max(sizes), dtype=torch.uint8, device=DEVICE),
        )
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: ranks.to_all(mine, room, when="timed"),  # noqa: B023
            "all_gather": lambda: dist.all_gather(room, mine),  # noqa: B023
            "padded": lambda: dist.all_gather_into_tensor(padded, largest),  # noqa: B023
            "words": lambda: ranks.words(
                [0] * 64, torch.zeros(1, dtype=torch.int64, device=ranks.device), when="timed"
            ),
            "checksum": lambda: checksum(mine[: len(mine) // 3072 * 3072].view(-1, 3072)),  # noqa: B023
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 2):
            for name, act in ways.items():
                times[name].append(max(milliseconds(act)))
        found.append(dict(megabytes=megabytes) | {name: statistics.median(taken[2:]) for name, taken in times.items()})
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """How many times as fast, over the number of GPUs; the dashed line is as many times as there are GPUs."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str], dict[int, float]] = {}
    for run in document["runs"]:
        for row in run["towers"]:
            if row["size"] in SIZES:
                lines.setdefault((row["model"], row["size"]), {1: 1.0})[run["ranks"]] = 1 / row["shared_by_alone"]
    models, counts = sorted({model for model, _ in lines}), [1, *(run["ranks"] for run in document["runs"])]
    figure = Figure(figsize=(5 * len(models), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, model in zip(figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True):
        axes.plot(counts, counts, "--", color="grey", label="linear")
        for (of, size), speedups in lines.items():
            if of == model:
                axes.plot(list(speedups), list(speedups.values()), marker="o", label=size)
        axes.set(title=model, xlabel="GPUs", xticks=counts)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("times as fast as one GPU")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"One call shared by GPUs ({document['device']}, {document['dtype']})")
    figure.savefig(path, dpi=110)


def main() -> None:
    """All of it, told by rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen2.5-vl-7b,qwen3-vl-8b")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of those in SIZES, by name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=250, help="of each model")
    parser.add_argument("--no-pays", action="store_true", help="leave out what small calls take when they are shared")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="measure nothing: draw what the JSON file holds")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        draw(json.loads(arguments.json.read_text(encoding="utf-8")), arguments.plot)
        return
    cuda = DEVICE.type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    name_of_gpu = torch.cuda.get_device_name() if cuda else "cpu"
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    size = dist.get_world_size()
    groups = {count: dist.new_group(list(range(count))) for count in (2, 4, 8) if count <= size}
    runs = {count: {"ranks": count, "gpu": name_of_gpu, "towers": []} for count in groups}
    results: dict[str, Any] = {"device": name_of_gpu, "dtype": "bfloat16", "versions": machine.versions()}
    results |= {"runs": list(runs.values()), "pays": {}}

    def tell(row: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)
            if arguments.json is not None:  # what was found is kept if the rest takes too long
                arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    with torch.inference_mode():
        for model in arguments.models.split(","):
            tower = build_tower(model, DEVICE, torch.bfloat16)
            if arguments.calls and size > 1:
                results[f"random calls, {model}"] = random_calls(tower, arguments.calls)
                tell({"model": model} | results[f"random calls, {model}"])
            for name in arguments.sizes.split(","):
                found = in_turns(tower, SIZES[name], groups, arguments.rounds)
                for count, run in runs.items():
                    row = {"model": model, "size": name, "graphs": False} | balance(tower, SIZES[name], count)
                    run["towers"].append(row | compared(found, count))
                    tell({"ranks": count} | run["towers"][-1])
            if groups and not arguments.no_pays:
                results["pays"][model] = pays(tower, groups)
                for row in results["pays"][model]:
                    tell({"pays": model} | row)
            del tower
        if size > 1:
            results["exchange"] = exchanges(arguments.rounds)
            tell({"exchange": results["exchange"]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
