"""Runs and merges on a disk that is full: complete records, and a message."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from captioner.journal import Journal, json_lines
from programs import words
from support_captioning import (
    call,
    caption,
    captions_in,
    put,
    texts,
)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Draw two scenes."""
    put(tmp_path / "photos", "a.png", "b.png")
    return tmp_path / "photos"


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Bound the size of files, as `ulimit -f` does: writes are cut off there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_are_complete_after_the_disk_was_full(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos / "a.png", output, f"--root={photos}")
    shard = output / "captions-00000.jsonl"
    (record,) = Journal(output).records()
    with shard.open("a") as file:  # a record of an earlier run makes this the largest file
        file.write(json_lines([replace(record, run="another", caption="x" * 9000)]))
    size = shard.stat().st_size
    with limited(size + 1):
        done = caption(photos, output, "--batch-size=1")
    stopped = (
        f"cannot write to {output}: File too large; the captions so far are kept: remove the cause, and start the same"
    )
    assert done.exit_code == 1 and f"{stopped} command to go on" in words(done) and "Traceback" not in words(done)
    assert shard.stat().st_size == size + 1  # a line is torn
    assert captions_in(output).keys() == {"a.png"} and call("merge", output, tmp_path / "all.jsonl").exit_code == 1
    assert "2 items, 1 of them to caption" in words(caption(photos, output))
    assert captions_in(output).keys() == {"a.png", "b.png"}
    objects = [json.loads(line) for line in shard.read_text().splitlines()]
    assert len(objects) == 3 and objects[1]["caption"] == "x" * 9000


def test_a_run_that_cannot_begin_to_write_says_so(photos: Path, output: Path) -> None:
    with limited(100):
        done = caption(photos, output)
    assert done.exit_code == 1 and f"cannot write to {output}: File too large;" in words(done)
    assert "2 items, 2 of them to caption" in words(caption(photos, output))


@pytest.mark.parametrize("name", ["all.jsonl", "metadata.jsonl", "all.parquet", "all.tar", "all-%d.tar"])
def test_merge_on_a_full_disk_keeps_the_former_files(photos: Path, output: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    caption(photos, output)
    assert call("merge", output, photos / name).exit_code == 0
    files = {path: path.read_bytes() for path in photos.iterdir()}
    caption(photos, output, prompt="describe this video .")
    with limited(60):
        done = call("merge", output, photos / name)
    assert done.exit_code == 1 and f"cannot write {photos / name}: " in words(done), words(done)
    assert "File too large" in words(done) and "remove the cause, and merge again" in words(done)
    assert {path: path.read_bytes() for path in photos.iterdir()} == files
    assert call("merge", output, photos / name).exit_code == 0


def test_texts_are_merges_own_after_a_disk_was_full(photos: Path, output: Path) -> None:
    caption(photos, output)
    assert call("merge", output, photos).exit_code == 0
    with limited((output / ".written").stat().st_size + 40):  # texts are smaller
        done = call("merge", output, photos, "--suffix=!")
    assert done.exit_code == 1 and f"cannot write {photos}: File too large" in words(done)
    for suffix in ("!", ""):
        assert call("merge", output, photos, f"--suffix={suffix}").exit_code == 0
        expected = {key.replace(".png", ".txt"): f"{text}{suffix}\n" for key, text in captions_in(output).items()}
        assert texts(photos) == expected
