"""The layers of a declared text model on its own modules, for the decode step and for packed prompts.

`B` batch, `T` tokens of a row, `E` width, `H` heads of queries, `K` heads of keys, `D` head dim, `F` all heads' widths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor, nn, sigmoid

from hf_vit_accel.decoding.text_models import Model, Reading

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Layer, query (B, H, T, D), key (B, K, T, D), value (B, K, T, D), scale -> (B, T, F). It also writes the cache."""
AttendLinearly: TypeAlias = Callable[[Model, Tensor], Tensor]
"""A module of linear attention, hidden states (B, T, E) -> (B, T, E)."""


def rotation_of(reading: Reading, hidden_BTE: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions of one or more axes, (axes, B, T) or (B, T)."""
    if reading.declared.has_mrope:
        # As text models do: four axes begin with that of the text, and one axis stands for all three.
        positions = positions.reshape(-1, *positions.shape[-2:])[-3:].expand(3, -1, -1)
    return cast(tuple[Tensor, Tensor], reading.text.rotary_emb(hidden_BTE, positions))


def run_layers(
    reading: Reading,
    hidden_BTE: Tensor,
    positions: Tensor,
    attend: Attend,
    attend_linearly: AttendLinearly | None = None,
    deepstack: tuple[Tensor, Sequence[Tensor]] | None = None,
) -> Tensor:
    """Return the hidden states behind the last layer, before the last norm.

    Args:
        deepstack: Tokens of the only row, and what the first layers add to them.
    """
    rotation = rotation_of(reading, hidden_BTE, positions)
    norms_outputs = reading.declared.norms_outputs
    for index, layer in enumerate(reading.text.layers):
        rows_BTE = norm(layer.input_layernorm, hidden_BTE)
        if hasattr(layer, "self_attn"):
            out_BTE = _attention(reading, index, layer.self_attn, rows_BTE, rotation, attend)
        else:
            assert attend_linearly is not None
            out_BTE = attend_linearly(layer.linear_attn, rows_BTE)
        hidden_BTE = hidden_BTE + (norm(layer.post_self_attn_layernorm, out_BTE) if norms_outputs else out_BTE)
        out_BTE = layer.mlp(norm(layer.post_attention_layernorm, hidden_BTE))
        hidden_BTE = hidden_BTE + (norm(layer.post_mlp_layernorm, out_BTE) if norms_outputs else out_BTE)
        if deepstack is not None and index < len(deepstack[1]):
            tokens, of_layers = deepstack
            hidden_BTE[0].index_add_(0, tokens, of_layers[index].to(hidden_BTE.dtype))
    return hidden_BTE


def _attention(
    reading: Reading,
    index: int,
    attention: Model,
    hidden_BTE: Tensor,
    rotation: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    shape = (*hidden_BTE.shape[:2], -1, attention.head_dim)
    query = attention.q_proj(hidden_BTE)
    gate: Tensor | None = None
    if reading.declared.is_gated:
        query, gate = query.view(*shape[:-1], 2 * attention.head_dim).chunk(2, dim=-1)
    query = query.reshape(shape)
    key = attention.k_proj(hidden_BTE).view(shape)
    value = attention.v_proj(hidden_BTE).view(shape).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        query = norm(attention.q_norm, query)
        key = norm(attention.k_norm, key)
    query, key = _rotate(attention, query.transpose(1, 2), key.transpose(1, 2), *rotation)
    out_BTF = attend(index, query, key, value, attention.scaling)
    if gate is not None:
        out_BTF = out_BTF * sigmoid(gate.reshape(out_BTF.shape))
    return cast(Tensor, attention.o_proj(out_BTF))


def norm(norm: Model, hidden: Tensor) -> Tensor:
    """Run an RMSNorm as one kernel of torch. transformers rounds before the weight, torch only at the end."""
    epsilon: float | None = getattr(norm, "variance_epsilon", None)
    if epsilon is None or hidden.dtype != norm.weight.dtype:
        return cast(Tensor, norm(hidden))
    return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, epsilon)


def _rotate(attention: Model, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the function in the file of the attention."""
    file: Any = sys.modules[type(attention).__module__]
    if hasattr(file, "apply_multimodal_rotary_pos_emb"):  # older, which picks the axes itself
        axes = attention.config.rope_parameters["mrope_section"]
        return cast(tuple[Tensor, Tensor], file.apply_multimodal_rotary_pos_emb(query, key, cos, sin, axes))
    return cast(tuple[Tensor, Tensor], file.apply_rotary_pos_emb(query, key, cos, sin))
