"""What items cost, who captions which, and in what batches: pure functions of sizes."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from captioning.pictures import Resize, upright_size
from captioning.sources import Item, open_item

__all__ = [
    "VIDEO_TOKENS",
    "Task",
    "cost",
    "header_of",
    "limit_pixels",
    "memory_of",
    "pack",
    "reduced",
    "spread",
    "vision_tokens",
]

VIDEO_TOKENS = 8192
"""Merged tokens that a video is taken for before it is decoded: a video is a batch of its own."""
VIDEO_BYTES = 1 << 30
"""What a video is taken for while it is decoded ahead: its frames are not known before."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An item with the prompts it still needs. tokens, pixels: merged vision tokens and pixels, from the header."""

    item: Item
    prompts: tuple[str, ...]
    tokens: int
    pixels: int = 0


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


def memory_of(task: Task, unit: int) -> tuple[int, int]:
    """Bytes of a task on its way to the model: most while it is made ready, and then. unit: pixels of a merged token.

    Ready, a pixel is 3 bytes of the picture and 24 of patches (fp32, two frames); on the way copies of both.
    """
    if task.item.kind == "video":
        return VIDEO_BYTES, VIDEO_BYTES
    pixels = task.tokens * unit or task.pixels
    return 60 * pixels, 27 * pixels


def vision_tokens(processor: Any, width: int, height: int) -> int:
    """Merged tokens that the processor's own resize rule makes of a picture; 0 for a picture that it refuses."""
    images = processor.image_processor
    try:
        return int(images.get_number_of_image_patches(height, width, {})) // images.merge_size**2
    except ValueError:  # an aspect ratio that it refuses: an error record, later
        return 0


def header_of(item: Item, processor: Any, refuse_above: int) -> tuple[int, int]:
    """Merged vision tokens and pixels, from the header; 0 for what cannot be read."""
    if item.kind == "video":
        return VIDEO_TOKENS, 0
    try:
        with open_item(item) as file:
            width, height = upright_size(file, refuse_above)
            return vision_tokens(processor, width, height), width * height
    except Exception:  # it is decoded later all the same, and its error recorded
        return 0, 0


def cost(task: Task, new_tokens: int) -> float:
    """Estimated time of a task, in units of a merged token through tower and language model.

    Attention makes large pictures dearer than their share: on an H200 Qwen2.5-VL-7B's tower takes 2.8 us a patch at
    4,096 patches and 3.0 at 14,416. A generated token costs a batch of rows one pass; 2 units a row are its share.
    """
    return task.tokens * (1 + task.tokens / 40_000) + len(task.prompts) * (2 * new_tokens + 16)


def spread(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Indices of tasks for every process: the dearest first, each to whoever has least so far.

    No process gets more than a third above the best possible (Graham, 1969); with many tasks the shares are even.
    """
    shares: list[list[int]] = [[] for _ in range(processes)]
    heap = [(0.0, process) for process in range(processes)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, process = heapq.heappop(heap)
        shares[process].append(index)
        heapq.heappush(heap, (load + costs[index], process))
    return shares


def pack(tasks: Sequence[Task], most_tokens: int, most_items: int) -> Iterator[list[Task]]:
    """Batches, longest first, of at most so many vision tokens and items; one item alone may exceed the tokens.

    The items of a batch have the same prompts to answer; a video stands alone.
    """
    batch: list[Task] = []
    tokens = 0
    for task in sorted(tasks, key=lambda task: (task.prompts, -task.tokens, task.item.key)):
        alone = task.item.kind == "video" or (batch and batch[0].item.kind == "video")
        full = tokens + task.tokens > most_tokens or len(batch) == most_items
        if batch and (alone or full or task.prompts != batch[0].prompts):
            yield batch
            batch, tokens = [], 0
        batch.append(task)
        tokens += task.tokens
    if batch:
        yield batch
