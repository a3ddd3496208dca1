"""Absolute maxima (amax) for FP8 attention: a file of them, and their tensors on the device.

`L` layers, `H` heads; 3 stands for q, k, v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_vit_accel.config import Amax
from hf_vit_accel.layout import settle
from hf_vit_accel.ops.fp8.e4m3 import LARGEST, fit


@dataclass(kw_only=True, eq=False)
class Scales:
    """The scales of one tower's layers on one device.

    Attributes:
        fixed: amax of a file; None to scale every call by its own amax.
        source: where the scales come from, for `status`.
        min_seqlen: see `Fp8Config`.
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

    def why_unfit(self) -> str | None:
        """Report why the file's amax does not fit the tower, whose layers may have changed; None if it does."""
        layers, _, heads = (self.layers, 3, self.heads) if self.fixed is None else self.fixed.amax_L3H.shape
        if (layers, heads) == (self.layers, self.heads):
            return None
        return f"the file holds amax of {layers} layers of {heads} heads, the tower has {self.layers} of {self.heads}"

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
