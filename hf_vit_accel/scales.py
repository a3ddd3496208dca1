"""What FP8 attention knows of the sizes of numbers: amax in a file, and amax of earlier calls on the device.

`L` layers, `H` heads, `N` calls remembered; 3 stands for q, k, v.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from hf_vit_accel.ops import e4m3

__all__ = ["Amax", "LayerScales", "Scales", "settle"]

_FORMAT, _VERSION = "hf-vit-accel fp8 amax", 1
_LARGEST_NUMBER = torch.finfo(torch.float32).max
_LARGEST_FILE = 64 << 20  # bytes; a file of 32 layers of 16 heads takes 40 KB


@dataclass(frozen=True, kw_only=True)
class Amax:
    """Absolute amax of q, k (rotated) and v: per layer, three lists of one number a head, in the model's own units.

    margin: what they are multiplied by before scales follow from them. model: the family that they were found with.
    """

    values: tuple[tuple[tuple[float, ...], ...], ...]
    margin: float
    model: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """(L, H)."""
        return len(self.values), len(self.values[0][0])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file of its own format; returns its path."""
        layers = [dict(zip("qkv", layer, strict=True)) for layer in self.values]
        content = {"format": _FORMAT, "version": _VERSION, "model": self.model, "margin": self.margin, "layers": layers}
        path = Path(path)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Amax:
        """Read such a file. Raises ValueError for anything else, FileNotFoundError where there is none."""
        path = Path(path)
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"expected a file of FP8 amax in {path}, got {path.stat().st_size} bytes, too many")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected JSON in {path}: {error}; make the file by hf_vit_accel.calibrate") from error
        try:
            return cls._from(content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"expected FP8 amax in {path}: {type(error).__name__}: {error}; make the file by hf_vit_accel.calibrate"
            ) from error

    @classmethod
    def _from(cls, content: Any) -> Amax:
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise ValueError(f"its format is not {_FORMAT!r}, version {_VERSION}")
        margin, layers = _number(content["margin"], least=1.0), content["layers"]
        if not isinstance(layers, list) or not layers:
            raise ValueError("layers is not a list, or empty")
        values = tuple(tuple(tuple(map(_number, _listed(layer[part]))) for part in "qkv") for layer in layers)
        if len({len(heads) for layer in values for heads in layer}) != 1:
            raise ValueError("layers, or q, k and v, have different numbers of heads")
        if max(number for layer in values for heads in layer for number in heads) * margin > _LARGEST_NUMBER:
            raise ValueError("numbers, or numbers times the margin, are larger than any of a model's")
        return cls(values=values, margin=margin, model=str(content.get("model", "")))


def _listed(values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{values!r} is not a list of numbers")
    return values


def _number(value: Any, least: float = 0.0) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number >= least):
        raise ValueError(f"{value!r} is not a finite number of at least {least:g}")
    return number


def settle(device: torch.device) -> None:
    """Let the host wait until what was queued on the current stream is there for all others, which do not wait."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True, eq=False)
class LayerScales:
    """What one layer of one call quantises by; see `kernels.quantize.quantize`. descale_1: None if it is to come."""

    scales_3H: torch.Tensor
    amax_3H: torch.Tensor
    amax_history_N3H: torch.Tensor | None
    position_1: torch.Tensor | None
    descale_1: torch.Tensor | None


class Scales:
    """One tower's scales on one device.

    Dynamic ones follow from the absolute maxima of the last calls, kept on the device: nothing of it depends on the
    host, so graphs may hold it. Streams that write to it at the same time can spoil each other's history, never a
    result: a call works on its own copy, and does its work again where that does not fit.

    calls: how many are remembered. fixed: amax of a file, instead. min_seqlen: see `Fp8Config`.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        layers: int,
        heads: int,
        calls: int = 1,
        fixed: Amax | None = None,
        min_seqlen: int | None = None,
    ) -> None:
        self.device, self.layers, self.heads, self.min_seqlen = device, layers, heads, min_seqlen
        self._calls, self._fixed = 1 if fixed else calls, fixed
        self._held: tuple[torch.Tensor, ...] | None = None
        self._lock = Lock()

    def why_unfit(self) -> str | None:
        """Why the file's amax cannot serve the tower, whose layers may have changed; None if they can."""
        if self._fixed is None or self._fixed.shape == (self.layers, self.heads):
            return None
        layers, heads = self._fixed.shape
        return f"the file holds amax of {layers} layers of {heads} heads, the tower has {self.layers} of {self.heads}"

    def allocate(self) -> tuple[torch.Tensor, ...]:
        """Make what lives on the device, if it is not there: before anything is captured, once for all streams."""
        with self._lock:
            if self._held is None:
                with torch.inference_mode(False):
                    self._held = self._made()
                settle(self.device)
            return self._held

    def _made(self) -> tuple[torch.Tensor, ...]:
        amax_history_LN3H = torch.zeros(self.layers, self._calls, 3, self.heads, device=self.device)
        position_L = torch.zeros(self.layers, dtype=torch.int32, device=self.device)
        if self._fixed is None:
            return amax_history_LN3H, position_L
        # A head that was silent while the file was made still gets room.
        amax_L3H = torch.tensor(self._fixed.values) * self._fixed.margin
        amax_L3H = amax_L3H.clamp(min=amax_L3H.amax(-1, keepdim=True) / 256)
        scales_L3H = e4m3.fit(torch.where(amax_L3H == 0, 1.0, amax_L3H))
        descale_L = 1 / (scales_L3H[:, 0, 0] * scales_L3H[:, 1, 0])
        return amax_history_LN3H, position_L, scales_L3H.to(self.device), descale_L.to(self.device)

    def begin(self) -> list[LayerScales]:
        """What each layer of a call that begins now quantises by."""
        amax_history_LN3H, position_L, *fixed = self.allocate()
        if fixed:
            scales_L3H, descale_L = fixed
            # The largest that was ever seen is kept where the history would be: status compares it with what fits.
            return [
                LayerScales(scales_L3H[layer], amax_history_LN3H[layer, 0], None, None, descale_L[layer : layer + 1])
                for layer in range(self.layers)
            ]
        scales_L3H, amax_L3H = e4m3.snapshot(amax_history_LN3H)
        return [
            LayerScales(
                scales_L3H[layer], amax_L3H[layer], amax_history_LN3H[layer], position_L[layer : layer + 1], None
            )
            for layer in range(self.layers)
        ]

    def seen(self) -> torch.Tensor:
        """The largest absolute amax that are remembered, (L, 3, H) on the host; waits for the device."""
        amax_history_LN3H, *_ = self.allocate()
        return amax_history_LN3H.amax(1).cpu()

    def saturated(self) -> list[int]:
        """Layers in which numbers were above what the scales of the file leave room for, and so were cut off."""
        if self._fixed is None or self._held is None:
            return []
        over = self.seen() * self._held[2].cpu() > e4m3.LARGEST
        return [int(layer) for layer in over.flatten(1).any(1).nonzero()]

    def close(self) -> None:
        """Give the device's memory back, once nothing that was queued can write to it."""
        if self._held is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._held = None
