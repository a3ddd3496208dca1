"""TRL's trainers on tiny captioners: SFT with LoRA, all weights, QLoRA and Liger; DPO and GRPO."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from support.stacks import (
    ANSWER,
    QUESTION,
    Checkpoint,
    Job,
    Names,
    every_family,
    expect_same_and_fast,
    losses,
    pictures,
    recipe,
    short_training,
)
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

import hf_vit_accel

PROMPT = {"prompt": [{"role": "user", "content": QUESTION}]}


def settings(folder: Path, **options: Any) -> Names:
    return short_training(folder, **{"per_device_train_batch_size": 2, "bf16": False, "seed": 0} | options)


def chats() -> Dataset:
    """Return prompts with one or two pictures."""
    drawn = pictures(8)
    answer = {"completion": [{"role": "assistant", "content": ANSWER}]}
    images = [[drawn[index]] if index % 3 else [drawn[index], drawn[index - 1]] for index in range(8)]
    return Dataset.from_list([{"images": of_prompt} | PROMPT | answer for of_prompt in images])


def run(trainer: str, names: Names, *, patched: bool) -> Any:
    """Run a side of the page's recipe with a trainer of TRL; return the trainer."""
    torch.manual_seed(0)
    names = {trainer: getattr(trl, trainer)} | names
    return recipe("trl").run(patched=patched, names=names, SFTTrainer=trainer)["trainer"]


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear")


def sft(path: str, folder: Path, *, patched: bool, model: Any = None, peft_config: Any = None) -> Any:
    args = trl.SFTConfig(**settings(folder, max_length=None))
    names = {"model": model or path, "args": args, "data": chats(), "lora": peft_config}
    return run("SFTTrainer", names, patched=patched)


def expect_same(job: str, family: str, trainers: Sequence[Any], bound: float = 1e-3, by: str = "trl") -> None:
    logs = [losses(trainer.state.log_history) for trainer in trainers]
    Job("trl", job, by).expect(family, *logs, trainers[-1].model, bound=bound)


@every_family
@pytest.mark.parametrize("way", ["LoRA", "all weights"])
def test_sft(family: str, way: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    runs = [
        sft(checkpoint(family), tmp_path, patched=patched, peft_config=lora() if way == "LoRA" else None)
        for patched in (False, True)
    ]
    expect_same(f"SFTTrainer, {way}", family, runs)


def load_quantised(by: str, path: str, *, patched: bool) -> Any:
    """Load a model by a side of a recipe."""
    kinds = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "BitsAndBytesConfig": BitsAndBytesConfig}
    return recipe(by).run(patched=patched, names=kinds | {"name": path, "torch": torch})["model"]


@every_family
@pytest.mark.parametrize("tower", ["quantised", "left out"])
def test_qlora(family: str, tower: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Stock trains the model that is loaded by the old side of the recipe; without the tower, by the new side."""
    name = "qlora" if tower == "quantised" else "qlora_plain_tower"
    runs = []
    for patched in (False, True):
        model = load_quantised(name, checkpoint(family), patched=patched or tower == "left out")
        if not patched:
            hf_vit_accel.unpatch(model)
        runs.append(sft(checkpoint(family), tmp_path, patched=False, model=model, peft_config=lora()))
    expect_same(f"SFTTrainer, QLoRA, tower {tower}", family, runs, 2e-2, name)


@every_family
def test_qlora_patched_after_the_trainer(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the comment of the recipe says: the trainer's adapters may come first."""
    runs = []
    for patched in (False, True):
        model = load_quantised("qlora", checkpoint(family), patched=False)
        runs.append(sft(checkpoint(family), tmp_path, patched=patched, model=model, peft_config=lora()))
    logs = [losses(trainer.state.log_history) for trainer in runs]
    expect_same_and_fast(*logs, runs[-1].model, bound=2e-2)


@pytest.mark.gpu
@every_family
def test_liger(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Liger's kernels need a GPU."""
    options = settings(tmp_path, max_length=None, use_cpu=False)
    runs = []
    for patched in (False, True):
        torch.manual_seed(0)
        names = {"model": checkpoint(family), "data": chats(), "lora": lora(), "SFTTrainer": trl.SFTTrainer}
        names["SFTConfig"] = lambda output_dir, **arguments: trl.SFTConfig(**options | arguments)
        runs.append(recipe("liger").run(patched=patched, names=names)["trainer"])
    expect_same("SFTTrainer, LoRA, Liger", family, runs, by="liger")


@every_family
def test_dpo(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    answers = {"chosen": [{"role": "assistant", "content": ANSWER}]}
    answers |= {"rejected": [{"role": "assistant", "content": "a large blue square ."}]}
    rows = [{"images": [picture]} | PROMPT | answers for picture in pictures(8)]
    runs = []
    for patched in (False, True):
        args = trl.DPOConfig(**settings(tmp_path, max_length=None))
        names = {"model": checkpoint(family), "args": args, "data": Dataset.from_list(rows), "lora": None}
        runs.append(run("DPOTrainer", names, patched=patched))
    expect_same("DPOTrainer", family, runs)


def variety(completions: list[Any], **_: object) -> list[float]:
    """Reward many different letters."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def grpo(by: str, path: str, folder: Path, *, patched: bool, adapters: LoraConfig, **options: Any) -> Any:
    """Train with a side of a recipe, which has a trainer of its own or takes any; return the trainer."""
    args = trl.GRPOConfig(**settings(folder, num_generations=2, max_steps=3, temperature=1.5, **options))
    data = Dataset.from_list([{"image": picture} | PROMPT for picture in pictures(8)])
    model = AutoModelForImageTextToText.from_pretrained(path)
    names = {"model": model, "args": args, "data": data, "lora": adapters, "rewards": variety}
    names |= {"GRPOTrainer": trl.GRPOTrainer, "GRPO": functools.partial(trl.GRPOTrainer, reward_funcs=variety)}
    torch.manual_seed(0)
    replaced = {"SFTTrainer": "GRPO"} if by == "trl" else {}
    return recipe(by).run(patched=patched, names=names, **replaced)["trainer"]


def expect_same_rewards(job: str, by: str, family: str, trainers: Sequence[Any]) -> None:
    logs = [[log for log in trainer.state.log_history if "reward" in log] for trainer in trainers]
    logged = [[(log["reward"], log["grad_norm"]) for log in of_trainer] for of_trainer in logs]
    stock, patched = (torch.tensor(values, dtype=torch.float64) for values in logged)
    assert stock[:, 1].any(), "all completions of a group got one reward"
    Job("trl", job, by).expect(family, stock, patched, trainers[-1].model, bound=1e-2)


@every_family
def test_grpo(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It toggles gradient checkpointing at each step, and calls `generate` itself."""
    arguments = ("trl", checkpoint(family), tmp_path)
    runs = [grpo(*arguments, patched=patched, adapters=lora(), max_completion_length=8) for patched in (False, True)]
    status = hf_vit_accel.status(runs[-1].model)
    assert all(tower.rebuilds <= 2 for tower in status.towers), str(status)
    expect_same_rewards("GRPOTrainer, LoRA", "trl", family, runs)


@every_family
def test_grpo_rollouts(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`GRPOTrainer` binds a forward (`_fused_forward`) that passes calls of `generate` on to the model's."""
    arguments = ("grpo", checkpoint(family), tmp_path)
    runs = [grpo(*arguments, patched=patched, adapters=lora(), max_completion_length=24) for patched in (False, True)]
    status = hf_vit_accel.status(runs[-1].model)
    assert status.decoding is not None and status.decoding.startswith("3 calls on a static cache"), str(status)
    assert "by stock" not in status.decoding, status.decoding
    expect_same_rewards("GRPOTrainer, LoRA, rollouts", "grpo", family, runs)


@pytest.mark.parametrize("disabled", [False, True])
def test_grpo_samples_with_dropout_by_stock(checkpoint: Checkpoint, tmp_path: Path, disabled: bool) -> None:
    """It samples in training mode, and `ModelConfig` of TRL gives LoRA a dropout. The page says what helps."""
    with_dropout = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05)
    arguments = ("grpo", checkpoint("qwen3_vl"), tmp_path)
    options = dict(max_completion_length=24, disable_dropout=disabled)
    trainer = grpo(*arguments, patched=True, adapters=with_dropout, **options)
    decoding = str(hf_vit_accel.status(trainer.model).decoding)
    assert decoding.startswith(f"{3 if disabled else 0} calls on a static cache"), decoding
    assert ("x dropout on" in decoding) != disabled, decoding
