"""Test `patch(like=...)`: copies of towers from remote code are served, and sabotaged copies are refused."""

import copy
import re
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import copies
from support.copies import COPIES, Composite
from support.patching import status_of
from support.tensors import flat
from support.towers import alike
from tiny import assert_close, pixels_for
from torch import Tensor, nn

import hf_vit_accel
from hf_vit_accel.tower import proof
from hf_vit_accel.tower.state import state_of

GRID = [(1, 4, 6), (2, 8, 10), (1, 2, 18)]
TALL = [(1, 44, 24)]
HALF = torch.bfloat16
DEPTHS = {"qwen2_vl": 2, "qwen2_5_vl": 3, "qwen3_vl": 4}
"""Few layers, some with windows, some without, and some that deepstack merges.

A proof takes as long as the tower is deep.
"""


def build(kind: type[Any], **sizes: int) -> Any:
    """Build a copy of its family's depth, with random weights."""
    [family] = [name for name, base in copies.BASES.items() if issubclass(kind, base)] or ["qwen2_vl"]
    return copies.build(kind, **{"depth": DEPTHS[family]} | sizes)


def run(tower: nn.Module, grid: list[tuple[int, int, int]] = GRID, **options: object) -> list[Tensor]:
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        return flat(tower(pixels, torch.tensor(grid), **options))


def gradients(tower: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters for a random weighting of the outputs."""
    outputs = flat(tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator) for output in outputs]
    return list(torch.autograd.grad(outputs, list(tower.parameters()), weights))


quick = pytest.mark.usefixtures("quick_proof")


# --- sabotaged copies -------------------------------------------------------------------------------------------------

REFUSED = {
    "ActsAboveASize": ("qwen2_5_vl", r"large images \(\d+ rows\)"),
    "ActsAboveARowCount": ("qwen2_5_vl", r"large images \(\d{4} rows\)"),
    "ActsFromLayer4": ("qwen3_vl", r"relative error \d"),
    "ActsInTraining": ("qwen2_vl", r"in training mode"),
    "ActsOnManyImages": ("qwen2_vl", r"large images"),
    "ActsOnLongClips": ("qwen2_vl", r"large images"),
    "ActsOnEqualSizes": ("qwen2_vl", r"large images"),
    "ActsOnOneToken": ("qwen2_vl", r"single images \(4 rows\)"),
    "ActsInInferenceMode": ("qwen2_vl", r"large images \(\d+ rows\) in eval mode"),
    "ActsOnOneImage": ("qwen2_vl", r"one image \(96 rows\)"),
    "ActsOnPairs": ("qwen2_vl", r"two images"),
    "ActsOnAClipFirst": ("qwen2_vl", r"relative error"),
    "ActsOnThreeFrames": ("qwen2_vl", r"a clip of 3 frames"),
    "ActsOnSquares": ("qwen2_vl", r"a square image \(256 rows\)"),
    "ActsAtTheSizeOfTheTable": ("qwen3_vl", r"an image of the table's own size"),
    "ActsOnThumbnails": ("qwen2_vl", r"images \(192 rows\) in training mode"),
    "ScalesABit": ("qwen2_vl", r"features in float32: relative error (1\.0e-03|9\.\de-04)"),
    "ActsByAParameter": ("qwen3_vl", r"small images \(192 rows\) in eval mode"),
    "ActsFromTheThirdCall": ("qwen2_vl", "one image"),
    "DropsOut": ("qwen2_vl", "in training mode"),
    "StopsGradients": ("qwen2_vl", r"patch_embed\.proj\.weight has no gradient, where our operations"),
    "StopsGradientsOfFiveImages": ("qwen2_vl", "the gradient of the pixels of five images in float32"),
}


def acts_on_some_inputs(name: str) -> bool:
    """Return whether a copy acts on some inputs, as `ActsAboveASize` does. Each input of the proof has one."""
    return name.startswith("ActsOn") or name == "ActsAboveARowCount"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.matrix] * acts_on_some_inputs(x)) for x in REFUSED]
)
def test_a_sabotaged_copy_is_refused_with_the_number(name: str) -> None:
    family, where = REFUSED[name]
    tower = build(getattr(copies, name), **({"depth": 6} if name == "ActsFromLayer4" else {}))
    expected = run(tower)
    attributes = vars(tower).keys()
    with pytest.raises(ValueError, match=f"{name} is no copy of {family}: ") as caught:
        hf_vit_accel.patch(tower, like={name: family})
    assert re.search(where, str(caught.value)), caught.value
    number = r"relative error \d\.\de[-+]\d\d, at most 1e-0[34] is rounding"
    assert re.search(f"{number}|has no gradient", str(caught.value))
    assert vars(tower).keys() == attributes, "nothing is patched"
    assert_close(run(tower), expected, 0.0)


@quick
def test_a_copy_that_returns_more_fields_is_refused() -> None:
    """Our operations would return one field less, though all tensors are equal."""
    tower = build(copies.ReturnsAnEmptyField)
    with pytest.raises(ValueError, match="returns a BaseModelOutputWithPooling of an unknown form"):
        hf_vit_accel.patch(tower, like={"ReturnsAnEmptyField": "qwen2_vl"})


@quick
def test_a_copy_that_acts_in_bf16_is_refused_in_bf16_alone() -> None:
    """fp32 calls are fast; the first call in bf16 runs the proof for that dtype."""
    tower = build(copies.ActsInBf16, depth=6)  # bfloat16 shows it in a deep tower alone
    hf_vit_accel.patch(tower, like={"ActsInBf16": "qwen2_vl"})
    run(tower)
    assert (status_of(tower).calls, status_of(tower).stock_calls) == (1, 0)
    stock = copy.deepcopy(tower)
    hf_vit_accel.unpatch(stock)
    stock.to(HALF)
    tower.to(HALF)
    with pytest.warns(UserWarning, match=r"features in bfloat16: error \d\.\de-\d\d against fp32"):
        results = run(tower)
    assert_close(results, run(stock), 0.0)
    assert status_of(tower).stock_calls == 1
    with pytest.raises(ValueError, match="in bfloat16"):
        hf_vit_accel.patch(stock, like={"ActsInBf16": "qwen2_vl"})


@quick
def test_a_copy_that_acts_under_autocast_is_refused_there() -> None:
    tower = build(copies.ActsUnderAutocast, depth=6)  # bfloat16 shows it in a deep tower alone
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like={"ActsUnderAutocast": "qwen2_vl"})
    run(tower)
    with torch.autocast("cpu", dtype=HALF), pytest.warns(UserWarning, match="stays stock in float32 under autocast"):
        assert_close(run(tower), run(stock), 0.0)
    [reason] = status_of(tower).fallbacks
    assert re.search(r"features in float32 under autocast to bfloat16: error \d\.\de-\d\d", reason)
    run(tower)
    assert (status_of(tower).calls, status_of(tower).stock_calls) == (2, 1)


def load_a_buffer(tower: nn.Module) -> None:
    tower.load_state_dict(tower.state_dict() | {"bonus": torch.linspace(0, 0.1, len(tower.bonus))})


def set_option(tower: nn.Module) -> None:
    tower.options.scale = 1.1


IN_CLOSURE = {"scale": 1.0}


def in_closure(options: dict[str, float]) -> Callable[..., Tensor]:
    def by_closure(self: Any, x: Tensor) -> Tensor:
        return x * options["scale"]

    return by_closure


NOTICED: dict[str, tuple[type[Any], Callable[[Any], object]]] = {
    "a buffer": (copies.ActsByABuffer, load_a_buffer),
    "an integer of the config": (copies.ActsByTheConfig, lambda tower: setattr(tower.config, "boost", 1)),
    "an object": (copies.ActsByOptions, set_option),
    "a closure": (copies.ActsByOptions, lambda tower: IN_CLOSURE.update(scale=1.1)),
}
"""What a copy reads, and a change in place."""
REASONS = {
    "a buffer": "a buffer changed",
    "an integer of the config": "a field of a Qwen2_5_VLVisionConfig 'boost' changed",
}


@quick
@pytest.mark.filterwarnings("ignore:.*stays stock")
@pytest.mark.parametrize("name", NOTICED)
def test_a_change_of_what_a_copy_reads_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = NOTICED[name]
    monkeypatch.setitem(IN_CLOSURE, "scale", 1.0)
    if name == "a closure":
        monkeypatch.setattr(kind, "after", in_closure(IN_CLOSURE))
    tower = build(kind)
    stock = copy.deepcopy(tower)
    [family] = [family for family, base in copies.BASES.items() if issubclass(kind, base)]
    hf_vit_accel.patch(tower, like={kind.__name__: family})
    run(tower)
    assert (status_of(tower).calls, status_of(tower).stock_calls) == (1, 0)
    for model in (tower, stock):
        change(model)
    assert_close(run(tower), run(stock), 0.0)
    status = status_of(tower)
    assert (status.calls, status.stock_calls) == (1, 1)
    [reason] = status.fallbacks
    assert re.search(rf"{kind.__name__} is no copy of {family}: .* relative error \d\.\de-\d\d", reason)
    assert REASONS.get(name, "") in (status.rebuild_reason or "")


@quick
@pytest.mark.filterwarnings("ignore:.*stays stock")
def test_status_proves_a_copy_once_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof takes seconds. That of `status` is for `status` alone: the first call makes its own."""
    patched = build(copies.ActsByTheConfig)
    hf_vit_accel.patch(patched, like={"ActsByTheConfig": "qwen2_5_vl"})
    proving = Mock(wraps=proof.prove_copy)
    monkeypatch.setattr(proof, "prove_copy", proving)
    assert status_of(patched).proven is not None and proving.call_count == 0
    tower = copy.deepcopy(patched)
    texts = {str(status_of(tower)) for _ in range(3)}
    assert len(texts) == 1 and "not fast" not in texts.pop() and proving.call_count == 1
    tower.config.boost = 1
    texts = {str(status_of(tower)) for _ in range(3)}
    assert len(texts) == 1 and "not fast   ActsByTheConfig is no copy" in texts.pop() and proving.call_count == 2
    run(tower)
    assert status_of(tower).stock_calls == 1 and proving.call_count == 3
    state = state_of(tower)
    assert state is not None and state.read_by_status is None, "it holds modules that may go"


@quick
def test_a_field_of_the_config_counts_from_the_start() -> None:
    with pytest.raises(ValueError, match=r"relative error \d\.\de-\d\d"):
        hf_vit_accel.patch(build(copies.ActsByTheConfig, boost=1), like={"ActsByTheConfig": "qwen2_5_vl"})


@quick
def test_an_object_that_cannot_be_watched_is_refused_by_name() -> None:
    """Nobody sees a write into an array."""
    tower = build(copies.ActsByOptions)
    tower.options = types.SimpleNamespace(scale=np.ones(1))
    with pytest.raises(ValueError, match=r"its forward reads options\.scale, a ndarray, whose changes cannot be seen"):
        hf_vit_accel.patch(tower, like={"ActsByOptions": "qwen2_vl"})


# --- copies that are served -------------------------------------------------------------------------------------------


SERVED = (
    ("qwen2_vl", "4.57"),
    ("qwen2_5_vl", "installed"),
    ("qwen3_vl", "installed"),
)
"""Copies of every family."""


@pytest.mark.parametrize(
    ("family", "version"),
    [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in SERVED)) for cell in COPIES],
)
def test_a_copy_is_served(family: str, version: str) -> None:
    """Outputs, their classes and gradients are those of the copy."""
    kind = COPIES[family, version]
    tower = build(kind)
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like={kind.__name__: family})
    for grid in (GRID, TALL):
        assert_close(run(tower, grid), run(stock, grid), 3e-6)
    pixels = pixels_for(tower, GRID)
    grid_thw = torch.tensor(GRID)
    assert type(tower(pixels, grid_thw)) is type(stock(pixels, grid_thw))
    ours = gradients(tower)
    expected = gradients(stock)
    scale = max(float(x.norm()) for x in expected)
    assert max(float((x - y).norm()) for x, y in zip(ours, expected, strict=True)) <= 1e-5 * scale
    status = status_of(tower)
    assert (status.calls, status.stock_calls, status.against_fast) == (4, 0, ())
    assert (status.family, status.like) == (family, kind.__name__)
    assert "largest relative errors: outputs in float32" in str(status)
    hf_vit_accel.patch(tower, like={kind.__name__: family}, max_rows=64)
    assert_close(run(tower), run(stock), 3e-6)
    assert status_of(tower).stock_calls == 0
    hf_vit_accel.unpatch(tower)
    assert_close(run(tower), run(stock), 0.0)


@quick
@pytest.mark.parametrize("dtype", alike(torch.bfloat16, torch.float16))
def test_a_copy_is_served_in_low_precision(dtype: torch.dtype) -> None:
    kind = COPIES["qwen2_5_vl", "installed"]
    tower = build(kind, depth=6).to(dtype)  # the proof's bounds hold for the errors of a deep tower
    truth = run(build(kind, depth=6))
    stock = run(tower)
    hf_vit_accel.patch(tower, like={kind.__name__: "qwen2_5_vl"}, strict=True)
    for ours, theirs, exact in zip(run(tower), stock, truth, strict=True):
        assert ours.dtype == dtype
        assert (ours - exact).norm() <= max(1.25 * (theirs - exact).norm(), 2e-3 * exact.norm())


@quick
def test_a_copy_that_merges_nothing_is_served() -> None:
    """Its results are the rows of the last layer. An argument that no proof covers reaches its own forward."""
    stock = build(copies.WithoutMerger)
    tower = hf_vit_accel.patch(copy.deepcopy(stock), like={"WithoutMerger": "qwen2_vl"})
    assert_close(run(tower), run(stock), 3e-6)
    assert status_of(tower).calls == 1
    assert_close(run(tower, scale=2.0), run(stock, scale=2.0), 0.0)
    [reason] = status_of(tower).fallbacks
    assert reason == "the argument scale is given, which the proof of a copy does not cover"


@quick
def test_an_epsilon_that_counts_for_small_weights_alone_is_refused() -> None:
    """Weights that are loaded later may be small. The rows of the present ones hide it."""
    tower = build(copies.AddsAnotherEpsilon)
    with torch.no_grad():
        tower.patch_embed.proj.weight.mul_(100)
    with pytest.raises(ValueError, match=r"with random weights, .* relative error"):
        hf_vit_accel.patch(tower, like={"AddsAnotherEpsilon": "qwen2_5_vl"})


# --- uses -------------------------------------------------------------------------------------------------------------

NAME = COPIES["qwen2_vl", "4.57"].__name__
LIKE = {NAME: "qwen2_vl"}


def model_of() -> Composite:
    return Composite(build(COPIES["qwen2_vl", "4.57"])).eval()


def run_model(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(pixels_for(model.visual, GRID), torch.tensor(GRID))


@quick
def test_a_whole_model_is_patched_and_restored() -> None:
    model = model_of()
    attributes = dict(vars(model.visual))
    expected = run_model(model)
    with hf_vit_accel.patched(model, like=LIKE):
        assert_close([run_model(model)], [expected], 3e-6)
        hf_vit_accel.patch(model, fuse=False)
        assert status_of(model).like == NAME, "patching again keeps it"
    assert vars(model.visual).keys() == attributes.keys()
    assert torch.equal(run_model(model), expected)


@quick
@pytest.mark.parametrize("is_patched_first", alike(False, True))
def test_lora_inside_a_copy(is_patched_first: bool) -> None:
    peft = pytest.importorskip("peft")
    model = model_of()
    if is_patched_first:
        hf_vit_accel.patch(model, like=LIKE)
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], init_lora_weights=False, lora_dropout=0.1)
    adapted = peft.get_peft_model(model, config).eval()
    stock = copy.deepcopy(adapted)
    if is_patched_first:
        hf_vit_accel.unpatch(stock)
    else:
        hf_vit_accel.patch(adapted, like=LIKE)
    assert_close([run_model(adapted.model)], [run_model(stock.model)], 3e-6)
    assert (status_of(adapted).calls, status_of(adapted).stock_calls) == (1, 0)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_without_like_the_error_gives_the_line_to_write() -> None:
    for (family, _), kind in COPIES.items():
        with pytest.raises(ValueError, match=f"visual is a {kind.__name__}, whose parts look like {family}") as caught:
            hf_vit_accel.patch(Composite(build(kind)))
        assert f'hf_vit_accel.patch(model, like={{"{kind.__name__}": "{family}"}})' in str(caught.value)


@quick
@pytest.mark.parametrize(
    ("like", "problem"),
    [
        ({"Other": "qwen2_vl"}, "like names Other, but Composite has no module of that class"),
        ({NAME: "qwen9"}, "expected the families in like out of qwen2_vl, qwen2_5_vl"),
        ({NAME: "kimi_k25"}, "expected the families in like out of"),
        (NAME, "expected like as"),
        ({NAME: "qwen2_5_vl"}, "is not built as qwen2_5_vl is: .*'window_size'"),
        ({NAME: "qwen3_vl"}, "is not built as qwen3_vl is: .*num_grid_per_side"),
        ({"Composite": "qwen2_vl"}, "object has no attribute 'patch_embed'"),
    ],
)
def test_a_like_that_does_not_fit_is_refused(like: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        hf_vit_accel.patch(model_of(), like=like)
