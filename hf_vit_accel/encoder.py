"""The fast path: pixels to features, through operations and plans that were decided before.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_vit_accel.backends import Attend
from hf_vit_accel.fusion import Fusion
from hf_vit_accel.ops import window_attention
from hf_vit_accel.planning import Prepared

__all__ = ["encode"]


def encode(
    tower: Any, full_layers: frozenset[int] | None, fusion: Fusion, prepared: Prepared, pixels_TP: torch.Tensor
) -> list[torch.Tensor]:
    """The residual stream (T, E), the merged features (M, width of the text), and those of deepstack layers.

    full_layers: indices of the layers that attend per frame where others attend per window; None where all do. What is
    returned belongs to the caller. Everything was decided before; the layers only compute.
    """
    tensors = prepared.tensors
    x_TE = fusion.embed(pixels_TP)
    if "interp_indices" in tensors:
        x_TE = fusion.add_positions(x_TE, tensors["interp_indices"], tensors["interp_weights"])
    positions_T2, window_index_M = tensors["position_ids"], tensors.get("window_index")
    if window_index_M is not None:
        x_TE, positions_T2 = (_permute(rows, window_index_M) for rows in (x_TE, positions_T2))
    cos_TD, sin_TD = (table_TD.contiguous() for table_TD in fusion.tables(x_TE, positions_T2))

    attends = _attends_by_layer(full_layers, fusion, prepared)
    deepstack = list(getattr(tower, "deepstack_visual_indexes", ()))
    merged_by_layer: list[torch.Tensor] = []
    delta_TE: torch.Tensor | None = None  # what the residual stream is still to receive: the next norm adds it
    for index, (layer, attend) in enumerate(zip(fusion.layers, attends, strict=True)):
        x_TE, normed_TE = layer.norm1(x_TE, delta_TE)
        attention = layer.attention
        qkv_T3HD = attention.qkv(normed_TE).unflatten(-1, (3, attention.num_heads, attention.head_dim))
        x_TE, normed_TE = layer.norm2(x_TE, attention.proj(attend(qkv_T3HD, cos_TD, sin_TD).flatten(1)))
        delta_TE = layer.mlp(normed_TE)
        if index in deepstack:
            x_TE, merged = fusion.deepstack[deepstack.index(index)](x_TE, delta_TE)
            merged_by_layer.append(merged)
            delta_TE = None
    x_TE, merged = fusion.merge(x_TE, delta_TE)
    if window_index_M is not None:
        merged = merged[tensors["inverse_index"]]

    return [x_TE, merged, *merged_by_layer]


def _attends_by_layer(full_layers: frozenset[int] | None, fusion: Fusion, prepared: Prepared) -> list[Attend]:
    """Per layer: packed projection, cos and sin to the attended rows (T, H, D)."""
    layers = len(fusion.layers)
    planned = {kind: plan.backend.attend_layers(plan, layers, fusion.rotate) for kind, plan in prepared.plans.items()}
    if full_layers is None:
        return planned["full"]
    if "window" in planned:
        window = planned["window"][0]
    else:
        offsets_S1, scale = prepared.tensors["cu_window_seqlens"], prepared.plans["full"].request.scale

        def window(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
            return window_attention.window_attention(qkv_T3HD, cos_TD, sin_TD, offsets_S1, scale)

    return [attend if index in full_layers else window for index, attend in enumerate(planned["full"])]


def _permute(rows: torch.Tensor, window_index_M: torch.Tensor) -> torch.Tensor:
    """Move whole merge blocks of rows, (T, anything), to the order of the windows."""
    blocks = rows.unflatten(0, (window_index_M.shape[0], -1))
    moved: torch.Tensor = blocks[window_index_M].flatten(0, 1)
    return moved
