"""Run a language model under tensor parallelism, and share its vision tower among the same GPUs: stock beside patched.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model Qwen/Qwen2.5-VL-7B-Instruct
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --random qwen3-vl-8b       random weights in real shapes

The plan "auto" splits the language model's weights. Every rank keeps the complete tower and encodes the same pictures.
Patched with `data_parallel=True`, every rank encodes a share. The rows hold the milliseconds of the tower and of the
first token. They say whether greedy tokens are those of stock, and those of the patched tower that is not shared.
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
from benchmark.whole_call import TEXT, build, inputs_for
from media.checkpoints import config_of
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_vit_accel
from hf_vit_accel.tools.bench.towers import parse_size

Row = dict[str, Any]
"""A row of the JSON file."""
WAYS: dict[str, dict[str, bool] | None] = {"stock": None, "patched": {}, "shared": {"data_parallel": True}}
"""The arguments of `patch`; None for stock."""
SIZES = "1x32x32*16,64x36x64"
_HEADS = ("num_attention_heads", "num_key_value_heads")
"""What every rank gets an equal share of, by its name in the configuration."""


def with_plan(config: PretrainedConfig) -> PretrainedConfig:
    """Give Qwen3's plan to the layers of a text model that splits its output layer only, as Qwen3-VL's does."""
    text = config.get_text_config()
    if text.base_model_tp_plan is None:
        text.base_model_tp_plan = copy.copy(transformers.Qwen3Config.base_model_tp_plan)
    return config


def split_plan() -> DistributedConfig:
    """Return transformers' own plan over all ranks (5.15 does not count them by itself)."""
    return DistributedConfig(tp_plan="auto", tp_size=int(os.environ["WORLD_SIZE"]))


def load(model: str | None, random: str | None, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint, or build a model with random weights, and split it among the ranks.

    Args:
        model: a checkpoint
        random: a name in `benchmark.whole_call.TEXT`, or a folder with a config; None to load `model`
        device: the device of this rank
    """
    auto = transformers.AutoModelForImageTextToText
    if random is None:
        config = with_plan(transformers.AutoConfig.from_pretrained(model))
        return auto.from_pretrained(model, config=config, dtype="auto", distributed_config=split_plan()).eval()
    torch.manual_seed(0)  # all ranks draw the same weights, then keep their parts
    if Path(random).exists():
        config = transformers.AutoConfig.from_pretrained(random)
        with device:
            complete = auto.from_config(config).eval()
    else:
        complete = build(random, device=device)
    split = type(complete).from_pretrained(
        None,
        config=with_plan(complete.config),
        state_dict=complete.state_dict(),
        dtype=complete.dtype,
        distributed_config=split_plan(),
    )
    return split.eval()


def milliseconds(act: Callable[[], object], device: torch.device) -> float:
    """Time a call that all ranks begin together; return the time of the slowest rank."""
    _wait(device)
    dist.barrier()
    begin = time.perf_counter()
    act()
    _wait(device)
    elapsed = torch.tensor(1e3 * (time.perf_counter() - begin), device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(model: PreTrainedModel, size: str, rounds: int, tokens: int, device: torch.device) -> Row:
    """Time one size of input in turns: the tower and, for images, the first token; compare greedy tokens.

    Args:
        model: the split model
        size: the size of the input, as `hf-vit-accel bench` takes it
        rounds: the number of turns
        tokens: the number of greedy tokens to compare
        device: the device of this rank
    """
    grid = list(parse_size(size)[1])
    has_images = all(t == 1 for t, _, _ in grid)
    inputs = inputs_for(model, grid, video=not has_images)
    pixels = inputs["pixel_values" if has_images else "pixel_values_videos"]
    grid_thw = inputs["image_grid_thw" if has_images else "video_grid_thw"]
    tower = model.model.visual
    row: Row = {"size": size, "rows": len(pixels)}
    times: dict[str, list[float]] = {}
    outputs: dict[str, torch.Tensor] = {}

    def encode() -> object:
        return tower(pixels, grid_thw=grid_thw)

    def generate(count: int) -> torch.Tensor:
        return model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    for index in range(rounds):
        for way, options in WAYS.items():
            if index and way == "stock" and not has_images:  # a stock video takes seconds for Qwen2.5-VL
                continue
            hf_vit_accel.unpatch(model)
            if options is not None:
                hf_vit_accel.patch(model, **options)
            encode()
            times.setdefault(f"tower, {way}", []).append(milliseconds(encode, device))
            if has_images:
                outputs[way] = generate(tokens)
                times.setdefault(f"first token, {way}", []).append(milliseconds(lambda: generate(1), device))
            if way == "shared":
                row["status"] = hf_vit_accel.status(model).towers[0].ranks
    row |= {name: statistics.median(of_way) for name, of_way in times.items()}
    row["shared_by_patched"] = row["tower, shared"] / row["tower, patched"]
    if has_images:
        for way in ("stock", "patched"):
            row[f"tokens are those of {way}"] = _equal_on_all_ranks(outputs["shared"], outputs[way])
    return row


def _equal_on_all_ranks(tokens: torch.Tensor, expected: torch.Tensor) -> bool:
    is_equal = torch.tensor(int(torch.equal(tokens, expected)), device=tokens.device)
    dist.all_reduce(is_equal, dist.ReduceOp.MIN)
    return bool(is_equal)


def mistake_in(arguments: argparse.Namespace) -> str | None:
    """Describe a mistake in the options, before a model is loaded; return None for options without one."""
    if "LOCAL_RANK" not in os.environ:
        return "start it by torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py ..."
    if arguments.json is not None and not arguments.json.parent.is_dir():
        return f"cannot write {arguments.json}: there is no folder {arguments.json.parent}"
    if min(arguments.rounds, arguments.tokens) < 1:
        return f"expected --rounds and --tokens to be at least 1, got {arguments.rounds} and {arguments.tokens}"
    try:
        for size in arguments.sizes.split(","):
            parse_size(size)
        if arguments.model is None and not Path(arguments.random).exists():
            if arguments.random not in TEXT:
                return f"--random {arguments.random} is neither a folder nor one of {', '.join(TEXT)}"
            heads = {name: TEXT[arguments.random][1][name] for name in _HEADS}
        else:
            text = config_of(arguments.model or arguments.random, None).get_text_config()
            heads = {name: getattr(text, name) for name in _HEADS}
    except ValueError as error:
        return str(error)
    ranks = int(os.environ["WORLD_SIZE"])
    undivided = [f"{name} = {count}" for name, count in heads.items() if count % ranks]
    return f"{ranks} ranks cannot share {' and '.join(undivided)} evenly" if undivided else None


def main() -> None:
    """Measure all sizes; rank 0 prints and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a checkpoint")
    source.add_argument("--random", help=f"{' or '.join(TEXT)}, or a folder with config.json: random weights")
    parser.add_argument("--sizes", default=SIZES, help="frames x height x width in patches, *n repeats, commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mistake = mistake_in(arguments)
    if mistake is not None and int(os.environ.get("RANK", "0")):
        raise SystemExit(2)  # the first rank prints it
    if mistake is not None:
        parser.error(mistake)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    document: Row = {"model": arguments.model or arguments.random, "ranks": dist.get_world_size(), "rows": []}
    with torch.inference_mode():
        model = load(arguments.model, arguments.random, device)
        parameters = list(model.parameters())
        split = sum(hasattr(parameter, "to_local") for parameter in parameters)
        document["split"] = f"{split} of {len(parameters)} parameters"
        document["transformers"] = transformers.__version__
        for size in arguments.sizes.split(","):
            row = measure(model, size, arguments.rounds, arguments.tokens, device)
            document["rows"].append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
