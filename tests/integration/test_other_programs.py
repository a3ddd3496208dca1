"""Programs that copy, bind, wrap, trace or keep a patched tower: each gets what it would get from a stock tower."""

import copy
import functools
import inspect
import itertools
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from support.towers import ONE_TOWER, TOWERS, alike
from support.versions import vision_function
from tiny import TINY, assert_close, merged_of, outputs_of, pixels_for, run_tower, tower_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = [(1, 4, 4), (3, 8, 10), (2, 2, 2)]


@pytest.fixture(params=ONE_TOWER)
def towers(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = TINY[request.param].build()
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model)
    return tower_of(model), tower_of(stock)


def inputs_for(tower: Any) -> dict[str, torch.Tensor]:
    return {"hidden_states": pixels_for(tower, GRID), "grid_thw": torch.tensor(GRID)}


# --- copies -----------------------------------------------------------------------------------------------------------


def shallow_copy_of_two_blocks(tower: Any) -> Any:
    copied = copy.copy(tower)
    vars(copied)["_modules"] = dict(vars(tower)["_modules"])
    copied.blocks = nn.ModuleList(list(tower.blocks)[:2])
    return copied


def test_a_shallow_copy_runs_its_own_modules(towers: tuple[Any, Any]) -> None:
    tower, stock = towers
    expected_of_copy = outputs_of(shallow_copy_of_two_blocks(stock)(**inputs_for(stock)))[:2]
    expected = run_tower(stock, GRID)
    copied = shallow_copy_of_two_blocks(tower)
    for _ in range(2):  # the second call finds the forward that the first gave to the copy
        assert_close(outputs_of(copied(**inputs_for(tower)))[:2], expected_of_copy)
        assert_close(run_tower(tower, GRID), expected)
    assert state_of(copied) is not state_of(tower) and state_of(copied).fast_calls == 2


def test_a_replica_of_data_parallel_runs_its_own_weights(towers: tuple[Any, Any]) -> None:
    """`nn.DataParallel` copies modules without their parameters, and sets tensors of another device as attributes."""
    tower, stock = towers
    expected = 2 * merged_of(stock(**inputs_for(stock)))
    replica = tower._replicate_for_data_parallel()
    replica.merger = copy.deepcopy(tower.merger)
    for parameter in list(replica.merger.modules())[-1].parameters():
        parameter.data.mul_(2)
    output = replica(**inputs_for(tower))
    assert_close([merged_of(output)], [expected])


# --- a forward that is bound, wrapped or kept -------------------------------------------------------------------------


def test_the_forward_behaves_like_a_bound_method(towers: tuple[Any, Any]) -> None:
    tower, stock = towers
    expected = run_tower(stock, GRID)
    ours, theirs = tower.forward, stock.forward
    assert inspect.signature(ours) == inspect.signature(theirs)
    for name in ("__name__", "__qualname__", "__code__", "__defaults__"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.__self__ is tower

    wrapped = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    assert wrapped.__name__ == "forward" and inspect.unwrap(wrapped) is ours
    for call in (wrapped, MethodType(ours, tower), functools.partial(ours)):
        assert_close(outputs_of(call(**inputs_for(tower))), expected)


# --- traces and modes -------------------------------------------------------------------------------------------------


def test_a_call_with_fake_tensors_leaves_nothing_behind(towers: tuple[Any, Any]) -> None:
    tower, stock = towers
    inputs = inputs_for(tower)
    raised = []
    for model in (stock, tower):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(Exception) as error:
            model(mode.from_tensor(inputs["hidden_states"]), grid_thw=inputs["grid_thw"])
        raised.append(error.type)
    assert raised[0] is raised[1]
    outputs = run_tower(tower, GRID)
    assert all(type(output) is torch.Tensor for output in outputs)
    assert_close(outputs, run_tower(stock, GRID))


@pytest.mark.matrix  # torch takes seconds to export a tower
def test_export_with_metadata_equals_stock() -> None:
    """Qwen2.5-VL cannot be exported in stock either: its windows are reordered by a list."""
    model = TINY["qwen2_vl"].build()
    tower = tower_of(model)
    grid = torch.tensor([(1, 4, 4)])
    pixels = pixels_for(tower, [(1, 4, 4)])
    metadata = {
        "position_ids": vision_function("get_vision_position_ids")(grid, 2),
        "cu_seqlens": vision_function("get_vision_cu_seqlens")(grid),
    }
    expected = outputs_of(tower(pixels, grid_thw=grid))
    hf_vit_accel.patch(model)
    exported = torch.export.export(tower, (pixels,), {"grid_thw": grid, **metadata}, strict=False)
    assert_close(outputs_of(exported.module()(pixels, grid_thw=grid, **metadata)), expected)
    assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)


# --- pixels in another shape ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("towers", TOWERS, indirect=True)
def test_pixels_are_viewed_as_patches_as_in_stock(towers: tuple[Any, Any]) -> None:
    """Their gradients have the shape that the caller gave them."""
    results = []
    for model in towers:
        inputs = inputs_for(model)
        pixels = inputs["hidden_states"].requires_grad_()
        output = model(pixels.view(2 * len(pixels), -1), grid_thw=inputs["grid_thw"])
        merged_of(output).square().sum().backward()
        outputs = [tensor.detach() for tensor in outputs_of(output)]
        results.append([*outputs, pixels.grad, model.blocks[0].attn.qkv.weight.grad])
    assert_close(*results)
    tower, _ = towers
    assert hf_vit_accel.status(tower).towers[0].calls == 1
    inputs["hidden_states"] = pixels.detach()[1:].reshape(-1, pixels.shape[1] // 2)
    with pytest.raises(ValueError, match="rows of pixel values"):
        tower(**inputs)


# --- handles of hooks -------------------------------------------------------------------------------------------------

FLAT = replace(TINY["qwen2_5_vl"], vision=TINY["qwen2_5_vl"].vision | dict(depth=1, fullatt_block_indexes=[0]))


@pytest.mark.parametrize("duplicate", alike(copy.copy, copy.deepcopy, nn.Module._replicate_for_data_parallel))
def test_a_hook_goes_with_its_handle_whenever_a_model_was_patched(duplicate: Any) -> None:
    """A probe is removed after patching, unpatching or copying (`nn.DataParallel`), in whatever order these came."""
    for order in itertools.permutations(("copy", "hook", "patch", "unpatch")):
        model = FLAT.build().model
        modules = (model, model.visual, model.language_model)
        attributes = [vars(module).keys() for module in modules]
        calls: list[str] = []
        handles: list[Any] = []
        copies: list[Any] = []
        for step in order:
            if step == "hook":
                for module in modules:
                    handles.append(module.register_forward_hook(lambda *_, calls=calls: calls.append("after")))
                    handles.append(module.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before")))
            elif step == "copy":
                copies += [duplicate(model), duplicate(model.visual)]
                run_tower(copies[1], GRID[:1])
            elif step == "patch":
                hf_vit_accel.patch(model, every_rank=True)
            else:
                hf_vit_accel.unpatch(model)
        for handle in handles:
            handle.remove()
        calls.clear()
        run_tower(model.visual, GRID[:1])
        model(input_ids=torch.tensor([[5, 6, 7]]))
        assert not calls, order
        del copies[:]
        hf_vit_accel.unpatch(model)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules), order
        assert [vars(module).keys() for module in modules] == attributes, order
