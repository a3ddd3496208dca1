"""Rows that have ended leave a decode step: tokens are stock's, and steps of fewer rows are kept for the next calls."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import Counts, both, counts_of
from support.recorded_ops import OperationRecorder
from tiny import TINY
from transformers import StoppingCriteriaList, StopStringCriteria

import hf_vit_accel
from hf_vit_accel import status
from hf_vit_accel.decoding import leaving, model_in_loop, room
from hf_vit_accel.decoding.step import DecodeStep
from hf_vit_accel.decoding.steps import steps_of

Inputs = dict[str, Any]
ENDS: Inputs = dict(eos_token_id=list(range(3, 50, 4)), pad_token_id=2)
"""A fourth of all tokens end a row."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows leave small batches, and at once."""
    monkeypatch.setattr(leaving, "FEWEST_ROWS", 2)
    monkeypatch.setattr(model_in_loop, "WORTH_A_CAPTURE", 1)
    monkeypatch.setattr(model_in_loop, "FEWEST", 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return TINY["qwen2_5_vl"].build()


@pytest.fixture
def rows_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of every step that runs."""
    rows: list[int] = []
    call = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda step, ids: rows.append(len(ids)) or call(step, ids))
    return rows


def is_on_one_axis(model: Any) -> bool:
    [step] = steps_of(model).kept.values()
    return step.room.offsets_B is not None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("longest", "on_one_axis"), [(9, False), (400, True)])
def test_rows_that_have_ended_leave_steps(
    model: Any, rows_of_steps: list[int], longest: int, on_one_axis: bool
) -> None:
    """Rows of one length have slots of their own; among long and short ones all rows share an axis."""
    model = TINY["qwen2_5_vl"].build()
    inputs = tiny.padded_text([longest] + [9] * 15)
    tokens = both(model, inputs, max_new_tokens=40, **ENDS)
    is_end = torch.isin(tokens[:, longest:], torch.tensor(ENDS["eos_token_id"]))
    going_on = (16 - (is_end.cumsum(1) > 0).sum(0)).tolist()
    assert is_on_one_axis(model) == on_one_axis
    assert rows_of_steps == sorted(rows_of_steps, reverse=True) and len(set(rows_of_steps)) > 2
    for rows, left, left_before in zip(rows_of_steps, going_on, [16, *going_on], strict=False):
        assert left <= rows and rows * 3 // 4 < max(left_before, 2), "a step of 2 rows is the smallest"
    assert steps_of(model).rows_left == 16 - rows_of_steps[-1] and "rows left early" in str(status(model))
    assert not counts_of(model).reasons


@pytest.mark.usefixtures("way")
def test_steps_of_fewer_rows_are_kept(model: Any, recorder: type[OperationRecorder]) -> None:
    model = TINY["qwen2_5_vl"].build()
    for seed in range(4):
        both(model, tiny.padded_text([9] * 16, seed), max_new_tokens=40, **ENDS)
    [step] = steps_of(model).kept.values()
    assert set(step.smaller) <= {12, 9, 6, 4, 3, 2} and recorder.captures == 1 + len(step.smaller)
    room_bytes = sum(state.nbytes for layer in step.layers for state in (layer.keys, layer.values))
    assert room_bytes < step.nbytes < 1.1 * room_bytes, "smaller steps have no keys of their own"


@pytest.mark.usefixtures("way")
@given(st.randoms(use_true_random=False))
def test_random_calls_give_stocks_tokens(model: Any, rng: random.Random) -> None:
    """Equal and unequal lengths, pictures, sampling, penalties, caches that grow after rows have left."""
    lengths = [rng.choice([9, 9, 12, rng.randint(1, 300)]) for _ in range(rng.randint(4, 17))]
    inputs = tiny.padded_text(lengths, rng.randrange(999))
    if rng.random() < 0.3:
        row = tiny.left_padded(model)
        copies = rng.randint(2, 5)
        inputs = {name: torch.cat([value] * copies) for name, value in row.items()}
    options: Inputs = rng.choice(
        [
            {},
            dict(do_sample=True, temperature=1.5, top_k=20),
            dict(repetition_penalty=1.3, min_new_tokens=3, max_time=1000.0),
        ]
    )
    ends = dict(eos_token_id=list(range(3, 50, rng.choice([2, 4, 9, 20]))), pad_token_id=2)
    calls = counts_of(model).static_calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_RESERVE", rng.choice([2, 8, 128]))
        patch.setattr(room, "_WORTH", rng.choice([0.0, 0.8, 9.0]))
        both(model, inputs, rng.randrange(99), max_new_tokens=rng.choice([5, 30, 60]), **ends, **options)
    assert counts_of(model) == Counts(calls + 1, {})


class WordTokenizer:
    """Words "<0>" to "<63>" as tokens, as `StopStringCriteria` reads a tokenizer, which writes its prefix."""

    def get_vocab(self) -> dict[str, int]:
        return {f"<{token}>": token for token in range(64)}

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def __call__(self, prefix: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": [prefix]}

    def _convert_id_to_token(self, prefix: str) -> str:
        return prefix


@pytest.mark.parametrize("ends", [ENDS, dict(eos_token_id=None, pad_token_id=2)])
def test_rows_that_stop_at_a_word_leave_if_transformers_pads_them(model: Any, ends: Inputs) -> None:
    """It pads where there is an end token. Without one, rows that have ended go on until all have."""
    model = TINY["qwen2_5_vl"].build()
    words = [f"<{token}>" for token in range(4, 50, 5)]

    def stops() -> StoppingCriteriaList:
        return StoppingCriteriaList([StopStringCriteria(WordTokenizer(), words)])

    both(model, tiny.padded_text([9] * 16), make_stopping_criteria=stops, max_new_tokens=30, **ends)
    assert (steps_of(model).rows_left > 0) == (ends is ENDS)


def test_a_smaller_step_is_captured_once_enough_rows_ran_in_vain(
    recorder: type[OperationRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's batches are alike: what no single caption is worth, all of them are."""
    monkeypatch.setattr(model_in_loop, "WORTH_A_CAPTURE", 1000)
    model = TINY["qwen2_5_vl"].build()
    rows_left = []
    for seed in range(8):
        both(model, tiny.padded_text([9] * 16, seed), max_new_tokens=40, **ENDS)
        rows_left.append(steps_of(model).rows_left)
    assert rows_left[0] == 0 and rows_left[-1] > rows_left[-2] > 0


def _with_scores(model: Any) -> Inputs:
    return dict(return_dict_in_generate=True, output_scores=True)


def _with_a_processor(model: Any) -> Inputs:
    return dict(make_logits_processor=lambda: [lambda input_ids, scores: scores])


def _with_a_criterion(model: Any) -> Inputs:
    return dict(make_stopping_criteria=lambda: [lambda input_ids, scores: torch.zeros(len(input_ids)).bool()])


@pytest.mark.parametrize("options_of", [_with_scores, _with_a_processor, _with_a_criterion])
def test_no_row_leaves_whose_logits_are_read(
    model: Any, rows_of_steps: list[int], options_of: Callable[[Any], Inputs]
) -> None:
    both(model, tiny.padded_text([9] * 16), max_new_tokens=30, **ENDS, **options_of(model))
    assert set(rows_of_steps) == {16}


def test_memory_that_is_too_short_for_a_smaller_step_leaves_all_rows_in(
    model: Any, rows_of_steps: list[int], recorder: type[OperationRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY["qwen2_5_vl"].build()
    both(model, tiny.padded_text([9] * 16), max_new_tokens=40, min_new_tokens=40, **ENDS)
    rows_of_steps.clear()
    monkeypatch.setattr(recorder, "fail", torch.OutOfMemoryError("full"))
    both(model, tiny.padded_text([9] * 16), max_new_tokens=40, **ENDS)
    assert set(rows_of_steps) == {16} and not counts_of(model).reasons


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("broken")])
def test_an_error_while_rows_move_spoils_no_row_that_goes_on(
    model: Any, rows_of_steps: list[int], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of one layer have moved by then. All rows stay in where memory ran out, else stock goes on."""
    model = TINY["qwen2_5_vl"].build()
    take_rows, states_of = room.Room.take_rows, room.states_of

    def take_rows_of_one_layer(room_of_few: room.Room, *args: Any) -> None:
        calls = iter([states_of, states_of])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(room, "states_of", lambda *of_layer: next(calls)(*of_layer))
            with pytest.raises(StopIteration):
                take_rows(room_of_few, *args)
        raise error

    monkeypatch.setattr(room.Room, "take_rows", take_rows_of_one_layer)
    both(model, tiny.padded_text([9] * 16, 3), max_new_tokens=40, **ENDS)
    is_memory = isinstance(error, torch.OutOfMemoryError)
    assert set(rows_of_steps) == {16} and not steps_of(model).rows_left
    assert counts_of(model) == (Counts(1, {}) if is_memory else Counts(0, {"RuntimeError: broken": 1}))


def test_no_smaller_step_is_captured_of_a_model_that_changed(model: Any, recorder: type[OperationRecorder]) -> None:
    """A streamer is code of the user's: it may change weights in mid-call. Kept steps are of the weights before."""
    model = TINY["qwen2_5_vl"].build()
    weight = model.model.language_model.layers[0].mlp.down_proj.weight
    data = weight.data

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            if tokens.dim() == 1:  # not the prompt
                weight.data = data.neg()

        def end(self) -> None:
            weight.data = data

    inputs = tiny.padded_text([9] * 16)
    both(model, inputs, max_new_tokens=40, min_new_tokens=40, **ENDS)  # keeps a step of all rows
    model.generate(
        **inputs, max_new_tokens=40, **ENDS, streamer=Streamer(), custom_generate=hf_vit_accel.graphed_decoding
    )
    assert counts_of(model).reasons == {"the model changed within a call": 1} and recorder.captures == 1
    both(model, inputs, max_new_tokens=40, **ENDS)
    assert steps_of(model).rows_left


def test_a_smaller_step_that_computes_otherwise_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be wrong for few rows alone. Stock goes on with the rows that are left."""
    model = TINY["qwen2_5_vl"].build()
    run = DecodeStep._hidden_B1E

    def run_few_wrong(step: DecodeStep) -> torch.Tensor:
        hidden = run(step)
        return hidden if len(hidden) > 4 else hidden.neg()

    monkeypatch.setattr(DecodeStep, "_hidden_B1E", run_few_wrong)
    both(model, tiny.padded_text([400] + [9] * 15), max_new_tokens=40, **ENDS)
    [reason] = counts_of(model).reasons
    assert "logits differ" in reason and steps_of(model).rows_left >= 12
