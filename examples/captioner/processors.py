"""Load processors, set their pixel limits, and compute what they make of a picture's size."""

from __future__ import annotations

import sys

from transformers import PROCESSOR_MAPPING, AutoConfig, AutoProcessor, ProcessorMixin
from transformers.utils import is_torchvision_available

from captioner.pictures import Resize


def load_processor(model_id: str, revision: str | None = None) -> ProcessorMixin:
    """Load the processor of a model, with or without torchvision. It pads on the left, as generation needs.

    Without torchvision, transformers has no video processors and cannot build a processor that contains one.
    The same class is then loaded without that part, and with the Pillow image processor.
    """
    if is_torchvision_available():
        processor = AutoProcessor.from_pretrained(model_id, revision=revision)
    else:
        config = AutoConfig.from_pretrained(model_id, revision=revision)

        class WithoutVideo(PROCESSOR_MAPPING[type(config)]):  # type: ignore[misc]
            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in super().get_attributes() if name != "video_processor"]

        processor = WithoutVideo.from_pretrained(model_id, revision=revision)
    if processor.chat_template is None and processor.tokenizer.chat_template is None:
        raise ValueError("its files hold no chat template, so no prompt can be written; models for chats have one")
    processor.tokenizer.padding_side = "left"
    return processor


def reduced(processor: ProcessorMixin, slack: float = 1.0) -> Resize:
    """Return a function from a picture's size to the smaller size that the processor resizes it to.

    A picture that is decoded at that size is not resized again. The function returns None to keep a picture.
    """
    images = processor.image_processor
    smart_resize = getattr(sys.modules[type(images).__module__], "smart_resize", None)  # every family has its own

    def smaller_size(width: int, height: int) -> tuple[int, int] | None:
        if smart_resize is None:
            return None
        limits = dict(min_pixels=images.size["shortest_edge"], max_pixels=images.size["longest_edge"])
        factor = images.patch_size * images.merge_size
        try:
            new_height, new_width = smart_resize(height, width, factor, **limits)
            is_stable = smart_resize(new_height, new_width, factor, **limits) == (new_height, new_width)
        except ValueError:  # the processor refuses this aspect ratio
            return None
        is_smaller = new_height <= height and new_width <= width and new_height * new_width * slack < height * width
        return (new_width, new_height) if is_stable and is_smaller else None

    return smaller_size


def limit_pixels(processor: ProcessorMixin, min_pixels: int | None, max_pixels: int | None) -> None:
    """Bound the pixels that the processor resizes pictures to, as Qwen's own settings of these names do."""
    size = processor.image_processor.size
    limits = {
        "shortest_edge": min_pixels or size["shortest_edge"],
        "longest_edge": max_pixels or size["longest_edge"],
    }
    if limits["shortest_edge"] > limits["longest_edge"]:
        raise ValueError(
            f"--min-pixels {limits['shortest_edge']} is above --max-pixels {limits['longest_edge']}; name both, "
            "since one of them may be the checkpoint's own"
        )
    if min_pixels or max_pixels:
        processor.image_processor.size = limits


def vision_tokens(processor: ProcessorMixin, width: int, height: int) -> int:
    """Return the merged tokens that the processor's resize rule makes of a picture. ValueError if it refuses one."""
    images = processor.image_processor
    return int(images.get_number_of_image_patches(height, width, {})) // images.merge_size**2
