"""Captures one training step: forward and backward of the encoder, each in a graph of its own.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.recorded import Slot, slots_of
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.ops.base import Slots, replaced

Tensors = list[Tensor]
Gradients = list[Tensor | None]


@dataclass(kw_only=True, eq=False)
class CapturedStep:
    """The two graphs of a layout, with the static tensors that they read and write.

    Attributes:
        label: What the graphs replay, as `status` prints it.
        route: The route that was captured; it keeps the tensors alive that the graphs read.
        pixels_TP: Static pixels, read by the forward.
        outputs: Static outputs, written by the forward.
        differentiable: Whether each output can have a gradient.
        used: Whether the loss uses each output, so that a gradient arrives for it.
        incoming: Static gradients of the used outputs, read by the backward.
        gradients: Gradients of the pixels, then of every trained parameter, written by the backward. Their memory is
            the pool's: they are valid until the next replay of any graph in it.
        slots: Where modules store the tower's parameters.
        other_slots: Where they store other tensors: buffers and plain attributes.
        requires_grad: Whether each parameter requires a gradient.
        pointers: The memory address of each parameter.
        forward: Launches the forward graph.
        backward: Launches the backward graph.
        nbytes: Device memory that the graphs took.
        replays: How often the forward was launched.
        captured_at: The number of calls when it was captured.
        last_call: Returns the call whose pixels lie in `pixels_TP`; None once it is freed.
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
    other_slots: list[Slot]
    requires_grad: tuple[bool, ...]
    pointers: list[int]
    forward: Callable[[], None]
    backward: Callable[[], None]
    nbytes: int
    replays: int = 0
    captured_at: int = 0
    last_call: Callable[[], object] | None = None

    def has_pixels_of(self, call: object) -> bool:
        """Return whether the static pixels are still those of a call."""
        return self.last_call is not None and self.last_call() is call


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
        self.requires_grad = tuple(parameter.requires_grad for parameter in parameters)
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
        with torch.enable_grad(), _detached_leaves(self.slots, self.parameters, self.requires_grad) as leaves:
            self._leaves = leaves
            self._encoded = encode(self.route, self.leaf_TP)
        self.outputs += [output.detach() for output in self._encoded]

    def backward(self) -> None:
        """Compute the gradients of the last forward."""
        if not self.incoming:
            self._choose_incoming()
        self.gradients[:] = _gradients_of(self._encoded, self.used, self.leaf_TP, self._leaves, self.incoming)

    def step(self, recorder: CudaRecorder) -> CapturedStep:
        """Capture both graphs."""
        (forward, backward), nbytes = recorder.record(self.forward, self.backward)
        differentiable = [output.requires_grad for output in self._encoded]
        self._encoded = []  # the autograd graph must not outlive the capture
        self.gradients[:] = [gradient if gradient is None else recorder.borrow(gradient) for gradient in self.gradients]
        metadata = self.route.metadata
        return CapturedStep(
            label=f"{metadata.rows} patches in {metadata.full.count} segments",
            route=self.route,
            pixels_TP=self.pixels_TP,
            outputs=self.outputs,
            differentiable=differentiable,
            used=self.used,
            incoming=self.incoming,
            gradients=self.gradients,
            slots=self.slots,
            other_slots=self._other_slots(),
            requires_grad=self.requires_grad,
            pointers=[parameter.data_ptr() for parameter in self.parameters],
            forward=forward,
            backward=backward,
            nbytes=nbytes + sum(tensor.nbytes for tensor in (self.pixels_TP, *self.incoming)),
        )

    def _other_slots(self) -> list[Slot]:
        """Return where modules store tensors that are no parameters."""
        ops = self.route.spec.ops
        assert ops is not None
        slots: list[Slot] = []
        for module in ops.parts.modules():
            slots += slots_of(module, with_weights=False)
        return slots

    def _clear(self) -> None:
        """Free the tensors of the last run, which the capture's pool could not reuse."""
        self._encoded = []
        self.outputs.clear()
        self.gradients.clear()

    def _choose_incoming(self) -> None:
        """Allocate the gradients that come in: for the outputs that the last loss used.

        Before any loss they are those that models use: all but the first, the rows before they are merged.
        """
        differentiable = tuple(output.requires_grad for output in self._encoded)
        expected = self.used or (False, *differentiable[1:])
        used = tuple(
            can_have_one and is_expected for can_have_one, is_expected in zip(differentiable, expected, strict=True)
        )
        self.used = used if any(used) else differentiable
        for output, is_used in zip(self.outputs, self.used, strict=True):
            if is_used:
                self.incoming.append(torch.zeros_like(output))


def run_eagerly(
    step: CapturedStep, route: Route, leaf_TP: Tensor, parameters: Sequence[Tensor], incoming: Sequence[Tensor | None]
) -> Gradients:
    """Run forward and backward without graphs.

    Args:
        step: The graphs that cannot be replayed.
        route: The call's route.
        leaf_TP: The call's pixels, as a leaf.
        parameters: All parameters of the tower, as they were in the forward.
        incoming: The gradient of every output, None for an output that the loss does not use.

    Returns:
        The gradients of the pixels and of every trained parameter.
    """
    with torch.enable_grad(), _detached_leaves(step.slots, parameters, step.requires_grad) as leaves:
        outputs = encode(route, leaf_TP)
    used = [gradient is not None for gradient in incoming]
    return _gradients_of(outputs, used, leaf_TP, leaves, present(incoming))


def distinct_trained(parameters: Sequence[Tensor], requires_grad: Sequence[bool]) -> Tensors:
    """Return the distinct trained parameters: a parameter that several modules share has one gradient."""
    distinct = {}
    for parameter, is_trained in zip(parameters, requires_grad, strict=True):
        if is_trained:
            distinct[id(parameter)] = parameter
    return list(distinct.values())


@contextmanager
def _detached_leaves(slots: Slots, parameters: Sequence[Tensor], requires_grad: Sequence[bool]) -> Iterator[Tensors]:
    """Replace trained parameters by detached leaves over the same memory, within the with block; yield the leaves.

    A parameter's own autograd node must not be captured. DDP or an earlier loss may keep it alive, and it runs on
    the stream that made it, which by default cannot be captured. It also runs hooks, which are meant for the gradient
    that leaves the tower. A parameter that was frozen since its forward has no such node.
    """
    distinct = distinct_trained(parameters, requires_grad)
    leaves = {id(parameter): parameter.detach().requires_grad_() for parameter in distinct}
    with replaced(slots, [leaves.get(id(parameter), parameter) for parameter in parameters]):
        yield list(leaves.values())


def _gradients_of(
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


def present(tensors: Sequence[Tensor | None]) -> Tensors:
    """Return the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]
