"""Wrappers that frameworks put around a tower's forward: ours runs below them, and comes off without a trace."""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support.libraries import Handler
from support.patching import check_calls, gradients, run, status_of
from tiny import GRIDS, TINY, assert_close, doubled, tower_of
from torch import nn

import hf_vit_accel

GRID = GRIDS["mixed"]


def keep_frozen(tower: Any) -> None:
    """Run a frozen tower without gradients, as ms-swift's `patch_frozen_module` does before it trains."""
    tower._kept_forward = tower.forward

    @functools.wraps(tower.forward)
    def frozen_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trains = any(parameter.requires_grad for parameter in self.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            return self._kept_forward(*args, **kwargs)

    tower.forward = MethodType(frozen_forward, tower)


def drop_text_arguments(tower: Any) -> None:
    """Drop what a packed text hands to every module, as ms-swift's `_patch_qwen3_vl_vision_kwargs` does at loading."""
    inner = tower.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("cu_seq_lens_q", None)
        return inner(*args, **kwargs)

    tower.forward = forward


def bind_function_of_class(tower: Any) -> None:
    """Call the class's function, and keep it by `__func__`, as accelerate's mixed precision does."""
    inner = tower.forward.__func__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    tower.forward = MethodType(forward, tower)


def set_forward(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def wrap(tower: Any) -> None:
        tower.forward = make(tower.forward)

    return wrap


def halve_and_double(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return doubled(inner(pixels * 0.5, *args, **kwargs))

    return forward


def give_a_method(tower: Any) -> None:
    """Give the tower a method, as ms-swift does."""
    tower.get_input_embeddings = lambda: tower.patch_embed


WRAPS: dict[str, Callable[[Any], None]] = {
    "attribute": keep_frozen,
    "closure": drop_text_arguments,
    "function of the class": bind_function_of_class,
    "object": set_forward(Handler),
    "not compiled": set_forward(torch.compiler.disable),  # tenstorrent's wrapper of Qwen2.5-VL
    "hook of accelerate": lambda tower: add_hook_to_module(tower, ModelHook()),
    "other inputs and outputs": set_forward(halve_and_double),
    "no wrapper": give_a_method,
}
"""Where a wrapper keeps the forward that it calls, or what it does."""


def traces_of(tower: nn.Module) -> list[object]:
    """Return what `unpatch` must leave as it was: the attributes, and every value inside of the wrapper."""
    forward: Any = vars(tower).get("forward")
    cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    defaults = [getattr(forward, name, None) for name in ("__defaults__", "__kwdefaults__", "func", "args", "keywords")]
    kept = {name: value for name, value in vars(tower).items() if callable(value)}
    return [kept, cells, copy.copy(defaults), getattr(forward, "__wrapped__", None), inspect.signature(tower.forward)]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_ours_runs_below_a_wrapper(model: nn.Module, wrap: Callable[[Any], None]) -> None:
    tower = tower_of(model)
    wrap(tower)
    expected = run(tower, GRID)
    expected_gradients = gradients(tower, GRID)
    before = traces_of(tower)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_vit_accel.patch(model, strict=True)
    assert_close(run(tower, GRID), expected)
    assert_close(gradients(tower, GRID), expected_gradients)
    check_calls(model, 2, 0)
    assert not status_of(model).against_fast
    with hf_vit_accel.patched(model, fuse=False):
        assert_close(run(tower, GRID), expected)
        check_calls(model, 1, 0)
    assert_close(run(tower, GRID), expected)
    check_calls(model, 3, 0)
    hf_vit_accel.unpatch(model)
    assert traces_of(tower) == before
    assert_close(run(tower, GRID), expected, 0.0)


@pytest.mark.parametrize("order", ["wrap patch wrap patch", "patch wrap patch", "wrap wrap patch", "patch wrap wrap"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, id=name, marks=[pytest.mark.matrix] * (name not in ("attribute", "closure", "object")))
        for name, wrap in WRAPS.items()
    ],
)
def test_the_order_of_patching_and_wrapping(wrap: Callable[[Any], None], order: str) -> None:
    """The attribute of such a wrapper would be overwritten by its second turn, also in stock."""
    model = TINY["qwen3_vl"].build()
    stock = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    steps = order.split()
    for index, step in enumerate(steps):
        is_second = "wrap" in steps[:index] or wrap is bind_function_of_class
        if step == "patch":
            hf_vit_accel.patch(model)
        else:
            for changed in (model, stock):
                (drop_text_arguments if is_second else wrap)(tower_of(changed))
    expected = run(tower_of(stock), GRID)
    assert_close(run(tower, GRID), expected)
    check_calls(model, 1, 0)
    hf_vit_accel.unpatch(model)
    assert not any("hf_vit_accel" in str(type(value)) for value in vars(tower).values())
    assert_close(run(tower, GRID), expected, 0.0)
    hf_vit_accel.patch(model)
    assert_close(run(tower, GRID), expected)
    check_calls(model, 1, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_without_the_forward_of_the_class_stays(model: nn.Module, when: str) -> None:
    """It computes by itself, or calls the class by name: then nothing of ours may run, and `patch` says so once."""
    tower = tower_of(model)
    expected = run(tower, GRID)
    if when == "after":
        hf_vit_accel.patch(model)

    def by_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        return doubled(type(self).forward(self, *args, **kwargs))

    tower.kept_for_later = tower.forward
    tower.forward = MethodType(functools.wraps(tower.forward)(by_name), tower)
    before = traces_of(tower)
    if when == "before":
        with pytest.warns(
            UserWarning, match=r"Call hf_vit_accel.patch before by_name \(.*test_wrapped_forward.py:"
        ) as caught:
            hf_vit_accel.patch(model)
            hf_vit_accel.patch(model)
        assert len(caught) == 1
        with pytest.raises(hf_vit_accel.FallbackError, match="does not call the class's"):
            hf_vit_accel.patch(model, strict=True)
    [reason] = status_of(model).against_fast
    assert "by_name (" in reason and "does not call the class's" in reason
    assert_close(run(tower, GRID), [expected[0] * 2, *expected[1:]])
    assert_close(run(copy.copy(tower), GRID), [expected[0] * 2, *expected[1:]])
    assert status_of(model).calls == 0
    if when == "before":
        check_calls(model, 0, 2, "the tower has a forward of its own")
    hf_vit_accel.unpatch(model)
    if when == "before":
        assert traces_of(tower) == before
