"""Time the vision tower and whole calls of `generate`: stock, patched, and decoding from CUDA graphs.

Weights are random, in the models' real shapes. README's chart and table are made of the file that this writes.
`--tokens` are numbers of new tokens, 0 for the tower alone.

python benchmarks/whole_call.py --json build/whole_call.json     needs a CUDA device with 40 GB free
"""

from functools import partial
from typing import Any

import torch
import transformers
from baselines import reasons_against_attention, set_attention
from measuring import DEVICE, Row, Step, measure_models, time_set_ups
from torch import nn
from transformers import PreTrainedModel

import hf_vit_accel
from hf_vit_accel.tools.bench import SHAPES

IMAGE = 151655
VIDEO = 151656
START = 151652
END = 151653
Options = dict[str, Any]
"""Keyword arguments."""
TEXT: dict[str, tuple[str, Options]] = {
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
"""The prefix of the model's classes, and its text config."""
FLASH = "flash_attention_3"
WAYS = ("stock", FLASH, "patched", "decoding")
"""Stock, stock with FlashAttention-3 in the tower, `patch(model)`, and that with `custom_generate=graphed_decoding`."""
PATCHED = ("patched", "decoding")
"""The ways that capture graphs: the third call at the latest, so three calls warm up."""
TOWER_ALONE = 0
"""The number of new tokens that stands for the tower without the language model."""
SHORT_CALLS = 10
"""Calls in a row about one picture with at most one new token. The host limits them, so their times spread."""
LONG_CALLS = 2
"""Calls in a row about one picture with more new tokens. A batch has one."""
BATCHES: dict[str, tuple[int, tuple[int, int, int]]] = {"one 1024²": (1, (1, 64, 64)), "32 x 34x46": (32, (1, 34, 46))}
"""Name -> rows, and the grid of the picture in every row."""


def build(
    name: str,
    image: int = IMAGE,
    video: int = VIDEO,
    start: int = START,
    end: int = END,
    *,
    device: torch.device | str = "cuda",
) -> PreTrainedModel:
    """Build a complete model in bf16 with random weights.

    Args:
        name: a name in TEXT
        image: the id of the token that stands for a merged patch of an image
        video: the id of the token that stands for a merged patch of a video
        start: the id of the token before an image or a frame
        end: the id of the token after an image or a frame
        device: the device of the weights
    """
    prefix, text = TEXT[name]
    tokens = dict(image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end)
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=dict(SHAPES[name][1]), text_config=text, dtype="bfloat16", **tokens
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def inputs_for(
    model: PreTrainedModel, grid: list[tuple[int, int, int]], *, video: bool = False
) -> dict[str, torch.Tensor]:
    """Draw the inputs of `generate`: random pictures and a text.

    Args:
        model: the model that takes the inputs
        grid: frames, height and width in patches of every picture
        video: make videos, with a token before and after every frame as Qwen3-VL has them
    """
    config = model.config
    tower: nn.Module = model.model.visual
    kind = "video" if video else "image"
    token = config.video_token_id if video else config.image_token_id
    ids = [3, 4]
    for t, h, w in grid:
        tokens_of_frame = h * w // tower.spatial_merge_size**2
        for _ in range(t):
            ids += [config.vision_start_token_id, *[token] * tokens_of_frame, config.vision_end_token_id]
    ids += range(5, 25)
    rows = sum(t * h * w for t, h, w in grid)
    weight = tower.patch_embed.proj.weight
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


def batch_of(inputs: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Repeat the inputs of one row; the pixels of all rows follow each other."""
    return {name: tensor.repeat(rows, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}


def whole_call(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int, way: str) -> None:
    """Make one greedy call, or call the tower alone."""
    options: Options = {"custom_generate": hf_vit_accel.graphed_decoding} if way == "decoding" else {}
    if new_tokens == TOWER_ALONE:
        with torch.inference_mode():
            model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    else:
        model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **options)


def ways_of(model: PreTrainedModel, new_tokens: int) -> list[str]:
    """Return the ways that can be timed: FlashAttention-3 may be missing, and the tower alone decodes nothing."""
    ways = list(WAYS)
    if new_tokens == TOWER_ALONE:
        ways.remove("decoding")
    if reasons_against_attention(FLASH, model.model.visual):
        ways.remove(FLASH)
    return ways


def set_up(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int, way: str) -> Step:
    """Prepare the model for one way by short calls, and return its call."""
    hf_vit_accel.unpatch(model)
    set_attention(model.model.visual, FLASH if way == FLASH else "sdpa")
    if way in PATCHED:
        hf_vit_accel.patch(model)
    for _ in range(3 if way in PATCHED else 1):
        whole_call(model, inputs, min(new_tokens, 1), way)
    return partial(whole_call, model, inputs, new_tokens, way)


def timed(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds of every way, measured in turns.

    Each way is warmed up anew: the third call at the latest is captured. A capture releases the memory that torch
    keeps, and a cache that grows by a token a step needs memory of every length. So the last call that warms up makes
    all tokens; without it stock took up to 2.5 times as long.
    """
    repeats = 1
    if len(inputs["input_ids"]) == 1:
        repeats = SHORT_CALLS if new_tokens <= 1 else LONG_CALLS
    ways = ways_of(model, new_tokens)
    return time_set_ups(ways, partial(set_up, model, inputs, new_tokens), rounds, repeats, warm_ups=1)


def measure_model(name: str, tokens: str, rounds: int) -> list[Row]:
    """Return the milliseconds of the fastest calls, for every batch and number of new tokens.

    Other work on the host, and memory that torch gets anew, make calls longer. A median of two would hold half of it.
    """
    rows: list[Row] = []
    model = build(name, device=DEVICE)
    model.requires_grad_(False)  # FlashAttention-3 without transformers' package has no backward
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for size, (batch, grid) in BATCHES.items():
        inputs = batch_of(inputs_for(model, [grid]), batch)
        for new_tokens in map(int, tokens.split(",")):
            times = timed(model, inputs, new_tokens, rounds)
            fastest = {way: min(of_way) for way, of_way in times.items()}
            ranges = {way: [min(of_way), max(of_way)] for way, of_way in times.items()}
            line = ", ".join(f"{way} {ms:.1f} ({fastest['stock'] / ms:.1f}x)" for way, ms in fastest.items())
            print(f"{name}, {size}, {new_tokens} new tokens, ms: {line}; all: {times}", flush=True)
            rows.append({"model": name, "size": size, "tokens": new_tokens, **fastest, "ranges": ranges})
    print(hf_vit_accel.status(model).decoding, flush=True)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, ",".join(TEXT), measure_model, options={"tokens": "0,1,64,256", "rounds": 3})
