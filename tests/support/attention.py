"""Segments, requests and exact results of attention, for every backend.

`T` rows, `S` segments, `H` heads, `D` head dim.
"""

import numpy as np
import torch

from hf_vit_accel.backends import Request
from hf_vit_accel.layout import Segments

LAYOUTS = {
    "one segment": [784],
    "one row": [1],
    "many": [256] * 9,
    "windows of 64": [64] * 37,
    "ragged": [64, 1, 300, 37, 64, 1, 129, 128, 64, 500, 2],
    "one-row segments": [1] * 17,
}
HEADS = 4


def segments_of(lengths: list[int]) -> Segments:
    return Segments(np.array(lengths, dtype=np.int32))


def request(device: str = "cpu", dtype: torch.dtype = torch.float32, head_dim: int = 80, **kwargs) -> Request:
    scale = 0.7 * head_dim**-0.5  # another one than torch's default
    return Request(device=torch.device(device), dtype=dtype, heads=HEADS, head_dim=head_dim, scale=scale, **kwargs)


def draw(rows: int, head_dim: int, dtype: torch.dtype, device: str, seed: int, packed: bool) -> list[torch.Tensor]:
    """Draw q, k and v (T, H, D).

    They are views of one packed projection, or q and k are tensors of their own, as after stock's rotation.
    """
    generator = torch.Generator().manual_seed(seed)
    qkv_T3HD = torch.randn(rows, 3, HEADS, head_dim, generator=generator).to(dtype).to(device)
    q, k, v = qkv_T3HD.unbind(1)
    return [q, k, v] if packed else [q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), v]


def exact(qkv: list[torch.Tensor], lengths: list[int], scale: float) -> torch.Tensor:
    """Compute attention within segments in float64."""
    outs = []
    for q, k, v in zip(*(x.double().split(lengths) for x in qkv), strict=True):
        weights_HTT = torch.einsum("thd,shd->hts", q, k).mul(scale).softmax(-1)
        outs.append(torch.einsum("hts,shd->thd", weights_HTT, v))
    return torch.cat(outs)
