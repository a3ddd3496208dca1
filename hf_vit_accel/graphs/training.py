"""Replays forward and backward of calls whose layout comes again, each from a CUDA graph of its own.

With few rows a training step is as long as what Python does between its launches. A layout that came often is captured
as it is, forward and then backward, and the two stand in autograd's graph as one node. What the forward graph leaves
for the backward one lies in the memory pool that all layouts share. So one call at a time is under way: a call that
comes before the gradients of the last one runs eagerly, and gradients whose forward was overwritten are computed anew.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.store import CaptureError, Eager, GraphStore
from hf_vit_accel.ops.base import Slots, replaced

Tensors = list[Tensor]

_WANTS_GRADIENT: Any = attrgetter("requires_grad")
_HOOKS: Any = attrgetter("_backward_hooks")


@dataclass(kw_only=True, eq=False)
class _Step:
    """The two graphs of a layout. pixels_TP, incoming: what they read; outputs, gradients: what they write.

    given: which outputs gradients are given for; incoming are those. differentiable: which outputs could have one.
    gradients: of the pixels and of the parameters, where they are wanted and there are any.
    route: bound, for its tensors are read, too. slots, wants, pointers: of the tower's parameters, where modules hold
    them, whether each is trained, and where its memory is.
    """

    label: str
    route: Route
    given: tuple[bool, ...]
    differentiable: list[bool]
    pixels_TP: Tensor
    incoming: Tensors
    outputs: Tensors
    gradients: list[Tensor | None]
    slots: Slots
    wants: list[bool]
    pointers: list[int]
    forward: Callable[[], None]
    backward: Callable[[], None]
    nbytes: int
    replays: int = 0


class _Call:
    """A forward that was replayed. outputs, parameters: until they are handed out, and saved. over: its backward was,
    or can no longer be.
    """

    def __init__(self, step: _Step, parameters: Sequence[Tensor]) -> None:
        self.step, self.over = step, False
        self.outputs, self.parameters = Tensors(), parameters


class TrainingRunner(GraphStore):
    """The graphs of forward and backward of one tower."""

    def __init__(self, config: GraphConfig) -> None:
        self._given: tuple[bool, ...] = ()
        super().__init__(config, config.max_training_bytes)

    def _drop(self) -> None:
        super()._drop()
        self._last: weakref.ref[_Call] | None = None

    def run(
        self,
        route: Route,
        pixels_TP: Tensor,
        parameters: Sequence[Tensor],
        places: Sequence[dict[str, Any]],
        memory: list[object],
    ) -> Tensors | Eager:
        """A call's outputs with their gradients, fresh tensors; or why it should run eagerly (counted).

        parameters: all of the tower. places: what its modules hold them in, in this order. memory: see `Runner.run`.
        """
        if pixels_TP.is_inference():  # which cannot be saved; stock's frozen embedding saves none
            pixels_TP = pixels_TP.clone()
        wants = [pixels_TP.requires_grad, *map(_WANTS_GRADIENT, parameters)]
        identity = route.spec, memory, pixels_TP.shape[1], wants, machine.numerics()
        with self._lock:
            if against := self._begin(identity, route.spec.request.device):
                return against
            if against := self._against(route, parameters):
                return against
            self._make_room()
            capture = partial(self._capture, route, pixels_TP, parameters, places)
            try:
                step = self._held((route.metadata.grid, self._given), capture)
            except CaptureError as error:
                return self.eager(str(error), by_choice=error.by_choice)
            call = self._forward(step, pixels_TP, parameters)
        return list(_Replay.apply(self, call, route, pixels_TP, *_trained(parameters, wants[1:])))  # as the GPU works

    def _against(self, route: Route, parameters: Sequence[Tensor]) -> Eager | None:
        """Why a call runs eagerly."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return self.eager("what gradients need is saved by hooks of somebody else (checkpointing, offloading)")
        if any(map(_HOOKS, parameters)):
            return self.eager("a parameter has a hook on its gradient")
        most = self.config.max_tokens * max(4, route.spec.geometry.merge**2)
        if route.metadata.rows > most:
            return self.eager(f"with gradients, layouts of up to {most} patches are captured", by_choice=True)
        if not 0 < self.config.exact_after <= self._came(route.metadata.grid):
            return self.eager("with gradients, a layout is captured when it comes often", by_choice=True)
        last = None if self._last is None else self._last()
        if last is not None and not last.over:
            return self.eager("the gradients of an earlier call are still to come", by_choice=True)
        return None

    def _capture(
        self,
        route: Route,
        pixels_TP: Tensor,
        parameters: Sequence[Tensor],
        places: Sequence[dict[str, Any]],
        recorder: CudaRecorder,
    ) -> _Step:
        slots = [(place, name) for place in places for name, each in place.items() if each is not None]
        wants = [*map(_WANTS_GRADIENT, parameters)]
        request, bound = route.spec.request, route.ready()
        static_TP = torch.zeros(pixels_TP.shape, dtype=request.dtype, device=request.device)
        leaf_TP = static_TP.detach().requires_grad_(pixels_TP.requires_grad)
        last, given = self._given, list[bool]()
        made, leaves, outputs, incoming = Tensors(), Tensors(), Tensors(), Tensors()
        gradients: list[Tensor | None] = []

        def forward() -> None:
            for earlier in (made, outputs, gradients):  # of the warm-up, or of an attempt whose memory ran out
                earlier.clear()
            with torch.enable_grad(), _leaves(slots, parameters, wants) as leaves[:]:
                made[:] = encode(bound, leaf_TP)
            outputs[:] = [output.detach() for output in made]

        def backward() -> None:
            if not incoming:  # those of the last call, as far as they can have one; before any, all that can
                could = [output.requires_grad for output in made]
                given[:] = [one and before for one, before in zip(could, last or could, strict=True)]
                given[:] = given if any(given) else could
                incoming.extend(torch.zeros_like(one) for one, wanted in zip(outputs, given, strict=True) if wanted)
            gradients[:] = _gradients(made, given, leaf_TP, leaves, incoming)

        replays, nbytes = recorder.record(forward, backward)
        differentiable = [output.requires_grad for output in made]
        made.clear()
        return _Step(
            label=f"{route.metadata.rows} patches in {route.metadata.full.count} segments",
            route=bound,
            given=tuple(given),
            differentiable=differentiable,
            pixels_TP=static_TP,
            incoming=incoming,
            outputs=outputs,
            gradients=gradients,
            slots=slots,
            wants=wants,
            pointers=[*map(Tensor.data_ptr, parameters)],
            forward=replays[0],
            backward=replays[1],
            nbytes=nbytes + sum(each.nbytes for each in (static_TP, *incoming)),
        )

    @torch.no_grad()
    def _forward(self, step: _Step, pixels_TP: Tensor, parameters: Sequence[Tensor]) -> _Call:
        recorder, call = self._recorder, _Call(step, parameters)
        recorder.wait()
        try:
            step.pixels_TP.copy_(pixels_TP)
            step.forward()
            call.outputs = [output.clone() for output in step.outputs]
        finally:
            recorder.done()
        self._last = weakref.ref(call)
        self._replays, step.replays = self._replays + 1, step.replays + 1
        return call

    def backward(
        self,
        call: _Call,
        incoming: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        anew: Callable[[], list[Tensor | None]],
    ) -> list[Tensor | None]:
        """The gradients of a call, fresh tensors, from its graph or computed anew.

        parameters: those of its forward.
        """
        given, step = tuple(each is not None for each in incoming), call.step
        with self._lock:
            over, call.over = call.over, True
            if over or self._last is None or self._last() is not call:
                return anew()  # its memory was written to since; retained graphs are not held
            if list(map(Tensor.data_ptr, parameters)) != step.pointers:
                return anew()  # weights were moved, and what they left may be gone
            if given != step.given:
                self._given = given
                self._count_change(2)
                return anew()
            recorder = self._recorder
            recorder.wait()
            try:
                for static, each in zip(step.incoming, _there(incoming), strict=True):
                    static.copy_(each)
                step.backward()
                fresh = [None if each is None else torch.empty_like(each) for each in step.gradients]
                torch._foreach_copy_(_there(fresh), _there(step.gradients))
            finally:
                recorder.done()
            return fresh


class _Replay(torch.autograd.Function):
    """A whole tower: pixels and parameters to its outputs."""

    @staticmethod
    def forward(
        ctx: Any, runner: TrainingRunner, call: _Call, route: Route, pixels_TP: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Weights that change before the backward pass raise, as in stock: also frozen ones, which gradients go through.
        ctx.save_for_backward(pixels_TP, *call.parameters)
        call.parameters = ()
        kind = pixels_TP.device.type
        ctx.runner, ctx.call, ctx.route = runner, call, route
        outputs, call.outputs = call.outputs, Tensors()
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        constant = [one for one, wanted in zip(outputs, call.step.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        pixels_TP, *parameters = ctx.saved_tensors
        step = ctx.call.step

        def anew() -> list[Tensor | None]:
            leaf_TP = pixels_TP.detach().requires_grad_(ctx.needs_input_grad[3])
            enabled, dtype = ctx.autocast
            with (
                torch.enable_grad(),
                torch.autocast(leaf_TP.device.type, dtype=dtype, enabled=enabled),
                _leaves(step.slots, parameters, step.wants) as leaves,
            ):
                outputs = encode(ctx.route.ready(), leaf_TP)
            return _gradients(outputs, [each is not None for each in incoming], leaf_TP, leaves, _there(incoming))

        return None, None, None, *ctx.runner.backward(ctx.call, incoming, parameters, anew)


def _trained(parameters: Sequence[Tensor], wants: Sequence[bool]) -> Tensors:
    """Those that are trained, each once: one that several modules share has one gradient."""
    return [*{id(each): each for each, wanted in zip(parameters, wants, strict=True) if wanted}.values()]


@contextmanager
def _leaves(slots: Slots, parameters: Sequence[Tensor], wants: Sequence[bool]) -> Iterator[Tensors]:
    """Within the with block, what is trained is leaves of their own over the same memory; those, in order.

    The node at which a parameter's gradient arrives is kept by DDP, and by whoever holds an earlier loss. It runs on
    the stream on which it was made: by default one that cannot be captured. And it runs hooks, which are for the
    gradient that comes out of the tower alone; a parameter that was frozen since its forward has none.
    """
    leaves = {id(each): each.detach().requires_grad_() for each in _trained(parameters, wants)}
    with replaced(slots, [leaves.get(id(each), each) for each in parameters]):
        yield [*leaves.values()]


def _gradients(
    outputs: Tensors, given: Sequence[bool], leaf_TP: Tensor, leaves: Tensors, incoming: Tensors
) -> list[Tensor | None]:
    """Of the pixels, if they want one, and of the parameters, from those of the outputs that are given."""
    chosen = [output for output, one in zip(outputs, given, strict=True) if one]
    pixels = [leaf_TP] if leaf_TP.requires_grad else []
    with torch.autocast(leaf_TP.device.type, enabled=False):  # as it is where backward passes are called
        found = torch.autograd.grad(chosen, [*pixels, *leaves], incoming, allow_unused=True)
    return [*found] if pixels else [None, *found]


def _there(tensors: Sequence[Tensor | None]) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]
