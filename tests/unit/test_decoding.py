"""`graphed_decoding` beside stock's `generate` in fp32: prompts, caches, streamers, criteria, wrapped models."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from support.composites import COMPOSITES
from support.decoding import both, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import alike
from tiny import TINY
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.generation import utils as generation_utils
from transformers.generation.streamers import TextIteratorStreamer

import hf_vit_accel
from hf_vit_accel import graphed_decoding
from hf_vit_accel.decoding import ahead, room
from hf_vit_accel.decoding.packed import CACHE
from hf_vit_accel.decoding.step import DecodeStep
from hf_vit_accel.decoding.steps import steps_of

ALL_OUTPUTS: dict[str, Any] = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
NO_PICTURES = dict(suppress_tokens=[tiny.IMAGE, tiny.VIDEO, tiny.START, tiny.END])
both_ways = pytest.mark.usefixtures("way")


def text(*rows: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor(rows)}


def prompts(model: Any) -> dict[str, dict[str, Any]]:
    """Return prompts of every kind: a picture, a video, padding on the left, text, one token."""
    return {
        "picture and video": tiny.chat_inputs(model, [(1, 4, 6), (4, 4, 4)]),
        "left padding": tiny.left_padded(model),
        "text": text([5, 6, 7, 8], [9, 4, 3, 3]),
        "one token": text([5]),
        "padded text": tiny.padded_text((2, 4)),
    }


@both_ways
@pytest.mark.parametrize("family", ["qwen2_5_vl", *alike("qwen3_vl_moe", "qwen2_vl", "qwen3_vl")])
def test_every_prompt_gets_the_tokens_logits_and_cache_of_stock(family: str) -> None:
    model = TINY[family].build()
    for name, inputs in prompts(model).items():
        both(model, inputs, max_new_tokens=9, **ALL_OUTPUTS)
        both(model, inputs, max_new_tokens=6, do_sample=True, num_return_sequences=2, temperature=1.5)
        assert not counts_of(model).reasons, name
    assert counts_of(model).static_calls == 10


def test_a_model_that_was_trained_with_every_rank() -> None:
    """A training forward leaves a hook on the text model, which does nothing in a step."""
    model = hf_vit_accel.patch(TINY["qwen2_5_vl"].build(), every_rank=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    model.train()(input_ids=ids).logits.sum().backward()
    assert model.model.language_model._forward_pre_hooks
    both(model.eval(), {"input_ids": ids}, max_new_tokens=9)
    assert counts_of(model).static_calls == 1 and not counts_of(model).reasons


@both_ways
def test_a_text_longer_than_its_cache_goes_on_in_a_larger_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_RESERVE", 16)
    inputs = tiny.left_padded(model, (1, 4, 94))
    both(model, inputs, max_new_tokens=32, min_new_tokens=32, **ALL_OUTPUTS)
    assert counts_of(model).static_calls == 1
    assert len(steps_of(model).kept) == 2


@both_ways
def test_prompts_of_embeddings(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    embeddings = model.get_input_embeddings()(ids).detach()
    both(model, {"inputs_embeds": embeddings}, max_new_tokens=12, min_new_tokens=12)
    both(model, {"inputs_embeds": embeddings, "input_ids": ids}, max_new_tokens=9, **ALL_OUTPUTS)
    assert counts_of(model).static_calls == 2


@pytest.fixture
def runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU queue a step before it knows whether the last one was the end, as a GPU does."""
    if not hasattr(generation_utils, ahead._STOP_CHECK):
        pytest.skip("this transformers waits for every step")
    done = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda **_: done)
    monkeypatch.setattr(ahead, "_DEVICES", ("cpu",))


@both_ways
@pytest.mark.usefixtures("runs_ahead")
def test_a_step_too_many_leaves_no_trace(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    check = ahead._StopCheck.__init__
    call = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda step, ids: steps.append(step) or call(step, ids))
    inputs = text([5, 6, 7, 8], [9, 4, 3, 3], [11, 12, 13, 14])
    free = both(model, inputs, max_new_tokens=24, min_new_tokens=24)
    assert len(steps) == 23, "the last token is known in advance"
    ends = [int(free[row, 4 + 5 * row + 3]) for row in range(3)]
    checks: weakref.WeakSet[Any] = weakref.WeakSet()
    monkeypatch.setattr(ahead._StopCheck, "__init__", lambda new, *args: checks.add(new) or check(new, *args))
    gc.disable()
    try:
        ours = both(model, inputs, max_new_tokens=24, eos_token_id=ends)
    finally:
        gc.enable()
    new_tokens = ours.shape[1] - 4
    assert not checks, "they hold the keys and values of all rows"
    assert new_tokens < 24 and len(steps) == 23 + new_tokens, "the first token takes no step; one step is too many"


def rows_that_end(model: Any) -> dict[str, Any]:
    """Return arguments with which two rows end early."""
    inputs = text([5, 6, 7, 8], [9, 4, 3, 3])
    free = model.generate(**inputs, max_new_tokens=24, min_new_tokens=24)
    ends = [int(free[row, 4 + 5 * row + 3]) for row in range(2)]
    return dict(inputs=inputs, max_new_tokens=24, eos_token_id=ends)


@both_ways
@pytest.mark.usefixtures("runs_ahead")
def test_random_numbers_and_code_of_the_user_see_no_step_too_many(model: Any) -> None:
    arguments = rows_that_end(model)
    sampling = dict(do_sample=True, top_k=0, eos_token_id=list(range(3, 20)))
    drawn = both(model, **arguments | sampling)
    assert drawn.shape[1] < 4 + 24, "the rows end early; `both` compares the generators of random numbers, too"
    calls = []

    def process(input_ids: Any, scores: Any) -> Any:
        calls.append(1)
        return scores

    def stop(input_ids: Any, scores: Any) -> Any:
        calls.append(1)
        return torch.zeros(2, dtype=torch.bool)

    def allow_all(row: int, ids: Any) -> range:  # as a grammar of outlines does
        calls.append(1)
        return range(50)

    nested = StoppingCriteriaList([StoppingCriteriaList([stop])])
    for name, value in dict(
        logits_processor=[process], stopping_criteria=nested, prefix_allowed_tokens_fn=allow_all
    ).items():
        calls.clear()
        ours = both(model, **arguments, **{name: value})
        assert len(calls) == 2 * (ours.shape[1] - 4) * (2 if value is allow_all else 1)


@both_ways
@pytest.mark.usefixtures("runs_ahead")
def test_forwards_of_stock_are_as_many_as_without_running_ahead(model: Any) -> None:
    """Hooks, code and random numbers of the user see no forward after the end: those are steps of ours alone."""
    arguments = rows_that_end(model)
    both(model, arguments["inputs"], max_new_tokens=24)
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    ours = both(model, **arguments)
    assert len(calls) == 2 * (ours.shape[1] - 4) and counts_of(model).static_calls == 1


class Tokenizer:
    """Decode tokens to their numbers."""

    def decode(self, ids: list[int], **kwargs: object) -> str:
        return "".join(f"{int(token)} " for token in ids)


@both_ways
@pytest.mark.parametrize(
    ("by", "kwargs"),
    [
        ("generate", {"use_cache": False}),
        ("partial", {"do_sample": True}),
        *alike(("generate", {}), ("generate", {"do_sample": True}), ("partial", {}), ("partial", {"use_cache": False})),
    ],
)
def test_a_reader_of_text_in_another_thread_gets_all_of_it(model: Any, kwargs: dict[str, Any], by: str) -> None:
    """`generate` passes no streamer on to a function, and a `TextIteratorStreamer` would wait for ever."""

    def to(streamer: Any, way: str) -> dict[str, Any]:
        if way == "partial":
            return {"custom_generate": functools.partial(graphed_decoding, streamer=streamer)}
        return {"streamer": streamer, "custom_generate": graphed_decoding if way == "generate" else None}

    def stream(way: str) -> str:
        streamer = TextIteratorStreamer(Tokenizer(), timeout=60)
        torch.manual_seed(0)
        arguments = text([5, 6, 7, 8]) | dict(max_new_tokens=10) | to(streamer, way) | kwargs
        thread = threading.Thread(target=model.generate, kwargs=arguments)
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        return streamed

    expected = stream("stock")
    assert stream(by) == expected and len(expected.split()) > 5
    silent = SimpleNamespace(put=lambda ids: None, end=lambda: None)
    with pytest.raises(ValueError, match="stream beams"):
        model.generate(**text([5, 6, 7, 8]), num_beams=2, **to(silent, by))


def test_frameworks_that_call_generate_get_it_from_a_partial(model: Any) -> None:
    """TRL and lmms-eval call `model.generate` themselves, and drop `custom_generate` from their own options."""
    expected = model.generate(**text([5, 6, 7, 8]), max_new_tokens=9)
    model.generate = functools.partial(model.generate, custom_generate=graphed_decoding)
    assert torch.equal(model.generate(**text([5, 6, 7, 8]), max_new_tokens=9), expected)
    assert counts_of(model).static_calls == 1


def test_an_assistant_that_generate_drops_changes_nothing(model: Any) -> None:
    both(model, text([5, 6, 7, 8]), max_new_tokens=9, assistant_model=model)
    assert counts_of(model).static_calls == 1


def test_ranks_in_step_decode_by_stock(model: Any) -> None:
    custom_generate = functools.partial(graphed_decoding, synced_gpus=True)
    with pytest.raises(ValueError, match="process group"):  # stock waits for other ranks
        model.generate(**text([5, 6]), custom_generate=custom_generate, max_new_tokens=9)
    assert counts_of(model).reasons == {"synced_gpus": 1}


def test_stock_decodes_a_call_without_a_static_step(model: Any) -> None:
    inputs = text([5, 6, 7])
    both(model, inputs, max_new_tokens=5)
    static_cache = {f"make_{CACHE}": lambda: StaticCache(config=model.config, max_cache_len=128)}
    both(model, inputs, max_new_tokens=12, **static_cache)
    for attention in (layer.self_attn for layer in model.model.language_model.layers):
        attention.attention_dropout = 0.1
    both(model.train(), inputs, max_new_tokens=9)
    model.eval()
    assert counts_of(model).reasons == {
        "fewer than 8 tokens to come, and no step captured": 1,
        "a cache of class StaticCache": 1,
        "dropout": 1,
    }
    both(model, inputs, max_new_tokens=9)
    both(model, inputs, max_new_tokens=5)
    assert counts_of(model).static_calls == 2


@both_ways
def test_a_model_that_trains_with_checkpoints_decodes_in_eval(model: PreTrainedModel) -> None:
    """transformers leaves its hook on the embedding when checkpointing is disabled. It changes no values."""
    model.enable_input_require_grads()  # as `gradient_checkpointing_enable` does
    assert model.get_input_embeddings()._forward_hooks
    inputs = tiny.left_padded(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            both(model, inputs, max_new_tokens=9, **ALL_OUTPUTS)
    assert counts_of(model).static_calls == 3


@both_ways
def test_states_of_linear_attention_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text outgrows its first cache of 128 slots. Later calls write to the states of either step."""
    monkeypatch.setattr(room, "_RESERVE", 16)
    model = COMPOSITES["qwen3_5"].make()
    rows = tiny.padded_text((5, 9))
    inputs = {name: torch.cat([value, value[:, 4:].repeat(1, 18)], 1) for name, value in rows.items()}
    with torch.inference_mode():
        both(model, inputs, max_new_tokens=36, min_new_tokens=36, **ALL_OUTPUTS)
    steps = set(steps_of(model).kept)
    assert len(steps) == 2
    both(model, inputs, max_new_tokens=36, min_new_tokens=36, **ALL_OUTPUTS)
    assert counts_of(model).static_calls == 2 and set(steps_of(model).kept) == steps


@both_ways
def test_autocast_keeps_its_steps_to_itself(model: Any) -> None:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            both(model, text([5, 6]), max_new_tokens=9)
        both(model, text([5, 6]), max_new_tokens=9)
    counts = counts_of(model)
    assert (counts.static_calls, counts.reasons) == (4, {})


@both_ways
@pytest.mark.usefixtures("way")
def test_a_model_whose_experts_run_otherwise_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers changes their implementation on a GPU, after the prompt. A step is captured once all the same."""
    model = TINY["qwen3_vl_moe"].build()

    @contextmanager
    def as_on_a_gpu() -> Iterator[None]:
        model.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            model.set_experts_implementation("grouped_mm")

    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(model, "_optimize_model_for_decode", as_on_a_gpu)
    for seed in range(3):
        both(model, tiny.left_padded(model), seed, max_new_tokens=9)
    assert steps_of(model).captures == {"first call": 1} and counts_of(model).static_calls == 3


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe"))
def test_a_model_that_accelerate_prepared_for_autocast(family: str) -> None:
    """As a trainer with `bf16=True` generates (TRL's GRPO). A cache has one dtype, that of its first keys."""
    accelerate = pytest.importorskip("accelerate")
    model = TINY[family].build()
    model.train()
    accelerate.state.AcceleratorState._reset_state(True)  # an earlier test may have left its state
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.unwrap_model(accelerator.prepare(model))
    assert prepared is model and "forward" in vars(model)
    outputs = [
        model.generate(**text([5, 6]), max_new_tokens=9, **ALL_OUTPUTS, custom_generate=custom_generate)
        for custom_generate in (None, graphed_decoding)
    ]
    dtypes = [[(layer.keys.dtype, layer.values.dtype) for layer in output[CACHE].layers] for output in outputs]
    assert dtypes[0] == dtypes[1]
    torch.testing.assert_close(outputs[1].logits[1], outputs[0].logits[1], atol=0.05, rtol=0.05)
    assert counts_of(model).static_calls == 1 and not counts_of(model).reasons


@pytest.mark.parametrize("name", ["forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_a_method_of_the_users_acts_at_every_token(model: Any, name: str) -> None:
    """A wrapper with the name and `__wrapped__` of transformers' function is not that function."""
    calls = []
    function = getattr(model, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    setattr(model, name, wrapper)
    model.generate(**text([5, 6]), max_new_tokens=12, min_new_tokens=12, custom_generate=graphed_decoding)
    assert len(calls) >= 12 and counts_of(model).static_calls == 0


def test_a_forward_of_another_model_is_not_its_own(model: Any) -> None:
    """A deep copy of a model with a bound forward (TRL's `GRPOTrainer` binds one) calls the first model's weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    twin.forward = model.forward
    both(twin, text([5, 6]), max_new_tokens=9)
    assert counts_of(twin).reasons == {f"forward of {type(model).__name__} is not transformers' own": 1}


def test_a_model_in_training_mode_whose_dropout_is_inactive(model: Any) -> None:
    """GRPO generates within a training step. A change of mode captures nothing anew."""
    for is_training in (True, False, True):
        both(model.train(is_training), text([5, 6]), max_new_tokens=9)
    assert counts_of(model).static_calls == 3 and len(steps_of(model).kept) == 1
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    both(model, text([5, 6]), max_new_tokens=9)
    assert counts_of(model).reasons == {"gradient checkpoints in training mode": 1}


@both_ways
def test_copies_begin_without_steps_and_files_know_nothing(model: Any, tmp_path: Path) -> None:
    inputs = tiny.left_padded(model)
    both(model, inputs, max_new_tokens=9)
    model.save_pretrained(tmp_path)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), type(model).from_pretrained(tmp_path)):
        assert counts_of(twin).static_calls == 0
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        both(twin, inputs, max_new_tokens=9)  # the twin's own weights
        assert counts_of(twin).static_calls == 1
    both(model, inputs, max_new_tokens=9)


@both_ways
def test_an_error_of_the_user_leaves_later_calls_right(model: Any) -> None:
    class Fail(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores if input_ids.shape[1] < 12 else 1 / 0

    options = dict(max_new_tokens=20, min_new_tokens=20)
    with pytest.raises(ZeroDivisionError):
        processors = LogitsProcessorList([Fail()])
        model.generate(**text([5, 6, 7]), **options, logits_processor=processors, custom_generate=graphed_decoding)
    both(model, text([5, 6, 7]), **options)
    assert not counts_of(model).reasons


@both_ways
def test_threads_decode_at_once(model: Any) -> None:
    inputs = [text([5, 6, 7 + index]) for index in range(4)]
    expected = [model.generate(**prompt, max_new_tokens=9) for prompt in inputs]

    def decode(index: int) -> None:
        for _ in range(2):
            ours = model.generate(**inputs[index], max_new_tokens=9, custom_generate=graphed_decoding)
            assert torch.equal(ours, expected[index])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(decode, range(4)))
    counts = counts_of(model)
    assert counts.static_calls + counts.reasons.get("another call decodes", 0) == 8


def test_status_reports_the_calls(model: Any, recorder: type[OperationRecorder]) -> None:
    assert hf_vit_accel.status(model).decoding is None
    both(model, text([5, 6]), max_new_tokens=9)
    both(model, text([5, 6]), max_new_tokens=9, num_beams=4)
    line = str(hf_vit_accel.status(model)).splitlines()[-1]
    assert line.startswith("decoding: 1 call on a static cache (1 held, ")
    assert line.endswith("), 1 captured (1 x first call), 1 by stock (1 x beams)")
    assert "decoding" in hf_vit_accel.status(model).to_dict()


LENGTH = dict(max_new_tokens=16, min_new_tokens=16)


@functools.cache
def forced_text(family: str) -> tuple[dict[str, Any], torch.Tensor, list[torch.Tensor]]:
    """Return inputs of several rows, and the tokens and logits of stock in fp32."""
    model = TINY[family].build()
    rows = 12 if "moe" in family else 3  # another expert at a rounding is an error of its own size
    prompts = [tiny.chat_inputs(model, [(1, 4, 6)], seed) for seed in range(rows)]
    inputs = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
    outputs = model.generate(**inputs, **LENGTH, **NO_PICTURES, **ALL_OUTPUTS)
    return inputs, outputs.sequences, outputs.logits


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*alike((torch.bfloat16, None), (torch.float16, None)), (torch.float32, torch.bfloat16)],
    ids=["bfloat16", "float16", "autocast"],
)
@both_ways
def test_half_precision_is_as_exact_as_stock(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """Logits of every step, with the tokens forced, are as near to fp32 as stock's."""
    for family in ("qwen2_5_vl", "qwen3_vl_moe"):
        inputs, sequences, exact_logits = forced_text(family)
        half = TINY[family].build().to(dtype)
        half_inputs = {name: value.to(dtype) if name.startswith("pixel") else value for name, value in inputs.items()}

        def force(row: int, ids: torch.Tensor, forced: torch.Tensor = sequences) -> list[int]:
            return [int(forced[row, len(ids)])]

        errors: dict[str, list[float]] = {}
        for way in ("ours", "stock"):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                logits = half.generate(
                    **half_inputs,
                    **LENGTH,
                    prefix_allowed_tokens_fn=force,
                    custom_generate=graphed_decoding if way == "ours" else None,
                    **ALL_OUTPUTS,
                ).logits
            errors[way] = [
                tiny.relative_error(row_logits, exact_row)
                for step_logits, exact_step in zip(logits[1:], exact_logits[1:], strict=True)
                for row_logits, exact_row in zip(step_logits, exact_step, strict=True)
            ]
        assert counts_of(half).static_calls == 1
        assert median(errors["ours"]) <= 1.1 * median(errors["stock"]), family
