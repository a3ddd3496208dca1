"""What a patched tower keeps between calls, and what differs between families of towers.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_vit_accel.backends import Choice, Kind, Request
from hf_vit_accel.boundary import Settings
from hf_vit_accel.faults import KERNELS
from hf_vit_accel.fusion import Fusion, fuse_tower
from hf_vit_accel.graphs.call import Ahead
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.metadata import LRU, Geometry, Grid, capturing
from hf_vit_accel.planning import Prepared, prepare, stream_id
from hf_vit_accel.scales import Scales
from hf_vit_accel.structure import Structure

__all__ = ["Family", "TowerState"]

_CAPTURED: list[Any] = []  # what CUDA graphs that are not ours read at every replay: when they go is not known


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between families of towers.

    towers: (module, class) of each tower class in transformers. output: name of the output class in that module.
    geometry: what decides the sequence metadata. full_layers: indices of layers that attend per frame where others
    attend per window; None where all do. deepstack: whether chosen layers' outputs are merged and returned too.
    """

    name: str
    towers: tuple[tuple[str, str], ...]
    output: str
    geometry: Callable[[Any], Geometry]
    full_layers: Callable[[Any], Iterable[int]] | None = None
    deepstack: bool = False

    def tower_class(self, module: nn.Module) -> type[nn.Module] | None:
        """The tower class that a module is an instance of, or None. Imports nothing: an instance has its class."""
        for module_name, class_name in self.towers:
            known = getattr(sys.modules.get(module_name), class_name, None)
            if known is not None and isinstance(module, known):
                return known  # type: ignore[no-any-return]
        return None


class TowerState:
    """Everything mutable about one patched tower. Its copies and pickles keep the configuration only.

    former_name: the attention name that the config had, None if it was loaded with one of ours. former_forward: the
    instance forward that was there, if any.
    """

    def __init__(self, family: Family, settings: Settings, *, former_name: str | None) -> None:
        self.family, self.settings, self.former_name = family, settings, former_name
        self.former_forward: Callable[..., Any] | None = None
        self.calls = self.stock_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.choices: Mapping[Kind, Choice] = {}
        self.faults: Mapping[str, str] = {}  # what failed when it ran, and is not used until the tower is patched anew
        self.prepared: LRU[Prepared] = LRU(entries=64, cost=1 << 20)  # cost: bytes, at most 2% of the weights
        self.runner = None if settings.graphs is None else Runner(settings.graphs)
        self._device: torch.device | None = None
        self._structure: Structure | None = None
        self._scales: Scales | None = None
        self._fusion: tuple[Structure, torch.device, torch.dtype, Fusion] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("family", "settings", "former_name", "former_forward")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        former_forward = state.pop("former_forward")
        self.__init__(state.pop("family"), state.pop("settings"), **state)  # type: ignore[misc]
        self.former_forward = former_forward

    def structure(self, tower: nn.Module) -> tuple[Structure, list[nn.Parameter]]:
        """The tower's structure, read again if it changed, and its parameters as they are now."""
        structure = self._structure
        parameters = [] if structure is None else structure.parameters()
        if structure is None or not structure.current(parameters):
            self._structure = structure = Structure(tower)
            parameters = structure.parameters()
            self.prepared.cost = max(1 << 20, structure.nbytes // 50)
        return structure, parameters

    def start(self, grid: Grid, pixels_TP: torch.Tensor) -> Ahead | None:
        """Begin the replay that this grid will most likely be served by; see `Runner.start`."""
        if self.runner is None or self._structure is None:
            return None
        return self.runner.start(grid, pixels_TP, self._structure.pointers(self._structure.parameters()))

    def fusion(self, tower: nn.Module, structure: Structure, device: torch.device, dtype: torch.dtype) -> Fusion:
        """The tower's fused operations, chosen again if its structure, device or dtype changed."""
        key, held = (structure, device, dtype), self._fusion
        if held is None or held[:3] != key:
            self._fusion = held = *key, fuse_tower(tower, self.settings.fuse, device, dtype, self.faults.get(KERNELS))
        return held[3]

    def scales(self, tower: Any, device: torch.device) -> Scales | None:
        """What FP8 attention on a device knows of earlier calls; None where FP8 is not asked for."""
        fp8, held = self.settings.fp8, self._scales
        if fp8 is None:
            return None
        layers, heads = len(tower.blocks), tower.blocks[0].attn.num_heads
        if held is None or (held.device, held.layers, held.heads) != (device, layers, heads):
            if held is not None:
                if self.runner is not None:
                    self.runner.close()  # its graphs write to the memory that goes
                held.close()
            self._scales = held = Scales(
                device=device,
                layers=layers,
                heads=heads,
                calls=fp8.history,
                fixed=self.settings.maxima,
                shortest=fp8.shortest,
            )
        return held

    def saturated(self) -> list[int]:
        """Layers in which FP8 attention cut numbers off."""
        return [] if self._scales is None else self._scales.saturated()

    def go_without(self, faults: Mapping[str, str]) -> None:
        """Choose everything anew, without what failed."""
        self.faults = faults
        self.close()

    def close(self) -> None:
        """Drop everything that was cached, device memory included."""
        if self.runner is not None:
            self.runner.close()
        if self._scales is not None:
            self._scales.close()
        self.prepared.clear()
        self._structure = self._fusion = self._scales = None

    def prepare(self, geometry: Geometry, grid: Grid, request: Request, *, fused_windows: bool) -> Prepared:
        """Metadata and plans for a grid: from the cache, or computed on the host and sent in one copy.

        fused_windows: window layers need no plan where a kernel of ours attends them.
        Raises RuntimeError while someone else's CUDA graph is captured, for a layout that is not there yet.
        """
        if request.device != self._device:
            self.prepared.clear()
            self._device = request.device
        layout = grid, geometry, request, self.settings.attention, fused_windows
        if capturing(request.device) and (known := self.prepared.find(lambda key: key[0] == layout)) is not None:
            # Someone else's CUDA graph. Whoever captures has waited for all streams.
            if all(held is not known for held, _ in _CAPTURED):
                _CAPTURED.append((known, None if request.fp8 is None else request.fp8.allocate()))
            return known
        return self.prepared.get(
            (layout, stream_id(request.device)),
            lambda: prepare(grid, geometry, request, self.settings.attention, fused_windows, self.faults),
        )
