"""Hidden states of a tower equal stock's, and are served fast: every ColQwen of colpali requests them in every call."""

import copy
from typing import Any

import pytest
import torch
from support.cpu_graphs import Recorder, status_of
from support.faults import raises
from support.graphs import patch, patch_training
from support.patching import assert_fast, training_step
from support.tensors import flat
from support.towers import TOWERS
from tiny import GRIDS, TINY, assert_close, checkpoint_layers, pixels_for, run_tower, tower_of
from torch import Tensor, nn

import hf_vit_accel
from hf_vit_accel.tower import state as state_module

GRID = GRIDS["mixed"]
IMAGE = [(1, 8, 12)]


@pytest.fixture
def tower(request: pytest.FixtureRequest) -> Any:
    """Build a tower whose stock forward returns hidden states."""
    tower = tower_of(TINY[request.param].build())
    if not hasattr(call(tower), "hidden_states"):
        pytest.skip("this transformers ignores the request")
    return tower


every_tower = pytest.mark.parametrize("tower", TOWERS, indirect=True)
one_tower = pytest.mark.parametrize("tower", ["qwen2_5_vl"], indirect=True)


def call(tower: nn.Module, grid: Any = GRID, *, pixels: Tensor | None = None, **options: Any) -> Any:
    pixels = pixels_for(tower, grid) if pixels is None else pixels
    options = {"output_hidden_states": True} | options
    with torch.no_grad():
        return tower(pixels, grid_thw=torch.tensor(grid, device=pixels.device), **options)


@every_tower
def test_values_classes_and_order_are_stocks(tower: Any) -> None:
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    expected = call(stock)
    output = call(tower)
    assert (type(output), list(output)) == (type(expected), list(expected))
    assert len(output.hidden_states) == len(tower.blocks) + 1
    assert output.hidden_states[-1] is output.last_hidden_state
    assert_close(flat(output), flat(expected))
    assert_close(flat(call(tower, return_dict=False)), flat(call(stock, return_dict=False)))
    tower.config.output_hidden_states = True
    assert_close(flat(call(tower, output_hidden_states=True)), flat(expected))
    tower.config.output_hidden_states = False
    assert call(tower, output_hidden_states=None).hidden_states is None
    assert_fast(tower)


@every_tower
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_of_hidden_states_include_those_of_later_layers(tower: Any, reentrant: bool | None) -> None:
    """Retain the gradient of every hidden state, as attribution methods do, beside those of weights and pixels."""
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    gradients = []
    for each in (stock, tower):
        if reentrant is not None:
            checkpoint_layers(each.train(), reentrant=reentrant)
        pixels = pixels_for(each, GRID).requires_grad_()
        with torch.enable_grad():
            output = each(pixels, grid_thw=torch.tensor(GRID), output_hidden_states=True)
        for state in output.hidden_states:
            state.retain_grad()
        sum((tensor.square() * (1 + index)).mean() for index, tensor in enumerate(flat(output))).backward()
        states = [state.grad for state in output.hidden_states]
        gradients.append([*states, pixels.grad, *(parameter.grad for parameter in each.parameters())])
    assert_close(gradients[1], gradients[0])
    assert_fast(tower)


@one_tower
def test_a_call_with_gradients_is_not_cut(tower: Any) -> None:
    hf_vit_accel.patch(tower, max_rows=64)
    output = tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID), output_hidden_states=True)
    output.hidden_states[1].retain_grad()
    output.pooler_output.sum().backward()
    assert output.hidden_states[1].grad is not None
    [status] = hf_vit_accel.status(tower).towers
    assert status.calls == 1 and "not cut by max_rows" in next(iter(status.fallbacks))


@every_tower
def test_replays_with_and_without_hidden_states_take_turns(on_cpu: type[Recorder], tower: Any) -> None:
    expected = flat(call(tower, IMAGE)), run_tower(tower, IMAGE)
    patch(tower)
    for _ in range(3):
        states = call(tower, IMAGE)
        assert_close(run_tower(tower, IMAGE), expected[1])
        assert_close(flat(states), expected[0])
    status = status_of(tower)
    assert (status.replays, status.captures, status.stale) == (6, 2, {}), status


@one_tower
def test_a_step_with_hidden_states_is_not_replayed_from_the_graphs_of_steps_without(
    on_cpu: type[Recorder], tower: Any
) -> None:
    stock = copy.deepcopy(tower)
    patch_training(tower, "auto")
    for _ in range(4):
        training_step(tower, IMAGE)
    status = hf_vit_accel.status(tower).towers[0].training
    assert status is not None and status.replays
    gradients = []
    for changed in (stock, tower):
        changed.zero_grad()
        output = changed(pixels_for(changed, IMAGE), grid_thw=torch.tensor(IMAGE), output_hidden_states=True)
        sum(state.square().mean() for state in output.hidden_states).backward()
        gradients.append([parameter.grad for parameter in changed.blocks.parameters()])
    assert_close(gradients[1], gradients[0])
    assert_fast(tower)


@one_tower
@pytest.mark.parametrize("grad", [False, True])
def test_a_request_for_hidden_states_builds_and_plans_nothing_anew(
    tower: Any, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers compute the same; only what is returned of them differs."""
    hf_vit_accel.patch(tower)
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    with torch.set_grad_enabled(grad):
        tower(pixels, grid_thw=grid)
        status = hf_vit_accel.status(tower).towers[0]
        monkeypatch.setattr(state_module, "build", raises(AssertionError("operations are built again")))
        assert tower(pixels, grid_thw=grid, output_hidden_states=True).hidden_states is not None
        assert tower(pixels, grid_thw=grid).hidden_states is None
    assert hf_vit_accel.status(tower).towers[0].layouts[2] == status.layouts[2]
    assert_fast(tower)


@one_tower
def test_a_returned_state_may_be_written_to(tower: Any) -> None:
    """Each hidden state owns its memory, so a program that normalises one in place changes no other."""
    hf_vit_accel.patch(tower)
    first = call(tower)
    expected = [state.clone() for state in first.hidden_states]
    for index, state in enumerate(first.hidden_states):
        assert_close([state], [expected[index]])
        state.zero_()
    assert_close(list(call(tower).hidden_states), expected)


def test_a_tower_that_ends_otherwise_is_stock() -> None:
    """PaddleOCR-VL's hidden states end before its last norm: only calls that request them are stock."""
    modeling = pytest.importorskip("transformers.models.paddleocr_vl.modeling_paddleocr_vl")
    config = modeling.PaddleOCRVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, image_size=28, patch_size=14
    )
    tower = modeling.PaddleOCRVisionTransformer(config).eval()
    pixels = torch.randn(1, 16, 3, 14, 14)
    grid = torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        expected = tower(pixels, grid_thw=grid, output_hidden_states=True)
        hf_vit_accel.patch(tower)
        actual = tower(pixels, grid_thw=grid, output_hidden_states=True)
        assert_close(list(actual.hidden_states), list(expected.hidden_states))
        tower(pixels, grid_thw=grid)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls <= 1 and any("output_hidden_states" in reason for reason in status.fallbacks)


@pytest.mark.gpu
@every_tower
@pytest.mark.parametrize("graphs", [False, True, "auto"], ids=["eager", "graphs", "auto"])
def test_gpu_no_kernel_and_no_later_call_writes_to_returned_states(tower: Any, graphs: bool | str) -> None:
    tower.cuda().bfloat16()
    stock = copy.deepcopy(tower)
    wide = copy.deepcopy(tower).float()
    hf_vit_accel.patch(tower, cuda_graphs=graphs)
    grids = [IMAGE, [(1, 12, 8)], IMAGE, IMAGE, IMAGE]
    kept = []
    for grid in grids:
        pixels = pixels_for(tower, grid, len(kept), device="cuda", dtype=torch.bfloat16)
        output = call(tower, grid, pixels=pixels)
        kept.append((grid, pixels, output, [state.clone() for state in output.hidden_states]))
        call(tower, grid, pixels=torch.randn_like(pixels))
        call(tower, grid, pixels=torch.randn_like(pixels), output_hidden_states=False)
    for grid, pixels, output, copies in kept:
        expected = call(wide, grid, pixels=pixels.float()).hidden_states
        own = call(stock, grid, pixels=pixels).hidden_states
        for state, at_return, wide_state, own_state in zip(output.hidden_states, copies, expected, own, strict=True):
            assert torch.equal(state, at_return)
            error = float((state.float() - wide_state).norm() / wide_state.norm())
            own_error = float((own_state.float() - wide_state).norm() / wide_state.norm())
            assert error <= max(1.1 * own_error, 2**-8)
    assert_fast(tower)
