"""Draw batches of scenes, and make the inputs of a model from them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scenes import draw, scene
from transformers import PreTrainedTokenizerFast

PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
"""Families, and the side of a patch in pixels."""
HELD_OUT = 1 << 40
"""Seeds from here on were never trained on."""
Batch = dict[str, Any]
"""Drawn scenes: `pixels` (scenes, frames, height, width, 3), `captions`, and whether they are videos (`video`)."""
Inputs = dict[str, torch.Tensor]
"""The inputs of a model."""


def patchify(pixels_BTHWC: torch.Tensor, patch: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut uint8 pictures or clips of one size into patches, in the order of Qwen's processors.

    Returns the flattened patches of all scenes, and the grid of one scene.
    """
    pixels = (pixels_BTHWC.permute(0, 1, 4, 2, 3).float() / 255 - 0.5) / 0.5
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    batch, frames, channels, height, width = pixels.shape
    t = frames // 2
    h = height // patch
    w = width // patch
    cut = pixels.view(batch, t, 2, channels, h // 2, 2, patch, w // 2, 2, patch)
    return cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(batch * t * h * w, -1), (t, h, w)


def draw_batch(seeds: list[int], unit: int, chance: random.Random, *, video: bool) -> Batch:
    """Draw the scenes of these seeds in one random size."""
    width, height = (unit * chance.randint(4, 7) for _ in range(2))
    scenes = [scene(seed, video=video) for seed in seeds]
    pixels = np.stack([np.stack([np.asarray(frame) for frame in draw(s, width, height)]) for s in scenes])
    return {"pixels": torch.from_numpy(pixels), "captions": [s.caption for s in scenes], "video": video}


def encode(batch: Batch, family: str, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Inputs:
    """Make the model's inputs from a batch. They end where the answer begins."""
    pixels, grid = patchify(batch["pixels"].to(device), PATCH[family])
    count = len(batch["captions"])
    video = batch["video"]
    kind = "video" if video else "image"
    ids = torch.tensor([prompt_ids(family, tokenizer, grid, video=video)] * count)
    pad = tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == pad).long() * (2 if video else 1),
        f"{kind}_grid_thw": torch.tensor([grid] * count),
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}
    if video and family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.ones(count)
    inputs["pixel_values_videos" if video else "pixel_values"] = pixels
    return inputs


def prompt_ids(
    family: str, tokenizer: PreTrainedTokenizerFast, grid: tuple[int, int, int], *, video: bool
) -> list[int]:
    """Return the tokens of the prompt about one picture or video, up to the answer."""
    t, h, w = grid
    token = tokenizer.convert_tokens_to_ids
    start = token("<|vision_start|>")
    end = token("<|vision_end|>")
    pad = token("<|video_pad|>" if video else "<|image_pad|>")
    vision: list[int] = []
    if video and family == "qwen3_vl":  # Qwen3-VL writes every frame after its time
        for frame in range(t):
            vision += _ids(tokenizer, f"<{frame}.5 seconds>")
            vision += [start, *[pad] * (h * w // 4), end]
    else:
        vision = [start, *[pad] * (t * h * w // 4), end]
    question = f"describe this {'video' if video else 'picture'} . <|im_end|>"
    return [
        *_ids(tokenizer, "<|im_start|> user"),
        *vision,
        *_ids(tokenizer, question),
        *_ids(tokenizer, "<|im_start|> assistant"),
    ]


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def held_out(family: str, count: int, size: int = 100) -> Iterator[Batch]:
    """Draw batches of scenes that were never trained on, always the same; every sixth batch holds videos."""
    chance = random.Random(1)
    for index, first in enumerate(range(HELD_OUT, HELD_OUT + count, size)):
        seeds = list(range(first, min(first + size, HELD_OUT + count)))
        yield draw_batch(seeds, 2 * PATCH[family], chance, video=index % 6 == 5)
