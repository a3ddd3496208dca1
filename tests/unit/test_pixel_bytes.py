"""Pixels that reach the model as bytes: the tower computes what the processor would have, or the call is refused."""

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import TINY, all_equal, assert_close, chat_inputs, outputs_of, tower_of

import hf_vit_accel

IMAGE_SIZES = [(112, 84), (56, 140)]


def pil_processor(kind: str = "image") -> Any:
    """Return a processor of transformers that needs no torchvision, with the patches of the tiny towers."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    base: Any = module.Qwen2VLImageProcessorPil

    class ByteProcessor(base):
        """As torchvision's backend: bytes stay bytes where they are neither rescaled nor normalised."""

        def preprocess(self, *args: Any, **kwargs: Any) -> Any:
            output = super().preprocess(*args, **kwargs)
            flags = [kwargs.get(name, getattr(self, name)) for name in ("do_rescale", "do_normalize")]
            if not any(flags):
                output["pixel_values"] = output["pixel_values"].to(torch.uint8)
            return output

    return ByteProcessor(patch_size=4, min_pixels=16, max_pixels=1 << 16)


def torchvision_processor() -> Any:
    """Return transformers' own, whose backend returns bytes."""
    pytest.importorskip("torchvision")
    return transformers.Qwen2VLImageProcessor(patch_size=4, min_pixels=16, max_pixels=1 << 16)


class VideoProcessor:
    """A video processor that needs no torchvision: every row has a patch of a frame, and of the next frame."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self) -> None:
        self._of_frames = pil_processor()
        for name in ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std"):
            setattr(self, name, getattr(self._of_frames, name))

    def __call__(self, videos: list[np.ndarray], do_sample_frames: bool = True, **options: Any) -> dict[str, Any]:
        rows = []
        grid = []
        for frames in videos:
            flags = {name: bool(options.get(name, getattr(self, name))) for name in ("do_rescale", "do_normalize")}
            batch = self._of_frames(images=list(frames), return_tensors="pt", **flags)
            # Of an image both frames of a row are the same.
            patches = batch["pixel_values"].reshape(len(frames), -1, 3, 2, 4, 4)[:, :, :, 0]
            rows.append(torch.stack([patches[::2], patches[1::2]], dim=3).flatten(0, 1).flatten(1))
            _, height, width = batch["image_grid_thw"][0].tolist()
            grid.append([len(frames) // 2, height, width])
        return {"pixel_values_videos": torch.cat(rows), "video_grid_thw": torch.tensor(grid)}


def torchvision_video_processor() -> Any:
    """Return transformers' own."""
    pytest.importorskip("torchvision")
    return transformers.Qwen2VLVideoProcessor(patch_size=4, min_pixels=16, max_pixels=1 << 16)


@pytest.fixture(params=[pil_processor, torchvision_processor])
def processor(request: pytest.FixtureRequest) -> Any:
    return request.param()


def pictures(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in IMAGE_SIZES]


def tower_inputs(processor: Any, seed: int = 0, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch = processor(images=pictures(seed), return_tensors="pt", **options)
    return batch["pixel_values"], batch["image_grid_thw"]


@torch.no_grad()
def features(tower: Any, processor: Any) -> list[torch.Tensor]:
    pixels, grid = tower_inputs(processor)
    return outputs_of(tower(pixels.to(tower.dtype) if pixels.dtype != torch.uint8 else pixels, grid_thw=grid))


def test_a_model_that_normalises_equals_the_processor(model: Any, processor: Any) -> None:
    _, grid = tower_inputs(processor)
    inputs = chat_inputs(model, [tuple(sizes) for sizes in grid.tolist()])
    with torch.no_grad():
        expected = model(**inputs | {"pixel_values": tower_inputs(processor)[0]}).logits
        hf_vit_accel.patch(model, processor=processor)
        pixels, _ = tower_inputs(processor)
        actual = model(**inputs | {"pixel_values": pixels}).logits
    assert pixels.dtype == torch.uint8
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    [status] = hf_vit_accel.status(model).towers
    assert status.calls == 1 and not status.stock_calls


@pytest.mark.parametrize("make_videos", [VideoProcessor, torchvision_video_processor])
def test_bytes_of_videos_equal_what_their_processor_normalises(model: Any, make_videos: Any) -> None:
    """Beside a picture. Frames differ, so that no channel or frame may take the place of another."""
    both = SimpleNamespace(image_processor=pil_processor(), video_processor=make_videos())
    rng = np.random.default_rng(1)
    videos = [rng.integers(0, 256, (frames, 32, 40, 3), dtype=np.uint8) for frames in (4, 6)]

    def inputs(**flags: bool) -> dict[str, torch.Tensor]:
        pixels, grid = tower_inputs(both.image_processor, **flags)
        rows = dict(both.video_processor(videos=videos, return_tensors="pt", do_sample_frames=False, **flags))
        grids = [tuple(sizes) for sizes in (*grid.tolist(), *rows["video_grid_thw"].tolist())]
        return chat_inputs(model, grids) | {"pixel_values": pixels, **rows}

    with torch.no_grad():
        expected = model(**inputs()).logits
        hf_vit_accel.patch(model)
        in_bytes = inputs(do_rescale=False, do_normalize=False)
        with pytest.raises(ValueError, match="got bytes"):
            model.get_video_features(in_bytes["pixel_values_videos"], in_bytes["video_grid_thw"])
        hf_vit_accel.patch(model, processor=both)
        now_in_bytes = inputs()
        actual = model(**now_in_bytes).logits
    for name in ("pixel_values", "pixel_values_videos"):
        assert torch.equal(now_in_bytes[name], in_bytes[name]) and in_bytes[name].dtype == torch.uint8
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    [status] = hf_vit_accel.status(model).towers
    assert status.calls == 2 and not status.stock_calls


def test_the_stock_way_gets_normalised_pixels(model: Any, processor: Any) -> None:
    tower = tower_of(model)
    expected = features(tower, processor)
    hf_vit_accel.patch(model, processor=processor)
    tower.rotary_pos_emb.register_forward_hook(lambda *_: None)
    assert_close(features(tower, processor), expected, 1e-4)
    [status] = hf_vit_accel.status(model).towers
    assert status.stock_calls == 1


def test_bytes_are_refused_without_their_processor(model: Any, processor: Any) -> None:
    """Stock computes nonsense: values up to 255 stand where -1.8 to 2.2 are expected."""
    pixels, grid = tower_inputs(processor, do_rescale=False, do_normalize=False)
    hf_vit_accel.patch(model)
    inputs = chat_inputs(model, [tuple(sizes) for sizes in grid.tolist()]) | {"pixel_values": pixels}
    for call in (
        lambda: tower_of(model)(pixels, grid_thw=grid),
        lambda: model(**inputs),
        lambda: model.get_image_features(pixels, grid),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match="got bytes"):
            call()


def test_normalised_pixels_are_refused_where_bytes_are_expected(model: Any, processor: Any) -> None:
    """Another processor than the one that `patch` was given, or pixels that a dataset has kept."""
    pixels, grid = tower_inputs(processor)
    hf_vit_accel.patch(model, processor=processor)
    with torch.no_grad(), pytest.raises(ValueError, match="negative pixel values"):
        tower_of(model)(pixels, grid_thw=grid)


def test_the_processor_is_set_back(model: Any, processor: Any) -> None:
    expected = tower_inputs(processor)[0]
    other = copy.deepcopy(processor)
    hf_vit_accel.patch(model, processor=processor)
    hf_vit_accel.patch(model, processor=processor)
    hf_vit_accel.unpatch(model)
    assert torch.equal(tower_inputs(processor)[0], expected)
    hf_vit_accel.patch(model, processor=processor)
    hf_vit_accel.patch(model, processor=other)
    assert torch.equal(tower_inputs(processor)[0], expected)
    hf_vit_accel.patch(model)
    assert torch.equal(tower_inputs(other)[0], expected)
    with hf_vit_accel.patched(model, processor=processor):
        assert tower_inputs(processor)[0].dtype == torch.uint8
        with hf_vit_accel.patched(model):
            assert torch.equal(tower_inputs(processor)[0], expected)
        assert tower_inputs(processor)[0].dtype == torch.uint8
    assert torch.equal(tower_inputs(processor)[0], expected)
    assert (processor.do_rescale, processor.do_normalize) == (True, True)


def test_a_saved_processor_normalises(model: Any, tmp_path: Path) -> None:
    """transformers' Trainer saves its processor beside each checkpoint (`Trainer._save`)."""
    processor = pil_processor()
    expected = tower_inputs(processor)[0]
    hf_vit_accel.patch(model, processor=processor)
    processor.save_pretrained(tmp_path)
    flags = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert flags["do_rescale"] and flags["do_normalize"]
    loaded = type(processor).from_pretrained(tmp_path)
    assert torch.equal(tower_inputs(loaded)[0], expected)


def test_a_copy_of_the_model_takes_bytes_too(model: Any, processor: Any) -> None:
    hf_vit_accel.patch(model, processor=processor)
    expected = features(tower_of(model), processor)
    assert all_equal(features(tower_of(copy.deepcopy(model)), processor), expected)
    assert all_equal(features(tower_of(pickle.loads(pickle.dumps(model))), processor), expected)


def refused() -> dict[str, tuple[Any, str]]:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

    class Gamma(type(pil_processor())):  # type: ignore[misc]
        def preprocess(self, *args: Any, **kwargs: Any) -> Any:
            output = super().preprocess(*args, **kwargs)
            if output["pixel_values"].dtype != torch.uint8:
                output["pixel_values"] = output["pixel_values"].abs().sqrt()
            return output

    class Both:
        image_processor = pil_processor()
        video_processor = pil_processor()

    Both.video_processor.image_mean = [0.1, 0.2, 0.3]
    raw = pil_processor()
    raw.do_normalize = False
    return {
        "no bytes": (module.Qwen2VLImageProcessorPil(), "returns no bytes"),
        "a curve": (Gamma(patch_size=4), "does more than"),
        "two means": (Both(), "images and videos are normalised differently"),
        "raw already": (raw, "is set to leave that out"),
        "a tokenizer": (object(), "expected processor to be the model's processor"),
    }


@pytest.mark.parametrize("case", ["no bytes", "a curve", "two means", "raw already", "a tokenizer"])
def test_other_processors_are_refused(case: str) -> None:
    model = TINY["qwen3_vl"].build()
    bad, message = refused()[case]
    with pytest.raises(ValueError, match=message):
        hf_vit_accel.patch(model, processor=bad)
    assert not hf_vit_accel.status(model).towers[0].patched
