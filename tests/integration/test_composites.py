"""Tiny composite models of every family, loaded by name in every spelling and patched: their text part is untouched."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from support import attention_only
from support.composites import COMPOSITES
from tiny import IMAGE, TINY, assert_close, chat_inputs, padded_text, randomise
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import FAMILIES, find_towers
from hf_vit_accel.tower.state import state_of

AUTO = "flash_vit_auto"


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**padded_text((5, 9))).logits


def names(model: nn.Module) -> dict[str, str]:
    return {name: getattr(model.config, name)._attn_implementation for name in model.config.sub_configs}


def assert_patched(model: nn.Module, text: dict[str, str]) -> None:
    [(_, tower, _)] = find_towers(model)
    assert state_of(tower) is not None
    assert names(model) == text | {"vision_config": AUTO}


DIFFERENT = {"hyperclovax_vision_v2", "glm4v", "qwen2_5_omni", "kimi_k25", "minimax_m3_vl", "minicpmv4_6", "inkling2"}
"""Another package's text, M-RoPE, two levels, MLA, no plain name, linear attention, and tokens of another model."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name not in DIFFERENT)) for name in COMPOSITES]
)
def test_loading_by_name_leaves_text_alone(name: str) -> None:
    composite = COMPOSITES[name]
    stock = composite.make()
    [(_, tower, _)] = find_towers(stock)
    kernel = getattr(tower, "_compatible_flash_implementations", None)
    if kernel:
        pytest.skip(f"this transformers replaces a name by {kernel}, for the tower too (MiniMax-M3 before 5.23)")
    expected = logits(stock)
    before = names(stock)
    for spelling in [{"vision_config": AUTO}, *([AUTO] if composite.by_name else [])]:
        model = composite.make(attn_implementation=spelling)
        assert_patched(model, before)
        assert torch.equal(logits(model), expected), spelling
        hf_vit_accel.unpatch(model)
        assert names(model) == before and torch.equal(logits(model), expected)
        model.set_attn_implementation(spelling)
        assert_patched(model, before)
        assert torch.equal(logits(model), expected), spelling
        by_plain_name = composite.by_name and model._supports_sdpa
        model.set_attn_implementation("sdpa" if by_plain_name else {"vision_config": "sdpa"})
        assert all(state_of(module) is None for module in model.modules())
    hf_vit_accel.patch(stock)
    assert_patched(stock, before)
    assert torch.equal(logits(stock), expected)


def test_a_tower_two_levels_down_by_name() -> None:
    """Load Qwen2.5-Omni by name: its talker keeps its attention. docs/index.md shows the dict that names the tower."""
    for spelling in AUTO, {"thinker_config": {"vision_config": AUTO}}:
        config = transformers.Qwen2_5OmniConfig(enable_audio_output=True)
        config.thinker_config.vision_config.depth = config.thinker_config.audio_config.encoder_layers = 1
        config.thinker_config.text_config.num_hidden_layers = config.talker_config.num_hidden_layers = 1
        with torch.device("meta"):
            model = transformers.Qwen2_5OmniForConditionalGeneration._from_config(config, attn_implementation=spelling)
        parts = {path: part for path, part in model.named_modules() if isinstance(part, transformers.PreTrainedModel)}
        [(tower_path, tower, _)] = find_towers(model)
        renamed = {path for path, part in parts.items() if part.config._attn_implementation == AUTO}
        holders = {path for path in parts if tower_path.startswith(path)} if spelling == AUTO else set()
        assert renamed == {tower_path} | holders
        assert state_of(tower) is not None
        hf_vit_accel.unpatch(model)
        assert {part.config._attn_implementation for part in parts.values()} == {"sdpa"}


def test_a_config_that_names_the_attention(tmp_path: Path) -> None:
    """verl's `override_config` sets attributes of a config that has another attention, and loads with it."""
    stock = TINY["qwen2_5_vl"].build()
    stock.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
    config.vision_config._attn_implementation = AUTO
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, config=config)
    inputs = chat_inputs(stock, [(1, 8, 6), (1, 4, 10)])
    with torch.no_grad():
        assert_close([model(**inputs).logits], [stock(**inputs).logits])
    assert names(model)["text_config"] == "sdpa"
    [status] = hf_vit_accel.status(model).towers
    assert (status.calls, status.stock_calls) == (1, 0)


def test_cosmos3_omni_holds_qwen3_vls_tower() -> None:
    if not hasattr(transformers, "Cosmos3OmniConfig"):
        pytest.skip("this transformers has no Cosmos3-Omni")
    tiny = TINY["qwen3_vl"]
    tokens = dict(image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
    config = transformers.Cosmos3OmniConfig(vision_config=tiny.vision, text_config=tiny.text, **tokens)
    model = randomise(transformers.Cosmos3OmniForConditionalGeneration._from_config(config).eval())
    inputs = chat_inputs(tiny.build(), [(1, 4, 6), (1, 8, 8)])
    with torch.no_grad():
        expected = model(**inputs).logits
        assert_close([hf_vit_accel.patch(model, strict=True)(**inputs).logits], [expected])
    assert [tower.calls for tower in hf_vit_accel.status(model).towers] == [1]


def test_every_family_has_a_composite() -> None:
    present = [composite for composite in COMPOSITES.values() if hasattr(transformers, composite.config)]
    modules = {type(composite.build()[1].vision_config).__module__ for composite in present}
    homes = {module for family in FAMILIES for module, _ in family.towers if module.split(".")[2] not in TINY}
    supported = {
        home.replace(".modeling_", ".configuration_")
        for home in homes
        if importlib.util.find_spec(home.rpartition(".")[0]) is not None
    }
    assert supported and supported <= modules


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_features_of_images_and_videos_equal_stock(name: str, kind: str) -> None:
    """Models pass arguments by name, and some pass a video frame by frame."""
    model = COMPOSITES[name].make()
    [(_, tower, family)] = find_towers(model)
    if family.attention_only:
        pytest.skip("test_attention_only.py draws what its tower takes")
    holder = next((module for module in model.modules() if hasattr(module, f"get_{kind}_features")), None)
    if holder is None:
        pytest.skip(f"the model takes no {kind}")
    grid = torch.tensor([(1, 4, 6), (1, 8, 4)] if kind == "image" else [(2, 4, 6), (4, 6, 4)])
    weight = family.parts(tower).projection.weight
    rows = torch.randn(int(grid.prod(1).sum()), weight[0].numel(), generator=torch.Generator().manual_seed(0))
    pixels = rows if family.pixel_dims == 2 else rows.view(-1, *weight.shape[1:])

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            output = getattr(holder, f"get_{kind}_features")(pixels, grid)
        features = getattr(output, "pooler_output", output)
        return list(features) if isinstance(features, tuple | list) else [features]

    expected = run()
    hf_vit_accel.patch(model, strict=True)
    assert_close(run(), expected)
    [status] = hf_vit_accel.status(model).towers
    assert (status.calls, status.stock_calls) == (1, 0)


@pytest.mark.parametrize("name", ["minicpmv4_6", "minicpmv4_7", "minicpm_ocr", "inkling2", "inkling2_loop"])
def test_features_of_models_with_other_grids_equal_stock(name: str) -> None:
    """MiniCPM-V takes heights and widths, and can leave its merger out; Inkling 2 counts merged tokens."""
    model = COMPOSITES[name].make()
    [(_, tower, _)] = find_towers(model)
    arguments = attention_only.inputs(tower, images=[(1, 4, 8)] * 3)  # others fail in MiniCPM-V before 5.19
    modes: list[dict[str, str]] = [{}, {"downsample_mode": "4x"}] if name.startswith("minicpm") else [{}]

    def run(mode: dict[str, str]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(model.model.get_image_features(**arguments, **mode).pooler_output)

    expected = [run(mode) for mode in modes]
    hf_vit_accel.patch(model, strict=True)
    for mode, features in zip(modes, expected, strict=True):
        assert_close(run(mode), features)
    [status] = hf_vit_accel.status(model).towers
    assert (status.calls, status.stock_calls) == (len(modes), 0)
    with pytest.raises(ValueError, match="every_rank=True needs a model with M-RoPE"):
        hf_vit_accel.patch(model, every_rank=True)
