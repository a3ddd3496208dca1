"""`examples/embed_pages.py` as a user runs it, on a tiny random ColQwen2: files, resume, queries, processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from programs import EXAMPLES, RUNNER, WAYS, draw, launched, words
from safetensors.torch import load_file
from test_retrieval import col_qwen2
from tiny import IMAGE, relative_error
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_vit_accel

assert str(EXAMPLES) in sys.path
import embed_pages  # noqa: E402

SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"
APP = typer.Typer()
APP.command()(embed_pages.main)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """A checkpoint of transformers' own retriever, with its processor, as one downloads it."""
    folder = tmp_path_factory.mktemp("colqwen2")
    retriever = col_qwen2("qwen2_vl")
    retriever.config.architectures = [type(retriever).__name__]
    retriever.save_pretrained(folder)
    names = [*SPECIAL, *(f"word{index}" for index in range(IMAGE - len(SPECIAL))), "<|image_pad|>", "[UNK]"]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [*SPECIAL[1:], "<|image_pad|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=SPECIAL[0], unk_token="[UNK]", additional_special_tokens=special
    )
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)
    images = kind(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 16384})
    transformers.ColQwen2Processor(images, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    for index, name in enumerate(["a.png", "b.png", "deep/c.png", "d.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        draw(index)[0].resize((48 + 16 * index, 64)).save(folder / name)
    return folder


def call(*arguments: object) -> Any:
    return RUNNER.invoke(APP, [str(each) for each in arguments])


def embeddings(output: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob("*.safetensors")):
        found |= load_file(path)
    return found


def alone(model: Path, page: Path) -> torch.Tensor:
    """What stock makes of one page, without anything around it."""
    retriever, processor = embed_pages.load(str(model), None, torch.float32, torch.device("cpu"))
    inputs = processor.process_images([embed_pages.Image.open(page).convert("RGB")])
    with torch.no_grad():
        return retriever(**inputs).embeddings[0]


def test_pages_are_embedded_as_by_stock_one_by_one(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    done = call(pages, "--output", output, "--model", model, "--batch-size=2", "--compare")
    assert done.exit_code == 0, done.output
    assert re.search(r"stock: [\d.]+ pages a second patched: [\d.]+ pages a second", words(done))
    assert float(re.search(r"difference of the embeddings: (\S+)", done.output)[1]) < 1e-5
    assert "4 pages embedded" in done.output and len(list(output.glob("*.safetensors"))) == 2
    found = embeddings(output)
    assert set(found) == {"a.png", "b.png", "deep/c.png", "d.png"}
    for key, each in found.items():
        assert relative_error(each, alone(model, pages / key)) < 1e-5, key


def test_the_tower_is_patched_unless_it_is_not_to_be(
    model: Path, pages: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    held: list[Any] = []
    load = embed_pages.load
    monkeypatch.setattr(embed_pages, "load", lambda *args: held.append(load(*args)) or held[-1])
    for more, patched in ([], True), (["--no-patch"], False):
        output = tmp_path / str(patched)
        assert call(pages, "--output", output, "--model", model, *more).exit_code == 0
        [tower] = hf_vit_accel.status(held[-1][0]).towers
        assert tower.patched == patched and (tower.calls > 0) == patched


def test_only_what_is_missing_or_changed_is_embedded_again(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    arguments = pages, "--output", output, "--model", model, "--batch-size=2"
    assert call(*arguments).exit_code == 0
    before = embeddings(output)
    assert "4 pages, 0 of them to embed" in call(*arguments).output
    sorted(output.glob("*.safetensors"))[1].unlink()  # as if it had been killed before
    assert "4 pages, 2 of them to embed" in call(*arguments).output
    assert all(torch.equal(each, before[key]) for key, each in embeddings(output).items())
    draw(9)[0].save(pages / "a.png")
    assert "4 pages, 1 of them to embed" in call(*arguments).output
    assert embeddings(output)["a.png"].shape != before["a.png"].shape
    assert relative_error(embeddings(output)["a.png"], alone(model, pages / "a.png")) < 1e-5
    assert "4 pages, 4 of them to embed" in call(*arguments, "--max-pixels=1024").output, "another run"
    (output / "pages-00000099-00000.safetensors").write_bytes(b"torn")
    assert "passed over" in call(*arguments).output


def test_queries_find_pages_by_their_largest_similarities(model: Path, pages: Path, tmp_path: Path) -> None:
    output, query = tmp_path / "index", "word1 word7"
    done = call(pages, "--output", output, "--model", model, "--batch-size=3", "--query", query, "--top=3")
    assert done.exit_code == 0, done.output
    retriever, processor = embed_pages.load(str(model), None, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        asked = retriever(**processor.process_queries([query])).embeddings[0]
    scores = {
        key: sum(max(float(token @ other) for other in page) for token in asked)
        for key, page in embeddings(output).items()
    }
    wanted = sorted(scores, key=lambda key: -scores[key])[:3]
    for result in (done, call("--output", output, "--query", query, "--top=3")):
        found = re.findall(r"^ +(-?[\d.]+)  (\S+)$", result.output, re.M)
        assert [key for _, key in found] == wanted
        assert all(abs(float(score) - scores[key]) < 2e-3 for score, key in found)


def test_what_cannot_be_read_or_is_refused_costs_nobody_else(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    (pages / "broken.png").write_bytes((pages / "a.png").read_bytes()[:60])
    draw(0)[0].resize((2000, 4)).save(pages / "thin.png")
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 1
    assert "not embedded: broken.png: " in done.output and "not embedded: thin.png: " in done.output
    assert "4 pages embedded" in done.output and "2 could not be" in done.output
    assert set(embeddings(output)) == {"a.png", "b.png", "deep/c.png", "d.png"}


def test_a_page_that_the_memory_does_not_hold_is_tried_again(
    model: Path, pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = embed_pages.embed

    def full(retriever: Any, inputs: Any) -> list[torch.Tensor]:
        if len(inputs["input_ids"]) > 3 or embeddings_made:
            raise torch.OutOfMemoryError
        embeddings_made.append(True)
        return embed(retriever, inputs)

    embeddings_made: list[bool] = []
    output = tmp_path / "index"
    monkeypatch.setattr(embed_pages, "embed", full)
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 1 and "2 pages embedded" in done.output and "2 could not be" in done.output
    monkeypatch.setattr(embed_pages, "embed", embed)
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 0 and "2 of them to embed" in done.output
    assert set(embeddings(output)) == {"a.png", "b.png", "deep/c.png", "d.png"}


def test_mistakes_are_told(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    assert "name pages to embed, or a --query" in words(call("--output", output))
    assert "such as vidore/colqwen2-v1.0-hf" in words(call(pages, "--output", output))
    assert "no pages are embedded" in words(call("--output", output, "--query", "word1"))
    other = EXAMPLES / "tiny_captioner" / "qwen2_vl"
    assert "expected a retriever" in words(call(pages, "--output", output, "--model", other))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_share_the_pages(model: Path, pages: Path, tmp_path: Path, way: str) -> None:
    command = [pages, "--output", tmp_path / "index", "--model", model]
    told = launched(way, EXAMPLES / "embed_pages.py", APP, command, tmp_path)
    assert "4 pages embedded" in told
    files = [load_file(path) for path in (tmp_path / "index").glob("*.safetensors")]
    assert len(files) == 2 and len(embeddings(tmp_path / "index")) == 4
