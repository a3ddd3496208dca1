"""Hooks of accelerate on a tower and on its parts: added before or after patching, offloading, removed again."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from support.patching import check_calls, check_stock, run, status_of
from tiny import GRIDS, assert_close, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import state_of

Place = str | torch.device | None


class Recorder(ModelHook):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple, dict]:
        self.calls.append("before")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        self.calls.append("after")
        return output


@pytest.mark.parametrize("undo", ["patch first", "hook first"])
def test_accelerate_hooks_on_the_tower_keep_the_fast_path(model: nn.Module, undo: str) -> None:
    """`test_wrapped_forward.py` has hooks that were added before."""
    tower = tower_of(model)
    grid = GRIDS["images"]
    recorder = Recorder()
    expected = run(tower, grid)
    class_forward = type(tower).forward
    hf_vit_accel.patch(model)
    add_hook_to_module(tower, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    add_hook_to_module(tower, recorder, append=True)  # takes the first hook off and both on again
    assert_close(run(tower, grid), expected)
    check_calls(model, 1, 0)
    assert recorder.calls == ["before", "after"] and not status_of(model).against_fast
    if undo == "hook first":
        remove_hook_from_module(tower)
        assert isinstance(vars(tower)["forward"], AcceleratedForward) and "_old_forward" not in vars(tower)
        assert_close(run(tower, grid), expected)
        check_calls(model, 2, 0)
        check_stock(model, grid, expected)
        assert len(recorder.calls) == 2
    else:
        check_stock(model, grid, expected)
        assert len(recorder.calls) == 4, "the hook outlives the patch"
        assert tower._old_forward.__func__ is class_forward and tower._old_forward.__self__ is tower
        remove_hook_from_module(tower)
    assert getattr(vars(tower).get("forward", class_forward), "__func__", class_forward) is class_forward
    assert_close(run(tower, grid), expected, 0.0)


@pytest.mark.parametrize("places", [{"": "cpu", "blocks.2": torch.device("cpu")}, {"": None, "merger": "cpu"}], ids=str)
def test_hooks_that_align_to_several_places_go_the_stock_way(model: nn.Module, places: dict[str, Place]) -> None:
    """As accelerate does for a `device_map` of several devices; the matrix has one of a single device."""
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    expected = run(tower, grid)
    hf_vit_accel.patch(model)
    for name, module in tower.named_modules():
        place = next((places[prefix] for prefix in places if prefix and name.startswith(prefix)), places[""])
        add_hook_to_module(module, AlignDevicesHook(execution_device=place))
    assert_close(run(tower, grid), expected)
    assert state_of(tower).fast_calls == 0 and "accelerate hooks on " in status_of(model).against_fast[0]


@pytest.mark.parametrize("computes_on", ["one device", "several"])
def test_a_tower_that_computes_on_several_devices_gets_no_metadata_of_ours(model: nn.Module, computes_on: str) -> None:
    """`device_map="auto"` splits a small model on several GPUs inside its tower. Our indices are on one of them.

    Where some weights are offloaded, all computes on one device.
    """
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    expected = run(tower, grid)
    hf_vit_accel.patch(model)
    cpu_offload(tower.blocks[1], execution_device="cpu")
    if computes_on == "several":  # a weight that nobody reads, and that no hook brings to the others
        tower.blocks[0].norm1.unread = nn.Parameter(torch.empty(1, device="meta"))
    assert_close(run(tower, grid), expected)
    assert "parameters on several devices" in status_of(model).against_fast
    assert state_of(tower).metadata_calls == (computes_on == "one device") and not state_of(tower).fast_calls


@pytest.mark.gpu
@pytest.mark.parametrize("second", ["merger", "blocks.1"])
def test_gpu_device_map_splits_a_tower(model: nn.Module, second: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    expected = run(tower, grid)
    hf_vit_accel.patch(model)
    parts = [name for name, _ in tower.named_children() if name != "blocks"]
    places = dict.fromkeys([*parts, *(f"blocks.{layer}" for layer in range(len(tower.blocks)))], 0)
    dispatch_model(tower, places | {second: 1})
    assert_close(run(tower, grid), expected, 1e-2)
    assert "parameters on several devices" in status_of(model).against_fast


@pytest.mark.parametrize("patched_when", ["before", "meanwhile", "after"])
def test_after_offloading_the_fast_path_is_used_again(model: nn.Module, patched_when: str) -> None:
    """accelerate leaves the classes' bound forwards on instances when it removes its hooks: that changes nothing."""
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    expected = run(tower, grid)
    if patched_when == "before":
        hf_vit_accel.patch(model)
        run(tower, grid)
    cpu_offload(model, execution_device="cpu")
    if patched_when == "meanwhile":
        hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    remove_hook_from_submodules(model)
    if patched_when == "after":
        hf_vit_accel.patch(model)
    calls = status_of(model).calls
    assert_close(run(tower, grid), expected)
    assert status_of(model).calls == calls + 1 and not status_of(model).against_fast
    assert "patch_embed" in status_of(model).fused
    check_stock(model, grid, expected)
