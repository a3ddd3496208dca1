"""A run of `--overwrite` that was killed goes on by the same command, and a finished one begins anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from captioner.journal import Journal, Record
from click.testing import Result
from programs import words
from support_captioning import call, caption, captions_in, lines, merged

pytestmark = pytest.mark.usefixtures("quick")

GOES_ON = "goes on with the --overwrite run that was not finished"


class Killed(Exception):
    """Stand in for a kill: the program does not handle it."""


def killed_after(batches: int, monkeypatch: pytest.MonkeyPatch, *arguments: object, **options: object) -> Result:
    """Caption, and die when another batch than these would be written."""
    append = Journal.append
    written = []

    def append_or_die(journal: Journal, process: int, records: list[Record]) -> None:
        if len(written) == batches:
            raise Killed
        written.append(append(journal, process, records))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append_or_die)
        died = caption(*arguments, "--batch-size=1", **options)
    assert isinstance(died.exception, Killed), words(died)
    return died


def runs_in(output: Path) -> list[str]:
    """Return the names of the runs of all starts."""
    return [entry["run"] for entry in Journal(output).manifest()["runs"]]


@pytest.mark.parametrize("restart", [["--overwrite"], []], ids=["same command", "without --overwrite"])
def test_the_same_command_goes_on_after_every_kill(
    photos: Path, output: Path, restart: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    expected = captions_in(output)
    killed_after(1, monkeypatch, photos, output, "--overwrite")
    again = words(killed_after(1, monkeypatch, photos, output, *restart))
    assert "3 items, 2 of them to caption" in again and (GOES_ON in again) == bool(restart)
    done = words(caption(photos, output, "--overwrite"))
    assert "3 items, 1 of them to caption" in done and f"{GOES_ON}: 2 of 3 records are there" in done
    first, second, *others = runs_in(output)
    assert first != second and others == [second, second]
    assert captions_in(output) == expected and len(list(Journal(output).records())) == 6
    assert "3 items, 3 of them to caption" in words(caption(photos, output, "--overwrite"))
    assert len(set(runs_in(output))) == 3


def test_a_kill_before_the_first_record_begins_no_third_run(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    killed_after(0, monkeypatch, photos, output, "--overwrite")
    assert "3 items, 3 of them to caption" in words(caption(photos, output, "--overwrite"))
    assert len(set(runs_in(output))) == 2


def test_another_prompt_in_between_does_not_begin_anew(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    killed_after(1, monkeypatch, photos, output, "--overwrite")
    caption(photos, output, "--limit=1", prompt="what is it ?")
    printed = words(caption(photos, output, "--overwrite"))
    assert GOES_ON in printed and "3 items, 2 of them to caption" in printed


def test_the_same_words_in_another_folder_begin_anew(
    photos: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name other pictures."""
    monkeypatch.chdir(photos.parent)
    caption(photos.name, output)
    killed_after(1, monkeypatch, photos.name, output, "--overwrite")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(photos, elsewhere / photos.name)
    monkeypatch.chdir(elsewhere)
    printed = words(caption(photos.name, output, "--overwrite"))
    assert GOES_ON not in printed and "3 items, 3 of them to caption" in printed


@pytest.mark.parametrize("other", ["prompt", "input", "setting", "root", "limit", "no patch"])
def test_another_command_begins_anew(photos: Path, output: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caption(photos, output)
    killed_after(1, monkeypatch, photos, output, "--overwrite")
    inputs = photos / "*.png" if other == "input" else photos
    options = {
        "setting": ["--max-new-tokens=5"],
        "root": [f"--root={photos.parent}"],
        "limit": ["--limit=3"],
        "no patch": ["--no-patch"],
    }.get(other, [])
    prompts = {"prompt": "what is it ?"} if other == "prompt" else {}
    before = list(Journal(output).records())
    printed = words(caption(inputs, output, "--overwrite", *options, **prompts))
    items = 2 if other == "input" else 3
    assert f"{items} items, {items} of them to caption" in printed and GOES_ON not in printed
    assert len(set(runs_in(output))) == 3 and set(before) < set(Journal(output).records())


def test_a_later_run_that_was_not_overwriting_is_no_reason_to_go_on(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "cut.png").write_bytes(b"no picture")
    caption(photos, output, "--overwrite")
    killed_after(0, monkeypatch, photos, output, "--retry-errors")  # removes a record of the finished run
    assert "4 items, 4 of them to caption" in words(caption(photos, output, "--overwrite"))


def test_manifests_of_earlier_versions_begin_anew(photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caption(photos, output)
    killed_after(1, monkeypatch, photos, output, "--overwrite")
    manifest = Journal(output).manifest()
    for entry in manifest["runs"]:
        del entry["overwrite"]
    (output / "manifest.json").write_text(json.dumps(manifest))
    assert "3 items, 3 of them to caption" in words(caption(photos, output, "--overwrite"))


def test_merge_says_how_to_finish_the_newest_run(
    photos: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    killed_after(1, monkeypatch, photos, output, "--overwrite")
    refusal = words(call("merge", output, tmp_path / "out.jsonl"))
    assert "others have captions of more pictures" in refusal
    assert "or start its command again, which writes the 2 records that it lacks" in refusal
    caption(photos, output, "--overwrite")
    assert call("merge", output, tmp_path / "out.jsonl").exit_code == 0 and len(lines(tmp_path / "out.jsonl")) == 3
    assert len(merged(output)) == 3
