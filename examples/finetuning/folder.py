"""Read and write the output folder of a run: checkpoints, the processor's files, the loss as a picture."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from media.files import lock
from media.processors import load_processor
from safetensors import SafetensorError, safe_open
from transformers import ProcessorMixin, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import cached_file, is_torchvision_available

from finetuning.curve import draw
from finetuning.data import Example, fingerprint

__all__ = [
    "SettingsNote",
    "alone_in",
    "begin",
    "check_kind",
    "check_settings",
    "draw_loss",
    "finish",
    "is_complete",
    "kept_settings",
    "newest_checkpoint",
    "save_processor",
    "step_of",
    "warn_of_new_length",
    "warn_of_other_files",
]

_SETTINGS = "resumed_with.json"
"""The file in a checkpoint that holds the settings which a resumed run keeps."""
_MAY_CHANGE = {
    *("output_dir", "resume", "report_to", "dataloader_num_workers"),
    *("logging_steps", "eval_steps", "save_steps", "save_total_limit"),
    *("attention", "no_patch", "gradient_checkpointing"),  # steps compute the same, up to rounding
    *("train_file", "eval_file", "eval_fraction", "image_column", "image_root", "split"),  # examples are compared
    *("per_device_batch_size", "gradient_accumulation_steps"),  # the examples of a step are compared
}
"""Options that a resumed run may change. With any other, it would silently train otherwise than it began."""
_EXAMPLES = "examples of --train-file without those held out"
"""The setting that stands for all examples to train on."""
_LENGTH = ("--max-steps", "--num-train-epochs")
"""Settings that a resumed run may change, too. It says so, since the learning rates change."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs out of an output folder within the with block. The first process of a run does so for all.

    A folder that was new, and into which nothing was written, is removed.

    Raises:
        ValueError: if another run has the folder, or it cannot be written to
    """
    if int(os.environ.get("RANK", "0")):
        yield
        return
    is_new = not folder.exists()
    with lock(folder, alone=True):
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                shutil.rmtree(folder)


def newest_checkpoint(folder: Path, resume: bool) -> str | None:
    """Return the newest complete checkpoint, if there is one. Damaged ones are reported.

    Args:
        folder: the output folder of the run
        resume: whether the run may go on from a checkpoint

    Raises:
        ValueError: if there is a checkpoint and `resume` is False
    """
    # The trainer writes its state last, so a checkpoint without a whole state is incomplete.
    checkpoints = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    if not checkpoints:
        return None
    if not resume:
        newest = max(checkpoints, key=step_of)
        raise ValueError(f"{newest} is of an earlier run: --resume goes on from it, another --output-dir starts anew")
    for checkpoint in sorted(checkpoints, key=step_of, reverse=True):
        damage = _damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        if not int(os.environ.get("RANK", "0")):
            print(f"passed over: {checkpoint} is damaged: {damage}")
    return None


def _damage(checkpoint: Path) -> str | None:
    """Say which weights of a checkpoint cannot be read, such as a file that lost its end; None if all can."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path.name}: {error}"
    return None


def _is_json(path: Path) -> bool:
    """Return whether a file was written to its end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def is_complete(checkpoint: str, max_steps: int, epochs: float) -> bool:
    """Return whether a checkpoint is the last one of a run; the trainer would make one step more after it.

    Args:
        checkpoint: the folder of the checkpoint
        max_steps: the steps of the run; -1 to train for epochs
        epochs: the epochs of the run
    """
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
    if max_steps > 0:
        return bool(state["global_step"] >= max_steps)
    return bool(state["epoch"] >= epochs - 1e-6)


def begin(folder: Path) -> None:
    """Remove the results of an earlier run, since `finish` takes them for those of the last checkpoint."""
    for name in ("all_results.json", "loss.svg"):
        (folder / name).unlink(missing_ok=True)


def check_kind(folder: Path, *, with_adapters: bool) -> None:
    """Raise ValueError if a folder holds the other kind of result: adapters would be applied to a model beside them.

    Args:
        folder: the output folder of the run
        with_adapters: whether the run trains adapters
    """
    file, kind = ("config.json", "a whole model") if with_adapters else ("adapter_config.json", "LoRA adapters")
    if (folder / file).exists():
        raise ValueError(f"{folder} holds {kind}, and this run makes the other kind: name another --output-dir")


def warn_of_other_files(folder: Path) -> None:
    """Print that a folder holds files that are no part of a run which was stopped before its end."""
    paths = folder.iterdir() if folder.is_dir() else ()
    others = sorted(path.name for path in paths if not path.name.startswith(("checkpoint-", "runs", ".lock")))
    if others:
        print(f"warning: {folder} holds other files, as {others[0]}; the run may replace them")


def step_of(checkpoint: str | Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(Path(checkpoint).name.partition("-")[2])


def kept_settings(
    options: SimpleNamespace, arguments: TrainingArguments, trained: Sequence[Example]
) -> dict[str, object]:
    """Return the settings that a resumed run cannot change in silence, by name.

    Args:
        options: the options of the run by name, with the values that stand for defaults
        arguments: the arguments of the trainer
        trained: the examples to train on
    """
    per_process = arguments.train_batch_size * arguments.gradient_accumulation_steps
    settings: dict[str, object] = {
        _EXAMPLES: fingerprint(trained),
        "--per-device-batch-size x --gradient-accumulation-steps x processes": per_process * arguments.world_size,
    }
    for name, value in vars(options).items():
        if name not in _MAY_CHANGE:
            settings[f"--{name.replace('_', '-')}"] = value
    settings["--model"] = Path(options.model).name  # its folder may have moved
    return settings


class SettingsNote(TrainerCallback):
    """Write the settings that a resumed run cannot change in silence into every checkpoint.

    Args:
        settings: their values by name
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = dict(settings)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write them into the newest checkpoint."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and folder.is_dir():
            (folder / _SETTINGS).write_text(json.dumps(self.settings) + "\n", encoding="utf-8")


def check_settings(checkpoint: str | None, settings: Mapping[str, object]) -> None:
    """Raise ValueError if a checkpoint was trained with other settings, which its states would keep."""
    if checkpoint is None:
        return
    changes = {name: text for name, text in _changes(checkpoint, settings).items() if name not in _LENGTH}
    if changes:
        why = " Pictures, texts, their order or sizes of files differ." if _EXAMPLES in changes else ""
        raise ValueError(
            f"{checkpoint} was trained with {', '.join(changes.values())}.{why} A resumed run cannot change that: go "
            "on with the former, or begin anew in another --output-dir"
        )


def warn_of_new_length(checkpoint: str | None, settings: Mapping[str, object]) -> None:
    """Print that a run is resumed with another length, which changes its learning rates."""
    if checkpoint is None:
        return
    changes = [text for name, text in _changes(checkpoint, settings).items() if name in _LENGTH]
    if changes:
        print(
            f"warning: {checkpoint} was trained with {', '.join(changes)}. The learning rates now follow the new length"
        )


def _changes(checkpoint: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Return the settings that a checkpoint was not trained with, by name, each with both values."""
    file = Path(checkpoint, _SETTINGS)
    former = json.loads(file.read_text(encoding="utf-8")) if file.exists() else settings
    return {
        name: f"{name} {former[name]} (now {value})"
        for name, value in settings.items()
        if former.get(name, value) != value
    }


def save_processor(processor: ProcessorMixin, model: str, revision: str | None, folder: Path) -> None:
    """Write the processor's files beside the model.

    Args:
        processor: the processor of the run
        model: the checkpoint or name that the run began with
        revision: the revision of the model on the Hub
        folder: the output folder
    """
    if is_torchvision_available():
        processor.tokenizer.padding_side = "right"  # it was loaded for generation, which pads on the left
        processor.save_pretrained(folder)
        return
    # Without torchvision the processor lacks its part for videos, so the checkpoint's own files are copied.
    source = Path(cached_file(model, "config.json", revision=revision)).parent
    for pattern in ("*processor*.json", "*token*.json", "vocab*", "merges.txt", "chat_template*"):
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)


def finish(checkpoint: Path, folder: Path, model: str, revision: str | None, title: str) -> None:
    """Write the files that a run writes at its end, from its last checkpoint; skip a run that has ended.

    Args:
        checkpoint: the checkpoint of the last step
        folder: the output folder
        model: the checkpoint or name that the run began with
        revision: the revision of the model on the Hub
        title: the title of the chart
    """
    if (folder / "loss.svg").exists():  # a run writes it last
        return
    state = checkpoint / "trainer_state.json"
    for file in checkpoint.iterdir():
        if file.suffix in (".safetensors", ".json", ".md") and file.name != _SETTINGS:
            shutil.copy(file, folder / file.name)
    save_processor(load_processor(model, revision), model, revision, folder)
    draw_loss(json.loads(state.read_text(encoding="utf-8"))["log_history"], folder / "loss.svg", title)


def draw_loss(history: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw the losses of the trainer's log."""
    lines = {}
    for name, words in {"loss": "training", "eval_loss": "held out"}.items():
        lines[words] = [(entry["step"], entry[name]) for entry in history if name in entry]
    draw(path, title, lines)
