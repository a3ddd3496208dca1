"""The load-time names: every spelling loads, saves and reloads; routing; the text decoder is left alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from tiny import GRIDS, TINY, assert_close, chat_inputs, pixels_for, run_tower, tower_of
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, modeling_utils

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, backends, env, registration
from hf_vit_accel.planning import PLANS
from hf_vit_accel.tower import state_of

AUTO = "flash_vit_auto"
NAMED = ["flashinfer_cudnn", {"vision_config": "flashinfer_cudnn"}]


@pytest.fixture(scope="module", params=list(TINY))
def saved(request: Any, tmp_path_factory: Any) -> Any:
    """(path, stock model) of one family."""
    path = tmp_path_factory.mktemp(request.param)
    model = TINY[request.param].build()
    model.save_pretrained(path)
    return path, model


def names(model: Any) -> dict[str, str]:
    config = model.config
    return {
        "top": config._attn_implementation,
        "vision": config.vision_config._attn_implementation,
        "text": config.text_config._attn_implementation,
    }


@pytest.mark.parametrize("spelling", [AUTO, {"vision_config": AUTO}], ids=["string", "dict"])
def test_loading_by_name_equals_patch(saved: Any, spelling: Any, tmp_path: Any) -> None:
    path, stock = saved
    expected = run_tower(tower_of(stock), GRIDS["mixed"])
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=spelling)
    tower = tower_of(model)
    assert names(model)["vision"] == AUTO and names(model)["text"] == "sdpa"
    assert state_of(tower).settings == state_of(tower_of(hf_vit_accel.patch(TINY["qwen2_vl"].build()))).settings
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert state_of(tower).calls == 1
    model.save_pretrained(tmp_path)
    assert "flash_vit" not in (tmp_path / "config.json").read_text()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=spelling)
    assert_close(run_tower(tower_of(again), GRIDS["mixed"]), expected)
    assert state_of(tower_of(again)).calls == 1
    hf_vit_accel.unpatch(model)
    assert set(names(model).values()) == {"sdpa"} and state_of(tower) is None
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)


def test_set_attn_implementation_there_and_back(saved: Any) -> None:
    path, stock = saved
    expected = run_tower(tower_of(stock), GRIDS["mixed"])
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    tower = tower_of(model)
    for there, back in ((AUTO, "sdpa"), ({"vision_config": AUTO}, {"vision_config": "eager"})):
        model.set_attn_implementation(there)
        assert names(model)["vision"] == AUTO and names(model)["text"] in ("sdpa", "eager")
        calls = state_of(tower).calls
        assert_close(run_tower(tower, GRIDS["mixed"]), expected)
        assert state_of(tower).calls == calls + 1
        model.set_attn_implementation(there)
        assert state_of(tower).calls == calls + 1, "the same name again keeps the state"
        model.set_attn_implementation(back)
        assert state_of(tower) is None and "forward" not in vars(tower)
        assert AUTO not in names(model).values()
        assert_close(run_tower(tower, GRIDS["mixed"]), expected)


def test_unpatch_restores_the_name_before_set_attn_implementation(saved: Any) -> None:
    path, _ = saved
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    model.set_attn_implementation({"vision_config": AUTO})
    hf_vit_accel.unpatch(model)
    assert set(names(model).values()) == {"eager"}


def test_changing_only_the_text_keeps_the_patch(saved: Any) -> None:
    path, _ = saved
    model = AutoModelForImageTextToText.from_pretrained(path)
    hf_vit_accel.patch(model, attention="sdpa", fuse=False)
    state = state_of(tower_of(model))
    model.set_attn_implementation({"text_config": "eager"})
    assert state_of(tower_of(model)) is state and names(model)["text"] == "eager"


def test_a_bare_tower_by_name(saved: Any) -> None:
    _, stock = saved
    tower = tower_of(stock)
    expected = run_tower(tower, GRIDS["images"])
    tower.set_attn_implementation(AUTO)
    try:
        assert_close(run_tower(tower, GRIDS["images"]), expected)
        assert state_of(tower).calls == 1
    finally:
        tower.set_attn_implementation("sdpa")
    assert state_of(tower) is None


@pytest.mark.parametrize(
    "spelling", ["flashinfer_cudnn", {"vision_config": "flashinfer_cudnn"}], ids=["string", "dict"]
)
def test_a_named_backend_that_cannot_run_here_raises_at_load_time(saved: Any, spelling: Any, monkeypatch: Any) -> None:
    path, _ = saved
    monkeypatch.setattr(env, "has_cuda", lambda: False)
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        AutoModelForImageTextToText.from_pretrained(path, attn_implementation=spelling)
    model = AutoModelForImageTextToText.from_pretrained(path)
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        model.set_attn_implementation(spelling)
    assert state_of(tower_of(model)) is None and set(names(model).values()) == {"sdpa"}
    for attention in ("flashinfer_cudnn", "torch_varlen", "flash_attention_3"):
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            hf_vit_accel.patch(model, attention=attention)
        assert state_of(tower_of(model)) is None and set(names(model).values()) == {"sdpa"}


@pytest.mark.parametrize("how", ["string", "dict", "set", "patch"])
def test_the_text_decoder_keeps_its_padding_mask(saved: Any, how: str) -> None:
    path, _ = saved
    stock = AutoModelForImageTextToText.from_pretrained(path)
    inputs = left_padded(stock)
    expected = stock(**inputs).logits
    spelling = {"string": AUTO, "dict": {"vision_config": AUTO}}.get(how, "sdpa")
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=spelling)
    if how == "set":
        model.set_attn_implementation(AUTO)
    elif how == "patch":
        hf_vit_accel.patch(model)
    kept = inputs["attention_mask"].bool()
    assert_close([model(**inputs).logits[kept]], [expected[kept]], 1e-5)
    without = dict(inputs, attention_mask=torch.ones_like(inputs["attention_mask"]))
    assert not torch.allclose(stock(**without).logits[kept], expected[kept], atol=1e-2), "the mask matters here"


def left_padded(model: Any) -> dict[str, torch.Tensor]:
    """Two prompts, one image each, the shorter one padded on the left."""
    one, two = chat_inputs(model, [(1, 4, 6)], 0), chat_inputs(model, [(1, 8, 8)], 1)
    length = two["input_ids"].shape[1]
    pad = length - one["input_ids"].shape[1]

    def left(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (pad, 0), value=value)

    return {
        "input_ids": torch.cat([left(one["input_ids"], 2), two["input_ids"]]),
        "attention_mask": torch.cat([left(one["attention_mask"], 0), two["attention_mask"]]),
        "mm_token_type_ids": torch.cat([left(one["mm_token_type_ids"], 0), two["mm_token_type_ids"]]),
        "pixel_values": torch.cat([one["pixel_values"], two["pixel_values"]]),
        "image_grid_thw": torch.cat([one["image_grid_thw"], two["image_grid_thw"]]),
    }


def test_text_that_slipped_through_the_routing_keeps_its_mask(saved: Any) -> None:
    """The second belt: a text config set behind the routing's back still masks its padding."""
    path, stock = saved
    inputs = left_padded(stock)
    expected = stock(**inputs).logits
    model = AutoModelForImageTextToText.from_pretrained(path)
    model.config.text_config._attn_implementation_internal = AUTO
    kept = inputs["attention_mask"].bool()
    assert_close([model(**inputs).logits[kept]], [expected[kept]], 1e-5)


def test_a_stock_tower_under_our_name_is_right_without_plans(saved: Any) -> None:
    """A tower whose config says our name but whose forward is stock (a shared config) plans for itself."""
    path, stock = saved
    expected = run_tower(tower_of(stock), GRIDS["mixed"])
    model = AutoModelForImageTextToText.from_pretrained(path)
    tower = tower_of(model)
    tower.config._attn_implementation_internal = AUTO
    assert state_of(tower) is None
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    with pytest.raises(ValueError, match="cu_seqlens to rise from 0"):
        run_tower(tower, GRIDS["image"], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))


def test_plans_are_made_once_per_forward_and_shared(saved: Any, monkeypatch: Any) -> None:
    """The stock way too: with hooks on a block, every layer finds the forward's plan among its arguments."""
    path, _ = saved
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=AUTO)
    tower, seen, planned = tower_of(model), [], []
    tower.blocks[0].register_forward_hook(lambda *_: None)
    sdpa = type(backends.backend_named("sdpa"))
    real = sdpa.plan
    monkeypatch.setattr(sdpa, "plan", lambda *args: planned.append(1) or real(*args))
    for block in tower.blocks:
        block.attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs[PLANS]), with_kwargs=True)
    run_tower(tower, GRIDS["mixed"])
    run_tower(tower, GRIDS["mixed"])
    assert len(seen) == 2 * len(tower.blocks) and len(set(map(id, seen))) == 1
    assert len(planned) == len(seen[0].plans)


def test_other_models_are_left_alone() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    assert LlamaForCausalLM._from_config(config).config._attn_implementation == "sdpa"
    assert LlamaForCausalLM._from_config(config, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="is not supported"):
        LlamaForCausalLM._from_config(config, attn_implementation="no_such_attention")


def test_a_composite_without_a_supported_tower_raises() -> None:
    config = transformers.LlavaConfig(
        vision_config=dict(model_type="clip_vision_model", hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
        text_config=dict(model_type="llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16),
    )
    with pytest.raises(ValueError, match=r"towers of qwen2_vl, .*; LlavaConfig has none"):
        transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=AUTO)


def test_registering_again_wraps_nothing_twice() -> None:
    before = modeling_utils.lazy_import_flash_attention, modeling_utils.PreTrainedModel.get_correct_attn_implementation
    registration.register()
    after = modeling_utils.lazy_import_flash_attention, modeling_utils.PreTrainedModel.get_correct_attn_implementation
    for old, new in zip(before, after, strict=True):
        assert getattr(new, registration._ORIGINAL) is getattr(old, registration._ORIGINAL)
        assert not hasattr(getattr(new, registration._ORIGINAL), registration._ORIGINAL)


def test_the_guard_is_for_our_names_only() -> None:
    assert modeling_utils.lazy_import_flash_attention(AUTO) is None
    asked: list[Any] = []
    guarded = registration._guarded(lambda *args, **kwargs: asked.append((args, kwargs)) or "kernels")
    for name in registration.NAMES:
        assert guarded(name) is None
    assert guarded("flash_attention_2", allow_all_kernels=True) == "kernels" and guarded(None) == "kernels"
    assert asked == [(("flash_attention_2",), {"allow_all_kernels": True}), ((None,), {})]


def test_dropout_is_stock(saved: Any) -> None:
    """Stock hard-codes 0.0; whoever sets it gets it, weight for weight under one seed."""
    path, _ = saved
    found = []
    for patched in (False, True):
        model = AutoModelForImageTextToText.from_pretrained(path).train()
        tower = tower_of(model)
        for block in tower.blocks:
            block.attn.attention_dropout = 0.5
        if patched:
            hf_vit_accel.patch(model)
        for grad in (False, True):
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                pixels, grid = pixels_for(tower, GRIDS["image"]), torch.tensor(GRIDS["image"])
                found.append(tower(pixels, grid_thw=grid).last_hidden_state)
    assert_close(found[2:], found[:2])


def test_names_are_refused_where_they_would_do_nothing() -> None:
    config = transformers.SiglipVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="SiglipVisionConfig has none"):
        transformers.SiglipVisionModel._from_config(config, attn_implementation=AUTO)


def test_an_eager_model_is_eager_again_after_unpatch(saved: Any) -> None:
    path, _ = saved
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    model.set_attn_implementation(AUTO)
    assert names(model)["text"] == "eager"
    hf_vit_accel.unpatch(model)
    assert set(names(model).values()) == {"eager"}


def test_offsets_without_a_plan_are_planned_once(saved: Any, monkeypatch: Any) -> None:
    path, stock = saved
    grid, offsets = [(1, 4, 4), (1, 4, 4)], torch.tensor([0, 32], dtype=torch.int32)
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=AUTO)
    planned: list[int] = []
    real = registration._plan_offsets
    monkeypatch.setattr(registration, "_plan_offsets", lambda *args: planned.append(1) or real(*args))
    expected = run_tower(tower_of(stock), grid, cu_seqlens=offsets)
    assert_close(run_tower(tower_of(model), grid, cu_seqlens=offsets), expected)
    alternating = type(model).__name__.startswith("Qwen2_5")  # the windows' offsets between the caller's
    assert len(planned) == (4 if alternating else 1)
    # What was sent on one stream may not have arrived for another: it plans anew.
    monkeypatch.setattr(registration, "stream_id", lambda device: 7)
    assert_close(run_tower(tower_of(model), grid, cu_seqlens=offsets), expected)
    assert len(planned) == (8 if alternating else 2)
    offsets.copy_(torch.tensor([0, 16]))  # the same tensor with other values is another layout
    with pytest.raises(ValueError, match="cu_seqlens to rise"):
        run_tower(tower_of(model), grid, cu_seqlens=offsets)


def test_import_touches_neither_cuda_nor_flashinfer() -> None:
    code = (
        "import sys, torch;"
        "import transformers.integrations.sdpa_attention, transformers.masking_utils, transformers.modeling_utils;"
        "before = set(sys.modules);"  # torchvision among them, where it is installed
        "import hf_vit_accel;"
        "assert not torch.cuda.is_initialized();"
        "heavy = {'flashinfer', 'cudnn', 'flash_attn_interface', 'torchvision'} & (set(sys.modules) - before);"
        "assert not heavy, heavy;"
        "assert not any('modeling_qwen' in m for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spelling", ["flashinfer_cudnn", {"vision_config": "flashinfer_cudnn"}], ids=["string", "dict"]
)
def test_gpu_loading_flashinfer_cudnn_by_name(saved: Any, spelling: Any) -> None:
    if reasons := backends.backend_named("flashinfer_cudnn").reasons_against_machine():
        pytest.skip("; ".join(reasons))
    path, stock = saved
    expected = run_tower(tower_of(stock), GRIDS["mixed"])
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=spelling, dtype=torch.bfloat16)
    tower = tower_of(model.cuda())
    found = run_tower(tower, GRIDS["mixed"])
    status = hf_vit_accel.status(model).towers[0]
    assert set(status.backends.values()) <= {"flashinfer_cudnn", "fused kernel"}
    assert status.backends["full"] == "flashinfer_cudnn" and status.calls == 1 and not status.fallbacks
    assert_close([x.float().cpu() for x in found], expected, 5e-2)
    assert names(model)["text"] == "sdpa"
    model.float()
    run_tower(tower, GRIDS["mixed"])
    status = hf_vit_accel.status(model).towers[0]
    assert set(status.backends.values()) == {"sdpa"}
    assert any("flashinfer_cudnn cannot serve the call: the dtype is float32" in why for why in status.fallbacks)


@pytest.mark.gpu
def test_gpu_a_tower_on_the_cpu_of_a_gpu_machine_falls_back(saved: Any) -> None:
    if reasons := backends.backend_named("flashinfer_cudnn").reasons_against_machine():
        pytest.skip("; ".join(reasons))
    path, stock = saved
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="flashinfer_cudnn")
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), run_tower(tower_of(stock), GRIDS["mixed"]))
    assert any("it runs on cuda" in why for why in state_of(tower_of(model)).fallbacks)
    assert pixels_for(tower_of(model), GRIDS["image"]).device.type == "cpu"
