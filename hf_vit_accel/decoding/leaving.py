"""Rows that have ended leave a decode step: the others go on in a step of three quarters of the rows, or of fewer.

A step of `n` rows reads the room of the whole batch. Where rows share an axis of slots, no key moves. Where every row
has slots of its own, the last ones move to those of rows that have ended.
`B` rows of a call, `N` rows of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from hf_vit_accel.decoding.halves import OF_TOKENS
from hf_vit_accel.decoding.packed import Arguments
from hf_vit_accel.decoding.step import tensors_of_rows

FEWEST_ROWS = 8
"""Rows of the smallest step that others leave. Fewer take hardly less time, since a step reads all weights."""
WORTH_A_CAPTURE = 8192
"""Rows that leave times tokens to come, from which on a new step is captured: 0.2 s, and 0.03 ms for a row's token."""
_OF_ROWS = OF_TOKENS | {
    MaxTimeCriteria,
    MinPLogitsWarper,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
}
"""Processors and criteria that read every row by itself."""


def may_leave(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Return whether nothing of a call reads the logits of a row that has ended."""
    kinds = {type(each) for each in (*processors, *criteria)}
    return not config.return_dict_in_generate and kinds <= _OF_ROWS


class RowsInStep:
    """The rows of a call that its decode step has: all of them, until some leave."""

    def __init__(self, batch: int) -> None:
        self._rows = list(range(batch))
        self._rows_N: Tensor | None = None  # once some have left
        self._batch = batch
        self._ended: _EndedRows | None = None
        self._has_ended_B: list[bool] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def some_left(self) -> bool:
        return self._rows_N is not None

    def watched(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Return stopping criteria that let rows leave once they have ended."""
        if self._batch >= 2 * FEWEST_ROWS:
            self._ended = _EndedRows(criteria)
        return criteria if self._ended is None else self._ended

    def smaller_sizes(self) -> list[int]:
        """Return how many rows a smaller step may have, the fewest first; none if the present one goes on."""
        has_ended_B = None if self._ended is None else self._ended.known()
        if has_ended_B is None:
            return []
        self._has_ended_B = has_ended_B
        going_on = sum(not has_ended_B[row] for row in self._rows)
        return sizes_between(going_on, len(self._rows)) if going_on else []

    def of_smaller(self, size: int) -> list[int]:
        """Return the rows of the call that a step of so many has, with all that go on."""
        return without_ended(self._rows, self._has_ended_B, size)

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return where rows of the call are among those of the step."""
        place_of = {row: place for place, row in enumerate(self._rows)}
        return [place_of[row] for row in rows]

    def leave(self, rows: list[int], rows_N: Tensor) -> None:
        """Keep these rows of the call, which are on the device, too. Logits of the others are never read."""
        self._rows = rows
        self._rows_N = rows_N

    def stay(self) -> None:
        """Let no more rows leave."""
        self._ended = None

    def of_ids(self, ids_B1: Tensor) -> Tensor:
        return ids_B1 if self._rows_N is None else ids_B1[self._rows_N]

    def of_inputs(self, inputs: Arguments) -> Arguments:
        return inputs if self._rows_N is None else tensors_of_rows(inputs, self._rows)

    def of_all(self, logits_N1V: Tensor) -> Tensor:
        """Return logits (B, 1, V) of all rows of the call: zeros for those that left."""
        if self._rows_N is None:
            return logits_N1V
        return logits_N1V.new_zeros(self._batch, *logits_N1V.shape[1:]).index_copy_(0, self._rows_N, logits_N1V)


class _EndedRows(StoppingCriteriaList):
    """Stopping criteria that remember which rows have ended. Nobody waits for a GPU to know them."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._has_ended_B: Tensor | None = None
        self._copy_B: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        """Return which rows end with the last token."""
        ends_B = super().__call__(input_ids, scores, **options)
        self._has_ended_B = ends_B if self._has_ended_B is None else self._has_ended_B | ends_B
        if self._copy_B is None:
            self._copy_B = self._has_ended_B.to("cpu", non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event() if ends_B.is_cuda else None
        return ends_B

    def known(self) -> list[bool] | None:
        """Return which rows had ended some steps ago; None as long as the host does not know."""
        if self._copy_B is None or not (self._copied is None or self._copied.query()):
            return None
        has_ended_B: list[bool] = self._copy_B.tolist()
        self._copy_B = None
        return has_ended_B


def sizes_between(going_on: int, rows: int) -> list[int]:
    """Return the sizes of steps that are smaller than one of so many rows, and hold those that go on: ascending."""
    sizes: list[int] = []
    while rows * 3 // 4 >= max(going_on, FEWEST_ROWS):
        rows = rows * 3 // 4
        sizes.insert(0, rows)
    return sizes


def without_ended(rows: Sequence[int], has_ended_B: Sequence[bool], size: int) -> list[int]:
    """Return so many rows of a step, with all that go on.

    A row that goes on keeps its place where it can. Else it takes that of a row that has ended, and of no other.

    Args:
        rows: The rows of the call that the step has.
        has_ended_B: Which rows of the call have ended.
        size: At least the rows that go on.
    """
    smaller = list(rows[:size])
    free = [place for place, row in enumerate(smaller) if has_ended_B[row]]
    behind = [row for row in rows[size:] if not has_ended_B[row]]
    for place, row in zip(free, behind, strict=False):
        smaller[place] = row
    return smaller
