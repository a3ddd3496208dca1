"""Parts of a tower that others replace or wrap: the fast path uses the replacement, or the call goes the stock way."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import GRIDS, assert_close, merged_of, outputs_of, pixels_for, relative_error, run_tower
from torch import nn
from transformers import modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import ModelOutput

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]


def check_reason(tower: nn.Module, *reasons: str) -> None:
    """Check that every call since patching went the stock way, for these reasons alone."""
    [status] = hf_vit_accel.status(tower).towers
    assert status.calls == 0 and status.stock_calls > 0, str(status)
    for fallback in status.fallbacks:
        assert any(reason in fallback for reason in reasons), str(status)


# --- gradients of other tensors than the parameters -------------------------------------------------------------------


def features(tower: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    return merged_of(tower(pixels, grid_thw=torch.tensor(GRID)))


def test_a_module_trained_inside_a_frozen_tower_gets_its_gradients(tower: nn.Module) -> None:
    linear = tower.requires_grad_(False).blocks[0].attn.qkv
    trained = nn.Linear(linear.in_features, linear.out_features)
    inner = linear.forward
    linear.forward = lambda x: inner(x) + trained(x)

    def gradients() -> list[torch.Tensor]:
        loss = features(tower, pixels_for(tower, GRID)).square().mean()
        return list(torch.autograd.grad(loss, list(trained.parameters())))

    expected = gradients()
    hf_vit_accel.patch(tower)
    assert_close(gradients(), expected)
    run_tower(tower, GRID)
    assert state_of(tower).fast_calls == 2


def test_weights_that_are_no_parameters(tower: nn.Module) -> None:
    """A hypernetwork sets new tensors at every step, which have gradients of their own."""
    linear = tower.requires_grad_(False).blocks[0].attn.qkv
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    hf_vit_accel.patch(tower)
    weight = linear.weight.detach().clone()
    del linear.weight
    results = []
    for _ in range(2):
        for scale in (1.0, 1.5):
            linear.weight = (weight * scale).requires_grad_()
            loss = features(tower, pixels_for(tower, GRID)).square().mean()
            results += [loss.detach(), *torch.autograd.grad(loss, [linear.weight])]
        if state_of(tower) is not None:
            check_reason(tower, "a weight of blocks.0.attn.qkv is not a parameter")
            hf_vit_accel.unpatch(tower)
    assert_close(results[:4], results[4:])


def gradients_by_transform(tower: nn.Module, x: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return merged_of(torch.func.functional_call(tower, weights, (x, torch.tensor(GRID)))).square().mean()

    return list(
        torch.func.grad(loss)({name: weight.detach() * 1.25 for name, weight in tower.named_parameters()}).values()
    )


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "vmap": lambda tower, x, y: [torch.vmap(lambda pixels: features(tower, pixels))(torch.stack([x, y]))],
    "grad": gradients_by_transform,
    "jvp": lambda tower, x, y: list(torch.func.jvp(lambda pixels: features(tower, pixels), (x,), (y,))),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_go_the_stock_way(tower: nn.Module, name: str) -> None:
    tower.requires_grad_(False)
    x, y = (pixels_for(tower, GRID, seed) for seed in range(2))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = TRANSFORMS[name](tower, x, y)
        hf_vit_accel.patch(tower)
        assert_close(TRANSFORMS[name](tower, x, y), expected)
    of_weights = ["parameters of a class of their own"] * (name == "grad")
    check_reason(tower, "a transform of torch.func", *of_weights)
    assert_close(run_tower(tower, GRID), outputs_of(tower(x, grid_thw=torch.tensor(GRID))))


# --- forwards of the user ----------------------------------------------------------------------------


def _of_other_names(
    self: nn.Module, pixel_values: list[torch.Tensor], sizes: list[tuple[int, int, int]], scale: float = 1.0
) -> ModelOutput:
    return type(self).__mro__[1].forward(self, torch.cat(pixel_values) * scale, torch.tensor(sizes))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["class", "instance"])
def test_a_forward_of_your_own_keeps_its_arguments(tower: nn.Module, how: str, when: str) -> None:
    """Its arguments have other names and types than those of transformers' forward."""
    pixels = [pixels_for(tower, GRID)]

    def change() -> None:
        if how == "class":
            tower.__class__ = type("Mine", (type(tower),), {"forward": _of_other_names})
        else:
            inner = tower.forward
            tower.forward = lambda pixel_values, sizes, scale=1.0: inner(torch.cat(pixel_values) * scale, sizes())

    sizes: Any = GRID if how == "class" else lambda: torch.tensor(GRID)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return outputs_of(tower(pixels, sizes, 0.5)) + outputs_of(tower(pixel_values=pixels, sizes=sizes))

    expected = run_tower(tower, GRID)
    if when == "after":
        hf_vit_accel.patch(tower)
    change()
    parameters = list(inspect.signature(tower.forward).parameters)
    hf_vit_accel.patch(tower)
    if when == "before":
        assert list(inspect.signature(tower.forward).parameters) == parameters
    outputs = run()
    assert_close(outputs[len(outputs) // 2 :], expected)
    [status] = hf_vit_accel.status(tower).towers
    assert status.calls in (0, 2) and status.calls + status.stock_calls >= 2, str(status)
    hf_vit_accel.unpatch(tower)
    assert_close(outputs, run())


def test_a_missing_argument_raises_the_error_of_stock(tower: nn.Module) -> None:
    hf_vit_accel.patch(tower)
    assert list(inspect.signature(tower.forward).parameters) == ["hidden_states", "grid_thw", "kwargs"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'grid_thw'"):
        tower(pixels_for(tower, GRID))


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_goes_the_stock_way(tower: nn.Module) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
            return merged_of(self.tower(pixels, grid_thw))

    hf_vit_accel.patch(tower)
    one, other = (pixels_for(tower, GRID, seed) for seed in range(2))
    expected = run_tower(tower, GRID, 1)[1]
    with torch.no_grad():
        traced = torch.jit.trace(Features().eval(), (one, torch.tensor(GRID)), check_trace=False)
        assert_close([traced(other, torch.tensor(GRID))], [expected])
    assert dict(state_of(tower).fallbacks) == {"torch.jit.trace is at work": 1}


def half(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, None]:
    """Halve the result of attention: a function that a user registers."""
    out, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    return out * 0.5, weights


@pytest.mark.parametrize("name", ["half", "anonymous", "sdpa", "eager"])
def test_an_attention_function_of_your_own(tower: nn.Module, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`auto` keeps the function, under a new name or transformers' own; a named backend replaces it."""
    expected = run_tower(tower, GRID)
    if name == "eager":
        monkeypatch.setattr(sys.modules[type(tower).__module__], "eager_attention_forward", half)
    else:
        function = half
        if name == "anonymous":  # `exec` in a namespace without a name makes functions without a module
            scope: dict[str, Callable[..., object]] = {"half": half}
            exec("def anonymous(*args, **kwargs):\n    return half(*args, **kwargs)", scope)
            function = scope[name]
        monkeypatch.setitem(modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, name, function)
    tower.set_attn_implementation(name)
    halved = run_tower(tower, GRID)
    assert relative_error(halved[0], expected[0]) > 0.01
    hf_vit_accel.patch(tower)
    assert f"the attention '{name}' is a function of your own" in str(hf_vit_accel.status(tower))
    assert_close(run_tower(tower, GRID), halved, 0.0)
    status = hf_vit_accel.status(tower).towers[0]
    assert (status.calls, status.stock_calls) == (0, 1)
    with hf_vit_accel.patched(tower, attention="flex"):
        assert_close(run_tower(tower, GRID), expected)
        assert state_of(tower).fast_calls == 1
    assert_close(run_tower(tower, GRID), halved, 0.0)
    hf_vit_accel.patch(tower, attention="flex", strict=True)
    with pytest.raises(hf_vit_accel.FallbackError, match="function of your own"):
        hf_vit_accel.patch(tower, strict=True)
    assert_close(run_tower(tower, GRID), expected)
    hf_vit_accel.unpatch(tower)
    assert tower.config._attn_implementation == name
    assert_close(run_tower(tower, GRID), halved, 0.0)
