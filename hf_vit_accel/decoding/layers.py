"""The layers of a declared text model on its own modules, for the decode step and for packed prompts.

On a GPU in half precision, what stands between products is one kernel each: additions with norms, heads from projection
to cache, SiLU times up. With few tokens the products are ours, too. Everywhere else torch computes the same.

`B` batch, `T` tokens (of a row, or of all rows together), `E` width, `H` heads of queries, `K` heads of keys, `D` head
dim, `F` all heads' widths.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn, sigmoid
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import ACT2FN

from hf_vit_accel.backends.flash_attention_3 import FlashAttention3, causal_attention
from hf_vit_accel.decoding.text_models import Model, TextReading, refuse
from hf_vit_accel.ops.activation import swiglu
from hf_vit_accel.ops.add_norm import add_norm_rows
from hf_vit_accel.ops.embedding import rotated
from hf_vit_accel.ops.launch import why_not_triton
from hf_vit_accel.ops.mlp import is_faster_in_one_launch, linear_swiglu
from hf_vit_accel.ops.place_heads import Cache, Norms, place_heads
from hf_vit_accel.ops.token_products import MOST_TOKENS, is_faster, token_products, token_swiglu

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Layer, query (T, H, D), key (T, K, D), value (T, K, D), scale -> (T, H, D). Keys and values are in the cache, too."""
AttendLinearly: TypeAlias = Callable[[Model, Tensor], Tensor]
"""A module of linear attention, hidden states (B, T, E) -> (B, T, E)."""
Tables: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines."""


@dataclass(frozen=True)
class Slots:
    """Where the keys and values of a call's tokens go.

    Attributes:
        layers: Of a static cache.
        rows_T: The row of every token, int64.
        slots_T: Its slot.
    """

    layers: Sequence[Any]
    rows_T: Tensor
    slots_T: Tensor

    def of_layer(self, index: int) -> Cache:
        """Return keys, values, rows and slots."""
        layer = self.layers[index]
        return layer.keys, layer.values, self.rows_T, self.slots_T


class CausalAttention:
    """Attention of packed tokens, each to those before it in its row.

    Args:
        lengths: Tokens of every row.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = list(lengths)
        self._longest = max(self._lengths)
        ends_G = torch.tensor(self._lengths, device=device).cumsum(0)
        self._cu_seqlens_G1 = nn.functional.pad(ends_G, (1, 0)).int()
        self.last_G = ends_G - 1
        """The last token of every row."""

    def __call__(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        """Return (T, H, D)."""
        if query_THD.is_cuda and query_THD.dtype.itemsize == 2:
            return _varlen()(query_THD, key_TKD, value_TKD, self._cu_seqlens_G1, self._longest, scale)
        outs = []
        for query, key, value in zip(*(x.split(self._lengths) for x in (query_THD, key_TKD, value_TKD)), strict=True):
            query_1HTD, key_1KTD, value_1KTD = (x.transpose(0, 1)[None] for x in (query, key, value))
            out_1HTD = scaled_dot_product_attention(
                query_1HTD, key_1KTD, value_1KTD, is_causal=True, scale=scale, enable_gqa=True
            )
            outs.append(out_1HTD[0].transpose(0, 1))
        return torch.cat(outs)


@lru_cache(maxsize=1)
def _varlen() -> Callable[..., Tensor]:
    """Return causal attention of packed rows with groups of queries: FlashAttention-3's, or torch's.

    It takes queries, keys, values, cu_seqlens, the longest row and the scale.
    """
    if not FlashAttention3().reasons_against_machine():
        return causal_attention
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        options["enable_gqa"] = True

    def attend(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, cu_seqlens: Tensor, longest: int, scale: float
    ) -> Tensor:
        bounds = cu_seqlens, cu_seqlens, longest, longest
        return cast(Tensor, varlen_attn(query_THD, key_TKD, value_TKD, *bounds, scale=scale, **options))

    return attend


def run_layers(
    reading: TextReading,
    hidden_BTE: Tensor,
    positions: Tensor,
    attend: Attend,
    slots: Slots | None = None,
    attend_linearly: AttendLinearly | None = None,
    deepstack: tuple[Tensor, Sequence[Tensor]] | None = None,
    keep: Callable[[Tensor], object] = lambda hidden_BTE: None,
    returned_T: Tensor | None = None,
) -> Tensor:
    """Return the hidden states behind the last layer, before the last norm. The given ones are not written to.

    Args:
        attend: Gets the tokens of all rows, one after the other.
        slots: Of a cache that receives keys and values; None for no cache.
        deepstack: Tokens of the only row, and what the first layers add to them.
        keep: Gets the hidden states (B, T, E) behind every layer but the last, before deepstack, as transformers does.
        returned_T: The tokens of the only row whose hidden states are returned; None for all. Behind the attention of
            the last layer the others are dropped: with 28 layers that is 3% of all products.
    """
    with torch.cuda.device_of(hidden_BTE):
        layers = _Layers(reading, hidden_BTE, positions, attend, slots, attend_linearly)
        delta_BTE: Tensor | None = None
        of_layers = () if deepstack is None else deepstack[1]
        last = len(reading.text.layers) - 1
        can_drop = returned_T is not None and len(of_layers) <= last
        for index, layer in enumerate(reading.text.layers):
            hidden_BTE, out_BTE = layers.add_norm(layer.input_layernorm, hidden_BTE, delta_BTE)
            if delta_BTE is not None:
                keep(hidden_BTE)
            kept_T = returned_T if can_drop and index == last else None
            hidden_BTE, delta_BTE = layers.run(index, layer, hidden_BTE, out_BTE, kept_T)
            if deepstack is not None and index < len(of_layers):
                hidden_BTE, delta_BTE = hidden_BTE + delta_BTE, None
                keep(hidden_BTE)
                sums_1TE = hidden_BTE[:, deepstack[0]] + of_layers[index].to(hidden_BTE.dtype)
                hidden_BTE = hidden_BTE.index_copy(1, deepstack[0], sums_1TE)  # `index_add` takes half as long again
        if delta_BTE is not None:
            hidden_BTE = hidden_BTE + delta_BTE
        return hidden_BTE if can_drop or returned_T is None else hidden_BTE[:, returned_T]


class _Layers:
    """What all layers of a call share."""

    def __init__(
        self,
        reading: TextReading,
        hidden_BTE: Tensor,
        positions: Tensor,
        attend: Attend,
        slots: Slots | None,
        attend_linearly: AttendLinearly | None,
    ) -> None:
        self._declared = reading.declared
        self._attend = attend
        self._slots = slots
        self._attend_linearly = attend_linearly
        self._is_fused = not reading.autocast[2] and why_not_triton(hidden_BTE.device, hidden_BTE.dtype) is None
        if reading.declared.has_mrope:
            # As text models do: four axes begin with that of the text, and one axis stands for all three.
            positions = positions.reshape(-1, *positions.shape[-2:])[-3:].expand(3, -1, -1)
        self._rotation: Tables = reading.text.rotary_emb(hidden_BTE, positions)
        attentions = (layer.self_attn for layer in reading.text.layers if hasattr(layer, "self_attn"))
        self._tables: Tables | None = None
        if self._is_fused:
            self._tables = _tables_of(next(attentions), self._rotation, hidden_BTE.shape[:2])

    def run(
        self, index: int, layer: Model, hidden_BTE: Tensor, rows_BTE: Tensor, kept_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and what the MLP adds to them: of all tokens, or of some."""
        if hasattr(layer, "self_attn"):
            out_BTE = self._attention(index, layer.self_attn, rows_BTE, kept_T)
        else:
            assert self._attend_linearly is not None
            out_BTE = self._attend_linearly(layer.linear_attn, rows_BTE)
        if kept_T is not None:
            hidden_BTE = hidden_BTE[:, kept_T]
        if self._declared.norms_outputs:
            out_BTE = norm(layer.post_self_attn_layernorm, out_BTE)
        hidden_BTE, rows_BTE = self.add_norm(layer.post_attention_layernorm, hidden_BTE, out_BTE)
        out_BTE = self._mlp(layer.mlp, rows_BTE)
        if self._declared.norms_outputs:
            out_BTE = norm(layer.post_mlp_layernorm, out_BTE)
        return hidden_BTE, out_BTE

    def add_norm(self, module: Model, hidden_BTE: Tensor, delta_BTE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of both and its norm."""
        tensors = hidden_BTE, module.weight, *(() if delta_BTE is None else (delta_BTE,))
        if not self._is_fused or _epsilon(module) is None or not _have_one_dtype(*tensors):
            hidden_BTE = hidden_BTE if delta_BTE is None else hidden_BTE + delta_BTE
            return hidden_BTE, norm(module, hidden_BTE)
        hidden_TE = hidden_BTE.flatten(0, 1).contiguous()
        delta_TE = None if delta_BTE is None else delta_BTE.flatten(0, 1)
        sum_TE = hidden_TE if delta_TE is None else torch.empty_like(hidden_TE)
        out_TE = add_norm_rows(hidden_TE, sum_TE, delta_TE, module.weight, None, _epsilon(module) or 0.0, True)
        return sum_TE.view(hidden_BTE.shape), out_TE.view(hidden_BTE.shape)

    def _products(self, rows_BTE: Tensor, *linears: Model) -> list[Tensor]:
        """Return what linears compute of the same rows."""
        if not (self._is_fused and all(_is_plain(linear, rows_BTE.dtype) for linear in linears)):
            return [linear(rows_BTE) for linear in linears]
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        if not is_faster(rows_BTE.shape[:2].numel(), weights) or len({bias is None for bias in biases}) > 1:
            return [linear(rows_BTE) for linear in linears]
        outs = token_products(rows_BTE.flatten(0, 1).contiguous(), weights, biases)
        return [out.unflatten(0, rows_BTE.shape[:2]) for out in outs]

    def _attention(self, index: int, attention: Model, hidden_BTE: Tensor, kept_T: Tensor | None) -> Tensor:
        query, key, value = self._products(hidden_BTE, attention.q_proj, attention.k_proj, attention.v_proj)
        gate: Tensor | None = None
        if self._declared.is_gated:
            query, gate = query.unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, dim=-1)
        shape = hidden_BTE.shape[:2].numel(), -1, attention.head_dim
        query_THD, key_TKD, value_TKD = query.reshape(shape), key.reshape(shape), value.reshape(shape)
        query_THD, key_TKD = self._place(index, attention, query_THD, key_TKD, value_TKD, hidden_BTE.shape[:2])
        out_THD = self._attend(index, query_THD, key_TKD, value_TKD, attention.scaling)
        out_BTF = out_THD.reshape(*hidden_BTE.shape[:2], -1)
        if gate is not None:
            out_BTF = out_BTF * sigmoid(gate.reshape(out_BTF.shape))
        if kept_T is not None:
            out_BTF = out_BTF[:, kept_T]
        return self._products(out_BTF, attention.o_proj)[0]

    def _place(
        self, index: int, attention: Model, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, shape_BT: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and write keys and values to their slots."""
        cache = None if self._slots is None else self._slots.of_layer(index)
        norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        weights = [norm.weight for norm in norms]
        epsilons = {_epsilon(norm) for norm in norms}
        tensors = *weights, query_THD, key_TKD, value_TKD, *(() if cache is None else cache[:2])
        if self._tables is not None and _have_one_dtype(*tensors) and None not in epsilons and len(epsilons) <= 1:
            of_heads: Norms | None = (weights[0], weights[1], epsilons.pop() or 0.0) if norms else None
            return place_heads(query_THD, key_TKD, value_TKD, *self._tables, of_heads, cache)
        if norms:
            query_THD = norm(attention.q_norm, query_THD)
            key_TKD = norm(attention.k_norm, key_TKD)
        query, key = (x.unflatten(0, shape_BT).transpose(1, 2) for x in (query_THD, key_TKD))
        query, key = _rotation_of(attention)(query, key, *self._rotation)
        query_THD, key_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
        if cache is not None:
            # Under autocast values may have a narrower dtype than keys. A dynamic cache has that of its first keys.
            keys, values, rows_T, slots_T = cache
            keys[rows_T, :, slots_T] = key_TKD.to(keys.dtype)
            values[rows_T, :, slots_T] = value_TKD.to(values.dtype)
        return query_THD, key_TKD

    def _mlp(self, mlp: Model, rows_BTE: Tensor) -> Tensor:
        """Run an MLP; gate, up and down by themselves, if it is of these three."""
        is_swiglu = mlp._modules.keys() <= _SWIGLU and type(getattr(mlp, "act_fn", None)) is type(ACT2FN["silu"])
        if not self._is_fused or not is_swiglu:
            return cast(Tensor, mlp(rows_BTE))
        gate, up = mlp.gate_proj, mlp.up_proj
        are_plain = all(_is_plain(linear, rows_BTE.dtype) and linear.bias is None for linear in (gate, up))
        tokens = rows_BTE.shape[:2].numel()
        if are_plain and tokens <= MOST_TOKENS:
            inner_TF = token_swiglu(rows_BTE.flatten(0, 1).contiguous(), gate.weight, up.weight)
        elif are_plain and _is_plain(mlp.down_proj, rows_BTE.dtype) and is_faster_in_one_launch(tokens, gate.weight):
            weights = gate.weight, up.weight, None, None, mlp.down_proj.weight
            inner_TF = linear_swiglu(rows_BTE.flatten(0, 1).contiguous(), *weights)[0]
        else:
            gate_BTF, up_BTF = gate(rows_BTE), up(rows_BTE)
            if not _have_one_dtype(gate_BTF, up_BTF, rows_BTE):
                return cast(Tensor, mlp.down_proj(mlp.act_fn(gate_BTF) * up_BTF))
            inner_TF = swiglu(gate_BTF.flatten(0, 1), up_BTF.flatten(0, 1))
        return self._products(inner_TF.unflatten(0, rows_BTE.shape[:2]), mlp.down_proj)[0]


def check_equal(ours: Tensor, stock: Tensor, message: str) -> None:
    """Raise ArithmeticError where a result of ours differs from stock's by more than rounding."""
    is_exact = ours.dtype.itemsize > 2 and torch.get_float32_matmul_precision() == "highest"
    error = float((ours.float() - stock.float()).norm() / stock.float().norm())
    if not error <= (1e-4 if is_exact else 0.1):  # nor for NaN
        raise ArithmeticError(f"{message} from stock's by {error:.2g}")


def refuse_unpacked(reading: TextReading) -> None:
    """Raise `UnservedError` for text models whose layers run no packed rows."""
    attentions = [getattr(layer, "self_attn", None) for layer in reading.text.layers]
    reasons = {
        "autocast": reading.autocast[2],
        "layers of linear attention": None in attentions,
        "attention in both directions": not all(getattr(attention, "is_causal", True) for attention in attentions),
        "weights on several devices": len(reading.devices) > 1,
    }
    refuse(reasons)


_SWIGLU = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The modules of an MLP that computes down(silu(gate) * up)."""


def _have_one_dtype(*tensors: Tensor) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1


def _is_plain(linear: Model, dtype: torch.dtype) -> bool:
    """Return whether a module is a linear of torch on plain tensors of a dtype."""
    if type(linear) is not nn.Linear:  # a quantised one may lack weight or bias
        return False
    tensors = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    return all(type(x) is nn.Parameter and x.is_contiguous() and x.dtype == dtype for x in tensors)


def _epsilon(norm: Model) -> float | None:
    """Return epsilon of an RMSNorm that multiplies by its weight; None for a norm of another kind."""
    return getattr(norm, "variance_epsilon", None)


def norm(norm: Model, hidden: Tensor) -> Tensor:
    """Run an RMSNorm as one kernel of torch. transformers rounds before the weight, torch only at the end."""
    epsilon = _epsilon(norm)
    if epsilon is None or hidden.dtype != norm.weight.dtype:
        return cast(Tensor, norm(hidden))
    return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, epsilon)


def _rotation_of(attention: Model) -> Callable[..., Any]:
    """Return the function in the file of an attention that turns queries and keys by cosines and sines."""
    file: Any = sys.modules[type(attention).__module__]
    # Older forwards pick the axes themselves. Their function's name alone says nothing: Liger puts it into newer files.
    if "apply_multimodal_rotary_pos_emb" in inspect.unwrap(type(attention).forward).__code__.co_names:
        sections = tuple(attention.config.rope_parameters["mrope_section"])
        return _by_sections(file.apply_multimodal_rotary_pos_emb, sections)
    function: Callable[..., Any] = file.apply_rotary_pos_emb
    return function


@lru_cache(maxsize=64)
def _by_sections(function: Callable[..., Any], sections: tuple[int, ...]) -> Callable[..., Any]:
    return partial(function, mrope_section=list(sections))


def _tables_of(attention: Model, rotation: Tables, shape_BT: torch.Size) -> Tables | None:
    """Return cosines and sines (T, D) with which a file's rotation turns pairs (d, d + D / 2); None if it does not."""
    cos, sin = rotation
    rotate = _rotation_of(attention)
    width = attention.head_dim
    if cos.shape[-1] != width or not _turns_halves(rotate, width, cos.dim()):
        return None
    tables = _read_tables(rotate, cos, sin)
    cos_TD, sin_TD = (x.expand(*shape_BT, -1).flatten(0, 1).contiguous() for x in tables)
    return cos_TD, sin_TD


@lru_cache(maxsize=64)
def _turns_halves(rotate: Callable[..., Any], width: int, dims: int) -> bool:
    """Return whether a rotation of random heads is that by its tables, alone."""
    generator = torch.Generator().manual_seed(0)
    leading = [1] * (dims - 2) if dims < 4 else [3, 1]
    cos, sin = torch.rand(2, *leading, 3, width, generator=generator, device="cpu")
    heads = torch.rand(2, 1, 1, 3, width, generator=generator, device="cpu")
    cos_TD, sin_TD = (x[0] for x in _read_tables(rotate, cos, sin))
    results = rotate(*heads, cos, sin)
    turned = [rotated(x[0, 0][:, None], cos_TD, sin_TD)[:, 0] for x in heads]
    return all(torch.allclose(x, result[0, 0], atol=1e-5) for x, result in zip(turned, results, strict=True))


def _read_tables(rotate: Callable[..., Any], cos: Tensor, sin: Tensor) -> Tables:
    """Rotate heads that are one in a half, and zero in the other: the results are cosines and sines, (B, T, D)."""
    half = cos.shape[-1] // 2
    halves = cos.new_zeros(2, cos.shape[-3], 1, *cos.shape[-2:])
    halves[0, ..., :half] = 1
    halves[1, ..., half:] = 1
    of_first, of_second = (x[:, 0] for x in rotate(*halves, cos, sin))
    cos_BTD = torch.cat([of_first[..., :half], of_second[..., half:]], dim=-1)
    return cos_BTD, torch.cat([-of_second[..., :half], of_first[..., half:]], dim=-1)
