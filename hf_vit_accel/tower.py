"""The one accelerated forward that all families share, and its state.

The way of the data: pixels and `grid_thw` -> metadata on the host (once) -> a plan per kind of layer (once) -> blocks.
Only a tower's `forward` is patched, on the instance. At its boundary, once per forward, it is decided whether this
call takes the fast path (`_run`, an own loop over the blocks' modules) or goes the stock way: the original forward,
with the metadata injected through the keyword arguments that it pops.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_vit_accel.backends import ORDER, Choice, Kind, Plan, Request
from hf_vit_accel.fusion import PARTS, Fusion, fuse_tower
from hf_vit_accel.kernels import window_attention
from hf_vit_accel.metadata import LRU, Geometry, Grid, read_grid
from hf_vit_accel.planning import POPPED, Prepared, check_pixels, prepare
from hf_vit_accel.structure import Structure

__all__ = [
    "FallbackError",
    "Family",
    "Settings",
    "TowerState",
    "install",
    "request_for",
    "state_of",
    "uninstall",
]

_STATE = "_hf_vit_accel"
_SLOTS = ("forward", "_old_forward")
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class FallbackError(RuntimeError):
    """Under `strict=True`: a call that would have left the fast path or the named backend, with the reasons."""


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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for; see `hf_vit_accel.patch`. fuse: the parts, named one by one or not."""

    attention: str = "auto"
    fuse: frozenset[str] = frozenset(PARTS)
    fuse_named: bool = False
    strict: bool = False


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
        self.prepared: LRU[Prepared] = LRU(entries=64, cost=1 << 20)  # cost: bytes, at most 2% of the weights
        self._device: torch.device | None = None
        self._structure: Structure | None = None
        self._fusion: tuple[Structure, torch.device, torch.dtype, Fusion] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("family", "settings", "former_name", "former_forward")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        former_forward = state.pop("former_forward")
        self.__init__(state.pop("family"), state.pop("settings"), **state)  # type: ignore[misc]
        self.former_forward = former_forward

    def structure(self, tower: nn.Module) -> Structure:
        """The tower's structure, read again if it changed."""
        structure = self._structure
        if structure is None or not structure.current():
            self._structure = structure = Structure(tower)
            self.prepared.cost = max(1 << 20, structure.nbytes // 50)
        return structure

    def fusion(self, tower: nn.Module, structure: Structure, device: torch.device, dtype: torch.dtype) -> Fusion:
        """The tower's fused operations, chosen again if its structure, device or dtype changed."""
        key, held = (structure, device, dtype), self._fusion
        if held is None or held[:3] != key:
            self._fusion = held = *key, fuse_tower(tower, self.settings.fuse, device, dtype)
        return held[3]

    def close(self) -> None:
        """Drop everything that was cached, device memory included."""
        self.prepared.clear()
        self._structure = self._fusion = None

    def prepare(self, geometry: Geometry, grid: Grid, request: Request, *, fused_windows: bool) -> Prepared:
        """Metadata and plans for a grid: from the cache, or computed on the host and sent in one copy.

        fused_windows: window layers need no plan where a kernel of ours attends them.
        """
        if request.device != self._device:
            self.prepared.clear()
            self._device = request.device
        # The copy is queued on one stream; another stream must not read it before it arrived.
        stream = torch.cuda.current_stream(request.device).cuda_stream if request.device.type == "cuda" else 0
        return self.prepared.get(
            (grid, geometry, request, self.settings.attention, stream, fused_windows),
            lambda: prepare(grid, geometry, request, self.settings.attention, fused_windows),
        )


def state_of(tower: nn.Module) -> TowerState | None:
    """The state of a patched tower; None for a stock one."""
    return vars(tower).get(_STATE)


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and, on the instance, the accelerated forward. Replaces the state of a patched one."""
    patched = state_of(tower)
    vars(tower)[_STATE] = state
    slot = _forward_slot(tower)
    if patched is None:
        state.former_forward = vars(tower).get(slot)
    else:
        state.former_forward = patched.former_forward
        slot = next((s for s in _SLOTS if isinstance(vars(tower).get(s), AcceleratedForward)), slot)
        if patched is not state:
            patched.close()
    vars(tower)[slot] = AcceleratedForward(tower, state)


def uninstall(tower: nn.Module) -> TowerState | None:
    """Take state and forward off a tower and put back an instance forward that was there before."""
    state: TowerState | None = vars(tower).pop(_STATE, None)
    if state is None:
        return None
    for slot in _SLOTS:
        if isinstance(vars(tower).get(slot), AcceleratedForward):
            if state.former_forward is not None:
                vars(tower)[slot] = state.former_forward
            elif slot == "forward":
                del vars(tower)[slot]
            else:  # accelerate's hook calls what it holds: give it the class's forward, as it would have found
                vars(tower)[slot] = type(tower).forward.__get__(tower)
    state.close()
    for backend in ORDER:
        backend.close()
    return state


def _forward_slot(tower: nn.Module) -> str:
    """Where the forward stands: accelerate's hooks keep the one they wrap in `_old_forward`, and so run before it."""
    return "_old_forward" if "_old_forward" in vars(tower) else "forward"


class AcceleratedForward:
    """What stands in a tower's `forward`: pixels (T, P) and grid (images and videos, 3) to the stock tower's output.

    Holds its tower weakly, so that a deleted model is freed at once. Not a bound method: unpickling one asks the
    instance for `forward` before that attribute is restored, and silently gets the class's.
    """

    def __init__(self, tower: nn.Module, state: TowerState) -> None:
        self._tower, self._state = weakref.ref(tower), state

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tower(), self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        tower: Any = self._tower()
        return type(self)(memo.get(id(tower), tower), copy.deepcopy(self._state, memo))

    def __call__(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        """Raises ValueError for inputs that do not fit each other, and FallbackError under `strict`."""
        tower: Any = self._tower()
        if tower is None:
            raise ReferenceError("the tower of this forward was deleted; keep the model while its forward is used")
        if state_of(tower) is not self._state:  # unpatched, or patched anew, while someone (a hook) holds this one
            original = self._state.former_forward or partial(type(tower).forward, tower)
            return original(hidden_states, grid_thw, **kwargs)
        on_cuda = isinstance(hidden_states, torch.Tensor) and hidden_states.is_cuda
        with torch.cuda.device(hidden_states.device) if on_cuda else nullcontext():
            return _forward(tower, self._state, hidden_states, grid_thw, kwargs)


def _forward(
    tower: Any, state: TowerState, hidden_states: torch.Tensor, grid_thw: torch.Tensor, kwargs: dict[str, Any]
) -> Any:
    """The boundary: check the call, decide its way once, go it."""
    original = state.former_forward or partial(type(tower).forward, tower)
    geometry, structure = state.family.geometry(tower), state.structure(tower)
    grid = read_grid(hidden_states, grid_thw, geometry)
    unknown = structure.broken + _against_injection(tower, state, geometry, kwargs)
    if unknown:
        _fall_back(state, unknown)
        state.stock_calls += 1
        return original(hidden_states, grid_thw, **kwargs)
    check_pixels(hidden_states, tower.patch_embed.proj.weight, offloaded=structure.offloaded)
    grad = torch.is_grad_enabled() and (
        hidden_states.requires_grad or any(parameter.requires_grad for parameter in structure.parameters())
    )
    reasons = structure.reasons() + _against_call(tower, kwargs, hidden_states.device, grad)
    request = request_for(tower, hidden_states.device, grad=grad, packed=not reasons)
    fusion = None if reasons else state.fusion(tower, structure, request.device, request.dtype)
    fused_windows = fusion is not None and "window_attention" in fusion.fused
    prepared = state.prepare(geometry, grid, request, fused_windows=fused_windows)
    state.choices = prepared.choices
    unserved = _unserved(state.settings, fusion, prepared)
    if reasons or unserved:
        _fall_back(state, reasons + unserved)
    if fusion is None:
        state.stock_calls += 1
        return original(hidden_states, grid_thw, **kwargs, **prepared.injected())
    output = _run(tower, state, fusion, prepared, hidden_states)
    state.calls += 1
    return output.to_tuple() if kwargs.get("return_dict", tower.config.return_dict) is False else output


def _fall_back(state: TowerState, reasons: list[str]) -> None:
    if state.settings.strict:
        raise FallbackError("strict=True and this call cannot be served as asked: " + "; ".join(reasons))
    state.fallbacks.update(reasons)


def _against_injection(tower: Any, state: TowerState, geometry: Geometry, kwargs: Mapping[str, Any]) -> list[str]:
    """Why a call must reach the stock forward as it is, without metadata of ours."""
    reasons = []
    # accelerate leaves the class's forward on the instance when its hooks come off: the same as none.
    if getattr(state.former_forward, "__func__", None) is not type(tower).forward and state.former_forward is not None:
        reasons.append("the tower has a forward of its own")
    if geometry.table is None and hasattr(tower, "pos_embed"):
        reasons.append("positions are interpolated in a way that is not known")
    if any(name in kwargs for name in POPPED):
        reasons.append("the caller supplies sequence metadata")
    return reasons


def _against_call(tower: Any, kwargs: Mapping[str, Any], device: torch.device, grad: bool) -> list[str]:
    """Why this call wants more than the fast path gives."""
    reasons = []
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(tower.config, name, False)):
            reasons.append(f"{name} is requested")
    if grad:
        reasons.append("gradients are required")
    if _autocast(device):
        reasons.append("autocast is on")
    attentions = [block.attn for block in tower.blocks]
    if any(attention.training and getattr(attention, "attention_dropout", 0.0) for attention in attentions):
        reasons.append("attention weights are dropped out")
    if len({attention.scaling for attention in attentions}) > 1:
        reasons.append("layers scale attention differently")
    return reasons


def _unserved(settings: Settings, fusion: Fusion | None, prepared: Prepared) -> list[str]:
    """What the user named and this call does not get: a backend, or parts to fuse."""
    reasons = []
    if settings.attention != "auto":
        for choice in prepared.choices.values():
            for why in choice.rejected.get(settings.attention, ()):
                reasons.append(f"{settings.attention} cannot serve the call: {why}")
    if settings.fuse_named and fusion is not None:
        reasons += [f"{part} is not fused: {why}" for part, why in fusion.unfused.items() if part in settings.fuse]
        if "window_attention" in settings.fuse & fusion.fused and "window" in prepared.plans:
            reasons.append("window_attention is not fused: the windows are longer than the kernel's")
    return list(dict.fromkeys(reasons))


def _autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def request_for(tower: Any, device: torch.device, *, grad: bool = False, packed: bool = True) -> Request:
    """What a tower's layers ask of a backend: its heads, and the dtype that its attention computes in."""
    attention = tower.blocks[0].attn
    dtype = getattr(getattr(attention.qkv, "weight", None), "dtype", None)
    if _autocast(device):
        dtype = torch.get_autocast_dtype(device.type)
    elif dtype not in _COMPUTE_DTYPES:  # quantised: the norms keep the dtype that activations have
        dtype = tower.blocks[0].norm1.weight.dtype
    return Request(
        device=device,
        dtype=dtype,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        packed=packed,
        grad=grad,
    )


def _run(tower: Any, state: TowerState, fusion: Fusion, prepared: Prepared, pixels_TP: torch.Tensor) -> Any:
    """The fast path. Everything was decided before; the layers only compute."""
    family, tensors = state.family, prepared.tensors
    x_TE = fusion.embed(pixels_TP)
    if "interp_indices" in tensors:
        x_TE = fusion.add_positions(x_TE, tensors["interp_indices"], tensors["interp_weights"])
    positions_T2, window_index_M = tensors["position_ids"], tensors.get("window_index")
    if window_index_M is not None:
        x_TE, positions_T2 = (_permute(rows, window_index_M) for rows in (x_TE, positions_T2))
    cos_TD, sin_TD = (table_TD.contiguous() for table_TD in fusion.tables(x_TE, positions_T2))

    attends = _attends_by_layer(tower, family, fusion, prepared)
    deepstack = list(tower.deepstack_visual_indexes) if family.deepstack else []
    merged_by_layer: list[torch.Tensor] = []
    delta_TE: torch.Tensor | None = None  # what the residual stream is still to receive: the next norm adds it
    for index, (layer, attend) in enumerate(zip(fusion.layers, attends, strict=True)):
        x_TE, normed_TE = layer.norm1(x_TE, delta_TE)
        attention = layer.attention
        qkv_T3HD = attention.qkv(normed_TE).unflatten(-1, (3, attention.num_heads, attention.head_dim))
        x_TE, normed_TE = layer.norm2(x_TE, attention.proj(attend(qkv_T3HD, cos_TD, sin_TD).flatten(1)))
        delta_TE = layer.mlp(normed_TE)
        if index in deepstack:
            x_TE, merged = fusion.deepstack[deepstack.index(index)](x_TE, delta_TE)
            merged_by_layer.append(merged)
            delta_TE = None
    x_TE, merged = fusion.merge(x_TE, delta_TE)
    if window_index_M is not None:
        merged = merged[tensors["inverse_index"]]

    known = family.tower_class(tower)
    assert known is not None
    output_class = getattr(sys.modules[known.__module__], family.output)
    extra = {"deepstack_features": merged_by_layer} if family.deepstack else {}
    return output_class(last_hidden_state=x_TE, pooler_output=merged, **extra)


def _attends_by_layer(tower: Any, family: Family, fusion: Fusion, prepared: Prepared) -> list[Callable[..., Any]]:
    """Per layer: packed projection, cos and sin to the attended rows (T, H, D)."""

    def planned(plan: Plan) -> Callable[..., Any]:
        return lambda qkv_T3HD, cos_TD, sin_TD: plan.attend(*fusion.rotate(qkv_T3HD, cos_TD, sin_TD).unbind(1))

    full = planned(prepared.plans["full"])
    if family.full_layers is None:
        return [full] * len(fusion.layers)
    if "window" in prepared.plans:
        window = planned(prepared.plans["window"])
    else:
        offsets_S1, scale = prepared.tensors["cu_window_seqlens"], prepared.plans["full"].request.scale

        def window(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
            return window_attention.window_attention(qkv_T3HD, cos_TD, sin_TD, offsets_S1, scale)

    full_layers = frozenset(family.full_layers(tower))
    return [full if index in full_layers else window for index in range(len(fusion.layers))]


def _permute(rows: torch.Tensor, window_index_M: torch.Tensor) -> torch.Tensor:
    """Move whole merge blocks of rows, (T, anything), to the order of the windows."""
    blocks = rows.unflatten(0, (window_index_M.shape[0], -1))
    moved: torch.Tensor = blocks[window_index_M].flatten(0, 1)
    return moved
