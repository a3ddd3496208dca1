"""The worker, with a captioner that needs no model: every record once, whatever fails."""

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from captioner import worker as worker_module
from captioner.batches import Bounds, Task
from captioner.items import Item
from captioner.journal import Journal, Record
from captioner.model import Caption, Inputs
from captioner.progress import Progress
from captioner.worker import Worker
from PIL import Image
from programs import encode


class FakeCaptioner:
    """Caption pictures by their red values. More than `max_rows` rows at once exceed the memory."""

    prepares_on_gpu = False

    def __init__(self, max_rows: int = 1 << 30, error: Exception | None = None, refused: tuple[int, ...] = ()) -> None:
        self.max_rows = max_rows
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.refused = refused
        self.batches: list[int] = []
        self.encoded = 0
        self.processor = None
        self.progress: Progress | None = None  # of the last run

    def seed_of(self, key: str, prompt: str) -> int:
        return 0

    def encode(self, media: Sequence[Image.Image], prompts: Sequence[str]) -> Inputs:
        self.encoded += 1
        red = [image.getpixel((0, 0))[0] for image in media]
        if set(red) & set(self.refused):
            raise IndexError("refused")
        return {"input_ids": red, "prompts": list(prompts), "pixel_values": red}

    def send(self, parts_by_prompt: Sequence[Sequence[Inputs]]) -> list[Inputs]:
        joined = []
        assert not any("pixel_values" in part for parts in parts_by_prompt[1:] for part in parts), "held twice"
        for parts in parts_by_prompt:
            joined.append({name: [value for part in parts for value in part[name]] for name in parts[0]})
        return joined

    def vision_tokens(self, inputs: Inputs) -> int:
        return 10 * len(inputs["input_ids"])

    def features_of(self, inputs: Inputs) -> None:
        return None

    def join_features(self, parts: list[None]) -> None:
        parts.clear()

    def generate(self, inputs: Inputs, seeds: Sequence[int]) -> list[Caption]:
        self.batches.append(len(seeds))
        if len(seeds) > self.max_rows:
            raise self.error
        pairs = zip(inputs["prompts"], inputs["input_ids"], strict=True)
        return [Caption(f"{prompt}{red}", 2) for prompt, red in pairs]

    def free_graphs(self) -> bool:
        return False


def work(
    tmp_path: Path, captioner: FakeCaptioner, count: int, prompts: Sequence[str] = ("p",), **options: float
) -> list[Record]:
    """Return the records that a worker writes for pictures of 10 tokens. Numbers 1, 11, 21 and so on are unreadable."""
    tasks = []
    for index in range(count):
        name = f"{index:03d}.png"
        (tmp_path / name).write_bytes(b"bad" if index % 10 == 1 else encode(Image.new("RGB", (4, 4), (index, 0, 0))))
        item = Item(key=name, file=str(tmp_path / name))
        tasks.append(Task(item=item, prompts=tuple(prompts), tokens=10))
    progress = Progress(count, 10 * count, begin=0.0, is_shown=False)
    bounds = Bounds(**({"items": 8, "tokens": 100} | options))
    captioner.progress = progress
    Worker(captioner, Journal(tmp_path), progress, process=0, run="r", bounds=bounds).work(tasks)
    return Journal(tmp_path).records()


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
    counts = captioner.progress.counts
    assert counts == {"items": 45, "failed": 5 * len(prompts), "vision": 400, "text": 80 * len(prompts)}
    assert "45 of 45 items in" in captioner.progress.summary() and "halved" not in captioner.progress.summary()


@pytest.mark.parametrize("part_tokens", [worker_module._PART_TOKENS, 1], ids=["one part", "several parts"])
def test_items_that_the_processor_refuses_cost_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_tokens: int
) -> None:
    """Of several parts one has nothing but unreadable pictures, and others have pictures that are refused."""
    monkeypatch.setattr(worker_module, "_PART_TOKENS", part_tokens)
    captioner = FakeCaptioner(refused=(4, 5, 30))
    records = work(tmp_path, captioner, 45, ("p", "q"))
    refused = {record.key: record.error for record in records if "refused" in (record.error or "")}
    assert refused == dict.fromkeys(("004.png", "005.png", "030.png"), "IndexError: refused")
    captions = {(record.key, record.prompt): record.caption for record in records}
    good = [index for index in range(45) if index % 10 != 1 and index not in captioner.refused]
    expected = {(f"{index:03d}.png", prompt): f"{prompt}{index}" for index in good for prompt in ("p", "q")}
    assert {key: caption for key, caption in captions.items() if caption} == expected
    assert len(captions) == len(records) == 90 and len(captioner.batches) == 12


class Pixels(list[int]):
    """Can be referred to weakly, as tensors can."""


class CountingCaptioner(FakeCaptioner):
    """Count the parts of batches whose pixels are held while captions are generated."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels: list[weakref.ref[Pixels]] = []
        self.held: list[int] = []

    def encode(self, media: Sequence[Image.Image], prompts: Sequence[str]) -> Inputs:
        inputs = super().encode(media, prompts)
        pixels = Pixels(inputs["pixel_values"])
        self.pixels.append(weakref.ref(pixels))
        return inputs | {"pixel_values": pixels}

    def generate(self, inputs: Inputs, seeds: Sequence[int]) -> list[Caption]:
        self.held.append(sum(pixels() is not None for pixels in self.pixels))
        return super().generate(inputs, seeds)


def test_pixels_of_parts_are_not_held_beside_those_of_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_PART_TOKENS", 20)
    captioner = CountingCaptioner()
    work(tmp_path, captioner, 24, items=24, tokens=1000)
    assert captioner.held == [0] and len(captioner.pixels) > 9


@pytest.mark.parametrize("max_rows", [1, 5])
def test_out_of_memory_halves_batches(tmp_path: Path, max_rows: int) -> None:
    captioner = FakeCaptioner(max_rows)
    records = work(tmp_path, captioner, 45, ("p", "q"))
    assert len({(record.key, record.prompt) for record in records}) == len(records) == 90
    assert sum(record.status == "ok" for record in records) == 80
    failed = [rows > max_rows for rows in captioner.batches]
    # The first batch finds the size that fits. Only the batches that were ready before are larger.
    assert failed[0] and max(captioner.batches[-8:]) <= max_rows
    assert captioner.progress.counts["halved"] == sum(failed) and "halved" in captioner.progress.summary()


def test_out_of_memory_halves_the_planned_memory(tmp_path: Path) -> None:
    """Batches that memory alone bounds: 32 rows of 10 tokens fit by the plan, and 6 on the GPU."""
    captioner = FakeCaptioner(6)
    plan = {"items": 256, "tokens": 1 << 40, "nbytes": 32 * 1530, "slot_bytes": 4, "token_bytes": 20}
    records = work(tmp_path, captioner, 200, **plan)
    assert sum(record.status == "ok" for record in records) == 180
    assert captioner.batches[0] > 20 and max(captioner.batches[-8:]) <= 6


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
    assert Journal(tmp_path).records() == []
