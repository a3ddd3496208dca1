"""Let layers with gradients run as one node of the autograd graph on any device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_vit_accel.engine import route as route_module
from hf_vit_accel.engine.route import Route
from hf_vit_accel.ops.training.trained import Trained, layer_of
from hf_vit_accel.ops.window_attention import WindowAttention


def one_node_a_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Attend by the kernel for windows in calls with gradients, since it runs on any device.

    Returns:
        A list that grows with every layer that becomes one node.
    """
    nodes: list[int] = []
    stock_attends = Route._attends

    def attends(route: Route, ops: object) -> list[object]:
        if not route.spec.request.grad:
            return stock_attends(route, ops)
        trained = []
        for is_full in route.spec.full_layers:
            offsets = route.tensors["cu_seqlens" if is_full else "cu_window_seqlens"]
            trained.append(Trained(function=WindowAttention, settings=(offsets, route.spec.request.scale)))
        return trained

    def counted_layer_of(layer: object, attend: object) -> Callable[..., object] | None:
        node = layer_of(layer, attend)
        if node is not None:
            nodes.append(len(nodes))
        return node

    monkeypatch.setattr(Route, "_attends", attends)
    monkeypatch.setattr(route_module, "layer_of", counted_layer_of)
    return nodes
