"""The one accelerated forward that all families share, and its state.

The way of the data: pixels and `grid_thw` -> metadata on the host (once) -> a plan per kind of layer (once) -> blocks.
Only a tower's `forward` is patched, on the instance. At its boundary, once per forward, it is decided whether this
call takes the fast path (`encoder`, an own loop over the blocks' modules, perhaps replayed from a CUDA graph) or goes
the stock way: the original forward, with the metadata injected through the keyword arguments that it pops.

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

from hf_vit_accel.backends import ORDER, Choice, Kind, Request
from hf_vit_accel.boundary import Settings, against_call, against_injection, request_for, unserved
from hf_vit_accel.contract import warn_of
from hf_vit_accel.encoder import encode
from hf_vit_accel.fusion import Fusion, fuse_tower
from hf_vit_accel.graphs.call import Ahead, Call, Eager
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.metadata import LRU, Geometry, Grid, read_grid
from hf_vit_accel.planning import Prepared, check_pixels, lay_out, prepare, stream_id
from hf_vit_accel.structure import Structure

__all__ = [
    "FallbackError",
    "Family",
    "TowerState",
    "install",
    "state_of",
    "uninstall",
]

_STATE = "_hf_vit_accel"
_SLOTS = ("forward", "_old_forward")


class FallbackError(RuntimeError):
    """Under `strict=True`: a call that would have left the fast path or the named backend, with the reasons.

    With a score_mod also without it: a call whose attention could not apply it.
    """


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
        self.prepared: LRU[Prepared] = LRU(entries=64, cost=1 << 20)  # cost: bytes, at most 2% of the weights
        self.runner = None if settings.graphs is None else Runner(settings.graphs)
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
            self._fusion = held = *key, fuse_tower(tower, self.settings.fuse, device, dtype)
        return held[3]

    def close(self) -> None:
        """Drop everything that was cached, device memory included."""
        if self.runner is not None:
            self.runner.close()
        self.prepared.clear()
        self._structure = self._fusion = None

    def prepare(self, geometry: Geometry, grid: Grid, request: Request, *, fused_windows: bool) -> Prepared:
        """Metadata and plans for a grid: from the cache, or computed on the host and sent in one copy.

        fused_windows: window layers need no plan where a kernel of ours attends them.
        """
        if request.device != self._device:
            self.prepared.clear()
            self._device = request.device
        return self.prepared.get(
            (grid, geometry, request, self.settings.attention, stream_id(request.device), fused_windows),
            lambda: prepare(grid, geometry, request, self.settings.attention, fused_windows),
        )


def state_of(tower: nn.Module) -> TowerState | None:
    """The state of a patched tower; None for a stock one."""
    return vars(tower).get(_STATE)


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and, on the instance, the accelerated forward. Replaces the state of a patched one."""
    warn_of(tower)
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

    @torch.compiler.disable(reason="the layout is decided on the host, and the layers are fused already")
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
    geometry = state.family.geometry(tower)
    grid = read_grid(hidden_states, grid_thw, geometry)
    ahead = state.start(grid, hidden_states)  # the device works while the host checks
    structure, parameters = state.structure(tower)
    unknown = structure.broken + against_injection(tower, state.former_forward, geometry, kwargs)
    if unknown:
        if state.settings.score_mod is not None:
            raise FallbackError("the score_mod cannot be applied to this call: " + "; ".join(unknown))
        _fall_back(state, unknown)
        state.stock_calls += 1
        return original(hidden_states, grid_thw, **kwargs)
    check_pixels(hidden_states, tower.patch_embed.proj.weight, offloaded=structure.offloaded)
    grad = torch.is_grad_enabled() and (
        hidden_states.requires_grad or any(parameter.requires_grad for parameter in parameters)
    )
    reasons = structure.reasons(parameters) + against_call(
        tower, structure.attentions, kwargs, hidden_states.device, grad
    )
    score_mod = state.settings.score_mod
    request = request_for(tower, hidden_states.device, grad=grad, packed=not reasons, score_mod=score_mod)
    fusion = None if reasons else state.fusion(tower, structure, request.device, request.dtype)
    fused_windows = fusion is not None and "window_attention" in fusion.fused

    def served(prepared: Prepared) -> None:
        state.choices = prepared.choices
        if unmet := reasons + unserved(state.settings, fusion, prepared):
            _fall_back(state, unmet)

    marked = fusion is not None and torch.is_grad_enabled() and structure.marks_outputs()
    with torch.no_grad() if marked else nullcontext():
        outputs = None
        if fusion is not None and state.runner is not None:
            outputs = _replay(tower, state, structure, parameters, fusion, grid, request, hidden_states, ahead, served)
        if outputs is None:
            prepared = state.prepare(geometry, grid, request, fused_windows=fused_windows)
            served(prepared)
            if fusion is None:
                state.stock_calls += 1
                return original(hidden_states, grid_thw, **kwargs, **prepared.injected())
            outputs = encode(tower, _full_layers(tower, state), fusion, prepared, hidden_states)
    if marked:  # copies, as stock's are no leaves either and may be written to
        outputs = [output.requires_grad_().clone() for output in outputs]
    return _output(tower, state, outputs, kwargs)


def _full_layers(tower: Any, state: TowerState) -> frozenset[int] | None:
    return None if state.family.full_layers is None else frozenset(state.family.full_layers(tower))


def _output(tower: Any, state: TowerState, outputs: list[torch.Tensor], kwargs: Mapping[str, Any]) -> Any:
    """The stock tower's output, of its class, or as the tuple that was asked for."""
    known = state.family.tower_class(tower)
    assert known is not None
    output_class = getattr(sys.modules[known.__module__], state.family.output)
    extra = {"deepstack_features": outputs[2:]} if state.family.deepstack else {}
    output = output_class(last_hidden_state=outputs[0], pooler_output=outputs[1], **extra)
    state.calls += 1
    return output.to_tuple() if kwargs.get("return_dict", tower.config.return_dict) is False else output


def _replay(
    tower: Any,
    state: TowerState,
    structure: Structure,
    parameters: list[nn.Parameter],
    fusion: Fusion,
    grid: Grid,
    request: Request,
    pixels_TP: torch.Tensor,
    ahead: Ahead | None,
    served: Callable[[Prepared], None],
) -> list[torch.Tensor] | None:
    """The encoder's outputs from CUDA graphs; None where it is to run eagerly. Under `strict`, raises where it must."""
    runner, settings = state.runner, state.settings
    assert runner is not None
    fused_windows, full_layers = "window_attention" in fusion.fused, _full_layers(tower, state)
    against = why_not_graphs(request.device)
    # A module of someone else's may act on state that Python holds (an adapter that is switched off, a counter).
    against = against or (structure.foreign and f"{structure.foreign}, and might act otherwise at a later call")
    # A graph's weights are told by where they lie; other strides over the same memory would not be noticed.
    if not all(map(torch.Tensor.is_contiguous, parameters)):
        against = against or "a parameter is not contiguous"
    if against:
        result: list[torch.Tensor] | Eager = runner.eager(against)
    else:
        weight = tower.patch_embed.proj.weight
        geometry = state.family.geometry(tower)
        call = Call(
            grid=grid,
            geometry=geometry,
            request=request,
            dtype=weight.dtype,
            width=pixels_TP.shape[1],
            pointers=structure.pointers(parameters),
            ahead=ahead,
            identity=(
                *(fusion, fusion.constants(), request, geometry, full_layers),
                tuple(getattr(tower, "deepstack_visual_indexes", ())),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            ),
            lay_out=lambda metadata: lay_out(metadata, request, settings.attention, fused_windows),
            encode=partial(encode, tower, full_layers, fusion),
        )
        result = runner.run(call, pixels_TP, served)
    if isinstance(result, Eager):
        if settings.strict and not result.by_choice:
            raise FallbackError(f"strict=True and this call cannot be replayed: {result.why}")
        return None
    return result


def _fall_back(state: TowerState, reasons: list[str]) -> None:
    if state.settings.strict:
        raise FallbackError("strict=True and this call cannot be served as asked: " + "; ".join(reasons))
    state.fallbacks.update(reasons)
