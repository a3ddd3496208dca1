"""Run towers by the references of their kernels, on a machine without a GPU."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from hf_vit_accel.ops import PARTS, activation, mlp, window_attention
from hf_vit_accel.ops.training import nodes
from hf_vit_accel.tower import state as state_module
from support.kernel_table import KERNELS, operation_modules


def put(monkeypatch: pytest.MonkeyPatch, function: Any, replacement: Any) -> None:
    """Replace a function in every module of operations that names it."""
    for module in operation_modules():
        for name, value in list(vars(module).items()):
            if value is function:
                monkeypatch.setattr(module, name, replacement)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace every kernel of `KERNELS` by its reference, and return the names of the calls so far."""
    called: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    for name, kernel in KERNELS.items():
        put(monkeypatch, kernel.function, kernel.stand_in(recorded(name, kernel.reference)))
    # The autograd function of a complete layer launches kernels, whatever its parts are replaced by.
    monkeypatch.setattr(nodes, "layer_node_of", lambda operations, attend: None)
    # aten computes this function, so that it has no reference, but tests count its calls.
    put(monkeypatch, activation.linear_gelu_tanh, recorded("linear_gelu_tanh", activation.linear_gelu_tanh))
    attend_windows = recorded("window_attention", window_attention.window_attention_reference)
    put(monkeypatch, window_attention.WindowAttention, SimpleNamespace(apply=attend_windows))
    return called


def fuse_only(monkeypatch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """Build the other operations by the tower's modules, from the next `patch` on."""
    build = state_module.build
    left_out = {name: "left out here" for name in PARTS if name not in names}
    monkeypatch.setattr(
        state_module, "build", lambda parts, context, why_plain: build(parts, context, {**why_plain, **left_out})
    )
