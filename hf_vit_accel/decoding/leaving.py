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

from hf_vit_accel.decoding.packed import Arguments
from hf_vit_accel.decoding.parts import OF_TOKENS
from hf_vit_accel.decoding.room import on_device
from hf_vit_accel.decoding.step import tensors_of_rows

FEWEST_ROWS = 8
"""Rows of the smallest step that others leave. Fewer take hardly less time, since a step reads all weights."""
WORTH_A_CAPTURE = 8192
"""Rows in vain times their tokens, from which on a smaller step is captured: 0.2 s, and 0.03 ms for a row's token."""
_OF_ROWS = OF_TOKENS | {
    MaxTimeCriteria,
    MinPLogitsWarper,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
}
"""Processors and criteria that read every row by itself."""


def may_leave(
    rows: int, config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> bool:
    """Return whether a call has rows for a smaller step, and nothing of it reads the logits of a row that has ended.

    Without a criterion of end tokens, transformers writes the tokens of such rows instead of padding
    (`_sample` in generation/utils.py, `has_eos_stopping_criteria`).
    """
    if rows < 2 * FEWEST_ROWS:
        return False
    kinds = {type(each) for each in (*processors, *criteria)}
    pads_ended_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return pads_ended_rows and not config.return_dict_in_generate and kinds <= _OF_ROWS


class RowsInStep:
    """The rows of a call that its decode step has: all of them, until some leave.

    Args:
        criteria: These know which rows have ended; None if none may leave.
    """

    def __init__(self, batch: int, criteria: WatchedCriteria | None) -> None:
        self._rows = list(range(batch))
        self._rows_N: Tensor | None = None  # once some have left
        self._batch = batch
        self._criteria = criteria

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def some_left(self) -> bool:
        return self._rows_N is not None

    def go_on(self) -> list[bool]:
        """Return of every row of the step whether it goes on; none as long as the host does not know."""
        has_ended_B = None if self._criteria is None else self._criteria.ended_rows()
        return [] if has_ended_B is None else [not has_ended_B[row] for row in self._rows]

    def place_of(self) -> dict[int, int]:
        """Return the place in the step of every row that it has."""
        return {row: place for place, row in enumerate(self._rows)}

    def leave(self, places: Sequence[int], device: torch.device) -> None:
        """Keep the rows at these places of the step."""
        rows = [self._rows[place] for place in places]
        self._rows_N = on_device(rows, device)
        self._rows = rows

    def stay(self) -> None:
        """Let no more rows leave."""
        self._criteria = None

    def ids_of_step(self, ids_B1: Tensor) -> Tensor:
        return ids_B1 if self._rows_N is None else ids_B1[self._rows_N]

    def inputs_of_step(self, inputs: Arguments) -> Arguments:
        return inputs if self._rows_N is None else tensors_of_rows(inputs, self._rows)

    def logits_of_call(self, logits_N1V: Tensor) -> Tensor:
        """Return logits (B, 1, V) of all rows of the call: zeros for those that left."""
        if self._rows_N is None:
            return logits_N1V
        return logits_N1V.new_zeros(self._batch, *logits_N1V.shape[1:]).index_copy_(0, self._rows_N, logits_N1V)


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that remember which rows have ended. Nobody waits for a GPU to know them."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._has_ended_B: Tensor | None = None
        self._copy_B: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        """Return which rows end with the last token."""
        ends_B = super().__call__(input_ids, scores, **options)
        self.remember(ends_B)
        return ends_B

    def remember(self, ends_B: Tensor) -> Tensor:
        """Remember that some rows end; return which have ended so far."""
        self._has_ended_B = ends_B if self._has_ended_B is None else self._has_ended_B | ends_B
        if self._copy_B is None:
            self._copy_B = self._has_ended_B.to("cpu", non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event() if ends_B.is_cuda else None
        return self._has_ended_B

    def forget(self, rows: Sequence[int]) -> None:
        """Forget that some rows have ended. Others begin there."""
        assert self._has_ended_B is not None
        self._has_ended_B = self._has_ended_B.index_fill(0, on_device(rows, self._has_ended_B.device), False)
        self._copy_B = None  # of before

    def ended_rows(self) -> list[bool] | None:
        """Return which rows had ended some steps ago; None as long as the host does not know."""
        if self._copy_B is None or not (self._copied is None or self._copied.query()):
            return None
        has_ended_B: list[bool] = self._copy_B.tolist()
        self._copy_B = None
        return has_ended_B


def sizes_of_smaller(going_on: int, rows: int) -> list[int]:
    """Return the sizes of steps with fewer rows than that of so many, which hold those that go on: ascending."""
    sizes: list[int] = []
    while rows * 3 // 4 >= max(going_on, FEWEST_ROWS):
        rows = rows * 3 // 4
        sizes.insert(0, rows)
    return sizes


def places_without_ended(go_on: Sequence[bool], size: int) -> list[int]:
    """Return the places of a step whose rows a step of this size has, with all that go on.

    A row that goes on keeps its place where it can. Else it takes that of a row that has ended, and of no other.
    """
    places = list(range(size))
    behind = iter([place for place in range(size, len(go_on)) if go_on[place]])
    for place in places:
        if not go_on[place]:
            places[place] = next(behind, place)
    return places
