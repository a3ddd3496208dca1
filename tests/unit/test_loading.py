"""The load-time names: every spelling loads, saves and reloads; routing; the text decoder is left alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny import GRIDS, TINY, assert_close, left_padded, pixels_for, run_tower, tower_of
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLPreTrainedModel,
    Qwen2VLVisionBlock,
)

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, backends, machine
from hf_vit_accel.engine.route import PLANS
from hf_vit_accel.tower import attention as tower_attention
from hf_vit_accel.tower import loading as registration
from hf_vit_accel.tower import proof as proofs
from hf_vit_accel.tower.state import state_of

AUTO = "flash_vit_auto"


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


@pytest.mark.parametrize("loaded", ["eager", "sdpa"])
def test_another_attention_of_the_text_leaves_the_tower_as_it_is(saved: Any, loaded: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(saved[0], attn_implementation=loaded)
    hf_vit_accel.patch(model)
    model.set_attn_implementation({"text_config": "sdpa" if loaded == "eager" else "eager"})
    assert state_of(tower_of(model)) is not None
    hf_vit_accel.unpatch(model)
    assert tower_of(model).config._attn_implementation == loaded


@pytest.mark.parametrize(
    "spelling", ["flashinfer_cudnn", {"vision_config": "flashinfer_cudnn"}], ids=["string", "dict"]
)
def test_a_named_backend_that_cannot_run_here_raises_at_load_time(saved: Any, spelling: Any, monkeypatch: Any) -> None:
    path, _ = saved
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
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
    registration.register()
    kind = modeling_utils.PreTrainedModel
    for function in (modeling_utils.lazy_import_flash_attention, kind.get_correct_attn_implementation):
        assert not hasattr(function.__wrapped__, "__wrapped__") and not registration.MISSING


def test_the_guard_is_for_our_names_only(monkeypatch: Any) -> None:
    for name in registration.NAMES:
        assert modeling_utils.lazy_import_flash_attention(name) is None
    with pytest.raises((ImportError, ValueError)):
        modeling_utils.lazy_import_flash_attention("no/such-flash-kernel")


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


# --- composites whose text model is from another package --------------------------------------------------------------


class MixedConfig(transformers.PreTrainedConfig):
    """A tower that is known beside a Llama."""

    model_type = "mixed_for_tests"
    sub_configs = {"vision_config": transformers.Qwen3VLConfig.sub_configs["vision_config"], "text_config": LlamaConfig}  # noqa: RUF012

    def __init__(self, vision_config: Any = None, text_config: Any = None, **kwargs: Any) -> None:
        vision, text = self.sub_configs.values()
        self.vision_config = vision_config if isinstance(vision_config, vision) else vision(**(vision_config or {}))
        self.text_config = text_config if isinstance(text_config, text) else text(**(text_config or {}))
        super().__init__(**kwargs)


class Mixed(transformers.PreTrainedModel):
    config_class = MixedConfig
    _supports_sdpa = _supports_flash_attn = True

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.visual = transformers.AutoModel.from_config(config.vision_config)
        self.language_model = transformers.AutoModel.from_config(config.text_config)
        self.post_init()


LLAMA = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)


def mixed() -> Any:
    return Mixed, MixedConfig(vision_config=TINY["qwen3_vl"].vision, text_config=LLAMA)


def hyperclovax() -> Any:
    if not hasattr(transformers, "HyperCLOVAXVisionV2Config"):
        pytest.skip("this transformers has no HyperCLOVAX")
    vision = TINY["qwen2_5_vl"].vision | {"model_type": "qwen2_5_vl_vision"}
    text = LLAMA | {"model_type": "hyperclovax", "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = transformers.HyperCLOVAXVisionV2Config(vision_config=vision, text_config=text, image_token_id=60)
    return transformers.HyperCLOVAXVisionV2ForConditionalGeneration, config


@pytest.mark.parametrize("name", registration.NAMES)
@pytest.mark.parametrize("how", ["loaded", "loaded, dict", "set", "set, dict", "text eager"])
@pytest.mark.parametrize("make", [mixed, hyperclovax])
def test_text_of_another_package_keeps_its_attention(
    make: Any, how: str, name: str, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(registration, "require", lambda *args, **kwargs: None)  # as on a machine that has it
    kind, config = make()
    stock = kind._from_config(config).eval()
    stock.save_pretrained(tmp_path)
    expected = run_tower(tower_of(stock), GRIDS["mixed"])
    spelling: Any = name if how in ("loaded", "set") else {"vision_config": name}
    if how == "text eager":
        spelling["text_config"] = "eager"
    if "loaded" in how:
        model = kind.from_pretrained(tmp_path, attn_implementation=spelling)
    else:
        model = kind.from_pretrained(tmp_path)
        model.set_attn_implementation(spelling)
    found = names(model)
    assert found["vision"] == name and found["text"] == ("eager" if how == "text eager" else "sdpa")
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)
    assert state_of(tower_of(model)).calls == 1
    language = next(module for name, module in model.named_modules() if name.endswith("language_model"))
    assert language.config._attn_implementation == found["text"]
    ids = torch.arange(3, 9)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])  # padding on the left
    kept = language(input_ids=ids, attention_mask=mask).last_hidden_state[:, 2:]
    other = next(module for name, module in stock.named_modules() if name.endswith("language_model"))
    assert_close([kept], [other(input_ids=ids, attention_mask=mask).last_hidden_state[:, 2:]])
    hf_vit_accel.unpatch(model)
    assert not any(map(registration.is_ours, names(model).values()))


class Wrapper(Qwen2VLPreTrainedModel):
    """A model with the config of its tower: of a known class, or of one like remote code brings."""

    config_class = Qwen2VLVisionConfig

    def __init__(self, config: Any, *, known: bool) -> None:
        super().__init__(config)
        if known:
            self.tower = Qwen2VisionTransformerPretrainedModel(config)
        else:
            self.block = Qwen2VLVisionBlock(config)
        self.post_init()

    def forward(self) -> None:
        """Attend once."""
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        angles = torch.zeros(8, self.config.embed_dim // self.config.num_heads)
        rows = torch.zeros(8, self.config.embed_dim)
        self.block(rows, cu_seqlens=offsets, max_seqlen=8, position_embeddings=(angles.cos(), angles.sin()))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("moment", ["first attention", "next model"])
def test_a_tower_of_an_unknown_class_warns_once(known: bool, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It attends by our function and is stock otherwise; a wrapper around a known tower is patched."""
    monkeypatch.setattr(proofs, "_WARNED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            config = Qwen2VLVisionConfig(**TINY["qwen2_vl"].vision)
            model = Wrapper._from_config(config, attn_implementation=AUTO, known=known).eval()
            if moment == "first attention" and not known:
                model()
            else:
                test_other_models_are_left_alone()
    texts = [str(warning.message) for warning in caught if "stays stock" in str(warning.message)]
    if known:
        assert not texts and state_of(model.tower) is not None
    else:
        assert len(texts) == 1 and "Wrapper stays stock, but for its attention" in texts[0]


def test_a_text_model_alone_takes_no_name() -> None:
    with pytest.raises(ValueError, match="LlamaConfig has none"):
        LlamaForCausalLM._from_config(LlamaConfig(**LLAMA), attn_implementation=AUTO)


def test_after_an_error_no_tower_is_patched(saved: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no device")

    model = AutoModelForImageTextToText.from_pretrained(saved[0])
    before = names(model)
    with monkeypatch.context() as broken:
        broken.setattr(registration, "require", fail)
        for spelling in (AUTO, {"vision_config": AUTO}):
            with pytest.raises(RuntimeError, match="no device"):
                model.set_attn_implementation(spelling)
            assert state_of(tower_of(model)) is None and names(model) == before
    # transformers itself does not take back what it told one sub-model before another refuses its name.
    with pytest.raises(ValueError, match="no_such_attention"):
        model.set_attn_implementation({"vision_config": AUTO, "text_config": "no_such_attention"})
    assert (state_of(tower_of(model)) is None) == (names(model)["vision"] != AUTO)
    hf_vit_accel.unpatch(model)
    assert state_of(tower_of(model)) is None and names(model) == before


# --- what the attention function serves -------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("grad", [False, True])
def test_fewer_key_heads_than_query_heads(groups: int, grad: bool) -> None:
    """As stock's sdpa attention repeats them; segment by segment."""
    tower = tower_of(TINY["qwen3_vl"].build())
    module, lengths = tower.blocks[0].attn, [5, 11, 8]
    module.num_key_value_groups = groups
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 24, 16, requires_grad=grad) for heads in (4, 4 // groups, 4 // groups))
    offsets = torch.tensor([0, 5, 16, 24], dtype=torch.int32)
    found, _ = tower_attention.vision_attention(
        module, q, k, v, None, scaling=0.3, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, is_causal=False
    )
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat(
        [sdpa_attention_forward(module, *part, None, scaling=0.3, is_causal=False)[0] for part in parts], dim=1
    )
    assert_close([found], [expected])
    if grad:
        weights = torch.randn_like(found)
        ours, theirs = (torch.autograd.grad((x * weights).sum(), [q, k, v]) for x in (found, expected))
        assert_close(list(ours), list(theirs))


def test_attentions_of_an_eager_model_are_returned(saved: Any) -> None:
    """Setting `config.output_attentions` is transformers' way, and wants the name "eager": a patched model keeps it."""
    model = AutoModelForImageTextToText.from_pretrained(saved[0], attn_implementation="eager")
    tower, grid = tower_of(model), torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with torch.no_grad():
        usual = tower(pixels, grid_thw=grid)
        tower.config.output_attentions = True
        expected = tower(pixels, grid_thw=grid).attentions
        tower.config.output_attentions = False
        hf_vit_accel.patch(model)
        assert_close([tower(pixels, grid_thw=grid).pooler_output], [usual.pooler_output])
        assert state_of(tower).calls == 1
        tower.config.output_attentions = True
        found = tower(pixels, grid_thw=grid).attentions
    assert len(found) == len(tower.blocks)
    assert_close(list(found), list(expected))


def test_names_are_refused_where_they_would_do_nothing() -> None:
    config = transformers.SiglipVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="SiglipVisionConfig has none"):
        transformers.SiglipVisionModel._from_config(config, attn_implementation=AUTO)


def test_offsets_without_a_plan_are_planned_once(saved: Any, monkeypatch: Any) -> None:
    path, stock = saved
    grid, offsets = [(1, 4, 4), (1, 4, 4)], torch.tensor([0, 32], dtype=torch.int32)
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=AUTO)
    planned: list[int] = []
    real = tower_attention._plan_offsets
    monkeypatch.setattr(tower_attention, "_plan_offsets", lambda *args: planned.append(1) or real(*args))
    expected = run_tower(tower_of(stock), grid, cu_seqlens=offsets)
    assert_close(run_tower(tower_of(model), grid, cu_seqlens=offsets), expected)
    alternating = type(model).__name__.startswith("Qwen2_5")  # the windows' offsets between the caller's
    assert len(planned) == (4 if alternating else 1)
    offsets.copy_(torch.tensor([0, 16]))  # the same tensor with other values is another layout
    with pytest.raises(ValueError, match="cu_seqlens to rise"):
        run_tower(tower_of(model), grid, cu_seqlens=offsets)


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
