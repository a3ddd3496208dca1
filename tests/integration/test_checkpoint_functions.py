"""Checkpoint functions and wrappers of frameworks around the layers of a tower: ours run inside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from support.patching import check_calls, gradients
from support.towers import ONE_TOWER
from tiny import GRIDS, TINY, assert_close, checkpoint_layers, tower_of
from torch import nn

import hf_vit_accel

GRID = GRIDS["mixed"]


@pytest.fixture(params=ONE_TOWER)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return TINY[request.param].build().train()


def check_gradients(model: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    """Change a model and a stock copy alike, and compare two steps; return the stock one."""
    stock = copy.deepcopy(model)
    for changed in (model, stock):
        change(changed)
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(gradients(tower_of(model), GRID), gradients(tower_of(stock), GRID))
    check_calls(model, 2, 0)
    return stock


class AsksForTheModule:
    """LLaMA-Factory's checkpoint function: it asks for the module, to make its input require gradients."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.classes: list[str] = []

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "args", ()):  # transformers 5.23 hands over a partial of the class's function
            module = function.args[0]
        else:
            module = getattr(function, "func", function).__self__
        self.classes.append(type(module).__name__)
        if any(parameter.requires_grad for parameter in module.parameters()):
            args[0].requires_grad_(True)
        return self.inner(function, *args, **kwargs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_function_may_ask_for_the_module(model: nn.Module, reentrant: bool) -> None:
    asked = []

    def change(model: nn.Module) -> None:
        checkpoint_layers(model, reentrant=reentrant)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = AsksForTheModule(module._gradient_checkpointing_func)
        asked.append(tower_of(model).blocks[0]._gradient_checkpointing_func)

    check_gradients(model, change)
    assert asked[0].classes == asked[1].classes, "the same module, as often"


def test_an_option_that_stock_ignores_is_ignored(model: nn.Module) -> None:
    """Blocks take any keyword, so `torch.utils.checkpoint` may hand them one that it does not know itself."""

    def change(model: nn.Module) -> None:
        checkpoint_layers(model, reentrant=False)
        for block in tower_of(model).blocks:
            block._gradient_checkpointing_func = functools.partial(block._gradient_checkpointing_func, offload=True)

    check_gradients(model, change)
