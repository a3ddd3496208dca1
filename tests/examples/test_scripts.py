"""Run the scripts of examples/ as users do, with tiny checkpoints on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import scenes
import torch
import transformers
from captioner.processors import load_processor
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, ROOT
from safetensors.torch import load_file
from scene_batches import encode, held_out
from support.ranks import run_on_ranks, share_small_calls
from support.towers import alike
from support.versions import ENCODES_AGAIN
from tiny import TINY, chat_inputs, randomise, relative_error
from torch.distributed.tensor import DTensor
from transformers import BatchFeature

import hf_vit_accel
from hf_vit_accel.options import passes as tower_module

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PROMPT = "--prompt=describe this picture ."


def script(name: str) -> ModuleType:
    """Import a script under a name of its own: benchmarks have modules of the same names."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load processors without torchvision, and models in fp32: products of bfloat16 are slow on a CPU."""
    load: Callable[..., Any] = transformers.AutoModelForImageTextToText.from_pretrained

    def load_in_fp32(name: str, **options: Any) -> Any:
        return load(name, **options | {"dtype": torch.float32})

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", load_in_fp32)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: load_processor(str(name)))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_stands_alone_and_is_in_the_docs(path: Path) -> None:
    """The page includes the file, so both are the same text."""
    code = path.read_text()
    assert len(code.splitlines()) <= 150
    others = "|".join(other.stem for other in [*SCRIPTS, *(entry for entry in EXAMPLES.iterdir() if entry.is_dir())])
    assert not re.search(rf"sys\.path|^(from|import) ({others})\b", code, re.MULTILINE)
    assert not re.search(r"hf_vit_accel\.(?!patch|graphed_decoding|status)", code), "public API only"
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f'```py\n--8<-- "examples/{path.name}"\n```' in page
    table = (EXAMPLES / "README.md").read_text()
    assert f"]({path.name})" in table or f"`{path.name}`" in table
    assert "](examples/README.md)" in (ROOT / "README.md").read_text(), "one click from README"


def photos(folder: Path, count: int) -> dict[str, str]:
    """Copy drawn scenes into a folder; return their captions by name."""
    folder.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in (EXAMPLES / "scenes" / "metadata.jsonl").read_text().splitlines()[:count]]
    for row in rows:
        shutil.copy(EXAMPLES / "scenes" / row["file_name"], folder)
    return {row["file_name"]: row["text"] for row in rows}


def test_captions_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = photos(tmp_path / "photos", 5)
    (tmp_path / "photos" / "torn.png").write_bytes((tmp_path / "photos" / "00.png").read_bytes()[:200])
    output = tmp_path / "captions.jsonl"
    model = f"--model={CAPTIONERS / 'qwen2_5_vl'}"
    script("caption").main([str(tmp_path / "photos"), model, f"--output={output}", PROMPT, "--batch-size=2"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["file_name"]: row["text"] for row in rows} == expected
    printed = capsys.readouterr().out
    assert f"left out: {tmp_path / 'photos' / 'torn.png'}" in printed
    assert f"{3 + ENCODES_AGAIN} fast, 0 stock" in printed
    assert "3 calls on a static cache" in printed


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
    ]
    for name, options, message in calls:
        with pytest.raises(SystemExit):
            script(name).main([*options, model])
        assert message in capsys.readouterr().err
    assert output.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["captions.jsonl"]


def test_answers_are_streamed_and_continue_the_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = photos(tmp_path, 1)
    question = "describe this picture ."
    model = f"--model={CAPTIONERS / 'qwen2_5_vl'}"
    script("decode").main([str(tmp_path / "00.png"), question, question, model, "--max-new-tokens=24"])
    printed = capsys.readouterr().out
    answers = re.split(r"\[\d+ tokens, [\d.]+ a second\]\n", printed)
    assert len(answers) == 3 and answers[0].split() == expected["00.png"].split()
    assert "2 calls on a static cache" in answers[2]


@pytest.fixture
def retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a random checkpoint of transformers' own retriever, with the processor of a captioner."""
    config = transformers.AutoConfig.from_pretrained(CAPTIONERS / "qwen2_vl").to_dict()
    colqwen2_config = transformers.ColQwen2Config(vlm_config=config, embedding_dim=16)
    model = randomise(transformers.ColQwen2ForRetrieval._from_config(colqwen2_config).eval())
    model.save_pretrained(tmp_path / "colqwen2")
    parts = load_processor(str(CAPTIONERS / "qwen2_vl"))
    processor = transformers.ColQwen2Processor(parts.image_processor, parts.tokenizer)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda _: processor)
    return tmp_path / "colqwen2"


def test_pages_are_embedded_once_and_found(retriever: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed = script("embed")
    photos(tmp_path / "pages", 4)
    (tmp_path / "pages" / "03.png").rename(tmp_path / "pages" / "03.PNG")
    index = tmp_path / "index"
    model = [f"--model={retriever}", f"--index={index}"]
    embed.main([str(tmp_path / "pages"), *model, "--batch-size=3"])
    assert "4 pages, 4 of them to embed" in capsys.readouterr().out
    stock = transformers.ColQwen2ForRetrieval.from_pretrained(retriever).eval()
    processor = transformers.AutoProcessor.from_pretrained(retriever)
    pages = dict(embed.read(index))
    assert pages.keys() == {"00.png", "01.png", "02.png", "03.PNG"}
    for name, embedding in pages.items():
        inputs = processor.process_images([Image.open(tmp_path / "pages" / name).convert("RGB")])
        with torch.no_grad():
            assert relative_error(embedding, stock(**inputs).embeddings[0]) < 1e-5, name
    (index / "000001.safetensors").unlink()  # as if the run had been killed before
    embed.main([str(tmp_path / "pages"), *model])
    assert "4 pages, 1 of them to embed" in capsys.readouterr().out
    embed.main([*model, "--query=a red star", "--top=3"])
    lines = capsys.readouterr().out.split("\n")[:3]
    with torch.no_grad():
        query = stock(**processor.process_queries(["a red star"])).embeddings[0]
    scores = {name: float((query @ page.t()).amax(1).sum()) for name, page in pages.items()}
    assert [line.split()[1] for line in lines] == sorted(scores, key=lambda name: -scores[name])[:3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw scenes; the captions are reversed, so that the models do not know them yet."""
    folder = tmp_path_factory.mktemp("scenes")
    rows = []
    for seed in range(12):
        scene = scenes.scene(seed, video=False)
        chance = random.Random(seed)
        scenes.draw(scene, 28 * chance.randint(4, 5), 28 * chance.randint(4, 5))[0].save(folder / f"{seed:02}.png")
        rows.append({"file_name": f"{seed:02}.png", "text": " ".join(reversed(scene.caption.split()))})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finetune(data: Path, output: Path, *flags: str, family: str = "qwen2_5_vl") -> list[float]:
    """Run the script; return the losses of all steps."""
    module = script("finetune")
    every_step = module.TrainingArguments
    module.TrainingArguments = lambda **options: every_step(**options | {"logging_steps": 1, "use_cpu": True})
    model = f"--model={CAPTIONERS / family}"
    steps = ["--max-steps=4", "--save-steps=2", "--learning-rate=1e-3", "--batch-size=2"]
    module.main([str(data), model, f"--output={output}", PROMPT, *steps, *flags])
    (state,) = output.glob("checkpoint-4/trainer_state.json")
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_training_is_that_of_stock_and_goes_on_after_a_kill(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Trainer alone would begin anew with the weights of Qwen2.5-VL's checkpoint."""
    losses = finetune(data, tmp_path / "tuned", family=family)
    assert " fast, 0 stock" in capsys.readouterr().out
    assert len(losses) == 4 and sum(losses[2:]) < 0.9 * sum(losses[:2])  # each step has other pictures
    with monkeypatch.context() as patch:
        patch.setattr(hf_vit_accel, "patch", lambda model: model)
        assert finetune(data, tmp_path / "stock", family=family) == pytest.approx(losses, rel=1e-3)
    shutil.copytree(tmp_path / "tuned" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    shutil.copytree(tmp_path / "tuned" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-3")
    (tmp_path / "resumed" / "checkpoint-3" / "trainer_state.json").unlink()  # a kill while it was written
    assert finetune(data, tmp_path / "resumed", "--resume", family=family) == losses
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert weights.keys() == resumed.keys() and all(torch.equal(resumed[name], weights[name]) for name in weights)
    assert load_processor(str(tmp_path / "tuned")).tokenizer.chat_template


def test_adapters_are_trained_alone_and_not_in_a_frozen_tower(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    losses = finetune(data, tmp_path, "--lora-rank=4", "--freeze-tower", "--gradient-checkpointing", "--accumulate=2")
    assert losses[-1] < losses[0]
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    assert adapters and all("lora_" in name and "visual" not in name for name in adapters)
    assert not (tmp_path / "model.safetensors").exists()


def test_only_answers_have_labels(data: Path) -> None:
    module = script("finetune")
    processor = load_processor(str(CAPTIONERS / "qwen2_5_vl"))
    processor.tokenizer.padding_side = "right"
    rows = [{"file_name": "00.png", "text": "a red star"}, {"file_name": "01.png", "text": "a large red star"}]
    batch = module.Collator(processor, data, "describe this picture .")(rows)
    for row, labels, ids in zip(rows, batch["labels"], batch["input_ids"], strict=True):
        assert processor.tokenizer.decode(labels[labels != -100]).split() == [*row["text"].split(), "<|im_end|>"]
        assert torch.equal(labels[labels != -100], ids[labels != -100])


class VideoProcessor:
    """Stand in for a processor of videos, which needs torchvision: the inputs are those of a drawn clip."""

    def __init__(self, family: str) -> None:
        self.tokenizer = load_processor(str(CAPTIONERS / family)).tokenizer
        *_, batch = held_out(family, 6, size=1)  # the sixth one is a video
        self.caption = batch["captions"][0]
        self.inputs = encode(batch, family, self.tokenizer, torch.device("cpu"))
        self.rates: list[float] = []

    def apply_chat_template(self, chat: list[dict[str, Any]], **options: Any) -> BatchFeature:
        assert chat[0]["content"][0] == {"type": "video", "video": "talk.mp4"}
        self.rates.append(options["processor_kwargs"]["fps"])
        return BatchFeature(dict(self.inputs))

    def decode(self, tokens: torch.Tensor, **options: bool) -> str:
        return self.tokenizer.decode(tokens, **options)


def test_a_video_is_encoded_in_passes_with_as_many_frames_as_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = VideoProcessor("qwen3_vl")
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda _: processor)
    encode_rows = tower_module.encode
    failures = iter([True])

    def encode_later(*arguments: object, **options: object) -> object:
        if next(failures, False):
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return encode_rows(*arguments, **options)

    model = f"--model={CAPTIONERS / 'qwen3_vl'}"
    rows = len(processor.inputs["pixel_values_videos"])
    arguments = ["talk.mp4", "describe this video .", model, "--max-new-tokens=24"]
    script("long_video").main([*arguments, f"--max-rows={rows // 2}"])
    printed = capsys.readouterr().out
    assert processor.caption in printed and "1 calls in 2 passes" in printed
    monkeypatch.setattr(tower_module, "encode", encode_later)
    script("long_video").main([*arguments, "--max-rows=100000"])
    printed = capsys.readouterr().out
    assert "out of memory at 2 frames a second" in printed and processor.caption in printed
    assert processor.rates == [2.0, 2.0, 1.0]


class Pictures:
    """Stand in for the processor of a tiny model without a tokenizer."""

    tokenizer = SimpleNamespace(padding_side="right")

    def __init__(self, model: torch.nn.Module) -> None:
        self.inputs = chat_inputs(model, [(1, 8, 8)])

    def apply_chat_template(self, chat: object, **_: object) -> str:
        return "text"

    def __call__(self, **_: object) -> BatchFeature:
        return BatchFeature(dict(self.inputs))

    def batch_decode(self, tokens: torch.Tensor, **_: object) -> list[str]:
        return [str(row.tolist()) for row in tokens]


def _caption_on_rank(rank: int, folder: str, picture: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    complete = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = Pictures(complete)
    transformers.AutoProcessor.from_pretrained = lambda _: processor
    module = script("tensor_parallel")
    split = module.load_split(folder)
    layer = split.model.language_model.layers[0]
    for weight, whole in (
        (layer.self_attn.q_proj.weight, complete.model.language_model.layers[0].self_attn.q_proj.weight),
        (layer.mlp.down_proj.weight, complete.model.language_model.layers[0].mlp.down_proj.weight),
    ):
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        assert 2 * part.numel() == whole.numel()
    module.load_split = lambda _: split
    answers: list[str] = []
    module.print = lambda *text: answers.append(" ".join(map(str, text)))
    module.main([picture, f"--model={folder}", "--max-new-tokens=6"])
    tokens = complete.generate(**processor.inputs, max_new_tokens=6, do_sample=False)
    expected = tokens[0, processor.inputs["input_ids"].shape[1] :].tolist()
    if rank == 0:
        assert answers[0] == f"{picture}: {expected}" and "rank 0 of 2, 1 call" in answers[1], answers
    else:
        assert not answers


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_tensor_parallelism_keeps_the_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has no plan for Qwen3-VL's text: the script gives it Qwen3's."""
    share_small_calls(monkeypatch)
    model = TINY[family].build()
    hf_vit_accel.patch(model)  # forked ranks inherit the proof
    hf_vit_accel.unpatch(model).save_pretrained(tmp_path / "model")
    photos(tmp_path, 1)
    run_on_ranks(_caption_on_rank, 2, tmp_path, str(tmp_path / "model"), str(tmp_path / "00.png"))


def test_tensor_parallelism_names_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        script("tensor_parallel").main(["a.png", "--model=none"])
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
