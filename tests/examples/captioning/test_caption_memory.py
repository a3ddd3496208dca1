"""Bounds of memory, and captions of pictures that are reduced while they are decoded."""

import io
import os
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from captioner import model as model_module
from captioner import pictures, worker
from captioner.batches import Bounds
from captioner.model import Captioner
from captioner.pictures import read_image
from captioner.processors import limit_pixels, load_processor, reduced
from PIL import Image
from programs import CAPTIONERS, draw, encode
from support.towers import alike
from support_captioning import FAMILIES, MODEL, caption, load_once
from torch.multiprocessing import start_processes
from transformers import ProcessorMixin

import hf_vit_accel


@pytest.fixture(scope="module")
def processor() -> ProcessorMixin:
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
def test_photos_of_24_megapixels_are_decoded_at_a_smaller_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_DECODERS", 8)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    Image.new("RGB", (60, 40), "red").save(tmp_path / "one" / "small.png")
    Image.new("RGB", (6000, 4000), "red").save(tmp_path / "photo.jpg")
    for index in range(8):  # together they would take 1.4 GB
        os.link(tmp_path / "photo.jpg", tmp_path / "many" / f"{index}.jpg")
    base, peak = peaks(tmp_path / "one", tmp_path / "many")
    assert 0 < peak - base < 0.8e9, f"{(peak - base) / 1e9:.1f} GB"


def test_few_large_pictures_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [0]
    largest = [0]

    def convert(image: Image.Image) -> Image.Image:
        inside[0] += 1
        largest[0] = max(largest[0], inside[0])
        time.sleep(0.005)
        inside[0] -= 1
        return image

    monkeypatch.setattr(pictures, "to_rgb", convert)
    monkeypatch.setattr(pictures, "LARGE", 100)
    data = encode(Image.new("RGB", (20, 20)))
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda _: read_image(io.BytesIO(data))[1], range(16)))
    assert sizes == [(20, 20)] * 16 and 1 <= largest[0] <= 4


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


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_memory_is_planned_from_what_is_free(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's keys, values, pixels and features, as the model itself makes them."""
    folder = str(CAPTIONERS / family)
    model = load_once(folder, torch.float32, torch.device("cpu"))
    captioner = Captioner(model, load_processor(folder), patching={}, max_new_tokens=80)
    assert captioner.bounds() == Bounds(items=64, tokens=16384, new_tokens=80)
    inputs = captioner.encode([draw(1, FAMILIES[family])[0]], ["describe this picture ."])
    cache = model(**inputs).past_key_values
    hf_vit_accel.unpatch(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    vision_tokens = captioner.vision_tokens(inputs)
    if model_module._TAKES_FEATURES:  # `graphed_decoding` plans the keys
        waits = captioner.bounds()
        assert (waits.items, waits.nbytes, waits.tokens, waits.slot_bytes) == (1024, 350, sys.maxsize, 0)
        assert waits.token_bytes > 2 * inputs["pixel_values"].nbytes / vision_tokens
    captioner.max_new_tokens = 2000
    assert captioner.bounds().slot_bytes > 0, "rows of so many tokens do not wait"
    captioner.max_new_tokens, captioner.temperature = 80, 0.7
    bounds = captioner.bounds()
    keys_and_values = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert bounds.slot_bytes == keys_and_values / inputs["input_ids"].numel()
    assert (bounds.items, bounds.nbytes, bounds.tokens) == (256, 700, sys.maxsize)
    assert bounds.new_tokens == 80 and captioner.bounds(9).items == 9
    captioner.patching = None
    assert captioner.bounds() == Bounds(items=64, tokens=16384, new_tokens=80), "stock"


# --- the processor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(70, 40), (40, 70), (33, 33)])
def test_bytes_for_the_gpu_give_the_pixels_of_the_picture(size: tuple[int, int], processor: ProcessorMixin) -> None:
    image = draw(3)[0].resize(size)
    bytes_HW3 = torch.from_numpy(np.array(image))
    captioner = Captioner(SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), processor, patching=None)
    expected = captioner.encode([image], ["a prompt"])
    inputs = captioner.encode([bytes_HW3], ["a prompt"])
    assert all(torch.equal(inputs[name], expected[name]) for name in expected)


def test_a_batch_and_its_parts_are_what_the_processor_makes(
    processor: ProcessorMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captioner pads tokens itself; where the GPU has no memory to join parts, the CPU joins them."""
    captioner = Captioner(SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), processor, patching=None)
    images = [draw(2)[0].resize(size) for size in ((224, 112), (70, 40), (33, 33), (64, 96))]
    prompts = ["describe this picture .", "is the text above ?", "describe this picture .", "describe ."]
    texts = []
    for prompt in prompts:
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
        texts.append(processor.apply_chat_template([message], add_generation_prompt=True))
    expected = processor(text=texts, images=images, padding=True, return_tensors="pt")
    parts = [captioner.encode(images[begin:end], prompts[begin:end]) for begin, end in ((0, 1), (1, 3), (3, 4))]
    assert len({part["input_ids"].shape[1] for part in parts}) > 1 and not expected["attention_mask"].all()
    batches = [captioner.encode(images, prompts)]
    full = Mock(side_effect=[torch.OutOfMemoryError, *[None] * 9])
    for cat in (torch.cat, lambda values: full() or torch.concatenate(values)):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "cat", cat)
            batches += captioner.send([parts])
    assert full.call_count == 1 + len(expected)
    for batch in batches:
        assert batch.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(batch[name], value) and batch[name].dtype == value.dtype, name


def test_pixels_are_in_the_models_dtype_and_shared_by_prompts(processor: ProcessorMixin) -> None:
    model = load_once(str(MODEL), torch.bfloat16, torch.device("cpu"))
    captioner = Captioner(model, processor, patching=None)
    image = draw(1)[0]
    inputs = [captioner.encode([image], [prompt]) for prompt in ("describe this picture .", "is the text above ?")]
    assert inputs[0]["pixel_values"].dtype == torch.bfloat16
    sent = captioner.send([[part] for part in inputs])
    assert sent[0]["pixel_values"] is sent[1]["pixel_values"]
    assert not torch.equal(sent[0]["input_ids"], sent[1]["input_ids"])


def test_pixels_are_complete_where_texts_find_no_memory(
    processor: ProcessorMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model reads them on another stream than the one that makes them."""
    captioner = Captioner(SimpleNamespace(device=torch.device("cuda")), processor, patching=None)
    captioner._side_stream = Mock()
    monkeypatch.setattr(captioner, "_own_stream", nullcontext)
    monkeypatch.setattr(captioner, "_move", Mock(side_effect=torch.OutOfMemoryError))
    inputs = {"pixel_values": torch.zeros(4, 8), "input_ids": torch.zeros(1, 2)}
    (sent,) = captioner.send([[inputs]])
    assert all(sent[name] is inputs[name] for name in inputs)
    captioner._side_stream.synchronize.assert_called_once_with()
