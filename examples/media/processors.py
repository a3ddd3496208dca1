"""Load processors, and find out what they make of a picture's size."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PROCESSOR_MAPPING, AutoConfig, AutoProcessor, ProcessorMixin
from transformers.utils import is_torchvision_available

from media.pictures import Resize

__all__ = ["limit_pixels", "load_processor", "reduced", "vision_tokens"]


def load_processor(model_id: str, revision: str | None = None) -> ProcessorMixin:
    """Loads the processor of a model, padding on the left as generation needs it, with or without torchvision.

    Without torchvision transformers has no video processors, and cannot build a processor that contains one; so the
    same class is then loaded without that part. Its image processor is the Pillow one.
    """
    if is_torchvision_available():
        processor = AutoProcessor.from_pretrained(model_id, revision=revision)
    else:
        config = AutoConfig.from_pretrained(model_id, revision=revision)
        if type(config) not in PROCESSOR_MAPPING:
            raise ValueError(f"transformers knows no processor of pictures for {type(config).__name__}")

        class WithoutVideo(PROCESSOR_MAPPING[type(config)]):  # type: ignore[misc]
            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in super().get_attributes() if name != "video_processor"]

        processor = WithoutVideo.from_pretrained(model_id, revision=revision)
    processor.tokenizer.padding_side = "left"
    return processor


def reduced(processor: Any, slack: float = 1.0) -> Resize:
    """What pictures may be reduced to when they are decoded: the size that the processor makes of them, if it makes
    them smaller by more than `slack` times. Reduced so, a picture is resized no more."""
    images = processor.image_processor
    smart_resize = getattr(sys.modules[type(images).__module__], "smart_resize", None)  # each family's own

    def size(width: int, height: int) -> tuple[int, int] | None:
        if smart_resize is None:
            return None
        limits = dict(min_pixels=images.size["shortest_edge"], max_pixels=images.size["longest_edge"])
        factor = images.patch_size * images.merge_size
        try:
            found: tuple[int, int] = smart_resize(height, width, factor, **limits)
            if smart_resize(*found, factor, **limits) != found:
                return None
        except ValueError:  # an aspect ratio that it refuses
            return None
        smaller = found[0] <= height and found[1] <= width and found[0] * found[1] * slack < height * width
        return found[::-1] if smaller else None

    return size


def limit_pixels(processor: Any, least: int | None, most: int | None) -> None:
    """Has the processor resize pictures to at least and at most so many pixels, as Qwen's own settings do."""
    size = processor.image_processor.size
    limits = {"shortest_edge": least or size["shortest_edge"], "longest_edge": most or size["longest_edge"]}
    if limits["shortest_edge"] > limits["longest_edge"]:
        raise ValueError(
            f"--min-pixels {limits['shortest_edge']} is above --max-pixels {limits['longest_edge']}; name both: "
            "one may be the checkpoint's own"
        )
    if least or most:
        processor.image_processor.size = limits


def vision_tokens(processor: Any, width: int, height: int) -> int:
    """Merged tokens that the processor's own resize rule makes of a picture; 0 for a picture that it refuses."""
    images = processor.image_processor
    try:
        return int(images.get_number_of_image_patches(height, width, {})) // images.merge_size**2
    except ValueError:  # an aspect ratio that it refuses: an error record, later
        return 0
