"""Runs and merges on a disk that is full: complete records, and a message."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from captioner.journal import Journal
from programs import words
from support_captioning import (
    call,
    caption,
    captions_in,
    merged,
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
    (shard,) = Journal(output).shards()
    first = shard.read_bytes()
    room = max((output / "manifest.json").stat().st_size * 2, 9000)
    Journal(output, 1).append(0, [replace(merged(output)[0], run="another", caption="x" * room)])
    _, shard = Journal(output).shards()
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
    assert Journal(output).shards()[0].read_bytes() == first
    assert sum(record.run == "another" for record in Journal(output).records()) == 1


def test_a_run_that_cannot_begin_to_write_says_so(photos: Path, output: Path) -> None:
    with limited(100):
        done = caption(photos, output)
    assert done.exit_code == 1 and f"cannot write to {output}: File too large;" in words(done)
    assert "2 items, 2 of them to caption" in words(caption(photos, output))


@pytest.mark.parametrize("name", ["all.jsonl", "metadata.jsonl"])
def test_merge_on_a_full_disk_keeps_the_former_files(photos: Path, output: Path, name: str) -> None:
    caption(photos, output)
    assert call("merge", output, photos / name).exit_code == 0
    files = {path: path.read_bytes() for path in photos.iterdir()}
    caption(photos, output, "--max-new-tokens=2")
    with limited(60):
        done = call("merge", output, photos / name)
    assert done.exit_code == 1 and f"cannot write {photos / name}: " in words(done), words(done)
    assert "File too large" in words(done) and "remove the cause, and merge again" in words(done)
    assert {path: path.read_bytes() for path in photos.iterdir()} == files
    assert call("merge", output, photos / name).exit_code == 0


def test_texts_are_merges_own_after_a_disk_was_full(photos: Path, output: Path) -> None:
    caption(photos, output)
    assert call("merge", output, photos).exit_code == 0
    caption(photos, output, "--max-new-tokens=2")
    with limited((output / ".written").stat().st_size + 40):  # texts are smaller
        done = call("merge", output, photos)
    assert done.exit_code == 1 and f"cannot write {photos}: File too large" in words(done)
    for _ in range(2):
        assert call("merge", output, photos).exit_code == 0
        expected = {key.replace(".png", ".txt"): f"{text}\n" for key, text in captions_in(output).items()}
        assert texts(photos) == expected
