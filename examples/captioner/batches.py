"""Estimate what items cost, share them among processes, and pack them into batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import ProcessorMixin

from captioner.items import Item, open_item
from captioner.pictures import upright_size
from captioner.processors import vision_tokens

VIDEO_TOKENS = 8192
"""Merged tokens assumed for a video before it is decoded. A video is a batch of its own."""
VIDEO_BYTES = 1 << 30
"""Memory assumed for a video that is decoded ahead, since the number of its frames is unknown."""

Row = TypeVar("Row")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Task:
    """An item with the prompts that it still needs."""

    item: Item
    prompts: tuple[str, ...]
    tokens: int  # merged vision tokens, from the header
    pixels: int = 0


def memory_of(task: Task, pixels_per_token: int) -> tuple[int, int]:
    """Return the bytes of a task on its way to the model: at most while it is prepared, and afterwards.

    A prepared pixel takes 3 bytes of the picture and 24 of patches (fp32, two frames). Both are copied on the way.
    """
    if task.item.kind == "video":
        return VIDEO_BYTES, VIDEO_BYTES
    pixels = task.tokens * pixels_per_token or task.pixels
    return 60 * pixels, 27 * pixels


def header_of(item: Item, processor: ProcessorMixin, refuse_above: int) -> tuple[int, int]:
    """Read the merged vision tokens and pixels of an item from its header; zeros if it cannot be read."""
    if item.kind == "video":
        return VIDEO_TOKENS, 0
    try:
        with open_item(item) as file:
            width, height = upright_size(file, refuse_above)
            return vision_tokens(processor, width, height), width * height
    except Exception:  # decoding the item reports the error later
        return 0, 0


def measured(
    tasks: Sequence[Task], processor: ProcessorMixin, refuse_above: int, decoders: int, state: PartialState
) -> list[Task]:
    """Return the tasks with their sizes. Every process reads a share of the headers."""
    items = [task.item for task in tasks[state.process_index :: state.num_processes]]
    with ThreadPoolExecutor(decoders) as pool:
        sizes = list(pool.map(lambda item: header_of(item, processor, refuse_above), items))
    sizes_by_process = gather_object([sizes])
    sized_tasks = []
    for index, task in enumerate(tasks):
        tokens, pixels = sizes_by_process[index % state.num_processes][index // state.num_processes]
        sized_tasks.append(replace(task, tokens=tokens, pixels=pixels))
    return sized_tasks


def cost(task: Task, new_tokens: int) -> float:
    """Estimate the time of a task, in units of a merged token through tower and language model.

    Attention makes large pictures dearer than their share: on an H200 a patch takes Qwen2.5-VL-7B's tower some 5%
    longer at 14,416 patches than at 4,096. A generated token costs a batch one pass; 2 units a row are its share.
    """
    return task.tokens * (1 + task.tokens / 40_000) + len(task.prompts) * (2 * new_tokens + 16)


def spread(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Share tasks among processes: the dearest first, each to the process with the smallest load so far.

    No process gets more than a third above the best possible (Graham, 1969). With many tasks the shares are even.
    """
    shares: list[list[int]] = [[] for _ in range(processes)]
    heap = [(0.0, process) for process in range(processes)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, process = heapq.heappop(heap)
        shares[process].append(index)
        heapq.heappush(heap, (load + costs[index], process))
    return shares


def pack(tasks: Sequence[Task], most_tokens: int, most_items: int) -> Iterator[list[Task]]:
    """Pack tasks into batches, the longest first, of at most so many vision tokens and items.

    One item alone may exceed the tokens. All items of a batch have the same prompts. A video stands alone.
    """
    batch: list[Task] = []
    tokens = 0
    for task in sorted(tasks, key=lambda task: (task.prompts, -task.tokens, task.item.key)):
        has_video = task.item.kind == "video" or (batch and batch[0].item.kind == "video")
        is_full = tokens + task.tokens > most_tokens or len(batch) == most_items
        if batch and (has_video or is_full or task.prompts != batch[0].prompts):
            yield batch
            batch = []
            tokens = 0
        batch.append(task)
        tokens += task.tokens
    if batch:
        yield batch


def halve_on_oom(
    run: Callable[[Sequence[Row]], list[Result]], rows: Sequence[Row]
) -> list[Result | torch.OutOfMemoryError]:
    """Return `run(rows)`, or run it in halves where memory runs out. A single row that is too large gives its error.

    Only torch's own out-of-memory error counts: a CUDNN_STATUS_NOT_SUPPORTED fails for half a batch, too.
    """
    try:
        return run(rows)
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            return [error.with_traceback(None)]
    # Outside of the handler, because its traceback keeps the failed batch's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(rows) // 2
    return [*halve_on_oom(run, rows[:middle]), *halve_on_oom(run, rows[middle:])]
