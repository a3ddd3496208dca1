"""Let layers with gradients run as one node of the autograd graph on any device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_vit_accel.backends.base import Attend, Backend, Plan, Request
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.training import nodes as nodes_module
from hf_vit_accel.ops.training.nodes import OpWithBackward, layer_node_of
from hf_vit_accel.ops.window_attention import WindowAttention


def one_node_a_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `sdpa` attend by the kernel for windows in calls with gradients; return a list that grows with every node."""
    nodes: list[int] = []
    stock_plan = Sdpa.plan
    stock_attend_layers = Sdpa.attend_layers

    def plan(backend: Sdpa, segments: Segments, request: Request) -> Plan:
        return (Backend.plan if request.grad else stock_plan)(backend, segments, request)

    def attend_layers(backend: Sdpa, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        if not plan.request.grad:
            return stock_attend_layers(backend, plan, layers, rotate)
        settings = plan.tensors["cu_seqlens_S1"], plan.request.scale
        return [OpWithBackward(function=WindowAttention, settings=settings)] * layers

    def counted_layer_node_of(layer: object, attend: object) -> Callable[..., object] | None:
        node = layer_node_of(layer, attend)
        if node is not None:
            nodes.append(len(nodes))
        return node

    monkeypatch.setattr(Sdpa, "plan", plan)
    monkeypatch.setattr(Sdpa, "attend_layers", attend_layers)
    monkeypatch.setattr(nodes_module, "layer_node_of", counted_layer_node_of)
    return nodes
