"""Fine-tune a Qwen-VL model on pictures and texts with transformers' `Trainer` and an accelerated vision tower.

    python examples/finetune.py --model Qwen/Qwen3-VL-8B-Instruct --train-file photos/metadata.jsonl --output-dir tuned
    accelerate launch --num_processes 4 examples/finetune.py --model ... --train-file ... --output-dir ... --lora-rank 8

All weights are trained, or adapters (`--lora-rank`). `--freeze-tower` leaves the vision tower as it is. The output
folder gets the model, checkpoints, `loss.svg` and the trainer's log, `trainer_state.json`. `--resume` goes on from the
newest checkpoint, and logs, saves and evaluates as often as before.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NoReturn

try:
    from accelerate.utils import parse_flag_from_env
except ModuleNotFoundError:
    raise SystemExit("This program needs accelerate: pip install accelerate") from None

import torch
import typer
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin, TrainingArguments, set_seed
from transformers.integrations import get_available_reporting_integrations

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finetuning.data import (
    Collator,
    Example,
    Examples,
    check_prompt,
    count_workers,
    describe,
    find_examples,
    hold_out,
)
from finetuning.folder import (
    SettingsNote,
    alone_in,
    begin,
    check_kind,
    check_settings,
    draw_loss,
    finish,
    is_complete,
    kept_settings,
    newest_checkpoint,
    save_processor,
    step_of,
    warn_of_new_length,
    warn_of_other_files,
)
from finetuning.metrics import accuracy, most_likely, token_loss
from finetuning.trainer import ResumedTrainer, holds_model
from media.checkpoints import config_of
from media.launchers import end_with_launcher
from media.processors import limit_pixels, load_processor

import hf_vit_accel
from hf_vit_accel.backends import require

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # rich cuts long names of options at 80 columns
    pretty_exceptions_enable=False,
)


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
    eval_file: Annotated[list[str] | None, typer.Option(help="Examples to evaluate with. Repeatable.")] = None,
    eval_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Pictures held out of the training files, if there is no eval file.")
    ] = 0.05,
    image_column: Annotated[str | None, typer.Option(help="Column of the pictures, or of their paths.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the texts to learn.")] = None,
    image_root: Annotated[Path | None, typer.Option(help="Folder of relative paths in .jsonl files.")] = None,
    split: Annotated[str, typer.Option(help="Split of datasets.")] = "train",
    prompt: Annotated[
        str, typer.Option(help="May name columns: --prompt '{question}' asks every picture's own question.")
    ] = "Describe this picture.",
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None,
    max_steps: Annotated[int, typer.Option(help="Steps of the optimizer; -1 to train for epochs.")] = -1,
    num_train_epochs: float = 1.0,
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
    freeze_tower: Annotated[bool, typer.Option("--freeze-tower", help="Do not train the vision tower.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute layers again in the backward, to save memory.")
    ] = False,
    bf16: Annotated[bool | None, typer.Option(help="Train under autocast to bf16; by default on CUDA.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Dtype of the weights: by default float32, with LoRA on CUDA bfloat16."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    no_patch: Annotated[bool, typer.Option("--no-patch", help="Run the stock vision tower, for comparison.")] = False,
    logging_steps: Annotated[int, typer.Option(min=1)] = 10,
    eval_steps: Annotated[int | None, typer.Option(min=1, help="By default --save-steps.")] = None,
    save_steps: Annotated[int, typer.Option(min=1)] = 500,
    save_total_limit: Annotated[int | None, typer.Option(min=1, help="Keep only this many checkpoints.")] = None,
    dataloader_num_workers: Annotated[int | None, typer.Option(min=0, help="By default at most 4, one a core.")] = None,
    seed: int = 42,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder, if there is one.")
    ] = False,
    report_to: Annotated[str, typer.Option(help="As tensorboard or wandb.")] = "none",
) -> None:
    """Fine-tune a model on pictures and texts."""
    options = SimpleNamespace(**locals())
    with ExitStack() as stack:
        with _mistakes():
            check_options(options)
            stack.enter_context(alone_in(options.output_dir))
        run(options)


def run(options: SimpleNamespace) -> None:
    """Fine-tune a model.

    Args:
        options: the options of `finetune` by name
    """
    # The trainer ignores the processes of a launcher without a GPU, unless it is told to use the CPU.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    with _mistakes():
        set_defaults(options, cpu)
        checkpoint = newest_checkpoint(options.output_dir, options.resume)
        arguments = training_arguments(options, cpu)
        if not checkpoint and arguments.process_index == 0:
            warn_of_other_files(options.output_dir)
        trained, held_out = find_all_examples(options)
        settings = kept_settings(options, arguments, trained)
        check_settings(checkpoint, settings)
        check_kind(options.output_dir, with_adapters=options.lora_rank > 0)
        if checkpoint and is_complete(checkpoint, options.max_steps, options.num_train_epochs):
            end_done_run(options, checkpoint, is_first=arguments.process_index == 0)
        for examples in (trained, held_out) if held_out else (trained,):
            check_prompt(options.prompt, examples)
        model, processor = load(options, checkpoint)
        datasets = [Examples(examples, processor, prompt=options.prompt) for examples in (trained, held_out)]
        collate = Collator(processor)
        collate([datasets[0][0]])  # a wrong prompt, text column or template fails here, before the training
        if held_out:
            with _mistakes("of the held-out pictures (--eval-file, or --eval-fraction 0 for none): "):
                collate([datasets[1][0]])
    trainer = ResumedTrainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=datasets[0],
        eval_dataset=datasets[1] if held_out else None,
        compute_loss_func=token_loss,
        preprocess_logits_for_metrics=most_likely,
        compute_metrics=accuracy,
        callbacks=[SettingsNote(settings)],
    )
    if arguments.process_index == 0:
        begin(options.output_dir)
        print(f"{describe(trained)} to train on, {len(held_out)} to evaluate by")
        announce(options, checkpoint, model)
        warn_of_new_length(checkpoint, settings)
    with _interruptions(options.output_dir):
        result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = result.metrics | (trainer.evaluate() if held_out else {})
        trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("all", metrics)
    if arguments.process_index == 0:
        save_processor(processor, options.model, options.revision, options.output_dir)
        way = "stock" if options.no_patch else f"patched, {options.attention}"
        draw_loss(trainer.state.log_history, options.output_dir / "loss.svg", way)
        print(hf_vit_accel.status(model))
        first_step = step_of(checkpoint) if checkpoint else 0
        print(summary(trainer, metrics, first_step, options.output_dir))


def set_defaults(options: SimpleNamespace, cpu: bool) -> None:
    """Replace None by the defaults that depend on other options or on the machine."""
    options.lora_alpha = options.lora_alpha or 2 * options.lora_rank
    if options.learning_rate is None:
        options.learning_rate = 1e-4 if options.lora_rank else 1e-5
    options.bf16 = not cpu if options.bf16 is None else options.bf16
    options.dtype = options.dtype or ("bfloat16" if options.lora_rank and not cpu else "float32")


def announce(options: SimpleNamespace, checkpoint: str | None, model: nn.Module) -> None:
    """Print how many weights are trained, and from which checkpoint the run goes on."""
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{count:,} weights are trained")
    why_anew = f": {options.output_dir} has no complete checkpoint" if options.resume else ""
    print(f"going on from {checkpoint}" if checkpoint else f"beginning anew{why_anew}", flush=True)


def end_done_run(options: SimpleNamespace, checkpoint: str, *, is_first: bool) -> NoReturn:
    """Write what a run writes at its end, if it was killed before, and exit."""
    if is_first:
        way = "stock" if options.no_patch else "patched"
        finish(Path(checkpoint), options.output_dir, options.model, options.revision, way)
        print(f"the run is done: its last step is in {checkpoint}, the model in {options.output_dir}")
    raise typer.Exit


def check_options(options: SimpleNamespace) -> None:
    """Raise ValueError for options that no run can have."""
    if options.max_steps < 1 and options.max_steps != -1:
        raise ValueError(f"expected --max-steps to be at least 1, or -1 for epochs, got {options.max_steps}")
    if not 0 < options.num_train_epochs < math.inf:
        raise ValueError(f"expected --num-train-epochs to be a number above 0, got {options.num_train_epochs}")
    if options.output_dir.is_file():
        raise ValueError(f"{options.output_dir} is a file: name a folder as --output-dir")
    if options.lora_alpha is not None and not 0 < options.lora_alpha < math.inf:
        raise ValueError(f"expected --lora-alpha to be a number above 0, got {options.lora_alpha}")
    if options.lora_rank == 0 and (options.lora_alpha is not None or options.lora_dropout):
        raise ValueError("--lora-alpha and --lora-dropout need --lora-rank: without it all weights are trained")
    if options.learning_rate == math.inf:
        raise ValueError("expected --learning-rate to be finite, got inf")
    unlisted = ("none", "all", "azure_ml", "flyte")  # transformers takes them, but may leave them out of its list
    if options.report_to not in (*unlisted, *get_available_reporting_integrations()):
        raise ValueError(f"--report-to {options.report_to}: it is not installed, or unknown to transformers")
    if not options.prompt.strip():
        raise ValueError("--prompt is empty: say what the model shall answer, such as 'Describe this picture.'")
    if not options.no_patch:
        require(options.attention)
    if options.output_dir.resolve() == Path(options.model).resolve():
        raise ValueError(f"{options.output_dir} is the folder of the model itself: name another --output-dir")


def training_arguments(options: SimpleNamespace, cpu: bool) -> TrainingArguments:
    """Return the arguments of the trainer."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    word = "activation" if "activation_checkpointing" in names else "gradient"  # the latter before 5.23 or so
    checkpointing = {
        f"{word}_checkpointing": options.gradient_checkpointing,
        f"{word}_checkpointing_kwargs": {"use_reentrant": False} if options.gradient_checkpointing else None,
    }
    workers = count_workers(options.dataloader_num_workers)
    return TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.max_steps,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=options.per_device_batch_size,
        per_device_eval_batch_size=options.per_device_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler_type,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        bf16=options.bf16,
        use_cpu=cpu,
        logging_steps=options.logging_steps,
        eval_strategy="steps" if options.eval_file or options.eval_fraction else "no",
        eval_steps=options.eval_steps or options.save_steps,
        save_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,  # they remember which examples they reported
        seed=options.seed,
        report_to=options.report_to,
        remove_unused_columns=False,  # the rows are objects of our own
        **checkpointing,
    )


def find_all_examples(options: SimpleNamespace) -> tuple[list[Example], list[Example]]:
    """Find the examples to train on, and those to evaluate with."""

    def find(inputs: list[str]) -> list[Example]:
        columns = dict(column=options.image_column, text_column=options.text_column)
        return find_examples(inputs, **columns, split=options.split, root=options.image_root)

    examples = find(options.train_file)
    if options.eval_file:
        return examples, find(options.eval_file)
    if options.eval_fraction:
        return hold_out(examples, options.eval_fraction)
    return examples, []


def load(options: SimpleNamespace, checkpoint: str | None) -> tuple[nn.Module, ProcessorMixin]:
    """Load the processor and the model, add adapters, freeze and patch. A checkpoint gives whole weights."""
    config_of(options.model, options.revision)  # refuses a folder that is missing, and one of adapters
    with _mistakes(f"cannot load {options.model}: "):
        processor = load_processor(options.model, options.revision)
        dtype = getattr(torch, options.dtype)
        if checkpoint and holds_model(checkpoint):
            model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
        else:
            model = AutoModelForImageTextToText.from_pretrained(options.model, revision=options.revision, dtype=dtype)
    limit_pixels(processor, options.min_pixels, options.max_pixels)
    set_seed(options.seed)  # adapters are random
    model = trainable(model, options.lora_rank, options.lora_alpha, options.lora_dropout, options.freeze_tower)
    if not options.no_patch:
        is_distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
        hf_vit_accel.patch(model, attention=options.attention, every_rank=is_distributed)
    return model, processor


def trainable(model: PreTrainedModel, rank: int, alpha: float, dropout: float, freeze_tower: bool) -> nn.Module:
    """Return the model with gradients for all weights, or wrapped with adapters.

    Args:
        model: the model
        rank: the rank of the adapters; 0 for none
        alpha: the scale of the adapters
        dropout: the dropout of the adapters
        freeze_tower: whether the vision tower is not trained
    """
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


def summary(trainer: ResumedTrainer, metrics: dict[str, float], first_step: int, folder: Path) -> str:
    """Return a line with the results of a run. A resumed run reports the loss of its own steps."""
    titles = {"train_loss": "loss", "eval_loss": "held-out loss", "eval_accuracy": "accuracy of held-out tokens"}
    results = [f"{title} {metrics[name]:.4g}" for name, title in titles.items() if name in metrics]
    results.append(f"{metrics['train_samples_per_second']:.3g} examples/s")
    if trainer.args.device.type == "cuda":
        results.append(f"at most {torch.cuda.max_memory_allocated() / 1e9:.3g} GB")
    steps = f"{trainer.state.global_step} steps"
    if first_step:
        steps += f", {trainer.state.global_step - first_step} of them since the checkpoint"
    return f"{steps}: {', '.join(results)}; the model is in {folder}"


@contextmanager
def _mistakes(prefix: str = "") -> Iterator[None]:
    """Report a user's mistake in one sentence of the first process."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError, hf_vit_accel.BackendUnavailableError) as error:
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, hf_vit_accel.BackendUnavailableError):  # its further lines hold reasons and remedies
            text = text.partition("\n")[0]
        text = prefix + text
        raise (typer.Exit(2) if int(os.environ.get("RANK", 0)) else typer.BadParameter(text)) from None


@contextmanager
def _interruptions(output: Path) -> Iterator[None]:
    """Report an interruption or a lack of memory in one sentence."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; --resume goes on from the newest checkpoint in {output}", file=sys.stderr)
        raise typer.Exit(130) from None
    except torch.OutOfMemoryError:
        print(
            "the GPU's memory is full: try --gradient-checkpointing, --max-pixels or a smaller batch", file=sys.stderr
        )
        raise typer.Exit(1) from None


if __name__ == "__main__":
    end_with_launcher()
    app()
