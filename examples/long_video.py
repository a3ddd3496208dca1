"""A ten-minute video through Qwen3-VL within the memory of a 24 GB card: stock beside patched.

    python examples/long_video.py --model Qwen/Qwen3-VL-8B-Instruct --video talk.mp4
    python examples/long_video.py --random qwen3-vl-8b                random weights in real shapes, generated frames

The process may allocate so many GB and no more (`--budget`), whatever the card has. Each way first encodes the video,
then generates. Two frames a second are taken, as Qwen3-VL's video processor does; where memory runs out, half as many,
and so on, until all fits. Stock is expected to run out while it encodes: its tower holds every frame's rows at once.
Patched, it holds those of a pass, and what is left decides: the weights, and the cache of a language model that sees
every frame (for Qwen3-VL-8B 17.5 GB, and 147 kB a token).
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmark.first_token import build, inputs_for
from media.pictures import read_frames
from transformers.video_utils import VideoMetadata

import hf_vit_accel
from hf_vit_accel import machine


def clip_of(processor: Any, arguments: argparse.Namespace, fps: float) -> tuple[Any, Any]:
    """Frames of a file, by whatever decoder there is, or a moving pattern; and what they are."""
    count, height, width = max(4, int(arguments.seconds * fps)), arguments.height, arguments.width
    if arguments.video is not None:
        processor.video_processor.fps, processor.video_processor.max_frames = fps, count
        with arguments.video.open("rb") as file:
            return read_frames(file, arguments.video.suffix, processor)
    n, y, x = np.ogrid[:count, :height, :width]
    frames = np.stack([x + 3 * n + 0 * y, y + 5 * n + 0 * x, x + y + 7 * n], axis=-1).astype(np.uint8)
    indices = list(range(count))
    return frames, VideoMetadata(count, fps=fps, width=width, height=height, frames_indices=indices)


def inputs_of(model: Any, processor: Any, arguments: argparse.Namespace, fps: float) -> dict[str, torch.Tensor]:
    """What `generate` takes: by the checkpoint's processor, or random patches where there is none."""
    height, width = arguments.height, arguments.width
    if processor is None:
        patch, frames = model.config.vision_config.patch_size, max(4, int(arguments.seconds * fps))
        return inputs_for(model, [(-(-frames // 2), height // patch, width // patch)], video=True)
    frames, metadata = clip_of(processor, arguments, fps)
    content = [{"type": "video"}, {"type": "text", "text": arguments.prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    size = {"shortest_edge": height * width, "longest_edge": (len(frames) + 1) * height * width}  # of all frames
    found = processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        videos_kwargs={"size": size},
        return_tensors="pt",
    )
    return dict(found.to(model.device))


def peak(device: torch.device) -> float | None:
    """GB since the last reset."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def steps(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> Iterator[tuple[str, Any]]:
    """Encode, then generate: what each gives."""
    yield "encode", None
    tower, pixels = model.model.visual, inputs["pixel_values_videos"]
    features = tower(pixels.to(tower.dtype), grid_thw=inputs["video_grid_thw"]).pooler_output
    yield "generate", len(features)
    del features
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    yield "done", ids[0, inputs["input_ids"].shape[1] :].tolist()


def run(model: Any, inputs: dict[str, torch.Tensor], tokens: int, processor: Any) -> dict[str, Any]:
    """One way at one number of frames: by step, seconds and peak GB, or "out of memory"."""
    device, at, begin = model.device, "", time.perf_counter()
    row: dict[str, Any] = {"patches": len(inputs["pixel_values_videos"]), "tokens": inputs["input_ids"].shape[1]}
    try:
        for step, made in steps(model, inputs, tokens):  # noqa: B007
            if at:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                row[at] = {"seconds": round(time.perf_counter() - begin, 3), "peak_gb": peak(device)}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            at, begin = step, time.perf_counter()
        row["text"] = processor.decode(made) if processor is not None else made
    except torch.OutOfMemoryError:
        row[at] = "out of memory"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def main() -> None:
    """Both ways, at as many frames as fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a checkpoint of Qwen3-VL")
    what.add_argument("--random", help="a shape with random weights, such as qwen3-vl-8b")
    parser.add_argument("--video", type=Path, help="a file; else frames are generated")
    parser.add_argument("--seconds", type=float, default=600, help="of the video")
    parser.add_argument("--fps", type=float, default=2.0)
    parser.add_argument("--height", type=int, default=192, help="of a frame, in pixels: a multiple of 32")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--budget", type=float, default=24.0, help="GB")
    parser.add_argument("--prompt", default="What happens in this video?")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.budget * 1e9 / total))
    auto, processor = transformers.AutoModelForImageTextToText, None
    if arguments.random is not None:
        model = build(arguments.random, device=device)
    else:
        model = auto.from_pretrained(arguments.model, dtype="auto").to(device).eval()
        processor = transformers.AutoProcessor.from_pretrained(arguments.model)
    rows = []
    with torch.inference_mode():
        for way in ("stock", "patched"):
            fps, fits = arguments.fps, False
            if way == "patched":
                hf_vit_accel.patch(model)
            while not fits and fps * arguments.seconds >= 4:
                row = run(model, inputs_of(model, processor, arguments, fps), arguments.tokens, processor)
                rows.append({"way": way, "budget_gb": arguments.budget, "fps": fps} | row)
                print(json.dumps(rows[-1]), flush=True)
                fps, fits = fps / 2, "text" in row
    if arguments.json is not None:
        name = machine.cuda_device_name() if device.type == "cuda" else "CPU"
        found = {"device": name, "dtype": str(model.dtype)[6:], "versions": machine.versions(), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
