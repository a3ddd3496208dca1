"""One decode step over static buffers: the layers of a text model for one token a row, on a static cache.

`B` batch, `E` width, `S` slots of the cache, `H` heads of queries, `K` heads of keys, `D` head dim.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_vit_accel.decoding.layers import check_equal, norm, run_layers
from hf_vit_accel.decoding.packed import CACHE, Arguments
from hf_vit_accel.decoding.room import Room, is_linear, layer_of_rows, states_of
from hf_vit_accel.decoding.text_models import Model, TextReading, UnservedError, refuse
from hf_vit_accel.ops.decode_attention import attend_in_chunks, of_samples, why_not_in_chunks

_WITHOUT_EFFECT = (
    *("use_cache", "logits_to_keep", "return_dict", CACHE),
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "rope_deltas", "video_second_per_grid"),
)
"""Arguments that change nothing for one token on a cache with given positions."""


def attend(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask_B11S: Tensor,
    ends_B2: Tensor,
    order_B: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """Attend with the query heads of a group as rows of one query, so that no key head is copied; (B, 1, H * D).

    Half precision on a GPU takes our kernel, all else torch's.
    """
    batch, heads, _, width = query_BHTD.shape
    key_heads = key_BKSD.shape[1]
    mask = mask_B11S.to(query_BHTD.dtype)  # autocast
    query = query_BHTD.reshape(batch, key_heads, heads // key_heads, width)
    if why_not_in_chunks(query, key_BKSD, value_BKSD, mask) is None:
        out = attend_in_chunks(query, key_BKSD, value_BKSD, mask, ends_B2, order_B, scale, longest)
    else:
        if len(key_BKSD) < batch:
            value_BKSD, _ = of_samples(value_BKSD, mask, ends_B2, longest)
            key_BKSD, mask = of_samples(key_BKSD, mask, ends_B2, longest)
        out = nn.functional.scaled_dot_product_attention(query, key_BKSD, value_BKSD, attn_mask=mask, scale=scale)
    return out.reshape(batch, 1, -1)


def tensors_of_rows(inputs: Arguments, rows: list[int]) -> Arguments:
    """Return stock's inputs of one token for some rows. The cache is the same."""
    batch = len(inputs["input_ids"])
    part = dict(inputs)
    for name, value in inputs.items():
        if name.endswith(("attention_mask", "_ids")) and value is not None and value.shape[-2] == batch:
            part[name] = value[..., rows, :]
    return part


def inputs_of_rows(inputs: Arguments, rows: list[int]) -> Arguments:
    """Return stock's inputs of one token for some rows, with a cache that holds copies."""
    part = tensors_of_rows(inputs, rows)
    cache = part[CACHE] = copy.copy(inputs[CACHE])
    cache.layers = [layer_of_rows(layer, rows) for layer in cache.layers]
    return part


def key_of_inputs(inputs: Arguments, length: int) -> Hashable:
    """Return what steps share for stock's inputs of one token; `UnservedError` if one means what a step would lose."""
    rows = len(inputs["input_ids"])
    mask = inputs.get("attention_mask")
    positions: Any = inputs.get("position_ids")
    for name, value in inputs.items():
        is_read = name in _WITHOUT_EFFECT or name.endswith(("attention_mask", "_ids"))
        if not is_read and value is not None and value is not False:
            raise UnservedError(f"the argument {name} in every step")
    shapes = (rows, 1), (1, 1)
    reasons = {
        "an attention_mask of a shape of its own": getattr(mask, "shape", None) not in (None, (rows, length + 1)),
        "the model computes positions in every step itself": positions is None,
        "positions of a shape of their own": positions is not None and positions.shape[-2:] not in shapes,
    }
    refuse(reasons)
    return key_of_positions(positions, rows)


def key_of_positions(positions: Tensor, rows: int) -> Hashable:
    """Return what steps of so many rows share if their prompts had such positions, or the token has."""
    return rows, (*positions.shape[:-1], 1), positions.dtype


class DecodeStep:
    """The decode step of a batch on a static cache. Everything that advances does so inside the step."""

    def __init__(self, key: Hashable, reading: TextReading, inputs: Arguments, room: Room, length: int) -> None:
        self.key = key
        self.room = room
        self.reading = reading
        self.layers = room.layers
        self._ids_B1 = torch.zeros_like(inputs["input_ids"]).contiguous()
        self._positions = torch.zeros_like(inputs["position_ids"]).contiguous()
        self.device = self._ids_B1.device
        # Behind the prompt, whose keys may be there before the step is captured.
        rows = len(self._ids_B1)
        lengths_B = torch.full((rows,), length, device=self.device)
        self._slots = room.slots_of(torch.arange(rows, device=self.device), lengths_B)
        self._slots_B = self._slots.slots_T
        keys = next(layer.keys for layer in self.layers if not is_linear(layer))
        self._mask_B11S = torch.zeros(len(keys), 1, 1, keys.shape[2], dtype=keys.dtype, device=keys.device)
        self._ends_B2 = torch.zeros(rows, 2, dtype=torch.int32, device=keys.device)
        self._order_B = torch.arange(rows, dtype=torch.int32, device=keys.device)  # of the rows, the longest first
        self._last_B = torch.full_like(self._slots_B, keys.shape[2] - 1)  # slots of rows
        if room.last_B is not None:
            self._last_B.copy_(room.last_B)  # a capture writes more than one token
        self._logits: Tensor | None = None
        self.length = 0  # tokens in the cache, counted on the host
        self.graph_bytes = 0
        self.is_proven = False
        self.smaller: dict[int, DecodeStep] = {}  # by rows: steps in the same room, once other rows have ended
        self.rows_in_vain = 0  # that had ended and did not leave: one for every row and token, of all calls
        self.replay: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the room, and of the graphs of all steps in it."""
        steps = [self, *self.smaller.values()]
        room = sum(state.nbytes for layer in self.layers for state in states_of(layer))
        return room + sum(step.graph_bytes for step in steps)

    def load(self, inputs: Arguments, cache: Any, length: int) -> None:
        """Copy the tokens and inputs of a call into this step's buffers, and free the memory of the call's cache."""
        self._positions.copy_(inputs["position_ids"])
        rows_B = torch.arange(len(self._ids_B1), device=self.device)
        is_visible_BC = torch.ones(len(rows_B), length, dtype=torch.bool, device=self.device)
        if inputs.get("attention_mask") is not None:
            is_visible_BC = inputs["attention_mask"][:, :length] != 0
        begins_B = is_visible_BC.int().argmax(1)
        for column, end in ((begins_B, 0), (torch.full_like(begins_B, length), 1)):
            self._ends_B2[:, end] = self.room.slots_of(rows_B, column).slots_T
        self._slots_B.copy_(self._ends_B2[:, 1])
        if self.room.last_B is not None:
            self._last_B.copy_(self.room.last_B)
        self._order_B.copy_(self._ends_B2.diff()[:, 0].argsort(descending=True))
        self.length = length
        self._mask_B11S.fill_(float("-inf"))
        if self.room.offsets_B is None:
            self._mask_B11S[:, 0, 0, :length].masked_fill_(is_visible_BC, 0.0)
        else:
            rows_T, columns_T = is_visible_BC.nonzero(as_tuple=True)
            self._mask_B11S.index_fill_(3, self.room.slots_of(rows_T, columns_T).slots_T, 0.0)
            return  # the room was zeros before the prompt, and a capture wrote to the slots of the next token alone
        for layer, source in zip(self.layers, cache.layers, strict=True):
            states = states_of(layer, length)
            for state, value in zip(states, states_of(source), strict=True):
                if state.data_ptr() != value.data_ptr():  # else the prompt wrote here
                    state.copy_(value)
            if not is_linear(layer):
                source.keys, source.values = states
                for state in states_of(layer):
                    state[:, :, length:].zero_()  # here, too

    def store(self, cache: Any, *, is_kept: bool = False) -> None:
        """Leave in a cache what stock would have left there: views of this step's keys, copies in one that is kept."""
        for layer, target in zip(self.layers, cache.layers, strict=True):
            if self.room.offsets_B is not None:
                target.columns = self.length
                continue
            states = states_of(layer, self.length)
            if not is_linear(layer):
                target.keys, target.values = [state.clone() for state in states] if is_kept else states
                continue
            for state, value in zip(states_of(target), states, strict=True):
                state.copy_(value)

    def run(self) -> None:
        """Compute one step, and advance the buffers. This is what a graph captures."""
        states = [state.data_ptr() for layer in self.layers for state in states_of(layer)]
        self._mask_B11S.index_fill_(3, self._slots_B, 0.0)
        torch.add(self._slots_B, 1, out=self._ends_B2[:, 1])
        # A cache of cast weights gains nothing, since a step uses each weight once.
        with torch.autocast(*self.reading.autocast, cache_enabled=False), torch.no_grad():
            self._logits = self.reading.head(self._hidden_B1E())
        # A row that has ended may go on for longer than it has slots. It stays at its last one.
        torch.minimum(self._slots_B + 1, self._last_B, out=self._slots_B)
        self._positions.add_(1)
        now = [state.data_ptr() for layer in self.layers for state in states_of(layer)]
        assert now == states, "not in place"

    def _hidden_B1E(self) -> Tensor:
        text = self.reading.text
        hidden_B1E = text.embed_tokens(self._ids_B1)
        arguments = self.reading, hidden_B1E, self._positions, self._attend, self._slots, self._attend_linearly
        return norm(text.norm, run_layers(*arguments))

    def _attend_linearly(self, attention: Model, hidden_B1E: Tensor) -> Tensor:
        names = inspect.signature(inspect.unwrap(type(attention).forward)).parameters
        cache_name = CACHE if CACHE in names else "cache_params"
        return cast(Tensor, attention(hidden_B1E, **{cache_name: Cache(layers=self.layers)}))

    def _attend(self, layer: int, query_BHD: Tensor, key_BKD: Tensor, value_BKD: Tensor, scale: float) -> Tensor:
        states = self.layers[layer]
        arguments = states.keys, states.values, self._mask_B11S, self._ends_B2, self._order_B, scale
        return attend(query_BHD.unsqueeze(2), *arguments, self.room.size.longest)

    def __call__(self, ids_B1: Tensor) -> Tensor:
        """Return the logits (B, 1, vocabulary) after one more token a row. The next step overwrites them."""
        self._ids_B1.copy_(ids_B1)
        (self.replay or self.run)()
        self.length += 1
        assert self._logits is not None
        return self._logits

    def prove(self, ids_B1: Tensor, expected: Tensor, rows: list[int]) -> Tensor:
        """Return the logits of a step that stock computed for some rows; ArithmeticError if those differ."""
        logits_B1V = self(ids_B1)
        for row, of_stock in zip(rows, expected, strict=True):
            check_equal(logits_B1V[row], of_stock, "logits differ")
        return logits_B1V
