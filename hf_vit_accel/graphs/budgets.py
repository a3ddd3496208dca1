"""Decides which graphs a call replays: the budgets, the packing of images into replays, and whether a replay pays.

It also pads a layout to a budget. The spare rows become images of their own, which no other image attends to. So a
backend plans the padded segments like any others, and its buffers need no padding rules here.
All functions are pure. Units: `tokens` are merged tokens, `frames` segments of full layers, `rows` patches.
In names of arrays: `T` packed patch rows, `M` merged tokens, `S` segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from hf_vit_accel.layout import Array, Geometry, Grid, Segments, VisionMetadata

FRAMES = 256
"""Most frames of one replay: every declared segment costs time, even an empty one."""

_FINE = 64
"""Most tokens between two budgets."""

_EAGER_LEAST = 2400
"""Rows that a GPU computes while the host launches an eager forward (7 ms on an H200, docs/benchmarks.md#hosts)."""
_EAGER_GAP_ROWS = 350
"""Rows that a GPU computes in the gaps of a longer forward, which hides most launches (1.2 ms)."""
_REPLAY_COPY_ROWS = 60
"""Rows that a GPU computes in the time of the copies in and out that surround a replay."""


def ladder(largest: int) -> tuple[int, ...]:
    """Return the budgets up to `largest` tokens.

    There are four to an octave, and from 512 on one every 64 tokens. The mean padding is about 11%.
    """
    budgets = []
    tokens = 4
    while tokens < largest:
        budgets.append(tokens)
        tokens += min(max(4, 1 << (tokens.bit_length() - 3)), _FINE)
    return (*budgets, largest)


@lru_cache(maxsize=16)
def in_tokens(budgets: tuple[int, ...], merge: int) -> tuple[int, ...]:
    """Return budgets in a tower's own tokens, `merge` x `merge` patches each.

    Budgets are meant for 2 x 2 patches, so a tower that merges no patches has four times as many tokens.
    """
    factor = max(1, 4 // merge**2)
    return tuple(budget * factor for budget in budgets)


def most_windows(tokens: int, frames: int, side: int) -> int:
    """Return the most windows that any layout of this size has.

    A frame that is one token high and k long has ceil(k / side) windows. No other frame of k tokens has more.
    """
    return (tokens + (side - 1) * min(frames, tokens)) // side


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Neighbouring images of a call, from `first` to before `last`, that one graph replays; no budget if exactly."""

    first: int
    last: int
    tokens: int
    budget: int | None


def pack(grid: Grid, merge: int, budgets: tuple[int, ...]) -> tuple[Bin, ...] | str:
    """Pack neighbouring images into as few bins as tokens and frames allow; or return why the call runs eagerly."""
    largest = budgets[-1]
    tokens_of = [t * h * w // merge**2 for t, h, w in grid]
    frames_of = [t for t, _, _ in grid]
    if max(tokens_of) > largest:
        return f"an image or video exceeds the largest budget of {largest} merged tokens"
    if max(frames_of) >= FRAMES:
        return f"a video exceeds the {FRAMES - 1} frames of one replay"
    bins: list[Bin] = []
    first = tokens = frames = 0
    for index in range(len(grid) + 1):
        is_end = index == len(grid)
        if is_end or tokens + tokens_of[index] > largest or frames + frames_of[index] >= FRAMES:
            budget = budgets[bisect_left(budgets, tokens)]
            bins.append(Bin(first=first, last=index, tokens=tokens, budget=budget))
            first = index
            tokens = frames = 0
        if not is_end:
            tokens += tokens_of[index]
            frames += frames_of[index]
    return tuple(bins)


def pays(bins: Sequence[Bin], merge: int) -> bool:
    """Return whether replaying the bins, padding included, takes no longer than one eager forward."""
    rows = sum(bin_.tokens for bin_ in bins) * merge**2
    replayed = sum((bin_.budget or bin_.tokens) * merge**2 + _REPLAY_COPY_ROWS for bin_ in bins)
    return replayed <= max(rows + _EAGER_GAP_ROWS, _EAGER_LEAST)


def pad_segments(segments: Segments, rows: int, count: int, max_seqlen: int) -> Segments:
    """Pad to `count` segments over `rows` rows: the segments, then the spare rows in even parts, then empty ones.

    Spare rows need at least one spare segment. No part may be longer than `max_seqlen`.
    """
    spare_rows = rows - segments.rows
    spare_segments = count - segments.count
    parts = min(spare_segments, -(-spare_rows // min(max_seqlen, 64)))  # short segments attend faster than one long one
    if spare_rows:
        assert parts, (segments.count, count)
    lengths_S = np.zeros(count, dtype=np.int32)
    lengths_S[: segments.count] = segments.lengths_S
    if parts:
        shares = np.full(parts, spare_rows // parts, dtype=np.int32)
        shares[: spare_rows % parts] += 1
        lengths_S[segments.count : segments.count + parts] = shares
    assert lengths_S.max() <= max_seqlen, (int(lengths_S.max()), max_seqlen)
    return Segments(lengths_S, max_seqlen, spare_rows)


def pad(metadata: VisionMetadata, geometry: Geometry, tokens: int, segments: int, max_seqlen: int) -> VisionMetadata:
    """Return a layout's metadata, padded to the merged tokens of a budget, and in full layers to so many segments.

    The tail of arrays with an entry per row is zeros. (The runner clears the pixels' tail.) That of permutations stays
    in place.
    """
    rows = tokens * geometry.merge**2
    of_rows = {name: _extended(array, rows) for name, array in metadata.of_rows.items()}
    of_tokens: dict[str, Array] = {}
    for name, array in metadata.of_tokens.items():
        of_tokens[name] = _extended(array, tokens)
        of_tokens[name][len(array) :] = np.arange(len(array), tokens)
    window = metadata.window
    if window is not None and geometry.window is not None:
        windows = most_windows(tokens, segments, geometry.window)
        window = pad_segments(window, rows, windows, (geometry.window * geometry.merge) ** 2)
    full = pad_segments(metadata.full, rows, segments, max_seqlen)
    return replace(
        metadata,
        rows=rows,
        merged=tokens,
        full=full,
        window=window,
        of_rows=MappingProxyType(of_rows),
        of_tokens=MappingProxyType(of_tokens),
    )


def _extended(array: Array, count: int) -> Array:
    """Return a copy with `count` entries; zeros follow the array's own."""
    extended = np.zeros((count, *array.shape[1:]), array.dtype)
    extended[: len(array)] = array
    return extended
