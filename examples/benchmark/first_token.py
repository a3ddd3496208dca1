"""Time to the first token of `generate` for one 1024² image, stock and patched, with full-size random weights.

python examples/benchmark/first_token.py --json build/first_token.json     needs a CUDA device with 20 GB free
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.tools.bench.towers import SHAPES

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl-7b": (
        "Qwen2_5_VL",
        dict(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        ),
    ),
    "qwen3-vl-8b": (
        "Qwen3VL",
        dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        ),
    ),
}
WAYS: dict[str, dict[str, Any] | None] = {"stock": None, "patched": {}, "graphs": {"cuda_graphs": True}}


def build(
    name: str, image: int = IMAGE, video: int = VIDEO, start: int = START, end: int = END, *, device: Any = "cuda"
) -> Any:
    """The whole model on the GPU, bf16, random weights; with the ids of the special tokens."""
    prefix, text = TEXT[name]
    tokens = dict(image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end)
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=dict(SHAPES[name][1]), text_config=text, dtype="bfloat16", **tokens
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def inputs_for(model: Any, grid: list[tuple[int, int, int]], *, video: bool = False) -> dict[str, torch.Tensor]:
    """What `generate` takes: random pictures of a grid, or a video whose frames stand apart as Qwen3-VL's; and text."""
    config, tower = model.config, model.model.visual
    token, kind = (config.video_token_id, "video") if video else (config.image_token_id, "image")
    weight, ids = tower.patch_embed.proj.weight, [3, 4]
    for t, h, w in grid:
        some = h * w // tower.spatial_merge_size**2
        for _ in range(t):
            ids += [config.vision_start_token_id, *[token] * some, config.vision_end_token_id]
    ids += range(5, 25)
    rows = sum(t * h * w for t, h, w in grid)
    generator = torch.Generator(weight.device).manual_seed(0)
    pixels = torch.randn(rows, weight[0].numel(), device=weight.device, dtype=weight.dtype, generator=generator)
    ids_ = torch.tensor([ids], device=weight.device)
    return {
        "input_ids": ids_,
        "attention_mask": torch.ones_like(ids_),
        "mm_token_type_ids": (ids_ == token).long() * (2 if video else 1),
        f"pixel_values{'_videos' if video else ''}": pixels,
        f"{kind}_grid_thw": torch.tensor(grid, device=weight.device),
    }


def first_token(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Milliseconds of one greedy token, by the clock."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def main(
    models: Annotated[str, typer.Option(help="Comma-separated names of TEXT.")] = ",".join(TEXT),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
) -> None:
    """Time every model; medians in milliseconds."""
    rows: list[dict[str, Any]] = []
    for name in models.split(","):
        model = build(name)
        inputs = inputs_for(model, [(1, 64, 64)])
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(4):  # interleaved, each way warmed up anew
            for way, options in WAYS.items():
                hf_vit_accel.unpatch(model)
                if options is not None:
                    hf_vit_accel.patch(model, **options)
                for _ in range(5):
                    first_token(model, inputs)
                times[way] += [first_token(model, inputs) for _ in range(5)]
        medians = {way: statistics.median(found) for way, found in times.items()}
        for way, found in times.items():
            saved = 100 * (1 - medians[way] / medians["stock"])
            print(f"{name}  {way:8} {medians[way]:6.1f} ms ({min(found):.1f} - {max(found):.1f}), {saved:.0f}% less")
        rows.append({"model": name, "size": "one 1024²", **medians})
        if json_path is not None:
            result = {
                "versions": machine.versions(),
                "device": machine.cuda_device_name(),
                "dtype": "bfloat16",
                "rows": rows,
            }
            json_path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
