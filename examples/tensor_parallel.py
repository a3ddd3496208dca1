"""A language model under tensor parallelism, its vision tower shared by the same GPUs: stock beside patched.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model Qwen/Qwen2.5-VL-7B-Instruct
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --random qwen3-vl-8b       random weights in real shapes

The plan "auto" splits the language model's weights and leaves every rank the whole tower, which encodes the same
pictures on each. Patched with `data_parallel=True`, each rank encodes a share. Told are milliseconds of the tower and
of the first token, and whether greedy tokens are those of stock, and of the patched tower that is not shared.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from benchmark.first_token import build, inputs_for
from transformers.distributed import DistributedConfig

import hf_vit_accel
from hf_vit_accel.tools.bench.towers import parse_size

WAYS: dict[str, dict[str, Any] | None] = {"stock": None, "patched": {}, "shared": {"data_parallel": True}}
SIZES = "1x32x32*16,64x36x64"


def with_plan(config: Any) -> Any:
    """The config; Qwen3-VL's says of the output layer alone how it is split, so its layers get Qwen3's plan."""
    text = config.get_text_config()
    if text.base_model_tp_plan is None:
        text.base_model_tp_plan = copy.copy(transformers.Qwen3Config.base_model_tp_plan)
    return config


def split_plan() -> DistributedConfig:
    """transformers' own plan over all ranks (5.15 does not count them by itself)."""
    return DistributedConfig(tp_plan="auto", tp_size=int(os.environ["WORLD_SIZE"]))


def load(model: str | None, random: str | None, device: torch.device) -> Any:
    """A model of a checkpoint or, of a name in `benchmark.first_token.TEXT` or a folder with a config, a random one."""
    auto = transformers.AutoModelForImageTextToText
    if random is None:
        config = with_plan(transformers.AutoConfig.from_pretrained(model))
        return auto.from_pretrained(model, config=config, dtype="auto", distributed_config=split_plan()).eval()
    torch.manual_seed(0)  # the same weights on every rank, of which each keeps its part
    if Path(random).exists():
        config = transformers.AutoConfig.from_pretrained(random)
        with device:
            whole = auto.from_config(config).eval()
    else:
        whole = build(random, device=device)
    config, dtype = with_plan(whole.config), whole.dtype
    return (
        type(whole)
        .from_pretrained(
            None,
            config=config,
            state_dict=whole.state_dict(),
            dtype=dtype,
            distributed_config=split_plan(),
        )
        .eval()
    )


def milliseconds(act: Callable[[], Any], device: torch.device) -> float:
    """All ranks begin together; the slowest rank's."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier()
    begin = time.perf_counter()
    act()
    wait()
    taken = torch.tensor(1e3 * (time.perf_counter() - begin), device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(model: Any, size: str, rounds: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """One size of input, the ways in turns. Greedy tokens of images only: of a video, the tower alone."""
    grid = list(parse_size(size)[1])
    images = all(t == 1 for t, _, _ in grid)
    inputs, tower = inputs_for(model, grid, video=not images), model.model.visual
    pixels, grid_thw = (
        next(v for k, v in inputs.items() if k.startswith(p)) for p in ("pixel", "image" if images else "video")
    )
    times: dict[str, list[float]] = {}
    outputs, row = {}, {"size": size, "rows": len(pixels)}

    def encode() -> Any:
        return tower(pixels, grid_thw=grid_thw)

    def generate(count: int) -> Any:
        return model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    for index in range(rounds):
        for way, options in WAYS.items():
            if index and way == "stock" and not images:  # seconds, for Qwen2.5-VL
                continue
            hf_vit_accel.unpatch(model)
            if options is not None:
                hf_vit_accel.patch(model, **options)
            encode()
            times.setdefault(f"tower, {way}", []).append(milliseconds(encode, device))
            if images:
                outputs[way] = generate(tokens)
                times.setdefault(f"first token, {way}", []).append(milliseconds(lambda: generate(1), device))
            if way == "shared":
                row["status"] = hf_vit_accel.status(model).towers[0].ranks
    row |= {name: statistics.median(taken) for name, taken in times.items()}
    row["shared_by_patched"] = row["tower, shared"] / row["tower, patched"]
    for way in ("stock", "patched") if images else ():
        same = torch.tensor(int(torch.equal(outputs["shared"], outputs[way])), device=device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        row[f"tokens are those of {way}"] = bool(same)
    return row


def main() -> None:
    """Measure, told by rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a checkpoint")
    what.add_argument("--random", help="a shape, or a folder with config.json: random weights")
    parser.add_argument("--sizes", default=SIZES, help="frames x height x width in patches, *n repeats, commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cuda, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    with torch.inference_mode():
        model = load(arguments.model, arguments.random, device)
        parameters = list(model.parameters())
        split = sum(hasattr(each, "to_local") for each in parameters)
        result: dict[str, Any] = {
            "model": arguments.model or arguments.random,
            "ranks": dist.get_world_size(),
            "rows": [],
        }
        result |= {"split": f"{split} of {len(parameters)} parameters", "transformers": transformers.__version__}
        for size in arguments.sizes.split(","):
            result["rows"].append(measure(model, size, arguments.rounds, arguments.tokens, device))
            if rank == 0:
                print(json.dumps(result["rows"][-1]), flush=True)
    if rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
