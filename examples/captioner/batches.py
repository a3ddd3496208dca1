"""Measure items by their headers, pack them into batches, and join the inputs of parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.nn import functional
from transformers import ProcessorMixin

from captioner.items import Item, open_item
from captioner.pictures import upright_size
from captioner.processors import vision_tokens

_VIDEO_TOKENS = 8192  # assumed for a video before it is decoded, which is a batch of its own
_PROMPT_TOKENS = 256  # assumed for the text of a prompt
_SPARE_SLOTS = 1.25  # the slots of a cache are rounded up by at most a quarter
Inputs = dict[str, Any]  # of the model: tensors by name
_READERS = 16  # threads, which mostly wait for the file system


@dataclass(frozen=True, kw_only=True)
class Task:
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
        tokens = sum(task.tokens for task in batch)
        return len(batch) <= self.items and tokens <= self.tokens and self._nbytes(batch) <= self.nbytes

    def _nbytes(self, batch: Sequence[Task]) -> float:
        """Estimate the memory of a batch, whose rows have the slots that each needs."""
        tokens = sum(task.tokens for task in batch)
        slots = tokens + len(batch) * (_PROMPT_TOKENS + self.new_tokens)
        return slots * _SPARE_SLOTS * self.slot_bytes + tokens * self.token_bytes

    def halve(self, batch: Sequence[Task]) -> None:
        self.tokens = min(self.tokens, max(1, sum(task.tokens for task in batch) // 2))
        self.nbytes = min(self.nbytes, self._nbytes(batch) / 2)


def pack(tasks: Sequence[Task], bounds: Bounds) -> Iterator[list[Task]]:
    """Pack tasks into batches within the bounds at that time, the longest first.

    One item alone may exceed them. All items of a batch have the same prompts. A video stands alone.
    """
    batch: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.prompts, -task.tokens, task.item.key)):
        has_video = task.item.kind == "video" or (batch and batch[0].item.kind == "video")
        if batch and (has_video or task.prompts != batch[0].prompts or not bounds.hold([*batch, task])):
            yield batch
            batch = []
        batch.append(task)
    if batch:
        yield batch


def joined(parts: Sequence[Inputs], padding: int) -> Inputs:
    """Join the inputs of parts of a batch: tokens are padded to the longest part."""
    if len(parts) == 1:
        return parts[0]
    inputs = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if len({value.shape[-1] for value in values}) > 1:
            columns = max(value.shape[-1] for value in values)
            fill = padding if name == "input_ids" else 0
            values = [functional.pad(value, (columns - value.shape[-1], 0), value=fill) for value in values]
        inputs[name] = _cat(values)
    return inputs


def _cat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors, on the CPU if the GPU has no memory for one of them or for all."""
    if len({value.device for value in values}) == 1:
        with suppress(torch.OutOfMemoryError):
            return torch.cat(values)
    return torch.cat([value.cpu() for value in values])
