"""The static buffers of a graph, and what stands in the tail of each where a layout is smaller than the graph.

Sequence metadata is padded as if the spare rows were images of their own, attended by nobody else: a backend then plans
the padded segments as it plans any, so that its buffers need no rules here.
`T` packed patch rows, `M` merged tokens, `S` segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_vit_accel.layout import Segments, VisionMetadata


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a padded layout is padded to: rows and tokens of the budget; segments, max_seqlen of full layers; and
    windows, window_max_seqlen of window layers.
    """

    rows: int
    tokens: int
    segments: int
    max_seqlen: int
    windows: int = 0
    window_max_seqlen: int = 0


OF_ROWS = "position_ids_T2", "interp_indices_T4", "interp_weights_T4"
OF_TOKENS = "window_index_M", "inverse_index_M"
"""Buffers whose tail is zeros, and those whose tail stays where it is. The pixels' tail is cleared by the runner;
segments are padded by `pad_segments`."""


def pad_segments(segments: Segments, rows: int, count: int, max_seqlen: int) -> Segments:
    """`count` segments over `rows` rows: the given ones, the spare rows as even segments, then empty ones.

    Spare rows need at least one spare segment; none of them may be longer than `max_seqlen`.
    """
    spare_rows, spare = rows - segments.rows, count - segments.count
    used = min(spare, -(-spare_rows // min(max_seqlen, 64)))  # several short segments attend faster than one long one
    if spare_rows:
        assert used, (segments.count, count)
    lengths_S = np.zeros(count, dtype=np.int32)
    lengths_S[: segments.count] = segments.lengths_S
    if used:
        shares = np.full(used, spare_rows // used, dtype=np.int32)
        shares[: spare_rows % used] += 1
        lengths_S[segments.count : segments.count + used] = shares
    assert lengths_S.max() <= max_seqlen, (int(lengths_S.max()), max_seqlen)
    return Segments(lengths_S, max_seqlen, spare_rows)


def pad(metadata: VisionMetadata, shape: Shape) -> VisionMetadata:
    """A layout's metadata in the shape of a graph."""
    padded: dict[str, Any] = {}
    for name in (*OF_ROWS, *OF_TOKENS):
        if (array := getattr(metadata, name)) is not None:
            count = shape.rows if name in OF_ROWS else shape.tokens
            padded[name] = np.zeros((count, *array.shape[1:]), array.dtype)
            padded[name][: len(array)] = array
            if name in OF_TOKENS:
                padded[name][len(array) :] = np.arange(len(array), count)
    window = metadata.window
    if window is not None:
        window = pad_segments(window, shape.rows, shape.windows, shape.window_max_seqlen)
    full = pad_segments(metadata.full, shape.rows, shape.segments, shape.max_seqlen)
    return replace(metadata, rows=shape.rows, merged=shape.tokens, full=full, window=window, **padded)
