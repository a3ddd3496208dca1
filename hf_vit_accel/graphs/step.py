"""Captures one training step of the encoder: the forward in one graph, the backward in several, stage by stage.

A stage is a run of layers. Its gradients are copied out before the next stage writes to the same memory, so graphs
hold the gradients of one stage only.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hf_vit_accel.engine.encoder import Residual, encode
from hf_vit_accel.engine.recorded import slots_of
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.store import StoredGraph
from hf_vit_accel.ops.base import Slots, replaced
from hf_vit_accel.watch import Memory

Tensors = list[Tensor]
Gradients = list[Tensor | None]

MOST_STAGES = 8
"""Stages of a backward. Each is one more launch from the host."""


@dataclass(eq=False)
class Stage:
    """The backward of a run of layers: its gradients, which the pool's next replay overwrites, and their places.

    Place 0 is that of the pixels, then comes one for every trained parameter.
    """

    indices: list[int] = field(default_factory=list)
    gradients: Tensors = field(default_factory=list)
    replay: Callable[[], None] | None = None

    def run(self, result: Gradients) -> None:
        """Launch the graph, and add copies of its gradients to those of earlier stages."""
        assert self.replay is not None, "captured"
        self.replay()
        copies = [torch.empty_like(gradient) for gradient in self.gradients]
        if copies:
            torch._foreach_copy_(copies, self.gradients)
        for index, gradient in zip(self.indices, copies, strict=True):
            earlier = result[index]  # of a parameter that layers of several stages share
            result[index] = gradient if earlier is None else earlier.add_(gradient)


@dataclass(kw_only=True, eq=False)
class CapturedStep(StoredGraph):
    """The graphs of a layout: `replay` launches the forward, `stages` launch the backward.

    Attributes:
        incoming: Static gradients of the outputs that are used, read by the backward.
        trained: The indices of the distinct trained parameters.
        other_slots: Where modules store other tensors: buffers and plain attributes.
    """

    differentiable: list[bool]
    used: tuple[bool, ...]
    incoming: Tensors
    stages: list[Stage]
    trained: list[int]
    slots: Slots
    other_slots: Slots
    requires_grad: tuple[bool, ...]
    memory: Memory

    def backward(self) -> Gradients:
        """Replay the backward. Return copies of the gradients of the pixels and of every trained parameter."""
        result: Gradients = [None] * (1 + len(self.trained))
        for stage in self.stages:
            stage.run(result)
        return result


class StepCapture:
    """Runs one training step for a capture: `forward()`, then `backward(stage)` for every stage, the last one first.

    Between two stages the residual stream is detached, so that each has an autograd graph of its own.

    The recorder runs both to warm up, then under capture, and once more if memory ran out. Every run replaces the
    tensors that the last one left. Lists change in place, since the captured step holds the same lists.

    Of the call's pixels only shape and `requires_grad` count. `used` says whether the last loss used each output.
    """

    def __init__(
        self, route: Route, pixels_TP: Tensor, parameters: Sequence[Tensor], slots: Slots, used: tuple[bool, ...]
    ) -> None:
        request = route.spec.request
        self.route = route.bound
        self.parameters = parameters
        self.slots = slots
        self.requires_grad = tuple(parameter.requires_grad for parameter in parameters)
        self.pixels_TP = torch.zeros(pixels_TP.shape, dtype=request.dtype, device=request.device)
        self.leaf_TP = self.pixels_TP.detach().requires_grad_(pixels_TP.requires_grad)
        self.used = used
        self.outputs: Tensors = []
        self.incoming: Tensors = []
        self._cuts = _cuts(self.route, pixels_TP.requires_grad)
        self._stages = [Stage() for _ in range(len(self._cuts) + 1)]
        self._encoded: Tensors = []  # the outputs with their autograd graph
        self._leaves: Tensors = []
        self._ends: list[Tensors] = []  # by cut, the residual stream before it
        self._starts: list[Tensors] = []  # by cut, the same, detached
        self._gradients_of_starts: dict[int, Gradients] = {}
        self._last_stage: Stage | None = None  # whose gradients still own their memory

    def forward(self) -> None:
        """Encode the static pixels."""
        self._free_graph()
        self.outputs.clear()
        for stage in self._stages:
            stage.gradients.clear()
        with torch.enable_grad(), _detached_leaves(self.slots, self.parameters, self.requires_grad) as leaves:
            self._leaves = leaves
            self._encoded = encode(self.route, self.leaf_TP, after_layer=self._cut)
        self.outputs += [output.detach() for output in self._encoded]
        if not self.incoming:
            self._choose_incoming()

    def _cut(self, index: int, residual: Residual) -> Residual:
        """Detach the residual stream after the last layer of a stage."""
        if index not in self._cuts:
            return residual
        x_TE, delta_TE = residual
        ends = [tensor for tensor in residual if tensor is not None and tensor.requires_grad]
        starts = {id(end): end.detach().requires_grad_() for end in ends}
        self._ends.append(ends)
        self._starts.append(list(starts.values()))
        return starts.get(id(x_TE), x_TE), None if delta_TE is None else starts.get(id(delta_TE), delta_TE)

    def backward(self, index: int) -> None:
        """Compute the gradients of one stage of the last forward."""
        stage_of_output = self._stage_of_output()
        used_outputs = [output for output, is_used in zip(self._encoded, self.used, strict=True) if is_used]
        used_stages = [stage for stage, is_used in zip(stage_of_output, self.used, strict=True) if is_used]
        ends: Tensors = []
        incoming: Tensors = []
        for output, static, stage in zip(used_outputs, self.incoming, used_stages, strict=True):
            if stage == index:
                ends.append(output)
                incoming.append(static)
        if index < len(self._cuts):
            for end, gradient in zip(self._ends[index], self._gradients_of_starts[index], strict=True):
                if gradient is not None:
                    ends.append(end)
                    incoming.append(gradient)
        starts = self._starts[index - 1] if index else []
        gradients = _gradients_of(ends, self.leaf_TP, [*starts, *self._leaves], incoming)
        of_pixels, *others = gradients
        self._gradients_of_starts[index - 1] = others[: len(starts)]
        of_leaves: Gradients = [of_pixels, *others[len(starts) :]]
        self._last_stage = self._stages[index]
        self._last_stage.indices[:] = [place for place, gradient in enumerate(of_leaves) if gradient is not None]
        self._last_stage.gradients[:] = present(of_leaves)

    def _stage_of_output(self) -> list[int]:
        """Return the stage of every output: that of the layer that made it."""
        ops = self.route.spec.ops
        assert ops is not None
        deepstack = [sum(cut < layer for cut in self._cuts) for layer in ops.deepstack]
        others = len(self._encoded) - len(deepstack)
        return [len(self._cuts)] * others + deepstack

    def step(self, recorder: CudaRecorder) -> CapturedStep:
        """Capture all graphs."""
        order = list(reversed(range(len(self._stages))))

        def give_memory_back() -> None:
            if self._last_stage is not None:
                gradients = self._last_stage.gradients
                gradients[:] = [recorder.borrow(gradient) for gradient in gradients]
            self._last_stage = None

        backward_runs = [partial(self.backward, index) for index in order]
        (forward, *backwards), nbytes = recorder.record(self.forward, *backward_runs, after_each=give_memory_back)
        stages = [self._stages[index] for index in order]
        for stage, backward in zip(stages, backwards, strict=True):
            stage.replay = backward
        differentiable = [output.requires_grad for output in self._encoded]
        self._free_graph()  # it must not outlive the capture
        metadata = self.route.metadata
        ops = self.route.spec.ops
        assert ops is not None
        return CapturedStep(
            label=f"{metadata.rows} patches in {metadata.full.count} segments",
            grid=metadata.grid,
            route=self.route,
            pixels_TP=self.pixels_TP,
            outputs=self.outputs,
            differentiable=differentiable,
            used=self.used,
            incoming=self.incoming,
            stages=stages,
            trained=indices_of_trained(self.parameters, self.requires_grad),
            slots=self.slots,
            other_slots=slots_of(ops.parts.modules(), with_weights=False),
            requires_grad=self.requires_grad,
            memory=Memory(self.parameters),
            replay=forward,
            nbytes=nbytes + sum(tensor.nbytes for tensor in (self.pixels_TP, *self.incoming)),
        )

    def _free_graph(self) -> None:
        """Free the autograd graph of the last run, whose tensors the capture's pool could not reuse."""
        self._encoded = []
        self._ends = []
        self._starts = []
        self._gradients_of_starts = {}

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
    """Run forward and backward without graphs; return the gradients of the pixels and of every trained parameter."""
    with torch.enable_grad(), _detached_leaves(step.slots, parameters, step.requires_grad) as leaves:
        outputs = encode(route, leaf_TP)
    used_outputs = [output for output, gradient in zip(outputs, incoming, strict=True) if gradient is not None]
    return _gradients_of(used_outputs, leaf_TP, leaves, present(incoming))


def _cuts(route: Route, pixels_require_grad: bool) -> list[int]:
    """Return the layers after which a stage ends: some evenly spaced ones that gradients pass on their way down."""
    ops = route.spec.ops
    assert ops is not None
    blocks = [block.module for block in ops.parts.blocks]
    is_trained = [any(parameter.requires_grad for parameter in block.parameters()) for block in blocks]
    lowest = 0 if pixels_require_grad else is_trained.index(True) if any(is_trained) else len(blocks)
    candidates = range(lowest, len(blocks) - 1)
    stages = min(MOST_STAGES, len(candidates) + 1)
    return [candidates[len(candidates) * stage // stages] for stage in range(1, stages)]


def indices_of_trained(parameters: Sequence[Tensor], requires_grad: Sequence[bool]) -> list[int]:
    """Return the indices of the distinct trained parameters: one that several modules share has one gradient."""
    indices: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        if requires_grad[index]:
            indices.setdefault(id(parameter), index)
    return list(indices.values())


@contextmanager
def _detached_leaves(slots: Slots, parameters: Sequence[Tensor], requires_grad: Sequence[bool]) -> Iterator[Tensors]:
    """Replace trained parameters by detached leaves over the same memory, within the with block; yield the leaves.

    A parameter's own autograd node must not be captured. DDP or an earlier loss may keep it alive, and it runs on
    the stream that made it, which by default cannot be captured. It also runs hooks, which are meant for the gradient
    that leaves the tower. A parameter that was frozen since its forward has no such node.
    """
    trained = [parameters[index] for index in indices_of_trained(parameters, requires_grad)]
    leaves = {id(parameter): parameter.detach().requires_grad_() for parameter in trained}
    with replaced(slots, [leaves.get(id(parameter), parameter) for parameter in parameters]):
        yield list(leaves.values())


def _gradients_of(outputs: Tensors, leaf_TP: Tensor, leaves: Tensors, incoming: Tensors) -> Gradients:
    """Return the gradient of the pixels (None if they require none), then of every leaf (None if none reaches it)."""
    pixels = [leaf_TP] if leaf_TP.requires_grad else []
    if not outputs:
        return [None] * (1 + len(leaves))
    with torch.autocast(leaf_TP.device.type, enabled=False):  # autocast is off where programs call `backward`, too
        gradients = torch.autograd.grad(outputs, [*pixels, *leaves], incoming, allow_unused=True)
    return [*gradients] if pixels else [None, *gradients]


def present(tensors: Sequence[Tensor | None]) -> Tensors:
    """Return the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]
