"""The captioner with the tiny models: shared pictures, seeds, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from captioner import model as captioner_module
from captioner.batches import Task
from captioner.items import Item
from captioner.journal import Journal
from captioner.model import Captioner, reuse_for, takes_encoded
from captioner.progress import Progress
from captioner.worker import Worker
from packaging.version import Version
from PIL import Image
from programs import CAPTIONERS, draw
from read_once import load_once, load_processor_once
from support.decoding import Counts, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import alike
from support_captioning import FAMILIES, PICTURE_PROMPT, WHOLE, batch_caption, caption, counted, put
from transformers import AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_vit_accel


def load(family: str, max_new_tokens: int = 24, **options: object) -> Captioner:
    """Load a tiny captioner."""
    folder = str(CAPTIONERS / family)
    model = load_once(folder, torch.float32, torch.device("cpu"))
    return Captioner(model, load_processor_once(folder), max_new_tokens=max_new_tokens, **options)


def generate(
    captioner: Captioner, images: Sequence[Image.Image], *prompts: str, first_seed: int = 0
) -> list[list[str]]:
    """Return the captions of the images for every prompt."""
    inputs = [captioner.encode(images, [prompt] * len(images)) for prompt in prompts]
    seeds = [range(first_seed, first_seed + len(images))] * len(prompts)
    return [[caption.text for caption in captions] for captions in captioner.generate(inputs, seeds)]


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_prompts_share_the_encoded_pictures(family: str) -> None:
    captioner = load(family)
    batch_caption.hf_vit_accel.patch(captioner.model)
    drawn = [draw(seed, FAMILIES[family]) for seed in range(6)]
    images = [image for image, _ in drawn]
    prompts = [PICTURE_PROMPT, "describe this video : red ?", "is the text above ?"]
    calls = []
    captioner.model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    together = generate(captioner, images, *prompts)
    assert takes_encoded(captioner.model) == (Version(transformers.__version__) >= Version("5.18"))
    assert len(calls) == (1 if takes_encoded(captioner.model) else 3)
    calls.clear()
    assert together == [generate(captioner, images, prompt)[0] for prompt in prompts]
    assert len(calls) == 3
    right = sum(text == caption for text, (_, caption) in zip(together[0], drawn, strict=True))
    assert right >= 5 and len({tuple(captions) for captions in together}) > 1


def test_prompts_are_encoded_one_by_one_by_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = load("qwen2_vl")
    image = draw(0, 28)[0]
    prompts = [PICTURE_PROMPT, "is the text above ?"]
    together = generate(captioner, [image], *prompts)
    assert (reuse_for(captioner.model, ["one", "two"]) is False) == takes_encoded(captioner.model)
    monkeypatch.setattr("captioner.model.takes_encoded", lambda _: False)
    calls = []
    captioner.model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    assert generate(captioner, [image], *prompts) == together and len(calls) == 2
    # A tower that is patched with `reuse_for` is still called twice, but encodes once.
    assert reuse_for(captioner.model, [PICTURE_PROMPT]) is False
    with hf_vit_accel.patched(captioner.model, reuse=reuse_for(captioner.model, prompts)):
        assert generate(captioner, [image], *prompts) == together
        reused = hf_vit_accel.status(captioner.model).towers[0].reuse
    assert (reused.items, reused.encoded, reused.hits) == (2, 1, 1)


def test_inputs_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that did not fit on the GPU must not stay there while a smaller batch is tried."""
    captioner = load("qwen2_vl")
    inputs = captioner.encode([draw(0, 28)[0]], [PICTURE_PROMPT])
    before = dict(inputs)
    monkeypatch.setattr(type(captioner.model), "device", torch.device("meta"))
    monkeypatch.setattr(captioner.model, "generate", lambda **kwargs: kwargs["input_ids"])
    monkeypatch.setattr(captioner.processor.tokenizer, "batch_decode", lambda *_, **__: [])
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        captioner.generate([inputs], [[0]])
    assert all(inputs[name] is before[name] for name in before)


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_samples_do_not_depend_on_their_batch(decode_graphs: bool) -> None:
    captioner = load("qwen3_vl", max_new_tokens=12, temperature=3.0, decode_graphs=decode_graphs)
    images = [draw(seed)[0] for seed in range(6)]
    (together,) = generate(captioner, images, PICTURE_PROMPT)
    alone = [generate(captioner, [image], PICTURE_PROMPT, first_seed=seed)[0][0] for seed, image in enumerate(images)]
    assert together == alone
    (others,) = generate(captioner, images, PICTURE_PROMPT, first_seed=100)
    assert sum(one != other for one, other in zip(together, others, strict=True)) >= 3
    assert generate(captioner, images[:1] * 6, PICTURE_PROMPT)[0][1:] != [together[0]] * 5  # each row has its own noise


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_decoding_from_graphs_generates_the_tokens_of_stock(
    family: str, temperature: float, recorder: type[OperationRecorder]
) -> None:
    captioner = load(family, max_new_tokens=12, temperature=temperature, top_p=0.9)
    hf_vit_accel.patch(captioner.model)
    images = [draw(seed, FAMILIES[family])[0] for seed in range(6)]
    long_prompt = " ".join(["describe this picture ."] * 40)  # another bucket of the cache
    stock = tokens_of(captioner, images, decode_graphs=False)
    assert hf_vit_accel.status(captioner.model).decoding is None
    assert tokens_of(captioner, images, decode_graphs=True) == stock
    parts = [tokens_of(captioner, part, decode_graphs=True) for part in (images[:2], images[:1], images[:2])]
    assert parts == [tokens_of(captioner, part, decode_graphs=False) for part in (images[:2], images[:1], images[:2])]
    stock = tokens_of(captioner, images, PICTURE_PROMPT, long_prompt, decode_graphs=False)
    assert tokens_of(captioner, images, PICTURE_PROMPT, long_prompt, decode_graphs=True) == stock
    assert counts_of(captioner.model) == Counts(6, {}) and 3 <= recorder.captures <= 6


def tokens_of(
    captioner: Captioner, images: Sequence[Image.Image], *prompts: str, decode_graphs: bool
) -> list[list[list[int]]]:
    """Return the tokens of every prompt and picture, with padding; by default of one prompt."""
    captioner.decode_graphs = decode_graphs
    stock_generate = type(captioner.model).generate
    tokens = []

    def generate_and_note(**kwargs: object) -> torch.Tensor:
        assert ("custom_generate" in kwargs) == decode_graphs
        output = stock_generate(captioner.model, **kwargs)
        tokens.append(output.tolist())
        return output

    captioner.model.generate = generate_and_note
    generate(captioner, images, *(prompts or (PICTURE_PROMPT,)))
    del captioner.model.generate
    return tokens


def test_decoding_by_stock_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    captioner = load("qwen2_vl", decode_graphs=True)
    images = [draw(0, 28)[0]]
    expected = generate(captioner, images, PICTURE_PROMPT)
    assert capsys.readouterr().out == ""
    captioner.model.config.get_text_config()._attn_implementation_internal = "of its own"
    ALL_ATTENTION_FUNCTIONS.register("of its own", sdpa_attention_forward)
    AttentionMaskInterface.register("of its own", sdpa_mask)
    assert [generate(captioner, images, PICTURE_PROMPT) for _ in range(2)] == [expected] * 2
    printed = capsys.readouterr().out
    assert printed.startswith("stock decodes some captions: 1 call on a static cache")
    assert printed.count("\n") == 1 and "1 by stock (1 x the text model's attention is of its own)" in printed


def test_graphs_of_decoding_are_freed_when_memory_runs_out(recorder: type[OperationRecorder]) -> None:
    captioner = load("qwen2_vl", temperature=1.5, decode_graphs=True)
    images = [draw(seed, 28)[0] for seed in range(3)]
    expected = generate(captioner, images, PICTURE_PROMPT)
    are_freed: list[bool] = []

    def run_out_beside_graphs(*_: object) -> None:
        are_freed.append("(0 held" in hf_vit_accel.status(captioner.model).decoding)
        if not are_freed[-1]:
            raise torch.OutOfMemoryError

    hook = captioner.model.model.visual.register_forward_pre_hook(run_out_beside_graphs)
    assert generate(captioner, images, PICTURE_PROMPT) == expected
    assert are_freed == [False, True] and recorder.captures == 2
    hook.remove()

    def run_out(*_: object) -> None:
        are_freed.append("(0 held" in hf_vit_accel.status(captioner.model).decoding)
        raise torch.OutOfMemoryError

    are_freed.clear()
    captioner.model.model.visual.register_forward_pre_hook(run_out)
    for tries in ([False, True], [True]):  # without graphs there is nothing to free, and no second try
        with pytest.raises(torch.OutOfMemoryError):
            generate(captioner, images, PICTURE_PROMPT)
        assert are_freed == tries
        are_freed.clear()


def test_options_decide_how_captions_are_decoded(tmp_path: Path) -> None:
    put(tmp_path / "photos", *(f"{number}.png" for number in range(5)))
    records = []
    for options in ([], ["--no-decode-graphs"], ["--no-patch"]):
        output = tmp_path / f"captions{len(records)}"
        done = caption(tmp_path / "photos", output, WHOLE, "--batch-size=2", *options)
        assert done.exit_code == 0 and "stock decodes" not in done.output
        assert ("decoding: 3 calls on a static cache" in done.output) == (not options)
        assert ("patched" in done.output) == (options != ["--no-patch"])
        records.append(counted(output))
    assert records[0] == records[1] == records[2]
    again = caption(tmp_path / "photos", tmp_path / "captions0", WHOLE, "--no-decode-graphs")
    assert "0 of them to caption" in again.output


def test_every_record_has_its_own_seed() -> None:
    captioner = SimpleNamespace(seed=0)
    seeds = {Captioner.seed_of(captioner, key, prompt) for key in ("a", "b", "a\udcff") for prompt in ("p", "q")}
    captioner.seed = 1
    assert Captioner.seed_of(captioner, "a", "p") not in seeds and len(seeds) == 6
    torch.Generator().manual_seed(max(seeds))


def test_samples_are_distributed_as_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])
    rows = 400
    sampler = captioner_module._Sampler(range(rows), torch.device("cpu"))
    counts = torch.zeros(5)
    for _ in range(60):
        counts += sampler(torch.zeros(rows, 1).long(), logits.expand(rows, -1)).argmax(-1).bincount(minlength=5)
    assert torch.allclose(counts / counts.sum(), logits.softmax(-1), atol=0.01)
    barred = torch.tensor([[0.0, float("-inf")]]).expand(rows, -1)
    assert not sampler(torch.zeros(rows, 1).long(), barred).argmax(-1).any()


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"), [(0.5, 0.75, {0}), (1.0, 0.75, {0, 1}), (1.0, 1.0, {0, 1, 2})]
)
def test_temperature_comes_before_top_p(temperature: float, top_p: float, expected: set[int]) -> None:
    """The nucleus holds the probabilities at the given temperature, as in other libraries."""
    captioner = load("qwen2_vl", temperature=temperature, top_p=top_p)
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    rows = 200
    sampled: set[int] = set()

    def fake(**kwargs: Any) -> torch.Tensor:
        scores = logits.expand(rows, -1)
        for processor in kwargs["logits_processor"]:
            scores = processor(kwargs["input_ids"], scores)
        sampled.update(scores.argmax(-1).tolist())
        return torch.cat([kwargs["input_ids"], scores.argmax(-1, keepdim=True)], 1)

    captioner.model.generate = fake
    captioner.generate([{"input_ids": torch.zeros(rows, 1, dtype=torch.long)}], [range(rows)])
    assert sampled == expected


def test_prompts_that_hold_image_tokens_are_errors(tmp_path: Path) -> None:
    """The name of a file must not add a placeholder of an image to its prompt."""
    captioner = load("qwen3_vl")
    drawn = {f"{seed}.png": draw(seed) for seed in range(3)}
    drawn["<|image_pad|>.png"] = draw(3)
    tasks = []
    for name, (image, _) in drawn.items():
        image.save(tmp_path / name)
        item = Item(key=name, file=str(tmp_path / name))
        tasks.append(Task(item=item, prompts=(PICTURE_PROMPT + " {name}",), tokens=30))
    progress = Progress(tmp_path / "progress", 0, 1, 4, 1)
    journal = Journal(tmp_path)
    Worker(captioner, journal, progress, 0, "r", batch_tokens=1000, batch_size=8).work(tasks)
    assert {record.key: record.status for record in journal.records()} == {
        name: "error" if "image" in name else "ok" for name in drawn
    }
