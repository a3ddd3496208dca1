"""What FP8 attention is told of the sizes of numbers: amax in a file, and what of it lies on the device.

`L` layers, `H` heads; 3 stands for q, k, v.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_vit_accel.layout import settle
from hf_vit_accel.ops.fp8.e4m3 import LARGEST, fit

_FORMAT, _VERSION = "hf-vit-accel fp8 amax", 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Amax:
    """Absolute amax of q, k (rotated) and v, by layer and head, in the model's own units; fp32, on the host.

    margin: what they are multiplied by before scales follow from them. model: the family that they were found with.
    """

    amax_L3H: Tensor
    margin: float
    model: str = ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file of its own format; returns its path."""
        layers = [dict(zip("qkv", layer, strict=True)) for layer in self.amax_L3H.tolist()]
        content = {"format": _FORMAT, "version": _VERSION, "model": self.model, "margin": self.margin, "layers": layers}
        path = Path(path)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Amax:
        """Read such a file. Raises ValueError for anything else, FileNotFoundError where there is none."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"its format is not {_FORMAT!r}, version {_VERSION}")
            margin, parts = float(content["margin"]), [[layer[part] for part in "qkv"] for layer in content["layers"]]
            amax_L3H = torch.tensor(parts, dtype=torch.float32, device="cpu")
            if amax_L3H.dim() != 3 or not amax_L3H.numel():
                raise ValueError("layers, or q, k and v, have different numbers of heads, or none")
            # What is no number is not at least 0; numbers, or numbers times the margin, may be larger than any model's.
            if not (margin >= 1 and (amax_L3H >= 0).all() and (amax_L3H * margin).isfinite().all()):
                raise ValueError("numbers are not finite and at least 0, with a margin of at least 1")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"expected FP8 amax in {path}: {type(error).__name__}: {error}; make the file by hf_vit_accel.calibrate"
            ) from error
        return cls(amax_L3H=amax_L3H, margin=margin, model=str(content.get("model", "")))


@dataclass(kw_only=True, eq=False)
class Scales:
    """The scales of one tower's layers on one device.

    fixed: amax of a file; then calls_L43H holds what `ops.quantize` is to know of each layer, and the largest amax that
    were found. None: every call finds its own, and keeps nothing, but for `watch`. min_seqlen: see `Fp8Config`.
    """

    device: torch.device
    layers: int
    heads: int
    fixed: Amax | None = None
    min_seqlen: int | None = None
    calls_L43H: Tensor | None = None

    def __post_init__(self) -> None:
        if self.fixed is None:
            return
        with torch.inference_mode(False):
            # A head that was silent while the file was made still gets room.
            amax_L3H = self.fixed.amax_L3H * self.fixed.margin
            amax_L3H = amax_L3H.clamp(min=amax_L3H.amax(-1, keepdim=True) / 256)
            self.calls_L43H = torch.zeros(len(amax_L3H), 4, *amax_L3H.shape[1:], device=self.device)
            self.calls_L43H[:, 0] = torch.where(amax_L3H == 0, 1.0, amax_L3H)
        settle(self.device)

    def why_unfit(self) -> str | None:
        """Why the file's amax cannot serve the tower, whose layers may have changed; None if they can."""
        layers, _, heads = (self.layers, 3, self.heads) if self.fixed is None else self.fixed.amax_L3H.shape
        if (layers, heads) == (self.layers, self.heads):
            return None
        return f"the file holds amax of {layers} layers of {heads} heads, the tower has {self.layers} of {self.heads}"

    def watch(self) -> None:
        """Keep what the last call found, for `seen`; for calls one after the other, on one stream."""
        self.calls_L43H = torch.zeros(self.layers, 4, 3, self.heads, device=self.device)

    def call(self, layer: int) -> Tensor:
        """What one call of a layer is quantised by, (4, 3, H); see `ops.quantize.quantize`."""
        if self.calls_L43H is None:
            return torch.empty(4, 3, self.heads, device=self.device)
        return self.calls_L43H[layer]

    def seen(self) -> Tensor:
        """The amax that were found and kept, (L, 3, H) on the host; waits for the device."""
        assert self.calls_L43H is not None
        return self.calls_L43H[:, 1].to("cpu", copy=True)

    def saturated(self) -> list[int]:
        """Layers in which numbers were above what the scales of the file leave room for, and so were cut off."""
        if self.fixed is None or self.calls_L43H is None:
            return []
        over = self.seen() * fit(self.calls_L43H[:, 0].cpu()) > LARGEST
        return [int(layer) for layer in over.flatten(1).any(1).nonzero()]

    def close(self) -> None:
        """Wait until nothing that was queued writes to the memory that goes with this."""
        if self.calls_L43H is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
