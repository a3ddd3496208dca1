"""Draw batches of scenes, and make the inputs of a model from them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scenes import draw, scene
from tiny_models import FAMILIES, MEAN, STD

HELD_OUT = 1 << 40
"""Seeds from here on are never trained on."""
Batch = dict[str, Any]
"""Drawn scenes: `pixels` (scenes, frames, height, width, 3), `captions`, and whether they are videos (`video`)."""
Inputs = dict[str, torch.Tensor]
"""The inputs of a model."""


def patchify(pixels_BTHWC: torch.Tensor, patch: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut pictures or clips of one size into patches, in the order of Qwen's processors.

    Args:
        pixels_BTHWC: uint8 pixels by scene and frame
        patch: the side of a patch

    Returns:
        The flattened patches of all scenes, and the grid of one scene.
    """
    pixels = (pixels_BTHWC.permute(0, 1, 4, 2, 3).float() / 255 - MEAN) / STD
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    batch, frames, channels, height, width = pixels.shape
    t = frames // 2
    h = height // patch
    w = width // patch
    cut = pixels.view(batch, t, 2, channels, h // 2, 2, patch, w // 2, 2, patch)
    return cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(batch * t * h * w, -1), (t, h, w)


class Batches(IterableDataset[Batch]):
    """Draw endless batches of scenes of one size and kind; seed, rank and worker decide the scenes.

    Args:
        unit: the pixels along a side of a merged token
        batch: the scenes of a batch of pictures; a batch of videos has half as many
        seed: the seed of the training
        rank: the rank of this process
    """

    def __init__(self, unit: int, batch: int, seed: int, rank: int) -> None:
        self.unit = unit
        self.batch = batch
        self.seed = seed
        self.rank = rank

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        chance = random.Random(f"{self.seed} {self.rank} {worker.id if worker else 0}")
        while True:
            video = chance.random() < 1 / 6
            seeds = [chance.randrange(HELD_OUT) for _ in range(self.batch // (2 if video else 1))]
            yield draw_batch(seeds, self.unit, chance, video=video)


def draw_batch(seeds: list[int], unit: int, chance: random.Random, *, video: bool) -> Batch:
    """Draw the scenes of these seeds in one random size."""
    width, height = (unit * chance.randint(4, 7) for _ in range(2))
    scenes = [scene(seed, video=video) for seed in seeds]
    pixels = np.stack([np.stack([np.asarray(frame) for frame in draw(s, width, height)]) for s in scenes])
    return {"pixels": torch.from_numpy(pixels), "captions": [s.caption for s in scenes], "video": video}


def encode(
    batch: Batch, family: str, tokenizer: PreTrainedTokenizerFast, device: torch.device, *, answer: bool
) -> Inputs:
    """Make the model's inputs from a batch.

    Args:
        batch: the drawn scenes
        family: a name of FAMILIES
        tokenizer: the tokenizer of the model
        device: the device of the inputs
        answer: add the captions and their labels; otherwise the inputs end where the answer begins
    """
    patch = FAMILIES[family][1]["patch_size"]
    pixels, grid = patchify(batch["pixels"].to(device, non_blocking=True), patch)
    count = len(batch["captions"])
    video = batch["video"]
    kind = "video" if video else "image"
    prompt = prompt_ids(family, tokenizer, grid, video=video)
    answers = [_ids(tokenizer, f"{caption} <|im_end|>") if answer else [] for caption in batch["captions"]]
    longest = max(len(ids_of_answer) for ids_of_answer in answers)
    ids = torch.full((count, len(prompt) + longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, ids_of_answer in enumerate(answers):
        end = len(prompt) + len(ids_of_answer)
        ids[row, :end] = torch.tensor(prompt + ids_of_answer)
        labels[row, len(prompt) : end] = torch.tensor(ids_of_answer)
        mask[row, :end] = 1
    pad = tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == pad).long() * (2 if video else 1),
        f"{kind}_grid_thw": torch.tensor([grid] * count),
    }
    if answer:
        inputs["labels"] = labels
    inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
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


def position_ids(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Return the M-RoPE positions (3, rows, tokens). The first row gives them all, since all rows have one layout."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    first_row = {name: inputs[name][:1].cpu() for name in names if name in inputs}
    positions_31L, _ = model.model.get_rope_index(**first_row)
    positions_3BL: torch.Tensor = positions_31L.expand(-1, len(inputs["input_ids"]), -1).to(inputs["input_ids"].device)
    return positions_3BL


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def held_out(family: str, count: int, size: int = 100) -> Iterator[Batch]:
    """Draw batches of scenes that are never trained on, always the same; every sixth batch holds videos.

    Args:
        family: a name of FAMILIES
        count: the number of scenes
        size: the scenes of a batch
    """
    chance = random.Random(1)
    for index, first in enumerate(range(HELD_OUT, HELD_OUT + count, size)):
        seeds = list(range(first, min(first + size, HELD_OUT + count)))
        yield draw_batch(seeds, 2 * FAMILIES[family][1]["patch_size"], chance, video=index % 6 == 5)


def shuffle(batch: Batch) -> Batch:
    """Return the batch with the pictures moved on by one scene."""
    return batch | {"pixels": batch["pixels"].roll(1, 0)}
