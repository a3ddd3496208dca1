"""`text=True`: hidden states and logits are stock's without gradients and a cache, and all other calls are stock's."""

import contextlib
import copy
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from support.composites import COMPOSITES, LINEAR
from support.decoding import Counts, add_adapters, assert_equal_outputs, both, change_model, counts_of
from support.towers import alike
from test_decode_steps import DIFFERENT, SERVED
from test_prefill import attend_to_all, batch
from tiny import TINY
from torch import Tensor, nn

from hf_vit_accel import FallbackError, patch, patched, status, unpatch
from hf_vit_accel.decoding import layers, packed
from hf_vit_accel.decoding.text_models import declared_texts

Inputs = dict[str, Any]
GRADIENTS = "gradients are enabled"
CACHE = "a cache; use_cache=False does without"


def text_of(model: Any) -> Any:
    [text] = declared_texts(model).values()
    return text


def counts(model: Any) -> tuple[int, dict[str, int]]:
    """Return the calls that our layers ran, and the reasons of stock's."""
    forward = vars(text_of(model))["forward"]
    return forward.calls, dict(forward.stock_reasons)


def run(model: Any, inputs: Inputs, **options: Any) -> Any:
    with torch.no_grad():
        return model(**({"use_cache": False} | inputs | options))


def compare(model: Any, inputs: Inputs, **options: Any) -> Any:
    """Run a patched model and its stock text model; expect equal outputs, and return ours."""
    mask = inputs.get("attention_mask")
    ours = run(model, inputs, **options)
    forward = vars(text_of(model)).pop("forward")
    try:
        stock = run(model, inputs, **options)
    finally:
        vars(text_of(model))["forward"] = forward
    assert_equal_outputs(ours, stock, None if mask is None else mask != 0)
    return ours


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl_moe", "qwen2_vl", "qwen3_vl"))
@pytest.mark.parametrize("calls", [5, pytest.param(120, marks=pytest.mark.matrix)])
def test_random_batches_give_stocks_hidden_states(family: str, calls: int) -> None:
    """No, one and several pictures and videos in a row, padding on both sides, and adapters."""
    model = TINY[family].build()
    add_adapters(model)
    patch(model, text=True)
    rng = random.Random(calls)
    for seed in range(calls):
        change_model(model, rng)
        inputs = batch(model, rng, rng.randint(1, 6), right=seed % 2 == 1)
        with torch.inference_mode(rng.random() < 0.3):
            compare(model, inputs, output_hidden_states=seed % 3 == 0)
    assert counts(model) == (calls, {})
    assert f"{calls} calls without padding" in str(status(model))


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen2_vl"))
def test_a_rotation_that_nothing_calls(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply_liger_kernel_to_qwen2_5_vl` of Liger sets a function for older transformers; newer never call it."""
    model = TINY[family].build()
    file = sys.modules[type(text_of(model)).__module__]
    name = "apply_multimodal_rotary_pos_emb"
    if hasattr(file, name):
        pytest.skip("this transformers calls it")
    monkeypatch.setattr(file, name, lambda *arguments: arguments[1:3], raising=False)
    patch(model, text=True)
    inputs = batch(model, random.Random(0), 2)
    compare(model, inputs)
    assert counts(model) == (1, {})
    both(model, inputs, max_new_tokens=12, do_sample=False)
    assert counts_of(model) == Counts(1, {})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name not in DIFFERENT)) for name in COMPOSITES]
)
def test_text_models_of_every_family(name: str) -> None:
    model = COMPOSITES[name].make()
    if type(model).__name__ not in SERVED:
        with pytest.raises(ValueError, match="text=True needs a declared language model"):
            patch(model, text=True)
        return
    patch(model, text=True)
    padded = tiny.padded_text((5, 9))
    for inputs in (padded, {"input_ids": padded["input_ids"]}):
        compare(model, inputs)
        compare(model, inputs, output_hidden_states=True)
    assert counts(model) == ((0, {"layers of linear attention": 4}) if name in LINEAR else (4, {}))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_model_without_a_head_and_a_retrieval_model_on_it(family: str) -> None:
    """colpali's ColQwen2_5 and ColQwen3 inherit from the model without a head, and ask for hidden states."""
    whole = TINY[family].build()
    inputs = batch(whole, random.Random(0), 4)
    model = whole.model

    class ColQwen(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            kwargs.pop("use_cache", None)
            output = super().forward(*args, **kwargs, use_cache=False, output_hidden_states=True, return_dict=True)
            return output.last_hidden_state * kwargs["attention_mask"].unsqueeze(-1)

    retriever = ColQwen(model.config).eval()
    retriever.load_state_dict(model.state_dict())
    for kind in (model, retriever):
        patch(kind, text=True)
        compare(kind, inputs)
        assert counts(kind) == (1, {})


def test_masks_with_holes_and_rows_of_padding(model: Any) -> None:
    patch(model, text=True)
    inputs = tiny.padded_text((9, 5, 7))
    inputs["attention_mask"][0, 3:5] = 0
    inputs["attention_mask"][1] = 0
    compare(model, inputs)
    compare(model, {"input_ids": inputs["input_ids"]})
    compare(model, inputs, return_dict=False)
    assert counts(model) == (3, {})
    inputs["attention_mask"][:] = 0
    run(model, inputs)
    assert counts(model) == (3, {"no token": 1})


def _packed_positions(inputs: Inputs) -> Inputs:
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None].expand(3, -1)
    return {"input_ids": inputs["input_ids"], "position_ids": torch.stack([positions] * 4)}


STOCK: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "a cache": (lambda inputs: inputs | {"use_cache": True}, CACHE),
    "attentions": (lambda inputs: inputs | {"output_attentions": True}, "the argument output_attentions"),
    "both directions": (lambda inputs: inputs | {"is_causal": False}, "the argument is_causal"),
    "a mask of four axes": (
        lambda inputs: inputs | {"attention_mask": torch.zeros(3, 1, 9, 9)},
        "attention_mask of a shape of its own",
    ),
    "packed rows": (_packed_positions, "positions without a mask, which may be of packed rows"),
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("strict", [False, True])
def test_calls_that_ask_for_more_are_stocks(name: str, strict: bool) -> None:
    change, reason = STOCK[name]
    model = TINY["qwen2_5_vl"].build()
    text = model.model.language_model
    if name == "attentions":
        model.set_attn_implementation({"text_config": "eager"})
    inputs = change(tiny.padded_text((9, 5, 7)))
    stock = run(text, inputs)
    patch(model, text=True, strict=strict)
    with (
        pytest.raises(FallbackError, match="the language model cannot be served")
        if strict and name != "a cache"
        else contextlib.nullcontext()
    ):
        ours = run(text, inputs)
        assert_equal_outputs(ours.to_tuple()[0], stock.to_tuple()[0])
        assert ours.keys() == stock.keys()
    assert counts(model) == (0, {reason: 1})
    if reason not in (CACHE,):
        assert f"1 by stock (1 x {reason})" in str(status(model))


def test_gradients_are_stocks(model: Any) -> None:
    inputs = batch(model, random.Random(3), 3)
    patch(model, text=True, strict=True)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(**inputs, use_cache=False).logits.square().mean().backward()
        return [weight.grad.clone() for weight in model.model.language_model.parameters() if weight.grad is not None]

    ours = gradients()
    forward = vars(text_of(model)).pop("forward")
    stock = gradients()
    vars(text_of(model))["forward"] = forward
    assert tiny.all_equal(ours, stock)
    assert counts(model) == (0, {GRADIENTS: 1})


def test_our_layers_run_again_without_a_hook_that_is_removed(model: Any) -> None:
    """`test_changes.py` shows that changed weights and hooks act at once."""
    patch(model, text=True)
    inputs = batch(model, random.Random(4), 3)
    with model.model.language_model.layers[0].register_forward_hook(lambda *_: None):
        run(model, inputs)
    assert counts(model)[0] == 0
    compare(model, inputs)
    assert counts(model)[0] == 1


def test_layers_that_attend_in_both_directions_are_stocks(model: Any) -> None:
    """As users make embedding models of language models: a padded batch stays causal, others do not."""
    patch(model, text=True)
    inputs = tiny.padded_text((9, 9))
    compare(model, inputs)
    for layer in model.model.language_model.layers:
        layer.self_attn.is_causal = False
    compare(model, inputs)
    assert counts(model) == (1, {"attention in both directions": 1})


def test_a_config_with_other_defaults(model: Any) -> None:
    """sentence-transformers sets `use_cache` and `output_hidden_states` of the configs."""
    config = model.config.get_text_config()
    config.use_cache = False
    config.output_hidden_states = True
    patch(model, text=True)
    inputs = batch(model, random.Random(5), 3)
    compare(model, inputs, use_cache=None)
    assert counts(model) == (1, {})
    config.use_cache = True
    run(model, inputs, use_cache=None)
    assert counts(model) == (1, {CACHE: 1})


def test_a_fault_of_ours_is_refused_by_the_proof(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "scaled_dot_product_attention", attend_to_all)
    inputs = batch(model, random.Random(6), 4)
    stock = run(model, inputs)
    patch(model, text=True)
    for _ in range(2):
        assert_equal_outputs(run(model, inputs), stock)
    [(reason, count)] = counts(model)[1].items()
    assert "hidden states differ from stock's by" in reason and count == 2
    patch(model, text=True, strict=True)
    with pytest.raises(FallbackError, match="hidden states differ"):
        run(model, inputs)


def test_stock_runs_a_call_for_which_memory_runs_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call runs fast again: memory that ran out says nothing of the model."""

    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    inputs = batch(model, random.Random(6), 4)
    stock = run(model, inputs)
    patch(model, text=True)
    with monkeypatch.context() as patches:
        patches.setattr(packed, "run_layers", run_out)
        assert_equal_outputs(run(model, inputs), stock)
    compare(model, inputs)
    assert counts(model) == (1, {"memory ran out": 1})


def test_generate_works_as_before() -> None:
    model = TINY["qwen3_vl"].build()
    inputs = batch(model, random.Random(7), 4)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    patch(model, text=True, strict=True)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), expected)
    both(model, inputs, max_new_tokens=12)
    assert "1 call on a static cache" in str(status(model)) and set(counts(model)[1]) == {CACHE}


def test_unpatching_leaves_no_trace(model: Any) -> None:
    before = [{**vars(module)} for module in model.model.language_model.modules()]
    patch(model, text=True)
    run(model, batch(model, random.Random(8), 2))
    patch(model)
    assert status(model).text is None
    with patched(model, text=True):
        assert status(model).text == "0 calls without padding"
    patch(model, text=True)
    forward = model.model.language_model.forward
    with patched(model):
        assert status(model).text is None
    assert model.model.language_model.forward is forward
    unpatch(model)
    after = [vars(module) for module in model.model.language_model.modules()]
    assert all(now.keys() == earlier.keys() for now, earlier in zip(after, before, strict=True))
    assert status(model).text is None


def test_a_class_forward_on_the_instance_is_put_back(model: Any) -> None:
    """As `remove_hook_from_module` of accelerate does: `module.forward = module._old_forward`."""
    modules = [module for module in model.model.language_model.modules() if not isinstance(module, nn.ModuleList)]
    for module in modules:
        module.forward = type(module).forward.__get__(module)
    left = {module: vars(module)["forward"] for module in modules}
    inputs = batch(model, random.Random(8), 3)
    patch(model)
    with patched(model, text=True):
        compare(model, inputs)
        assert counts(model) == (1, {})
        clones = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        patch(model, text=True)
        compare(model, inputs)
        assert counts(model) == (1, {}), "patching again"
    assert all(vars(module)["forward"] is forward for module, forward in left.items())
    patch(model, text=True)
    unpatch(model)
    assert all(vars(module)["forward"] is forward for module, forward in left.items())
    for clone in clones:
        compare(clone, inputs)
        unpatch(clone)
        text = text_of(clone)
        assert vars(text)["forward"] == type(text).forward.__get__(text)


def test_a_hook_of_accelerate_after_patch_is_no_obstacle_to_undoing(model: Any) -> None:
    """`add_hook_to_module` keeps our forward in `_old_forward`; `remove_hook_from_module` puts that back."""
    text = text_of(model)
    inputs = batch(model, random.Random(8), 3)
    patch(model, text=True)
    add_hook_to_module(text, ModelHook())
    compare(model, inputs)
    reasons = {"a forward of its own on model.language_model": 1}
    assert counts(model) == (0, reasons)
    with patched(model):
        compare(model, inputs)
    assert counts(model) == (0, reasons), "the former forward is back, inside the hook"
    unpatch(model)
    assert status(model).text is None
    compare(model, inputs)
    remove_hook_from_module(text)
    assert vars(text)["forward"] == type(text).forward.__get__(text)


def test_copies_and_pickles_run_their_own_modules(model: Any) -> None:
    patch(model, text=True)
    inputs = batch(model, random.Random(9), 3)
    run(model, inputs)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert counts(clone) == (0, {})
        with torch.no_grad():
            text_of(clone).norm.weight.mul_(2)
        assert not torch.allclose(compare(clone, inputs).logits, run(model, inputs).logits)
        assert counts(clone) == (1, {})


def test_a_shallow_copy_runs_its_own_modules(model: Any) -> None:
    """As nn.DataParallel makes of a model for every GPU, in the evaluation of a Trainer."""
    text = model.model.language_model
    hooks = dict(text._forward_pre_hooks)
    patch(model, text=True)
    inputs = tiny.padded_text((9, 5, 7))
    clone = copy.copy(text)
    clone._modules = dict(text._modules, norm=copy.deepcopy(text.norm))
    with torch.no_grad():
        clone.norm.weight.mul_(torch.arange(32.0))
        expected = type(text).forward(clone, **inputs, use_cache=False).last_hidden_state
    assert torch.equal(run(clone, inputs).last_hidden_state, expected)
    compare(text, inputs)
    assert counts(model) == (1, {"a shallow copy": 1})
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for patched_model in (model, other):
        unpatch(patched_model)
    del clone
    assert text._forward_pre_hooks == text._forward_pre_hooks_with_kwargs == hooks
    assert not other.model.language_model._forward_pre_hooks


def test_models_that_text_cannot_serve_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(model.model.visual).__name__} has none"):
        patch(model.model.visual, text=True)
    model.model.language_model.forward = lambda **inputs: type(model.model.language_model).forward(**inputs)
    with pytest.raises(ValueError, match="has one of its own"):
        patch(model, text=True)
    assert not status(model).towers[0].patched


def test_half_precision_is_as_exact_as_stock() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        model = TINY[family].build()
        inputs = batch(model, random.Random(10), 4)
        mask = inputs["attention_mask"] != 0
        exact = run(model, inputs).logits[mask]
        half = model.to(torch.bfloat16)
        half_inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
        stock = run(half, half_inputs).logits[mask]
        patch(half, text=True, attention="sdpa", fuse=False)
        ours = run(half, half_inputs).logits[mask]
        assert counts(half) == (1, {})
        assert tiny.relative_error(ours.float(), exact) <= 1.1 * tiny.relative_error(stock.float(), exact)
