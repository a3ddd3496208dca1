"""Run `examples/embed_pages.py` as users do, on a tiny random ColQwen2: files, resume, queries, processes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
import typer
from click.testing import Result
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, RUNNER, WAYS, draw, launched, words
from safetensors.torch import load_file, save_file
from tiny import IMAGE, TINY, randomise, relative_error
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_vit_accel

assert str(EXAMPLES) in sys.path
import embed_pages  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
PAGES = {"a.png", "b.png", "deep/c.png", "d.png"}
APP = typer.Typer()
APP.command()(embed_pages.main)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random checkpoint of transformers' own retriever, with its processor."""
    folder = tmp_path_factory.mktemp("colqwen2")
    config = TINY["qwen2_vl"].build().config
    colqwen2_config = transformers.ColQwen2Config(vlm_config=config.to_dict(), embedding_dim=16)
    retriever = randomise(transformers.ColQwen2ForRetrieval._from_config(colqwen2_config).eval())
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
    """Draw four pages of different sizes."""
    folder = tmp_path / "pages"
    for index, name in enumerate(["a.png", "b.png", "deep/c.png", "d.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        draw(index)[0].resize((48 + 16 * index, 64)).save(folder / name)
    return folder


def call(*arguments: object) -> Result:
    return RUNNER.invoke(APP, [str(argument) for argument in arguments])


def embeddings(output: Path) -> dict[str, torch.Tensor]:
    """Read the embeddings of all files, newer ones last."""
    by_page: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob("*.safetensors")):
        by_page |= load_file(path)
    return by_page


def embedded_alone(model: Path, page: Path) -> torch.Tensor:
    """Embed one page with the stock model."""
    retriever, processor = embed_pages.load(str(model), None, torch.float32, torch.device("cpu"))
    inputs = processor.process_images([Image.open(page).convert("RGB")])
    with torch.no_grad():
        return retriever(**inputs).embeddings[0]


def test_embeddings_are_those_of_stock_page_by_page(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    done = call(pages, "--output", output, "--model", model, "--batch-size=2", "--compare")
    assert done.exit_code == 0, done.output
    assert re.search(r"stock: [\d.]+ pages a second patched: [\d.]+ pages a second", words(done))
    assert float(re.search(r"difference of the embeddings: (\S+)", done.output)[1]) < 1e-5
    assert "4 pages embedded" in done.output and len(list(output.glob("*.safetensors"))) == 2
    by_page = embeddings(output)
    assert set(by_page) == PAGES
    for key, embedding in by_page.items():
        assert relative_error(embedding, embedded_alone(model, pages / key)) < 1e-5, key


@pytest.mark.parametrize(("options", "is_patched"), [([], True), (["--no-patch"], False)])
def test_the_tower_is_patched_unless_no_patch_is_given(
    model: Path, pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], is_patched: bool
) -> None:
    loaded = embed_pages.load(str(model), None, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(embed_pages, "load", lambda *_: loaded)
    assert call(pages, "--output", tmp_path / "index", "--model", model, *options).exit_code == 0
    [tower] = hf_vit_accel.status(loaded[0]).towers
    assert tower.patched == is_patched and (tower.calls > 0) == is_patched


def test_only_missing_or_changed_pages_are_embedded_again(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    arguments = (pages, "--output", output, "--model", model, "--batch-size=2")
    assert call(*arguments).exit_code == 0
    before = embeddings(output)
    again = call(*arguments, "--compare").output
    assert "4 pages, 0 of them to embed" in again and "--compare timed nothing" in again
    sorted(output.glob("*.safetensors"))[1].unlink()  # as if the run had been killed before
    assert "4 pages, 2 of them to embed" in call(*arguments).output
    assert all(torch.equal(embedding, before[key]) for key, embedding in embeddings(output).items())
    draw(9)[0].save(pages / "a.png")
    assert "4 pages, 1 of them to embed" in call(*arguments).output
    assert embeddings(output)["a.png"].shape != before["a.png"].shape
    assert relative_error(embeddings(output)["a.png"], embedded_alone(model, pages / "a.png")) < 1e-5
    assert "4 pages, 4 of them to embed" in call(*arguments, "--max-pixels=1024").output, "another run"
    torn = output / "pages-00000099-00000.safetensors"
    torn.write_bytes(b"torn")
    save_file({"a.png": torch.zeros(2, 2)}, output / "pages-00000098-00000.safetensors")
    done = call(*arguments, "--max-pixels=2048")
    assert words(done).count("passed over: ") == 2 and "not a file of this version" in words(done)
    assert torn.read_bytes() == b"torn", "no file of others is overwritten"


def test_queries_find_pages_by_their_largest_similarities(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    query = "word1 word7"
    done = call(pages, "--output", output, "--model", model, "--batch-size=3", "--query", query, "--top=3")
    assert done.exit_code == 0, done.output
    retriever, processor = embed_pages.load(str(model), None, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        embedded_query = retriever(**processor.process_queries([query])).embeddings[0]
    scores = {}
    for key, page in embeddings(output).items():
        scores[key] = sum(max(float(token @ other) for other in page) for token in embedded_query)
    best = sorted(scores, key=lambda key: -scores[key])[:3]
    for result in (done, call("--output", output, "--query", query, "--top=3")):
        printed = re.findall(r"^ +(-?[\d.]+)  (\S+)$", result.output, re.M)
        assert [key for _, key in printed] == best
        assert all(abs(float(score) - scores[key]) < 2e-3 for score, key in printed)


def found(result: Result) -> dict[str, float]:
    """Read the scores of the pages that a query found."""
    assert result.exit_code == 0, result.output
    return {key: float(score) for score, key in re.findall(r"^ +(-?[\d.]+)  (\S+)$", result.output, re.M)}


def test_a_query_searches_the_run_of_its_own_pages_and_options(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    query = ("--query", "word1 word7")
    arguments = (pages, "--output", output, "--model", model)
    before = found(call(*arguments, *query))
    assert before.keys() == PAGES
    small = found(call(pages / "a.png", *arguments[1:], "--max-pixels=1024", *query))
    assert small.keys() == {"a.png"}
    again = call(*arguments, *query)
    assert "4 pages, 0 of them to embed" in again.output and found(again) == before, "not the run that came last"
    several = call("--output", output, *query)
    assert several.exit_code == 2 and "holds several runs: " in words(several)
    runs = re.findall(r"(\w{12}) \((\d) pages, ", words(several))
    assert [count for _, count in runs] == ["4", "1"]
    for (name, _), expected in zip(runs, (before, small), strict=True):
        assert found(call("--output", output, *query, "--run", name)) == expected
    assert "holds no run nope, but " in words(call("--output", output, *query, "--run=nope"))


def test_pages_of_two_folders_with_the_same_names_are_all_found(model: Path, pages: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    for index, name in enumerate(sorted(PAGES)):
        (later / name).parent.mkdir(parents=True, exist_ok=True)
        draw(20 + index)[0].save(later / name)
    settings = ("--output", tmp_path / "index", "--model", model)
    query = ("--query", "word1 word7", "--top=20")
    assert found(call(pages, *settings, *query)).keys() == PAGES
    both = PAGES | {f"../later/{name}" for name in PAGES}
    for folders in ((later,), (pages,), (pages, later)):
        done = call(*folders, *settings, *query)
        assert found(done).keys() == both
        assert ("4 of them to embed" in done.output) == (folders == (later,))
    before = embeddings(tmp_path / "index")
    moved = pages.rename(tmp_path / "moved")
    done = call(moved, *settings, *query)
    assert "which is gone: these are taken for the same ones" in words(done) and "0 of them to embed" in words(done)
    assert embeddings(tmp_path / "index").keys() == before.keys()


def test_a_query_never_meets_pages_of_other_weights(model: Path, pages: Path, tmp_path: Path) -> None:
    trained = shutil.copytree(model, tmp_path / "trained")
    output = tmp_path / "index"
    query = ("--query", "word1 word7")
    before = found(call(pages, "--output", output, "--model", trained, *query))
    weights = {name: tensor * 1.05 for name, tensor in load_file(trained / "model.safetensors").items()}
    save_file(weights, trained / "model.safetensors", {"format": "pt"})
    stale = call("--output", output, *query)
    assert stale.exit_code == 2 and "changed since run" in words(stale) and "Embed them again" in words(stale)
    after = found(call(pages, "--output", output, "--model", trained, *query))
    assert after.keys() == before.keys() and after != before


def test_another_page_of_the_same_size_is_embedded_again(model: Path, pages: Path, tmp_path: Path) -> None:
    draw(0)[0].resize((64, 64)).save(pages / "scan.bmp")
    length = (pages / "scan.bmp").stat().st_size
    arguments = (pages, "--output", tmp_path / "index", "--model", model)
    assert "5 pages, 5 of them to embed" in call(*arguments).output
    before = embeddings(tmp_path / "index")["scan.bmp"]
    os.utime(pages / "scan.bmp", ns=(1, 1))
    assert "5 pages, 0 of them to embed" in call(*arguments).output, "the bytes are the same"
    draw(7)[0].resize((64, 64)).save(pages / "scan.bmp")
    assert (pages / "scan.bmp").stat().st_size == length
    assert "5 pages, 1 of them to embed" in call(*arguments).output
    assert not torch.equal(embeddings(tmp_path / "index")["scan.bmp"], before)


def test_damaged_or_refused_pages_are_reported_and_the_others_embedded(
    model: Path, pages: Path, tmp_path: Path
) -> None:
    output = tmp_path / "index"
    (pages / "broken.png").write_bytes((pages / "a.png").read_bytes()[:60])
    draw(0)[0].resize((2000, 4)).save(pages / "thin.png")
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 1
    assert "not embedded: broken.png: " in done.output and "not embedded: thin.png: " in done.output
    assert "4 pages embedded" in done.output and "2 could not be" in done.output
    assert set(embeddings(output)) == PAGES


def test_pages_that_did_not_fit_into_the_memory_are_embedded_by_the_next_run(
    model: Path, pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = embed_pages.embed
    embedded_batches: list[int] = []

    def embed_one_small_batch(retriever: torch.nn.Module, inputs: transformers.BatchFeature) -> list[torch.Tensor]:
        rows = len(inputs["input_ids"])
        if rows > 3 or embedded_batches:
            raise torch.OutOfMemoryError
        embedded_batches.append(rows)
        return embed(retriever, inputs)

    output = tmp_path / "index"
    monkeypatch.setattr(embed_pages, "embed", embed_one_small_batch)
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 1 and "2 pages embedded" in done.output and "2 could not be" in done.output
    monkeypatch.setattr(embed_pages, "embed", embed)
    done = call(pages, "--output", output, "--model", model)
    assert done.exit_code == 0 and "2 of them to embed" in done.output
    assert set(embeddings(output)) == PAGES


def test_a_model_that_is_not_there_is_reported_as_by_the_captioner(pages: Path, tmp_path: Path) -> None:
    done = call(pages, f"--output={tmp_path / 'index'}", "--model=./nope")
    assert done.exit_code == 2 and "cannot load ./nope: no folder is there, and as a name on the Hub" in words(done)
    done = call(pages, f"--output={tmp_path / 'index'}", f"--model={pages}")
    assert done.exit_code == 2 and f"{pages} holds no checkpoint" in words(done)


def test_mistakes_are_refused_with_the_fix(model: Path, pages: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    assert "name pages to embed, or a --query" in words(call("--output", output))
    assert "such as vidore/colqwen2-v1.0-hf" in words(call(pages, "--output", output))
    assert "holds no embedded pages" in words(call("--output", output, "--query", "word1"))
    assert "Invalid value for --query: it is empty" in words(call(pages, "--output", output, "--query="))
    without_pages = call("--output", output, "--model", model, "--query", "word1")
    assert "Invalid value for --model: without pages, a query takes the model of its run" in words(without_pages)
    with_pages = call(pages, "--output", output, "--model", model, "--query", "word1", "--run=x")
    assert "Invalid value for --run: pages and options name a run themselves" in words(with_pages)
    other = CAPTIONERS / "qwen2_vl"
    assert "Name a checkpoint of ColQwen2ForRetrieval" in words(call(pages, "--output", output, "--model", other))
    arguments = (pages, "--output", output, "--model", model)
    limits = ("--min-pixels=2048", "--max-pixels=1024")
    assert "--min-pixels 2048 is above --max-pixels 1024; name both" in words(call(*arguments, *limits))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_share_the_pages(model: Path, pages: Path, tmp_path: Path, way: str) -> None:
    command = [pages, "--output", tmp_path / "index", "--model", model]
    output = launched(way, EXAMPLES / "embed_pages.py", APP, command, tmp_path)
    assert "4 pages embedded" in output
    files = [load_file(path) for path in (tmp_path / "index").glob("*.safetensors")]
    assert len(files) == 2 and len(embeddings(tmp_path / "index")) == 4
