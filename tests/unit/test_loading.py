"""Test the load-time names: every spelling loads, saves and reloads, and the attention behind them is stock's."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from support.backends import skip_for
from support.towers import alike
from tiny import GRIDS, TINY, assert_close, merged_of, outputs_of, pixels_for, run_tower, tower_of
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLPreTrainedModel,
    Qwen2VLVisionBlock,
)

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, backends, machine
from hf_vit_accel.tower.state import state_of

AUTO = "flash_vit_auto"
Spelling = str | dict[str, str]
by_both_spellings = pytest.mark.parametrize(
    "spelling", ["flashinfer_cudnn", {"vision_config": "flashinfer_cudnn"}], ids=["string", "dict"]
)


@dataclass(frozen=True)
class Saved:
    """A stock model of one family, and the folder where it is saved."""

    path: Path
    model: PreTrainedModel

    def load(self, **options: object) -> PreTrainedModel:
        return AutoModelForImageTextToText.from_pretrained(self.path, **options)

    def outputs(self) -> list[torch.Tensor]:
        return run_tower(tower_of(self.model), GRIDS["mixed"])


@pytest.fixture(scope="module", params=alike("qwen2_5_vl", "qwen3_vl_moe", "qwen2_vl", "qwen3_vl"))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model = TINY[request.param].build()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return Saved(path, model)


def names(model: PreTrainedModel) -> dict[str, str]:
    config = model.config
    return {
        "top": config._attn_implementation,
        "vision": config.vision_config._attn_implementation,
        "text": config.text_config._attn_implementation,
    }


@pytest.mark.parametrize("spelling", [AUTO, {"vision_config": AUTO}], ids=["string", "dict"])
def test_loading_by_name_equals_patch(saved: Saved, spelling: Spelling, tmp_path: Path) -> None:
    expected = saved.outputs()
    model = saved.load(attn_implementation=spelling)
    tower = tower_of(model)
    assert names(model)["vision"] == AUTO and names(model)["text"] == "sdpa"
    assert state_of(tower).settings == state_of(tower_of(hf_vit_accel.patch(TINY["qwen2_vl"].build()))).settings
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert state_of(tower).fast_calls == 1
    model.save_pretrained(tmp_path)
    assert "flash_vit" not in (tmp_path / "config.json").read_text()
    reloaded = tower_of(AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=spelling))
    assert_close(run_tower(reloaded, GRIDS["mixed"]), expected)
    assert state_of(reloaded).fast_calls == 1
    hf_vit_accel.unpatch(model)
    assert set(names(model).values()) == {"sdpa"} and state_of(tower) is None
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)


def test_set_attn_implementation_there_and_back(saved: Saved) -> None:
    expected = saved.outputs()
    model = saved.load(attn_implementation="eager")
    tower = tower_of(model)
    for ours, former in ((AUTO, "sdpa"), ({"vision_config": AUTO}, {"vision_config": "eager"})):
        model.set_attn_implementation(ours)
        assert names(model)["vision"] == AUTO and names(model)["text"] in ("sdpa", "eager")
        calls = state_of(tower).fast_calls
        assert_close(run_tower(tower, GRIDS["mixed"]), expected)
        assert state_of(tower).fast_calls == calls + 1
        model.set_attn_implementation(ours)
        assert state_of(tower).fast_calls == calls + 1, "the same name again keeps the state"
        copy.deepcopy(model).set_attn_implementation(ours)
        model.set_attn_implementation(former)
        assert state_of(tower) is None and "forward" not in vars(tower)
        assert AUTO not in names(model).values()
        assert_close(run_tower(tower, GRIDS["mixed"]), expected)


@by_both_spellings
def test_a_named_backend_that_cannot_run_here_raises_at_load_time(
    saved: Saved, spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        saved.load(attn_implementation=spelling)
    model = saved.load()
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        model.set_attn_implementation(spelling)
    assert state_of(tower_of(model)) is None and set(names(model).values()) == {"sdpa"}
    for attention in ("flashinfer_cudnn", "torch_varlen", "flash_attention_3"):
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            hf_vit_accel.patch(model, attention=attention)
        assert state_of(tower_of(model)) is None and set(names(model).values()) == {"sdpa"}


def test_other_models_are_left_alone() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    assert LlamaForCausalLM._from_config(config).config._attn_implementation == "sdpa"
    assert LlamaForCausalLM._from_config(config, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="is not supported"):
        LlamaForCausalLM._from_config(config, attn_implementation="no_such_attention")


def test_a_model_without_a_supported_tower_is_refused() -> None:
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlavaConfig(
        vision_config=dict(sizes, model_type="clip_vision_model"),
        text_config=dict(sizes, model_type="llama", vocab_size=16),
    )
    with pytest.raises(ValueError, match=r"towers of qwen2_vl, .*; LlavaConfig has none"):
        transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=AUTO)


@pytest.mark.parametrize(("typo", "meant"), [("flash_vit_atuo", AUTO), ("flashinfer-cudnn", "flashinfer_cudnn")])
def test_a_typo_of_our_names_adds_a_note_to_the_error_of_transformers(typo: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{typo}.* is not supported") as error:
        TINY["qwen3_vl"].build(attn_implementation=typo)
    assert error.value.__notes__ == [f"Did you mean '{meant}', of hf_vit_accel?"]


class Wrapper(Qwen2VLPreTrainedModel):
    """A model with the config of its tower: of a known class, or of one like remote code brings."""

    config_class = Qwen2VLVisionConfig

    def __init__(self, config: Qwen2VLVisionConfig, *, has_known_tower: bool) -> None:
        super().__init__(config)
        if has_known_tower:
            self.tower = Qwen2VisionTransformerPretrainedModel(config)
        else:
            self.block = Qwen2VLVisionBlock(config)
        self.post_init()

    def forward(self) -> None:
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        angles = torch.zeros(8, self.config.embed_dim // self.config.num_heads)
        rows = torch.zeros(8, self.config.embed_dim)
        self.block(rows, cu_seqlens=offsets, max_seqlen=8, position_embeddings=(angles.cos(), angles.sin()))


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("has_known_tower", [False, True])
def test_a_tower_of_an_unknown_class_warns_once(has_known_tower: bool) -> None:
    """It attends by our function and is stock otherwise; a wrapper around a known tower is patched."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            config = Qwen2VLVisionConfig(**TINY["qwen2_vl"].vision)
            model = Wrapper._from_config(config, attn_implementation=AUTO, has_known_tower=has_known_tower).eval()
            test_other_models_are_left_alone()
            if not has_known_tower:
                model()
    texts = [str(warning.message) for warning in caught if "stays stock" in str(warning.message)]
    if has_known_tower:
        assert not texts and state_of(model.tower) is not None
    else:
        assert len(texts) == 1 and "Wrapper stays stock, but for its attention" in texts[0]


def test_a_stock_tower_under_our_name_is_right_without_plans(saved: Saved) -> None:
    """A tower with a stock forward may share a config that has our name. Its attention makes its own plans."""
    expected = saved.outputs()
    tower = tower_of(saved.load())
    tower.config._attn_implementation_internal = AUTO
    assert state_of(tower) is None
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    with pytest.raises(ValueError, match="cu_seqlens to rise from 0"):
        run_tower(tower, GRIDS["image"], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))


def test_dropout_is_stock(saved: Saved) -> None:
    """Stock hard-codes 0.0. A user who sets a rate gets stock's dropout, value for value under one seed."""
    outputs = []
    for is_patched in (False, True):
        model = saved.load().train()
        tower = tower_of(model)
        for block in tower.blocks:
            block.attn.attention_dropout = 0.5
        if is_patched:
            hf_vit_accel.patch(model)
        for grad in (False, True):
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                pixels = pixels_for(tower, GRIDS["image"])
                outputs.append(outputs_of(tower(pixels, grid_thw=torch.tensor(GRIDS["image"])))[0])
    assert_close(outputs[2:], outputs[:2])


def test_attentions_of_an_eager_model_are_returned(saved: Saved) -> None:
    """Setting `config.output_attentions` needs the name "eager", so a patched model keeps that name."""
    model = saved.load(attn_implementation="eager")
    tower = tower_of(model)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with torch.no_grad():
        stock = tower(pixels, grid_thw=grid)
        tower.config.output_attentions = True
        expected = tower(pixels, grid_thw=grid).attentions
        tower.config.output_attentions = False
        hf_vit_accel.patch(model)
        assert_close([merged_of(tower(pixels, grid_thw=grid))], [merged_of(stock)])
        assert state_of(tower).fast_calls == 1
        tower.config.output_attentions = True
        attentions = tower(pixels, grid_thw=grid).attentions
    assert len(attentions) == len(tower.blocks)
    assert_close(list(attentions), list(expected))


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def needs_cudnn() -> None:
    skip_for(backends.backend_named("flashinfer_cudnn").reasons_against_machine())


@pytest.mark.gpu
@by_both_spellings
def test_gpu_loading_flashinfer_cudnn_by_name(needs_cudnn: None, saved: Saved, spelling: Spelling) -> None:
    model = saved.load(attn_implementation=spelling, dtype=torch.bfloat16)
    tower = tower_of(model.cuda())
    outputs = run_tower(tower, GRIDS["mixed"])
    status = hf_vit_accel.status(model).towers[0]
    assert set(status.backends.values()) <= {"flashinfer_cudnn", "fused kernel"}
    assert status.backends["full"] == "flashinfer_cudnn" and status.calls == 1 and not status.fallbacks
    assert_close([output.float().cpu() for output in outputs], saved.outputs(), 5e-2)
    assert names(model)["text"] == "sdpa"
    model.float()
    run_tower(tower, GRIDS["mixed"])
    status = hf_vit_accel.status(model).towers[0]
    assert set(status.backends.values()) == {"sdpa"}
    reason = "flashinfer_cudnn cannot serve the call: the dtype is float32"
    assert any(reason in fallback for fallback in status.fallbacks)


@pytest.mark.gpu
def test_gpu_a_tower_on_the_cpu_of_a_gpu_machine_falls_back(needs_cudnn: None, saved: Saved) -> None:
    tower = tower_of(saved.load(attn_implementation="flashinfer_cudnn"))
    assert_close(run_tower(tower, GRIDS["mixed"]), saved.outputs())
    assert any("it runs on cuda" in fallback for fallback in state_of(tower).fallbacks)
