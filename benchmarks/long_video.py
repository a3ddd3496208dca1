"""Run Qwen3-VL on a ten-minute video within the memory of a 24 GB card: stock beside patched.

    python benchmarks/long_video.py --random qwen3-vl-8b       random weights and patches, in real shapes

`--budget` limits the memory of the process in GB, whatever the card has. Stock and patched encode the video, then
generate. They begin with two frames a second, as Qwen3-VL's video processor does. Where memory runs out, they try half
as many, until all fits. Stock should run out while it encodes, since its tower holds the rows of every frame at once.
The patched tower holds the rows of one pass. Its limit is the rest: the weights, and the cache of a language model that
sees every frame (for Qwen3-VL-8B 17.5 GB, and 147 kB a token).
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, document_of, run_once, write_json
from transformers import PreTrainedModel
from whole_call import TEXT, build, inputs_for

import hf_vit_accel

Inputs = dict[str, torch.Tensor]
Row = dict[str, Any]
"""A row of the JSON file."""


def inputs_of(model: PreTrainedModel, arguments: argparse.Namespace, fps: float) -> Inputs:
    """Return the inputs of `generate`: random patches and a text."""
    patch = model.config.vision_config.patch_size
    frames_of_grid = -(-max(4, int(arguments.seconds * fps)) // 2)
    grid = (frames_of_grid, arguments.height // patch, arguments.width // patch)
    return inputs_for(model, [grid], video=True)


def encode(model: PreTrainedModel, inputs: Inputs) -> None:
    """Encode the video with the tower alone."""
    tower = model.model.visual
    tower(inputs["pixel_values_videos"].to(tower.dtype), grid_thw=inputs["video_grid_thw"])


def generate(model: PreTrainedModel, inputs: Inputs, tokens: int) -> list[int]:
    """Return the greedy tokens after the prompt."""
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def run(model: PreTrainedModel, inputs: Inputs, tokens: int) -> Row:
    """Encode, then generate.

    Args:
        model: the model, stock or patched
        inputs: the inputs of `generate`
        tokens: the number of tokens to generate

    Returns:
        Seconds and peak memory of every step, or "out of memory"; `text` if all fits.
    """
    row: Row = {"patches": len(inputs["pixel_values_videos"]), "tokens": inputs["input_ids"].shape[1]}
    steps: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(model, inputs),
        "generate": lambda: generate(model, inputs, tokens),
    }
    for name, step in steps.items():
        try:
            measured = run_once(step)
        except torch.OutOfMemoryError:
            row[name] = "out of memory"
            break
        row[name] = {"seconds": round(measured.ms / 1e3, 3), "peak_gb": measured.peak_gb}
    else:
        row["text"] = measured.result
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def arguments_of_command() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", choices=list(TEXT), required=True, help="a shape with random weights")
    parser.add_argument("--seconds", type=float, default=600, help="length of the video")
    parser.add_argument("--fps", type=float, default=2.0)
    parser.add_argument("--height", type=int, default=192, help="of a frame; a multiple of 32, of 28 in Qwen2.5-VL")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--budget", type=float, default=24.0, help="GB")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def compare(model: PreTrainedModel, arguments: argparse.Namespace) -> list[Row]:
    """Run stock, then patched, with half as many frames after every lack of memory; print and return the rows."""
    rows = []
    for way in ("stock", "patched"):
        if way == "patched":
            hf_vit_accel.patch(model)
        fps = arguments.fps
        fits = False
        while not fits and fps * arguments.seconds >= 4:
            row = run(model, inputs_of(model, arguments, fps), arguments.tokens)
            rows.append({"way": way, "budget_gb": arguments.budget, "fps": fps} | row)
            print(json.dumps(rows[-1]), flush=True)
            fps = fps / 2
            fits = "text" in row
    return rows


def main() -> None:
    """Load the model, compare stock and patched, and write the rows."""
    arguments = arguments_of_command()
    if DEVICE.type == "cuda":
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.budget * 1e9 / total))
    rows = compare(build(arguments.random, device=DEVICE), arguments)
    write_json(arguments.json, document_of(rows))


if __name__ == "__main__":
    main()
