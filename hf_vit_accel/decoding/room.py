"""Where the tokens of a batch lie in a static cache: every row has as many slots, or all rows share one axis of slots.

In a shared axis rows follow each other, each with the slots that it needs: one long row does not make all others long.

`B` rows of a batch, `K` heads of keys, `S` slots, `C` columns of a prompt and of the tokens after it, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_vit_accel.decoding.layers import Slots

_UNIT = 64
"""The slots of a row are multiples of it, as attention reads so many at a time."""
_MOST_DUE = 1024
"""Tokens to come for which rows may share an axis. Each has slots for all of them: such a cache never grows."""
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


@dataclass
class Room:
    """Layers of a static cache.

    Attributes:
        columns: The columns that a row may have: those of the prompt, and the tokens to come.
        offsets_B: What is added to a row's column to get its slot; None where all rows have slots of their own.
    """

    layers: list[Any]
    size: Size
    columns: int
    offsets_B: Tensor | None = None

    def slots_of(self, rows_T: Tensor, columns_T: Tensor) -> Slots:
        """Return the slots of tokens in some columns of rows."""
        if self.offsets_B is None:
            return Slots(self.layers, rows_T, columns_T)
        return Slots(self.layers, torch.zeros_like(rows_T), columns_T + self.offsets_B[rows_T])

    def states_of(self, index: int, rows: Sequence[int], columns: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, K, C, D) of the first columns of some rows of a shared axis."""
        assert self.offsets_B is not None
        layer = self.layers[index]
        offsets_B = self.offsets_B[torch.tensor(rows, device=self.offsets_B.device)]
        slots_BC = (offsets_B[:, None] + torch.arange(columns, device=offsets_B.device)).clamp_min(0)
        keys, values = (states[0][:, slots_BC].transpose(0, 1) for states in (layer.keys, layer.values))
        return keys, values


@dataclass(frozen=True)
class SharedAxis:
    """A plan of rows on one axis: the size of the cache, the columns that fit, and every row's offset."""

    size: Size
    columns: int
    offsets: list[int]


def plan_axis(lengths: Sequence[int], columns: int, due: int, slots: int) -> SharedAxis | None:
    """Plan one axis for all rows; None if rows of equal slots are as good.

    Args:
        lengths: The columns of every row from its first token on.
        columns: Those of the longest row.
        due: Tokens to come.
        slots: What every row would have otherwise.
    """
    if due > _MOST_DUE:
        return None
    after = due + 2  # a capture writes two tokens behind the prompt
    longest = _padded(columns + after)
    offsets = []
    begin = 0
    for length in lengths:
        offsets.append(begin - (columns - length))
        begin += _padded(length + after)
    size = Size(1, slots_for(begin), slots_for(longest))
    if size.slots > _WORTH * len(lengths) * min(longest, slots):
        return None
    return SharedAxis(size, columns + after, offsets)


def _padded(slots: int) -> int:
    return -(-slots // _UNIT) * _UNIT


class SharedLayer(DynamicLayer):
    """A layer of the call's cache whose keys and values lie on the axis of a room, until they are read or set."""

    def __init__(self, room: Room, index: int, columns: int) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        super().__init__()
        self._index = index
        self.room = room
        self.columns = columns
        on_axis = room.layers[index].keys
        self.dtype, self.device = on_axis.dtype, on_axis.device
        self.is_initialized = True

    @property
    def is_shared(self) -> bool:
        """Whether nothing has set keys or values."""
        return self._keys is None and self._values is None

    def get_seq_length(self) -> int:
        return self.columns if self.is_shared else super().get_seq_length()

    def of_rows(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows, as stock keeps them."""
        if not self.is_shared:
            return self.keys[rows], self.values[rows]
        return self.room.states_of(self._index, rows, self.columns)

    def _of_all_rows(self) -> tuple[Tensor, Tensor]:
        assert self.room.offsets_B is not None
        return self.room.states_of(self._index, range(len(self.room.offsets_B)), self.columns)

    @property
    def keys(self) -> Any:
        return self._of_all_rows()[0] if self._keys is None else self._keys

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._keys = states

    @property
    def values(self) -> Any:
        return self._of_all_rows()[1] if self._values is None else self._values

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._values = states


def room_of(cache: Any) -> Room | None:
    """Return the room whose axis the rows of a cache share; None for a cache of tensors."""
    layer = cache.layers[0]
    return layer.room if isinstance(layer, SharedLayer) and layer.is_shared else None
