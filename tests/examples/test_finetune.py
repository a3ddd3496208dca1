"""`examples/finetune.py` as a user runs it, on the tiny captioners: stock beside patched, resume, LoRA, mistakes."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import EXAMPLES, RUNNER, WAYS, launched, words
from safetensors.torch import load_file
from support.towers import alike
from tiny import FAMILIES

assert str(EXAMPLES) in sys.path
import finetune  # noqa: E402
import scenes  # noqa: E402
from finetuning.curve import draw  # noqa: E402
from finetuning.data import Collator, Example, Examples, find_examples, hold_out, text_column  # noqa: E402
from media.items import Item  # noqa: E402
from media.processors import limit_pixels, load_processor  # noqa: E402

PROMPT = "describe this picture ."
SETTINGS: dict[str, Any] = {
    "max-steps": 6,
    "save-steps": 3,
    "logging-steps": 1,
    "per-device-batch-size": 4,
    "dataloader-num-workers": 0,
    "learning-rate": 1e-3,
    "eval-fraction": 0.2,
    "prompt": PROMPT,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty scenes with captions that the models do not know yet: their own, backwards."""
    folder = tmp_path_factory.mktemp("scenes")
    rows = []
    for seed in range(20):
        scene, chance = scenes.scene(seed, video=False), random.Random(seed)
        scenes.draw(scene, 28 * chance.randint(4, 6), 28 * chance.randint(4, 6))[0].save(folder / f"{seed:02}.png")
        rows.append({"file_name": f"{seed:02}.png", "text": " ".join(reversed(scene.caption.split()))})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(data: Path, output: Path, family: str, *flags: str, **settings: Any) -> list[str]:
    named = SETTINGS | {name.replace("_", "-"): value for name, value in settings.items()}
    options = [f"--{name}={value}" for name, value in named.items()]
    where = [f"--model={EXAMPLES / 'tiny_captioner' / family}", f"--train-file={data}", f"--output-dir={output}"]
    return [*where, *options, *flags]


def run(data: Path, output: Path, family: str = "qwen3_vl", *flags: str, **settings: Any) -> str:
    result = RUNNER.invoke(finetune.app, arguments(data, output, family, *flags, **settings), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def losses(output: Path, name: str = "loss") -> list[float]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def patched(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a patched run that nobody disturbed."""
    output = tmp_path_factory.mktemp("patched")
    told = run(data, output)
    assert "16 examples to train on, 4 to evaluate by" in told and "beginning anew" in told
    assert "qwen3_vl, patched" in told and " fast, 0 stock" in told and "6 steps: loss " in told
    return output


@pytest.mark.matrix  # `test_lora` trains the tower beside stock every time, test_matrix.py without LoRA
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_beside_patched(data: Path, tmp_path: Path, family: str) -> None:
    """The same losses, step by step, and the same evaluation; and they fall."""
    assert "patched" in run(data, tmp_path / "patched", family)
    assert f"{family}, stock" in run(data, tmp_path / "stock", family, "--no-patch")
    for name in ("loss", "eval_loss", "eval_accuracy"):
        assert losses(tmp_path / "patched", name) == pytest.approx(losses(tmp_path / "stock", name), rel=1e-3), name
    found = losses(tmp_path / "patched")
    assert len(found) == 6 and found[-1] < 0.8 * found[0]


def test_the_result_is_a_checkpoint(patched: Path) -> None:
    processor = load_processor(str(patched))
    model = finetune.AutoModelForImageTextToText.from_pretrained(patched)
    assert processor.tokenizer.chat_template and type(model).__name__ == "Qwen3VLForConditionalGeneration"
    drawn = (patched / "loss.svg").read_text()
    assert drawn.count("<polyline") == 2 and "held out" in drawn and "patched, auto" in drawn
    assert json.loads((patched / "all_results.json").read_text())["eval_accuracy"] > 0


def test_resumed_equals_undisturbed(data: Path, patched: Path, tmp_path: Path) -> None:
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.copytree(patched / "checkpoint-3", tmp_path / "checkpoint-5")  # a kill while it was written
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    refused = RUNNER.invoke(finetune.app, arguments(data, tmp_path, "qwen3_vl"))
    assert refused.exit_code == 2 and "--resume goes on from it" in refused.output
    assert f"going on from {tmp_path / 'checkpoint-3'}" in run(data, tmp_path, "qwen3_vl", "--resume")
    assert losses(tmp_path) == losses(patched)
    expected, found = weights(patched), weights(tmp_path)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    for file in tmp_path.glob("*.*"):  # a run that is killed after its last checkpoint, or while it writes the model
        file.unlink() if file.name != "config.json" else file.write_text("{")
    assert "the run is done" in run(data, tmp_path, "qwen3_vl", "--resume")
    found = weights(tmp_path)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert "<polyline" in (tmp_path / "loss.svg").read_text() and load_processor(str(tmp_path)).tokenizer.chat_template


def test_resume_without_a_checkpoint_begins(data: Path, tmp_path: Path) -> None:
    assert "beginning anew" in run(data, tmp_path, "qwen3_vl", "--resume", max_steps=1)


def test_a_frozen_tower_stays(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, "qwen3_vl", "--freeze-tower", "--gradient-checkpointing", max_steps=2)
    before, after = weights(EXAMPLES / "tiny_captioner" / "qwen3_vl"), weights(tmp_path)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name].float())}
    assert changed and not [name for name in changed if "visual" in name]


def test_accumulated_and_checkpointed_is_the_same(data: Path, patched: Path, tmp_path: Path) -> None:
    run(
        data,
        tmp_path,
        "qwen3_vl",
        "--gradient-checkpointing",
        per_device_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert losses(tmp_path) == pytest.approx(losses(patched), rel=1e-3)


@pytest.mark.parametrize("frozen", alike(False, True), ids=["all", "tower frozen"])
def test_lora(data: Path, tmp_path: Path, frozen: bool) -> None:
    pytest.importorskip("peft")
    flags = ("--freeze-tower",) if frozen else ()
    told = run(data, tmp_path / "patched", "qwen3_vl", *flags, lora_rank=4, learning_rate=1e-2)
    run(data, tmp_path / "stock", "qwen3_vl", "--no-patch", *flags, lora_rank=4, learning_rate=1e-2)
    assert " fast, 0 stock" in told
    found = losses(tmp_path / "patched")
    assert found == pytest.approx(losses(tmp_path / "stock"), rel=1e-3) and found[-1] < 0.95 * found[0]
    adapters = load_file(tmp_path / "patched" / "adapter_model.safetensors")
    assert any("language_model" in name for name in adapters)
    assert frozen != any("visual" in name for name in adapters)
    assert all("lora_" in name for name in adapters)
    assert not (tmp_path / "patched" / "model.safetensors").exists()


def test_lora_leaves_a_frozen_tower(lora: Path) -> None:
    adapters = load_file(lora / "adapter_model.safetensors")
    assert adapters and not any("visual" in name for name in adapters)


@pytest.mark.parametrize(
    ("flags", "settings", "told"),
    [
        (["--freeze-tower"], {"lora_rank": 2}, "was trained with --lora-rank 4: go on with it, not with 2"),
        (["--freeze-tower"], {}, "was trained with --lora-rank 4: go on with it, not with 0"),
        (["--freeze-tower"], {"lora_rank": 4, "lora_alpha": 2}, "with --lora-alpha 8: go on with it, not with 2"),
        ([], {"lora_rank": 4}, "was trained with --freeze-tower: go on with it"),
        (["--freeze-tower"], {"lora_rank": 4}, None),
    ],
)
def test_resumed_with_other_adapters(
    data: Path, lora: Path, tmp_path: Path, flags: list[str], settings: dict[str, Any], told: str | None
) -> None:
    """Refused in a sentence, before anything is loaded: rank, scale or modules would be others."""
    shutil.copytree(lora, tmp_path, dirs_exist_ok=True)
    asked = arguments(data, tmp_path, "qwen3_vl", "--resume", *flags, **settings, max_steps=2)
    result = RUNNER.invoke(finetune.app, asked)
    assert result.exit_code == (2 if told else 0)
    assert (told or "going on from") in words(result)


@pytest.fixture(scope="module")
def lora(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    output = tmp_path_factory.mktemp("lora")
    run(data, output, "qwen3_vl", "--freeze-tower", lora_rank=4, max_steps=1, save_steps=1)
    return output


def test_lora_without_peft(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = RUNNER.invoke(finetune.app, arguments(data, tmp_path, "qwen3_vl", lora_rank=4))
    assert result.exit_code == 2 and "--lora-rank needs PEFT: pip install peft" in result.output


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(data: Path, patched: Path, tmp_path: Path, way: str) -> None:
    command = arguments(data, tmp_path, "qwen3_vl", per_device_batch_size=2, dataloader_num_workers=1)
    told = launched(way, EXAMPLES / "finetune.py", finetune.app, command, tmp_path)
    assert told.count("6 steps: loss ") == 1 and " fast, 0 stock" in told
    for name in ("loss", "eval_loss", "eval_accuracy"):
        assert losses(tmp_path, name) == pytest.approx(losses(patched, name), rel=1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_only_answers_have_labels(data: Path, family: str) -> None:
    processor = load_processor(str(EXAMPLES / "tiny_captioner" / family))
    rows = Examples(find_examples([str(data)]), processor, prompt=PROMPT, text="text")
    chosen = sorted((rows[index] for index in range(6)), key=lambda row: len(row.text))
    chosen = [chosen[0], chosen[-1]]  # of different lengths
    batch, tokenizer = Collator(processor)(chosen), processor.tokenizer
    assert next(iter(batch)) == "input_ids" and (batch["attention_mask"].diff() <= 0).all()  # padded on the right
    for index, row in enumerate(chosen):
        ids, labels, mask = (batch[name][index] for name in ("input_ids", "labels", "attention_mask"))
        assert tokenizer.decode(labels[labels != -100]) == f"{row.text} <|im_end|>"
        assert (labels[mask == 0] == -100).all() and (ids[labels != -100] == labels[labels != -100]).all()
        told = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
        told.append({"role": "assistant", "content": [{"type": "text", "text": row.text}]})
        text = processor.apply_chat_template(told)
        whole = processor(text=[text], images=[row.image], return_tensors="pt")
        assert ids[mask == 1].tolist() == whole["input_ids"][0].tolist()
        assert batch["mm_token_type_ids"][index][mask == 1].tolist() == whole["mm_token_type_ids"][0].tolist()


def test_the_processor_resizes(data: Path) -> None:
    processor = load_processor(str(EXAMPLES / "tiny_captioner" / "qwen3_vl"))
    rows = Examples(find_examples([str(data)]), processor, prompt=PROMPT, text="text")
    before = Collator(processor)([rows[0]])["image_grid_thw"]
    limit_pixels(processor, None, 4 * 4 * 32 * 32)
    after = Collator(processor)([rows[0]])["image_grid_thw"]
    assert after.prod() <= 4 * 4 * 4 and after.prod() <= before.prod()


def test_inputs(data: Path, tmp_path: Path) -> None:
    """Lines of JSON, a folder with texts beside its pictures, and a table say the same."""
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    listed, folder, table = tmp_path / "list.jsonl", tmp_path / "folder", tmp_path / "table.parquet"
    folder.mkdir()
    listed.write_text("\n".join(json.dumps({"image": row["file_name"], "caption": row["text"]}) for row in lines))
    for row in lines:
        shutil.copy(data / row["file_name"], folder)
        (folder / row["file_name"]).with_suffix(".txt").write_text(row["text"] + "\n")
    pictures = [{"bytes": (data / row["file_name"]).read_bytes(), "path": None} for row in lines]
    pq.write_table(pa.table({"image": pictures, "answer": [row["text"] for row in lines]}), table, row_group_size=3)
    processor = load_processor(str(EXAMPLES / "tiny_captioner" / "qwen3_vl"))
    found = []
    for source, root in ((data, None), (listed, data), (folder, None), (table, None)):
        examples = find_examples([str(source)], root=root)
        rows = Examples(examples, processor, prompt=PROMPT, text=text_column(examples, None))
        found.append([(row.text, row.image.tobytes()) for row in map(rows.__getitem__, range(len(rows)))])
    assert len(found[0]) == 20 and all(each == found[0] for each in found)


def test_prompts_name_columns(data: Path, tmp_path: Path) -> None:
    line = {"path": str(data / "00.png"), "question": "what is this ?", "answer": "a circle"}
    (tmp_path / "qa.jsonl").write_text(json.dumps(line))
    processor = load_processor(str(EXAMPLES / "tiny_captioner" / "qwen3_vl"))
    row = Examples(find_examples([str(tmp_path / "qa.jsonl")]), processor, prompt="{question}", text="answer")[0]
    assert (row.prompt, row.text) == ("what is this ?", "a circle")


def test_a_picture_is_held_out_with_all_its_texts(data: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"image": f"{index % 5:02}.png", "text": f"text {index}"}) for index in range(20)]
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    kept, held = hold_out(find_examples([str(tmp_path / "r.jsonl")], root=data), 0.2)
    assert len(held) == 4 and len(kept) == 16
    assert not {example.picture for example in kept} & {example.picture for example in held}
    with pytest.raises(ValueError, match="beside those held out"):
        hold_out(held, 0.5)


def test_pictures_of_one_name_are_held_out_alike_in_every_process() -> None:
    class Rising(str):
        """Sets are in the order of hashes, which for texts is another in every process."""

        def __hash__(self) -> int:
            return ord(self[0])

    class Falling(Rising):
        def __hash__(self) -> int:
            return 128 - ord(self[0])

    named = [[Example(Item(key=kind(f"{each}/1.png"), file="")) for each in "abcdefgh"] for kind in (Rising, Falling)]
    rising, falling = ([str(each.picture) for each in hold_out(examples, 0.25)[1]] for examples in named)
    assert rising == falling and len(rising) == 2


def test_what_cannot_be_read_is_passed_over(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.png").write_bytes((data / "00.png").read_bytes()[:200])
    rows = [
        {"image": str(tmp_path / "bad.png"), "text": "half a picture"},
        {"image": str(tmp_path / "none.png"), "text": "no picture"},
        {"image": str(data / "00.png")},
        {"image": str(data / "00.png"), "text": " "},
        {"image": str(data / "00.png"), "text": "what <|image_pad|> is"},
        {"image": str(data / "01.png"), "text": "a whole picture"},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    processor = load_processor(str(EXAMPLES / "tiny_captioner" / "qwen3_vl"))
    examples = Examples(find_examples([str(tmp_path / "r.jsonl")]), processor, prompt=PROMPT, text="text")
    assert [examples[index].text for index in range(6)] == ["a whole picture"] * 6
    told = capsys.readouterr().err
    assert told.count("passed over: ") == 5 and "none.png" in told and "no text in text" in told
    assert "<|image_pad|> in a text" in told

    del processor.video_token  # as PaddleOCR-VL's, which takes no videos
    assert examples[5].text == "a whole picture"


def test_the_first_example_may_have_no_text(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "folder", ignore=shutil.ignore_patterns("*.jsonl"))
    (tmp_path / "folder" / "07.txt").write_text("a star")
    assert text_column(find_examples([str(tmp_path / "folder")]), None) == "txt"


def test_a_model_is_not_trained_into_its_own_folder(data: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "tiny_captioner" / "qwen3_vl", tmp_path / "own")
    before = (tmp_path / "own" / "model.safetensors").read_bytes()
    command = [each for each in arguments(data, tmp_path / "own", "qwen3_vl") if not each.startswith("--model")]
    done = RUNNER.invoke(finetune.app, [*command, f"--model={tmp_path / 'own'}"])
    assert done.exit_code == 2 and "is the folder of the model itself" in words(done)
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "settings", "said"),
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
        ('{"image": "a.png", "text": "b"}', {"eval_fraction": 0}, "none can be read.*No such file"),
        ('{"image": "a.png", "text": "b"}', {}, "expected pictures to train on beside those held out"),
        (None, {"prompt": "{question}"}, "the prompt names {question}; there are file_name, kind, text"),
        (None, {"model": "no-such-model"}, "cannot load no-such-model: "),
        (None, {"attention": "fast"}, "expected attention to be one of"),
        (None, {"attention": "flashinfer_cudnn"}, "flashinfer_cudnn"),
        (None, {"lr_scheduler_type": "odd"}, "odd"),
        (None, {"min_pixels": 1 << 30}, "is above --max-pixels"),
    ],
)
def test_mistakes_end_in_one_sentence(
    data: Path, tmp_path: Path, lines: str | None, settings: dict[str, Any], said: str
) -> None:
    source = data
    if lines is not None:
        source = tmp_path / "r.jsonl"
        source.write_text(lines)
    command = arguments(source, tmp_path / "out", "qwen3_vl", **settings)
    if "train_file" in settings:
        command = [each for each in command if each != f"--train-file={source}"]
    result = RUNNER.invoke(finetune.app, command)
    assert result.exit_code == 2, result.output
    assert re.search(said, " ".join(result.output.replace("│", " ").split())), result.output
    assert "Traceback" not in result.output


def test_curves(tmp_path: Path) -> None:
    draw(tmp_path / "one.svg", "a < b", {"only": [(1, 2.0)], "none": []})
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn.count("<polyline") == 1 and "a &lt; b" in drawn and drawn.endswith("</svg>\n")
    draw(tmp_path / "nothing.svg", "", {})
