"""Scales by which numbers fit into e4m3, the numbers of FP8 attention, and their tensors for the layers of a tower.

Scales are powers of two. e4m3 keeps three bits of mantissa at every exponent. So a scale decides only which numbers
overflow, and which are lost below the smallest one. Two powers of two that avoid both give the same result. Therefore a
scale may follow from a sample of the rows, with room for the others.

`L` layers, `H` heads; 3 stands for q, k, v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_vit_accel.config import Amax
from hf_vit_accel.layout import settle
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


@dataclass(kw_only=True, eq=False)
class Scales:
    """The scales of one tower's layers on one device.

    Attributes:
        fixed: amax of a file; None to scale every call by its own amax.
        scaling_L43H: of every layer, the `scaling_43H` of `quantize`: expected amax, true amax, scales, and the factor
            of the scores. Kept with fixed amax, and after `record_amax`; None otherwise.
    """

    device: torch.device
    layers: int
    heads: int
    fixed: Amax | None = None
    source: str = ""
    min_seqlen: int | None = None
    scaling_L43H: Tensor | None = None

    def __post_init__(self) -> None:
        if self.fixed is None:
            return
        with torch.inference_mode(False):
            # A head that was silent during the calibration still gets room.
            amax_L3H = self.fixed.amax_L3H * self.fixed.margin
            amax_L3H = amax_L3H.clamp(min=amax_L3H.amax(-1, keepdim=True) / 256)
            self.scaling_L43H = torch.zeros(len(amax_L3H), 4, *amax_L3H.shape[1:], device=self.device)
            self.scaling_L43H[:, 0] = torch.where(amax_L3H == 0, 1.0, amax_L3H)
        settle(self.device)

    def record_amax(self) -> None:
        """Keep the true amax of the last call from now on. Calls must come one after the other, on one stream."""
        self.scaling_L43H = torch.zeros(self.layers, 4, 3, self.heads, device=self.device)

    def scaling_of(self, layer: int) -> Tensor:
        """Return the tensor `scaling_43H` of `quantize` for one call of a layer."""
        if self.scaling_L43H is None:
            return torch.empty(4, 3, self.heads, device=self.device)
        return self.scaling_L43H[layer]

    def recorded_amax(self) -> Tensor:
        """Return the true amax that was kept, (L, 3, H) on the host; waits for the device."""
        assert self.scaling_L43H is not None
        return self.scaling_L43H[:, 1].to("cpu", copy=True)

    def saturated(self) -> list[int]:
        """List the layers in which numbers exceeded the scales of the file and were cut off."""
        if self.fixed is None or self.scaling_L43H is None:
            return []
        over = self.recorded_amax() * fit(self.scaling_L43H[:, 0].cpu()) > LARGEST
        return [int(layer) for layer in over.flatten(1).any(1).nonzero()]

    def report(self) -> str:
        """Describe for `status` how attention is scaled, and in which layers values were cut off."""
        saturated = ", ".join(str(layer) for layer in self.saturated())
        return f"scaled by {self.source}" + (f", cut off beyond them in layers {saturated}" if saturated else "")

    def wait_for_writes(self) -> None:
        """Wait until no queued work writes to the memory of this object."""
        if self.scaling_L43H is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
