"""Replays training steps whose layout comes again: the forward and the backward, each from a CUDA graph of its own.

With few rows a training step takes as long as the Python code between its launches. So a layout that came often is
captured in its own shape, and its two graphs form one node in autograd's graph.
The forward graph leaves activations for the backward graph in the memory pool that all layouts share. Only one call
can therefore be under way: a call that comes before the gradients of the last one runs eagerly. Gradients whose
activations were overwritten are computed again.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.store import CaptureError, Eager, GraphStore, Identity
from hf_vit_accel.ops.base import Slots, replaced

Tensors = list[Tensor]
Gradients = list[Tensor | None]


@dataclass(kw_only=True, eq=False)
class _Step:
    """The two graphs of a layout, with the static tensors that they read and write.

    Attributes:
        label: What the graphs replay, as `status` prints it.
        route: The route that was captured; it keeps the tensors alive that the graphs read.
        pixels_TP: Static pixels, read by the forward.
        outputs: Static outputs, written by the forward.
        differentiable: Whether each output can have a gradient.
        used: Whether the loss uses each output, so that a gradient arrives for it.
        incoming: Static gradients of the used outputs, read by the backward.
        gradients: Static gradients of the pixels, then of every trained parameter, written by the backward.
        slots: Where modules store the tower's parameters.
        trained: Whether each parameter requires a gradient.
        pointers: The memory address of each parameter.
        forward: Launches the forward graph.
        backward: Launches the backward graph.
        nbytes: Device memory that the graphs took.
        replays: How often the forward was launched.
    """

    label: str
    route: Route
    pixels_TP: Tensor
    outputs: Tensors
    differentiable: list[bool]
    used: tuple[bool, ...]
    incoming: Tensors
    gradients: Gradients
    slots: Slots
    trained: tuple[bool, ...]
    pointers: list[int]
    forward: Callable[[], None]
    backward: Callable[[], None]
    nbytes: int
    replays: int = 0


class _Call:
    """A replayed forward whose backward may still come.

    Attributes:
        step: The graphs that were replayed.
        is_over: Whether its backward ran, or can no longer be replayed.
        outputs: The call's outputs, until they are returned.
        parameters: The tower's parameters, until autograd has saved them.
    """

    def __init__(self, step: _Step, parameters: Sequence[Tensor]) -> None:
        self.step = step
        self.is_over = False
        self.outputs: Tensors = []
        self.parameters = parameters


class StepCapture:
    """Runs one training step for a capture: `forward()`, then `backward()`.

    The recorder runs both to warm up, then under capture, and once more if memory ran out. Every run replaces the
    tensors that the last one left. Lists change in place, since the captured step holds the same lists.

    Args:
        route: The call's route.
        pixels_TP: The call's pixels, of which only shape and `requires_grad` count.
        parameters: All parameters of the tower.
        slots: Where modules store them, in this order.
        used: Whether the last loss used each output; empty before any backward.
    """

    def __init__(
        self, route: Route, pixels_TP: Tensor, parameters: Sequence[Tensor], slots: Slots, used: tuple[bool, ...]
    ) -> None:
        request = route.spec.request
        self.route = route.ready()
        self.parameters = parameters
        self.slots = slots
        self.trained = tuple(parameter.requires_grad for parameter in parameters)
        self.pixels_TP = torch.zeros(pixels_TP.shape, dtype=request.dtype, device=request.device)
        self.leaf_TP = self.pixels_TP.detach().requires_grad_(pixels_TP.requires_grad)
        self.used = used
        self.outputs: Tensors = []
        self.incoming: Tensors = []
        self.gradients: Gradients = []
        self._encoded: Tensors = []  # the outputs with their autograd graph
        self._leaves: Tensors = []

    def forward(self) -> None:
        """Encode the static pixels."""
        self._clear()
        with torch.enable_grad(), _leaves(self.slots, self.parameters, self.trained) as leaves:
            self._leaves = leaves
            self._encoded = encode(self.route, self.leaf_TP)
        self.outputs += [output.detach() for output in self._encoded]

    def backward(self) -> None:
        """Compute the gradients of the last forward."""
        if not self.incoming:
            self._choose_incoming()
        self.gradients[:] = _gradients(self._encoded, self.used, self.leaf_TP, self._leaves, self.incoming)

    def step(self, recorder: CudaRecorder) -> _Step:
        """Capture both graphs."""
        (forward, backward), nbytes = recorder.record(self.forward, self.backward)
        differentiable = [output.requires_grad for output in self._encoded]
        self._encoded = []  # the autograd graph must not outlive the capture
        metadata = self.route.metadata
        return _Step(
            label=f"{metadata.rows} patches in {metadata.full.count} segments",
            route=self.route,
            pixels_TP=self.pixels_TP,
            outputs=self.outputs,
            differentiable=differentiable,
            used=self.used,
            incoming=self.incoming,
            gradients=self.gradients,
            slots=self.slots,
            trained=self.trained,
            pointers=[parameter.data_ptr() for parameter in self.parameters],
            forward=forward,
            backward=backward,
            nbytes=nbytes + sum(tensor.nbytes for tensor in (self.pixels_TP, *self.incoming)),
        )

    def _clear(self) -> None:
        """Free the tensors of the last run, which the capture's pool could not reuse."""
        self._encoded = []
        self.outputs.clear()
        self.gradients.clear()

    def _choose_incoming(self) -> None:
        """Allocate the gradients that come in: for the outputs that the last loss used, else for all that it could."""
        differentiable = tuple(output.requires_grad for output in self._encoded)
        used = tuple(
            can_have_one and was_used
            for can_have_one, was_used in zip(differentiable, self.used or differentiable, strict=True)
        )
        self.used = used if any(used) else differentiable
        for output, is_used in zip(self.outputs, self.used, strict=True):
            if is_used:
                self.incoming.append(torch.zeros_like(output))


class TrainingRunner(GraphStore[_Step]):
    """The graphs of forward and backward of one tower."""

    def __init__(self, config: GraphConfig) -> None:
        self._used: tuple[bool, ...] = ()  # whether the last loss used each output
        super().__init__(config, config.max_training_bytes)

    def _drop(self) -> None:
        super()._drop()
        self._last: weakref.ref[_Call] | None = None

    def static_buffers(self) -> Tensors:
        """List the tensors that the next call writes before a graph reads them."""
        is_under_way = self._last is not None and self._last() is not None
        buffers: Tensors = []
        for step in self._graphs.values():
            buffers += [tensor.detach() for tensor in (*step.incoming, *step.gradients) if tensor is not None]
            if not is_under_way:  # a backward that is to come reads the pixels
                buffers.append(step.pixels_TP)
        return buffers

    def run(
        self,
        route: Route,
        pixels_TP: Tensor,
        parameters: Sequence[Tensor],
        places: Sequence[dict[str, Any]],
        memory: list[object],
    ) -> Tensors | Eager:
        """Replay the forward of a call, so that autograd replays its backward.

        Args:
            route: The call's route.
            pixels_TP: The call's pixels.
            parameters: All parameters of the tower.
            places: The dictionaries in which modules store them, in this order.
            memory: Equal while weights and buffers stay at their addresses (see `Identity`).

        Returns:
            Fresh output tensors, or why the call runs eagerly (counted).
        """
        if pixels_TP.is_inference():  # autograd cannot save inference tensors
            pixels_TP = pixels_TP.clone()
        trained = (pixels_TP.requires_grad, *[parameter.requires_grad for parameter in parameters])
        identity = Identity(route.spec, memory, pixels_TP.shape[1], machine.numerics(), trained)
        with self._lock:
            refused = self._begin(identity, route.spec.request.device) or self._refuse(route, parameters)
            if refused is not None:
                return refused
            self._make_room()

            def capture(recorder: CudaRecorder) -> _Step:
                slots = [(place, name) for place in places for name, value in place.items() if value is not None]
                return StepCapture(route, pixels_TP, parameters, slots, self._used).step(recorder)

            try:
                step = self._find_or_capture((route.metadata.grid, self._used), capture)
            except CaptureError as error:
                return self.eager(str(error), by_choice=error.by_choice)
            call = self._forward(step, pixels_TP, parameters)
        leaves = _trained(parameters, trained[1:])  # collected while the GPU works
        return list(_Replay.apply(self, call, route, pixels_TP, *leaves))

    def _refuse(self, route: Route, parameters: Sequence[Tensor]) -> Eager | None:
        """Return why a call runs eagerly, or None."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return self.eager("what gradients need is saved by hooks of somebody else (checkpointing, offloading)")
        if any(parameter._backward_hooks for parameter in parameters):
            return self.eager("a parameter has a hook on its gradient")
        largest = self.config.max_tokens * max(4, route.spec.geometry.merge**2)
        if route.metadata.rows > largest:
            return self.eager(f"with gradients, layouts of up to {largest} patches are captured", by_choice=True)
        if not 0 < self.config.exact_after <= self._count_calls(route.metadata.grid):
            return self.eager("with gradients, a layout is captured when it comes often", by_choice=True)
        last = None if self._last is None else self._last()
        if last is not None and not last.is_over:
            return self.eager("the gradients of an earlier call are still to come", by_choice=True)
        return None

    @torch.no_grad()
    def _forward(self, step: _Step, pixels_TP: Tensor, parameters: Sequence[Tensor]) -> _Call:
        """Replay a forward and copy its outputs out."""
        call = _Call(step, parameters)
        self._recorder.wait()
        try:
            step.pixels_TP.copy_(pixels_TP)
            step.forward()
            call.outputs = [output.clone() for output in step.outputs]
        finally:
            self._recorder.done()
        self._last = weakref.ref(call)
        self._replays += 1
        step.replays += 1
        return call

    def backward(
        self,
        call: _Call,
        incoming: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        compute_again: Callable[[], Gradients],
    ) -> Gradients:
        """Return the gradients of a call, fresh tensors, from its graph or computed again.

        Args:
            call: The replayed forward.
            incoming: The gradient of every output, None for an output that the loss does not use.
            parameters: All parameters of the tower, as they were in the forward.
            compute_again: Runs forward and backward eagerly.
        """
        step = call.step
        used = tuple(gradient is not None for gradient in incoming)
        with self._lock:
            was_over = call.is_over
            call.is_over = True
            is_overwritten = was_over or self._last is None or self._last() is not call
            if is_overwritten:  # by a later replay, or by this call's first backward (`retain_graph`)
                return compute_again()
            if [parameter.data_ptr() for parameter in parameters] != step.pointers:
                return compute_again()  # the graph reads the weights' former memory, which may be freed
            if used != step.used:
                self._used = used
                self._count_change(2)
                return compute_again()
            return self._backward(step, _present(incoming))

    def _backward(self, step: _Step, incoming: Tensors) -> Gradients:
        """Replay a backward and copy its gradients out."""
        self._recorder.wait()
        try:
            for static, gradient in zip(step.incoming, incoming, strict=True):
                static.copy_(gradient)
            step.backward()
            fresh = [None if gradient is None else torch.empty_like(gradient) for gradient in step.gradients]
            torch._foreach_copy_(_present(fresh), _present(step.gradients))
        finally:
            self._recorder.done()
        return fresh


class _Replay(torch.autograd.Function):
    """A replayed tower as one autograd node, from pixels and trained parameters to the outputs."""

    @staticmethod
    def forward(
        ctx: Any, runner: TrainingRunner, call: _Call, route: Route, pixels_TP: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Saved weights raise if they change before the backward, as in stock. Frozen ones count: gradients pass them.
        ctx.save_for_backward(pixels_TP, *call.parameters)
        call.parameters = ()
        device = pixels_TP.device.type
        ctx.runner = runner
        ctx.call = call
        ctx.route = route
        ctx.autocast = dict(
            device_type=device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        outputs = call.outputs
        call.outputs = []
        differentiable = call.step.differentiable
        constant = [output for output, has_gradient in zip(outputs, differentiable, strict=True) if not has_gradient]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        pixels_TP, *parameters = ctx.saved_tensors
        step = ctx.call.step

        def compute_again() -> Gradients:
            leaf_TP = pixels_TP.detach().requires_grad_(ctx.needs_input_grad[3])
            with (
                torch.enable_grad(),
                torch.autocast(**ctx.autocast),
                _leaves(step.slots, parameters, step.trained) as leaves,
            ):
                outputs = encode(ctx.route.ready(), leaf_TP)
            used = [gradient is not None for gradient in incoming]
            return _gradients(outputs, used, leaf_TP, leaves, _present(incoming))

        return None, None, None, *ctx.runner.backward(ctx.call, incoming, parameters, compute_again)


def _trained(parameters: Sequence[Tensor], trained: Sequence[bool]) -> Tensors:
    """Return the distinct trained parameters: a parameter that several modules share has one gradient."""
    distinct = {}
    for parameter, is_trained in zip(parameters, trained, strict=True):
        if is_trained:
            distinct[id(parameter)] = parameter
    return list(distinct.values())


@contextmanager
def _leaves(slots: Slots, parameters: Sequence[Tensor], trained: Sequence[bool]) -> Iterator[Tensors]:
    """Replace trained parameters by detached leaves over the same memory, within the with block; yield the leaves.

    A parameter's own autograd node must not be captured. DDP or an earlier loss may keep it alive, and it runs on
    the stream that made it, which by default cannot be captured. It also runs hooks, which are meant for the gradient
    that leaves the tower. A parameter that was frozen since its forward has no such node.
    """
    leaves = {id(parameter): parameter.detach().requires_grad_() for parameter in _trained(parameters, trained)}
    with replaced(slots, [leaves.get(id(parameter), parameter) for parameter in parameters]):
        yield list(leaves.values())


def _gradients(
    outputs: Tensors, used: Sequence[bool], leaf_TP: Tensor, leaves: Tensors, incoming: Tensors
) -> Gradients:
    """Return the gradient of the pixels (None if they require none), then of every leaf.

    Args:
        outputs: All outputs of the encoder.
        used: Whether the loss uses each output.
        leaf_TP: The pixels.
        leaves: The trained parameters.
        incoming: The gradients of the used outputs.
    """
    used_outputs = [output for output, is_used in zip(outputs, used, strict=True) if is_used]
    pixels = [leaf_TP] if leaf_TP.requires_grad else []
    with torch.autocast(leaf_TP.device.type, enabled=False):  # autocast is off where programs call `backward`, too
        gradients = torch.autograd.grad(used_outputs, [*pixels, *leaves], incoming, allow_unused=True)
    return [*gradients] if pixels else [None, *gradients]


def _present(tensors: Sequence[Tensor | None]) -> Tensors:
    """Return the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]
