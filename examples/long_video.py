"""Run Qwen3-VL on a ten-minute video within the memory of a 24 GB card: stock beside patched.

    python examples/long_video.py --model Qwen/Qwen3-VL-8B-Instruct --video talk.mp4
    python examples/long_video.py --random qwen3-vl-8b                random weights in real shapes, generated frames

`--budget` limits the memory of the process in GB, whatever the card has. Stock and patched encode the video, then
generate. They begin with two frames a second, as Qwen3-VL's video processor does. Where memory runs out, they try half
as many, until all fits. Stock should run out while it encodes, since its tower holds the rows of every frame at once.
The patched tower holds the rows of one pass. Its limit is the rest: the weights, and the cache of a language model that
sees every frame (for Qwen3-VL-8B 17.5 GB, and 147 kB a token).
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmark.whole_call import TEXT, build, inputs_for
from media.checkpoints import config_of
from media.pictures import read_frames
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.tools.bench.towers import SHAPES

Inputs = dict[str, torch.Tensor]
Row = dict[str, Any]
"""A row of the JSON file."""


def clip_of(processor: ProcessorMixin, arguments: argparse.Namespace, fps: float) -> tuple[np.ndarray, VideoMetadata]:
    """Read the frames of a video file, or draw a moving pattern; return the frames and their metadata."""
    count = max(4, int(arguments.seconds * fps))
    if arguments.video is not None:
        processor.video_processor.fps = fps
        processor.video_processor.max_frames = count
        with arguments.video.open("rb") as file:
            return read_frames(file, arguments.video.suffix, processor)
    n, y, x = np.ogrid[:count, : arguments.height, : arguments.width]
    frames = np.stack([x + 3 * n + 0 * y, y + 5 * n + 0 * x, x + y + 7 * n], axis=-1).astype(np.uint8)
    metadata = VideoMetadata(
        count, fps=fps, width=arguments.width, height=arguments.height, frames_indices=list(range(count))
    )
    return frames, metadata


def inputs_of(
    model: PreTrainedModel, processor: ProcessorMixin | None, arguments: argparse.Namespace, fps: float
) -> Inputs:
    """Return the inputs of `generate`: by the checkpoint's processor, or random patches without a processor."""
    height = arguments.height
    width = arguments.width
    if processor is None:
        patch = model.config.vision_config.patch_size
        frames_of_grid = -(-max(4, int(arguments.seconds * fps)) // 2)
        return inputs_for(model, [(frames_of_grid, height // patch, width // patch)], video=True)
    frames, metadata = clip_of(processor, arguments, fps)
    content = [{"type": "video"}, {"type": "text", "text": arguments.prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    size = {"shortest_edge": height * width, "longest_edge": (len(frames) + 1) * height * width}  # of all frames
    inputs = processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        videos_kwargs={"size": size},
        return_tensors="pt",
    )
    return dict(inputs.to(model.device))


def encode(model: PreTrainedModel, inputs: Inputs) -> None:
    """Encode the video with the tower alone."""
    tower = model.model.visual
    tower(inputs["pixel_values_videos"].to(tower.dtype), grid_thw=inputs["video_grid_thw"])


def generate(model: PreTrainedModel, inputs: Inputs, tokens: int) -> list[int]:
    """Return the greedy tokens after the prompt."""
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def measured(step: Callable[[], object], device: torch.device) -> tuple[Row, object]:
    """Run a step; return its seconds and peak memory in GB (None on a CPU), and its result."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    result = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak_gb = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return {"seconds": round(time.perf_counter() - begin, 3), "peak_gb": peak_gb}, result


def run(model: PreTrainedModel, inputs: Inputs, tokens: int, processor: ProcessorMixin | None) -> Row:
    """Encode, then generate.

    Args:
        model: the model, stock or patched
        inputs: the inputs of `generate`
        tokens: the number of tokens to generate
        processor: decodes the tokens; None to return their ids

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
            row[name], result = measured(step, model.device)
        except torch.OutOfMemoryError:
            row[name] = "out of memory"
            break
    else:
        row["text"] = processor.decode(result) if processor is not None else result
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def mistake_in(arguments: argparse.Namespace) -> str | None:
    """Describe a mistake in the options, before a model is loaded; return None for options without one."""
    json_path = arguments.json
    if json_path is not None and not json_path.parent.is_dir():
        return f"cannot write {json_path}: there is no folder {json_path.parent}"
    if arguments.video is not None and not arguments.video.is_file():
        return f"{arguments.video} is {'a folder' if arguments.video.is_dir() else 'not there'}: name a video file"
    if arguments.video is not None and arguments.model is None:
        return "--random has no processor for --video: name a checkpoint with --model"
    if min(arguments.seconds, arguments.fps) <= 0 or arguments.seconds * arguments.fps < 4:
        return f"expected at least 4 frames, got --seconds {arguments.seconds:g} at --fps {arguments.fps:g}"
    if arguments.model is None:
        unit = 2 * SHAPES[arguments.random][1]["patch_size"]  # a merged token is 2 x 2 patches
        sides = (arguments.height, arguments.width)
        if min(sides) <= 0 or any(side % unit for side in sides):
            return f"expected --height and --width to be multiples of {unit}, got {sides[0]} and {sides[1]}"
        return None if torch.cuda.is_available() else "--random builds a full-size model, which needs a CUDA device"
    try:
        config_of(arguments.model, None)
    except ValueError as error:
        return str(error)
    if not is_torchvision_available():
        return "--model needs a decoder (pip install av) and the torchvision that belongs to your torch"
    if arguments.video is not None:
        try:
            clip_of(transformers.AutoProcessor.from_pretrained(arguments.model), arguments, arguments.fps)
        except Exception as error:  # decoders raise errors of any class for damaged data
            return f"cannot read {arguments.video}: {str(error) or type(error).__name__}"
    return None


def arguments_of_command() -> argparse.Namespace:
    """Read the command line, and end with a line about a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a checkpoint of Qwen3-VL")
    source.add_argument("--random", choices=list(TEXT), help="a shape with random weights")
    parser.add_argument("--video", type=Path, help="a video file; by default frames are generated")
    parser.add_argument("--seconds", type=float, default=600, help="length of the video")
    parser.add_argument("--fps", type=float, default=2.0)
    parser.add_argument("--height", type=int, default=192, help="of a frame; a multiple of 32, of 28 in Qwen2.5-VL")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--budget", type=float, default=24.0, help="GB")
    parser.add_argument("--prompt", default="What happens in this video?")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mistake = mistake_in(arguments)
    if mistake is not None:
        parser.error(mistake)
    return arguments


@torch.inference_mode()
def compare(model: PreTrainedModel, processor: ProcessorMixin | None, arguments: argparse.Namespace) -> list[Row]:
    """Run stock, then patched, with half as many frames after every lack of memory; print and return the rows."""
    rows = []
    for way in ("stock", "patched"):
        if way == "patched":
            hf_vit_accel.patch(model)
        fps = arguments.fps
        fits = False
        while not fits and fps * arguments.seconds >= 4:
            row = run(model, inputs_of(model, processor, arguments, fps), arguments.tokens, processor)
            rows.append({"way": way, "budget_gb": arguments.budget, "fps": fps} | row)
            print(json.dumps(rows[-1]), flush=True)
            fps = fps / 2
            fits = "text" in row
    return rows


def main() -> None:
    """Load the model, compare stock and patched, and write the rows."""
    arguments = arguments_of_command()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.budget * 1e9 / total))
    processor = None
    if arguments.random is not None:
        model = build(arguments.random, device=device)
    else:
        model = transformers.AutoModelForImageTextToText.from_pretrained(arguments.model, dtype="auto")
        model = model.to(device).eval()
        processor = transformers.AutoProcessor.from_pretrained(arguments.model)
    rows = compare(model, processor, arguments)
    if arguments.json is not None:
        name = machine.cuda_device_name() if device.type == "cuda" else "CPU"
        document = {"device": name, "dtype": str(model.dtype)[6:], "versions": machine.versions(), "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
