"""transformers' Trainer and pipeline, PEFT, and accelerate's offloading, on tiny captioners."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from captioner.processors import load_processor
from peft import LoraConfig, get_peft_model
from support.stacks import (
    FAMILIES,
    QUESTION,
    Checkpoint,
    Job,
    inputs_of,
    losses,
    pictures,
    read_recipe,
    recipe,
    short_training,
)
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_vit_accel


def every_family(*, first: str) -> pytest.MarkDecorator:
    """Run with a family every time, and with the others where results are recorded, or in the matrix."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(family, marks=[pytest.mark.matrix] * (family != first and "RECORD_STACKS" not in os.environ))
            for family in FAMILIES
        ],
    )


def load(path: str, **options: object) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, **options).eval()


def training(path: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Return what the recipe of Trainer assumes."""
    processor = load_processor(path)
    data = [inputs_of(processor, picture) for picture in pictures(4)]
    options |= dict(per_device_train_batch_size=1, remove_unused_columns=False, learning_rate=1e-4)
    args = TrainingArguments(**short_training(folder, **options))
    return {
        "AutoModelForImageTextToText": AutoModelForImageTextToText,
        "Trainer": Trainer,
        "name": path,
        "args": args,
        "data": data,
        "collate": lambda items: items[0] | {"labels": items[0]["input_ids"]},
    }


@every_family(first="qwen2_5_vl")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_trainer(family: str, checkpointing: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    word = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
    names = training(checkpoint(family), tmp_path, **{f"{word}_checkpointing": checkpointing})
    stock = recipe("trainer").run(patched=False, names=names)
    patched = recipe("trainer").run(patched=True, names=names)
    job = Job("transformers", f"Trainer, all weights{', checkpointing' * checkpointing}", "trainer")
    logs = [losses(run["trainer"].state.log_history) for run in (stock, patched)]
    job.expect(family, *logs, patched["model"])


@every_family(first="qwen3_vl")
def test_trainer_with_the_callback(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = training(checkpoint(family), tmp_path)
    stock = recipe("trainer").run(patched=False, names=names)["trainer"]
    code: dict[str, Any] = {}
    exec(read_recipe("callback.py"), code)
    model = load(checkpoint(family))
    trainer = Trainer(
        model=model,
        args=names["args"],
        train_dataset=names["data"],
        data_collator=names["collate"],
        callbacks=[code["PatchTower"]()],
    )
    trainer.train()
    job = Job("transformers", "Trainer, by the callback", "callback")
    job.expect(family, losses(stock.state.log_history), losses(trainer.state.log_history), model)


@every_family(first="qwen2_5_vl")
def test_peft(family: str, checkpoint: Checkpoint) -> None:
    """Train adapters on every linear layer, those of the tower included."""
    inputs = inputs_of(load_processor(checkpoint(family)), pictures(1)[0])
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    runs = []
    for patched in (False, True):
        model = load(checkpoint(family))
        torch.manual_seed(0)
        names = {"get_peft_model": get_peft_model, "model": model, "config": config}
        model = recipe("peft").run(patched=patched, names=names)["model"]
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        runs.append(torch.cat(gradients))
    Job("transformers", "PEFT, gradients of LoRA", "peft").expect(family, *runs, model, bound=1e-3)


@every_family(first="qwen3_vl")
def test_pipeline(family: str, checkpoint: Checkpoint) -> None:
    processor = load_processor(checkpoint(family))
    runs = []
    names = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "name": checkpoint(family)}
    for patched in (False, True):
        model = recipe("plain_script").run(patched=patched, names=names)["model"].eval()
        pipe = pipeline("image-text-to-text", model=model, processor=processor)
        question = {"type": "text", "text": QUESTION}
        contents = [[{"type": "image", "image": picture}, question] for picture in pictures(2)]
        chats = [[{"role": "user", "content": content}] for content in contents]
        answers = pipe(text=chats, max_new_tokens=12, return_full_text=False, do_sample=False)
        texts = "\n".join(answer[0]["generated_text"] for answer in answers)
        runs.append(torch.tensor([float(ord(letter)) for letter in texts]))
    Job("transformers", "pipeline, image-text-to-text", "plain_script").expect(family, *runs, model)


@every_family(first="qwen2_5_vl")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded(family: str, place: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """accelerate keeps the layers of the text elsewhere, and brings them back for each call."""
    from accelerate import cpu_offload, disk_offload

    path = checkpoint(family)
    inputs = inputs_of(load_processor(path), pictures(1)[0])
    runs = []
    names = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "name": path}
    for patched in (False, True):
        model = recipe("plain_script").run(patched=patched, names=names)["model"].eval()
        if place == "cpu":
            cpu_offload(model.model.language_model, torch.device("cpu"))
        else:
            disk_offload(model.model.language_model, str(tmp_path / f"{patched}"), torch.device("cpu"))
        with torch.no_grad():
            runs.append(model(**inputs).logits)
    Job("transformers", f"accelerate, text offloaded to the {place}", "plain_script").expect(family, *runs, model)


@every_family(first="qwen3_vl")
def test_generate_called_by_others(family: str, checkpoint: Checkpoint) -> None:
    """`generate` of a patched model decodes from CUDA graphs wherever it is called, by a pipeline, too."""
    path = checkpoint(family)
    inputs = inputs_of(load_processor(path), pictures(1)[0])
    runs = []
    for patched in (False, True):
        names = {"model": load(path), "inputs": inputs}
        names = recipe("generate").run(patched=patched, names=names)
        runs.append(names["tokens"].double())
    model = names["model"]
    Job("transformers", "generate, by the line for frameworks", "generate").expect(family, *runs, model)
    assert hf_vit_accel.status(model).decoding is not None


@every_family(first="qwen2_5_vl")
def test_by_name(family: str, checkpoint: Checkpoint) -> None:
    inputs = inputs_of(load_processor(checkpoint(family)), pictures(1)[0])
    runs = []
    for patched in (False, True):
        names = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "name": checkpoint(family)}
        model = recipe("by_name").run(patched=patched, names=names)["model"].eval()
        with torch.no_grad():
            runs.append(model(**inputs).logits)
    Job("transformers", "loaded by the name of an attention", "by_name").expect(family, *runs, model)
