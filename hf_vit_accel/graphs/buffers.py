"""Pads a layout to the size of a graph.

The spare rows become images of their own, which no other image attends to. So a backend plans the padded segments
like any others, and its buffers need no padding rules here.
`T` packed patch rows, `M` merged tokens, `S` segments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hf_vit_accel.graphs.budgets import most_windows
from hf_vit_accel.layout import Array, Geometry, Segments, VisionMetadata

ROW_ARRAYS = ("position_ids_T2", "interp_indices_TK", "interp_weights_TK")
"""Arrays with an entry per row; their tail is zeros. (The runner clears the pixels' tail.)"""
TOKEN_ARRAYS = ("window_index_M", "inverse_index_M")
"""Permutations of merged tokens; their tail stays in place."""


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
    """Return a layout's metadata, padded to the merged tokens of a budget, and in full layers to so many segments."""
    rows = tokens * geometry.merge**2
    padded: dict[str, Any] = {}
    for name in ROW_ARRAYS:
        array = getattr(metadata, name)
        if array is not None:
            padded[name] = _extended(array, rows)
    for name in TOKEN_ARRAYS:
        array = getattr(metadata, name)
        if array is not None:
            padded[name] = _extended(array, tokens)
            padded[name][len(array) :] = np.arange(len(array), tokens)
    window = metadata.window
    if window is not None and geometry.window is not None:
        windows = most_windows(tokens, segments, geometry.window)
        window = pad_segments(window, rows, windows, (geometry.window * geometry.merge) ** 2)
    full = pad_segments(metadata.full, rows, segments, max_seqlen)
    return replace(metadata, rows=rows, merged=tokens, full=full, window=window, **padded)


def _extended(array: Array, count: int) -> Array:
    """Return a copy with `count` entries; zeros follow the array's own."""
    extended = np.zeros((count, *array.shape[1:]), array.dtype)
    extended[: len(array)] = array
    return extended
