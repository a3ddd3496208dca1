"""The one accelerated forward that all families share; its state is kept in `state`.

The way of the data: pixels and `grid_thw` -> metadata on the host (once) -> a plan per kind of layer (once) -> blocks.
Only a tower's `forward` is patched, on the instance. At its boundary, once per forward, it is decided whether this
call takes the fast path (`encoder`, an own loop over the blocks' modules, perhaps replayed from a CUDA graph) or goes
the stock way: the original forward, with the metadata injected through the keyword arguments that it pops.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_vit_accel.backends import ORDER, Request
from hf_vit_accel.boundary import against_call, against_injection, against_positions, request_for, unserved
from hf_vit_accel.contract import warn_of
from hf_vit_accel.encoder import encode
from hf_vit_accel.faults import KERNELS, blame
from hf_vit_accel.fusion import Fusion
from hf_vit_accel.graphs.call import Ahead, Call, Eager
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.metadata import Grid, read_inputs
from hf_vit_accel.planning import Layout, Prepared, check_pixels, lay_out, width_of
from hf_vit_accel.state import Family, TowerState
from hf_vit_accel.structure import Structure

__all__ = [
    "FallbackError",
    "Family",
    "TowerState",
    "against_tower",
    "former_of",
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


def state_of(tower: nn.Module) -> TowerState | None:
    """The state of a patched tower; None for a stock one."""
    return vars(tower).get(_STATE)


def former_of(tower: Any) -> tuple[str | None, Any]:
    """The attention name and the instance forward that a tower has, or had before it was patched."""
    state = state_of(tower)
    if state is not None:
        return state.former_name, state.former_forward
    return tower.config._attn_implementation, vars(tower).get(_forward_slot(tower))


def against_tower(
    tower: nn.Module,
    family: Family,
    structure: Structure,
    parameters: list[nn.Parameter],
    name: str | None,
    former_forward: Any,
) -> list[str]:
    """What keeps every call off the fast path, under an attention of that name."""
    reasons = against_injection(tower, name, former_forward, {}) + structure.reasons(parameters)
    return reasons if structure.broken else reasons + against_positions(tower, family.geometry(tower))


def install(tower: nn.Module, state: TowerState) -> None:
    """Give a tower its state and, on the instance, the accelerated forward. Replaces the state of a patched one."""
    warn_of(tower)
    patched = state_of(tower)
    vars(tower)[_STATE] = state
    ours = next((slot for slot in _SLOTS if isinstance(vars(tower).get(slot), AcceleratedForward)), None)
    slot = ours or _forward_slot(tower)
    if patched is None or ours is None:  # someone may have wrapped ours since, and is not to be lost
        state.former_forward = vars(tower).get(slot)
    else:
        state.former_forward = patched.former_forward
    if patched is not None and patched is not state:
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
        self.__signature__ = inspect.signature(type(tower).forward.__get__(tower))
        if state.former_forward is not None:
            with suppress(TypeError, ValueError):  # of what is not written in Python
                self.__signature__ = inspect.signature(state.former_forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tower(), self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        tower: Any = self._tower()
        return type(self)(memo.get(id(tower), tower), copy.deepcopy(self._state, memo))

    @torch.compiler.disable(reason="the layout is decided on the host, and the layers are fused already")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError for inputs that do not fit each other, and FallbackError under `strict`.

        Memory that runs out raises as in stock.
        """
        tower: Any = self._tower()
        if tower is None:
            raise ReferenceError("the tower of this forward was deleted; keep the model while its forward is used")
        if state_of(tower) is not self._state:  # unpatched, or patched anew, while someone (a hook) holds this one
            original = self._state.former_forward or partial(type(tower).forward, tower)
            return original(*args, **kwargs)
        pixels: Any = args[0] if args else kwargs.get("hidden_states")
        on_cuda = isinstance(pixels, torch.Tensor) and pixels.is_cuda
        with torch.cuda.device(pixels.device) if on_cuda else nullcontext():
            return _forward(tower, self._state, args, kwargs)


def _forward(tower: Any, state: TowerState, *inputs: Any) -> Any:
    """One call. If a backend or a kernel fails that it can go without, it is run again without, and so are later ones.

    What failed is remembered only if the call then succeeds. A score_mod cannot go without its backend.
    """
    before = state.faults
    while True:
        known = state.faults
        try:
            return _attempt(tower, state, *inputs)
        except Exception as error:
            faults = blame(error)
            stuck = state.settings.score_mod is not None and KERNELS not in faults
            if stuck or faults.keys() <= known.keys():
                if known is not before:
                    error.add_note(f"This call was run again, as before {'; '.join(map(' '.join, known.items()))}.")
                    state.go_without(before)
                raise
            if state.settings.strict:
                why = "; ".join(map(" ".join, faults.items()))
                raise FallbackError(f"strict=True and this call cannot be served as asked: {why}") from error
            state.go_without({**state.faults, **faults})


def forward(hidden_states: Any, grid_thw: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The arguments of a tower's forward, by the names of stock's (and errors about them under its name)."""
    return hidden_states, grid_thw, kwargs


def _attempt(tower: Any, state: TowerState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The boundary: check the call, decide its way once, go it."""
    original = state.former_forward or partial(type(tower).forward, tower)
    unknown = against_injection(tower, tower.config._attn_implementation, state.former_forward, kwargs)
    if not unknown:
        try:
            hidden_states, grid_thw, others = forward(*args, **kwargs)
            geometry = state.family.geometry(tower)
            width = width_of(tower.patch_embed.proj.weight)
            hidden_states, grid = read_inputs(hidden_states, grid_thw, geometry, width)
        except (AttributeError, TypeError, ValueError):
            unknown = state.structure(tower)[0].broken  # what is not as we know it may take what we do not
            if not unknown:
                raise
    if not unknown:
        ahead = state.start(grid, hidden_states)  # the device works while the host checks
        structure, parameters = state.structure(tower)
        unknown = structure.broken + against_positions(tower, geometry)
    if unknown:
        if state.settings.score_mod is not None:
            raise FallbackError("the score_mod cannot be applied to this call: " + "; ".join(unknown))
        _refuse(state, unknown)
        return _counted(state, original(*args, **kwargs), unknown, fast=False)
    check_pixels(hidden_states, tower.patch_embed.proj.weight, offloaded=structure.offloaded)
    grad = torch.is_grad_enabled() and (
        hidden_states.requires_grad or any(parameter.requires_grad for parameter in parameters)
    )
    reasons = structure.reasons(parameters) + against_call(
        tower, structure.attentions, others, hidden_states.device, grad
    )
    if structure.foreign and torch.is_grad_enabled() and not grad:
        reasons.append(f"{structure.foreign}, and might train what is not the tower's; use torch.no_grad()")
    request = request_for(
        tower,
        hidden_states.device,
        grad=grad,
        packed=not reasons,
        score_mod=state.settings.score_mod,
        fp8=state.scales(tower, hidden_states.device),
    )
    fusion = None if reasons else state.fusion(tower, structure, request.device, request.dtype)
    fused_windows = fusion is not None and "window_attention" in fusion.fused
    unmet: list[str] = []

    def served(prepared: Prepared | Layout) -> None:
        state.choices = prepared.choices
        unmet[:] = reasons + unserved(state.settings, fusion, prepared, state.faults)
        _refuse(state, unmet)

    marked = fusion is not None and torch.is_grad_enabled() and structure.marks_outputs()
    with torch.no_grad() if marked else nullcontext():
        outputs = None
        if fusion is not None and state.runner is not None:
            outputs = _replay(tower, state, structure, parameters, fusion, grid, request, hidden_states, ahead, served)
        if outputs is None:
            prepared = state.prepare(geometry, grid, request, fused_windows=fused_windows)
            served(prepared)
            if fusion is None:
                output = original(*args, **kwargs, **prepared.injected())
                return _counted(state, output, unmet, fast=False)
            outputs = encode(tower, _full_layers(tower, state), fusion, prepared, hidden_states)
    if marked:  # copies, as stock's are no leaves either and may be written to
        outputs = [output.requires_grad_().clone() for output in outputs]
    return _counted(state, _output(tower, state, outputs, others), unmet, fast=True)


def _full_layers(tower: Any, state: TowerState) -> frozenset[int] | None:
    return None if state.family.full_layers is None else frozenset(state.family.full_layers(tower))


def _output(tower: Any, state: TowerState, outputs: list[torch.Tensor], kwargs: Mapping[str, Any]) -> Any:
    """The stock tower's output, of its class, or as the tuple that was asked for."""
    known = state.family.tower_class(tower)
    assert known is not None
    output_class = getattr(sys.modules[known.__module__], state.family.output)
    extra = {"deepstack_features": outputs[2:]} if state.family.deepstack else {}
    output = output_class(last_hidden_state=outputs[0], pooler_output=outputs[1], **extra)
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
    served: Callable[[Layout], None],
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
            lay_out=lambda metadata: lay_out(metadata, request, settings.attention, fused_windows, state.faults),
            encode=partial(encode, tower, full_layers, fusion),
        )
        result = runner.run(call, pixels_TP, served)
    if isinstance(result, Eager):
        if settings.strict and not result.by_choice:
            raise FallbackError(f"strict=True and this call cannot be replayed: {result.why}")
        return None
    return result


def _refuse(state: TowerState, reasons: list[str]) -> None:
    if reasons and state.settings.strict:
        raise FallbackError("strict=True and this call cannot be served as asked: " + "; ".join(reasons))


def _counted(state: TowerState, output: Any, unmet: list[str], *, fast: bool) -> Any:
    """A call's output, once the call is over: one that failed on its way is not counted."""
    state.calls += fast
    state.stock_calls += not fast
    state.fallbacks.update(unmet)
    return output
