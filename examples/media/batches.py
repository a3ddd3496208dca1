"""What items cost, who captions which, and in what batches: pure functions of sizes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from media.pictures import upright_size
from media.processors import vision_tokens
from media.sources import Item, open_item

__all__ = [
    "VIDEO_TOKENS",
    "Task",
    "cost",
    "halve_on_oom",
    "header_of",
    "measured",
    "memory_of",
    "pack",
    "spread",
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


def memory_of(task: Task, unit: int) -> tuple[int, int]:
    """Bytes of a task on its way to the model: most while it is made ready, and then. unit: pixels of a merged token.

    Ready, a pixel is 3 bytes of the picture and 24 of patches (fp32, two frames); on the way copies of both.
    """
    if task.item.kind == "video":
        return VIDEO_BYTES, VIDEO_BYTES
    pixels = task.tokens * unit or task.pixels
    return 60 * pixels, 27 * pixels


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


def measured(
    tasks: Sequence[Task], processor: Any, refuse_above: int, decoders: int, state: PartialState
) -> list[Task]:
    """The tasks with their sizes, from headers that the processes read together."""
    mine = [task.item for task in tasks[state.process_index :: state.num_processes]]
    with ThreadPoolExecutor(decoders) as pool:
        sizes = list(pool.map(lambda item: header_of(item, processor, refuse_above), mine))
    by_process = gather_object([sizes])
    found = (by_process[index % state.num_processes][index // state.num_processes] for index in range(len(tasks)))
    return [replace(task, tokens=tokens, pixels=pixels) for task, (tokens, pixels) in zip(tasks, found, strict=True)]


def halve_on_oom(run: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
    """`run(rows)`, or in halves where the memory does not hold all; one row alone that is too large gives its error.

    Only torch's own out-of-memory error counts: a CUDNN_STATUS_NOT_SUPPORTED is no smaller for half a batch.
    """
    try:
        return run(rows)
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            return [error.with_traceback(None)]
    # Outside of the handler, whose traceback keeps the failed batch's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(rows) // 2
    return [*halve_on_oom(run, rows[:middle]), *halve_on_oom(run, rows[middle:])]
