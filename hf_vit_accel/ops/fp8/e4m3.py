"""Scales by which numbers fit into e4m3.

Scales are powers of two. e4m3 keeps three bits of mantissa at every exponent. So a scale decides only which numbers
overflow, and which are lost below the smallest one. Two powers of two that avoid both give the same result. Therefore a
scale may follow from a sample of the rows, with room for the others.

`H` heads; 3: q, k, v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel.ops.launch import device_function, tl

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
# Exponents of scales. Within these, a product of two scales divided by a third one is a normal number in float32.
_LOWEST_POWER = -50
_HIGHEST_POWER = 25


def powers(amax: Tensor) -> Tensor:
    """Return the largest powers of two, fp32, by which every absolute amax fits into e4m3."""
    mantissa, exponent = torch.frexp(amax.float())  # mantissa in [0.5, 1); 448 = 0.875 * 2**9
    power = torch.where(mantissa > 0.875, 8 - exponent, 9 - exponent).clamp(_LOWEST_POWER, _HIGHEST_POWER)
    power = torch.where(amax == 0, _HIGHEST_POWER, power)
    return torch.ldexp(torch.ones_like(amax, dtype=torch.float32), power)


def fit(amax_3H: Tensor) -> Tensor:
    """Return scales (..., 3, H) by which absolute amax (..., 3, H) fit into e4m3: x * scale is at most `LARGEST`.

    v has the largest power of two that fits, head by head. The product of q's and k's scale is the same for all heads,
    since the attention has one factor for all scores. Both are reduced alike to reach that product: otherwise one of
    the two would sink to zero in heads whose scores are 10,000 times smaller than another head's.
    """
    q_H, k_H, v_H = powers(amax_3H).unbind(-2)
    product = (q_H * k_H).amin(-1, keepdim=True)
    excess = torch.frexp(q_H * k_H).exponent - torch.frexp(product).exponent
    k_H = torch.ldexp(k_H, -(excess // 2))
    return torch.stack((product / k_H, k_H, v_H), -2)


@device_function
def device_power(amax):
    """Compute `powers` within a kernel."""
    bits = amax.to(tl.int32, bitcast=True)
    power = 8 - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -50), 25)  # _LOWEST_POWER, _HIGHEST_POWER
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@device_function
def rounded(x, scale):
    """Round scaled numbers to e4m3 within a kernel; the hardware cuts too large numbers off at the largest one."""
    return (x * scale + (x - x)).to(tl.float8e4nv)  # x - x is NaN for infinite x, 0 otherwise


@device_function
def device_fit(amax, head, HEADS: tl.constexpr):
    """Compute `fit` within a kernel, from a pointer to amax (3, H): scales of q, k and v, and q's times k's."""
    inside = head < HEADS
    q = device_power(tl.load(amax + head, mask=inside, other=0.0))
    k = device_power(tl.load(amax + HEADS + head, mask=inside, other=0.0))
    v = device_power(tl.load(amax + 2 * HEADS + head, mask=inside, other=0.0))
    product = tl.min(tl.where(inside, q * k, float("inf")))
    excess = ((q * k).to(tl.int32, bitcast=True) >> 23) - (product.to(tl.int32, bitcast=True) >> 23)
    k = k * ((127 - (excess >> 1)) << 23).to(tl.float32, bitcast=True)
    return product / k, k, v, product
