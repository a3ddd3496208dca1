"""TRL's trainers on tiny captioners: SFT with LoRA, all weights, QLoRA and Liger; DPO and GRPO."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from support.stacks import FAMILIES, Job, Names, expect_same_and_fast, losses, pictures, recipe
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

import hf_vit_accel

every_family = pytest.mark.parametrize("family", FAMILIES)
Checkpoint = Callable[[str], str]


def settings(folder: Path, **options: Any) -> Names:
    """Return the arguments of a short training on the CPU."""
    defaults = dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=0,
        disable_tqdm=True,
    )
    return defaults | options


def chats() -> Dataset:
    """Return prompts with one or two pictures."""
    drawn = pictures(8)
    rows = [
        {
            "images": [drawn[index]] if index % 3 else [drawn[index], drawn[index - 1]],
            "prompt": [{"role": "user", "content": "describe this picture"}],
            "completion": [{"role": "assistant", "content": "a small red circle ."}],
        }
        for index in range(8)
    ]
    return Dataset.from_list(rows)


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


@every_family
@pytest.mark.parametrize("tower", ["quantised", "left out"])
def test_qlora(family: str, tower: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Stock trains the model that is loaded by the old side of the recipe; without the tower, by the new side."""
    name = "qlora" if tower == "quantised" else "qlora_plain_tower"
    names = {
        "name": checkpoint(family),
        "torch": torch,
        "AutoModelForImageTextToText": AutoModelForImageTextToText,
        "BitsAndBytesConfig": BitsAndBytesConfig,
    }
    runs = []
    for patched in (False, True):
        model = recipe(name).run(patched=patched or tower == "left out", names=names)["model"]
        if not patched:
            hf_vit_accel.unpatch(model)
        runs.append(sft(checkpoint(family), tmp_path, patched=False, model=model, peft_config=lora()))
    expect_same(f"SFTTrainer, QLoRA, tower {tower}", family, runs, 2e-2, name)


@every_family
def test_qlora_patched_after_the_trainer(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the comment of the recipe says: the trainer's adapters may come first."""
    names = {"name": checkpoint(family), "torch": torch, "BitsAndBytesConfig": BitsAndBytesConfig}
    names["AutoModelForImageTextToText"] = AutoModelForImageTextToText
    runs = []
    for patched in (False, True):
        model = recipe("qlora").run(patched=False, names=names)["model"]
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
    rows = [
        {
            "images": [picture],
            "prompt": [{"role": "user", "content": "describe this picture"}],
            "chosen": [{"role": "assistant", "content": "a small red circle ."}],
            "rejected": [{"role": "assistant", "content": "a large blue square ."}],
        }
        for picture in pictures(8)
    ]
    runs = []
    for patched in (False, True):
        args = trl.DPOConfig(**settings(tmp_path, max_length=None))
        names = {"model": checkpoint(family), "args": args, "data": Dataset.from_list(rows), "lora": None}
        runs.append(run("DPOTrainer", names, patched=patched))
    expect_same("DPOTrainer", family, runs)


def variety(completions: list[Any], **_: object) -> list[float]:
    """Reward many different letters."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


@every_family
def test_grpo(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It toggles gradient checkpointing at each step, and calls `generate` itself."""
    rows = [
        {"image": picture, "prompt": [{"role": "user", "content": "describe this picture"}]} for picture in pictures(8)
    ]
    runs = []
    for patched in (False, True):
        args = trl.GRPOConfig(
            **settings(tmp_path, num_generations=2, max_completion_length=8, max_steps=3, temperature=1.5)
        )
        model = AutoModelForImageTextToText.from_pretrained(checkpoint(family))
        names = {"model": model, "args": args, "data": Dataset.from_list(rows), "lora": lora()}
        trainer = functools.partial(trl.GRPOTrainer, reward_funcs=variety)
        torch.manual_seed(0)
        replaced = recipe("trl").run(patched=patched, names=names | {"GRPO": trainer}, SFTTrainer="GRPO")
        runs.append(replaced["trainer"])
    status = hf_vit_accel.status(runs[-1].model)
    assert all(tower.rebuilds <= 2 for tower in status.towers), str(status)
    logged = [[(log["reward"], log["grad_norm"]) for log in run.state.log_history if "reward" in log] for run in runs]
    stock, patched = (torch.tensor(values, dtype=torch.float64) for values in logged)
    assert stock[:, 1].any(), "all completions of a group got one reward"
    job = Job("trl", "GRPOTrainer, LoRA", "trl")
    job.expect(family, stock, patched, runs[-1].model, bound=1e-2)


@every_family
def test_grpo_rollouts(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`GRPOTrainer` binds a forward (`_fused_forward`) that passes calls of `generate` on to the model's."""
    rows = [
        {"image": picture, "prompt": [{"role": "user", "content": "describe this picture"}]} for picture in pictures(8)
    ]
    runs = []
    for patched in (False, True):
        args = trl.GRPOConfig(
            **settings(tmp_path, num_generations=2, max_completion_length=24, max_steps=3, temperature=1.5)
        )
        model = AutoModelForImageTextToText.from_pretrained(checkpoint(family))
        names = {"model": model, "args": args, "data": Dataset.from_list(rows), "lora": lora(), "rewards": variety}
        torch.manual_seed(0)
        names = recipe("grpo").run(patched=patched, names=names | {"GRPOTrainer": trl.GRPOTrainer})
        runs.append(names["trainer"])
    logged = [[(log["reward"], log["grad_norm"]) for log in run.state.log_history if "reward" in log] for run in runs]
    status = hf_vit_accel.status(runs[-1].model)
    assert status.decoding is not None and status.decoding.startswith("3 calls on a static cache"), str(status)
    assert "by stock" not in status.decoding, status.decoding
    stock, patched = (torch.tensor(values, dtype=torch.float64) for values in logged)
    Job("trl", "GRPOTrainer, LoRA, rollouts", "grpo").expect(family, stock, patched, runs[-1].model, bound=1e-2)


def test_grpo_samples_with_dropout_by_stock(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It samples in training mode, and `ModelConfig` of TRL gives LoRA a dropout. The page says so, and `status`."""
    rows = [
        {"image": picture, "prompt": [{"role": "user", "content": "describe this picture"}]} for picture in pictures(8)
    ]
    args = trl.GRPOConfig(**settings(tmp_path, num_generations=2, max_completion_length=24, max_steps=1))
    model = AutoModelForImageTextToText.from_pretrained(checkpoint("qwen3_vl"))
    with_dropout = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05)
    names = {"model": model, "args": args, "data": Dataset.from_list(rows), "lora": with_dropout, "rewards": variety}
    names = recipe("grpo").run(patched=True, names=names | {"GRPOTrainer": trl.GRPOTrainer})
    decoding = str(hf_vit_accel.status(names["trainer"].model).decoding)
    assert decoding.startswith("0 calls on a static cache") and "x dropout on" in decoding, decoding
