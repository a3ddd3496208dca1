"""Let layers with gradients run as one node of the autograd graph on any device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_vit_accel.backends.base import Attend, Plan
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.ops.training import nodes as nodes_module
from hf_vit_accel.ops.training.nodes import OpWithBackward, layer_node_of
from hf_vit_accel.ops.window_attention import WindowAttention


def one_node_a_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the `sdpa` backend attend by the kernel for windows in calls with gradients, since it runs on any device.

    Returns:
        A list that grows with every layer that becomes one node.
    """
    nodes: list[int] = []
    stock_attend_layers = Sdpa.attend_layers

    def attend_layers(backend: Sdpa, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        if not plan.request.grad:
            return stock_attend_layers(backend, plan, layers, rotate)
        offsets = torch.tensor(plan.segments.cu_seqlens_S1, dtype=torch.int32, device=plan.request.device)
        return [OpWithBackward(function=WindowAttention, settings=(offsets, plan.request.scale))] * layers

    def counted_layer_node_of(layer: object, attend: object) -> Callable[..., object] | None:
        node = layer_node_of(layer, attend)
        if node is not None:
            nodes.append(len(nodes))
        return node

    monkeypatch.setattr(Sdpa, "attend_layers", attend_layers)
    monkeypatch.setattr(nodes_module, "layer_node_of", counted_layer_node_of)
    return nodes
