"""Run `examples/finetune.py` as users do, on the tiny captioners: stock beside patched, resume, LoRA, mistakes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, RUNNER, WAYS, launched, words
from read_once import load_processor_once, read_once
from safetensors.torch import load_file
from support.towers import alike
from tiny import FAMILIES
from torch.utils.data import DataLoader

assert str(EXAMPLES) in sys.path
import finetune  # noqa: E402
import finetuning.folder  # noqa: E402
import scenes  # noqa: E402
from finetuning.curve import draw  # noqa: E402
from finetuning.data import (  # noqa: E402
    Collator,
    Example,
    Examples,
    describe,
    find_examples,
    fingerprint,
    hold_out,
)
from media.files import lock  # noqa: E402
from media.items import Item  # noqa: E402
from media.processors import limit_pixels, load_processor  # noqa: E402

PROMPT = "describe this picture ."
Settings = dict[str, Any]
"""Options of `finetune.py` by name."""
SETTINGS: Settings = {
    "max-steps": 6,
    "save-steps": 3,
    "logging-steps": 1,
    "per-device-batch-size": 4,
    "dataloader-num-workers": 0,
    "learning-rate": 1e-3,
    "eval-fraction": 0.2,
    "prompt": PROMPT,
    "min-pixels": 4 * 32 * 32,
    "max-pixels": 9 * 32 * 32,
}


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every processor and config once for all tests."""
    read_once(monkeypatch, finetune, finetuning.folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw twenty scenes; the captions are reversed, so that the models do not know them yet."""
    folder = tmp_path_factory.mktemp("scenes")
    rows = []
    for seed in range(20):
        scene = scenes.scene(seed, video=False)
        chance = random.Random(seed)
        scenes.draw(scene, 28 * chance.randint(4, 6), 28 * chance.randint(4, 6))[0].save(folder / f"{seed:02}.png")
        rows.append({"file_name": f"{seed:02}.png", "text": " ".join(reversed(scene.caption.split()))})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def checkpoint_of(family: str) -> Path:
    return CAPTIONERS / family


def arguments(data: Path, output: Path, family: str, *flags: str, **settings: object) -> list[str]:
    """Return the command line of a run."""
    by_name = SETTINGS | {name.replace("_", "-"): value for name, value in settings.items()}
    options = [f"--{name}={value}" for name, value in by_name.items()]
    return [f"--model={checkpoint_of(family)}", f"--train-file={data}", f"--output-dir={output}", *options, *flags]


def run(data: Path, output: Path, family: str = "qwen3_vl", *flags: str, **settings: object) -> str:
    """Fine-tune a model; return the console's text."""
    result = RUNNER.invoke(finetune.app, arguments(data, output, family, *flags, **settings), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def losses(output: Path, name: str = "loss") -> list[float]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def assert_same_weights(output: Path, expected_output: Path) -> None:
    expected = weights(expected_output)
    trained = weights(output)
    assert expected.keys() == trained.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def patched(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of an uninterrupted patched run."""
    output = tmp_path_factory.mktemp("patched")
    console = run(data, output)
    assert "16 examples to train on, 4 to evaluate by" in console and "beginning anew" in console
    assert "qwen3_vl, patched" in console and " fast, 0 stock" in console and "6 steps: loss " in console
    return output


@pytest.mark.matrix  # `test_lora` compares with stock every time, and test_matrix.py does without LoRA
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_evaluation_are_those_of_stock(data: Path, tmp_path: Path, family: str) -> None:
    """The losses are equal step by step, and they fall."""
    assert "patched" in run(data, tmp_path / "patched", family)
    assert f"{family}, stock" in run(data, tmp_path / "stock", family, "--no-patch")
    for name in ("loss", "eval_loss", "eval_accuracy"):
        assert losses(tmp_path / "patched", name) == pytest.approx(losses(tmp_path / "stock", name), rel=1e-3), name
    of_steps = losses(tmp_path / "patched")
    assert len(of_steps) == 6 and of_steps[-1] < 0.8 * of_steps[0]


def test_the_result_is_a_checkpoint(patched: Path) -> None:
    processor = load_processor(str(patched))
    model = finetune.AutoModelForImageTextToText.from_pretrained(patched)
    assert processor.tokenizer.chat_template and type(model).__name__ == "Qwen3VLForConditionalGeneration"
    drawn = (patched / "loss.svg").read_text()
    assert drawn.count("<polyline") == 2 and "held out" in drawn and "patched, auto" in drawn
    assert json.loads((patched / "all_results.json").read_text())["eval_accuracy"] > 0


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen2_vl"))
def test_a_resumed_run_has_the_weights_of_its_checkpoint(data: Path, tmp_path: Path, family: str) -> None:
    """The names of weights in a checkpoint are those on the Hub, which differ from the modules' in these families."""
    steps = dict(max_steps=5, save_steps=3, eval_fraction=0)
    run(data, tmp_path / "whole", family, **steps)
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    assert "5 steps, 2 of them since the checkpoint" in run(data, tmp_path / "resumed", family, "--resume", **steps)
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


def test_a_resumed_run_equals_an_uninterrupted_one(data: Path, patched: Path, tmp_path: Path) -> None:
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-5")  # a kill while it was written
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 1.0, "global')
    torn = shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-6") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    refused = RUNNER.invoke(finetune.app, arguments(data, tmp_path, "qwen3_vl"))
    assert refused.exit_code == 2 and "--resume goes on from it" in refused.output
    output = run(data, tmp_path, "qwen3_vl", "--resume")
    assert f"passed over: {tmp_path / 'checkpoint-6'} is damaged: model.safetensors: " in output
    assert f"going on from {tmp_path / 'checkpoint-3'}" in output
    assert losses(tmp_path) == losses(patched)
    assert_same_weights(tmp_path, patched)
    for file in tmp_path.glob("*.*"):  # as if the run was killed after its last checkpoint, while it wrote the model
        if file.name == "config.json":
            file.write_text("{")
        else:
            file.unlink()
    assert "the run is done" in run(data, tmp_path, "qwen3_vl", "--resume")
    assert_same_weights(tmp_path, patched)
    assert "<polyline" in (tmp_path / "loss.svg").read_text() and load_processor(str(tmp_path)).tokenizer.chat_template


@pytest.mark.parametrize(
    ("family", "flags", "settings", "change"),
    [
        ("qwen3_vl", [], {"prompt": "what is this ?"}, f"--prompt {PROMPT} (now what is this ?)"),
        ("qwen3_vl", [], {"seed": 7}, "(now 7)"),
        (
            "qwen3_vl",
            [],
            {"per_device_batch_size": 2},
            "--per-device-batch-size x --gradient-accumulation-steps x processes 4 (now 2)",
        ),
        ("qwen3_vl", ["--freeze-tower"], {}, "--freeze-tower False (now True)"),
        ("qwen3_vl", ["--bf16"], {}, "--bf16 False (now True)"),
        ("qwen2_5_vl", [], {}, "--model qwen3_vl (now qwen2_5_vl)"),
        ("qwen3_vl", [], {"max_grad_norm": 3, "seed": 8}, "--max-grad-norm 1.0 (now 3.0), --seed"),
    ],
)
def test_a_resumed_run_keeps_what_decides_its_steps(
    data: Path, patched: Path, tmp_path: Path, family: str, flags: list[str], settings: Settings, change: str
) -> None:
    """Also where the checkpoint would fit: the steps after it would see other inputs than those before."""
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-3")
    refused = RUNNER.invoke(finetune.app, arguments(data, tmp_path, family, "--resume", *flags, **settings))
    assert refused.exit_code == 2 and change in words(refused), refused.output


def test_a_resumed_run_may_divide_its_steps_otherwise(data: Path, patched: Path, tmp_path: Path) -> None:
    """Steps of as many examples in smaller batches train on the same examples; another card may need that."""
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-3")
    batches = dict(per_device_batch_size=2, gradient_accumulation_steps=2)
    console = run(data, tmp_path, "qwen3_vl", "--resume", "--no-patch", "--gradient-checkpointing", **batches)
    assert "6 steps, 3 of them since the checkpoint: loss" in console and "was trained with" not in console
    assert losses(tmp_path) == pytest.approx(losses(patched), rel=1e-3)


def test_resume_without_a_checkpoint_begins_anew(data: Path, tmp_path: Path) -> None:
    assert "beginning anew: " in run(data, tmp_path, "qwen3_vl", "--resume", max_steps=1)


@pytest.mark.parametrize("epochs", [0.5, 1.0, 1.5])
def test_a_run_of_epochs_ends_once(data: Path, tmp_path: Path, epochs: float) -> None:
    settings = dict(max_steps=-1, num_train_epochs=epochs, per_device_batch_size=8, eval_fraction=0)
    run(data, tmp_path, "qwen3_vl", **settings)
    results = (tmp_path / "all_results.json").read_bytes()
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    assert "the run is done" in run(data, tmp_path, "qwen3_vl", "--resume", **settings)
    assert (
        sorted(tmp_path.glob("checkpoint-*")) == checkpoints and (tmp_path / "all_results.json").read_bytes() == results
    )


def test_a_longer_run_that_was_killed_at_its_end_gets_its_own_model(data: Path, tmp_path: Path) -> None:
    """The files of the shorter run before it still lie in the folder."""
    run(data, tmp_path, "qwen3_vl", max_steps=1, save_steps=1)
    shorter = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    console = run(data, tmp_path, "qwen3_vl", "--resume", max_steps=3, save_steps=1)
    assert "was trained with --max-steps 1 (now 3). The learning rates now follow the new length" in console
    expected = weights(tmp_path)
    (tmp_path / "loss.svg").unlink()  # written last; `begin` had removed that of the shorter run
    (tmp_path / "all_results.json").unlink()
    for name in ("model.safetensors", "trainer_state.json"):
        (tmp_path / name).write_bytes(shorter[name])
    assert "the run is done" in run(data, tmp_path, "qwen3_vl", "--resume", max_steps=3, save_steps=1)
    assert all(torch.equal(value, expected[name]) for name, value in weights(tmp_path).items())
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 3


def test_training_removes_the_results_of_a_shorter_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data, tmp_path, "qwen3_vl", max_steps=1, save_steps=1)
    assert (tmp_path / "loss.svg").exists()
    monkeypatch.setattr(finetune.ResumedTrainer, "train", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(data, tmp_path, "qwen3_vl", "--resume", max_steps=3, save_steps=1)
    assert not (tmp_path / "loss.svg").exists() and not (tmp_path / "all_results.json").exists()


def test_a_file_as_output_folder_is_refused_first(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = RUNNER.invoke(finetune.app, arguments(data, tmp_path / "file", "none"))
    assert refused.exit_code == 2 and "is a file: name a folder" in words(refused)


def test_a_frozen_tower_does_not_change(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "qwen3_vl", "--freeze-tower", "--gradient-checkpointing", max_steps=2)
    before = weights(checkpoint_of("qwen3_vl"))
    after = weights(tmp_path)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name].float())}
    assert changed and not [name for name in changed if "visual" in name]


def test_accumulation_and_checkpointing_give_the_same_losses(data: Path, patched: Path, tmp_path: Path) -> None:
    batches = dict(per_device_batch_size=2, gradient_accumulation_steps=2)
    run(data, tmp_path, "qwen3_vl", "--gradient-checkpointing", **batches)
    assert losses(tmp_path) == pytest.approx(losses(patched), rel=1e-3)


@pytest.mark.parametrize("frozen", alike(False, True), ids=["all", "tower frozen"])
def test_lora_trains_as_stock(data: Path, tmp_path: Path, frozen: bool) -> None:
    pytest.importorskip("peft")
    flags = ("--freeze-tower",) if frozen else ()
    settings = dict(lora_rank=4, learning_rate=1e-2, max_steps=4, save_steps=4)
    console = run(data, tmp_path / "patched", "qwen3_vl", *flags, **settings)
    run(data, tmp_path / "stock", "qwen3_vl", "--no-patch", *flags, **settings)
    assert " fast, 0 stock" in console
    of_steps = losses(tmp_path / "patched")
    assert of_steps == pytest.approx(losses(tmp_path / "stock"), rel=1e-3) and of_steps[-1] < 0.95 * of_steps[0]
    adapters = load_file(tmp_path / "patched" / "adapter_model.safetensors")
    assert any("language_model" in name for name in adapters)
    assert frozen != any("visual" in name for name in adapters)
    assert all("lora_" in name for name in adapters)
    assert not (tmp_path / "patched" / "model.safetensors").exists()


def test_a_frozen_tower_gets_no_adapters(lora: Path) -> None:
    adapters = load_file(lora / "adapter_model.safetensors")
    assert adapters and not any("visual" in name for name in adapters)


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        (["--freeze-tower"], {"lora_rank": 2}, "--lora-rank 4 (now 2)"),
        (["--freeze-tower"], {}, "--lora-rank 4 (now 0)"),
        (
            ["--freeze-tower"],
            {"lora_rank": 4, "lora_alpha": 2},
            "was trained with --lora-alpha 8 (now 2.0). A resumed run",
        ),
        ([], {"lora_rank": 4}, "was trained with --freeze-tower True (now False)"),
        (["--freeze-tower"], {"lora_rank": 4}, None),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(
    data: Path, lora: Path, tmp_path: Path, flags: list[str], settings: Settings, message: str | None
) -> None:
    """Rank, scale or modules would differ; the run ends before it loads the model."""
    shutil.copytree(lora, tmp_path, dirs_exist_ok=True)
    command = arguments(data, tmp_path, "qwen3_vl", "--resume", *flags, **settings, max_steps=2)
    result = RUNNER.invoke(finetune.app, command)
    assert result.exit_code == (2 if message else 0)
    assert (message or "going on from") in words(result)


@pytest.fixture(scope="module")
def lora(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    output = tmp_path_factory.mktemp("lora")
    run(data, output, "qwen3_vl", "--freeze-tower", lora_rank=4, max_steps=1, save_steps=1)
    return output


def test_a_folder_with_the_other_kind_of_result_is_refused(
    data: Path, lora: Path, patched: Path, tmp_path: Path
) -> None:
    """A model is loaded with the adapters that lie beside it."""
    for folder, rank, kind in ((lora, 0, "LoRA adapters"), (patched, 4, "a whole model")):
        output = tmp_path / str(rank)
        shutil.copytree(folder, output, ignore=shutil.ignore_patterns("checkpoint-*"))
        refused = RUNNER.invoke(finetune.app, arguments(data, output, "qwen3_vl", lora_rank=rank))
        assert refused.exit_code == 2 and f"holds {kind}" in words(refused)


@pytest.mark.parametrize(
    ("row", "prompt", "message"),
    [
        ({"label": "a star"}, PROMPT, "expected a text in text or caption"),
        (
            {"text": "a star", "image": "none.png"},
            PROMPT,
            "of the held-out pictures (--eval-file, or --eval-fraction 0",
        ),
        ({"text": "a star"}, "{question}", "the prompt names {question}"),
    ],
)
def test_unusable_files_to_evaluate_by_are_refused_before_the_training(
    data: Path, tmp_path: Path, row: dict[str, str], prompt: str, message: str
) -> None:
    rows = [json.loads(line) | {"question": "what ?"} for line in (data / "metadata.jsonl").read_text().splitlines()]
    for name, lines in (("train", rows), ("eval", [{"image": str(data / "00.png")} | row])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    command = [f"--eval-file={tmp_path / 'eval.jsonl'}", f"--image-root={data}", "--max-steps=1"]
    command = arguments(tmp_path / "train.jsonl", tmp_path / "out", "qwen3_vl", *command, prompt=prompt)
    refused = RUNNER.invoke(finetune.app, command)
    assert refused.exit_code == 2 and message in words(refused), refused.output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_two_texts_of_a_picture_is_refused(data: Path, tmp_path: Path) -> None:
    """`merge` wrote both, and one was edited by hand since."""
    folder = tmp_path / "both"
    shutil.copytree(data, folder)
    (folder / "07.txt").write_text("an edited text")
    result = RUNNER.invoke(finetune.app, arguments(folder, tmp_path / "out", "qwen3_vl", "--max-steps=1"))
    assert result.exit_code == 2 and "a line in metadata.jsonl and the file 07.txt" in words(result), result.output
    assert len(find_examples([str(folder / "metadata.jsonl")])) == 20
    lines_alone = tmp_path / "lines"  # the pictures of its lines are elsewhere, and so are their .txt files
    lines_alone.mkdir()
    shutil.copy(folder / "metadata.jsonl", lines_alone)
    assert len(find_examples([str(lines_alone)], root=folder)) == 20
    (folder / "metadata.jsonl").unlink()
    assert len(find_examples([str(folder)])) == 20


def test_lora_without_peft_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = RUNNER.invoke(finetune.app, arguments(data, tmp_path, "qwen3_vl", lora_rank=4))
    assert result.exit_code == 2 and "--lora-rank needs PEFT: pip install peft" in result.output


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(data: Path, patched: Path, tmp_path: Path, way: str) -> None:
    command = arguments(data, tmp_path, "qwen3_vl", per_device_batch_size=2, dataloader_num_workers=1)
    console = launched(way, EXAMPLES / "finetune.py", finetune.app, command, tmp_path)
    assert console.count("6 steps: loss ") == 1 and " fast, 0 stock" in console
    for name in ("loss", "eval_loss", "eval_accuracy"):
        assert losses(tmp_path, name) == pytest.approx(losses(patched, name), rel=1e-3), name


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("requested", [None, 0, 7])
def test_by_default_a_loader_has_no_more_processes_than_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, requested: int | None
) -> None:
    """torch warns of a loader with more processes than cores. A number that the user names stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    options: Settings = {}
    monkeypatch.setattr(finetune, "run", lambda namespace: options.update(vars(namespace)))
    named = [] if requested is None else [f"--dataloader-num-workers={requested}"]
    command = ["--model=a", "--train-file=b", "--output-dir=c", *named]
    assert RUNNER.invoke(finetune.app, command, catch_exceptions=False).exit_code == 0
    trainer_options = finetune.training_arguments(SimpleNamespace(**options), cpu=True)
    workers = trainer_options.dataloader_num_workers
    assert workers == (min(4, cores) if requested is None else requested)
    if requested is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DataLoader([0], num_workers=workers)


def test_help_is_not_cut_at_80_columns() -> None:
    text = RUNNER.invoke(finetune.app, ["--help"], env={"COLUMNS": "80"}).output
    assert "--gradient-accumulation-steps" in text and "…" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_only_answers_have_labels(data: Path, family: str) -> None:
    processor = load_processor_once(str(checkpoint_of(family)))
    rows = Examples(find_examples([str(data)]), processor, prompt=PROMPT)
    chosen = sorted((rows[index] for index in range(6)), key=lambda row: len(row.text))
    chosen = [chosen[0], chosen[-1]]  # of different lengths
    batch = Collator(processor)(chosen)
    tokenizer = processor.tokenizer
    assert next(iter(batch)) == "input_ids" and (batch["attention_mask"].diff() <= 0).all()  # padded on the right
    for index, row in enumerate(chosen):
        ids, labels, mask = (batch[name][index] for name in ("input_ids", "labels", "attention_mask"))
        assert tokenizer.decode(labels[labels != -100]) == f"{row.text} <|im_end|>"
        assert (labels[mask == 0] == -100).all() and (ids[labels != -100] == labels[labels != -100]).all()
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": row.text}]}
        text = processor.apply_chat_template([question, answer])
        expected = processor(text=[text], images=[row.image], return_tensors="pt")
        assert ids[mask == 1].tolist() == expected["input_ids"][0].tolist()
        assert batch["mm_token_type_ids"][index][mask == 1].tolist() == expected["mm_token_type_ids"][0].tolist()


def test_pictures_above_max_pixels_are_reduced(data: Path) -> None:
    processor = load_processor_once(str(checkpoint_of("qwen3_vl")))
    rows = Examples(find_examples([str(data)]), processor, prompt=PROMPT)
    before = Collator(processor)([rows[0]])["image_grid_thw"]
    limit_pixels(processor, 2 * 2 * 32 * 32, 3 * 3 * 32 * 32)
    after = Collator(processor)([rows[0]])["image_grid_thw"]
    assert after.prod() <= 3 * 3 * 4 < before.prod()


def test_every_kind_of_input_gives_the_same_examples(data: Path, tmp_path: Path) -> None:
    """Lines of JSON, a folder with texts beside its pictures, and a table hold the same examples."""
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    listed = tmp_path / "list.jsonl"
    folder = tmp_path / "folder"
    table = tmp_path / "table.parquet"
    folder.mkdir()
    listed.write_text("\n".join(json.dumps({"image": row["file_name"], "caption": row["text"]}) for row in lines))
    for row in lines:
        shutil.copy(data / row["file_name"], folder)
        (folder / row["file_name"]).with_suffix(".txt").write_text(row["text"] + "\n")
    pictures = [{"bytes": (data / row["file_name"]).read_bytes(), "path": None} for row in lines]
    pq.write_table(pa.table({"image": pictures, "answer": [row["text"] for row in lines]}), table, row_group_size=3)
    processor = load_processor_once(str(checkpoint_of("qwen3_vl")))
    contents = []
    for source, root in ((data, None), (listed, data), (folder, None), (table, None)):
        examples = find_examples([str(source)], root=root)
        rows = Examples(examples, processor, prompt=PROMPT)
        contents.append([(rows[index].text, rows[index].image.tobytes()) for index in range(len(rows))])
    assert len(contents[0]) == 20 and all(content == contents[0] for content in contents)


def test_prompts_name_columns(data: Path, tmp_path: Path) -> None:
    line = {"path": str(data / "00.png"), "question": "what is this ?", "answer": "a circle"}
    (tmp_path / "qa.jsonl").write_text(json.dumps(line))
    processor = load_processor_once(str(checkpoint_of("qwen3_vl")))
    row = Examples(find_examples([str(tmp_path / "qa.jsonl")]), processor, prompt="{question}")[0]
    assert (row.prompt, row.text) == ("what is this ?", "a circle")


def test_a_picture_is_held_out_with_all_its_texts(data: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"image": f"{index % 5:02}.png", "text": f"text {index}"}) for index in range(20)]
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    trained, held_out = hold_out(find_examples([str(tmp_path / "r.jsonl")], root=data), 0.2)
    assert len(held_out) == 4 and len(trained) == 16
    assert not {example.picture for example in trained} & {example.picture for example in held_out}
    with pytest.raises(ValueError, match="beside those held out"):
        hold_out(held_out, 0.5)


def test_every_process_holds_out_the_same_pictures_of_one_name() -> None:
    class Rising(str):
        """A string with a chosen hash: sets follow the hashes, which differ between processes."""

        def __hash__(self) -> int:
            return ord(self[0])

    class Falling(Rising):
        def __hash__(self) -> int:
            return 128 - ord(self[0])

    held_out = []
    for kind in (Rising, Falling):
        examples = [Example(Item(key=kind(f"{folder}/1.png"), file="")) for folder in "abcdefgh"]
        held_out.append([str(example.picture) for example in hold_out(examples, 0.25)[1]])
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2


def test_unreadable_examples_are_passed_over(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.png").write_bytes((data / "00.png").read_bytes()[:200])
    rows = [
        {"image": str(tmp_path / "bad.png"), "text": "half a picture"},
        {"image": str(tmp_path / "none.png"), "text": "no picture"},
        {"image": str(data / "00.png")},
        {"image": str(data / "00.png"), "text": " "},
        {"image": str(data / "00.png"), "text": "what <|image_pad|> is"},
        {"image": str(data / "01.png"), "text": "a whole picture"},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    processor = load_processor_once(str(checkpoint_of("qwen3_vl")))
    examples = Examples(find_examples([str(tmp_path / "r.jsonl")]), processor, prompt=PROMPT)
    assert [examples[index].text for index in range(6)] == ["a whole picture"] * 6
    errors = capsys.readouterr().err
    assert errors.count("passed over: ") == 5 and "none.png" in errors
    assert "the column or file 'text' is missing, empty or neither text nor number" in errors
    assert "<|image_pad|> in a text" in errors

    del processor.video_token  # PaddleOCR-VL's processor has none, since it takes no videos
    assert examples[5].text == "a whole picture"


def test_a_missing_text_column_names_the_columns_of_a_table(data: Path, tmp_path: Path) -> None:
    pictures = [{"bytes": (data / "00.png").read_bytes(), "path": "00.png"}] * 3
    table = pa.table({"image": pictures, "question": ["what ?"] * 3, "label": ["a star"] * 3})
    pq.write_table(table, tmp_path / "rows.parquet")
    refused = RUNNER.invoke(finetune.app, arguments(tmp_path / "rows.parquet", tmp_path / "out", "qwen3_vl"))
    assert refused.exit_code == 2, refused.output
    assert "label, name, question" in words(refused) and "--text-column" in words(refused)
    assert "beside" not in words(refused)


def test_a_number_is_a_text(data: Path, tmp_path: Path) -> None:
    """Answers to "how many" are numbers in many data sets."""
    rows = [{"image": str(data / "00.png"), "answer": answer} for answer in (7, 0, 2.5, "3", True, [1], None)]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    examples = find_examples([str(tmp_path / "r.jsonl")])
    read = Examples(examples, load_processor_once(str(checkpoint_of("qwen3_vl"))), prompt=PROMPT)
    assert [read[index].text for index in range(4)] == ["7", "0", "2.5", "3"]
    assert read[4].text == "7" and describe(examples) == "4 of 7 examples (the others have no text)"


def test_examples_without_a_text_are_counted_before_the_training(data: Path, tmp_path: Path) -> None:
    rows = [{"image": str(data / "00.png"), "text": text} for text in ("a star", " ", None)]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    examples = find_examples([str(tmp_path / "r.jsonl")])
    assert describe(examples) == "1 of 3 examples (the others have no text)"
    assert describe(examples[:1]) == "1 examples"
    many = describe(examples * 400)
    assert many == "1200 examples (66 of the first 100 have no text and are passed over)"


def test_a_run_is_not_resumed_with_other_files(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", "qwen3_vl", max_steps=1, save_steps=1)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(data / "00.png", other / "new.png")
    (other / "new.txt").write_text("a star")
    for max_steps in (1, 2):
        command = arguments(other, tmp_path / "out", "qwen3_vl", "--resume", max_steps=max_steps, eval_fraction=0)
        refused = RUNNER.invoke(finetune.app, command)
        assert refused.exit_code == 2 and "was trained with examples of --train-file" in words(refused), refused.output
        assert "Pictures, texts, their order or sizes of files differ. A resumed run" in words(refused)
    command = arguments(data, tmp_path / "out", "qwen3_vl", "--resume", max_steps=2, learning_rate=0.1)
    refused = RUNNER.invoke(finetune.app, command)
    assert refused.exit_code == 2 and "--learning-rate 0.001 (now 0.1)" in words(refused)
    assert "going on from" in run(data, tmp_path / "out", "qwen3_vl", "--resume", max_steps=2, save_steps=1)
    assert not (tmp_path / "out" / "resumed_with.json").exists()


def test_other_texts_are_other_examples(data: Path, tmp_path: Path) -> None:
    digests = set()
    for text in ("a star", "a horse"):
        (tmp_path / "r.jsonl").write_text(json.dumps({"image": str(data / "00.png"), "text": text}))
        digests.add(fingerprint(find_examples([str(tmp_path / "r.jsonl")])))
    assert len(digests) == 2


def test_texts_and_pictures_of_other_sizes_are_other_examples(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    text = folder / "07.txt"
    (folder / "05.txt").write_text("a dot")
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": str(folder / "01.png"), "text": "a star"}))
    inputs = [str(folder), str(tmp_path / "r.jsonl")]
    digests = {fingerprint(find_examples(inputs))}
    for content in ("a star", "a star"):
        text.write_text(content)
        digests.add(fingerprint(find_examples(inputs)))
    assert len(digests) == 2
    text.write_text("a red star")
    digests.add(fingerprint(find_examples(inputs)))
    for name in inputs:
        before = fingerprint(find_examples([name]))
        Image.new("RGB", (31, 17)).save(folder / "01.png")
        assert fingerprint(find_examples([name])) != before
        shutil.copy(data / "01.png", folder / "01.png")
        assert fingerprint(find_examples([name])) == before  # a copy with another time
    assert len(digests) == 3


def test_the_first_example_may_have_no_text(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "folder", ignore=shutil.ignore_patterns("*.jsonl"))
    (tmp_path / "folder" / "07.txt").write_text("a star")
    assert {example.text for example in find_examples([str(tmp_path / "folder")])} == {"txt"}


def test_every_input_has_its_own_name_for_texts(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    for picture in folder.glob("*.png"):
        picture.with_suffix(".txt").write_text(f"text of {picture.stem}")
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": str(folder / "01.png"), "caption": "a star"}))
    inputs = [str(folder), str(tmp_path / "r.jsonl"), str(data)]
    examples = find_examples(inputs)
    rows = Examples(examples, load_processor_once(str(checkpoint_of("qwen3_vl"))), prompt=PROMPT)
    count = len(list(folder.glob("*.png")))
    assert [example.text for example in examples] == ["txt"] * count + ["caption"] + ["text"] * count
    assert rows[1].text == "text of 01" and rows[count].text == "a star"
    assert all(row.text and not row.text.startswith("text of") for row in (rows[count + 1], rows[2 * count]))
    assert describe(examples) == f"{2 * count + 1} examples"
    named = find_examples([str(tmp_path / "r.jsonl")], text_column="caption")
    assert [example.text for example in named] == ["caption"]
    with pytest.raises(ValueError, match=r"expected a text in caption, 00\.png has .*name it with --text-column"):
        find_examples(inputs, text_column="caption")


def test_the_folder_of_the_model_is_refused_as_output(data: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of("qwen3_vl"), tmp_path / "own")
    before = (tmp_path / "own" / "model.safetensors").read_bytes()
    options = arguments(data, tmp_path / "own", "qwen3_vl")
    command = [option for option in options if not option.startswith("--model")]
    done = RUNNER.invoke(finetune.app, [*command, f"--model={tmp_path / 'own'}"])
    assert done.exit_code == 2 and "is the folder of the model itself" in words(done)
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (None, {"train_file": "nowhere.jsonl"}, "there is no file, folder or match for nowhere.jsonl"),
        ('{"image": "a.png"', {}, "line 1 of .*r.jsonl is no JSON"),
        ("[1]", {}, "line 1 of .*r.jsonl is list, expected an object"),
        ('{"picture": "a.png"}', {}, "expected a picture's path in file_name or .*it has picture; name the column"),
        (
            '{"image": "a.png", "words": "b"}',
            {"eval_fraction": 0},
            "expected a text in text or caption.*has image, words",
        ),
        ('{"image": "a.png", "text": "b"}', {"eval_fraction": 0}, "none can be read.*No such file.*--image-root"),
        ('{"image": "a.png", "text": "b"}', {}, "No pictures to train on beside those held out: the inputs hold 1"),
        (None, {"prompt": "{question}"}, "the prompt names {question}; there are file_name, kind, text"),
        (None, {"train_file": str(EXAMPLES / "benchmark" / "ways.json")}, "ways.json: texts are read from .jsonl"),
        (None, {"model": "no-such-model"}, "cannot load no-such-model: "),
        (None, {"model": "/none"}, "cannot load /none: no folder is there"),
        (None, {"num_train_epochs": 0}, "expected --num-train-epochs to be a number above 0"),
        (None, {"attention": "fast"}, "expected attention to be one of"),
        (None, {"attention": "fast", "model": "/none"}, "expected attention to be one of"),  # before the model is read
        (None, {"prompt": " "}, "--prompt is empty"),
        (None, {"attention": "flashinfer_cudnn"}, "flashinfer_cudnn.* - .*CUDA"),
        (None, {"lr_scheduler_type": "odd"}, "odd"),
        (None, {"min_pixels": 1 << 30}, "is above --max-pixels"),
        (None, {"lora_alpha": 0}, "expected --lora-alpha to be a number above 0, got 0"),
        (None, {"lora_alpha": "nan"}, "expected --lora-alpha to be a number above 0, got nan"),
        (None, {"lora_alpha": 8}, "--lora-alpha and --lora-dropout need --lora-rank"),
        (None, {"lora_dropout": 0.1}, "--lora-alpha and --lora-dropout need --lora-rank"),
        (None, {"learning_rate": "inf"}, "expected --learning-rate to be finite"),
        (None, {"max_steps": 0}, "expected --max-steps to be at least 1, or -1 .*, got 0"),
        (None, {"max_steps": -2}, "expected --max-steps to be at least 1, or -1 .*, got -2"),
        (None, {"report_to": "clearml"}, "--report-to clearml: it is not installed, or unknown to transformers"),
    ],
)
def test_mistakes_end_in_one_sentence(
    data: Path, tmp_path: Path, lines: str | None, settings: Settings, message: str
) -> None:
    source = data
    if lines is not None:
        source = tmp_path / "r.jsonl"
        source.write_text(lines)
    command = arguments(source, tmp_path / "out", "qwen3_vl", **settings)
    if "train_file" in settings:
        command = [option for option in command if option != f"--train-file={source}"]
    result = RUNNER.invoke(finetune.app, command)
    assert result.exit_code == 2, result.output
    assert re.search(message, words(result)), result.output
    assert "Traceback" not in result.output


def test_an_unknown_field_of_a_prompt_is_refused_before_the_model_is_loaded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "load", lambda *_: pytest.fail("loaded"))
    result = RUNNER.invoke(finetune.app, arguments(data, tmp_path / "out", "qwen3_vl", prompt="{kind}: {foo}"))
    assert result.exit_code == 2 and "the prompt names {foo}; there are file_name, kind, text" in words(result)
    assert "passed over" not in result.output


def test_two_runs_do_not_share_an_output_folder(data: Path, tmp_path: Path) -> None:
    """`--resume` beside a run that goes on would mix their results."""
    output = tmp_path / "out"
    with lock(output, alone=True):
        refused = RUNNER.invoke(finetune.app, arguments(data, output, "qwen2_vl"))
    assert refused.exit_code == 2 and "another run is writing to" in words(refused)
    assert [path.name for path in output.iterdir()] == [".lock"]


def test_other_files_in_the_output_folder_are_reported(data: Path, tmp_path: Path) -> None:
    assert "holds other files" not in run(data, tmp_path, max_steps=1)
    assert "holds other files" not in run(data, tmp_path, "qwen3_vl", "--resume", max_steps=1)
    shutil.rmtree(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()  # a kill while it was written
    assert f"warning: {tmp_path} holds other files, as " in run(data, tmp_path, max_steps=1)


def test_a_chart_leaves_out_lines_without_points(tmp_path: Path) -> None:
    draw(tmp_path / "one.svg", "a < b", {"only": [(1, 2.0)], "none": []})
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn.count("<polyline") == 1 and "a &lt; b" in drawn and drawn.endswith("</svg>\n")
    draw(tmp_path / "nothing.svg", "", {})
