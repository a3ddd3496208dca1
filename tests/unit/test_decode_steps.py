"""The steps of `graphed_decoding`: when they are captured anew, dropped or refused, and what never reaches a result."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from packaging.version import Version
from support.composites import COMPOSITES, left_padded
from support.decoding import both, counts_of
from support.recorded_ops import OperationRecorder
from tiny import TINY
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_vit_accel
from hf_vit_accel import graphed_decoding
from hf_vit_accel.decoding import loop as decoding
from hf_vit_accel.decoding import step as step_module
from hf_vit_accel.decoding.norms import as_one_kernel, norms_of
from hf_vit_accel.decoding.steps import read_model, steps_of
from hf_vit_accel.graphs import automatic

Recorder = type[OperationRecorder]
TEXT = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 3, 3]])}


@pytest.fixture
def model() -> Any:
    return TINY["qwen2_5_vl"].build()


def check(model: Any) -> None:
    """Compare two calls with stock's."""
    both(model, TEXT, max_new_tokens=10)
    both(model, TEXT, max_new_tokens=10, do_sample=True)


def test_one_capture_serves_all_calls_of_a_batch_and_bucket(model: Any, recorder: Recorder) -> None:
    both(model, tiny.left_padded(model), max_new_tokens=20)
    assert recorder.captures == 1
    both(model, tiny.left_padded(model), max_new_tokens=12, do_sample=True, repetition_penalty=1.3)
    assert recorder.captures == 1
    both(model, tiny.chat_inputs(model, [(1, 4, 6)]), max_new_tokens=12)  # another batch, and no padding
    both(model, tiny.chat_inputs(model, [(1, 8, 6)]), max_new_tokens=3)
    assert recorder.captures == 2
    assert counts_of(model).static_calls == 4


def _noise(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def _other_scale(model: Any) -> None:
    model.model.language_model.layers[0].self_attn.scaling *= 0.5


def _other_module(model: Any) -> None:
    model.model.language_model.layers[1].mlp.act_fn = nn.GELU()


def _other_forward(model: Any) -> None:
    norm = model.model.language_model.norm
    norm.forward = lambda hidden: type(norm).forward(norm, hidden) * 2.0


def _other_tensor(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()


def _assigned(model: Any) -> None:
    state = {name: tensor.clone() * 1.1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda model: None, 0),
    "weights in place": (_noise, 0),
    "a scale": (_other_scale, 1),
    "a module": (_other_module, 1),
    "a forward": (_other_forward, 1),
    "a tensor": (_other_tensor, 1),
    "load_state_dict(assign=True)": (_assigned, 1),
    "to(float64)": (lambda model: model.double(), 1),
    "another attention of the text": (lambda model: model.set_attn_implementation("eager"), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_captured_anew(model: Any, recorder: Recorder, name: str) -> None:
    change, captures = CHANGES[name]
    check(model)
    change(model)
    check(model)
    assert recorder.captures == 1 + captures
    check(model)
    assert recorder.captures == 1 + captures and counts_of(model).static_calls == 6


def test_adapters_that_are_switched_scaled_merged_or_off(recorder: Recorder) -> None:
    peft = pytest.importorskip("peft")
    model = TINY["qwen3_vl"].build()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4)
    wrapped = peft.get_peft_model(model, config, adapter_name="one").eval()
    wrapped.add_adapter("two", config)
    outputs = []

    def note() -> None:
        outputs.append(both(wrapped, TEXT, max_new_tokens=10, min_new_tokens=10))

    note()
    wrapped.set_adapter("two")
    note()
    with wrapped.disable_adapter():
        note()
    note()
    for module in wrapped.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("two", 5.0)
    note()
    wrapped.merge_adapter()
    note()
    wrapped.unmerge_adapter()
    note()
    assert len({tuple(output.flatten().tolist()) for output in outputs}) >= 4, "the adapters matter"
    assert torch.equal(outputs[1], outputs[3]) and counts_of(model).static_calls == 7


def test_the_bounds_drop_the_steps_used_least_recently(model: Any, recorder: Recorder) -> None:
    def generate(rows: int, **bounds: int) -> None:
        inputs = {"input_ids": TEXT["input_ids"][:1].repeat(rows, 1)}
        both(model, inputs, max_new_tokens=12, custom_generate=functools.partial(graphed_decoding, **bounds))

    for rows in (1, 2, 3, 1):
        generate(rows, max_graphs=2)
    assert recorder.captures == 4
    generate(3, max_graphs=2)
    assert recorder.captures == 4
    generate(3, max_bytes=0)
    assert not steps_of(model)._steps
    generate(3)
    assert recorder.captures == 5 and counts_of(model).static_calls == 7


@pytest.mark.parametrize(
    "bounds", [dict(max_graphs="8"), dict(max_graphs=0), dict(max_bytes="1GB"), dict(max_bytes=-1)]
)
def test_wrong_bounds_are_refused(model: Any, bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(bounds))} to be"):
        model.generate(**TEXT, max_new_tokens=12, custom_generate=functools.partial(graphed_decoding, **bounds))
    both(model, TEXT, max_new_tokens=12)
    assert counts_of(model).static_calls == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_graph=2), "unknown option 'max_graph' of graphed_decoding; did you mean 'max_graphs'"),
        (dict(max_new_tokens=3), "'max_new_tokens' is an option of generate"),
        (dict(do_sample=True), "'do_sample' is an option of generate"),
        (dict(output_attentions=True), "'output_attentions' is an option of generate"),
        (dict(stremer=None), "unknown option 'stremer' of graphed_decoding; did you mean 'streamer'"),
        (dict(streamer=print), "expected streamer to be a BaseStreamer"),
        (dict(streamer=BaseStreamer), "expected streamer to be a BaseStreamer"),
        (dict(strict=True), "unknown option 'strict' of graphed_decoding. It has: streamer, synced_gpus, max_graphs"),
        (dict(assistant_model=None), "unknown option 'assistant_model' of graphed_decoding"),
    ],
)
def test_options_that_would_be_dropped_are_refused(model: Any, options: dict[str, object], message: str) -> None:
    """transformers' loop takes any keyword, and reads none of these."""
    with pytest.raises(ValueError, match=message):
        model.generate(**TEXT, max_new_tokens=12, custom_generate=functools.partial(graphed_decoding, **options))


def test_an_error_after_a_call_leaves_no_lock(model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    both(model, TEXT, max_new_tokens=12)
    with monkeypatch.context() as broken:
        broken.setattr(recorder, "done", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(**TEXT, max_new_tokens=12, custom_generate=graphed_decoding)
    both(model, TEXT, max_new_tokens=12)
    assert counts_of(model).static_calls == 3 and not counts_of(model).reasons
    assert len(steps_of(model)._steps) == 1


def test_freed_steps_are_captured_anew(model: Any, recorder: Recorder) -> None:
    both(model, TEXT, max_new_tokens=12)
    both(model, {"input_ids": TEXT["input_ids"][:1]}, max_new_tokens=12)
    steps = [weakref.ref(step) for step in steps_of(model)._steps.values()]
    assert len(steps) == 2
    hf_vit_accel.unpatch(model)
    gc.collect()
    assert [step() for step in steps] == [None, None]
    both(model, TEXT, max_new_tokens=12)
    assert recorder.captures == 3 and counts_of(model).static_calls == 3


def test_unpatching_within_a_call_leaves_its_steps(model: Any, recorder: Recorder) -> None:
    """A criterion of the user may do so, in the thread that decodes."""

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            hf_vit_accel.unpatch(model)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    both(model, TEXT, max_new_tokens=12, make_stopping_criteria=lambda: StoppingCriteriaList([Stop()]))
    assert counts_of(model).static_calls == 1 and recorder.captures == 1


@pytest.mark.usefixtures("way")
def test_a_model_that_goes_takes_its_steps_along() -> None:
    model = TINY["qwen2_5_vl"].build()
    check(model)
    caches = [weakref.ref(step) for step in steps_of(model)._steps.values()]
    reference = weakref.ref(model)
    assert caches and caches[0]() is not None
    del model
    gc.collect()
    assert reference() is None and caches[0]() is None


@pytest.mark.usefixtures("way")
def test_leftovers_of_another_call_change_nothing(model: Any) -> None:
    check(model)
    for step in steps_of(model)._steps.values():
        for tensor in (*step._states, step._mask_B11S, *step._tensors.values(), step._slot_1):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 9)
    check(model)
    both(model, {"input_ids": TEXT["input_ids"][:, :2]}, max_new_tokens=20)
    assert counts_of(model).static_calls == 5


def test_a_failed_capture_is_not_tried_again(model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "fail", RuntimeError("no capture"))
    check(model)
    monkeypatch.setattr(recorder, "fail", None)
    check(model)
    assert counts_of(model).reasons == {"RuntimeError: no capture": 4} and recorder.captures == 0
    _other_tensor(model)
    check(model)
    assert counts_of(model).static_calls == 2


def test_memory_that_ran_out_may_be_there_later(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "fail", torch.OutOfMemoryError("full"))
    check(model)
    monkeypatch.setattr(recorder, "fail", None)
    check(model)
    counts = counts_of(model)
    assert counts.reasons == {"memory ran out": 2} and counts.static_calls == 2


def test_memory_that_runs_out_in_a_long_text_lets_stock_go_on(
    model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out where the text outgrows the cache that an earlier call captured."""
    monkeypatch.setattr(decoding, "_RESERVE", 16)
    inputs = tiny.left_padded(model, (1, 4, 94))
    both(model, inputs, max_new_tokens=10, min_new_tokens=10)
    monkeypatch.setattr(recorder, "fail", torch.OutOfMemoryError("full"))
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    replays = recorder.replays
    both(model, inputs, max_new_tokens=40, min_new_tokens=40, **outputs)
    assert counts_of(model).reasons == {"memory ran out": 1} and recorder.replays > replays


def test_a_forward_that_asks_the_device_is_not_captured(model: Any, recorder: Recorder) -> None:
    norm = model.model.language_model.norm
    norm.forward = lambda hidden: type(norm).forward(norm, hidden) * (1.0 if hidden.sum().item() > 0 else 2.0)
    check(model)
    assert counts_of(model).static_calls == 0
    assert list(counts_of(model).reasons) == ["RuntimeError: operation not permitted when stream is capturing"]


@pytest.mark.usefixtures("way")
def test_a_term_that_the_step_would_leave_out_is_decoded_by_stock(model: nn.Module) -> None:
    attention = model.model.language_model.layers[1].self_attn
    attention.forward = functools.partial(type(attention).forward, attention, s_aux=torch.zeros(4))
    check(model)
    counts = counts_of(model)
    assert counts.static_calls == 0 and list(counts.reasons) == ["NotImplementedError: attention with s_aux"]


@pytest.mark.usefixtures("way")
def test_a_step_that_computes_otherwise_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    functions = type("functions", (), {"scaled_dot_product_attention": staticmethod(without_mask)})
    monkeypatch.setattr(step_module, "nn", type("nn", (), {"functional": functions}))
    check(model)
    counts = counts_of(model)
    assert counts.static_calls == 0
    assert [reason.partition(" by ")[0] for reason in counts.reasons] == ["ArithmeticError: logits differ from stock's"]
    assert not steps_of(model)._steps


@pytest.mark.usefixtures("way")
def test_a_window_that_fills_up_lets_stock_go_on() -> None:
    text = TINY["qwen2_5_vl"].text | dict(use_sliding_window=True, sliding_window=32, max_window_layers=0)
    tiny_model = TINY["qwen2_5_vl"]
    model = tiny.Tiny(tiny_model.model, tiny_model.config, tiny_model.vision, text).build()
    assert "sliding_attention" in model.config.get_text_config().layer_types
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    both(model, TEXT, max_new_tokens=20, min_new_tokens=20, **outputs)
    assert counts_of(model).static_calls == 1
    both(model, TEXT, max_new_tokens=60, min_new_tokens=60, **outputs)
    both(model, {"input_ids": torch.arange(3, 43)[None]}, max_new_tokens=20, **outputs)
    assert counts_of(model).reasons == {"a sliding window of 32 tokens": 2}


STOCK = {
    "qwen4_exp": "cache layers of class DynamicIndexedLayer",
    "glm5_next": "cache layers of class DynamicIndexedLayer",
    "hy_v4_vl": "cache layers of class DynamicIndexedLayer",
    "inkling2": "cache layers of class LinearAttentionAndSlidingWindowAttentionLayer",
    "inkling2_loop": "cache layers of class LinearAttentionAndSlidingWindowAttentionLayer",
    "hyperclovax_vision_v2": "the model computes positions in every step itself",
    "exaone4_5": "the model computes positions in every step itself",
}
"""Families whose decode steps stay stock's, with the reason."""
if Version(transformers.__version__) < Version("5.17"):
    STOCK |= dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "the model computes positions in every step itself")


@pytest.mark.parametrize("name", [name for name in COMPOSITES if name != "glm_image"])  # stock cannot continue a text
@pytest.mark.usefixtures("way")
def test_text_models_of_every_family(name: str) -> None:
    model = COMPOSITES[name].make()
    padded = left_padded()
    unpadded = {"input_ids": padded["input_ids"][1:]}
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    for inputs in (padded, unpadded, {"input_ids": unpadded["input_ids"].flip(1)}):
        both(model, inputs, max_new_tokens=12, min_new_tokens=12, **outputs)
    counts = counts_of(model)
    assert counts.reasons == ({STOCK[name]: 3} if name in STOCK else {})


def test_norms_that_torch_computes_alike() -> None:
    for name, count in {"qwen2_5_vl": 5, "qwen3_vl": 9}.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = TINY[name].build().to(dtype)
            assert len(norms_of(model)) == count, "those of layers, of queries and keys, and the last one"
    assert not set(norms_of(model)) & set(tiny.tower_of(model).modules())
    norms_of(model)[-1].forward = None
    assert len(norms_of(model)) == 8
    for others in ("cohere_compass", "qwen3_5"):  # a LayerNorm, and one that adds 1 to its weight
        assert norms_of(COMPOSITES[others].make()) == []


def test_norms_are_torchs_inside_a_step_alone(model: nn.Module) -> None:
    norm = norms_of(model)[0]
    hidden = torch.randn(2, len(norm.weight))
    dtypes = (torch.float32, torch.bfloat16)
    expected = [norm(hidden.to(dtype)) for dtype in dtypes]
    calls = []

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.dtype)
        return former(self, hidden)

    former = type(norm).forward
    with pytest.MonkeyPatch.context() as patch, as_one_kernel([norm]):
        patch.setattr(type(norm), "forward", forward)
        results = [norm(hidden.to(dtype)) for dtype in dtypes]
        assert calls == [torch.bfloat16], "weights of another dtype"
        thread = threading.Thread(target=lambda: norm(hidden))
        thread.start()
        thread.join()
        assert calls[1:] == [torch.float32], "another thread"
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact)
    assert "forward" not in vars(norm)
    both(model, TEXT, max_new_tokens=12)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_states_that_a_step_replaces_have_no_static_step(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import LinearAttentionLayer

    def replace(self: Any, states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = states.clone()
        return self.recurrent_states[state_idx]

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", replace)
    model = COMPOSITES["qwen3_5"].make()
    both(model, left_padded(), max_new_tokens=12)
    assert counts_of(model).reasons == {"AssertionError: not in place": 1}


def test_shared_layers_in_another_order_are_another_model(model: nn.Module) -> None:
    """A module that stands twice is read once, so its places count, too."""
    layers = model.model.language_model.layers
    first = layers[0]
    second = layers[1]
    layers.append(second)
    readings = set()
    for order in ((first, second, first), (second, first, first), (first, second, second), (first, first, second)):
        for index, layer in enumerate(order):
            layers[index] = layer
        readings.add(read_model(model))
    assert len(readings) == 4


def test_an_attribute_at_the_address_of_a_former_one_is_another(model: nn.Module) -> None:
    """Python gives the memory of a freed object to the next one of its size."""

    def function(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factor

    layer = model.model.language_model.layers[0]
    former: object = None
    addresses: set[int] = set()
    for factor in range(20):
        layer.extra = function(float(factor))
        addresses.add(id(layer.extra))
        reading = read_model(model)
        assert reading == read_model(model) and reading != former, factor
        former = reading
        del layer.extra
    assert len(addresses) < 20, "no address came again"


@pytest.mark.parametrize(
    "values", [(np.float64(1.5), np.float64(2.5)), (Path("a"), Path("b"))], ids=["number", "object"]
)
def test_replaced_values_of_any_class_are_noticed(model: nn.Module, values: tuple[object, object]) -> None:
    layer = model.model.language_model.layers[0]
    layer.extra = values[0]
    former = read_model(model)
    layer.extra = values[1]
    assert read_model(model) != former


@pytest.mark.parametrize("place", ["DecodeStep", "load"])
def test_memory_that_runs_out_for_a_step_leaves_other_graphs(
    model: nn.Module, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Stock goes on, so that nothing is gained by dropping the graphs of towers."""
    given_up: list[str] = []

    class Graphs:
        device: torch.device | None = None
        has_given_up = False

        def give_up(self, why: str) -> None:
            given_up.append(why)

    graphs = Graphs()
    automatic._stores.add(graphs)

    def run_out(*args: object, **kwargs: object) -> None:
        automatic._give_up_graphs(0, 1 << 40, 0, 0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    owner = decoding if place == "DecodeStep" else decoding.DecodeStep
    monkeypatch.setattr(owner, place, run_out)
    both(model, TEXT, max_new_tokens=12)
    assert not given_up


def test_memory_that_runs_out_in_a_capture_leaves_other_graphs(
    model: nn.Module, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder frees cached memory and tries again; graphs of towers stay."""

    class Graphs:
        device: torch.device | None = None
        given_up: str | None = None
        has_given_up = False

        def give_up(self, why: str) -> None:
            self.given_up = why

    graphs = Graphs()
    automatic._stores.add(graphs)
    record = recorder.record

    def record_at_the_second_try(self: Recorder, *runs: Callable[[], None]) -> object:
        automatic._give_up_graphs(0, 1 << 40, 0, 0)
        return record(self, *runs)

    monkeypatch.setattr(recorder, "record", record_at_the_second_try)
    both(model, TEXT, max_new_tokens=12)
    assert counts_of(model).static_calls == 1 and graphs.given_up is None
    automatic._give_up_graphs(0, 1 << 40, 0, 0)
    assert graphs.given_up
