"""Run the command line of `examples/captioner/main.py`: resume, limits, prompts, refusals and exit codes."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from captioner import main as batch_caption
from captioner.files import lock
from captioner.journal import Journal, Record
from click.testing import Result
from programs import CAPTIONERS, EXAMPLES, RUNNER, draw, words
from read_once import read_once


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every checkpoint once for all tests."""
    read_once(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Draw three scenes, and write a file that is no picture."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for seed in range(3):
        image, caption = draw(seed)
        image.save(folder / f"{seed}.png")
        (folder / f"{seed}.json").write_text(json.dumps({"caption": caption}))
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


def captions_of(folder: Path) -> Path:
    """Return the folder of the records, beside the pictures."""
    return folder.parent / "captions"


def caption(folder: Path, *options: object, code: int = 0) -> str:
    """Caption a folder; return the console's text.

    Args:
        folder: the pictures
        options: further arguments
        code: the expected exit code
    """
    output = f"--output={captions_of(folder)}"
    words = [output, f"--model={CAPTIONERS / 'qwen3_vl'}", "--max-new-tokens=24", *(str(option) for option in options)]
    if not any(word.startswith("--prompt") for word in words):
        words.append("--prompt=describe this {kind} .")
    done = RUNNER.invoke(batch_caption.app, ["caption", str(folder), *words])
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


def merge(folder: Path, *options: str, output: Path | None = None, target: Path | None = None) -> Result:
    """Merge the records of a folder's run into a file."""
    result = target or folder.parent / "merged.jsonl"
    return RUNNER.invoke(batch_caption.app, ["merge", str(output or captions_of(folder)), str(result), *options])


def written_records(folder: Path) -> list[Record]:
    """Return the records of all runs, in their order."""
    return Journal(captions_of(folder)).records()


def merged_records(folder: Path) -> dict[str, Record]:
    """Return the records that `merge` takes, by key."""
    return {record.key: record for record in Journal(captions_of(folder)).select().records}


def made_captions(folder: Path) -> dict[str, str | None]:
    """Return the captions of all records without an error, by key."""
    return {key: record.caption for key, record in merged_records(folder).items() if record.status == "ok"}


def right_captions(folder: Path) -> dict[str, str]:
    """Return the exact captions of the pictures, by key."""
    return {f"{path.stem}.png": json.loads(path.read_text())["caption"] for path in folder.glob("*.json")}


def test_existing_captions_are_not_made_again(folder: Path) -> None:
    assert "4 items, 4 of them to caption" in caption(folder)
    assert made_captions(folder) == right_captions(folder)
    before = written_records(folder)
    again = caption(folder, "--batch-size=1", "--no-patch")
    assert "4 items, 0 of them to caption" in again and "captions everything anew" in again
    assert written_records(folder) == before
    assert "4 items, 4 of them to caption" in caption(folder, "--prompt=describe this video .", "--no-patch")
    assert "4 items, 4 of them to caption" in caption(folder, "--max-new-tokens=3")
    assert "4 items, 4 of them to caption" in caption(folder, "--temperature=0.5")
    assert "4 items, 4 of them to caption" in caption(folder, "--temperature=0.5", "--seed=1")
    assert "4 items, 0 of them to caption" in caption(folder, "--temperature=0.5")
    merged = merge(folder, f"--run={before[0].run}")
    assert merged.exit_code == 0 and "3 of 4 records have captions" in merged.output
    before = written_records(folder)
    assert "4 items, 4 of them to caption" in caption(folder, "--attempt=2")
    assert made_captions(folder) == right_captions(folder)
    assert written_records(folder)[: len(before)] == before


def test_changed_files_and_errors_are_captioned_again(folder: Path) -> None:
    caption(folder)
    draw(7)[0].save(folder / "0.png")
    assert "4 items, 1 of them to caption" in caption(folder)
    assert made_captions(folder) == right_captions(folder) | {"0.png": draw(7)[1]}
    assert "4 items, 1 of them to caption" in caption(folder, "--retry-errors")
    draw(8)[0].save(folder / "bad.png")
    assert "4 items, 1 of them to caption" in caption(folder)
    assert made_captions(folder)["bad.png"] == draw(8)[1] and len(written_records(folder)) == 4


def test_several_prompts_with_metadata(folder: Path) -> None:
    prompts = ("describe this {kind} .", "{stem} {caption}")
    expected = right_captions(folder)
    (folder / "1.json").unlink()
    options = [f"--prompt={prompt}" for prompt in (*prompts, prompts[0])]
    assert "3 records failed" in caption(folder, *options)
    both = Journal(captions_of(folder)).select().records
    filled_prompts = {record.asked for record in both}
    assert len(both) == 8 and filled_prompts >= {"describe this picture .", "0 " + expected["0.png"]}
    captions = {record.key: record.caption for record in both if record.prompt == prompts[0] and record.caption}
    errors = {record.key: record.error for record in both if record.prompt == prompts[1] and record.error}
    assert captions == expected
    assert errors.keys() == {"1.png", "bad.png"} and "the prompt names {caption}" in errors["1.png"]
    another = f"--output={folder.parent / 'another'}"
    caption(folder, options[1], another, "--max-failures=1")
    assert "4 items, 4 of them to caption" in caption(folder, options[0], another)
    again = {(record.key, record.prompt): record.caption for record in Journal(folder.parent / "another").records()}
    assert again == {(record.key, record.prompt): record.caption for record in both}


def test_dry_runs_write_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "load_model", lambda *_: pytest.fail("loaded"))
        output = caption(folder, "--dry-run")
    assert "4 items, 4 of them to caption" in output
    assert [path.name for path in folder.parent.iterdir()] == ["pictures"]
    caption(folder, "--limit=2")
    with Journal(captions_of(folder)).shards()[0].open("ab") as shard:
        shard.write(b"torn")
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")}
    with lock(captions_of(folder), alone=True):
        lock_file = captions_of(folder) / ".lock"
        before[lock_file] = lock_file.stat().st_mtime_ns
        assert "4 items, 2 of them to caption" in caption(folder, "--dry-run")
        assert "4 items, 4 of them to caption" in caption(folder, "--dry-run", "--attempt=2")
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")} == before


def test_a_limit_takes_the_first_items(folder: Path) -> None:
    assert "2 items, 2 of them to caption" in caption(folder, "--limit=2")
    assert made_captions(folder) == {key: text for key, text in right_captions(folder).items() if key < "2"}
    assert "3 items, 1 of them to caption" in caption(folder, "--limit=3")


def test_too_many_failures_end_with_an_error(folder: Path) -> None:
    caption(folder)  # a quarter failed, and half may
    assert "0 of them to caption" in caption(folder, "--max-failures=0.25")
    caption(folder, "--max-failures=0.2", code=1)
    assert merge(folder).exit_code == 0 and merge(folder, "--max-failures=0.2").exit_code == 1
    for path in folder.glob("?.png"):
        path.unlink()
    other_output = folder.parent / "others"
    caption(folder, "--output", other_output, code=1)
    caption(folder, "--output", other_output, "--max-failures=1")


def test_merge_refuses_unknown_runs_and_targets(folder: Path) -> None:
    caption(folder)
    refusals: list[tuple[Callable[[], Result], str]] = [
        (lambda: merge(folder, output=folder), "no run has written to"),
        (lambda: merge(folder, "--run=unknown"), "no run unknown has written to"),
        (lambda: merge(folder, target=folder.parent / "out.csv"), "end in .jsonl"),
    ]
    for run, message in refusals:
        done = run()
        assert done.exit_code == 2 and message in done.output, done.output
    [run_name] = {entry["run"] for entry in Journal(captions_of(folder)).manifest()["runs"]}
    assert f", but {run_name}" in words(merge(folder, "--run=unknown"))
    done = merge(folder, target=folder / "0.png" / "x.jsonl")
    assert done.exit_code == 1 and "cannot write" in done.output and "0.png" in done.output, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype=int8"], "int8"),
        (["--column=x", "{folder}/none.parquet"], "no file"),
        (["{folder}/../empty"], "no images or videos in"),
        (["{folder}/*.webp"], "no file"),
        (["--min-pixels=5000", "--max-pixels=4000"], "is above --max-pixels"),
        (["--model=x"], "no folder is there"),
        (["--output={folder}/0.png"], "0.png"),
        (["--limit=0"], "limit"),
    ],
)
def test_mistakes_are_refused(folder: Path, options: list[str], message: str) -> None:
    (folder.parent / "empty").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "0.png").touch()
    output = caption(folder, *(option.replace("{folder}", str(folder)) for option in options), code=2)
    assert re.search(message, output), output
    assert not list((folder.parent).glob("captions/captions-*"))


def test_a_model_without_a_chat_template_is_refused_before_pictures_are_read(folder: Path) -> None:
    base = shutil.copytree(CAPTIONERS / "qwen2_5_vl", folder.parent / "base")
    (base / "chat_template.jinja").unlink()
    done = RUNNER.invoke(
        batch_caption.app, ["caption", str(folder), f"--output={folder.parent / 'captions'}", "--model", str(base)]
    )
    assert done.exit_code == 2 and "its files hold no chat template" in words(done), done.output
    assert not list(folder.parent.glob("captions/captions-*"))


def test_samples_do_not_depend_on_batches_or_order(folder: Path) -> None:
    for seed in range(3, 6):
        draw(seed)[0].save(folder / f"{seed}.png")
    options = ["--temperature=2.5", "--seed=3"]
    caption(folder, *options, "--batch-size=1")
    one_by_one = made_captions(folder)
    caption(folder, *options, "--batch-size=5", "--attempt=2")
    assert made_captions(folder) == one_by_one and len(one_by_one) == 6
    caption(folder, "--temperature=2.5", "--seed=4")
    of_other_seed = made_captions(folder)
    assert sum(of_other_seed[key] != text for key, text in one_by_one.items()) >= 3


@pytest.mark.parametrize("command", ["", "caption", "merge"])
def test_help_is_not_cut_at_80_columns(command: str) -> None:
    done = RUNNER.invoke(batch_caption.app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    lines = [line.strip(" │") for line in done.output.splitlines() if "Usage:" not in line]
    assert len(lines) > 4 and not [line for line in lines if "…" in line or line.endswith("...")]


@pytest.mark.parametrize("program", [EXAMPLES / "captioner" / "main.py", CAPTIONERS / "train.py"], ids=lambda p: p.name)
def test_a_missing_accelerate_is_one_clear_line(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="program")
    message = str(ended.value)
    assert "\n" not in message and message.startswith("This program needs accelerate: pip install")
