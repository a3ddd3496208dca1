"""M-RoPE positions of text and images, without loops: the integers of transformers' `get_rope_index`.

`B` samples of `S` tokens, `T` tokens that are no padding, `R` runs of tokens of one kind, `N` images.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_vit_accel.families import Model
from hf_vit_accel.model.host import Arguments

Array = NDArray[np.int64]
_NAMES = ("input_ids", "mm_token_type_ids", "attention_mask", "image_grid_thw")


def image_positions(arguments: Arguments, merge: int) -> tuple[Tensor, Tensor] | None:
    """Return position ids (3, B, S) and rope deltas (B, 1), computed at once for all samples, of `get_rope_index`.

    None for a batch with other arguments, with videos, or whose runs of tokens do not fit their images.
    """
    ids, kinds, mask, grid = [arguments.get(name) for name in _NAMES]
    others = [name for name, value in arguments.items() if name.endswith("grid_thw") and value is not None]
    if not isinstance(ids, Tensor) or not isinstance(kinds, Tensor) or ids.dtype != torch.long or len(others) != 1:
        return None
    if grid is None or ids.shape != kinds.shape or (mask is not None and mask.shape != ids.shape):
        return None
    kept_BS = np.ones(ids.shape, bool) if mask is None else mask.numpy() != 0
    kinds_T = kinds.numpy()[kept_BS]
    lengths_B = kept_BS.sum(1)
    if not lengths_B.size or not lengths_B.all() or kinds_T.min() < 0 or kinds_T.max() > 1:
        return None
    samples_B = lengths_B.cumsum() - lengths_B
    begins_T = np.diff(kinds_T, prepend=2) != 0
    begins_T[samples_B] = True
    starts_R = np.flatnonzero(begins_T)
    sizes_R = np.diff(starts_R, append=len(kinds_T))
    is_image_R = kinds_T[starts_R] == 1
    grid_N3 = grid.numpy()[: is_image_R.sum()]
    rows_N, columns_N = (grid_N3[:, 1:] // merge).T
    if not np.array_equal(sizes_R[is_image_R], rows_N * columns_N) or (grid_N3[:, 0] != 1).any():
        return None
    steps_R = sizes_R.copy()
    steps_R[is_image_R] = np.maximum(rows_N, columns_N)
    columns_R = np.ones_like(sizes_R)
    columns_R[is_image_R] = columns_N
    ends_R = steps_R.cumsum()
    first_runs_B = np.searchsorted(starts_R, samples_B)
    before_B = (ends_R - steps_R)[first_runs_B]
    runs_B = np.diff(first_runs_B, append=len(starts_R))
    offsets_T = np.repeat(ends_R - steps_R - np.repeat(before_B, runs_B), sizes_R)
    indices_T = np.arange(len(kinds_T)) - np.repeat(starts_R, sizes_R)
    columns_T = np.repeat(columns_R, sizes_R)
    rows_T = indices_T // columns_T
    within_images = 0, rows_T, indices_T - rows_T * columns_T
    positions_3BS = np.zeros((3, *ids.shape), np.int64)
    for positions_BS, within_T in zip(positions_3BS, within_images, strict=True):  # all at once take ten times as long
        positions_BS[kept_BS] = offsets_T + np.where(kinds_T == 1, within_T, indices_T)
    deltas_B = np.append(before_B[1:], ends_R[-1]) - before_B - lengths_B
    return torch.from_numpy(positions_3BS), torch.from_numpy(deltas_B)[:, None]


def numbers_images_alike(model: Model) -> bool:
    """Return whether the model's own method numbers a small batch alike, with and without padding."""
    merge = model.config.vision_config.spatial_merge_size
    with torch.device("cpu"):
        kinds = torch.tensor([[0] * 4 + [1] * 6 + [0] * 2 + [1] + [0] * 4, [0] * 5 + [1] * 6 + [0] * 6, [0] * 17])
        grid = torch.tensor([[1, 2 * merge, 3 * merge], [1, merge, merge], [1, 3 * merge, 2 * merge]])
        mask = torch.ones_like(kinds)
        mask[0, :2] = mask[1, -3:] = mask[2, 8] = 0
        for attention_mask in (mask, None):
            values = kinds + 5, kinds, attention_mask, grid
            arguments = dict(zip(_NAMES, values, strict=True))
            ours = image_positions(arguments, merge)
            expected = type(model).get_rope_index(model, **arguments)
            if ours is None or not all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True)):
                return False
    return True
