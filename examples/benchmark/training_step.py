"""Seconds of one step of transformers' `Trainer` under bf16 autocast, stock and patched: 16 x 512² pictures, full size.

    python examples/benchmark/training_step.py --json build/training_step.json      needs a CUDA device with 80 GB

Two ways to fine-tune: adapters (LoRA) on the language model with the tower frozen, and the tower trained with the
language model frozen. Weights and pictures are random; stock and patched take turns in one process. What the tower
itself takes of a step is measured alone, forward or forward and backward.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import hf_vit_accel
from hf_vit_accel import machine

sys.path.insert(0, str(Path(__file__).resolve().parent))
from first_token import END, IMAGE, START, build

WARM_UPS = 2
WAYS = "LoRA on the language model, tower frozen", "tower trained, language model frozen"


class Clock(TrainerCallback):
    """Seconds of every step, once the device is done with it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        _wait()
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop: forward, backward and the optimizer's step are over."""
        _wait()
        self.seconds.append(time.perf_counter() - self.begin)


def batch(tower: Any, images: int, side: int) -> dict[str, torch.Tensor]:
    """One sample: images of side x side patches, then text that is learnt."""
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


def train(model: Any, sample: dict[str, torch.Tensor], steps: int) -> list[float]:
    """Seconds of each step of `Trainer(bf16=True)`."""
    clock = Clock()
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
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=[sample] * steps,
            data_collator=lambda samples: samples[0],
            callbacks=[clock],
        ).train()
    return clock.seconds[WARM_UPS:]


def tower_alone(tower: Any, sample: dict[str, torch.Tensor], rounds: int = 5) -> float:
    """Median seconds of the tower in a step: its forward, with the backward where it is trained."""
    device = next(tower.parameters()).device
    pixels, grid = sample["pixel_values"].to(device), sample["image_grid_thw"].to(device)
    trained, found = any(parameter.requires_grad for parameter in tower.parameters()), []
    for _ in range(rounds + WARM_UPS):
        tower.zero_grad(set_to_none=True)
        _wait()
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(trained):
            output = tower(pixels, grid_thw=grid).pooler_output
        if trained:
            output.float().square().mean().backward()
        _wait()
        found.append(time.perf_counter() - begin)
    tower.zero_grad(set_to_none=True)
    return statistics.median(found[WARM_UPS:])


def prepared(model: Any, way: str, rank: int) -> Any:
    """The model with what is trained in this way requiring gradients."""
    model.requires_grad_(False)
    if way == WAYS[0]:
        linears = r"model\.language_model\..*(q|k|v|o|gate|up|down)_proj"
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears))
    model.model.visual.requires_grad_(True)
    return model


def main(
    model: Annotated[str, typer.Option(help="A name of first_token.TEXT.")] = "qwen2.5-vl-7b",
    images: int = 16,
    side: Annotated[int, typer.Option(help="Patches along one side of an image.")] = 32,
    steps: int = 6,
    rounds: int = 2,
    rank: int = 16,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time the steps of both ways."""
    result: dict[str, Any] = {"model": model, "images": images, "patches": side * side, "versions": machine.versions()}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for way in WAYS:
        set_seed(0)
        bare = build(model, device="cuda" if torch.cuda.is_available() else "cpu")
        vlm = prepared(bare, way, rank)
        sample, seconds, alone = batch(bare.model.visual, images, side), {}, {}
        for _ in range(rounds):
            for name in ("stock", "patched"):
                hf_vit_accel.unpatch(vlm)
                if name == "patched":
                    hf_vit_accel.patch(vlm)
                seconds.setdefault(name, []).extend(train(vlm, sample, WARM_UPS + steps))
                alone.setdefault(name, []).append(tower_alone(bare.model.visual, sample))
        status = hf_vit_accel.status(vlm).towers[0]
        found: dict[str, Any] = {"fast_calls": status.calls, "stock_calls": status.stock_calls}
        for name, all_ in seconds.items():
            found[name] = dict(step=statistics.median(all_), low=min(all_), high=max(all_), tower=min(alone[name]))
        result[way] = found | {"share_of_stock": found["patched"]["step"] / found["stock"]["step"]}
        print(f"{way}: {json.dumps(result[way])}", flush=True)
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1) + "\n")
        del bare, vlm
        torch.cuda.empty_cache()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
