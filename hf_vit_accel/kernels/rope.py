"""Rotary position embedding on the packed projection.

`T` rows, `H` heads, `D` head dim; 3 stands for q, k, v.
"""

from __future__ import annotations

import torch

__all__ = ["rope_"]


def rope_(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate q and k in place, in fp32 and rounded once, as stock does (x * cos + rotate_half(x) * sin).

    cos_TD, sin_TD: fp32, both halves of D filled. Rotating on the packed projection leaves q, k and v as views of it.
    Returns qkv_T3HD.
    """
    cos, sin = cos_TD[:, None, None].float(), sin_TD[:, None, None].float()
    qk = qkv_T3HD[:, :2].float()
    half = qk.shape[-1] // 2
    turned = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
    qkv_T3HD[:, :2] = qk * cos + turned * sin
    return qkv_T3HD
