"""Rows that wait for a place in a step: tokens are stock's, whatever decodes beside them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import Counts, both, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import alike
from test_prefill import MODELS, Inputs, batch, features_of, joined, ragged, row_of, small_groups
from transformers import DynamicCache, StoppingCriteriaList, SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_vit_accel import graphed_decoding, patch, status
from hf_vit_accel.decoding import leaving, model_in_loop, room, waiting
from hf_vit_accel.decoding.packed import PackedPrompt
from hf_vit_accel.decoding.step import DecodeStep
from hf_vit_accel.decoding.steps import DecodeSteps, steps_of
from hf_vit_accel.decoding.waiting import WaitingRows

__all__ = ["small_groups"]
ENDS: Inputs = dict(eos_token_id=list(range(3, 50, 4)), pad_token_id=2)
"""A fourth of all tokens end a row."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of small batches wait, and leave at the end. They have as few slots as they need."""
    for module in (leaving, waiting):
        monkeypatch.setattr(module, "FEWEST_ROWS", 2)
    monkeypatch.setattr(model_in_loop, "WORTH_A_CAPTURE", 1)
    monkeypatch.setattr(room, "_UNIT", 1)


def in_places(places: int, **options: Any) -> Callable[..., Any]:
    """Return a `graphed_decoding` of so many rows at once."""
    return functools.partial(graphed_decoding, max_rows=places, **options)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", ["qwen2_5_vl", *alike("qwen3_vl", "qwen2_vl")])
@pytest.mark.parametrize("calls", [8, pytest.param(170, marks=pytest.mark.matrix)])
def test_random_batches_give_stocks_tokens_whatever_waits(family: str, calls: int) -> None:
    """No, one and several pictures and videos, padding, ends, few and many places; rows leave after the last began."""
    model = patch(MODELS[family].build())
    rng = random.Random(calls)
    waited_rows = 0
    for seed in range(calls):
        rows = rng.randint(5, 17)
        places = rng.randint(2, rows - 1)
        inputs = batch(model, rng, rows) if rng.random() < 0.7 else ragged(model, *[20] * rows)  # of one length
        before = {name: value.clone() for name, value in inputs.items()}
        ends = dict(eos_token_id=list(range(3, 50, rng.choice([2, 4, 9, 60]))), pad_token_id=2)
        options: Inputs = rng.choice([{}, dict(suppress_tokens=[9, 10]), dict(eos_token_id=None)])
        with torch.inference_mode(rng.random() < 0.3):
            tokens = rng.choice([3, 9, 30])
            both(model, inputs, seed, max_new_tokens=tokens, custom_generate=in_places(places), **(ends | options))
        assert all(torch.equal(inputs[name], value) for name, value in before.items())
        waited_rows += rows - places
    assert steps_of(model).rows_waited == waited_rows and f"{waited_rows} rows waited for a place" in str(status(model))
    assert counts_of(model) == Counts(calls, {}) and not steps_of(model).divided


def test_a_row_that_has_ended_writes_no_keys_of_its_neighbours(recorder: type[OperationRecorder]) -> None:
    """Rows that begin late let all others go on in vain, for longer than these have slots."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = ragged(model, *[49] * 7)
    at_last_slot: list[bool] = []
    run = DecodeStep.__call__

    def run_and_look(step: DecodeStep, ids_B1: torch.Tensor) -> torch.Tensor:
        logits = run(step, ids_B1)
        assert step.room.last_B is not None
        at_last_slot.append(bool((step._slots_B == step.room.last_B).any()))
        return logits

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(DecodeStep, "__call__", run_and_look)
        patches.setattr(model_in_loop, "WORTH_A_CAPTURE", 1 << 40)  # none leaves
        ends = dict(eos_token_id=[3, 23, 43], pad_token_id=2)
        both(model, inputs, max_new_tokens=100, custom_generate=in_places(3), **ends)
    assert any(at_last_slot) and steps_of(model).rows_waited == 4


@pytest.mark.parametrize("ends", [None, [51], [3, 23, 43]])
def test_a_host_that_hears_of_ends_late_makes_stocks_tokens(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead of a GPU knows of an end some steps later: rows begin after others had all their slots."""
    answers = itertools.count()
    ended_rows = leaving.WatchedCriteria.ended_rows

    def ended_rows_late(criteria: leaving.WatchedCriteria) -> list[bool] | None:
        return None if next(answers) % 5 else ended_rows(criteria)

    monkeypatch.setattr(leaving.WatchedCriteria, "ended_rows", ended_rows_late)
    model = MODELS["qwen2_5_vl"].build()
    inputs = ragged(model, *[6] * 20, *[20] * 8, *[60] * 3)
    both(model, inputs, max_new_tokens=20, custom_generate=in_places(9), eos_token_id=ends, pad_token_id=2)
    assert steps_of(model).rows_waited == 22 and counts_of(model) == Counts(1, {}) and not steps_of(model).divided


LATE_STEPS = [(36, [3, 23, 43]), (4, list(range(3, 50, 9))), (20, list(range(3, 50, 9)))]
"""The seed of a batch and its end tokens, found so that the seeded faults of this test are caught."""


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(("seed", "ends"), LATE_STEPS)
def test_a_late_step_has_slots_for_rows_that_ended_long_ago(
    seed: int, ends: list[int], is_inference: bool, recorder: type[OperationRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller step is captured or loaded while a row has been in vain for longer than it has slots."""
    model = MODELS["qwen2_5_vl"].build()
    has_own_slots: list[bool] = []
    load, capture = DecodeStep.load, DecodeSteps.capture

    def look(step: DecodeStep) -> None:
        assert step.room.last_B is not None
        is_own_B = step._slots_B <= step.room.last_B
        has_own_slots.append(bool(is_own_B.all()) and torch.equal(step._last_B, step.room.last_B))

    def load_and_look(step: DecodeStep, *args: Any) -> None:
        load(step, *args)
        look(step)

    def look_and_capture(steps: DecodeSteps, step: DecodeStep) -> None:
        look(step)  # a capture writes there, and one token more
        capture(steps, step)

    monkeypatch.setattr(DecodeStep, "load", load_and_look)
    monkeypatch.setattr(DecodeSteps, "capture", look_and_capture)
    monkeypatch.setattr(model_in_loop, "FEWEST", 1)
    rng = random.Random(seed)
    inputs = ragged(model, *[rng.randint(5, 30) for _ in range(30)])
    with torch.inference_mode(is_inference):
        both(model, inputs, max_new_tokens=40, custom_generate=in_places(10), eos_token_id=ends, pad_token_id=2)
    assert all(has_own_slots) and steps_of(model).rows_left
    assert steps_of(model).rows_waited == 20 and counts_of(model) == Counts(1, {}) and not steps_of(model).divided


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl"))
def test_rows_that_wait_take_features_that_are_given(family: str) -> None:
    model = patch(MODELS[family].build())
    model._supports_mm_encoder_outputs = lambda: False
    for seed in [0, 1, 2] * 2:
        inputs = batch(model, random.Random(seed), 9)
        decode = in_places(3, features=features_of(model, inputs))
        calls = status(model).towers[0].calls
        ours = model.generate(**inputs, **ENDS, max_new_tokens=9, custom_generate=decode)
        encoded_again = status(model).towers[0].calls - calls
        assert torch.equal(ours, model.generate(**inputs, **ENDS, max_new_tokens=9))
        is_proven = steps_of(model).rows_waited > 18
        assert encoded_again == 0 or not is_proven  # a prompt is proven with pixels first
    assert steps_of(model).rows_waited == 36


@given(st.randoms(use_true_random=False))
def test_rows_wait_for_memory(rng: random.Random) -> None:
    """Keys of as many of the longest rows as fit."""
    model = MODELS["qwen2_5_vl"].build()
    rooms: list[room.Size] = []
    make_room = model_in_loop.make_room
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(model_in_loop, "make_room", lambda layers, size: rooms.append(size) or make_room(layers, size))
        inputs = batch(model, rng, rng.randint(5, 12))
        slot_bytes = waiting.bytes_of_slot(model)
        slots = rng.choice([256, 512, 1024, 4096])
        patches.setattr(DecodeSteps, "bytes_for_room", lambda *_: slots * slot_bytes)
        both(model, inputs, max_new_tokens=12, **ENDS)
    assert all(size.rows * size.slots <= max(slots, 512) for size in rooms), "two rows decode in any case"
    assert not counts_of(model).reasons


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=80),
    st.integers(2, 40),
    st.integers(200, 3000),
    st.randoms(use_true_random=False),
)
def test_every_row_begins_once_in_a_place_of_its_length(
    lengths: list[int], most: int, slots: int, rng: random.Random
) -> None:
    """Places that are free begin rows at the latest when all are free; rows of all lengths begin at once."""
    order = sorted(lengths, reverse=True)
    first = waiting.first_rows(order, 9, most, slots)
    assert first == sorted({*first}) and first[0] == 0 and len(first) <= most
    prompt: Any = SimpleNamespace(lengths_B=order, columns=order[0])
    rows = WaitingRows(prompt, DynamicCache(), first, 9, StoppingCriteriaList([MaxLengthCriteria(order[0] + 9)]))
    capacity = [order[row] for row in first]
    begun = list(first)
    for columns in range(order[0], order[0] + 9 * len(lengths)):
        if not len(rows):
            break
        rows.criteria.remember(torch.zeros(len(first), dtype=torch.bool))
        share = rng.choice([0.0, 0.3, 0.9])
        go_on = [rng.random() < share for _ in first]
        place_of_row = rows.take_places(go_on, columns)
        assert place_of_row or any(go_on)
        assert len({*place_of_row.values()}) == len(place_of_row)
        assert all(order[row] <= capacity[place] and not go_on[place] for row, place in place_of_row.items())
        begun += place_of_row
    assert sorted(begun) == list(range(len(lengths)))


def test_long_rows_that_fit_into_one_place_begin_one_after_the_other() -> None:
    """Its first row goes on until all short rows have ended. Later no second place is free for a long row."""
    lengths = [60, 59, 58, 57, 56] + [55] * 315
    prompt: Any = SimpleNamespace(lengths_B=lengths, columns=60)
    first = waiting.first_rows(lengths, 9, 16, 4000)
    rows = WaitingRows(prompt, DynamicCache(), first, 9, StoppingCriteriaList([MaxLengthCriteria(69)]))
    assert len(first) == 16 and first[1] == 5
    begun: list[int] = []
    for columns in range(60, 90):
        rows.criteria.remember(torch.zeros(16, dtype=torch.bool))
        begun += rows.take_places([len(begun) < 300, *[False] * 15], columns)
    assert begun[-4:] == [1, 2, 3, 4] and not len(rows)


def test_as_many_rows_begin_at_once_as_memory_holds() -> None:
    """A captioner's pictures: a few pages beside many small pictures, whose rows need a tenth of the slots."""
    lengths = [4118] * 51 + [700] * 256 + [140] * 717
    slots = 300_000
    first = waiting.first_rows(lengths, 256, 512, slots)
    axis = room.plan_axis([lengths[row] for row in first], lengths[0], 256)
    assert axis is not None and 0.8 * slots < axis.size.slots <= slots
    assert len(first) > 200 and first[20] < 51 < first[32]  # of the longest alone, fewer than 150 would fit


def test_rows_that_wait_end_with_the_shortest_length_that_is_given() -> None:
    model = MODELS["qwen2_5_vl"].build()
    inputs = batch(model, random.Random(0), 9)
    columns = inputs["input_ids"].shape[1]
    lengths = [MaxLengthCriteria(columns + tokens) for tokens in (30, 12)]
    both(model, inputs, stopping_criteria=lengths, max_new_tokens=9, custom_generate=in_places(3), eos_token_id=None)
    assert steps_of(model).rows_waited == 6


class Streamer:
    def put(self, tokens: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True),
        dict(repetition_penalty=1.2),
        dict(min_new_tokens=4),
        dict(max_time=1e6),
        dict(return_dict_in_generate=True, output_scores=True),
        dict(make_streamer=Streamer),
        dict(make_logits_processor=lambda: [lambda input_ids, scores: scores]),
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_row_waits_where_others_are_seen_beside_it(options: Inputs) -> None:
    """Random numbers are drawn for all rows; processors read columns, and code of users sees all rows."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = batch(model, random.Random(0), 1 if "make_streamer" in options else 9)
    both(model, inputs, max_new_tokens=9, custom_generate=in_places(3), **ENDS, **options)
    assert counts_of(model) == Counts(1, {}) and not steps_of(model).rows_waited


def _refuse_prompts(patches: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ArithmeticError("a packed prompt differs")

    patches.setattr(PackedPrompt, "logits", refuse)


def _refuse_steps(patches: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ArithmeticError("logits differ")

    patches.setattr(DecodeStep, "prove", refuse)


@pytest.mark.parametrize("refuse", [_refuse_prompts, _refuse_steps])
def test_a_call_whose_rows_cannot_wait_runs_in_parts(refuse: Callable[..., None]) -> None:
    model = patch(MODELS["qwen2_5_vl"].build())
    inputs = batch(model, random.Random(1), 9)
    with pytest.MonkeyPatch.context() as patches:
        refuse(patches)
        for _ in range(2):
            both(model, inputs, max_new_tokens=9, custom_generate=in_places(4), **ENDS)
    assert steps_of(model).divided.total() == 1 and not steps_of(model).rows_waited, "the second call knows"
    assert "1 in parts (1 x " in str(status(model))


def test_a_call_whose_rows_all_fit_on_an_axis_alone_runs_in_parts_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock pads all rows to the longest, for which there is no memory."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = joined([row_of(model, [], words, words) for words in (100, *[5] * 7)])
    monkeypatch.setattr(DecodeSteps, "bytes_for_room", lambda *_: 600 * waiting.bytes_of_slot(model))
    _refuse_prompts(monkeypatch)
    both(model, inputs, max_new_tokens=9, **ENDS)
    assert steps_of(model).divided and counts_of(model) == Counts(2, {})


def test_prompts_of_rows_that_begin_later_are_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are text alone. That says nothing of rows with pictures."""
    logits = PackedPrompt.logits

    def spoil_pictures(packed: PackedPrompt, inputs: Inputs, *args: Any) -> torch.Tensor:
        has_pictures = inputs.get("pixel_values") is not None or inputs.get("mm_encoder_outputs")
        return logits(packed, inputs, *args) * (-1 if has_pictures else 1)

    monkeypatch.setattr(PackedPrompt, "logits", spoil_pictures)
    model = MODELS["qwen2_5_vl"].build()
    texts = [row_of(model, [], 40, seed) for seed in range(3)]
    inputs = joined([*texts, *[row_of(model, [(1, 4, 4)], 2, seed) for seed in range(4)]])
    both(model, inputs, max_new_tokens=9, custom_generate=in_places(3), **ENDS)
    assert steps_of(model).divided.total() == 1 and not steps_of(model).rows_waited


@pytest.mark.usefixtures("way")
def test_memory_that_runs_out_as_rows_begin_halves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(MODELS["qwen2_5_vl"].build())
    inputs = batch(model, random.Random(1), 9)
    fail = iter([True])
    begin_rows = room.Room.begin_rows

    def begin_rows_once(*args: Any) -> None:
        if next(fail, False):
            raise torch.OutOfMemoryError
        begin_rows(*args)

    monkeypatch.setattr(room.Room, "begin_rows", begin_rows_once)
    both(model, inputs, max_new_tokens=9, custom_generate=in_places(3), **ENDS)
    assert steps_of(model).rows_waited == 3, "of four and five rows, three begin at once"
    with pytest.raises(torch.OutOfMemoryError):
        fail = iter([True])
        both(model, inputs, max_new_tokens=9, custom_generate=in_places(3, halve=False), **ENDS)


@pytest.mark.usefixtures("way")
def test_a_room_that_is_used_again_holds_nothing_of_before() -> None:
    """The next call takes the step of the last one. A key that is no number would spoil whoever reads it."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = batch(model, random.Random(5), 9)
    for _ in range(2):
        both(model, inputs, max_new_tokens=9, custom_generate=in_places(3), **ENDS)
        for step in steps_of(model).kept.values():
            for layer in step.layers:
                layer.keys.fill_(float("nan"))
                layer.values.fill_(float("nan"))
    assert counts_of(model) == Counts(2, {}) and len(steps_of(model).kept) == 1


def test_tokens_to_suppress_are_known() -> None:
    processors = [SuppressTokensLogitsProcessor([1], device="cpu")]
    assert waiting.may_wait(processors, []) and not waiting.may_wait([*processors, Streamer()], [])
