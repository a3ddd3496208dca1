"""Fine-tunes a Qwen-VL model on pictures and texts with transformers' `Trainer`, its vision tower made fast.

    python examples/finetune.py --model Qwen/Qwen3-VL-8B-Instruct --train-file photos/metadata.jsonl --output-dir tuned
    accelerate launch --num_processes 4 examples/finetune.py --model ... --train-file ... --output-dir ... --lora-rank 8

Everything is trained, or adapters (`--lora-rank`); `--freeze-tower` leaves the vision tower as it is. The output folder
gets the model, checkpoints on the way (`--resume` goes on from the newest), `loss.svg`, and what the trainer logged, in
`trainer_state.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from accelerate.utils import parse_flag_from_env
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments, set_seed
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import cached_file, is_torchvision_available

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finetuning.curve import draw
from finetuning.data import IGNORED, Collator, Examples, find_examples, hold_out, text_column
from media.processors import limit_pixels, load_processor

import hf_vit_accel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def finetune(
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")],
    train_file: Annotated[
        list[str],
        typer.Option(
            help="A .jsonl file, a folder with a metadata.jsonl or with NAME.txt beside NAME.jpg, a .parquet file, a "
            ".tar shard, dataset:NAME. Repeatable."
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints and the result.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    eval_file: Annotated[list[str] | None, typer.Option(help="What to evaluate by. Repeatable.")] = None,
    eval_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Pictures held out of the training files, if there is no eval file.")
    ] = 0.05,
    image_column: Annotated[str | None, typer.Option(help="Of the pictures, or their paths.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Of the texts, which are learnt.")] = None,
    image_root: Annotated[Path | None, typer.Option(help="What paths in .jsonl files are relative to.")] = None,
    split: Annotated[str, typer.Option(help="Of datasets.")] = "train",
    prompt: Annotated[
        str, typer.Option(help="May name columns: --prompt '{question}' asks what stands there.")
    ] = "Describe this picture.",
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None,
    max_steps: Annotated[int, typer.Option(help="Steps of the optimizer; -1 to train for epochs.")] = -1,
    num_train_epochs: Annotated[float, typer.Option(min=0)] = 1.0,
    per_device_batch_size: Annotated[int, typer.Option(min=1)] = 4,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1)] = 1,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="By default 1e-5, 1e-4 with LoRA.")] = None,
    lr_scheduler_type: Annotated[str, typer.Option(help="As transformers names them.")] = "cosine",
    warmup_steps: Annotated[float, typer.Option(min=0, help="Below 1: the share of all steps.")] = 0.03,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(min=0)] = 1.0,
    lora_rank: Annotated[int, typer.Option(min=0, help="Train adapters of this rank (PEFT); 0 for all weights.")] = 0,
    lora_alpha: Annotated[float | None, typer.Option(help="By default twice the rank.")] = None,
    lora_dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    freeze_tower: Annotated[bool, typer.Option("--freeze-tower", help="Leave the vision tower as it is.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute layers again instead of keeping them.")
    ] = False,
    bf16: Annotated[bool | None, typer.Option(help="Train under autocast to bf16; by default on CUDA.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the weights: by default float32, with LoRA on CUDA bfloat16."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    no_patch: Annotated[bool, typer.Option("--no-patch", help="The stock vision tower, for comparison.")] = False,
    logging_steps: Annotated[int, typer.Option(min=1)] = 10,
    eval_steps: Annotated[int | None, typer.Option(min=1, help="By default as often as saved.")] = None,
    save_steps: Annotated[int, typer.Option(min=1)] = 500,
    save_total_limit: Annotated[int | None, typer.Option(min=1, help="Keep only so many checkpoints.")] = None,
    dataloader_num_workers: Annotated[int, typer.Option(min=0)] = 4,
    seed: int = 42,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder, if there is one.")
    ] = False,
    report_to: Annotated[str, typer.Option(help="As tensorboard or wandb.")] = "none",
) -> None:
    """Fine-tune a model on pictures and texts."""
    # As accelerate is launched on a machine without a GPU; the trainer would not believe in its processes otherwise.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    word = "activation" if "activation_checkpointing" in names else "gradient"  # the latter before 5.23 or so
    with _sentences():
        if output_dir.resolve() == Path(model).resolve():
            raise ValueError(f"{output_dir} is the folder of the model itself: name another --output-dir")
        checkpoint = _checkpoint(output_dir, resume)
        if checkpoint:
            _same_adapters(checkpoint, lora_rank, lora_alpha or 2 * lora_rank, freeze_tower)
        arguments = TrainingArguments(
            output_dir=str(output_dir),
            max_steps=max_steps,
            num_train_epochs=num_train_epochs,
            per_device_train_batch_size=per_device_batch_size,
            per_device_eval_batch_size=per_device_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            learning_rate=learning_rate or (1e-4 if lora_rank else 1e-5),
            lr_scheduler_type=lr_scheduler_type,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            bf16=not cpu if bf16 is None else bf16,
            use_cpu=cpu,
            logging_steps=logging_steps,
            eval_strategy="steps" if eval_file or eval_fraction else "no",
            eval_steps=eval_steps or save_steps,
            save_steps=save_steps,
            save_total_limit=save_total_limit,
            dataloader_num_workers=dataloader_num_workers,
            seed=seed,
            report_to=report_to,
            remove_unused_columns=False,  # what is read are rows of our own
            **{f"{word}_checkpointing": gradient_checkpointing},
            **{f"{word}_checkpointing_kwargs": {"use_reentrant": False} if gradient_checkpointing else None},
        )
        first = arguments.process_index == 0
        if checkpoint and 0 < max_steps <= _step(checkpoint):  # the trainer would make a step more
            if first:
                if not (output_dir / "loss.svg").exists():  # what is written last: it was killed before
                    _finish(Path(checkpoint), output_dir, model, revision, "stock" if no_patch else "patched")
                print(f"the run is done: its last step is in {checkpoint}, the model in {output_dir}")
            raise typer.Exit
        where = dict(column=image_column, split=split, root=image_root)
        examples, held = find_examples(train_file, **where), []
        if eval_file:
            held = find_examples(eval_file, **where)
        elif eval_fraction:
            examples, held = hold_out(examples, eval_fraction)
        column = _text_column(examples, text_column)
        dtype = dtype or ("bfloat16" if lora_rank and not cpu else "float32")
        with _sentences(f"cannot load {model}: "):
            processor = load_processor(model, revision)
            vlm = AutoModelForImageTextToText.from_pretrained(model, revision=revision, dtype=getattr(torch, dtype))
        limit_pixels(processor, min_pixels, max_pixels)
        set_seed(seed)  # adapters are drawn
        vlm = _trained(vlm, lora_rank, lora_alpha or 2 * lora_rank, lora_dropout, freeze_tower)
        if not no_patch:
            hf_vit_accel.patch(vlm, attention=attention)
        trained, evaluated = (Examples(each, processor, prompt=prompt, text=column) for each in (examples, held))
        collate = Collator(processor)
        collate([trained[0]])  # a prompt or a template that fails is to fail now
    trainer = Trainer(
        model=vlm,
        args=arguments,
        data_collator=collate,
        train_dataset=trained,
        eval_dataset=evaluated if held else None,
        compute_loss_func=_loss,
        preprocess_logits_for_metrics=_most_likely,
        compute_metrics=_accuracy,
    )
    if first:
        count = sum(parameter.numel() for parameter in vlm.parameters() if parameter.requires_grad)
        print(f"{len(examples)} examples to train on, {len(held)} to evaluate by; {count:,} weights are trained")
        print(f"going on from {checkpoint}" if checkpoint else "beginning anew", flush=True)
    with _stops(output_dir):
        found = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = found.metrics | (trainer.evaluate() if held else {})
        trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("all", metrics)
    if first:
        _keep_processor(processor, model, revision, output_dir)
        _draw(trainer.state.log_history, output_dir / "loss.svg", "stock" if no_patch else f"patched, {attention}")
        print(hf_vit_accel.status(vlm))
        said = {"train_loss": "loss", "eval_loss": "held-out loss", "eval_accuracy": "accuracy of held-out tokens"}
        told = [f"{words} {metrics[name]:.4g}" for name, words in said.items() if name in metrics]
        told.append(f"{metrics['train_samples_per_second']:.3g} examples/s")
        if arguments.device.type == "cuda":
            told.append(f"at most {torch.cuda.max_memory_allocated() / 1e9:.3g} GB")
        print(f"{trainer.state.global_step} steps: {', '.join(told)}; the model is in {output_dir}")


_text_column = text_column  # the option has the same name


def _checkpoint(folder: Path, resume: bool) -> str | None:
    """The newest whole checkpoint. Raises ValueError where there is one that nobody asked to go on from."""
    # The trainer writes its state last: a checkpoint without it was being written when the run was killed.
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    if not found:
        return None
    newest = max(found, key=_step)
    if not resume:
        raise ValueError(f"{newest} is of an earlier run: --resume goes on from it, another --output-dir starts anew")
    return str(newest)


def _same_adapters(checkpoint: str, rank: int, alpha: float, freeze_tower: bool) -> None:
    """Raises ValueError where a checkpoint's adapters are others than those asked for: their weights would not fit."""
    file = Path(checkpoint, "adapter_config.json")
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"r": 0}
    asked = {"r": ("--lora-rank", rank)} | ({"lora_alpha": ("--lora-alpha", alpha)} if rank else {})
    for name, (option, value) in asked.items():
        if kept[name] != value:
            raise ValueError(f"{checkpoint} was trained with {option} {kept[name]}: go on with it, not with {value}")
    frozen = bool(kept.get("exclude_modules"))
    if rank and frozen != freeze_tower:
        has = "with" if frozen else "without"
        raise ValueError(f"{checkpoint} was trained {has} --freeze-tower: go on {has} it")


def _step(checkpoint: str | Path) -> int:
    return int(Path(checkpoint).name.partition("-")[2])


def _trained(model: Any, rank: int, alpha: float, dropout: float, freeze_tower: bool) -> Any:
    """The model with what is trained requiring gradients: all of it, or adapters around it."""
    towers = [tower.path for tower in hf_vit_accel.status(model).towers]
    if not rank:
        for path in towers if freeze_tower else []:
            model.get_submodule(path).requires_grad_(False)
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("--lora-rank needs PEFT: pip install peft") from None
    frozen = "|".join(rf"{re.escape(path)}\..*" for path in towers) if freeze_tower else None
    linears = dict(target_modules="all-linear", exclude_modules=frozen, task_type="CAUSAL_LM")
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, **linears))


def _loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over all tokens of a step: the models' own takes it batch by batch, which weighs short answers more."""
    logits = outputs.logits
    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch)


def _most_likely(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Tokens instead of logits, which no evaluation could keep."""
    best: torch.Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
    return best


def _accuracy(found: Any) -> dict[str, float]:
    labels = found.label_ids[:, 1:]
    right = (found.predictions[:, :-1] == labels) & (labels != IGNORED)
    return {"accuracy": float(right.sum() / (labels != IGNORED).sum())}


def _keep_processor(processor: Any, model: str, revision: str | None, folder: Path) -> None:
    """Write the processor's files beside the model, so that it loads as the first one did."""
    if is_torchvision_available():
        processor.tokenizer.padding_side = "right"  # loaded for generation
        processor.save_pretrained(folder)
        return
    # Without torchvision it was loaded without its part for videos: the checkpoint's own files have all.
    source = Path(cached_file(model, "config.json", revision=revision)).parent
    for pattern in ("*processor*.json", "*token*.json", "vocab*", "merges.txt", "chat_template*"):
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)


def _finish(checkpoint: Path, folder: Path, model: str, revision: str | None, title: str) -> None:
    """What a run writes at its end, of the last checkpoint: all but what only the trainer reads."""
    state = checkpoint / "trainer_state.json"
    for file in checkpoint.iterdir():
        if file.suffix in (".safetensors", ".json", ".md") and file != state:
            shutil.copy(file, folder / file.name)
    _keep_processor(load_processor(model, revision), model, revision, folder)
    _draw(json.loads(state.read_text(encoding="utf-8"))["log_history"], folder / "loss.svg", title)


def _draw(history: Sequence[dict[str, float]], path: Path, title: str) -> None:
    names = {"loss": "training", "eval_loss": "held out"}
    draw(path, title, {words: [(e["step"], e[name]) for e in history if name in e] for name, words in names.items()})


@contextmanager
def _sentences(about: str = "") -> Iterator[None]:
    """A user's mistake in one sentence, said by the first process."""
    try:
        yield
    except (OSError, ValueError, ImportError, hf_vit_accel.BackendUnavailableError) as error:
        text = about + (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise (typer.Exit(2) if int(os.environ.get("RANK", 0)) else typer.BadParameter(text)) from None


@contextmanager
def _stops(output: Path) -> Iterator[None]:
    """What ends a training early, in one sentence."""
    try:
        yield
    except KeyboardInterrupt:
        told, code = f"stopped; --resume goes on from the newest checkpoint in {output}", 130
    except torch.OutOfMemoryError:
        told, code = "the GPU's memory is full: try --gradient-checkpointing, --max-pixels or a smaller batch", 1
    else:
        return
    print(told, file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
