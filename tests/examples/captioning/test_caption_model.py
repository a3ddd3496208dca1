"""The captioner with the tiny models: shared pictures, seeds, sampling."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scenes
import torch
from captioner import model as captioner_module
from captioner.batches import Bounds, Task
from captioner.items import Item
from captioner.journal import Journal, Record
from captioner.model import Captioner
from captioner.progress import Progress
from captioner.worker import Worker
from PIL import Image
from programs import CAPTIONERS, draw
from support.faults import fail_once
from support.recorded_ops import OperationRecorder
from support.towers import alike
from support_captioning import (
    FAMILIES,
    PICTURE_PROMPT,
    WHOLE,
    batch_caption,
    caption,
    counted,
    load_once,
    load_processor_once,
    merged,
    put,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

import hf_vit_accel


def load(family: str, max_new_tokens: int = 24, **options: object) -> Captioner:
    folder = str(CAPTIONERS / family)
    model = load_once(folder, torch.float32, torch.device("cpu"))
    return Captioner(model, load_processor_once(folder), max_new_tokens=max_new_tokens, **options)


def generate(
    captioner: Captioner, images: Sequence[Image.Image], *prompts: str, first_seed: int = 0
) -> list[list[str]]:
    """Return the captions of the images for every prompt. As in a run, pictures are encoded part by part."""
    captions = []
    parts = [captioner.encode([image], [prompts[0]]) for image in images]
    features = captioner.join_features([captioner.features_of(part) for part in parts])
    for inputs in captioner.send([[captioner.encode(images, [prompt] * len(images))] for prompt in prompts]):
        answers = captioner.generate(inputs | {"features": features}, range(first_seed, first_seed + len(images)))
        captions.append([caption.text for caption in answers])
    return captions


def work(
    folder: Path,
    captioner: Captioner,
    progress: Progress,
    images: dict[str, Image.Image],
    prompt: str = PICTURE_PROMPT,
) -> list[Record]:
    """Caption images as one batch of a run; return the records."""
    tasks = []
    for name, image in images.items():
        image.save(folder / name)
        tasks.append(Task(item=Item(key=name, file=str(folder / name)), prompts=(prompt,), tokens=30))
    Worker(captioner, Journal(folder), progress, 0, "r", Bounds(items=8, tokens=1000)).work(tasks)
    return Journal(folder).records()


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_prompts_share_the_encoded_pictures(family: str) -> None:
    drawn = [draw(seed, FAMILIES[family]) for seed in range(6)]
    images = [image for image, _ in drawn]
    prompts = [PICTURE_PROMPT, "describe this video : red ?", "is the text above ?"]
    captioner = load(family)
    together = generate(captioner, images, *prompts)
    assert hf_vit_accel.status(captioner.model).towers[0].calls <= len(images) + 1  # one to prove prompts
    assert together == generate(load(family, patching=None), images, *prompts)
    right = sum(text == caption for text, (_, caption) in zip(together[0], drawn, strict=True))
    assert right >= 5 and len({tuple(captions) for captions in together}) > 1


def test_pictures_that_generate_encodes_are_encoded_once_for_all_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As videos are, and pictures of towers whose own forward runs."""
    models: list[Any] = []

    def load_model(*arguments: object) -> object:
        models.append(load_once(*arguments))
        return models[-1]

    monkeypatch.setattr(batch_caption, "load_model", load_model)
    monkeypatch.setattr(Captioner, "features_of", lambda *_: None)
    put(tmp_path / "photos", "a.png", "b.png", "c.png")
    done = caption(tmp_path / "photos", tmp_path / "captions", WHOLE, "--prompt=is the text above ?")
    assert done.exit_code == 0
    reused = hf_vit_accel.status(models[0]).towers[0].reuse
    assert (reused.encoded, reused.hits) == (3, reused.items - 3) and reused.hits >= 3


@pytest.mark.parametrize("is_whole", [False, True])
def test_features_for_which_no_memory_is_left_are_dropped(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers until 5.17 returns one tensor for every layer that adds features of pictures."""
    captioner = load("qwen3_vl")
    parts = []
    for seed in range(2):
        output = captioner.features_of(captioner.encode([draw(seed, 32)[0]], [PICTURE_PROMPT]))
        layers = [layer if isinstance(layer, torch.Tensor) else torch.cat(layer) for layer in output.deepstack_features]
        fields = dict(
            pooler_output=output.pooler_output, deepstack_features=layers if is_whole else [[x] for x in layers]
        )
        parts.append(type(output)(**fields))

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(captioner_module.torch, "cat", run_out)
    assert (captioner.join_features(parts) is None) == is_whole


def test_towers_are_called_as_generate_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models have no such method of their own, or it needs another input of the processor."""
    model = load("qwen2_5_vl", patching=None).model
    monkeypatch.delattr(type(model), "get_image_features", raising=False)
    of_model = type(model.base_model)
    encode = of_model.get_image_features

    def get_image_features(self: Any, pixel_values: Any, image_grid_thw: Any, image_sizes: Any, **options: Any) -> Any:
        return encode(self, pixel_values, image_grid_thw, **options)

    monkeypatch.setattr(of_model, "get_image_features", get_image_features)
    captioner = load("qwen2_5_vl")
    inputs = captioner.encode([draw(0, 28)[0]], [PICTURE_PROMPT]) | {"image_sizes": torch.ones(1, 2)}
    assert captioner.features_of(inputs) is not None


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_samples_are_stocks_and_do_not_depend_on_their_batch(family: str) -> None:
    options: dict[str, Any] = dict(max_new_tokens=10, temperature=3.0, top_p=0.95)
    captioner = load(family, **options)
    images = [draw(seed, FAMILIES[family])[0] for seed in range(4)]
    (together,) = generate(captioner, images, PICTURE_PROMPT)
    assert [together] == generate(load(family, **options, patching=None), images, PICTURE_PROMPT)
    alone = [generate(captioner, [image], PICTURE_PROMPT, first_seed=seed)[0][0] for seed, image in enumerate(images)]
    assert together == alone
    (others,) = generate(captioner, images, PICTURE_PROMPT, first_seed=100)
    assert sum(one != other for one, other in zip(together, others, strict=True)) >= 2
    assert generate(captioner, images[:1] * 4, PICTURE_PROMPT)[0][1:] != [together[0]] * 3  # each row has its own noise


def test_memory_that_graphs_held_is_used_before_batches_are_halved(
    tmp_path: Path, recorder: type[OperationRecorder]
) -> None:
    captioner = load("qwen2_vl")
    images = [draw(seed, 28)[0] for seed in range(4)]
    generate(captioner, images[:1], PICTURE_PROMPT)
    tries: list[int] = []

    def run_out(_: object, arguments: tuple[object, ...]) -> None:
        tries.append(len(arguments[0]))
        if len(tries) < 3:
            raise torch.OutOfMemoryError

    captioner.model.get_input_embeddings().register_forward_pre_hook(run_out)
    progress = Progress(4, 120, begin=0.0, is_shown=False)
    records = work(tmp_path, captioner, progress, {f"{number}.png": image for number, image in enumerate(images)})
    assert tries[:4] == [4, 4, 2, *tries[3:4]] and progress.counts["halved"] == 1
    assert [record.status for record in records] == ["ok"] * 4


@pytest.mark.parametrize(
    ("owner", "name"), [(Captioner, "_process"), (Qwen3VLModel, "get_image_features")], ids=["prepare", "encode"]
)
def test_memory_that_runs_out_once_changes_no_caption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Pictures are prepared on the CPU then, and encoded when captions are generated."""
    put(tmp_path / "photos", "a.png", "b.png", "c.png")
    assert caption(tmp_path / "photos", tmp_path / "expected", WHOLE).exit_code == 0
    function = getattr(owner, name)
    fail_once(monkeypatch, owner, name, torch.OutOfMemoryError("CUDA out of memory"))
    getattr(owner, name).__wrapped__ = function  # its signature is read
    assert caption(tmp_path / "photos", tmp_path / "captions", WHOLE).exit_code == 0
    assert counted(tmp_path / "captions") == counted(tmp_path / "expected")


def test_stock_and_patched_write_the_same_records(tmp_path: Path) -> None:
    put(tmp_path / "photos", *(f"{number}.png" for number in range(5)))
    records = []
    for options in ([], ["--no-patch"]):
        output = tmp_path / f"captions{len(records)}"
        done = caption(tmp_path / "photos", output, WHOLE, "--batch-size=2", *options)
        assert done.exit_code == 0
        assert ("decoding: 3 calls on a static cache" in done.output) == (not options)
        assert ("patched" in done.output) == (not options)
        records.append(counted(output))
    assert records[0] == records[1]
    again = caption(tmp_path / "photos", tmp_path / "captions0", WHOLE, "--no-patch")
    assert "0 of them to caption" in again.output


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_are_captioned(tmp_path: Path, family: str) -> None:
    """Read real files where decoders are installed."""
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("torchvision")
    side = 7 * FAMILIES[family]
    expected = {}
    for index in range(8):
        scene = scenes.scene((1 << 41) + index, video=True)
        name = f"{index}.mp4"
        writer = cv2.VideoWriter(str(tmp_path / name), cv2.VideoWriter_fourcc(*"mp4v"), 2, (side, side))
        for frame in scenes.draw(scene, side, side):
            writer.write(np.asarray(frame)[:, :, ::-1].copy())
        writer.release()
        expected[name] = scene.caption
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "0.mp4").read_bytes()[:200])
    assert caption(tmp_path, tmp_path / "out", WHOLE, model=CAPTIONERS / family).exit_code == 0
    records = {record.key: record for record in merged(tmp_path / "out")}
    assert records.pop("cut.mp4").status == "error"
    assert {key: record.status for key, record in records.items()} == dict.fromkeys(expected, "ok")
    captions = {key: record.caption for key, record in records.items()}
    assert sum(captions[key] == right for key, right in expected.items()) >= 6, (captions, expected)


def test_every_record_has_its_own_seed() -> None:
    captioner = SimpleNamespace(seed=0)
    seeds = {Captioner.seed_of(captioner, key, prompt) for key in ("a", "b", "a\udcff") for prompt in ("p", "q")}
    captioner.seed = 1
    assert Captioner.seed_of(captioner, "a", "p") not in seeds and len(seeds) == 6
    torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [(0.5, 0.75, [1.0, 0.0, 0.0]), (1.0, 0.75, [2 / 3, 1 / 3, 0.0]), (1.0, 1.0, [0.6, 0.3, 0.1])],
)
def test_samples_are_distributed_as_softmax(temperature: float, top_p: float, expected: list[float]) -> None:
    """Temperature comes before top-p: the nucleus holds the probabilities at it, as in other libraries."""
    captioner = load("qwen2_vl", temperature=temperature, top_p=top_p)
    rows = 2000
    samples: list[torch.Tensor] = []

    def generate_one_token(**kwargs: Any) -> torch.Tensor:
        scores = torch.tensor([0.6, 0.3, 0.1]).log().expand(rows, -1)
        for processor in kwargs["logits_processor"]:
            scores = processor(kwargs["input_ids"], scores)
        samples.append(scores.argmax(-1))
        return torch.cat([kwargs["input_ids"], samples[0][:, None]], 1)

    captioner.model.generate = generate_one_token
    captioner.generate({"input_ids": torch.zeros(rows, 1, dtype=torch.long)}, range(rows))
    counts = samples[0].bincount(minlength=3)
    torch.testing.assert_close(counts / rows, torch.tensor(expected), atol=0.04, rtol=0)
    assert not counts[torch.tensor(expected) == 0].any()


def test_prompts_that_hold_image_tokens_are_errors(tmp_path: Path) -> None:
    """The name of a file must not add a placeholder of an image to its prompt."""
    names = ["0.png", "1.png", "2.png", "<|image_pad|>.png"]
    images = {name: draw(seed)[0] for seed, name in enumerate(names)}
    progress = Progress(4, 120, begin=0.0, is_shown=False)
    records = work(tmp_path, load("qwen3_vl", max_new_tokens=4), progress, images, PICTURE_PROMPT + " {name}")
    assert {record.key: record.status for record in records} == {
        name: "error" if "image" in name else "ok" for name in names
    }
