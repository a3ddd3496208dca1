"""Trains a tiny Qwen2-VL, Qwen2.5-VL or Qwen3-VL to caption the scenes of `scenes.py`, and saves it as a checkpoint.

accelerate launch examples/tiny_captioner/train.py qwen2_5_vl --output build/tiny_captioner/qwen2_5_vl

The architectures are the real ones, only small: vision heads 80, 80 and 72 wide, windows and full layers, deepstack,
interpolated positions, M-RoPE. Every batch holds scenes of one picture size; sizes change from batch to batch.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset

import hf_vit_accel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scenes import WORDS, draw, scene

PROMPT_WORDS = (
    *("user", "assistant", "system", "describe", "this", "picture", "video"),
    *(".", ",", "?", "!", ":", "-", "<", ">", "seconds", "1"),
)
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|> {{ message['role'] }} \
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
HELD_OUT = 1 << 40
"""Seeds from here on are never trained on."""
MEAN = STD = 0.5

_TEXT: dict[str, Any] = dict(
    hidden_size=160,
    intermediate_size=416,
    num_hidden_layers=4,
    num_attention_heads=5,
    num_key_value_heads=5,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        dict(depth=4, embed_dim=160, hidden_size=160, num_heads=2, mlp_ratio=2, patch_size=14),
        dict(_TEXT, rope_parameters=_MROPE),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(
            depth=4,
            hidden_size=160,
            num_heads=2,
            intermediate_size=212,
            out_hidden_size=160,
            patch_size=14,
            window_size=112,
            fullatt_block_indexes=[1, 3],
        ),
        dict(_TEXT, rope_parameters=_MROPE),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        dict(
            depth=4,
            hidden_size=144,
            num_heads=2,
            intermediate_size=288,
            out_hidden_size=160,
            patch_size=16,
            num_position_embeddings=256,
            deepstack_visual_indexes=[1],
        ),
        dict(_TEXT, intermediate_size=320, head_dim=32, rope_parameters=_MROPE | {"mrope_interleaved": True}),
    ),
}


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per word of the captions, Qwen's special tokens, and a chat template like Qwen's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = dict.fromkeys([*WORDS, *PROMPT_WORDS, "<unk>", *SPECIAL_TOKENS])
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(family: str, tokenizer: Any, seed: int) -> Any:
    """The untrained model, fp32."""
    prefix, vision, text = FAMILIES[family]
    token = tokenizer.convert_tokens_to_ids
    end = token("<|endoftext|>")
    # As in Qwen's own checkpoints; the text configs' defaults are the ids of a vocabulary of 150,000 tokens.
    ids = {"bos_token_id": end, "eos_token_id": token("<|im_end|>"), "pad_token_id": end}
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=vision,
        text_config=text | ids | {"vocab_size": len(tokenizer)},
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def patchify(pixels_BTHWC: torch.Tensor, patch: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """uint8 pictures or clips of one size to flattened patches, in the order of Qwen's processors, and their grid."""
    pixels = (pixels_BTHWC.permute(0, 1, 4, 2, 3).float() / 255 - MEAN) / STD
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    batch, frames, channels, height, width = pixels.shape
    t, h, w = frames // 2, height // patch, width // patch
    cut = pixels.view(batch, t, 2, channels, h // 2, 2, patch, w // 2, 2, patch)
    return cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(batch * t * h * w, -1), (t, h, w)


class Batches(IterableDataset[dict[str, Any]]):
    """Endless batches of drawn scenes, each of one size and kind; what is drawn depends on seed, rank and worker."""

    def __init__(self, unit: int, batch: int, seed: int, rank: int) -> None:
        self.unit, self.batch, self.seed, self.rank = unit, batch, seed, rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        chance = random.Random(f"{self.seed} {self.rank} {worker.id if worker else 0}")
        while True:
            video = chance.random() < 1 / 6
            seeds = [chance.randrange(HELD_OUT) for _ in range(self.batch // (2 if video else 1))]
            yield draw_batch(seeds, self.unit, chance, video=video)


def draw_batch(seeds: list[int], unit: int, chance: random.Random, *, video: bool) -> dict[str, Any]:
    """Scenes of these seeds in one random size, and their captions."""
    width, height = (unit * chance.randint(4, 7) for _ in range(2))
    scenes = [scene(seed, video=video) for seed in seeds]
    pixels = np.stack([np.stack([np.asarray(frame) for frame in draw(s, width, height)]) for s in scenes])
    return {"pixels": torch.from_numpy(pixels), "captions": [s.caption for s in scenes], "video": video}


def encode(batch: dict[str, Any], family: str, tokenizer: Any, device: torch.device, *, answer: bool) -> dict[str, Any]:
    """The model's inputs for a batch; with the captions and their labels, or up to where the answer begins."""
    patch = FAMILIES[family][1]["patch_size"]
    pixels, (t, h, w) = patchify(batch["pixels"].to(device, non_blocking=True), patch)
    count, video = len(batch["captions"]), batch["video"]
    kind = "video" if video else "image"
    token = tokenizer.convert_tokens_to_ids
    start, end, pad = token("<|vision_start|>"), token("<|vision_end|>"), token(f"<|{kind}_pad|>")
    words = partial(_words, tokenizer)
    seen = [start, *[pad] * (t * h * w // 4), end]
    if video and family == "qwen3_vl":  # written frame by frame, each with its time
        seen = []
        for frame in range(t):
            seen += words(f"<{frame}.5 seconds>")
            seen += [start, *[pad] * (h * w // 4), end]
    prompt = [*words("<|im_start|> user"), *seen, *words(f"describe this {kind if video else 'picture'} . <|im_end|>")]
    prompt += words("<|im_start|> assistant")
    answers = [words(f"{caption} <|im_end|>") if answer else [] for caption in batch["captions"]]
    longest = max(map(len, answers))
    ids = torch.full((count, len(prompt) + longest), tokenizer.pad_token_id)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, found in enumerate(answers):
        ids[row, : len(prompt) + len(found)] = torch.tensor(prompt + found)
        labels[row, len(prompt) : len(prompt) + len(found)] = torch.tensor(found)
        mask[row, : len(prompt) + len(found)] = 1
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == pad).long() * (2 if video else 1),
        f"{kind}_grid_thw": torch.tensor([[t, h, w]] * count),
    }
    inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    if video and family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.ones(count)
    inputs["pixel_values_videos" if video else "pixel_values"] = pixels
    return inputs | ({"labels": labels.to(device)} if answer else {})


def position_ids(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """M-RoPE positions (3, rows, tokens). All rows have one layout: the model would work it out row by row."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    found, _ = model.model.get_rope_index(**{name: inputs[name][:1].cpu() for name in names if name in inputs})
    positions_3BL: torch.Tensor = found.expand(-1, len(inputs["input_ids"]), -1).to(inputs["input_ids"].device)
    return positions_3BL


def _words(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def held_out(family: str, count: int, size: int = 100) -> Iterator[dict[str, Any]]:
    """Batches of scenes that are never trained on: each of one picture size, every sixth of videos. Always the same."""
    chance = random.Random(1)
    for index, first in enumerate(range(HELD_OUT, HELD_OUT + count, size)):
        seeds = list(range(first, min(first + size, HELD_OUT + count)))
        yield draw_batch(seeds, 2 * FAMILIES[family][1]["patch_size"], chance, video=index % 6 == 5)


def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with every scene given another's picture."""
    return batch | {"pixels": batch["pixels"].roll(1, 0)}


@torch.no_grad()
def greedy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The tokens (rows, at most 24) that follow the prompts, greedily."""
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :]


def caption(model: Any, tokenizer: Any, inputs: dict[str, Any]) -> list[str]:
    """Greedy captions of a batch, from its inputs."""
    captions: list[str] = tokenizer.batch_decode(greedy(model, inputs), skip_special_tokens=True)
    return captions


def exact(found: list[str], expected: list[str]) -> int:
    """How many captions are right, word for word."""
    return sum(one.split() == other.split() for one, other in zip(found, expected, strict=True))


def accuracy(model: Any, family: str, tokenizer: Any, scenes: int, *, shuffled: bool = False) -> float:
    """The share of held-out scenes whose greedy caption is exactly right; shuffled: given another scene's picture."""
    device, right = next(model.parameters()).device, 0
    model.eval()
    for batch in held_out(family, scenes):
        inputs = encode(shuffle(batch) if shuffled else batch, family, tokenizer, device, answer=False)
        right += exact(caption(model, tokenizer, inputs), batch["captions"])
    model.train()
    return right / scenes


def save(model: Any, tokenizer: Any, family: str, path: Path) -> None:
    """A checkpoint in bf16, with tokenizer and processor files, as the Hub has them."""
    prefix, vision, _ = FAMILIES[family]
    hf_vit_accel.unpatch(model).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    # The default, which transformers writes from 5.17 on and earlier versions warn of.
    config["vision_config"].pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    unit = 2 * vision["patch_size"]
    shared = {
        "processor_class": f"{prefix}Processor",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "size": {"shortest_edge": (4 * unit) ** 2, "longest_edge": (16 * unit) ** 2},
    }
    video = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": video}),
    ):
        (path / name).write_text(json.dumps(shared | kind, indent=2) + "\n")


def train(
    model: Any,
    family: str,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    steps: int,
    batch: int,
    rate: float,
    workers: int,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Train a model where it is, on scenes that the seed decides; the loss after every step."""
    unit = 2 * FAMILIES[family][1]["patch_size"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=torch.cuda.is_available()
    )
    warm = max(1, min(500, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))
    )
    trained, optimizer = accelerator.prepare(model, optimizer)
    drawing = Batches(unit, batch, seed, accelerator.process_index)
    data = DataLoader(drawing, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available())
    trained.train()
    for drawn in itertools.islice(data, steps):
        inputs = encode(drawn, family, tokenizer, accelerator.device, answer=True)
        loss = trained(**inputs, position_ids=position_ids(model, inputs)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.detach()


def main(
    family: Annotated[str, typer.Argument(help="One of " + ", ".join(FAMILIES) + ".")],
    output: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    steps: int = 5500,
    batch: int = 192,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    workers: int = 12,
    seed: int = 0,
    scenes: Annotated[int, typer.Option(help="Held-out scenes to judge by.")] = 1000,
) -> None:
    """Train, report exact matches on held-out scenes, save."""
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    tokenizer = build_tokenizer()
    model = build_model(family, tokenizer, seed)
    accelerator.print(f"{family}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    model = hf_vit_accel.patch(model.to(accelerator.device))  # attention of all pictures in one call, with gradients
    begin, total, each = time.perf_counter(), 0.0, max(1, steps // 12)
    losses = train(
        model, family, tokenizer, accelerator, steps=steps, batch=batch, rate=rate, workers=workers, seed=seed
    )
    for step, loss in enumerate(losses, 1):
        total += loss
        if step % each == 0:
            right = accuracy(model, family, tokenizer, min(100, scenes))
            spent = time.perf_counter() - begin
            accelerator.print(f"step {step}: loss {float(total) / each:.4f}, exact {right:.0%}, {spent:.0f} s")
            total = 0.0
    if accelerator.is_main_process:
        right = accuracy(model, family, tokenizer, scenes)
        wrong = accuracy(model, family, tokenizer, scenes, shuffled=True)
        print(f"exact on {scenes} held-out scenes: {right:.1%}; with the pictures shuffled: {wrong:.1%}")
        save(model, tokenizer, family, output)


if __name__ == "__main__":
    typer.run(main)
