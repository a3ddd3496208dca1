"""Runs on the command line: resumed, with other settings, limits and prompts; refusals, exit codes and locks."""

import fcntl
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from captioner.files import lock
from captioner.journal import Journal
from programs import EXAMPLES, draw, words
from support_captioning import PROMPT, batch_caption, call, caption, captions_in, merged, put

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Draw three scenes, and write a file that is no picture."""
    put(tmp_path / "photos", "0.png", "1.png", "2.png")
    for number in range(3):
        (tmp_path / "photos" / f"{number}.json").write_text(json.dumps({"title": f"scene {number}"}))
    (tmp_path / "photos" / "bad.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def planned(photos: Path, output: Path, *options: object, **settings: object) -> tuple[int, int]:
    """Caption; return how many items there are, and how many of them the run captions."""
    (counts,) = re.findall(
        r"(\d+) items, (\d+) of them to caption", words(caption(photos, output, *options, **settings))
    )
    return int(counts[0]), int(counts[1])


def test_existing_captions_are_not_made_again(
    photos: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(photos, output) == (4, 4)
    expected = captions_in(output)
    assert expected.keys() == {"0.png", "1.png", "2.png"}
    before = Journal(output).records()
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "load_model", lambda *_: pytest.fail("loaded"))
        again = words(caption(photos, output, "--batch-size=1", "--no-patch"))
    assert "4 items, 0 of them to caption" in again and "captions everything anew" in again
    assert "3 of 4 records have captions" in again
    assert Journal(output).records() == before
    assert planned(photos, output, "--no-patch", prompt="describe this video .") == (4, 4)
    for settings in (["--max-new-tokens=3"], ["--temperature=0.5"], ["--temperature=0.5", "--seed=1"]):
        assert planned(photos, output, *settings) == (4, 4)
    assert planned(photos, output, "--temperature=0.5") == (4, 0)
    assert "a new run: pixels changed" in words(caption(photos, output, "--temperature=0.5", "--max-pixels=16384"))
    done = call("merge", output, tmp_path / "out.jsonl", f"--run={before[0].run}", f"--prompt={PROMPT}")
    assert done.exit_code == 0 and "3 of 4 records have captions" in done.output
    before = Journal(output).records()
    assert planned(photos, output, "--attempt=2") == (4, 4)
    assert captions_in(output) == expected
    assert Journal(output).records()[: len(before)] == before


def test_changed_files_and_errors_are_captioned_again(photos: Path, output: Path) -> None:
    caption(photos, output)
    before = captions_in(output)
    draw(7)[0].save(photos / "0.png")
    printed = words(caption(photos, output))
    assert "4 items, 1 of them to caption" in printed
    assert "1 earlier errors are left alone; --retry-errors tries them again" in printed
    after = captions_in(output)
    assert after["0.png"] != before["0.png"] and after == before | {"0.png": after["0.png"]}
    assert planned(photos, output, "--retry-errors") == (4, 1)
    draw(8)[0].save(photos / "bad.png")
    assert planned(photos, output) == (4, 1)
    assert "bad.png" in captions_in(output) and len(Journal(output).records()) == 4


def test_several_prompts_with_metadata(photos: Path, output: Path, tmp_path: Path) -> None:
    prompts = [PROMPT, "{stem} {title}"]
    (photos / "1.json").unlink()
    options = [f"--prompt={prompt}" for prompt in (*prompts, prompts[0])]
    assert "3 records failed" in words(caption(photos, output, *options, prompt=None))
    both = merged(output)
    assert len(both) == 8 and {record.asked for record in both} >= {"describe this picture .", "0 scene 0"}
    captioned = [record.key for record in both if record.prompt == prompts[0] and record.caption]
    errors = {record.key: record.error for record in both if record.prompt == prompts[1] and record.error}
    assert captioned == ["0.png", "1.png", "2.png"]
    assert errors.keys() == {"1.png", "bad.png"} and "the prompt names {title}" in errors["1.png"]
    another = tmp_path / "another"
    caption(photos, another, "--max-failures=1", prompt=prompts[1])
    assert planned(photos, another, prompt=prompts[0]) == (4, 4)
    again = {(record.key, record.prompt): record.caption for record in Journal(another).records()}
    assert again == {(record.key, record.prompt): record.caption for record in both}


def test_dry_runs_write_nothing(photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "load_model", lambda *_: pytest.fail("loaded"))
        assert planned(photos, output, "--dry-run") == (4, 4)
    assert [path.name for path in photos.parent.iterdir()] == ["photos"]
    assert planned(photos, output, "--limit=2") == (2, 2) and captions_in(output).keys() == {"0.png", "1.png"}
    with Journal(output).shards()[0].open("ab") as shard:
        shard.write(b"torn")
    before = {path: path.stat().st_mtime_ns for path in photos.parent.rglob("*")}
    with lock(output, alone=True):
        before[output / ".lock"] = (output / ".lock").stat().st_mtime_ns
        assert planned(photos, output, "--dry-run") == (4, 2)
        assert planned(photos, output, "--dry-run", "--attempt=2") == (4, 4)
    assert {path: path.stat().st_mtime_ns for path in photos.parent.rglob("*")} == before


def test_too_many_failures_end_with_an_error(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)  # a quarter failed, and half may
    assert caption(photos, output, "--max-failures=0.25").exit_code == 0
    for name in ("cut.png", "lost.png"):
        (photos / name).touch()
    failed = caption(photos, output, "--max-failures=0.2")
    assert failed.exit_code == 1 and "3 of 6 records are errors: more than --max-failures 0.2 allows" in words(failed)
    assert "error, 2 x ValueError: the file is empty (cut.png, lost.png)" in words(failed)
    merge = "merge", output, tmp_path / "out.jsonl"
    assert call(*merge).exit_code == 0 and call(*merge, "--max-failures=0.2").exit_code == 1
    for path in photos.glob("?.png"):
        path.unlink()
    assert caption(photos, tmp_path / "others").exit_code == 1
    assert caption(photos, tmp_path / "others", "--max-failures=1").exit_code == 0


def test_merge_refuses_unknown_runs_and_targets(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    run = Journal(output).newest()["run"]
    for arguments, message in (
        ([photos, tmp_path / "out.jsonl"], "no run has written to"),
        ([output, tmp_path / "out.jsonl", "--run=unknown"], f"no run unknown has written to {output}, but {run}"),
        ([output, tmp_path / "out.csv"], "end in .jsonl"),
    ):
        done = call("merge", *arguments)
        assert done.exit_code == 2 and message in words(done), done.output
    done = call("merge", output, photos / "0.png" / "x.jsonl")
    assert done.exit_code == 1 and "cannot write" in done.output and "0.png" in done.output, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype=int8"], "int8"),
        (["--column=x", "{photos}/none.parquet"], "no file"),
        (["{photos}/../empty"], "no images or videos in"),
        (["{photos}/*.webp"], "no file"),
        (["{photos}/0.json"], "no picture or video by its name, nor a .txt list"),
        (["{photos}/../empty.txt"], "no images or videos in"),
        (["{photos}/../link.jpg"], "which is not there"),
        ([""], "an input is empty"),
        (["--min-pixels=5000", "--max-pixels=4000"], "is above --max-pixels"),
        (["--revision=v2"], "--revision is for models on the Hub, and .* is a folder"),
        (["--root=nowhere"], "Invalid value for '--root'"),
        (["--prompt= "], "the prompt is empty"),
        (["--output={photos}/0.png"], "0.png"),
        (["--limit=0"], "limit"),
    ],
)
def test_mistakes_are_refused(photos: Path, output: Path, options: list[str], message: str) -> None:
    (photos.parent / "empty").mkdir()
    (photos.parent / "empty.txt").touch()
    (photos.parent / "link.jpg").symlink_to(photos / "gone.jpg")
    done = caption(photos, output, *(option.replace("{photos}", str(photos)) for option in options))
    assert done.exit_code == 2 and re.search(message, words(done)), done.output
    assert not list(output.glob("captions-*"))


def test_a_missing_accelerate_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "captioner" / "main.py"), run_name="program")
    message = str(ended.value)
    assert "\n" not in message and message.startswith("This program needs accelerate: pip install")


def test_locks_are_shared_within_a_run(tmp_path: Path) -> None:
    with lock(tmp_path / "new", alone=True) as share:
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=False):
            pass
        share()
        with lock(tmp_path / "new", alone=False):
            pass
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=True):
            pass


def test_file_systems_without_locks_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(tmp_path, alone=True) as share:
        share()


def test_the_captioner_is_short_and_uses_public_names() -> None:
    files = list((EXAMPLES / "captioner").iterdir())
    lines = {path.name: len(path.read_text().splitlines()) for path in files if path.is_file()}
    assert max(lines.values()) <= 330 and sum(lines.values()) <= 2500, lines
    for path in (EXAMPLES / "captioner").glob("*.py"):
        assert not re.search(r"(from|import) hf_vit_accel\.", path.read_text()), path.name
