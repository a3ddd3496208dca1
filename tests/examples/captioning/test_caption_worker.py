"""The worker, with a captioner that needs no model: every record once, whatever fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captioner.batches import Task, cost
from captioner.items import Item
from captioner.journal import Journal, Record
from captioner.model import Caption, Inputs
from captioner.progress import Counts, Progress, clear, read_counts, state, summary
from captioner.worker import Worker
from PIL import Image
from programs import encode


class FakeCaptioner:
    """Caption pictures by their red values. More than `max_rows` rows at once exceed the memory."""

    max_new_tokens = 4

    def __init__(self, max_rows: int = 1 << 30, error: Exception | None = None, refused: tuple[int, ...] = ()) -> None:
        self.max_rows = max_rows
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.refused = refused
        self.batches: list[int] = []
        self.encoded = 0
        self.processor = None

    def seed_of(self, key: str, prompt: str) -> int:
        return 0

    def encode(self, media: Sequence[Image.Image], prompts: Sequence[str]) -> Inputs:
        self.encoded += 1
        red = [image.getpixel((0, 0))[0] for image in media]
        if set(red) & set(self.refused):
            raise IndexError("refused")
        return {"input_ids": red, "prompts": list(prompts)}

    def send(self, inputs: list[Inputs]) -> list[Inputs]:
        return inputs

    def vision_tokens(self, inputs: Inputs) -> int:
        return 10 * len(inputs["input_ids"])

    def generate(self, inputs: Sequence[Inputs], seeds: Sequence[Sequence[int]]) -> list[list[Caption]]:
        self.batches.append(len(seeds[0]))
        if len(seeds[0]) > self.max_rows:
            raise self.error
        captions = []
        for batch in inputs:
            pairs = zip(batch["prompts"], batch["input_ids"], strict=True)
            captions.append([Caption(f"{prompt}{red}", 2) for prompt, red in pairs])
        return captions


def work(
    tmp_path: Path, captioner: FakeCaptioner, count: int, prompts: Sequence[str] = ("p",), **options: int
) -> list[Record]:
    """Return the records that a worker writes for pictures of 10 tokens. Numbers 1, 11, 21 and so on are unreadable."""
    tasks = []
    for index in range(count):
        name = f"{index:03d}.png"
        (tmp_path / name).write_bytes(b"bad" if index % 10 == 1 else encode(Image.new("RGB", (4, 4), (index, 0, 0))))
        item = Item(key=name, file=str(tmp_path / name))
        tasks.append(Task(item=item, prompts=tuple(prompts), tokens=10))
    progress = Progress(tmp_path / "progress", 0, 1, count, sum(cost(task, captioner.max_new_tokens) for task in tasks))
    options = {"batch_tokens": 100, "batch_size": 8, "decoders": 2} | options
    worker = Worker(captioner=captioner, journal=Journal(tmp_path), progress=progress, process=0, run="r", **options)
    try:
        worker.work(tasks)
    finally:
        progress.close()
    return list(Journal(tmp_path).records())


def check_records(records: list[Record], count: int, prompts: Sequence[str] = ("p",)) -> None:
    """Check the records of `work`: of a batch, those of unreadable pictures come first."""
    names = []
    for start in range(0, count, 8):
        batch = range(start, min(start + 8, count))
        unreadable_first = sorted(batch, key=lambda index: index % 10 != 1)
        names += [(f"{index:03d}.png", prompt) for index in unreadable_first for prompt in prompts]
    assert [(record.key, record.prompt) for record in records] == names
    for record in records:
        index = int(record.key[:3])
        good = index % 10 != 1
        assert record.caption == (f"{record.prompt}{index}" if good else None) and (record.error is None) == good
        assert record.status == ("ok" if good else "error") and record.run == "r" and record.bytes
        assert (record.width, record.tokens) == ((4, 2) if good else (None, None))


@pytest.mark.parametrize("prompts", [("p",), ("p", "q")])
def test_worker_writes_every_record_once(tmp_path: Path, prompts: tuple[str, ...]) -> None:
    captioner = FakeCaptioner()
    check_records(work(tmp_path, captioner, 45, prompts), 45, prompts)
    assert captioner.encoded == 6 * len(prompts)  # each batch once
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert (counts.items, counts.of, counts.failed, counts.halved) == (45, 45, 5 * len(prompts), 0)
    assert counts.cost == pytest.approx(counts.of_cost)
    assert (counts.vision, counts.text) == (400, 80 * len(prompts))


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 6])
def test_out_of_memory_halves_batches(tmp_path: Path, max_rows: int) -> None:
    captioner = FakeCaptioner(max_rows)
    check_records(work(tmp_path, captioner, 45, ("p", "q")), 45, ("p", "q"))
    failed = [rows > max_rows for rows in captioner.batches]
    done = list(itertools.accumulate(0 if f else rows for f, rows in zip(failed, captioner.batches, strict=True)))
    # The first batch, of seven good items, finds the size that fits. No later batch is larger.
    assert failed[0] and not any(f for f, rows in zip(failed, done, strict=True) if rows >= 7)
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert counts.halved == sum(failed) and "halved" in summary([counts])


def test_one_row_too_large_is_an_error(tmp_path: Path) -> None:
    records = work(tmp_path, FakeCaptioner(0), 5)
    assert {record.error for record in records if record.key != "001.png"} == {"OutOfMemoryError: CUDA out of memory"}
    assert all(record.status == "error" and record.caption is None for record in records) and len(records) == 5


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"), RuntimeError("CUDA error: illegal memory access")]
)
def test_other_errors_of_the_model_stop_the_run(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(RuntimeError, match=str(error)):
        work(tmp_path, FakeCaptioner(3, error), 45)
    assert list(Journal(tmp_path).records()) == []


@pytest.mark.parametrize("slow", ["encode", "generate"])
def test_the_time_in_which_the_model_waits_is_counted(tmp_path: Path, slow: str) -> None:
    captioner = FakeCaptioner()
    quick = getattr(captioner, slow)
    setattr(captioner, slow, lambda *args: time.sleep(0.1) or quick(*args))
    work(tmp_path, captioner, 45)
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert counts.waited > 0.1 if slow == "encode" else counts.waited < 0.5 * counts.seconds


def test_one_item_that_the_processor_refuses_costs_no_other(tmp_path: Path) -> None:
    records = work(tmp_path, FakeCaptioner(refused=(4, 5, 30)), 45)
    refused = {record.key: record.error for record in records if "refused" in (record.error or "")}
    assert refused == dict.fromkeys(("004.png", "005.png", "030.png"), "IndexError: refused")
    assert len(records) == 45 and sum(record.status == "ok" for record in records) == 37


def test_progress_is_of_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Progress(tmp_path, 1, 2, of=30, of_cost=300)
    assert read_counts(tmp_path, 2) == [Counts(process=1, of=30, of_cost=300, seconds=pytest.approx(0, abs=1))]
    first = Progress(tmp_path, 0, 2, of=10, of_cost=100)
    other.add(items=6, cost=60.0, vision=600, text=60, failed=2)
    first.add(items=4, cost=40.0, vision=400, text=40)
    other.close()
    first.close()
    assert "waited" not in summary([first.counts]), "a cluster does not measure it"
    first.add(waited=1.0)
    other.add(waited=4.0)
    first.counts, other.counts = (replace(progress.counts, seconds=10.0) for progress in (first, other))
    assert state([first.counts, other.counts]) == "1.0 items/s, 100 vision and 10 text tokens/s, about 30 s left"
    text = summary([first.counts, other.counts])
    assert "10 items in 10.0 s: 1.00 items/s, 100 vision tokens/s, 10 text tokens/s; models waited" in text
    assert "for pictures 25% of the time" in text
    assert "process 1: 6 of 30 items in 10.0 s, 2 records failed" in text
    clear(tmp_path)
    assert read_counts(tmp_path, 2) == []
    assert "items/s" in capsys.readouterr().err
