"""Time one step of transformers' `Trainer` under bf16 autocast, stock and patched: 16 x 512² pictures, full size.

    python benchmarks/training_step.py --json build/training_step.json      needs a CUDA device with 80 GB

There are two ways to fine-tune: adapters (LoRA) on the language model with a frozen tower, or the tower with a frozen
language model. Weights and pictures are random. Stock, stock with FlashAttention-3 in the tower, and patched take turns
in one process. The tower's share of a step is measured alone: its forward, and its backward where it is trained.
`peak_gb` is the memory of steps with one 448² picture, with `cuda_graphs=False` and by default.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from functools import partial
from typing import Literal

import torch
from baselines import reasons_against_attention, set_attention
from measuring import DEVICE, STEPS_UNTIL_STEADY, Row, measure_models, now, take_turns, time_calls
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from whole_call import END, FLASH, IMAGE, START, TEXT, build

import hf_vit_accel

IMAGES = 16
SIDE = 32
"""Patches along one side of an image."""
STEPS = 6
WARM_UPS = 2
CONTENDERS = ("stock", FLASH, "patched")
WAYS = ("LoRA on the language model, tower frozen", "tower trained, language model frozen")
SMALL_SIDE = 28
"""Patches along one side of a 448² picture, with which a step is replayed from CUDA graphs."""

Sample = dict[str, torch.Tensor]


class StepTimes(TrainerCallback):
    """Measure the milliseconds of every step: forward, backward and the optimizer's step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Note when a step begins."""
        self.begin = now()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Note how long it took."""
        self.times.append(now() - self.begin)


def batch(tower: nn.Module, images: int, side: int) -> Sample:
    """Draw one sample: images of side x side patches, then a text with labels."""
    tokens = side * side // tower.spatial_merge_size**2
    picture = [START, *[IMAGE] * tokens, END]
    text = list(range(200, 264))
    ids = torch.tensor([picture * images + text])
    labels = ids.clone()
    labels[:, : -len(text)] = -100
    pixels = torch.randn(images * side * side, tower.patch_embed.proj.weight[0].numel())
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]] * images),
    }


def train(model: nn.Module, sample: Sample, steps: int) -> list[float]:
    """Return the milliseconds of every step of `Trainer(bf16=True)` after those that warm up."""
    steps_of_trainer = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            bf16=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=DEVICE.type == "cpu",
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=[sample] * steps,
            data_collator=lambda samples: samples[0],
            callbacks=[steps_of_trainer],
        ).train()
    return steps_of_trainer.times[WARM_UPS:]


def peak_gigabytes(model: nn.Module, sample: Sample, cuda_graphs: Literal["auto", False]) -> float | None:
    """Measure the most memory that torch takes from the device in steady steps; None on a CPU."""
    if DEVICE.type != "cuda":
        return None
    hf_vit_accel.patch(model, cuda_graphs=cuda_graphs)
    train(model, sample, STEPS_UNTIL_STEADY)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(model, sample, STEPS_UNTIL_STEADY)
    return torch.cuda.max_memory_reserved() / 1e9


def tower_alone(tower: nn.Module, sample: Sample, rounds: int = 5) -> float:
    """Return the tower's median milliseconds in a step: its forward, and its backward where it is trained."""
    device = next(tower.parameters()).device
    pixels = sample["pixel_values"].to(device)
    grid = sample["image_grid_thw"].to(device)
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(is_trained):
            output = tower(pixels, grid_thw=grid).pooler_output
        if is_trained:
            output.float().square().mean().backward()

    clear = partial(tower.zero_grad, set_to_none=True)
    times = time_calls(run, rounds, warm_ups=WARM_UPS, before=clear)
    clear()
    return statistics.median(times)


def prepared(model: PreTrainedModel, way: str) -> nn.Module:
    """Freeze the model but for the weights that a way trains; add adapters where it trains those."""
    model.requires_grad_(False)
    if way == WAYS[0]:
        linears = r"model\.language_model\..*(q|k|v|o|gate|up|down)_proj"
        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linears))
    model.model.visual.requires_grad_(True)
    return model


def measure(name: str, way: str, rounds: int) -> Row:
    """Time stock and patched in turns; return the row of one model and way to train."""
    set_seed(0)
    bare = build(name, device=DEVICE.type)
    tower = bare.model.visual
    model = prepared(bare, way)
    sample = batch(tower, IMAGES, SIDE)
    contenders = list(CONTENDERS)
    if reasons_against_attention(FLASH, tower):
        contenders.remove(FLASH)
    alone: dict[str, list[float]] = {contender: [] for contender in contenders}
    calls: Row = {}

    def turn(contender: str) -> list[float]:
        hf_vit_accel.unpatch(model)
        set_attention(tower, FLASH if contender == FLASH else "sdpa")
        if contender == "patched":
            hf_vit_accel.patch(model)
        times = train(model, sample, WARM_UPS + STEPS)
        alone[contender].append(tower_alone(tower, sample))
        if contender == "patched":
            status = hf_vit_accel.status(model).towers[0]
            calls.update(fast_calls=status.calls, stock_calls=status.stock_calls)
        return times

    row: Row = {"model": name, "way": way}
    for contender, times in take_turns(contenders, turn, rounds).items():
        seconds = {"step": statistics.median(times), "low": min(times), "high": max(times)}
        seconds["tower"] = min(alone[contender])
        row[contender] = {key: milliseconds / 1e3 for key, milliseconds in seconds.items()}
    row |= calls
    small = batch(tower, 1, SMALL_SIDE)
    row["peak_gb"] = {
        "without graphs": peak_gigabytes(model, small, False),
        "default": peak_gigabytes(model, small, "auto"),
    }
    row["share_of_stock"] = row["patched"]["step"] / row["stock"]["step"]
    return row


def measure_model(model: str, rounds: int) -> list[Row]:
    """Time both ways to train a model."""
    rows = []
    for way in WAYS:
        rows.append(measure(model, way, rounds))
        print(json.dumps(rows[-1]), flush=True)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    measure_models(__doc__, ",".join(TEXT), measure_model, images=IMAGES, patches=SIDE * SIDE)
