"""axolotl: SFT of tiny captioners by a YAML file, with LoRA and all weights."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import PluginManager
from axolotl.train import train
from support.stacks import ANSWER, FAMILIES, QUESTION, Job, losses, read_recipe, recipe, rows_of_captions, write_rows
from torch import Tensor, nn

Checkpoint = Callable[[str], str]
TARGETS = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"  # as its examples
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": TARGETS}
WITHOUT_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # they need a GPU
WAYS: dict[str, dict[str, Any]] = {"LoRA": LORA | WITHOUT_KERNELS, "all weights": {}}


@pytest.fixture(autouse=True)
def _without_plugins_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PluginManager.get_instance(), "plugins", OrderedDict())


def dataset(folder: Path) -> str:
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    answer = [{"type": "text", "text": ANSWER}]
    return write_rows(rows_of_captions(folder, question, answer), folder / "data.jsonl")


def run(code: str, path: str, folder: Path, **options: Any) -> Tensor:
    """Train by the YAML file of a side of the recipe, as `axolotl train`; return the losses."""
    fixed = {
        "datasets": [{"path": dataset(folder), "ds_type": "json", "type": "chat_template", "split": "train"}],
        "chat_template": "tokenizer_default",
        "skip_prepare_dataset": True,
        "remove_unused_columns": False,
        "sample_packing": False,
        "sequence_len": 1024,
        "output_dir": str(folder / "out"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "use_wandb": False,
        "save_strategy": "no",
        "seed": 0,
        "dataloader_num_workers": 0,
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in (fixed | options).items()]  # JSON is YAML
    file = folder / "sft.yaml"
    file.write_text("\n".join([code.replace("Qwen/Qwen2.5-VL-7B-Instruct", path), *lines]))
    cfg = load_cfg(str(file))
    torch.manual_seed(0)
    _, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    return losses(trainer.state.log_history)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_sft(
    way: str,
    family: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patched_models: list[nn.Module],
) -> None:
    (tmp_path / "fast_vision.py").write_text(read_recipe("axolotl.py"))
    monkeypatch.syspath_prepend(tmp_path)
    sides = recipe("axolotl")
    stock = run(sides.stock, checkpoint(family), tmp_path, **WAYS[way])
    patched = run(sides.patched, checkpoint(family), tmp_path, **WAYS[way])
    Job("axolotl", f"SFT, {way}", "axolotl").expect(family, stock, patched, patched_models[-1], bound=1e-3)
