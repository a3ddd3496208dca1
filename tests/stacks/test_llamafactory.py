"""LLaMA-Factory: SFT of tiny captioners with LoRA, QLoRA and all weights, the tower frozen and trained."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stacks import Checkpoint, Job, every_family, losses, read_recipe, rows_of_captions
from torch import Tensor, nn

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
TRAINED = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
WAYS: dict[str, dict[str, Any]] = {
    "LoRA": LORA,
    "LoRA, tower trained": LORA | TRAINED,
    "QLoRA": LORA | {"quantization_bit": 4, "quantization_method": "bnb"},
    "all weights": {"finetuning_type": "full"},
    "all weights, tower trained": {"finetuning_type": "full"} | TRAINED,
    "all weights, tower trained, no checkpointing": {"finetuning_type": "full", "disable_gradient_checkpointing": True}
    | TRAINED,
}
TEMPLATES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink"}


def dataset(folder: Path) -> Path:
    """Write pictures with captions, and the file that describes them."""
    folder.mkdir(exist_ok=True)
    (folder / "captions.json").write_text(json.dumps(rows_of_captions(folder)))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    info = {"file_name": "captions.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"captions": info}))
    return folder


def train(code: str, family: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tensor:
    """Run a script beside a YAML file, as from the command line; return the losses."""
    output = folder / f"run{len(list(folder.iterdir()))}"
    fixed = {
        "model_name_or_path": path,
        "stage": "sft",
        "do_train": True,
        "dataset": "captions",
        "dataset_dir": str(dataset(folder / "data")),
        "template": TEMPLATES[family],
        "cutoff_len": 1024,
        "overwrite_cache": True,
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
        "output_dir": str(output),
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
        "image_max_pixels": 50176,
    }
    yaml = folder / "sft.yaml"
    yaml.write_text(json.dumps(fixed | settings))  # JSON is YAML
    monkeypatch.setattr(sys, "argv", ["train_fast.py", str(yaml)])
    torch.manual_seed(0)
    exec(compile(code, "train_fast.py", "exec"), {})
    log = (output / "trainer_log.jsonl").read_text().splitlines()
    return losses([json.loads(line) for line in log])


@every_family
@pytest.mark.parametrize("way", WAYS)
def test_sft(
    way: str,
    family: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patched_models: list[nn.Module],
) -> None:
    monkeypatch.setenv("FORCE_TORCHRUN", "")
    as_cli = "from llamafactory.train.tuner import run_exp\nrun_exp()"
    script = read_recipe("llamafactory.py")
    arguments = (family, checkpoint(family), tmp_path, monkeypatch)
    stock = train(as_cli, *arguments, **WAYS[way])
    patched = train(script, *arguments, **WAYS[way])
    Job("llamafactory", f"SFT, {way}", "llamafactory").expect(
        family, stock, patched, patched_models[-1], bound=2e-2 if way == "QLoRA" else 1e-3
    )
