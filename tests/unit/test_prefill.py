"""Prompts in groups of rows of similar length: tokens and logits are stock's, and pictures stay with their rows."""

import functools
import gc
import itertools
import random
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.composites import COMPOSITES, LINEAR
from support.decoding import Counts, add_adapters, both, change_model, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import alike
from test_decode_steps import EARLIER, SERVED
from tiny import TINY
from torch import nn
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_vit_accel import graphed_decoding, patch, status
from hf_vit_accel.decoding import layers, prefill, room, step
from hf_vit_accel.decoding.prefill import plan_groups
from hf_vit_accel.decoding.room import on_device
from hf_vit_accel.decoding.steps import free_steps, steps_of

GRIDS = [(1, 4, 4), (1, 4, 8), (1, 8, 8), (1, 4, 12), (2, 4, 4)]
"""Pictures, and a video."""
_QWEN3 = TINY["qwen3_vl"]
MODELS = TINY | {"qwen3_vl": replace(_QWEN3, text=_QWEN3.text | {"num_hidden_layers": 3})}
"""Qwen3-VL with a layer that takes no features of pictures: there, all tokens but the last are dropped."""
Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide short prompts, too: into many groups."""
    monkeypatch.setattr(prefill, "GROUP_TOKENS", 60)
    monkeypatch.setattr(prefill, "TOKENS_OF_A_FORWARD", 4)


def joined(rows: list[Inputs], *, right: bool = False) -> Inputs:
    """Pad rows to the longest, on the left or the right, and join them."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    inputs: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        length = row["input_ids"].shape[1]
        padding = (0, longest - length) if right else (longest - length, 0)
        for name, value in (row | {"attention_mask": torch.ones_like(row["input_ids"])}).items():
            is_padded = value.shape[:2] == (1, length)
            inputs.setdefault(name, []).append(nn.functional.pad(value, padding) if is_padded else value)
    return {name: torch.cat(values) for name, values in inputs.items()}


def row_of(model: Any, grids: list[tuple[int, int, int]], words: int, seed: int) -> Inputs:
    """Draw a row of so many tokens of text before pictures and videos."""
    row = tiny.chat_inputs(model, grids, seed)
    more = torch.randint(3, 50, (1, words), generator=torch.Generator().manual_seed(seed))
    row["input_ids"] = torch.cat([more, row["input_ids"]], 1)
    if "mm_token_type_ids" in row:
        row["mm_token_type_ids"] = torch.cat([torch.zeros_like(more), row["mm_token_type_ids"]], 1)
    return row


def batch(model: Any, rng: random.Random, rows: int, *, right: bool = False) -> Inputs:
    """Draw rows of text with no, one or several pictures or videos, padded to the longest."""
    drawn = []
    for _ in range(rows):
        grids = [rng.choice(GRIDS) for _ in range(rng.choice([0, 1, 1, 2]))]
        words = rng.choice([rng.randint(0, 20)] * 9 + [rng.choice([121, 126, 128, 130])])  # a cache has 128 slots
        drawn.append(row_of(model, grids, words, rng.randrange(999)))
    return joined(drawn, right=right)


class Scores:
    """A logits processor that keeps what it gets and changes nothing."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


def compare(model: Any, inputs: Inputs, seed: int = 0, **options: Any) -> None:
    """Generate by stock and by `graphed_decoding`; expect equal tokens, and logits equal to rounding."""
    kept: list[Scores] = []

    def make_scores() -> list[Scores]:
        kept.append(Scores())
        return [kept[-1]]

    both(model, inputs, seed=seed, make_logits_processor=make_scores, **options)
    stock, ours = (of_way.scores for of_way in kept)
    for expected, actual in zip(stock, ours, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def draw_options(rng: random.Random) -> Inputs:
    """Draw how tokens are chosen, and when rows end."""
    choices: list[Inputs] = [
        {},
        dict(do_sample=True, temperature=1.3, top_k=9),
        dict(do_sample=True, top_p=0.8, repetition_penalty=1.3, min_new_tokens=3),
        dict(do_sample=True, num_return_sequences=2),
        dict(no_repeat_ngram_size=2, bad_words_ids=[[5], [7, 8]]),
        dict(eos_token_id=list(range(3, 50, rng.choice([2, 5, 9]))), pad_token_id=2),
        dict(eos_token_id=list(range(3, 50, 3)), pad_token_id=2, do_sample=True, temperature=2.0),
    ]
    return rng.choice(choices) | dict(max_new_tokens=rng.choice([1, 2, 9, 12]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", ["qwen2_5_vl", *alike("qwen3_vl", "qwen2_vl")])
@pytest.mark.parametrize("calls", [5, pytest.param(170, marks=pytest.mark.matrix)])
def test_random_batches_give_stocks_tokens_whatever_the_groups(family: str, calls: int) -> None:
    """Rows that end early, no, one and several pictures and videos, padding, sampling, LoRA, and other weights."""
    model = MODELS[family].build()
    add_adapters(model)
    patch(model)
    rng = random.Random(calls)
    calls_of_one_token = 0
    for seed in range(calls):
        change_model(model, rng)
        inputs = batch(model, rng, rng.randint(2, 11), right=seed % 4 == 3)
        options = draw_options(rng)
        calls_of_one_token += options["max_new_tokens"] == 1
        with torch.inference_mode(rng.random() < 0.3):
            compare(model, inputs, seed, **options)
    assert steps_of(model).groups > 2 * calls
    assert counts_of(model) == Counts(calls - calls_of_one_token, {})
    assert f"prompts in {steps_of(model).groups} groups" in str(status(model))


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_text_without_pictures_is_divided(kind: str) -> None:
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    config = getattr(transformers, f"{kind}Config")(vocab_size=60, intermediate_size=48, head_dim=8, **sizes)
    model = tiny.randomise(getattr(transformers, f"{kind}ForCausalLM")(config)).eval()
    rows = [{"input_ids": torch.randint(3, 50, (1, length))} for length in (40, 3, 38, 2, 41)]
    compare(model, joined(rows), max_new_tokens=9, pad_token_id=0)
    assert steps_of(model).groups == 4


def test_a_picture_that_the_mask_hides_stays_with_its_row() -> None:
    """As in rows that lie behind padding with all that came before."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = ragged(model, 5, 5, 30, 30)
    inputs["attention_mask"][1, :-1] = 0
    compare(model, inputs, max_new_tokens=9)
    assert counts_of(model) == Counts(1, {}) and steps_of(model).groups > 1


def test_a_group_for_which_memory_runs_out_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["qwen2_5_vl"].build()
    sizes = []
    inputs_of = prefill.GroupedPrompt.inputs_of

    def inputs_of_few_rows(self: prefill.GroupedPrompt, rows: list[int], *others: Any) -> Inputs:
        sizes.append(len(rows))
        if len(rows) > 1:
            raise torch.OutOfMemoryError
        return inputs_of(self, rows, *others)

    monkeypatch.setattr(prefill.GroupedPrompt, "inputs_of", inputs_of_few_rows)
    monkeypatch.setattr(prefill, "GROUP_TOKENS", 250)
    monkeypatch.setattr(prefill, "TOKENS_OF_A_FORWARD", 100)
    compare(model, batch(model, random.Random(2), 8), max_new_tokens=9)
    assert max(sizes) > 2 and sizes.count(1) == 8


def test_groups_take_no_more_than_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the bound, with a part of it, and without any memory: then rows go one by one."""
    model = MODELS["qwen3_vl"].build()
    monkeypatch.setattr(prefill, "GROUP_TOKENS", 500)
    monkeypatch.setattr(prefill, "TOKENS_OF_A_FORWARD", 100)
    bytes_of_token = prefill.bytes_of_group(model, 1, 2) - prefill.bytes_of_group(model, 1, 1)
    assert bytes_of_token == (16 * 32 + 3 * (6 * 8 + 64)) * 4
    inputs = batch(model, random.Random(2), 8)
    compare(model, inputs, max_new_tokens=9)  # the proof has a group of its own
    inputs_of = prefill.GroupedPrompt.inputs_of
    groups: list[tuple[int, int]] = []

    def recorded(self: prefill.GroupedPrompt, rows: list[int], cache: Any, columns: int) -> Inputs:
        groups.append((len(rows), columns))
        return inputs_of(self, rows, cache, columns)

    monkeypatch.setattr(prefill.GroupedPrompt, "inputs_of", recorded)
    most = []
    for tokens in (10_000, 150, 0):
        free = tokens * bytes_of_token
        monkeypatch.setattr(prefill, "bytes_left", lambda device, free=free: free)
        groups.clear()
        compare(model, inputs, max_new_tokens=9)
        assert sum(rows for rows, _ in groups) == 8
        assert all(rows == 1 or prefill.bytes_of_group(model, rows, columns) <= free for rows, columns in groups)
        most.append(max(rows for rows, _ in groups))
    assert most[0] > most[1] > most[2] == 1


@pytest.mark.usefixtures("way")
def test_a_shorter_batch_takes_the_step_of_a_longer_one() -> None:
    """Batches of a folder become shorter and shorter, and a capture for each would take longer than its steps."""
    model = MODELS["qwen2_5_vl"].build()
    texts = [torch.randint(3, 50, (2, length)) for length in (250, 150, 40)]  # of 384, 256 and 128 slots
    for ids_BT in texts:
        compare(model, dict(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)), max_new_tokens=9)
    assert [kept.room.size.slots for kept in steps_of(model).kept.values()] == [384, 128]


def attend_to_all(*tensors: torch.Tensor, is_causal: bool, **options: Any) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("family", alike("qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl"))
def test_prompts_run_without_their_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is seen by the proof, and then stock's text model runs."""
    for is_wrong in (False, True):
        if is_wrong:
            monkeypatch.setattr(layers, "scaled_dot_product_attention", attend_to_all)
        model = MODELS[family].build()
        compare(model, batch(model, random.Random(3), 9), max_new_tokens=9)
        reasons = list(steps_of(model).padded_reasons.values())
        assert [bool(reason) for reason in reasons] == [is_wrong], str(reasons)
        assert ("a packed prompt differs" in str(steps_of(model))) == is_wrong


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.matrix] * (name not in ("paddleocr_vl", "qwen3_5")))
        for name in COMPOSITES
        if COMPOSITES[name].model in SERVED and name not in EARLIER
    ],
)
def test_prompts_of_every_text_model_run_without_padding_but_for_linear_attention(name: str) -> None:
    """PaddleOCR-VL embeds tokens by its text model, which is exchanged here."""
    model = COMPOSITES[name].make()
    ids_BT = torch.randint(3, 50, (5, 70), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :60] = mask_BT[1, :50] = 0
    compare(model, dict(input_ids=ids_BT, attention_mask=mask_BT), max_new_tokens=9)
    assert not any(steps_of(model).padded_reasons.values()), str(steps_of(model))
    assert (steps_of(model).groups > 0) == (name not in LINEAR)
    assert counts_of(model).static_calls == 1 or name in LINEAR  # before transformers 5.17 stock decodes these


def ragged(model: Any, *lengths: int) -> Inputs:
    """Draw rows of so many tokens of text, each with a picture."""
    return joined([row_of(model, [GRIDS[length % len(GRIDS)]], length, length) for length in lengths])


def features_of(model: Any, inputs: Inputs) -> Inputs:
    """Return the features of all pictures and videos, as the model's methods return them."""
    features = {}
    for modality, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if pixels in inputs:
            encode = getattr(model, f"get_{modality}_features")
            features[modality] = encode(inputs[pixels], inputs[grid], return_dict=True)
    return features


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl"))
def test_pictures_whose_features_are_given_are_not_encoded_again(family: str) -> None:
    """As by transformers until 5.17, whose `generate` takes no features. A prompt is proven with pixels first."""
    model = patch(MODELS[family].build())
    model._supports_mm_encoder_outputs = lambda: False
    for seed in range(4):
        inputs = batch(model, random.Random(seed), 7)
        features = features_of(model, inputs)
        calls = status(model).towers[0].calls
        options = dict(max_new_tokens=9, min_new_tokens=9)
        decode = functools.partial(graphed_decoding, features=features)
        ours = model.generate(**inputs, **options, custom_generate=decode)
        encoded_again = status(model).towers[0].calls - calls
        assert torch.equal(ours, model.generate(**inputs, **options))
        assert encoded_again == 0 or seed == 0
    assert steps_of(model).groups > 8 and not any(steps_of(model).padded_reasons.values())


def test_features_that_do_not_fit_a_call_are_not_taken() -> None:
    """They are of other pictures, or of every row once, and `generate` repeats the rows. `status` says so."""
    model = MODELS["qwen3_vl"].build()
    model._supports_mm_encoder_outputs = lambda: False
    inputs = ragged(model, 30, 40, 50)
    of_few = features_of(model, ragged(model, 30, 40))
    of_all = features_of(model, inputs)
    for features, rows in ((of_few, 1), (of_all, 2), (of_few, 1), ({"video": of_all["image"]}, 1)):
        decode = functools.partial(graphed_decoding, features=features)
        options = dict(num_return_sequences=rows, do_sample=True, top_k=1)
        both(model, inputs, max_new_tokens=9, custom_generate=decode, **options)
    assert list(steps_of(model).padded_reasons.values()) == [""]
    assert steps_of(model).encoded_again == {
        "features of 2 images do not fit the call's 3": 2,
        "features of 3 images do not fit the call's 6": 1,
        "features of videos, of which the call has none": 1,
    }
    assert "4 encoded again (2 x features of 2 images" in str(status(model))


def test_prompts_that_take_no_features_are_counted() -> None:
    """Beams are stock's, and `generate` of newer transformers encodes pictures before the prompt."""
    model = MODELS["qwen3_vl"].build()
    inputs = ragged(model, 30, 40, 50)
    decode = functools.partial(graphed_decoding, features=features_of(model, inputs))
    encodes_before = getattr(model, "_supports_mm_encoder_outputs", lambda: False)()
    for beams in (2, 1):
        both(model, inputs, max_new_tokens=9, num_beams=beams, custom_generate=decode)
    expected = {"a prompt that did not run in our layers": 1}
    if encodes_before:
        expected["generate encodes images itself, and takes mm_encoder_outputs"] = 1
    assert steps_of(model).encoded_again == expected


def test_features_of_another_model_are_errors() -> None:
    model = MODELS["qwen3_vl"].build()
    inputs = ragged(model, 30, 40)
    output = features_of(model, inputs)["image"]
    wide = [torch.cat([picture, picture], dim=1) for picture in output.pooler_output]
    layers = output.deepstack_features
    for features, what in (
        ({"images": output}, "got {'images': "),
        (output, "got {'last_hidden_state': "),
        ({"image": None}, "got {'image': 'NoneType'}"),
        (output.pooler_output, "expected features as"),
        ({"image": type(output)(pooler_output=wide, deepstack_features=layers)}, "expected features of width 32"),
        ({"image": type(output)(pooler_output=output.pooler_output)}, "2 deepstack layers"),
    ):
        with pytest.raises(ValueError, match=re.escape(what)):
            model.generate(**inputs, custom_generate=functools.partial(graphed_decoding, features=features))


@pytest.mark.parametrize("layers", [0, 1])
def test_features_of_a_tower_that_ends_before_a_deepstack_layer(layers: int) -> None:
    """Qwen3-VL that is loaded with a smaller `depth` of its tower: its config still lists every deepstack layer."""
    model = MODELS["qwen3_vl"].build()
    model._supports_mm_encoder_outputs = lambda: False
    tower = tiny.tower_of(model)
    del tower.blocks[tower.deepstack_visual_indexes[layers] :]
    inputs = ragged(model, 30, 40, 50)
    features = features_of(model, inputs)
    assert len(features["image"].deepstack_features) == layers
    compare(model, inputs, max_new_tokens=9, custom_generate=functools.partial(graphed_decoding, features=features))
    assert not steps_of(model).encoded_again


def test_indices_are_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        indices = on_device([2, 0], torch.device("cpu"))
    assert indices.tolist() == [2, 0]


class HookAt(transformers.LogitsProcessor):
    """Negate all logits by a hook on the head, from a column on."""

    def __init__(self, model: Any, column: int) -> None:
        self._model = model
        self._column = column

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self._column:
            self.handle = self._model.lm_head.register_forward_hook(lambda module, args, output: -output)
        return scores


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_rows_of_different_lengths_share_an_axis(family: str) -> None:
    """One long row does not make all others long. The next batch divides the axis of the step in another way."""
    model = MODELS[family].build()
    for lengths in ((300, 60, 70, 65, 80, 62, 75), (33, 21, 280, 90, 24, 28, 31), (50, 60, 299, 40, 30, 20, 10)):
        compare(model, ragged(model, *lengths), max_new_tokens=9)
        [kept] = steps_of(model).kept.values()
        for layer in kept.layers:
            assert layer.keys.shape[0] == 1 and layer.keys.shape[2] < 0.8 * 7 * 330
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert steps_of(model).captures.total() == 1 and counts_of(model).static_calls == 3


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lengths", [(300, 20, 30, 25, 40, 22, 35), (5, 5)], ids=["an axis is shared", "even rows"])
def test_a_criterion_of_the_users_may_allow_more_tokens_than_the_config(lengths: tuple[int, ...]) -> None:
    """Transformers prefers it. A shared axis has room for no more tokens than are known before."""
    model = MODELS["qwen2_5_vl"].build()
    inputs = ragged(model, *lengths)
    criterion = MaxLengthCriteria(inputs["input_ids"].shape[1] + 200)
    ends = dict(eos_token_id=1, suppress_tokens=[1], stopping_criteria=[criterion])
    tokens = both(model, inputs, max_new_tokens=9, **ends)
    assert tokens.shape[1] == criterion.max_length and counts_of(model) == Counts(1, {})


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lengths", [(300, 20, 30, 25, 40, 22, 35), (5, 5)], ids=["an axis is shared", "even rows"])
@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl"))
def test_a_hook_that_a_processor_adds_acts_from_the_next_token_on(family: str, lengths: tuple[int, ...]) -> None:
    model = MODELS[family].build()
    inputs = ragged(model, *lengths)
    outputs = []
    for custom_generate in (None, graphed_decoding):
        hook = HookAt(model, inputs["input_ids"].shape[1] + 5)
        options = dict(max_new_tokens=9, min_new_tokens=9, logits_processor=[hook], custom_generate=custom_generate)
        outputs.append(model.generate(**inputs, **options))
        hook.handle.remove()
    assert torch.equal(*outputs) and counts_of(model).reasons == {"a forward hook on lm_head": 1}
    compare(model, inputs, max_new_tokens=9)
    assert counts_of(model).static_calls == 1


def test_a_step_of_an_adapter_that_a_processor_picks_has_a_room_of_its_own(recorder: type[OperationRecorder]) -> None:
    """The prompt lies in the room of the adapter that was active before."""
    model = TINY["qwen2_5_vl"].build()
    add_adapters(model)
    inputs = ragged(model, 300, 60, 70, 65, 80, 62, 75)
    model.set_adapter("two")
    both(model, inputs, max_new_tokens=9)

    def pick(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model.set_adapter("two")
        return scores

    outputs = []
    for custom_generate in (None, graphed_decoding):
        model.set_adapter("one")
        options = dict(max_new_tokens=9, logits_processor=[pick])
        outputs.append(model.generate(**inputs, **options, do_sample=False, custom_generate=custom_generate))
    assert torch.equal(*outputs) and counts_of(model) == Counts(2, {})


@pytest.mark.usefixtures("way")
def test_the_room_of_a_call_goes_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take half of a GPU's memory, which Python's collector does not know."""
    model = MODELS["qwen3_vl"].build()
    rooms = []
    make = room.Room.__init__
    monkeypatch.setattr(room.Room, "__init__", lambda new, *args: rooms.append(weakref.ref(new)) or make(new, *args))
    inputs = joined([tiny.chat_inputs(model, [grid]) for grid in GRIDS[:4]])
    gc.collect()
    gc.disable()
    try:
        for tokens in (1, 20):
            model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, custom_generate=graphed_decoding)
            alive = {id(each) for each in (reference() for reference in rooms) if each is not None}
            assert alive == {id(step.room) for step in steps_of(model).kept.values()}
        free_steps(model)
        assert rooms and not any(reference() for reference in rooms)
    finally:
        gc.enable()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("error", [ArithmeticError("differs"), torch.OutOfMemoryError()])
def test_stock_goes_on_after_groups_where_a_step_is_refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(self: step.DecodeStep, *args: Any) -> torch.Tensor:
        self(args[0])  # its keys are written
        raise error

    model = MODELS["qwen3_vl"].build()
    monkeypatch.setattr(step.DecodeStep, "prove", prove)
    compare(model, batch(model, random.Random(9), 9), max_new_tokens=9)
    assert steps_of(model).groups > 1 and counts_of(model).static_calls == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("family", "most"), alike(("qwen3_vl", 1), ("qwen2_5_vl", 3), ("qwen2_vl", 2)))
def test_a_call_whose_cache_does_not_fit_is_halved(family: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different lengths, so one half may be shorter. Each has its own pictures."""
    model = MODELS[family].build()
    sizes = []

    def make_layers(layers: Sequence[Any], rows: int, slots: int) -> list[Any]:
        sizes.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError
        return make(layers, rows, slots)

    make = room.make_layers
    monkeypatch.setattr(room, "make_layers", make_layers)
    for seed in range(2):
        inputs = batch(model, random.Random(seed), 9, right=seed == 1)
        options = dict(eos_token_id=list(range(3, 50, 4)), pad_token_id=2, no_repeat_ngram_size=3)
        options |= dict(suppress_tokens=[9], bad_words_ids=[[5], [7, 8]])
        decode = functools.partial(graphed_decoding, features=features_of(model, inputs))
        both(model, inputs, max_new_tokens=9, custom_generate=decode, **options)
    assert min(sizes) <= most and counts_of(model).static_calls > 4
    assert set(counts_of(model).reasons) <= {"memory ran out"}, "of the step of a short prompt, which is no group"
    assert steps_of(model).encoded_again["a part of the rows at a time"] == 2


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True),
        dict(repetition_penalty=1.2),
        dict(make_logits_processor=lambda: [Scores()]),
        dict(make_stopping_criteria=lambda: [transformers.MaxTimeCriteria(99)]),
        dict(make_streamer=lambda: SimpleNamespace(put=lambda ids: None, end=lambda: None)),
        dict(custom_generate=functools.partial(graphed_decoding, halve=False)),
    ],
    ids=lambda options: next(iter(options)),
)
def test_calls_whose_rows_depend_on_each_other_are_not_halved(options: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn for all rows, and code of users sees all of them; or the caller halves its batches."""

    def make_layers(*_: Any) -> list[Any]:
        raise torch.OutOfMemoryError

    model = MODELS["qwen3_vl"].build()
    monkeypatch.setattr(room, "make_layers", make_layers)
    with pytest.raises(torch.OutOfMemoryError):
        both(model, batch(model, random.Random(0), 9), max_new_tokens=9, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda tower: tower.register_forward_hook(lambda *_: None),
        lambda tower: setattr(tower, "forward", functools.partial(tower.forward)),
    ],
    ids=["a hook", "a wrapper"],
)
def test_code_that_sees_calls_of_the_tower_sees_stocks(change: Callable[[Any], None]) -> None:
    """transformers' output capturing, and interpretability libraries, count and record the calls of modules."""
    model = MODELS["qwen3_vl"].build()
    change(model.model.visual)
    compare(model, batch(model, random.Random(3), 6), max_new_tokens=9)
    assert steps_of(model).groups == 0


@given(st.lists(st.integers(1, 900), min_size=1, max_size=40), st.integers(1, 4000))
def test_groups_hold_every_row_once_within_the_bound(lengths: list[int], most: int) -> None:
    groups = plan_groups(lengths, most)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for rows in groups:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= most
    cost = sum(prefill.TOKENS_OF_A_FORWARD + len(rows) * max(lengths[row] for row in rows) for rows in groups)
    assert cost <= sum(prefill.TOKENS_OF_A_FORWARD + length for length in lengths), "no row gains by going alone"


def test_short_and_even_prompts_are_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert plan_groups([500] * 32, 16384) == [list(range(32))]
    assert plan_groups([500, 400, 450, 480], 16384) == [[1, 2, 3, 0]]
    model = MODELS["qwen3_vl"].build()
    compare(model, batch(model, random.Random(5), 4), max_new_tokens=9)
    assert steps_of(model).groups == 0
