"""Which graphs serve a call: the ladder of budgets, the packing of images into replays, and whether replaying pays.

Pure functions of sizes. `tokens` are merged tokens, `frames` are segments of full layers, `rows` are patches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hf_vit_accel.layout import Grid

FRAMES = 256
"""Most frames in one replay: every declared segment costs time, even an empty one."""

_FINE = 64
_EAGER_LEAST, _EAGER_MORE, _REPLAY_MORE = 2400, 350, 60
"""Rows that take as long on an H200 as, in this order: the launches of an eager forward, what they cost a forward that
hides most of them behind its work, and what surrounds a replay (copies in and out). Qwen2.5-VL-7B and Qwen3-VL-8B:
784 patches take 7 ms eagerly whatever the GPU does, 4096 patches 12 to 13 ms of which 1.2 are gaps."""


def ladder(most: int) -> tuple[int, ...]:
    """Budgets up to `most` tokens: four to an octave, 64 tokens apart from 512 on. The mean padding is about 11%."""
    budgets, tokens = [], 4
    while tokens < most:
        budgets.append(tokens)
        tokens += min(max(4, 1 << (tokens.bit_length() - 3)), _FINE)
    return (*budgets, most)


def most_windows(tokens: int, frames: int, side: int) -> int:
    """The largest number of windows of side x side tokens that so many tokens in so many frames can be cut into.

    A frame one token high and k long has ceil(k / side) of them, no frame has more.
    """
    return (tokens + (side - 1) * min(frames, tokens)) // side


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Images first to last (exclusive) of a call, replayed together. budget: tokens; None for their exact shape."""

    first: int
    last: int
    tokens: int
    frames: int
    budget: int | None


def pack(grid: Grid, merge: int, budgets: Sequence[int]) -> list[Bin] | str:
    """Neighbouring images into as few replays as hold them by tokens and frames; or why the call runs eagerly."""
    most = budgets[-1]
    sizes = [(t * h * w // merge**2, t) for t, h, w in grid]
    if max(tokens for tokens, _ in sizes) > most:
        return f"an image or video exceeds the largest budget of {most} merged tokens"
    if max(frames for _, frames in sizes) >= FRAMES:
        return f"a video exceeds the {FRAMES - 1} frames of one replay"
    bins: list[Bin] = []
    first = tokens = frames = 0
    for index, (more_tokens, more_frames) in enumerate([*sizes, (most + 1, 0)]):
        if index == len(sizes) or tokens + more_tokens > most or frames + more_frames >= FRAMES:
            budget = budgets[bisect_left(budgets, tokens)]
            bins.append(Bin(first=first, last=index, tokens=tokens, frames=frames, budget=budget))
            first, tokens, frames = index, 0, 0
        tokens, frames = tokens + more_tokens, frames + more_frames
    return bins


def pays(bins: Sequence[Bin], merge: int) -> bool:
    """Whether replaying the bins, padding included, takes no longer than one eager forward over all of them."""
    rows = sum(bin_.tokens for bin_ in bins) * merge**2
    replayed = sum((bin_.budget or bin_.tokens) * merge**2 + _REPLAY_MORE for bin_ in bins)
    return replayed <= max(rows + _EAGER_MORE, _EAGER_LEAST)
