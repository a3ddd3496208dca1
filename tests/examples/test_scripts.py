"""Run the scripts of examples/ as users do, with tiny checkpoints on a CPU.

`make scripts` runs these tests beside torchvision, so processors are complete. Without torchvision they lack the part
for videos, and the test of videos is skipped.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import scenes
import torch
import transformers
from captioner.processors import load_processor
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, HELD_OUT, ROOT, lines
from safetensors.torch import load_file
from support.ranks import run_on_ranks, share_small_calls
from support.towers import alike
from support.versions import ENCODES_AGAIN
from tiny import randomise, relative_error
from torch.distributed.tensor import DTensor
from transformers.utils import is_torchvision_available

import hf_vit_accel
from hf_vit_accel.options import passes

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
QUESTION = "describe this picture ."
PROMPT = f"--prompt={QUESTION}"


def run(name: str, *arguments: object) -> None:
    """Run a script as `python examples/NAME.py ARGUMENTS` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchvision is missing, load processors without their part for videos."""
    load = transformers.AutoProcessor.from_pretrained

    def load_without_videos(name: str) -> Any:
        return load(name) if "colqwen2" in str(name) else load_processor(str(name))

    if not is_torchvision_available():
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load_without_videos)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write checkpoints of the captioners in fp32: products of bfloat16 are slow on a CPU."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2_5_vl", "qwen3_vl"):
        shutil.copytree(CAPTIONERS / family, folder / family)
        load(CAPTIONERS / family).save_pretrained(folder / family)
    return folder


def load(folder: Path) -> transformers.PreTrainedModel:
    """Load a stock model in fp32."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def stock_answer(folder: Path, image: Image.Image, chat: list[str], tokens: int) -> str:
    """Answer the last question of a chat, whose texts are questions and answers in turn, with the stock model."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[index % 2], "content": [{"type": "text", "text": text}]}
        for index, text in enumerate(chat)
    ]
    messages[0]["content"].insert(0, {"type": "image"})
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    output = load(folder).generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def photos(folder: Path, count: int) -> dict[str, str]:
    """Save drawn scenes as cameras do, lying on their side with an EXIF tag that says so; return captions by name."""
    folder.mkdir(exist_ok=True)
    rows = lines(EXAMPLES / "scenes" / "metadata.jsonl")[:count]
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turn clockwise to show it
    for row in rows:
        scene(row["file_name"]).transpose(Image.Transpose.ROTATE_90).save(folder / row["file_name"], exif=exif)
    return {row["file_name"]: row["text"] for row in rows}


def scene(name: str) -> Image.Image:
    """Return a drawn scene, upright."""
    return Image.open(EXAMPLES / "scenes" / name).convert("RGB")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_stands_alone_and_is_in_the_docs(path: Path) -> None:
    """The page includes the file, so both are the same text."""
    code = path.read_text()
    assert len(code.splitlines()) <= 150
    others = "|".join(other.stem for other in [*SCRIPTS, *(entry for entry in EXAMPLES.iterdir() if entry.is_dir())])
    assert not re.search(rf"sys\.path|^(from|import) ({others})\b", code, re.MULTILINE)
    assert not re.search(r"hf_vit_accel\.(?!patch|graphed_decoding|status)", code), "public API only"
    assert "Trainer" in code or path.stem == "demo" or re.search(r"device\W+model\.device[,)}]", code), "pixels"
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f'```py\n--8<-- "examples/{path.name}"\n```' in page
    table = (EXAMPLES / "README.md").read_text()
    assert f"]({path.name})" in table or f"`{path.name}`" in table
    assert "](examples/README.md)" in (ROOT / "README.md").read_text(), "one click from README"


def test_captions_are_right(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = photos(tmp_path / "photos", 5)
    (tmp_path / "photos" / "torn.png").write_bytes((tmp_path / "photos" / "00.png").read_bytes()[:200])
    output = tmp_path / "photos.jsonl"
    arguments = [tmp_path / "photos", f"--model={models / 'qwen3_vl'}", PROMPT]
    run("caption", *arguments, f"--output={output}", "--batch-size=2")
    assert {row["file_name"]: row["text"] for row in lines(output)} == expected
    printed = capsys.readouterr().out
    assert f"left out: {tmp_path / 'photos' / 'torn.png'}" in printed
    assert f"{3 + ENCODES_AGAIN} fast, 0 stock" in printed
    assert "3 calls on a static cache" in printed
    monkeypatch.chdir(tmp_path)
    run("caption", *arguments, "--max-new-tokens=3")
    words = [row["text"].split() for row in lines(Path("captions.jsonl"))]
    assert words == [text.split()[:3] for text in expected.values()]


def test_a_missing_folder_or_another_model_ends_a_script_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "captions.jsonl"
    output.write_text("kept")
    model = f"--model={CAPTIONERS / 'qwen2_5_vl'}"
    nowhere = str(tmp_path / "nowhere")
    calls = [
        ("caption", [nowhere, f"--output={output}"], "there is no folder"),
        ("embed", [nowhere], "there is no folder"),
        ("embed", [f"--index={nowhere}", "--query=a star"], "there is no folder"),
        ("embed", [str(tmp_path), f"--index={nowhere}"], "is a qwen2_5_vl, and this script runs ColQwen2"),
        ("embed", [], "name a folder of pages to embed, or a --query"),
    ]
    for name, options, message in calls:
        with pytest.raises(SystemExit):
            run(name, *options, model)
        assert message in capsys.readouterr().err
    assert output.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["captions.jsonl"]


def test_answers_are_streamed_and_continue_the_chat(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = photos(tmp_path, 1)["00.png"]
    model = models / "qwen2_5_vl"
    second = stock_answer(model, scene("00.png"), [QUESTION, first, QUESTION], 12)
    assert second != stock_answer(model, scene("00.png"), [QUESTION, "", QUESTION], 12)
    run("decode", tmp_path / "00.png", QUESTION, QUESTION, f"--model={model}", "--max-new-tokens=24")
    answers = re.split(r"\[\d+ tokens, [\d.]+ a second\]\n", capsys.readouterr().out)
    assert [answer.split() for answer in answers[:2]] == [first.split(), second.split()]
    assert len(answers) == 3 and "2 calls on a static cache" in answers[2]
    run("decode", tmp_path / "00.png", QUESTION, f"--model={model}", "--max-new-tokens=5")
    assert " ".join(first.split()[:5]) + "\n[5 tokens" in capsys.readouterr().out


@pytest.fixture
def retriever(tmp_path: Path) -> Path:
    """Save a random checkpoint of transformers' own retriever, with the processor of a captioner."""
    config = transformers.AutoConfig.from_pretrained(CAPTIONERS / "qwen2_vl").to_dict()
    colqwen2_config = transformers.ColQwen2Config(vlm_config=config, embedding_dim=16)
    model = randomise(transformers.ColQwen2ForRetrieval._from_config(colqwen2_config).eval())
    model.save_pretrained(tmp_path / "colqwen2")
    parts = load_processor(str(CAPTIONERS / "qwen2_vl"))
    transformers.ColQwen2Processor(parts.image_processor, parts.tokenizer).save_pretrained(tmp_path / "colqwen2")
    return tmp_path / "colqwen2"


def test_pages_are_embedded_once_and_found(retriever: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "pages", 4)
    (tmp_path / "pages" / "03.png").rename(tmp_path / "pages" / "03.PNG")
    index = tmp_path / "index"
    model = [f"--model={retriever}", f"--index={index}"]
    run("embed", tmp_path / "pages", *model, "--batch-size=3")
    assert "4 pages, 4 of them to embed" in capsys.readouterr().out
    stock = transformers.ColQwen2ForRetrieval.from_pretrained(retriever).eval()
    processor = transformers.AutoProcessor.from_pretrained(retriever)
    pages = load_file(index / "000000.safetensors") | load_file(index / "000001.safetensors")
    assert pages.keys() == {"00.png", "01.png", "02.png", "03.PNG"}
    for name, embedding in pages.items():
        with torch.no_grad():
            expected = stock(**processor.process_images([scene(name.lower())])).embeddings[0]
        assert relative_error(embedding, expected) < 1e-5, name
    (index / "000001.safetensors").unlink()  # as if the run had been killed before
    run("embed", tmp_path / "pages", *model)
    assert "4 pages, 1 of them to embed" in capsys.readouterr().out
    run("embed", *model, "--query=a red star", "--top=3")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    with torch.no_grad():
        query = stock(**processor.process_queries(["a red star"])).embeddings[0]
    scores = sorted(((float((query @ page.t()).amax(1).sum()), name) for name, page in pages.items()), reverse=True)
    assert [name for _, name in printed] == [name for _, name in scores[:3]]
    assert [float(score) for score, _ in printed] == pytest.approx([score for score, _ in scores[:3]], abs=2e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save scenes with reversed captions, which the models do not know yet."""
    folder = tmp_path_factory.mktemp("scenes")
    captions = photos(folder, 12)
    rows = [{"file_name": name, "text": " ".join(reversed(text.split()))} for name, text in captions.items()]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


FOUR_STEPS = ("--max-steps=4", "--save-steps=2", "--learning-rate=1e-3", "--batch-size=2")


def finetune(data: Path, output: Path, *flags: str, family: str = "qwen2_5_vl") -> list[float]:
    """Run the script; return the losses of all steps."""
    model = f"--model={CAPTIONERS / family}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        run("finetune", data, model, f"--output={output}", PROMPT, "--log-steps=1", *flags)
    states = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_training_is_that_of_stock_and_goes_on_after_a_kill(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Trainer alone would begin anew with the weights of Qwen2.5-VL's checkpoint."""
    losses = finetune(data, tmp_path / "tuned", *FOUR_STEPS, family=family)
    assert "4 fast, 0 stock" in capsys.readouterr().out
    assert len(losses) == 4 and sum(losses[2:]) < 0.9 * sum(losses[:2])  # each step has other pictures
    with monkeypatch.context() as patch:
        patch.setattr(hf_vit_accel, "patch", lambda model: model)
        assert finetune(data, tmp_path / "stock", *FOUR_STEPS, family=family) == pytest.approx(losses, rel=1e-3)
    shutil.copytree(tmp_path / "tuned" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    shutil.copytree(tmp_path / "tuned" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-3")
    (tmp_path / "resumed" / "checkpoint-3" / "trainer_state.json").unlink()  # a kill while it was written
    capsys.readouterr()
    assert finetune(data, tmp_path / "resumed", "--resume", *FOUR_STEPS, family=family) == losses
    assert "2 fast, 0 stock" in capsys.readouterr().out
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert weights.keys() == resumed.keys() and all(torch.equal(resumed[name], weights[name]) for name in weights)
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "tuned").tokenizer.chat_template


def test_adapters_are_trained_alone_and_not_in_a_frozen_tower(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    losses = finetune(data, tmp_path, "--lora-rank=4", "--freeze-tower", "--accumulate=2", *FOUR_STEPS)
    assert losses[-1] < losses[0]
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    assert adapters and all("lora_" in name and "visual" not in name for name in adapters)
    assert {min(weight.shape) for weight in adapters.values()} == {4}
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="--lora-rank needs PEFT: pip install peft"):
        finetune(data, tmp_path, "--lora-rank=4")


@pytest.mark.parametrize(
    ("flags", "steps", "batches"),
    [
        ("", 3, 3),  # twelve pictures in batches of four
        ("--epochs=2", 6, 6),
        ("--batch-size=6", 2, 2),
        ("--accumulate=3", 1, 3),
        ("--max-steps=1 --epochs=2", 1, 1),
    ],
)
def test_options_decide_how_many_batches_make_how_many_steps(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, steps: int, batches: int
) -> None:
    assert len(finetune(data, tmp_path, "--learning-rate=1e-6", *flags.split())) == steps
    assert f"{batches} fast, 0 stock" in capsys.readouterr().out


def test_an_option_changes_the_first_step(data: Path, tmp_path: Path) -> None:
    """A frozen tower keeps its weights; checkpointing keeps the loss, and fewer numbers for the backward."""
    numbers: dict[str, int] = {}
    losses: dict[str, float] = {}
    for flag in ("", "--prompt=a red star", "--max-pixels=12544", "--gradient-checkpointing", "--freeze-tower"):

        def count(tensor: torch.Tensor, flag: str = flag) -> torch.Tensor:
            numbers[flag] = numbers.get(flag, 0) + tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            (losses[flag],) = finetune(data, tmp_path / flag, "--max-steps=1", *filter(None, [flag]))
    loss = losses.pop("")
    assert losses.pop("--gradient-checkpointing") == losses.pop("--freeze-tower") == loss
    assert all(abs(other - loss) > 1e-3 * loss for other in losses.values()), losses
    assert numbers["--gradient-checkpointing"] < 0.5 * numbers[""]
    weights = load_file(CAPTIONERS / "qwen2_5_vl" / "model.safetensors")
    tuned = load_file(tmp_path / "--freeze-tower" / "model.safetensors")
    changed = {name for name, weight in weights.items() if not torch.equal(tuned[name].to(weight.dtype), weight)}
    assert changed and not any("visual" in name for name in changed)


def test_only_answers_have_labels(data: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(CAPTIONERS / "qwen2_5_vl")
    processor.tokenizer.padding_side = "right"
    rows = [{"file_name": "00.png", "text": "a red star"}, {"file_name": "01.png", "text": "a large red star"}]
    batch = runpy.run_path(str(EXAMPLES / "finetune.py"))["Collator"](processor, data, QUESTION)(rows)
    for row, labels, ids in zip(rows, batch["labels"], batch["input_ids"], strict=True):
        assert processor.tokenizer.decode(labels[labels != -100]).split() == [*row["text"].split(), "<|im_end|>"]
        assert torch.equal(labels[labels != -100], ids[labels != -100])
    upright = processor.image_processor([scene(row["file_name"]) for row in rows], return_tensors="pt")
    assert torch.equal(batch["pixel_values"], upright["pixel_values"])


@pytest.mark.skipif(not is_torchvision_available(), reason="processors of videos need torchvision: `make scripts`")
def test_a_video_is_encoded_in_passes_with_as_many_frames_as_fit(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are decoded by FFmpeg, for which drawn frames stand in: four a second, for four seconds."""
    drawn = scenes.scene(HELD_OUT + 1, video=True)
    frames = np.repeat([np.asarray(frame) for frame in scenes.draw(drawn, 128, 160)], 4, axis=0)

    def decode(self: object, paths: list[str], sample_indices_fn: Any) -> tuple[list[torch.Tensor], list[object]]:
        assert paths == ["talk.mp4"]
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=16, fps=4.0)
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return [torch.from_numpy(frames)[metadata.frames_indices]], [metadata]

    monkeypatch.setattr(transformers.BaseVideoProcessor, "fetch_videos", decode)
    arguments = ["talk.mp4", "describe this video .", f"--model={models / 'qwen3_vl'}"]
    run("long_video", *arguments, "--fps=1", "--max-rows=80", "--max-new-tokens=3")
    printed = capsys.readouterr().out
    assert "1 frames a second: 2 x 10 x 8 patches" in printed and "1 calls in 2 passes" in printed
    assert " ".join(drawn.caption.split()[:3]) + "\n" in printed
    fails_once = Mock(wraps=passes.encode, side_effect=[torch.OutOfMemoryError("Tried to allocate 20 GiB"), DEFAULT])
    monkeypatch.setattr(passes, "encode", fails_once)
    run("long_video", *arguments)
    printed = capsys.readouterr().out
    assert "2 frames a second: 4 x 10 x 8 patches" in printed and "out of memory at 2 frames a second" in printed
    assert "1 frames a second: 2 x 10 x 8 patches" in printed and drawn.caption + "\n" in printed


def _caption_on_rank(rank: int, folder: Path, picture: Path, expected: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    complete = load(folder).model.language_model.layers[0]
    layer = runpy.run_path(str(EXAMPLES / "tensor_parallel.py"))["load_split"](folder).model.language_model.layers[0]
    for weight, whole in (
        (layer.self_attn.q_proj.weight, complete.self_attn.q_proj.weight),
        (layer.mlp.down_proj.weight, complete.mlp.down_proj.weight),
    ):
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        assert 2 * part.numel() == whole.numel()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run("tensor_parallel", picture, picture, f"--model={folder}", "--prompt=a red star", "--max-new-tokens=6")
    if rank == 0:
        assert output.getvalue().startswith(f"{picture}: {expected}\n" * 2), (output.getvalue(), expected)
        assert "rank 0 of 2, 1 call" in output.getvalue()
    else:
        assert not output.getvalue()


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_tensor_parallelism_keeps_the_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has no plan for Qwen3-VL's text: the script gives it Qwen3's. The random model has four heads."""
    share_small_calls(monkeypatch)
    folder = tmp_path / "model"
    shutil.copytree(CAPTIONERS / family, folder)
    config = transformers.AutoConfig.from_pretrained(folder, dtype="float32")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    config.text_config.pad_token_id = None  # as in Qwen's checkpoints
    config.text_config.num_attention_heads = config.text_config.num_key_value_heads = 4
    config.text_config.hidden_size = config.vision_config.out_hidden_size = 128
    model = randomise(transformers.AutoModelForImageTextToText.from_config(config).eval(), seed=2)
    hf_vit_accel.patch(model)  # forked ranks inherit the proof
    hf_vit_accel.unpatch(model).save_pretrained(folder)
    photos(tmp_path, 1)
    expected = stock_answer(folder, scene("00.png"), ["a red star"], 6)
    assert len(set(expected.split())) > 2, "others have the same answer"
    run_on_ranks(_caption_on_rank, 2, tmp_path, folder, tmp_path / "00.png", expected)


def test_tensor_parallelism_refuses_ranks_that_cannot_share_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    load_split = runpy.run_path(str(EXAMPLES / "tensor_parallel.py"))["load_split"]
    folder = CAPTIONERS / "qwen3_vl"
    heads = transformers.AutoConfig.from_pretrained(folder).get_text_config().num_key_value_heads
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: heads + 1)
    with pytest.raises(SystemExit, match=f"{heads} key-value heads, which cannot be split over {heads + 1} ranks"):
        load_split(folder)


def test_tensor_parallelism_names_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        run("tensor_parallel", "a.png", "--model=none")
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
