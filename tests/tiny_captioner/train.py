"""Train a tiny Qwen2-VL, Qwen2.5-VL or Qwen3-VL to caption the scenes of `scenes.py`, and save it as a checkpoint.

accelerate launch tests/tiny_captioner/train.py qwen2_5_vl --output build/tiny_captioner/qwen2_5_vl

Every batch holds scenes of one picture size, which changes between batches.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_vit_accel

try:
    from accelerate import Accelerator
except ModuleNotFoundError:
    raise SystemExit("This program needs accelerate: pip install accelerate") from None

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scene_batches import Batches, Inputs, encode, held_out, position_ids, shuffle
from tiny_models import FAMILIES, build_model, build_tokenizer, save


@torch.no_grad()
def greedy(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Return the greedy tokens (rows, at most 24) after the prompts."""
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :]


def caption(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, inputs: Inputs) -> list[str]:
    """Return the greedy captions of a batch."""
    captions: list[str] = tokenizer.batch_decode(greedy(model, inputs), skip_special_tokens=True)
    return captions


def exact(captions: list[str], expected: list[str]) -> int:
    """Count the captions that are right word for word."""
    return sum(caption.split() == other.split() for caption, other in zip(captions, expected, strict=True))


def accuracy(
    model: PreTrainedModel, family: str, tokenizer: PreTrainedTokenizerFast, scenes: int, *, shuffled: bool = False
) -> float:
    """Return the share of held-out scenes whose greedy caption is exactly right.

    Args:
        model: the model, which is left in training mode
        family: a name of FAMILIES
        tokenizer: the tokenizer of the model
        scenes: the number of held-out scenes
        shuffled: show the model the picture of another scene
    """
    device = next(model.parameters()).device
    right = 0
    model.eval()
    for batch in held_out(family, scenes):
        inputs = encode(shuffle(batch) if shuffled else batch, family, tokenizer, device, answer=False)
        right += exact(caption(model, tokenizer, inputs), batch["captions"])
    model.train()
    return right / scenes


def train(
    model: PreTrainedModel,
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    accelerator: Accelerator,
    *,
    steps: int,
    batch: int,
    rate: float,
    workers: int,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Train a model on its device, and yield the loss of every step.

    Args:
        model: the model
        family: a name of FAMILIES
        tokenizer: the tokenizer of the model
        accelerator: wraps the model and the optimizer
        steps: the number of steps
        batch: the scenes of a step
        rate: the peak learning rate
        workers: the processes that draw scenes
        seed: decides the scenes
    """
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
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that draw scenes; another number draws other scenes.")
    ] = 12,
    seed: int = 0,
    scenes: Annotated[int, typer.Option(help="Held-out scenes to evaluate with.")] = 1000,
) -> None:
    """Train a model, report its exact matches on held-out scenes, and save it."""
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    tokenizer = build_tokenizer()
    model = build_model(family, tokenizer, seed)
    accelerator.print(f"{family}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    model = hf_vit_accel.patch(model.to(accelerator.device))
    begin = time.perf_counter()
    total = 0.0
    steps_of_report = max(1, steps // 12)
    losses = train(
        model, family, tokenizer, accelerator, steps=steps, batch=batch, rate=rate, workers=workers, seed=seed
    )
    for step, loss in enumerate(losses, 1):
        total += loss
        if step % steps_of_report == 0:
            right = accuracy(model, family, tokenizer, min(100, scenes))
            seconds = time.perf_counter() - begin
            loss_of_report = float(total) / steps_of_report
            accelerator.print(f"step {step}: loss {loss_of_report:.4f}, exact {right:.0%}, {seconds:.0f} s")
            total = 0.0
    if accelerator.is_main_process:
        right = accuracy(model, family, tokenizer, scenes)
        wrong = accuracy(model, family, tokenizer, scenes, shuffled=True)
        print(f"exact on {scenes} held-out scenes: {right:.1%}; with the pictures shuffled: {wrong:.1%}")
        save(model, tokenizer, family, output)


if __name__ == "__main__":
    typer.run(main)
