"""Ways to call a patched model: modes, `generate`, wrappers, metadata of the caller, several models."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from support.patching import WAYS, Grid, check_calls, check_stock, gradients, patch_by, run, status_of
from support.tensors import Output, flat
from support.towers import ONE_TOWER, TOWERS, skip_without_metadata
from tiny import GRIDS, TINY, assert_close, chat_inputs, left_padded, merged_of, pixels_for, relative_error, tower_of
from torch import nn
from torch.func import functional_call

import hf_vit_accel
from hf_vit_accel.tower.state import state_of


# Whole models of the families that are left to the matrix here: test_loading.py, every time.
@pytest.fixture(scope="module", params=[*ONE_TOWER, pytest.param("qwen3_vl_moe", marks=pytest.mark.matrix)])
def built(request: pytest.FixtureRequest) -> nn.Module:
    return TINY[request.param].build()


@pytest.fixture
def shared(built: nn.Module) -> Iterator[nn.Module]:
    """Return the file's model to tests that do not change it; unpatch it after each, also after one that failed."""
    yield built
    hf_vit_accel.unpatch(built)


# --- training, modes, other parameters ------------------------------------------------------------------------------


def test_inference_mode_and_then_training(model: nn.Module) -> None:
    tower = tower_of(model)
    twin = tower_of(copy.deepcopy(model))
    grid = GRIDS["mixed"]
    with torch.inference_mode():
        expected = flat(twin(pixels_for(twin, grid), grid_thw=torch.tensor(grid)))
        hf_vit_accel.patch(model)
        outputs = flat(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)))
    assert all(tensor.is_inference() for tensor in outputs)
    assert_close(outputs, expected)
    check_calls(model, 1, 0)
    tower.requires_grad_(False)  # features of a frozen tower, from the layout cached above, train a head
    head = nn.Linear(32, 1)
    head(merged_of(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)))).sum().backward()
    assert head.weight.grad is not None and state_of(tower).routes.hits == 1
    check_calls(model, 2, 0)
    tower.requires_grad_(True)
    assert_close(gradients(tower, grid), gradients(twin, grid))
    check_calls(model, 3, 0)


@pytest.mark.parametrize("wrap", [nn.Parameter, torch.Tensor.detach], ids=["parameters", "tensors"])
def test_functional_call_uses_the_given_parameters(shared: nn.Module, wrap: Callable[..., torch.Tensor]) -> None:
    tower = tower_of(shared)
    grid = GRIDS["mixed"]
    before = run(tower, grid)
    weights = {name: wrap(parameter.detach() * 1.25) for name, parameter in tower.named_parameters()}

    def call() -> list[torch.Tensor]:
        kwargs = {"grid_thw": torch.tensor(grid)}
        with torch.no_grad():
            return flat(functional_call(tower, weights, (pixels_for(tower, grid),), kwargs))

    expected = call()
    assert relative_error(expected[0], before[0]) > 0.05
    with hf_vit_accel.patched(shared):
        assert_close(run(tower, grid), before)
        assert_close(call(), expected)
        assert_close(run(tower, grid), before)
        if wrap is nn.Parameter:
            check_calls(shared, 3, 0)
        else:
            check_calls(shared, 2, 1, "parameters of a class of their own (Tensor)")
    check_stock(shared, grid, before)


# --- generate and features ------------------------------------------------------------------------------------------


GENERATE: dict[str, tuple[Callable[[nn.Module], dict[str, torch.Tensor]], dict[str, int]]] = {
    "left-padded batch": (left_padded, {"num_beams": 2}),
    "image and video": (lambda model: chat_inputs(model, [(1, 4, 6), (2, 6, 4)]), {}),
}


def count_calls(tower: nn.Module, act: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Run something; return how often it calls the tower, counted by a hook, and its result."""
    calls: list[int] = []
    with tower.register_forward_hook(lambda *_: calls.append(1)):
        result = act()
    return len(calls), result


@pytest.mark.parametrize(("case", "way"), [(case, WAYS[index % 2]) for index, case in enumerate(GENERATE)])
@pytest.mark.parametrize("built", TOWERS, indirect=True)
def test_generate_is_token_identical_twice_in_a_row(shared: nn.Module, case: str, way: str) -> None:
    make, kwargs = GENERATE[case]
    tower = tower_of(shared)
    inputs = make(shared)

    def generate() -> torch.Tensor:
        return shared.generate(**inputs, **kwargs, max_new_tokens=6, do_sample=False)

    try:
        calls, expected = count_calls(tower, generate)
    except RuntimeError as error:
        if "split_with_sizes" not in str(error):
            raise
        pytest.skip("this transformers expands no videos of Qwen3-VL beside pictures, patched or not")
    assert calls > 0
    patch_by(way, shared)
    assert torch.equal(generate(), expected)
    check_calls(shared, calls, 0)
    assert torch.equal(generate(), expected)
    check_calls(shared, 2 * calls, 0)
    assert state_of(tower).routes.hits >= calls
    hf_vit_accel.unpatch(shared)
    assert torch.equal(generate(), expected)


def test_encoded_once_the_tower_does_not_run_in_generate(shared: nn.Module) -> None:
    if "mm_encoder_outputs" not in inspect.signature(shared.forward).parameters:
        pytest.skip("this transformers takes no encoder outputs")
    tower = tower_of(shared)
    inputs = left_padded(shared)
    arguments = dict(max_new_tokens=6, do_sample=False)
    expected = shared.generate(**inputs, **arguments)
    pixels = inputs.pop("pixel_values")
    with hf_vit_accel.patched(shared):
        with torch.no_grad():
            encoded = shared.get_image_features(pixels, inputs["image_grid_thw"])
        check_calls(shared, 1, 0)
        for _ in range(2):
            calls, tokens = count_calls(
                tower,
                lambda: shared.generate(**inputs, mm_encoder_outputs={"image": copy.copy(encoded)}, **arguments),
            )
            assert calls == 0 and torch.equal(tokens, expected)
        check_calls(shared, 1, 0)


# --- what `patch` takes ----------------------------------------------------------------------------------------


class Retriever(nn.Module):
    """Hold a model and call its tower directly, as retrieval models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vlm = model.model

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Output:
        return self.vlm.visual(pixels, grid_thw=grid_thw)


HANDLES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "model": (lambda model: model, "model.visual"),
    "base model": (lambda model: model.model, "visual"),
    "tower": (tower_of, ""),
    "wrapped twice": (lambda model: nn.Sequential(Retriever(model)), "0.vlm.visual"),
}


@pytest.mark.parametrize("handle", HANDLES)
def test_any_module_that_holds_a_tower_can_be_patched(shared: nn.Module, handle: str) -> None:
    make, path = HANDLES[handle]
    holder = make(shared)
    grid = GRIDS["images"]
    expected = run(tower_of(shared), grid)
    assert hf_vit_accel.patch(holder) is holder
    assert status_of(holder).path == path and status_of(holder).patched
    with torch.no_grad():
        assert_close(flat(Retriever(shared)(pixels_for(tower_of(shared), grid), torch.tensor(grid))), expected)
    check_calls(holder, 1, 0)
    assert hf_vit_accel.unpatch(holder) is holder
    check_stock(shared, grid, expected)


# --- metadata from the caller ---------------------------------------------------------------------------------------


Metadata = dict[str, "torch.Tensor | int"]


def metadata_of_caller(tower: nn.Module, grid: Grid) -> dict[str, Metadata]:
    """Draw values that differ from the grid's, for every keyword of the tower."""
    rows = sum(t * h * w for t, h, w in grid)
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, Metadata] = {
        "position_ids": {"position_ids": torch.randint(0, 9, (rows, 2), generator=generator)},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, rows // 2 // 4 * 4, rows], dtype=torch.int32)},
        "max_seqlen": {"max_seqlen": rows},
    }
    if hasattr(tower, "window_size"):
        halves = torch.tensor([0, rows // 8 * 4, rows], dtype=torch.int32)
        order = torch.randperm(rows // 4, generator=generator)
        cases["window"] = {"window_index": order, "cu_window_seqlens": halves}
    if hasattr(tower, "pos_embed"):
        indices = torch.randint(0, 36, (rows, 4), generator=generator)
        weights = torch.rand(rows, 4, generator=generator)
        cases["interpolation"] = {"interp_indices": indices, "interp_weights": weights}
    everything: Metadata = {}
    for case in cases.values():
        everything |= case
    return cases | {"everything": everything}


@pytest.mark.parametrize("way", WAYS)
def test_metadata_of_the_caller_goes_the_stock_way(shared: nn.Module, way: str) -> None:
    tower = tower_of(shared)
    skip_without_metadata(tower)
    grid = GRIDS["mixed"]
    before = run(tower, grid)
    cases = metadata_of_caller(tower, grid)
    expected = {name: run(tower, grid, **copy.deepcopy(kwargs)) for name, kwargs in cases.items()}
    for name, outputs in expected.items():
        assert relative_error(outputs[0], before[0]) > 1e-3 or name == "max_seqlen", f"{name} matters in stock"
    patch_by(way, shared)
    for count, (name, kwargs) in enumerate(cases.items(), 1):
        original = copy.deepcopy(kwargs)
        assert_close(run(tower, grid, **kwargs), expected[name])
        check_calls(shared, 0, count, "the caller supplies sequence metadata")
        assert all(torch.equal(torch.as_tensor(kwargs[key]), torch.as_tensor(original[key])) for key in original)
    assert_close(run(tower, grid), before)
    check_calls(shared, 1, len(cases), "the caller supplies sequence metadata")
    assert f"1 fast, {len(cases)} stock (0 with our metadata)" in str(hf_vit_accel.status(shared))
    check_stock(shared, grid, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_offsets_of_the_caller_may_change_in_place(
    shared: nn.Module, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """Torch counts no writes to a tensor of inference mode."""
    tower = tower_of(shared)
    skip_without_metadata(tower)
    grid = [(1, 4, 4), (1, 4, 4)]
    pixels = pixels_for(tower, grid)
    middles = (16, 8, 24)

    def call_with_each_middle() -> list[list[torch.Tensor]]:
        with mode():
            offsets = torch.tensor([0, 0, 32], dtype=torch.int32)
            outputs = []
            for middle in middles:
                offsets[1] = middle
                outputs.append(flat(tower(pixels, grid_thw=torch.tensor(grid), cu_seqlens=offsets)))
            return outputs

    expected = call_with_each_middle()
    assert relative_error(expected[1][0], expected[0][0]) > 1e-3, "the offsets matter in stock"
    hf_vit_accel.patch(shared)
    for outputs, expected_outputs in zip(call_with_each_middle(), expected, strict=True):
        assert_close(outputs, expected_outputs)
    check_calls(shared, 0, len(middles), "the caller supplies sequence metadata")


# --- layouts, models and configs side by side -----------------------------------------------------------------------


def test_two_models_one_patched(model: nn.Module) -> None:
    tower = tower_of(model)
    other = tower_of(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    grid = GRIDS["mixed"]
    expected = run(tower, grid)
    expected_of_other = run(other, grid)
    class_forward = type(tower).forward
    attributes = sorted(vars(other))
    hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    assert_close(run(other, grid), expected_of_other, 0.0)
    check_calls(model, 1, 0)
    assert sorted(vars(other)) == attributes and type(tower).forward is class_forward
    assert not status_of(other).patched and status_of(other).attention == "sdpa"
    check_stock(model, grid, expected)
    assert_close(run(other, grid), expected_of_other, 0.0)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), ()], ids=["first patched, first unpatched", "last", "together"])
def test_two_towers_of_one_config(model: nn.Module, order: tuple[int, ...], name: str) -> None:
    model.set_attn_implementation({"vision_config": name})
    one = tower_of(model)
    grid = GRIDS["mixed"]
    two = type(one)(one.config).eval()
    two.load_state_dict({key: value * 1.25 for key, value in one.state_dict().items()})
    both = nn.ModuleList([one, two])
    assert one.config is two.config and one.config._attn_implementation == name
    expected = run(one, grid), run(two, grid)

    def check(bound: float = 1e-5) -> None:
        for tower, outputs in zip(both, expected, strict=True):
            assert_close(run(tower, grid), outputs, bound)

    hf_vit_accel.patch(one)
    check()
    check_calls(one, 1, 0)
    assert state_of(two) is None, "stock, under the shared config's new name"
    hf_vit_accel.patch(two)
    check()
    check_calls(one, 2, 0)
    check_calls(two, 1, 0)
    for index in order:
        hf_vit_accel.unpatch(both[index])
        check()
        assert state_of(both[index]) is None
    hf_vit_accel.unpatch(both)
    assert one.config._attn_implementation == name and state_of(one) is state_of(two) is None
    check(0.0)
