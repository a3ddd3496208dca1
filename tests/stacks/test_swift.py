"""ms-swift on tiny captioners: `swift sft` with LoRA and all weights, the tower frozen and trained; `swift rlhf`.

`swift sft` also runs in two processes on the CPU, which share their gradients as those of two GPUs do (DDP).
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.stacks import FAMILIES, Checkpoint, Job, losses, read_recipe, recipe, rows_of_captions, write_rows
from swift.pipelines import rlhf_main, sft_main
from swift.template.templates import qwen
from torch import Tensor, nn
from transformers import AutoTokenizer, modeling_utils

Program = Callable[[list[str]], object]
# Its dropout would draw other masks for the tower, whose layers ask for them in another order.
LORA = {"tuner_type": "lora", "lora_rank": "4", "target_modules": "all-linear", "lora_dropout": "0"}
WAYS = {
    "LoRA": LORA,
    "LoRA, tower trained": LORA | {"freeze_vit": "false"},
    "all weights": {"tuner_type": "full"},
    "all weights, tower trained": {"tuner_type": "full", "freeze_vit": "false", "freeze_aligner": "false"},
}


@pytest.fixture(autouse=True)
def _tiny(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the templates the ids of a tiny vocabulary: they hold those of Qwen's."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(FAMILIES[0]))
    for template in (qwen.Qwen2VLTemplate, qwen.Qwen3VLTemplate):
        monkeypatch.setattr(template, "image_token_id", tokenizer.convert_tokens_to_ids("<|image_pad|>"))
        monkeypatch.setattr(template, "video_token_id", tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    former = vars(torch.utils.checkpoint).pop("_old_checkpoint", None)
    if former is not None:  # the first training of a process fixes `use_reentrant` for all
        torch.utils.checkpoint.checkpoint = former
        modeling_utils.checkpoint = former
    monkeypatch.setenv("MAX_PIXELS", "50176")
    monkeypatch.setenv("IMAGE_MAX_TOKEN_NUM", "64")


def dataset(folder: Path, *, with_rejected: bool) -> str:
    """Write pictures with captions, and with those that `swift rlhf` shall learn to avoid."""
    rejected = {"rejected_response": "a large blue square ."} if with_rejected else {}
    return write_rows([row | rejected for row in rows_of_captions(folder)], folder / "data.jsonl")


def words(settings: dict[str, str]) -> list[str]:
    """Return settings as words of a command."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def short_training(family: str, path: str, folder: Path, *, with_rejected: bool = False) -> dict[str, str]:
    """Return the settings of a few steps on the CPU, with a new folder for their output."""
    return {
        "model": path,
        "model_type": family,
        "template": family,
        "dataset": dataset(folder, with_rejected=with_rejected),
        "output_dir": str(folder / f"run{len(list(folder.iterdir()))}"),
        "add_version": "false",
        "max_steps": "4",
        "logging_steps": "1",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "1",
        "learning_rate": "1e-3",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "eval_strategy": "no",
        "split_dataset_ratio": "0",
        "report_to": "none",
        "use_cpu": "true",
        "torch_dtype": "float32",
        "dataset_num_proc": "1",
        "dataloader_num_workers": "0",
        "seed": "0",
    }


def logged_losses(settings: dict[str, str]) -> Tensor:
    (log,) = Path(settings["output_dir"]).rglob("logging.jsonl")
    return losses([json.loads(line) for line in log.read_text().splitlines()])


def train(main: Program, family: str, path: str, folder: Path, *options: str, **settings: str) -> Tensor:
    """Run `swift sft` or `swift rlhf`; return the losses."""
    settings = short_training(family, path, folder, with_rejected=main is rlhf_main) | settings
    torch.manual_seed(0)
    main([*words(settings), *options])
    return logged_losses(settings)


def options_of_the_recipe(folder: Path, name: str = "swift") -> list[str]:
    """Write the plugin; return the arguments that name it."""
    (plugin := folder / "fast_vision.py").write_text(read_recipe("swift.py"))
    return recipe(name).patched.split("data.jsonl \\\n")[1].replace("fast_vision.py", str(plugin)).split()


TINY_IDS = """
from swift.template.templates import qwen
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path!r})
for template in (qwen.Qwen2VLTemplate, qwen.Qwen3VLTemplate):
    template.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    template.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
"""
"""What `_tiny` does, as a plugin for other processes."""


def train_in_processes(family: str, path: str, folder: Path, *plugins_and_options: str) -> tuple[Tensor, str]:
    """Run `swift sft` in as many processes as the recipe says; return the losses, and all that was printed."""
    (ids := folder / "tiny_ids.py").write_text(TINY_IDS.format(path=path))
    settings = short_training(family, path, folder) | LORA
    command = [sys.executable, "-m", "swift.cli.main", "sft", *words(settings)]
    command += ["--external_plugins", str(ids), *plugins_and_options]
    (processes,) = re.findall(r"^NPROC_PER_NODE=(\d+) ", recipe("swift_gpus").patched)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"NPROC_PER_NODE": processes, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return logged_losses(settings), ran.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_sft_in_two_processes(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments = (family, checkpoint(family), tmp_path)
    stock, _ = train_in_processes(*arguments)
    option, *plugins_and_options = options_of_the_recipe(tmp_path, "swift_gpus")
    assert option == "--external_plugins"
    patched, printed = train_in_processes(*arguments, *plugins_and_options)
    job = Job("swift", "swift sft, LoRA, two processes", "swift_gpus")
    job.expect_printed(family, stock, patched, printed, processes=2, bound=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_sft(way: str, family: str, checkpoint: Checkpoint, tmp_path: Path, patched_models: list[nn.Module]) -> None:
    arguments = (sft_main, family, checkpoint(family), tmp_path)
    stock = train(*arguments, **WAYS[way])
    patched = train(*arguments, *options_of_the_recipe(tmp_path), **WAYS[way])
    Job("swift", f"swift sft, {way}", "swift").expect(family, stock, patched, patched_models[-1], bound=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_dpo(family: str, checkpoint: Checkpoint, tmp_path: Path, patched_models: list[nn.Module]) -> None:
    """`swift rlhf` takes the same arguments; without its adapter, the model is its own reference."""
    arguments = (rlhf_main, family, checkpoint(family), tmp_path)
    settings = LORA | {"rlhf_type": "dpo"}
    stock = train(*arguments, **settings)
    patched = train(*arguments, *options_of_the_recipe(tmp_path), **settings)
    Job("swift", "swift rlhf, DPO, LoRA", "swift").expect(family, stock, patched, patched_models[-1], bound=1e-3)
