"""Where the tokens of a batch lie in a static cache: every row has as many slots, or all rows share one axis of slots.

In a shared axis rows follow each other, each with the slots that it needs: one long row does not make all others long.

`B` rows of a batch, `K` heads of keys, `S` slots, `C` columns of a prompt and of the tokens after it, `D` head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_vit_accel.decoding.layers import Slots

_UNIT = 64
"""The slots of a row are multiples of it, as attention reads so many at a time."""
MOST_DUE = 1024
"""Tokens to come for which rows may share an axis. Each has slots for all of them: such a cache never grows."""
_RESERVE = 128
"""Slots for tokens to come that a new cache has at least. Where it is full, a larger one takes over."""
_WORTH = 0.8
"""Rows share an axis if it has at most this part of the slots of equal rows."""


class Size(NamedTuple):
    """The size of a static cache: its rows, their slots, and the slots of the longest row of a batch."""

    rows: int
    slots: int
    longest: int

    def holds(self, other: Size) -> bool:
        """Return whether a batch for a cache of another size fits, and takes at least half the slots."""
        return (
            self.rows == other.rows and other.slots <= self.slots <= 2 * other.slots and other.longest <= self.longest
        )


def slots_for(tokens: int) -> int:
    """Return the slots of a cache: few, since attention reads all; few sizes, since each is captured for itself."""
    unit = 1 << max(7, (tokens - 1).bit_length() - 3)
    return -(-tokens // unit) * unit


def slots_after(length: int, due: int) -> int:
    """Return the slots of a cache of some tokens, of which `due` more come. A capture writes two of them."""
    return slots_for(length + max(2, min(due, max(_RESERVE, length // 4))))


@dataclass
class Room:
    """Layers of a static cache.

    Attributes:
        columns: The columns that a row may have: those of the prompt, and the tokens to come.
        offsets_B: What is added to a row's column to get its slot; None where all rows have slots of their own.
        last_B: The last slot of every row on a shared axis.
        spans: The slots of every row there.
    """

    layers: list[Any]
    size: Size
    columns: int
    offsets_B: Tensor | None = None
    last_B: Tensor | None = None
    spans: Sequence[range] = ()

    def first_rows(self, rows: int) -> Room:
        """Return room of fewer rows in the same memory: the first rows, or any rows of a shared axis."""
        layers: list[Any] = []
        for layer in self.layers:
            part = DynamicLayer()
            part.keys, part.values = layer.keys[:rows], layer.values[:rows]
            layers.append(part)
        room = Room(layers, self.size, self.columns)
        if self.offsets_B is not None and self.last_B is not None:
            room.offsets_B, room.last_B = self.offsets_B[:rows], self.last_B[:rows]
        return room

    def share(self, axis: SharedAxis, device: torch.device) -> None:
        """Let the rows of a batch lie on the one axis of this room."""
        self.columns = axis.columns
        self.offsets_B = torch.tensor(axis.offsets, device=device)
        self.last_B = torch.tensor([span[-1] for span in axis.spans], device=device)
        self.spans = axis.spans

    def begin_rows(self, places: Sequence[int], lengths: Sequence[int], columns: int) -> None:
        """Make room for rows whose prompts end with the last of so many columns, where other rows of a batch were."""
        assert self.offsets_B is not None
        device = self.offsets_B.device
        spans = [self.spans[place] for place in places]
        offsets = [span[0] - (columns - length) for span, length in zip(spans, lengths, strict=True)]
        self.offsets_B.index_copy_(0, on_device(places, device), on_device(offsets, device))
        slots_T = on_device([slot for span in spans for slot in span], device)
        for layer in self.layers:  # attention multiplies what it does not see by zero, also what is no number
            for states in states_of(layer):
                states.index_fill_(2, slots_T.to(states.device), 0)

    def take_rows(self, places: Sequence[int], of_all: Room, length: int) -> None:
        """Take over rows of another room in the same memory, with the first columns of their keys and values.

        Args:
            places: Where the rows are there. A row that moves overwrites one that has ended, and no row that goes on.
                So the other room stays of use if memory runs out.
            of_all: The other room.
            length: Its columns so far.
        """
        self.columns = of_all.columns
        if of_all.offsets_B is not None and of_all.last_B is not None:
            places_N = on_device(places, of_all.offsets_B.device)
            self.offsets_B, self.last_B = of_all.offsets_B[places_N], of_all.last_B[places_N]
            self.spans = [of_all.spans[place] for place in places]
            return
        to = [place for place, source in enumerate(places) if source != place]
        sources = [places[place] for place in to]
        for layer, source in zip(self.layers, of_all.layers, strict=True):
            to_N, from_N = (on_device(x, layer.keys.device) for x in (to, sources))
            for state, value in zip(states_of(layer, length), states_of(source, length), strict=True):
                state.index_copy_(0, to_N, value.index_select(0, from_N))

    def give_to(self, cache: Any, columns: int) -> None:
        """Let a call's cache hold the first columns of this room, from now on."""
        if self.offsets_B is not None:
            cache.layers[:] = [SharedLayer(self, layer, columns) for layer in self.layers]
            return
        for layer, slots in zip(cache.layers, self.layers, strict=True):
            layer.lazy_initialization(slots.keys, slots.values)
            layer.keys, layer.values = (x[:, :, :columns] for x in (slots.keys, slots.values))

    def slots_of(self, rows_T: Tensor, columns_T: Tensor) -> Slots:
        """Return the slots of tokens in some columns of rows; on a shared axis none behind a row's last one."""
        if self.offsets_B is None or self.last_B is None:
            return Slots(self.layers, rows_T, columns_T)
        slots_T = torch.minimum(columns_T + self.offsets_B[rows_T], self.last_B[rows_T])
        return Slots(self.layers, torch.zeros_like(rows_T), slots_T)


def on_device(indices: Sequence[int], device: torch.device) -> Tensor:
    """Send indices to a device. The host does not wait for the work that is queued there."""
    host = torch.tensor(indices, dtype=torch.int64, device="cpu")  # whatever the default device
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def is_linear(layer: Any) -> bool:
    """Return whether a layer keeps the states of linear attention alone, which do not grow with the text."""
    return hasattr(layer, "recurrent_states") and not isinstance(layer, DynamicLayer)


def states_of(layer: Any, length: int | None = None) -> list[Tensor]:
    """Return the tensors that a step of this layer writes; of keys and values the first `length` tokens."""
    if not is_linear(layer):
        return [layer.keys[:, :, :length], layer.values[:, :, :length]]
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def make_room(layers: Sequence[Any], size: Size) -> Room:
    """Return room in layers like these. Keys and values are zero."""
    return Room(make_layers(layers, size.rows, size.slots), size, size.slots)


def make_layers(layers: Sequence[Any], rows: int, slots: int) -> list[Any]:
    """Return layers like these, with so many rows and slots."""
    made: list[Any] = []
    for layer in layers:
        new: Any = copy.deepcopy(layer) if is_linear(layer) else DynamicLayer()
        if not is_linear(layer):
            _, heads, _, width = layer.keys.shape
            new.keys, new.values = (x.new_zeros(rows, heads, slots, width) for x in states_of(layer))
        made.append(new)
    return made


def bytes_of_room(layers: Sequence[Any], size: Size) -> int:
    """Return the bytes of the keys and values that `make_room` allocates."""
    tensors = [x for layer in layers if not is_linear(layer) for x in states_of(layer)]
    return sum(size.rows * size.slots * x.shape[1] * x.shape[3] * x.itemsize for x in tensors)


@dataclass(frozen=True)
class SharedAxis:
    """A plan of rows on one axis: the size of the cache, the columns that fit, every row's offset and slots."""

    size: Size
    columns: int
    offsets: list[int]
    spans: list[range]


def plan_axis(lengths: Sequence[int], columns: int, due: int, slots: int | None = None) -> SharedAxis | None:
    """Plan one axis for all rows; None if rows of equal slots are as good, or for too many tokens.

    Args:
        lengths: The columns of every row from its first token on.
        columns: Those of the longest row.
        due: Tokens to come.
        slots: What every row would have otherwise; None if it has to be one axis.
    """
    if due > MOST_DUE:
        return None
    after = due + 2  # a capture writes two tokens behind the prompt
    longest = _padded(columns + after)
    offsets, spans = [], []
    begin = 0
    for length in lengths:
        offsets.append(begin - (columns - length))
        spans.append(range(begin, begin + _padded(length + after)))
        begin = spans[-1].stop
    size = Size(1, slots_for(begin), slots_for(longest))
    if slots is not None and size.slots > _WORTH * len(lengths) * min(longest, slots):
        return None
    return SharedAxis(size, columns + after, offsets, spans)


def _padded(slots: int) -> int:
    return -(-slots // _UNIT) * _UNIT


class SharedLayer(DynamicLayer):
    """A layer of the call's cache whose keys and values lie on the axis of a room. Stock cannot read it."""

    def __init__(self, room: Room, on_axis: Any, columns: int) -> None:
        super().__init__()
        self.room = room
        self.columns = columns
        self._on_axis = on_axis
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.columns

    def of_rows(self, rows: Sequence[int]) -> DynamicLayer:
        """Return a layer with the keys and values (B, K, C, D) of some rows, as stock keeps them."""
        assert self.room.offsets_B is not None
        rows_B = torch.tensor(rows, device=self.room.offsets_B.device)
        columns_C = torch.arange(self.columns, device=rows_B.device)
        slots_BC = self.room.slots_of(*torch.broadcast_tensors(rows_B[:, None], columns_C)).slots_T.clamp_min(0)
        on_axis = self._on_axis
        keys, values = (states[0][:, slots_BC].transpose(0, 1) for states in (on_axis.keys, on_axis.values))
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return layer


def room_of(cache: Any) -> Room | None:
    """Return the room whose axis the rows of a cache share; None for a cache that stock can read."""
    layer = cache.layers[0]
    return layer.room if isinstance(layer, SharedLayer) else None


def unshare(cache: Any, rows: int) -> None:
    """Give the rows of a cache keys and values of their own, for stock."""
    if room_of(cache) is not None:
        cache.layers[:] = [layer.of_rows(range(rows)) for layer in cache.layers]


def layer_of_rows(layer: Any, rows: list[int]) -> Any:
    """Return a layer that holds copies of some rows."""
    if isinstance(layer, SharedLayer):
        return layer.of_rows(rows)
    part = copy.copy(layer)
    if not is_linear(layer):
        part.keys, part.values = layer.keys[rows], layer.values[rows]
        return part
    for name in ("conv_states", "recurrent_states"):
        setattr(part, name, {key: state[rows] for key, state in getattr(layer, name).items()})
    return part
