"""The one accelerated forward that all families share.

Only a tower's `forward` is patched, on the instance. A call is five steps: reasons against it, its inputs, a route for
its layout, encoding or a replay, the stock output class. Other calls run the original forward, helped if possible.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.engine import inputs
from hf_vit_accel.engine.encoder import checkpoints_of, encode
from hf_vit_accel.engine.passes import reasons_whole
from hf_vit_accel.engine.route import Route, Spec
from hf_vit_accel.graphs.held import Eager
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.layout import Grid
from hf_vit_accel.machine import EPILOGUES, KERNELS, LINEARS, Fault, refuse
from hf_vit_accel.tower import proof as upstream
from hf_vit_accel.tower import snapshot as guard
from hf_vit_accel.tower.snapshot import Snapshot, Weights
from hf_vit_accel.tower.state import STATE, TowerState


class AcceleratedForward:
    """What a patched tower has as its `forward`: pixels (T, P) and grid (images and videos, 3) to the stock output.

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

        Memory that runs out raises as in stock. If a backend or a kernel fails, this call and later ones go without it.
        """
        tower: Any = self._tower()
        if tower is None:
            raise ReferenceError("the tower of this forward was deleted; keep the model while its forward is used")
        state = self._state
        original = state.former_forward or partial(type(tower).forward, tower)
        if vars(tower).get(STATE) is not state:  # unpatched, or patched anew, while someone (a hook) holds this one
            return original(*args, **kwargs)
        pixels: Any = args[0] if args else kwargs.get(state.family.arguments[0])
        on_cuda = isinstance(pixels, Tensor) and pixels.is_cuda
        before = state.faults
        with torch.cuda.device(pixels.device) if on_cuda else nullcontext(), state.sharing or nullcontext():
            while True:
                tried = state.faults
                try:
                    return _forward(tower, state, original, args, kwargs)
                except Fault as fault:
                    _go_without(state, before, tried, fault)


def _go_without(state: TowerState, before: dict[str, str], tried: dict[str, str], fault: Fault) -> None:
    """Prepare a call to be run again without what failed; or raise what it raised, where nothing else can serve it.

    before, tried: what the call went without when it came, and when it failed.
    """
    if fault.name in state.faults and fault.name not in tried:
        return  # another thread met the same at once
    error = fault.__cause__ or fault
    bound = state.settings.score_mod is not None and fault.name not in (KERNELS, LINEARS, EPILOGUES)  # to its backend
    if bound or fault.name in tried or fault.name == BACKENDS[-1].name:
        if state.faults is not before:
            error.add_note(f"This call was run again, as before {'; '.join(map(' '.join, state.faults.items()))}.")
            state.go_without(before)
        raise error
    if state.settings.strict:
        refuse([f"{fault.name} {fault.why}"])
    state.go_without({**state.faults, fault.name: fault.why})


def _forward(
    tower: Any, state: TowerState, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call, in the five steps."""
    if state.family.attention_only:
        return _attend_only(tower, state, original, args, kwargs)
    settings, snapshot, name = state.settings, state.snapshot(tower), tower.config._attn_implementation
    reasons, call = guard.reasons_stock(tower, state.former_forward, name, snapshot, kwargs), None
    if not reasons:
        parameters, weights = snapshot.weights()
        reuse = None if state.warming == threading.get_ident() else state.reuse
        slow: Any = partial(guard.reasons_slow, tower, snapshot, weights, kwargs, grad=torch.is_grad_enabled())
        slow = slow if reuse is None else cache(slow)  # asked while the host would wait
        look: Any = reuse and partial(reuse.look, snapshot, parameters, weights, state.faults.get(KERNELS), slow)
        call = inputs.read(snapshot.expected, look, *args, **kwargs)
        reasons = [] if call else ["arguments, or pixel values, are in a shape of their own"]
    if call is None:
        state.refuse_stock(reasons)
        return state.count_stock(original(*args, **kwargs), reasons)
    device, trains = call.pixels.device, torch.is_grad_enabled()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("expected no CUDA graph captured around a patched tower; let patch(cuda_graphs=True) do it")
    # A foreign module (an adapter) may train parameters outside of the tower.
    grad = trains and bool(snapshot.foreign or call.pixels.requires_grad or snapshot.trained(parameters))
    checkpoints = checkpoints_of(snapshot.parts) if grad else []
    if (sharing := state.sharing) is not None:
        distinct = call.grid if reuse is None else call.marks.distinct(call.grid)
        shared = sharing.begin(call.grid, distinct, snapshot, checkpoints)
    unmet = slow()
    if not state.family.videos and any(t > 1 for t, _, _ in call.grid):
        unmet.append("this family takes the frames of a video one by one")
    spec = state.spec(snapshot, weights, device, fast=not unmet, grad=grad)
    if spec.ops is None:
        route = state.routes.get(call.grid, spec)
        state.last, unmet = route, unmet + route.unmet
        if settings.score_mod is not None and name not in upstream.NAMES:
            refuse([*unmet, f"blocks attend by {name!r}"], because="a score_mod was given")
        if settings.strict:
            refuse(unmet)
        if sharing is not None:
            sharing.decline(unmet)
        return state.count_stock(original(*args, **kwargs, **route.ready().injected()), unmet)
    serve: Any = partial(_serve, state, snapshot, weights, spec, unmet, checkpoints)
    if spec.max_rows is not None and not (any(checkpoints) and reasons_whole(snapshot, checkpoints)):
        serve = partial(state.passes.serve, serve, spec, snapshot)
    elif isinstance(settings.max_rows, int) and len(call.pixels) > settings.max_rows:
        unmet += reasons_whole(snapshot, checkpoints)
    if sharing is not None and shared:
        serve = partial(sharing.serve, serve, spec, tower)
    if reuse is not None:
        unmet += call.marks.unmet
        serve = partial(reuse.serve, serve, spec, call.marks)
    marked = trains and not grad and snapshot.marks_outputs()
    with torch.no_grad() if marked else nullcontext():
        outputs = serve(call.grid, call.pixels)
    if sharing is not None and sharing.unmet:
        unmet += sharing.unmet
        if settings.strict:
            refuse(unmet)
    if marked:  # copies, as stock's are no leaves either and may be written to
        outputs = [output.requires_grad_().clone() for output in outputs]
    output = state.family.output_of(tower, outputs)
    if call.options.get("return_dict", tower.config.return_dict) is False:
        output = output.to_tuple()
    state.calls += 1  # now that it is over: one that failed on its way is not counted
    state.fallbacks.update(unmet)
    return output


def _attend_only(
    tower: Any, state: TowerState, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of a tower whose attention alone is ours: its own forward, with segments whose lengths are known."""
    named = dict(zip(state.family.arguments, args)) | kwargs  # noqa: B905
    reasons = guard.reasons_own_segments(tower, named, state.family.arguments[0])
    grid = () if reasons else tuple(map(tuple, named["grid_thw"].tolist()))
    if not grid or min(map(min, grid)) < 1:  # what else is wrong with a call, stock says
        reasons = reasons or ["a row of grid_thw has no frames, or no size"]
        state.refuse_stock(reasons)
        return state.count_stock(original(*args, **kwargs), reasons)
    device, rest = named[state.family.arguments[0]].device, (state.settings, state.faults, state.served)
    more = state.routes.offsets(grid, device, state.family.geometry(tower), *rest)
    output = original(*args, **kwargs, **more)
    if not state.served:  # MiniMax-M3 before transformers 5.23, whose layers know no segments
        reasons = [f"no layer attended by segments, through a backend (transformers {transformers.__version__})"]
        state.refuse_stock(reasons)
        return state.count_stock(output, reasons)
    state.calls += 1
    return output


def _serve(
    state: TowerState,
    snapshot: Snapshot,
    weights: Weights,
    spec: Spec,
    unmet: list[str],
    checkpoints: Sequence[Any],
    grid: Grid,
    pixels_TP: Tensor,
    into: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The outputs of whole images and videos, replayed or encoded: those of one call, or of a part of it.

    unmet: what the call does not get, then what this part does not; any raises under `strict`. The rest: see `encode`.
    """
    state.last = route = state.routes.get(grid, spec)
    unmet += [why for why in route.unmet if why not in unmet]
    if state.settings.strict:
        refuse(unmet)
    runner = state.training if spec.request.grad else state.runner
    outputs = None if runner is None else _replay(runner, snapshot, weights, route, pixels_TP, any(checkpoints))
    if isinstance(outputs, Eager) and state.settings.strict and not outputs.by_choice:
        refuse([f"not replayed from a CUDA graph: {outputs.why}"])
    if outputs is None or isinstance(outputs, Eager):
        return encode(route.ready(), pixels_TP, checkpoints, snapshot.sharded, into)
    return outputs


def _replay(
    runner: Runner | TrainingRunner,
    snapshot: Snapshot,
    weights: Weights,
    route: Route,
    pixels_TP: Tensor,
    checkpointed: bool,
) -> list[Tensor] | Eager:
    """The encoder's outputs from CUDA graphs, or why it is to run eagerly."""
    against = why_not_graphs(route.spec.request.device)
    # A module of someone else's may act on state that Python holds (an adapter that is switched off, a counter).
    against = against or (snapshot.foreign and f"{snapshot.foreign}, and might act otherwise at a later call")
    # A graph's weights are told by where they lie; other strides over the same memory would not be noticed.
    against = against or (None if weights.contiguous else "a parameter is not contiguous")
    against = against or ("FSDP2 brings weights anew at every call" if snapshot.sharded else None)
    against = against or ("gradient checkpointing runs layers again" if checkpointed else None)
    if against:
        return runner.eager(against)
    memory = [weights, *map(Tensor.data_ptr, snapshot.buffers())]
    if isinstance(runner, Runner):
        return runner.run(route, pixels_TP, memory)
    return runner.run(route, pixels_TP, snapshot.weights()[0], snapshot.places, memory)
