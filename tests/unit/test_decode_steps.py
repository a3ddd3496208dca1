"""The steps of `graphed_decoding`: when they are captured anew, dropped or refused, and what never reaches a result."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import transformers
from packaging.version import Version
from support import quantised
from support.composites import COMPOSITES, tiny_fields
from support.decoding import both, counts_of
from support.recorded_ops import OperationRecorder
from tiny import TINY
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from transformers import GenerationConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

import hf_vit_accel
from hf_vit_accel import graphed_decoding
from hf_vit_accel.decoding import layers, room, text_models
from hf_vit_accel.decoding import step as step_module
from hf_vit_accel.decoding.steps import steps_of
from hf_vit_accel.decoding.text_models import TEXT_MODELS
from hf_vit_accel.graphs import memory

ATTENTIONS = ALL_ATTENTION_FUNCTIONS._global_mapping
Recorder = type[OperationRecorder]
TEXT = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 3, 3]])}


def test_one_capture_serves_all_calls_of_a_batch_and_bucket(model: Any, recorder: Recorder) -> None:
    both(model, tiny.left_padded(model), max_new_tokens=9)
    assert recorder.captures == 1
    both(model, tiny.left_padded(model), max_new_tokens=9, do_sample=True, repetition_penalty=1.3)
    assert recorder.captures == 1
    both(model, tiny.chat_inputs(model, [(1, 4, 6)]), max_new_tokens=9)  # another batch, and no padding
    both(model, tiny.chat_inputs(model, [(1, 8, 6)]), max_new_tokens=3)
    assert recorder.captures == 2
    assert counts_of(model).static_calls == 4


def test_a_call_of_one_token_is_its_prompt(model: Any, recorder: Recorder) -> None:
    both(model, TEXT, max_new_tokens=1)
    assert recorder.captures == 0 and counts_of(model).reasons == {}
    assert str(hf_vit_accel.status(model)).endswith("0 calls on a static cache (0 held, 0 MiB), 1 of one new token")


def _noise(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def _notes(model: Any) -> None:
    model.request = object()
    model.model.language_model.layers[0].mlp.note = 3
    model.generation_config = GenerationConfig(pad_token_id=2, eos_token_id=1)


def _other_tensor(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()


def test_only_other_memory_is_captured_anew(model: Any, recorder: Recorder) -> None:
    def by_eager(model: Any) -> None:
        model.set_attn_implementation("eager")

    both(model, TEXT, max_new_tokens=9)
    for change in (_noise, _notes, by_eager):
        change(model)
        both(model, TEXT, max_new_tokens=9)
        both(model, TEXT, max_new_tokens=9, do_sample=True)
        assert recorder.captures == 1, change
    _other_tensor(model)
    for _ in range(2):
        both(model, TEXT, max_new_tokens=9)
        assert recorder.captures == 2
    assert len(steps_of(model).captures) == 2, "each with a reason of its own"
    assert counts_of(model).static_calls == 9


@pytest.mark.parametrize("at", [1, 2])
def test_weights_that_a_call_puts_in_and_takes_out_are_not_captured_as_the_others(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A processor decodes one call by averaged weights, from its first token on or from where a cache is full."""
    monkeypatch.setattr(room, "_RESERVE", 4)
    monkeypatch.setattr(room, "slots_for", lambda tokens: tokens)
    linear = model.model.language_model.layers[0].mlp.down_proj
    own = linear.weight
    calls = []

    def exchange(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) == at:
            linear.weight = nn.Parameter(own * 1.7)
        return scores

    model.generate(
        **TEXT, max_new_tokens=12, do_sample=False, custom_generate=graphed_decoding, logits_processor=[exchange]
    )
    assert len(calls) > 8 and linear.weight is not own
    linear.weight = own
    both(model, TEXT, max_new_tokens=12, output_logits=True, return_dict_in_generate=True)


def test_the_bounds_drop_the_steps_used_least_recently(model: Any, recorder: Recorder) -> None:
    def generate(rows: int, **bounds: int) -> None:
        inputs = {"input_ids": TEXT["input_ids"][:1].repeat(rows, 1)}
        both(model, inputs, max_new_tokens=9, custom_generate=functools.partial(graphed_decoding, **bounds))

    for rows in (1, 2, 3, 1):
        generate(rows, max_graphs=2)
    assert recorder.captures == 4
    generate(3, max_graphs=2)
    assert recorder.captures == 4
    generate(3, max_bytes=0)
    assert not steps_of(model).kept
    generate(3)
    assert recorder.captures == 5 and counts_of(model).static_calls == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_graph=2), "unknown option 'max_graph': pass it to generate. graphed_decoding has streamer"),
        (dict(max_new_tokens=3), "unknown option 'max_new_tokens': pass it to generate"),
        (dict(assistant_model=None), "unknown option 'assistant_model'"),
        *((dict(max_graphs=bound), "expected max_graphs to be") for bound in ("8", 0, None)),
        *((dict(max_bytes=bound), "expected max_bytes to be") for bound in ("1GB", -1)),
    ],
)
def test_wrong_bounds_and_options_that_would_be_dropped_are_refused(
    model: Any, options: dict[str, object], message: str
) -> None:
    """transformers' loop takes any keyword, and reads none of these."""
    with pytest.raises(ValueError, match=message):
        model.generate(**TEXT, max_new_tokens=9, custom_generate=functools.partial(graphed_decoding, **options))
    both(model, TEXT, max_new_tokens=9)
    assert counts_of(model).static_calls == 1


def test_freed_steps_are_captured_anew_and_go_with_their_model(recorder: Recorder) -> None:
    model = TINY["qwen2_5_vl"].build()
    both(model, TEXT, max_new_tokens=9)
    both(model, {"input_ids": TEXT["input_ids"][:1]}, max_new_tokens=9)
    steps = [weakref.ref(step) for step in steps_of(model).kept.values()]
    assert len(steps) == 2
    hf_vit_accel.unpatch(model)
    gc.collect()
    assert [step() for step in steps] == [None, None]
    both(model, TEXT, max_new_tokens=9)
    assert recorder.captures == 3 and counts_of(model).static_calls == 3
    [last] = [weakref.ref(step) for step in steps_of(model).kept.values()]
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None and last() is None


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (RuntimeError("no capture"), {"RuntimeError: no capture": 2}),
        (torch.OutOfMemoryError("full"), {"memory ran out": 1}),
    ],
)
def test_a_failed_capture_is_tried_again_where_memory_ran_out(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, error: Exception, reasons: dict[str, int]
) -> None:
    monkeypatch.setattr(recorder, "fail", error)
    both(model, TEXT, max_new_tokens=9)
    monkeypatch.setattr(recorder, "fail", None)
    both(model, TEXT, max_new_tokens=9)
    assert counts_of(model).reasons == reasons and recorder.captures == 2 - sum(reasons.values())
    _other_tensor(model)
    both(model, TEXT, max_new_tokens=9)
    assert counts_of(model).static_calls == 3 - sum(reasons.values())


def test_refusals_of_many_models_in_turn_are_not_all_kept(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a server gives a quantised model other adapters for every call."""
    monkeypatch.setattr(text_models, "_MOST_KEYS", 2)
    monkeypatch.setattr(recorder, "fail", RuntimeError("no capture"))
    for _ in range(4):
        _other_tensor(model)
        both(model, TEXT, max_new_tokens=9)
        assert 1 <= len(steps_of(model).refusals) <= 2
    assert counts_of(model).reasons == {"RuntimeError: no capture": 4}


def test_memory_that_runs_out_in_a_long_text_lets_stock_go_on(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out where the text outgrows the cache that an earlier call captured."""
    monkeypatch.setattr(room, "_RESERVE", 16)
    inputs = tiny.left_padded(model, (1, 4, 94))
    both(model, inputs, max_new_tokens=9, min_new_tokens=9)
    monkeypatch.setattr(recorder, "fail", torch.OutOfMemoryError("full"))
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    replays = recorder.replays
    both(model, inputs, max_new_tokens=40, min_new_tokens=40, **outputs)
    assert counts_of(model).reasons == {"memory ran out": 1} and recorder.replays > replays


class Quantised(quantised.Int8Linear):
    """A linear of 8 bits, as libraries for quantisation put them in the place of `nn.Linear`."""

    def __init__(self, linear: nn.Linear, waits: bool = False) -> None:
        super().__init__(linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.waits = waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.waits and x.abs().max().item() > 1e9:
            return x
        return super().forward(x)


def quantise(model: Any, **options: bool) -> None:
    for layer in model.model.language_model.layers:
        for owner, names in ((layer.self_attn, "q_proj k_proj v_proj o_proj"), (layer.mlp, "gate_proj down_proj")):
            for name in names.split():
                setattr(owner, name, Quantised(getattr(owner, name), **options))


@pytest.mark.parametrize("waits", [False, True])
def test_quantised_linears_are_called(model: Any, recorder: Recorder, waits: bool) -> None:
    """Kernels that look for outliers in every call wait for the device: no capture allows that."""
    quantise(model, waits=waits)
    both(model, TEXT, max_new_tokens=9)
    model.model.language_model.layers[0].self_attn.q_proj.weight.data.neg_()
    both(model, TEXT, max_new_tokens=9)
    assert (counts_of(model).static_calls, recorder.captures) == ((0, 0) if waits else (2, 1))
    why = "RuntimeError: operation not permitted when stream is capturing"
    assert list(counts_of(model).reasons) == [why] * waits


class Scheduled(modeling_qwen2_5_vl.Qwen2MLP):
    """An MLP that counts its calls in Python. A matrix of whole numbers makes no quantised linear of it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 6 else -1)


class Counted(nn.Linear):
    """A linear whose calls are watched: its forward is torch's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().__call__(x)


def _layer(model: Any) -> Any:
    return model.model.language_model.layers[1]


def _mlp_with_a_table(model: Any, _: ExitStack) -> None:
    _layer(model).mlp.__class__ = Scheduled
    _layer(model).mlp.register_buffer("table", torch.arange(16).view(4, 4))


def _compiled_layer(model: Any, stack: ExitStack) -> None:
    _layer(model).compile(backend="eager")
    torch.compiler.set_stance("force_eager")
    stack.callback(torch.compiler.set_stance, "default")


def _attention_with_sinks(model: Any, _: ExitStack) -> None:
    attention = _layer(model).self_attn
    attention.forward = functools.partial(type(attention).forward, attention, s_aux=torch.zeros(4))


def _call_of_the_model(model: Any, _: ExitStack) -> None:
    kind = type(model)
    model.__class__ = type(
        "Watched", (kind,), {"__call__": lambda self, *args, **kwargs: kind.__call__(self, *args, **kwargs)}
    )


def _wrapped(function: Any) -> Any:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def _replaced(owner: Any, name: str) -> Callable[[Any, ExitStack], object]:
    return lambda _, stack: stack.enter_context(mock.patch.object(owner, name, _wrapped(getattr(owner, name))))


FOREIGN: dict[str, tuple[Callable[[Any, ExitStack], object], str]] = {
    "a hook": (lambda model, _: model.lm_head.register_forward_hook(lambda *_: None), "a forward hook on lm_head"),
    "a hook on all modules": (
        lambda _, stack: stack.callback(nn.modules.module.register_module_forward_hook(lambda *_: None).remove),
        "a global hook on all modules",
    ),
    "a compiled layer": (_compiled_layer, "torch.compile on model.language_model.layers.1"),
    "an MLP's class with a table": (
        _mlp_with_a_table,
        "a module of class Scheduled on model.language_model.layers.1.mlp",
    ),
    "a linear's call": (
        lambda model, _: setattr(_layer(model).mlp.down_proj, "__class__", Counted),
        "a module of class Counted on model.language_model.layers.1.mlp.down_proj",
    ),
    "the model's call": (_call_of_the_model, "a module of class Watched on the model"),
    "a mode that sees every function of torch": (
        lambda _, stack: stack.enter_context(BaseTorchFunctionMode()),
        "a mode of torch",
    ),
    "torch's linear, as zero.Init of DeepSpeed replaces it": (
        _replaced(nn.functional, "linear"),
        "linear was replaced",
    ),
    "attention with sinks": (_attention_with_sinks, "a forward of its own on model.language_model.layers.1.self_attn"),
    "a function beneath registered attention": (_replaced(sdpa_attention, "repeat_kv"), "repeat_kv was replaced"),
    "the mask": (
        lambda model, stack: _replaced(sys.modules[type(model).__module__], "create_causal_mask")(model, stack),
        "create_causal_mask was replaced",
    ),
    "registered attention": (
        lambda _, stack: stack.enter_context(mock.patch.dict(ATTENTIONS, sdpa=_wrapped(ATTENTIONS["sdpa"]))),
        "sdpa was registered again",
    ),
}
"""What users put in the place of transformers' own, with the reason in `status`."""


@pytest.mark.parametrize("name", FOREIGN)
def test_stock_decodes_with_what_users_put_in(model: Any, recorder: Recorder, name: str) -> None:
    change, reason = FOREIGN[name]
    with ExitStack() as stack:
        change(model, stack)
        model.generate(**TEXT, max_new_tokens=10, custom_generate=graphed_decoding)
    assert counts_of(model).reasons == {reason: 1} and recorder.captures == 0


@pytest.mark.usefixtures("way")
def test_a_step_that_computes_otherwise_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(query: Any, key: Any, value: Any, mask: Any, *others: Any) -> Any:
        return attend(query, key, value, torch.zeros_like(mask), *others)

    attend = step_module.attend
    monkeypatch.setattr(step_module, "attend", without_mask)
    both(model, TEXT, max_new_tokens=9)
    counts = counts_of(model)
    assert counts.static_calls == 0
    assert [reason.partition(" by ")[0] for reason in counts.reasons] == ["ArithmeticError: logits differ from stock's"]
    assert not steps_of(model).kept


SERVED = {model.split(".")[1] for text in TEXT_MODELS for model in text.models.split()}
EARLIER = ("qwen2_5_omni", "qwen3_omni_moe") if Version(transformers.__version__) < Version("5.17") else ()
"""Models that compute positions in every step in this version."""


DIFFERENT = {"qwen3_5", "glm4v", "ernie4_5_vl_moe", "kimi_k25", "exaone4_5", "inkling2"}
"""Texts that differ in kind; the matrix has the others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.matrix] * (name not in DIFFERENT))
        for name in COMPOSITES
        if name != "glm_image"  # stock cannot continue a text
    ],
)
@pytest.mark.usefixtures("way")
def test_text_models_of_every_family(name: str) -> None:
    model = COMPOSITES[name].make()
    padded = tiny.padded_text((5, 9))
    unpadded = {"input_ids": padded["input_ids"][1:]}
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    for inputs in (padded, unpadded):
        both(model, inputs, max_new_tokens=9, min_new_tokens=9, **outputs)
    reason = None if type(model).__name__ in SERVED else f"{type(model).__name__} is no declared model"
    if name in EARLIER:
        reason = "the model computes positions in every step itself"
    assert counts_of(model).reasons == ({} if reason is None else {reason: 2})


TEXTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "a window": ("Mistral", dict(sliding_window=24), False),
    "chunks": ("Llama4Text", dict(attention_chunk_size=24, num_local_experts=2, intermediate_size_mlp=48), False),
    "no window": ("Llama", {}, False),
    "a declared model": ("Qwen2", {}, True),
    "a declared model with a window": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
        False,
    ),
    "a declared model whose rotation follows the length": (
        "Qwen2",
        dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, max_position_embeddings=24),
        False,
    ),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.usefixtures("way")
def test_texts_without_a_tower(name: str) -> None:
    family, fields, is_served = TEXTS[name]
    kind = getattr(transformers, f"{family}Config")
    config = kind(**tiny_fields(kind) | fields)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    tiny.randomise(model)
    both(model, TEXT, max_new_tokens=30, min_new_tokens=30)
    assert counts_of(model).static_calls == is_served, counts_of(model).reasons
    assert ("1 by stock" in str(hf_vit_accel.status(model))) is not is_served
    hf_vit_accel.unpatch(model)
    assert not steps_of(model).kept


def test_nothing_of_a_step_is_seen_from_outside() -> None:
    """A policy and its reference share a config, and each runs in a thread of its own."""
    seen: list[int] = []
    model = TINY["qwen2_5_vl"].build()
    before = [{**vars(module)} for module in model.modules()]
    config = str(model.config)
    names = list(ALL_ATTENTION_FUNCTIONS.keys())

    forward = nn.functional.rms_norm

    def look(*args: Any) -> torch.Tensor:
        now = [{**vars(module)} for module in model.modules()]
        for earlier, later in zip(before, now, strict=True):
            later.pop("rope_deltas", None)
            assert later.keys() | {"rope_deltas"} == earlier.keys() | {"rope_deltas"}
            assert all(later[key] is earlier[key] for key in later)
        assert str(model.config) == config and list(ALL_ATTENTION_FUNCTIONS.keys()) == names
        seen.append(0)
        return forward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.nn.functional, "rms_norm", look)
        model.generate(**TEXT, max_new_tokens=10, custom_generate=graphed_decoding)
    assert seen and counts_of(model).static_calls == 1


@pytest.mark.usefixtures("way")
def test_hooks_of_accelerate_that_were_removed() -> None:
    """`remove_hook_from_module` leaves the class's forward on the instance; accelerate's `dispatch_model` calls it."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = TINY["qwen2_5_vl"].build()
    for module in model.model.language_model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
        hooks.remove_hook_from_module(module)
    assert "forward" in vars(model.model.language_model.embed_tokens)
    both(model, TEXT, max_new_tokens=9)
    assert counts_of(model).static_calls == 1 and not counts_of(model).reasons


def test_steps_go_when_memory_runs_out(model: Any, recorder: Recorder) -> None:
    """Call the observer as torch does for a failed allocation, as in a training step after `generate`."""
    both(model, TEXT, max_new_tokens=9)
    both(model, {"input_ids": TEXT["input_ids"][:1]}, max_new_tokens=9)
    steps = [weakref.ref(step) for step in steps_of(model).kept.values()]
    assert len(steps) == 2
    gc.disable()
    try:
        memory._give_up_graphs(0, 1 << 40, 0, 0)
        assert [step() for step in steps] == [None, None], "at once: whoever tries again waits for no collection"
    finally:
        gc.enable()
    both(model, TEXT, max_new_tokens=9)
    assert recorder.captures == 3 and len(steps_of(model).kept) == 1
    assert "1 x device memory ran out" in str(hf_vit_accel.status(model))
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert not steps_of(model).kept, "those of later calls go, too"


def test_steps_of_a_call_stay_when_memory_runs_out_within_it(model: Any, recorder: Recorder) -> None:
    """As where a thread prepares the next batch meanwhile. After the call they go like any others."""

    def run_out(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        memory._give_up_graphs(0, 1 << 40, 0, 0)
        return scores

    expected = model.generate(**TEXT, max_new_tokens=9)
    options = dict(custom_generate=graphed_decoding, logits_processor=[run_out])
    given_up = memory.stores_given_up
    for _ in range(2):
        assert torch.equal(model.generate(**TEXT, max_new_tokens=9, **options), expected)
    assert recorder.captures == 1 and counts_of(model).static_calls == 2
    assert memory.stores_given_up == given_up, "a tower that ran out of memory would try again in vain"
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert not steps_of(model).kept and memory.stores_given_up > given_up
