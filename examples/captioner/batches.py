"""Measure items by their headers, and pack them into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import ProcessorMixin

from captioner.items import Item, open_item
from captioner.pictures import upright_size
from captioner.processors import vision_tokens

_VIDEO_TOKENS = 8192  # assumed for a video before it is decoded, which is a batch of its own
_READERS = 16  # threads, which mostly wait for the file system


@dataclass(frozen=True, kw_only=True)
class Task:
    """An item with the prompts that it still needs."""

    item: Item
    prompts: tuple[str, ...]
    tokens: int = 0  # merged vision tokens, from the header


def tokens_of(item: Item, processor: ProcessorMixin) -> int:
    """Compute the merged vision tokens of an item from its header; 0 if it cannot be read."""
    if item.kind == "video":
        return _VIDEO_TOKENS
    try:
        with open_item(item) as file:
            return vision_tokens(processor, *upright_size(file))
    except Exception:  # decoding the item reports the error later
        return 0


def measured(tasks: Sequence[Task], processor: ProcessorMixin | None, state: PartialState) -> list[Task]:
    """Return the tasks with their tokens. Every process reads a share of the headers."""
    items = [task.item for task in tasks[state.process_index :: state.num_processes]]
    with ThreadPoolExecutor(_READERS) as pool:
        tokens = list(pool.map(lambda item: tokens_of(item, processor), items))
    tokens_by_process = gather_object([tokens])
    measured_tasks = []
    for index, task in enumerate(tasks):
        tokens_of_share = tokens_by_process[index % state.num_processes]
        measured_tasks.append(replace(task, tokens=tokens_of_share[index // state.num_processes]))
    return measured_tasks


def share(tasks: Sequence[Task], process: int, processes: int) -> list[Task]:
    """Return the tasks of a process. All get nearly equal work, since the largest tasks are dealt out in turns."""
    largest_first = sorted(tasks, key=lambda task: (-task.tokens, -len(task.prompts)))
    return largest_first[process::processes]


def pack(tasks: Sequence[Task], most_tokens: Callable[[], int], most_items: int) -> Iterator[list[Task]]:
    """Pack tasks into batches, the longest first, of at most so many items and vision tokens at that time.

    One item alone may exceed the tokens. All items of a batch have the same prompts. A video stands alone.
    """
    batch: list[Task] = []
    tokens = 0
    for task in sorted(tasks, key=lambda task: (task.prompts, -task.tokens, task.item.key)):
        has_video = task.item.kind == "video" or (batch and batch[0].item.kind == "video")
        is_full = tokens + task.tokens > most_tokens() or len(batch) == most_items
        if batch and (has_video or is_full or task.prompts != batch[0].prompts):
            yield batch
            batch = []
            tokens = 0
        batch.append(task)
        tokens += task.tokens
    if batch:
        yield batch
