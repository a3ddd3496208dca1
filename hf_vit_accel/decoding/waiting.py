"""Rows that wait: where a batch has more rows than a step, a row begins when another one has ended, in its place.

transformers' loop runs for the rows of the step, its places. To the loop a row that begins later is one with more
padding on its left: its prompt ends at the column where it begins, and its keys lie where the former row had its own.
`B` rows of a call, `N` places, `T` columns of the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_vit_accel.decoding.leaving import FEWEST_ROWS, WatchedCriteria
from hf_vit_accel.decoding.packed import CACHE, Arguments
from hf_vit_accel.decoding.prefill import GroupedPrompt, bytes_of_slot
from hf_vit_accel.decoding.room import MOST_DUE, on_device, plan_axis, slots_after
from hf_vit_accel.decoding.steps import FEWEST, steps_of
from hf_vit_accel.decoding.text_models import Model, UnservedError, has_hooks_around, read_model

_PARTS = 8
"""Rows begin when one in so many places is free: a forward of few rows takes hardly less time."""

_DENSER = 1.5
"""A power by which the first rows are denser among the longer ones; evenly would be 1."""


class CannotWaitError(Exception):
    """No row can begin later in this call, which runs in parts of so many rows instead."""

    def __init__(self, reason: str, places: int) -> None:
        super().__init__(reason)
        self.places = places


def may_wait(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Return whether a greedy call reads no column but the last: a row that begins later has others before it."""
    kinds = {type(each) for each in (*processors, *criteria)}
    return kinds <= {SuppressTokensLogitsProcessor, EosTokenCriteria, MaxLengthCriteria}


def first_rows(lengths: Sequence[int], due: int, most: int, slots: int) -> list[int]:
    """Return the rows that begin at once: as many as memory holds, of all lengths.

    So the places are as unequal as the rows, and a row that waits fits into the place of the one chosen before it. With
    the longest rows alone, few places would take all memory. Of the longer rows more begin, since they may also write
    more: a call lasts until the row has ended that began last.

    Args:
        lengths: The columns of every row, the longest first.
        due: New tokens of a row.
        most: Rows of a step.
        slots: For how many tokens there is memory.
    """
    places = min(len(lengths), most)
    while True:
        rows = [max(place, int(len(lengths) * (place / places) ** _DENSER)) for place in range(places)]
        axis = plan_axis([lengths[row] for row in rows], lengths[0], due)
        if places <= FEWEST_ROWS or (axis is not None and axis.size.slots <= slots):
            return rows
        places = places * 15 // 16


class WaitingRows:
    """The rows of a call that wait, the longest first, and the places that rows take.

    Args:
        prompt: The arguments of all rows, to be cut.
        cache: The call's, still empty.
        first: The rows that begin at once, the longest first.
        due: New tokens of a row.
        criteria: Of the call.

    Attributes:
        criteria: Of the places.
    """

    def __init__(
        self, prompt: GroupedPrompt, cache: Cache, first: Sequence[int], due: int, criteria: StoppingCriteriaList
    ) -> None:
        self.places = places = len(first)
        self.due = due
        self._prompt = prompt
        self._cache = cache
        self._empty_cache = copy.deepcopy(cache)
        begun = set(first)
        self._waiting = [row for row in longest_first(prompt.lengths_B) if row not in begun]
        self._columns_of_place = [prompt.lengths_B[row] for row in first]  # a prompt of as many fits
        # Of every row that has begun: its place, and the column of its first token.
        self._begun = {row: (place, prompt.columns) for place, row in enumerate(first)}
        self._since = [prompt.columns] * places  # the column of its row's first token
        self._ends = [criterion for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        last_columns = [prompt.columns + due] * places
        self.criteria = _CriteriaOfPlaces(self._ends, last_columns, is_last=not self._waiting)

    def __len__(self) -> int:
        """Return how many rows have not begun yet."""
        return len(self._waiting)

    def first_arguments(self) -> Arguments:
        """Return the arguments of the rows that begin at once."""
        return self._prompt.inputs_of([*self._begun], self._cache, self._prompt.columns)

    def first_features(self) -> dict[str, Any]:
        """Return their features that are encoded already, by modality."""
        return self._prompt.encoded_of([*self._begun])

    def arguments_of(self, rows: Sequence[int]) -> Arguments:
        """Return the arguments of rows that begin later, with a cache of their own."""
        columns = max(self._prompt.lengths_B[row] for row in rows)
        return self._prompt.inputs_of(rows, copy.deepcopy(self._empty_cache), columns)

    def features_of(self, rows: Sequence[int]) -> dict[str, Any]:
        return self._prompt.encoded_of(rows)

    def take_places(self, go_on: Sequence[bool], columns: int) -> dict[int, int]:
        """Let rows begin in the places of rows that have ended; return their places. None begin while few are free.

        Args:
            go_on: Of every place whether its row goes on; none if the host does not know.
            columns: Of all rows so far.
        """
        place_of_row = self._fitting([place for place, goes_on in enumerate(go_on) if not goes_on])
        if not place_of_row:
            return {}
        most = self._fitting(range(self.places))  # the longest rows may all fit into one place alone
        if len(place_of_row) < min(len(most), self.places // _PARTS):
            return {}
        self._waiting = [row for row in self._waiting if row not in place_of_row]
        for row, place in place_of_row.items():
            self._begun[row] = place, columns
            self._since[place] = columns
        self.criteria.begin([*place_of_row.values()], columns + self.due, is_last=not self._waiting)
        return place_of_row

    def _fitting(self, free: Sequence[int]) -> dict[int, int]:
        """Return free places of rows that wait: each is that of the longest row that fits there."""
        place_of_row: dict[int, int] = {}
        waiting = iter(self._waiting)
        row = next(waiting, None)
        for place in sorted(free, key=self._columns_of_place.__getitem__, reverse=True):
            while row is not None and self._prompt.lengths_B[row] > self._columns_of_place[place]:
                row = next(waiting, None)
            if row is None:
                break
            place_of_row[row] = place
            row = next(waiting, None)
        return place_of_row

    def take_overdue(self, columns: int) -> list[int]:
        """Return the places whose rows have ended so long ago that they have no more slots; each once."""
        overdue = [place for place, since in enumerate(self._since) if columns - since >= self.due]
        for place in overdue:
            self._since[place] = columns
        return overdue

    def collected(self, ids_BT: Tensor, ids_NC: Tensor, pad_token: int) -> Tensor:
        """Return the tokens of all rows as stock returns them: the prompt, new tokens, padding behind the end.

        Args:
            ids_BT: The prompt.
            ids_NC: What the loop returned for the places.
            pad_token: The padding.
        """
        device = ids_NC.device
        places, begins = zip(*(self._begun[row] for row in range(len(ids_BT))), strict=True)
        columns_BD = torch.tensor(begins, device=device)[:, None] + torch.arange(self.due, device=device)
        is_there_BD = columns_BD < ids_NC.shape[1]
        tokens_BD = ids_NC[torch.tensor(places, device=device)[:, None], columns_BD.clamp_max(ids_NC.shape[1] - 1)]
        for criterion in self._ends:
            is_end_BD = torch.isin(tokens_BD, criterion.eos_token_id.to(device))
            is_there_BD &= is_end_BD.cumsum(1) - is_end_BD.int() == 0
        tokens_BD = tokens_BD.masked_fill(~is_there_BD, pad_token)
        return torch.cat([ids_BT, tokens_BD[:, : int(is_there_BD.sum(1).max())]], dim=1)


class _CriteriaOfPlaces(WatchedCriteria):
    """Stopping criteria of places. The loop hears of no end as long as rows wait, which may yet begin there."""

    def __init__(self, ends: Sequence[EosTokenCriteria], last_columns: Sequence[int], *, is_last: bool) -> None:
        super().__init__(StoppingCriteriaList(ends))
        self._last_columns = list(last_columns)  # with the last token of every place
        self._is_last = is_last  # no more rows wait

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        ends_N = StoppingCriteriaList.__call__(self, input_ids, scores, **options)
        columns = input_ids.shape[1]
        full = [place for place, last in enumerate(self._last_columns) if columns >= last]
        if full:
            ends_N.index_fill_(0, on_device(full, ends_N.device), True)
        has_ended_N = self.remember(ends_N)
        return has_ended_N.clone() if self._is_last else torch.zeros_like(has_ended_N)

    def begin(self, places: Sequence[int], last_column: int, *, is_last: bool) -> None:
        """Remember that rows begin at some places, the column of their last token, and whether others wait."""
        self.forget(places)
        for place in places:
            self._last_columns[place] = last_column
        self._is_last = is_last


def waiting_rows(
    model: Model,
    input_ids: Tensor,
    model_kwargs: Arguments,
    features: Mapping[str, Any] | None,
    most: int,
    criteria: StoppingCriteriaList,
) -> WaitingRows | None:
    """Return the rows of a call which are too many, or need too much memory; None for any other call."""
    batch, columns = input_ids.shape
    lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
    due = min(lengths) - columns
    if batch < 2 * FEWEST_ROWS or not FEWEST < due <= MOST_DUE or has_hooks_around(model):
        return None
    slots = steps_of(model).bytes_for_room(input_ids.device) // bytes_of_slot(model)
    if batch <= most and batch * slots_after(columns, due) <= slots:
        return None
    cache = model_kwargs[CACHE]
    is_known = isinstance(model_kwargs.get("position_ids"), Tensor) and model_kwargs.get("inputs_embeds") is None
    if not is_known or cache.get_seq_length():
        return None
    of_all = model_kwargs | {"input_ids": input_ids}
    if of_all.get("attention_mask") is None:  # no row has padding, but those that wait will have some
        of_all["attention_mask"] = torch.ones_like(input_ids)
    prompt = GroupedPrompt(model, of_all, features)
    if not prompt.groups or not prompt.may_be_packed() or _is_refused(model):
        return None
    rows = longest_first(prompt.lengths_B)
    first = first_rows([prompt.lengths_B[row] for row in rows], due, most, slots)
    return WaitingRows(prompt, cache, [rows[index] for index in first], due, criteria)


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of rows, ordered by length."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _is_refused(model: Model) -> bool:
    """Return whether a prompt or a step of this model did not compute what stock does."""
    steps = steps_of(model)
    try:
        with model._optimize_model_for_decode():
            key = read_model(model).key
    except UnservedError:
        return True
    of_prompts = [reason for (of_model, _), reason in steps.padded_reasons.items() if of_model == key]
    return key in steps.refusals or any(of_prompts)
