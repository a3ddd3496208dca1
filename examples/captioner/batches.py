"""Measure items by their headers, and pack them into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import ProcessorMixin

from captioner.items import Item, open_item
from captioner.pictures import upright_size
from captioner.processors import vision_tokens

_VIDEO_TOKENS = 8192  # assumed for a video before it is decoded, which is a batch of its own
_FIRST_ITEMS = 32
"""Items of the first batch, for which the model has to wait; an eighth of a batch if that is more."""
_SHORT = 64
"""Most new tokens for which a small first batch pays: its steps of decoding cost as much as a large one's."""
_PROMPT_TOKENS = 256  # assumed for the text of a prompt
_SPARE_SLOTS = 1.25
"""The slots of a cache are rounded up by at most a quarter."""
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
    shares = state.num_processes
    return [replace(task, tokens=tokens_by_process[i % shares][i // shares]) for i, task in enumerate(tasks)]


def share(tasks: Sequence[Task], process: int, processes: int) -> list[Task]:
    """Return the tasks of a process. All get nearly equal work, since the largest tasks are dealt out in turns."""
    largest_first = sorted(tasks, key=lambda task: (-task.tokens, -len(task.prompts)))
    return largest_first[process::processes]


@dataclass(kw_only=True)
class Bounds:
    """The most that one batch may hold: items, vision tokens, and memory of the GPU."""

    items: int
    tokens: int
    nbytes: float = float("inf")
    slot_bytes: int = 0  # keys and values of a token
    token_bytes: int = 0  # pixels and features of a vision token
    new_tokens: int = 0  # of a caption

    def hold(self, batch: Sequence[Task]) -> bool:
        """Tell whether a batch, its largest item first, is within the bounds."""
        return (
            len(batch) <= self.items
            and sum(task.tokens for task in batch) <= self.tokens
            and self._nbytes(batch) <= self.nbytes
        )

    def _nbytes(self, batch: Sequence[Task]) -> float:
        """Estimate the memory of a batch. All rows have as many slots as the longest."""
        slots = len(batch) * (batch[0].tokens + _PROMPT_TOKENS + self.new_tokens) * _SPARE_SLOTS
        return slots * self.slot_bytes + sum(task.tokens for task in batch) * self.token_bytes

    def halve(self, batch: Sequence[Task]) -> None:
        """Hold half of a batch that exceeded the memory."""
        self.tokens = min(self.tokens, max(1, sum(task.tokens for task in batch) // 2))
        self.nbytes = min(self.nbytes, self._nbytes(batch) / 2)


def pack(tasks: Sequence[Task], bounds: Bounds) -> Iterator[list[Task]]:
    """Pack tasks into batches, the longest first, within the bounds at that time.

    One item alone may exceed them. All items of a batch have the same prompts. A video stands alone.
    """
    batch: list[Task] = []
    most_items = bounds.items
    if bounds.new_tokens <= _SHORT:
        most_items = max(_FIRST_ITEMS, bounds.items // 8)  # of the first batch
    for task in sorted(tasks, key=lambda task: (task.prompts, -task.tokens, task.item.key)):
        has_video = task.item.kind == "video" or (batch and batch[0].item.kind == "video")
        is_full = len(batch) == most_items or not bounds.hold([*batch, task])
        if batch and (has_video or is_full or task.prompts != batch[0].prompts):
            yield batch
            batch = []
            most_items = bounds.items
        batch.append(task)
    if batch:
        yield batch
