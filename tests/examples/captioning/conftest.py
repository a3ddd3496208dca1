"""Provide pictures, an output folder and models that load once to the tests of captioning."""

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import scenes
from captioner import checkpoints
from captioner.model import Caption, Captioner, Inputs
from support_captioning import WORDS, batch_caption, config_once, load_once, load_processor_once, put


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every checkpoint once, and draw short captions from pixels and prompt: these tests are about files."""
    monkeypatch.setattr(batch_caption, "load_model", load_once)
    monkeypatch.setattr(batch_caption, "load_processor", load_processor_once)
    monkeypatch.setattr(checkpoints, "config_of", config_once)
    generate = Captioner.generate

    features_of = Captioner.features_of

    def encode_pictures(captioner: Captioner, inputs: Inputs) -> object:
        return features_of(captioner, inputs) if captioner.max_new_tokens > WORDS else None

    def draw_captions(captioner: Captioner, inputs: Inputs, seeds: Sequence[int]) -> list[Caption]:
        count = captioner.max_new_tokens
        if count > WORDS:
            return generate(captioner, inputs, seeds)
        captions = []
        pixels_by_row = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(1).tolist())
        for pixels, ids, mask in zip(pixels_by_row, inputs["input_ids"], inputs["attention_mask"], strict=True):
            seen = pixels.numpy().tobytes() + ids[mask.bool()].numpy().tobytes()
            words = random.Random(zlib.crc32(seen)).choices(scenes.WORDS, k=count)
            captions.append(Caption(" ".join(words), count))
        return captions

    monkeypatch.setattr(Captioner, "features_of", encode_pictures)
    monkeypatch.setattr(Captioner, "generate", draw_captions)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Draw three scenes, one of them in a subfolder."""
    put(tmp_path / "photos", "a.png", "b.png", "0/c.png")
    return tmp_path / "photos"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "captions"
