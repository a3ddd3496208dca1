"""Bounds of memory, and captions of pictures that are reduced while they are decoded."""

from __future__ import annotations

import io
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from captioner import model as captioner_module
from captioner import worker
from captioner.batches import Task, memory_of
from captioner.items import Item
from captioner.model import Captioner, why_not_on_gpu
from captioner.pictures import Gate, read_image
from captioner.processors import limit_pixels, load_processor, reduced
from captioner.worker import prepared_ahead
from PIL import Image
from programs import CAPTIONERS, draw, encode
from read_once import load_once, read_once
from support.towers import alike
from support_captioning import MODEL, caption, captions_in
from torch.multiprocessing import start_processes
from transformers import ProcessorMixin


@pytest.fixture(scope="module")
def processor() -> ProcessorMixin:
    """Load the processor of a tiny captioner."""
    return load_processor(str(MODEL))


def peaks(*folders: Path) -> list[int]:
    """Caption the folders, one after the other, in a forked process. Return its peak memory after every run, in bytes.

    Linux counts the peak of a forked process from its own start. `getrusage` would count the peak of this one, too.
    """
    start_processes(_peaks, (folders,), nprocs=1, start_method="fork")
    return [int((folder / "peak").read_text()) for folder in folders]


def _peaks(_: int, folders: tuple[Path, ...]) -> None:
    for folder in folders:
        done = caption(folder, folder.with_name(f"{folder.name}-captions"), "--max-new-tokens=1")
        assert done.exit_code == 0, done.output
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        (folder / "peak").write_text(str(1024 * int(peak)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc reports the memory")
def test_photos_of_24_megapixels_are_decoded_one_by_one(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    Image.fromarray(noise).save(tmp_path / "one" / "small.png")
    Image.fromarray(noise).resize((6000, 4000)).save(tmp_path / "photo.jpg", quality=85)
    for index in range(8):  # together they would take 1.4 GB
        os.link(tmp_path / "photo.jpg", tmp_path / "many" / f"{index}.jpg")
    base, peak = peaks(tmp_path / "one", tmp_path / "many")
    assert 0 < peak - base < 0.8e9, f"{(peak - base) / 1e9:.1f} GB"


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_reduced_pictures_are_the_processors(family: str) -> None:
    """Pictures that are not decoded at a smaller scale have equal pixels, bit for bit."""
    processor = load_processor(str(CAPTIONERS / family))
    smaller = reduced(processor)
    chance = random.Random(0)
    exact = 0
    for _ in range(20):
        width = chance.randint(8, 1000)
        height = chance.randint(8, 1000)
        image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        read, size = read_image(io.BytesIO(encode(image, "BMP")), resize=smaller)
        assert size == (width, height)
        exact += read.size != size
        expected = processor.image_processor([image], return_tensors="pt")
        reduced_inputs = processor.image_processor([read], return_tensors="pt")
        assert torch.equal(expected["image_grid_thw"], reduced_inputs["image_grid_thw"])
        assert torch.equal(expected["pixel_values"], reduced_inputs["pixel_values"])
    assert exact > 5


def test_reduced_jpegs_are_nearly_the_processors(processor: ProcessorMixin) -> None:
    image = draw(5)[0].resize((2400, 1600), Image.Resampling.BICUBIC)
    for orientation, turn in ((1, None), (6, Image.Transpose.ROTATE_90)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = image if turn is None else image.transpose(turn)
        data = encode(stored, "JPEG", quality=95, exif=exif)
        read, size = read_image(io.BytesIO(data), resize=reduced(processor))
        assert size == (2400, 1600) and read.width * read.height <= 262144
        full, _ = read_image(io.BytesIO(data))
        expected = full.resize(read.size, Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(read).astype(int) - np.asarray(expected)).mean() < 1.5


def test_captions_of_large_photos_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_once(monkeypatch)
    (tmp_path / "photos").mkdir()
    for seed in range(12):
        image = draw(seed)[0]
        image = image.resize((image.width * 12, image.height * 12), Image.Resampling.BICUBIC)
        image.save(tmp_path / "photos" / f"{seed}.jpg", quality=92)
    caption(tmp_path / "photos", tmp_path / "o", "--max-pixels=50176")
    monkeypatch.setattr(worker, "reduced", lambda *_: lambda *_: None)
    caption(tmp_path / "photos", tmp_path / "whole", "--max-pixels=50176")
    assert captions_in(tmp_path / "o") == captions_in(tmp_path / "whole") and len(captions_in(tmp_path / "o")) == 12


def test_pictures_that_the_processor_refuses_or_enlarges_are_not_reduced(processor: ProcessorMixin) -> None:
    smaller = reduced(processor)
    assert smaller(3000, 4) is None and smaller(20, 20) is None and smaller(96, 96) is None
    assert smaller(143, 145) is None and smaller(145, 143) is None  # 128 x 160 has fewer pixels, but one larger side
    for target in ((20, 9), (9, 20)):  # a damaged file may hold a smaller picture than its header says
        picture = io.BytesIO(encode(Image.new("RGB", (10, 10)), "BMP"))
        assert read_image(picture, resize=Mock(return_value=target))[0].size == (10, 10)
    assert smaller(4000, 3000) is not None and reduced(processor, slack=100.0)(4000, 3000) is None


def test_pixels_are_limited_as_qwens_are() -> None:
    processor = load_processor(str(MODEL))
    limit_pixels(processor, None, None)
    assert dict(processor.image_processor.size) == {"shortest_edge": 16384, "longest_edge": 262144}
    limit_pixels(processor, None, 40_000)
    grid = processor.image_processor(Image.new("RGB", (600, 400)), return_tensors="pt")["image_grid_thw"][0]
    assert int(grid.prod()) * 16**2 <= 40_000
    with pytest.raises(ValueError, match="is above --max-pixels 40000"):
        limit_pixels(processor, 50_000, None)


def test_the_gate_bounds_the_memory_in_use() -> None:
    gate = Gate(100)
    in_use = 0
    largest_use = 0
    lock = threading.Lock()

    def take(size: int) -> None:
        nonlocal in_use, largest_use
        with gate(size):
            with lock:
                in_use += min(size, 100)
                largest_use = max(largest_use, in_use)
            time.sleep(0.002)
            with lock:
                in_use -= min(size, 100)

    chance = random.Random(0)
    threads = [threading.Thread(target=take, args=(chance.choice([10, 30, 60, 500]),)) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert largest_use <= 100 and in_use == 0 and gate.used == 0


def test_pictures_are_decoded_inside_a_quarter_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pictures of one reader pass one gate, with the memory that decoding them takes."""
    requests: list[tuple[int, int]] = []

    class CountingGate:
        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self, requested_bytes: int) -> AbstractContextManager[None]:
            requests.append((self.size, requested_bytes))
            return nullcontext()

    monkeypatch.setattr(worker, "Gate", CountingGate)
    Image.new("RGB", (10, 7)).save(tmp_path / "a.png")
    parts = (SimpleNamespace(processor=None), None, None)
    read = worker.Worker(*parts, process=0, run="", batch_tokens=1, batch_size=1, memory=4000).reader()
    for _ in range(2):
        assert not read(Task(item=Item(key="a", file=str(tmp_path / "a.png")), prompts=("p",), tokens=1)).failed
    assert requests == [(1000, 10 * 7 * 4 * 2)] * 2


def test_batches_ahead_are_bounded_and_in_order() -> None:
    making = [0]
    largest = [0]
    lock = threading.Lock()

    def prepare(batch: int) -> int:
        with lock:
            making[0] += 1
            largest[0] = max(largest[0], making[0])
        time.sleep(0.002 * (batch % 3))
        return batch

    for memory, at_most in ((1000, 5), (250, 3), (10, 1)):
        making[0] = largest[0] = 0
        yielded = []
        for batch in prepared_ahead(range(30), prepare, lambda _: (100, 100), memory):
            making[0] -= 1
            yielded.append(batch)
        assert yielded == list(range(30)) and largest[0] <= at_most, memory


def test_the_memory_of_a_task_is_of_its_reduced_size() -> None:
    def task(tokens: int, pixels: int = 0, kind: str = "image") -> Task:
        return Task(item=Item(key="a", file="a", kind=kind), prompts=("p",), tokens=tokens, pixels=pixels)

    assert memory_of(task(tokens=256, pixels=24_000_000), 1024) == (60 * 256 * 1024, 27 * 256 * 1024)
    assert memory_of(task(tokens=0, pixels=1000), 1024) == (60_000, 27_000)  # the number of its tokens is unknown
    assert memory_of(task(tokens=8192, kind="video"), 1024)[0] == 1 << 30


# --- the processor ---------------------------------------------------------------------------------------------------


def test_why_pictures_are_not_prepared_on_the_gpu(processor: ProcessorMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    cpu = torch.device("cpu")
    fast = SimpleNamespace(image_processor=SimpleNamespace(backend="torchvision"))
    monkeypatch.setattr(captioner_module, "is_torchvision_available", lambda: False)
    assert why_not_on_gpu(fast, cpu) == ["the model is on cpu", "it needs torchvision (pip install torchvision)"]
    monkeypatch.setattr(captioner_module, "is_torchvision_available", lambda: True)
    assert why_not_on_gpu(fast, cuda) == []
    slow = SimpleNamespace(image_processor=SimpleNamespace(backend="pil"))
    assert "runs on the CPU only" in why_not_on_gpu(slow, cuda)[0]


def test_pixels_are_in_the_models_dtype_and_shared_by_prompts(processor: ProcessorMixin) -> None:
    model = load_once(str(MODEL), torch.bfloat16, torch.device("cpu"))
    captioner = Captioner(model, processor)
    image = draw(1)[0]
    inputs = [captioner.encode([image], [prompt]) for prompt in ("describe this picture .", "is the text above ?")]
    assert inputs[0]["pixel_values"].dtype == torch.bfloat16
    sent = captioner.send(inputs)
    assert sent[0]["pixel_values"] is sent[1]["pixel_values"] and "arrived" not in sent[0]
    assert not torch.equal(sent[0]["input_ids"], sent[1]["input_ids"]) and captioner.send([]) == []
    text_inputs = processor(text=[" "], images=None, return_tensors="pt")
    assert "pixel_values" not in text_inputs


def test_a_full_gpu_has_pictures_prepared_on_the_cpu(
    processor: ProcessorMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    captioner = Captioner(load_once(str(MODEL), torch.float32, torch.device("cpu")), processor)
    captioner.pictures_on = torch.device("cuda")
    devices = []

    def process(media: object, prompts: object, device: torch.device) -> dict[str, torch.Tensor]:
        devices.append(device.type)
        if device.type == "cuda":
            raise torch.OutOfMemoryError
        return {"pixel_values": torch.zeros(4, 8), "input_ids": torch.zeros(1, 2)}

    monkeypatch.setattr(captioner, "_process", process)
    assert captioner.encode([draw(1)[0]], ["p"])["pixel_values"].shape == (4, 8) and devices == ["cuda", "cpu"]


def test_pixels_are_rounded_on_the_stream_that_made_them(
    processor: ProcessorMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    captioner = Captioner(load_once(str(MODEL), torch.bfloat16, torch.device("cpu")), processor)
    beside: list[str] = []

    @contextmanager
    def watch() -> Iterator[None]:
        beside.append("in")
        yield
        beside.append("out")

    class Pixels:
        def to(self, dtype: torch.dtype) -> Pixels:
            beside.append(str(dtype))
            return self

    monkeypatch.setattr(captioner, "_own_stream", watch)
    monkeypatch.setattr(captioner, "_process", lambda *_: {"pixel_values": Pixels()})
    captioner.encode([draw(1)[0]], ["p"])
    assert beside == ["in", "torch.bfloat16", "out"]


def test_the_device_reaches_the_image_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    class Stub:
        def apply_chat_template(self, *_: object, **__: object) -> str:
            return "text"

        def __call__(self, **kwargs: object) -> dict[str, torch.Tensor]:
            devices.append(kwargs.get("device"))
            return {"pixel_values": torch.zeros(1)}

    captioner = Captioner(load_once(str(MODEL), torch.float32, torch.device("cpu")), Stub())
    captioner.encode([draw(1)[0]], ["p"])
    captioner.pictures_on = torch.device("meta")
    captioner.encode([draw(1)[0]], ["p"])
    assert devices == [None, torch.device("meta")]
