"""Replays forward and backward of calls whose layout comes again, each from a CUDA graph of its own.

With few rows a training step is as long as what Python does between its launches. A layout that came often is captured
as it is, forward and then backward, and the two stand in autograd's graph as one node. What the forward graph leaves
for the backward one lies in the memory pool that all layouts share. So one call at a time is under way: a call that
comes before the gradients of the last one runs eagerly, and gradients whose forward was overwritten are computed anew.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.encoder import encode
from hf_vit_accel.graphs.held import CaptureError, Eager, Held, numerics
from hf_vit_accel.graphs.recorder import Recorder
from hf_vit_accel.route import Route

__all__ = ["TrainingRunner"]

Tensors = list[torch.Tensor]

_WANTS_GRADIENT: Any = attrgetter("requires_grad")
_HOOKS: Any = attrgetter("_backward_hooks")


@dataclass(kw_only=True, eq=False)
class _Step:
    """The two graphs of a layout. pixels_TP, incoming: what they read; outputs, gradients: what they write.

    given: which outputs gradients are given for; incoming are those. differentiable: which outputs could have one.
    gradients: of the pixels and of the parameters, where they are wanted and there are any. route: bound; its tensors
    are read, too, and caches may drop it. pointers: where the tower's parameters are.
    """

    label: str
    route: Route
    pointers: list[int]
    given: tuple[bool, ...]
    differentiable: list[bool]
    pixels_TP: torch.Tensor
    incoming: Tensors
    outputs: Tensors
    gradients: list[torch.Tensor | None]
    forward: Callable[[], None]
    backward: Callable[[], None]
    nbytes: int
    replays: int = 0


class _Call:
    """A forward that was replayed. outputs, parameters (all of the tower): until they are handed out and saved. over:
    its backward was, or can no longer be.
    """

    def __init__(self, step: _Step, parameters: Tensors) -> None:
        self.step, self.over = step, False
        self.outputs, self.parameters = Tensors(), parameters


class TrainingRunner(Held[_Step]):
    """The graphs of forward and backward of one tower."""

    def __init__(self, config: GraphConfig) -> None:
        self._given: tuple[bool, ...] = ()
        super().__init__(config, config.max_training_bytes)

    def _reset(self) -> None:
        super()._reset()
        self._last: weakref.ref[_Call] | None = None

    def run(self, route: Route, pixels_TP: torch.Tensor, parameters: Tensors, memory: list[object]) -> Tensors | Eager:
        """A call's outputs with their gradients, fresh tensors; or why it should run eagerly (counted).

        parameters: all of the tower. memory: see `Runner.run`.
        """
        wants = [pixels_TP.requires_grad, *map(_WANTS_GRADIENT, parameters)]
        identity = route.spec, memory, pixels_TP.shape[1], wants, numerics()
        with self._lock:
            if against := self._begin(identity, route.spec.request.device):
                return against
            if against := self._against(route, parameters):
                return against
            trained = _trained(parameters)
            capture = partial(self._capture, route, pixels_TP, parameters)
            try:
                step = self._held((route.metadata.grid, self._given), capture)
            except CaptureError as error:
                return self.eager(str(error))
            call = self._forward(step, pixels_TP, parameters)
        return list(_Replay.apply(self, call, route, pixels_TP, *trained))  # while the GPU is busy

    def _against(self, route: Route, parameters: Tensors) -> Eager | None:
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

    def _capture(self, route: Route, pixels_TP: torch.Tensor, parameters: Tensors, recorder: Recorder) -> _Step:
        request, bound, trained = route.spec.request, route.ready(), _trained(parameters)
        static_TP = torch.zeros(pixels_TP.shape, dtype=request.dtype, device=request.device)
        leaf_TP = static_TP.detach().requires_grad_(pixels_TP.requires_grad)
        last, given = self._given, list[bool]()
        made, outputs, incoming = Tensors(), Tensors(), Tensors()
        gradients: list[torch.Tensor | None] = []

        def forward() -> None:
            with torch.enable_grad():
                made[:] = encode(bound, leaf_TP)
            outputs[:] = [output.detach() for output in made]

        def backward() -> None:
            if not incoming:  # those of the last call, as far as they can have one; before any, all that can
                could = [output.requires_grad for output in made]
                given[:] = [one and before for one, before in zip(could, last or could, strict=True)]
                given[:] = given if any(given) else could
                incoming.extend(torch.zeros_like(one) for one, wanted in zip(outputs, given, strict=True) if wanted)
            gradients[:] = _gradients(made, given, leaf_TP, trained, incoming)

        replays, nbytes = recorder.record(forward, backward)
        differentiable = [output.requires_grad for output in made]
        made.clear()
        return _Step(
            label=f"{route.metadata.rows} patches in {route.metadata.full.count} segments",
            route=bound,
            pointers=[*map(torch.Tensor.data_ptr, parameters)],
            given=tuple(given),
            differentiable=differentiable,
            pixels_TP=static_TP,
            incoming=incoming,
            outputs=outputs,
            gradients=gradients,
            forward=replays[0],
            backward=replays[1],
            nbytes=nbytes + sum(each.nbytes for each in (static_TP, *incoming)),
        )

    @torch.no_grad()
    def _forward(self, step: _Step, pixels_TP: torch.Tensor, parameters: Tensors) -> _Call:
        recorder, call = self._recorder, _Call(step, parameters)
        assert recorder is not None
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
        self, call: _Call, parameters: Tensors, incoming: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None] | None:
        """The gradients of a call, fresh tensors; None where they must be computed anew."""
        given, step = tuple(each is not None for each in incoming), call.step
        with self._lock:
            over, call.over = call.over, True
            if over or self._last is None or self._last() is not call:
                return None  # its memory was written to since; retained graphs are not held
            if [*map(torch.Tensor.data_ptr, parameters)] != step.pointers:
                return None
            if given != step.given:
                self._given = given
                self._count_change(2)
                return None
            recorder = self._recorder
            assert recorder is not None
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
        ctx: Any, runner: TrainingRunner, call: _Call, route: Route, pixels_TP: torch.Tensor, *trained: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        parameters, call.parameters = call.parameters, Tensors()
        # Weights that change before the backward pass raise, as in stock; gradients go through frozen ones, too.
        ctx.save_for_backward(pixels_TP, *parameters)
        first = {id(each): index for index, each in reversed([*enumerate(parameters)])}
        ctx.trained = [first[id(each)] for each in trained]
        kind = pixels_TP.device.type
        ctx.runner, ctx.call, ctx.route = runner, call, route
        outputs, call.outputs = call.outputs, Tensors()
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        constant = [one for one, wanted in zip(outputs, call.step.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pixels_TP, *parameters = ctx.saved_tensors
        found = ctx.runner.backward(ctx.call, parameters, incoming)
        if found is None:
            if any(map(_HOOKS, parameters)):  # it would be called twice
                raise RuntimeError(
                    "expected no hook to be put on a parameter between a forward and a backward whose CUDA graph was "
                    "written to since; register it before the forward"
                )
            leaf_TP = pixels_TP.detach().requires_grad_(ctx.needs_input_grad[3])
            enabled, dtype = ctx.autocast
            with torch.enable_grad(), torch.autocast(leaf_TP.device.type, dtype=dtype, enabled=enabled):
                outputs = encode(ctx.route.ready(), leaf_TP)
            given = [each is not None for each in incoming]
            trained = [parameters[index] for index in ctx.trained]
            still = [each for each in trained if each.requires_grad]  # one may have been frozen since
            pixels, *rest = _gradients(outputs, given, leaf_TP, still, _there(incoming))
            by_id = {id(each): gradient for each, gradient in zip(still, rest, strict=True)}
            found = [pixels, *(by_id.get(id(each)) for each in trained)]
        return None, None, None, *found


def _gradients(
    outputs: Tensors, given: Sequence[bool], leaf_TP: torch.Tensor, trained: Tensors, incoming: Tensors
) -> list[torch.Tensor | None]:
    """Of the pixels, if they want one, and of the parameters, from those of the outputs that are given."""
    chosen = [output for output, one in zip(outputs, given, strict=True) if one]
    pixels = [leaf_TP] if leaf_TP.requires_grad else []
    with torch.autocast(leaf_TP.device.type, enabled=False):  # as it is where backward passes are called
        found = torch.autograd.grad(chosen, [*pixels, *trained], incoming, allow_unused=True)
    return [*found] if pixels else [None, *found]


def _trained(parameters: Tensors) -> Tensors:
    """Once each: two layers may share one."""
    return [*dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad)]


def _there(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]
