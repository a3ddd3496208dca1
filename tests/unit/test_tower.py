"""Test patched towers against stock ones: every family, kind of input, way to patch and undo, and reason for stock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support.exactness import check_error_bound
from support.towers import ONE_TOWER, alike
from tiny import (
    FAMILIES,
    GRIDS,
    TINY,
    assert_close,
    chat_inputs,
    doubled,
    outputs_of,
    pixels_for,
    run_tower,
    tower_of,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

import hf_vit_accel
from hf_vit_accel import FallbackError
from hf_vit_accel.tower.state import state_of


@pytest.fixture(scope="module", params=[*FAMILIES[1:], *alike(FAMILIES[0], "qwen3_vl_moe")])
def shared(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return one model per family, for tests that do not change it."""
    return TINY[request.param].build()


both_fusions = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


# --- equal to stock -------------------------------------------------------------------------------------------------


@both_fusions
def test_patched_equals_stock(shared: PreTrainedModel, fuse: bool) -> None:
    tower = tower_of(shared)
    expected = {name: run_tower(tower, grid) for name, grid in GRIDS.items()}
    with hf_vit_accel.patched(shared, fuse=fuse, strict=True):
        for name, outputs in expected.items():
            assert_close(run_tower(tower, GRIDS[name]), outputs)
        assert state_of(tower).fast_calls == len(GRIDS)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected["mixed"], 0.0)


def test_layouts_of_equal_size_are_distinguished(shared: PreTrainedModel) -> None:
    """Layouts share their rows and their longest segment, which must not be the key of graphs and caches."""
    tower = tower_of(shared)
    layouts = [[(1, 8, 4), (1, 4, 8)], [(1, 4, 8), (1, 8, 4)], [(2, 4, 8)], [(1, 4, 8)] * 2, [(1, 2, 16), (1, 8, 4)]]
    expected = [run_tower(tower, grid) for grid in layouts]
    with hf_vit_accel.patched(shared):
        for _ in range(2):
            for grid, outputs in zip(layouts, expected, strict=True):
                assert_close(run_tower(tower, grid), outputs)
        assert state_of(tower).routes.cache.misses == len(layouts)


@pytest.mark.parametrize("dtype", alike(torch.bfloat16, torch.float16))
def test_low_precision_is_as_exact_as_stock(shared: PreTrainedModel, dtype: torch.dtype) -> None:
    check_error_bound(shared, dtype, "cpu", ["sdpa"], [[(1, 4, 10), (2, 2, 4)]])


# --- undo, redo, copies ---------------------------------------------------------------------------------------------


def traces_of(model: PreTrainedModel) -> list[object]:
    """Return everything that patching may change on a model."""
    tower = tower_of(model)
    return [
        sorted(vars(tower)),
        vars(tower).get("forward"),
        [(name, list(m._forward_hooks), list(m._forward_pre_hooks)) for name, m in model.named_modules()],
        [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        [(name, p.data_ptr(), p.shape, p.stride()) for name, p in model.named_parameters()],
        list(model.state_dict()),
    ]


def double_output(tower: nn.Module) -> None:
    """Give a tower a forward of its own, which doubles an output of the class's."""
    class_forward = type(tower).forward

    def forward(*args: object, **kwargs: object) -> ModelOutput:
        return doubled(class_forward(tower, *args, **kwargs))

    tower.forward = forward


@pytest.mark.parametrize("has_own_forward", [False, True], ids=["", "own forward"])
def test_unpatch_leaves_everything_as_before(model: PreTrainedModel, has_own_forward: bool) -> None:
    tower = tower_of(model)
    if has_own_forward:
        double_output(tower)
    before = traces_of(model)
    expected = run_tower(tower, GRIDS["mixed"])
    assert hf_vit_accel.patch(model) is model
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (1, 0), "also inside of a forward of its own"
    assert hf_vit_accel.unpatch(model) is model
    assert traces_of(model) == before
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)
    assert hf_vit_accel.unpatch(model) is model and traces_of(model) == before


def test_patched_restores_the_former_settings(model: PreTrainedModel) -> None:
    tower = tower_of(model)
    before = traces_of(model)
    with hf_vit_accel.patched(model, attention="sdpa") as same:
        assert same is model
        attributes = sorted(vars(tower))
        with hf_vit_accel.patched(model, fuse=False):
            assert not state_of(tower).settings.fuse and sorted(vars(tower)) == attributes
        assert state_of(tower).settings.attention == "sdpa" and state_of(tower).settings.fuse
    assert traces_of(model) == before
    with pytest.raises(RuntimeError, match="mine"), hf_vit_accel.patched(model):
        raise RuntimeError("mine")
    assert traces_of(model) == before


# --- gradients and reasons for stock ---------------------------------------------------------------------------------


def fallbacks(model: PreTrainedModel) -> str:
    return " | ".join(state_of(tower_of(model)).fallbacks)


def test_hidden_states_of_the_language_model_leave_the_tower_fast(model: PreTrainedModel) -> None:
    """By the config of the text, and by the argument, which newer transformers hand to the tower, too (colpali)."""
    inputs = chat_inputs(model, [(1, 8, 12), (1, 4, 4)])
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
        model.config.get_text_config().output_hidden_states = True
        by_config = model(**inputs).hidden_states  # None from transformers 5.0, which does not read it
        model.config.get_text_config().output_hidden_states = False
        hf_vit_accel.patch(model, strict=True)
        assert_close([model.model(**inputs).last_hidden_state], [expected[-1]])
        model.config.get_text_config().output_hidden_states = True
        ours = model(**inputs).hidden_states
        assert (ours is None) == (by_config is None)
        assert_close(list(ours or expected), list(by_config or expected))
        model.config.get_text_config().output_hidden_states = False
        assert_close(list(model(**inputs, output_hidden_states=True).hidden_states), list(expected))
        assert state_of(tower_of(model)).fast_calls == 3


def test_upcast_queries_are_attended_in_the_dtype_of_the_weights(model: PreTrainedModel) -> None:
    """PEFT and quantisation leave some layers in fp32 beside bf16 weights: fp32 q, k, v come back as fp32."""
    tower = tower_of(model).bfloat16()
    for block in tower.blocks:
        inner = block.attn.qkv.float()
        block.attn.qkv = nn.Sequential(Cast(torch.float32), inner)
        block.attn.proj = nn.Sequential(Cast(torch.bfloat16), block.attn.proj)
    expected = run_tower(tower, GRIDS["image"])
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower, GRIDS["image"]), expected, 3e-2)
    assert "several dtypes" in fallbacks(model)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_strict_refuses_to_patch_a_tower_that_would_fall_back(model: PreTrainedModel) -> None:
    tower_of(model).rotary_pos_emb.register_forward_hook(lambda *_: None)
    with pytest.raises(FallbackError, match="hooks on rotary_pos_emb"):
        hf_vit_accel.patch(model, strict=True)


@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
def test_two_threads_get_their_own_answers(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    names = ("smallest", "video", "mixed")
    expected = {(name, seed): run_tower(tower, GRIDS[name], seed) for name in names for seed in range(2)}

    def work(seed: int) -> None:
        for _ in range(5):
            for name in names:
                assert_close(run_tower(tower, GRIDS[name], seed), expected[name, seed])

    with hf_vit_accel.patched(shared), ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def test_neither_inputs_nor_earlier_outputs_are_changed(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with hf_vit_accel.patched(shared), torch.no_grad():
        tensors = [pixels, grid, *outputs_of(tower(pixels, grid_thw=grid))]
        copies = [tensor.clone() for tensor in tensors]
        run_tower(tower, GRIDS["images"], 1)
    assert all(torch.equal(tensor, former) for tensor, former in zip(tensors, copies, strict=True))


def test_under_another_default_device(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    expected = run_tower(tower, GRIDS["mixed"])
    pixels = pixels_for(tower, GRIDS["mixed"])
    grid = torch.tensor(GRIDS["mixed"])
    with hf_vit_accel.patched(shared), torch.device("meta"), torch.no_grad():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)


# --- bad input ------------------------------------------------------------------------------------------------------

Spoil = Callable[[torch.Tensor, torch.Tensor], tuple[object, object]]
BAD: dict[str, tuple[Spoil, str]] = {
    "images": (lambda pixels, grid: (torch.zeros(2, 3, 28, 28), grid), r"got images of shape \(2, 3, 28, 28\); pass"),
    "rows disagree": (lambda pixels, grid: (pixels[:-4], grid), "expected 96 rows of pixel values"),
    "no frames": (lambda pixels, grid: (pixels, torch.tensor([[0, 12, 8]])), "at least one image"),
    "no rows": (lambda pixels, grid: (pixels, torch.tensor([[1, 0, 8]])), "positive sizes"),
    "merge does not divide": (
        lambda pixels, grid: (pixels, torch.tensor([[1, 32, 3]])),
        "multiples of the merge size 2",
    ),
    "empty batch": (lambda pixels, grid: (pixels[:0], grid[:0]), "at least one image"),
    "grid rank": (lambda pixels, grid: (pixels, grid[0]), r"shape \(images and videos, 3\)"),
    "grid dtype": (lambda pixels, grid: (pixels, grid.float()), "integer grid_thw"),
    "grid is a list": (lambda pixels, grid: (pixels, grid.tolist()), r"got list"),
    "pixel dtype": (lambda pixels, grid: (pixels.to(torch.complex64), grid), "tensor of real numbers of shape"),
    "pixel width": (lambda pixels, grid: (pixels[:, :-1], grid), "values per patch"),
    "devices": (lambda pixels, grid: (pixels.to("meta"), grid), "on the tower's device cpu"),
    "grid device": (lambda pixels, grid: (pixels, grid.to("meta")), "grid_thw on the CPU or with the pixel values"),
}
"""Changes of pixels and grid that make them wrong, and a part of the error."""


@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_value_error_and_the_next_call_is_right(shared: PreTrainedModel, case: str) -> None:
    tower = tower_of(shared)
    expected = run_tower(tower, GRIDS["image"])
    spoil, message = BAD[case]
    arguments = spoil(pixels_for(tower, GRIDS["image"]), torch.tensor(GRIDS["image"]))
    with hf_vit_accel.patched(shared):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            tower(*arguments)
        assert_close(run_tower(tower, GRIDS["image"]), expected)


@both_fusions
@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
@pytest.mark.parametrize("case", ["padding rows", "integers", "a batch"])
def test_odd_input_that_stock_takes_is_taken(shared: PreTrainedModel, case: str, fuse: bool) -> None:
    """Pixels in another shape than the processor's go the stock way."""
    tower = tower_of(shared)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    if case == "padding rows":
        grid = torch.cat([grid.new_zeros(1, 3), grid, grid.new_tensor([[0, 6, 4]])])
    elif case == "integers":
        pixels = (pixels * 10).int()
    else:
        pixels = pixels[None]
    with torch.no_grad():
        try:
            expected = outputs_of(tower(pixels, grid))
        except RuntimeError:
            pytest.skip("this transformers does not take it")
        with hf_vit_accel.patched(shared, fuse=fuse):
            assert_close(outputs_of(tower(pixels, grid)), expected)
            assert state_of(tower).fast_calls == (case != "a batch")


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_on_a_cpu_is_short(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = hf_vit_accel.patch(TINY["qwen2_5_vl"].build())
    [tower] = hf_vit_accel.status(model).towers
    labels = [line[:12].strip() for line in str(tower).splitlines()[1:]]
    assert labels == ["attention", "fused", "calls", "layouts", "on a CPU"], str(tower)
    assert len(tower.unfused) > 3 and len(tower.rejected["full"]) > 3  # the reasons are still there
    reason = "the module is of another class"
    changed = replace(tower, unfused={**tower.unfused, "patch_embed": reason}, attention="flash_attention_3")
    lines = str(changed).splitlines()
    assert f"  not fused  patch_embed: {reason}" in lines  # it would run on a CPU
    assert [line.split(": ")[0] for line in lines if "not used" in line] == ["  not used   flash_attention_3"]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        *[("flash_attn_3", "flash_attention_3"), ("varlen", "torch_varlen"), ("SDPA", "sdpa"), ("Auto", "auto")],
        *[("nonsense", None), (3, None), ("fa3", "flash_attention_3"), ("flex_attention", "flex")],
    ],
)
def test_a_typo_of_a_backend_is_met_with_a_suggestion(typo: str, meant: str | None) -> None:
    with pytest.raises(ValueError, match=r"expected attention to be one of 'auto', .*'sdpa', got") as error:
        hf_vit_accel.patch(TINY["qwen3_vl"].build(), attention=typo)
    assert str(error.value).endswith(f"; did you mean '{meant}'?" if meant else f"got {typo!r}")


@pytest.mark.parametrize("name", ["eager", "flash_attention_2", "fa2", "paged|sdpa", "kernels-community/flash-attn3"])
def test_a_name_of_transformers_is_explained(name: str) -> None:
    with pytest.raises(ValueError, match="is transformers' own name: attention='auto' takes") as error:
        hf_vit_accel.patch(TINY["qwen3_vl"].build(), attention=name)
    assert "did you mean" not in str(error.value)
