"""Replays training steps whose layout comes again, from CUDA graphs: one of the forward, some of the backward.

With few rows a training step takes as long as the Python code between its launches. So a layout that came often is
captured in its own shape, and its graphs form one node in autograd's graph.
The forward graph leaves activations for the backward graphs in the memory pool that all layouts share. Only one call
can therefore be under way: a call that comes before the gradients of the last one runs eagerly. Gradients whose
activations were overwritten are computed again, with the pixels and buffers of the forward. Its weights may have moved
meanwhile; written to, they raise.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.call import Batch
from hf_vit_accel.engine.recorded import Recorded
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.graphs.budgets import Bin
from hf_vit_accel.graphs.policy import AUTOMATIC_STEPS, NEVER, Accepted, Decision, Thresholds
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.step import (
    CapturedStep,
    Gradients,
    StepCapture,
    Tensors,
    present,
    run_eagerly,
)
from hf_vit_accel.graphs.store import Bins, GraphStore, Identity
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.ops.base import FunctionContext

_BYTES_PER_VALUE = 33
"""Bytes of the activations of a training step for each row, layer and column of the residual stream (H100)."""


class _Call:
    """A replayed forward whose backward may still come: it is over once that ran, or can no longer be replayed.

    It holds its outputs until they are returned, and the tower's parameters until autograd has saved them.
    """

    def __init__(self, step: CapturedStep, parameters: Sequence[Tensor]) -> None:
        self.step = step
        self.recorded = Recorded(step.other_slots)
        self.is_over = False
        self.outputs: Tensors = []
        self.parameters = parameters


class TrainingRunner(GraphStore[CapturedStep]):
    """The graphs of forward and backward of one tower."""

    def __init__(self, config: GraphConfig | None, routes: Routes) -> None:
        thresholds = AUTOMATIC_STEPS
        if config is not None:
            thresholds = Thresholds(
                exact_calls=config.exact_after or NEVER,
                most_rows=4 * config.max_tokens,
                most_graphs=config.max_graphs,
                most_bytes=config.max_training_bytes,
            )
        super().__init__(thresholds, routes)
        self._outputs_of_last_loss: tuple[bool, ...] = ()  # whether it used each output
        self._last: weakref.ref[_Call] | None = None

    def _drop(self) -> None:
        super()._drop()
        self._last = None

    def static_buffers(self) -> Tensors:
        """List the tensors that the next call writes before a graph reads them."""
        last = None if self._last is None else self._last()
        buffers: Tensors = []
        for step in self._graphs.values():
            buffers += [tensor.detach() for tensor in step.incoming]
            if last is None or last.step is not step:  # gradients of that call may need its pixels
                buffers.append(step.pixels_TP)
        return buffers

    def needed_bytes(self, grid: Grid, identity: Identity) -> int:
        """Estimate the device memory of a step: activations, and the gradients of two stages."""
        spec = identity.spec
        values_per_row = len(spec.full_layers) * spec.request.heads * spec.request.head_dim
        assert spec.ops is not None
        weights = {weight for module in spec.ops.parts.modules() for weight in module.parameters(recurse=False)}
        gradient_bytes = sum(weight.nbytes for weight in weights if weight.requires_grad)
        return rows_of(grid) * values_per_row * _BYTES_PER_VALUE + gradient_bytes // 4

    def _capture(self, batch: Batch, route: Route, bin_: Bin | None, recorder: CudaRecorder) -> CapturedStep:
        parameters = batch.plan.parameters
        slots = [
            (parameter_dict, name)
            for parameter_dict in batch.plan.reading.parameter_dicts
            for name, value in parameter_dict.items()
            if value is not None
        ]
        step = StepCapture(route, batch.pixels_TP, parameters, slots, self._outputs_of_last_loss).step(recorder)
        torch.cuda.empty_cache()  # the warm-up's memory is of the recorder's stream: no other work can use it
        return step

    def _why_eager(self, batch: Batch) -> str | None:
        why = super()._why_eager(batch)
        if why is not None:
            return why
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "what gradients need is saved by hooks of somebody else (checkpointing, offloading)"
        last = None if self._last is None else self._last()
        if last is not None and not last.is_over:
            return Accepted("the gradients of an earlier call are still to come")
        return None

    def _candidates(self, grid: Grid, spec: Spec, bins: Bins) -> Iterator[Decision | str]:
        most_rows = self.policy.thresholds.most_rows
        if rows_of(grid) > most_rows:
            yield Accepted(f"steps of more than {most_rows} patches keep the GPU busy without a graph")
        elif not self.policy.came_often(grid, is_padded=False):
            yield Accepted("with gradients, a layout is captured when it comes often")
        else:
            route = self._routes.get(grid, spec, "exactly")
            key = self._key((grid, self._outputs_of_last_loss))
            yield Decision(replay="exactly", routes=(route,), keys=(key,))

    def _replay(self, decision: Decision, graphs: list[CapturedStep], batch: Batch) -> list[Tensor]:
        """Replay the forward of a call, so that autograd replays its backward."""
        (step,) = graphs
        (route,) = decision.routes
        parameters = batch.plan.parameters
        pixels_TP = batch.pixels_TP
        if pixels_TP.is_inference():  # autograd cannot save inference tensors
            pixels_TP = pixels_TP.clone()
        recorder = self._recorder  # if memory runs out, the store drops it
        assert recorder is not None
        with torch.no_grad():
            call = _Call(step, parameters)
            recorder.wait()
            try:
                step.pixels_TP.copy_(pixels_TP)
                step.replay()
                call.outputs = [output.clone() for output in step.outputs]
            finally:
                recorder.done()
        self._last = weakref.ref(call)
        leaves = [parameters[index] for index in step.trained]  # collected while the GPU works
        return list(_Replay.apply(self, call, route, pixels_TP, *leaves))

    def backward(
        self, call: _Call, incoming: Sequence[Tensor | None], parameters: Sequence[Tensor]
    ) -> Gradients | None:
        """Return the gradients of a call from its graphs, fresh tensors; None where they must be computed again."""
        step = call.step
        used = tuple(gradient is not None for gradient in incoming)
        with self._lock:
            was_over = call.is_over
            call.is_over = True
            # by a later replay, or by this call's first backward (`retain_graph`)
            is_overwritten = was_over or self._last is None or self._last() is not call
            # The graphs read the weights' former memory, which may be freed.
            has_moved = not step.memory.is_of(parameters)
            if is_overwritten or has_moved or not call.recorded.is_unchanged():  # a weight may be a buffer
                return None
            if used != step.used:
                self._outputs_of_last_loss = used
                self._steady = {}
                self.policy.count_change(2)
                return None
            recorder = self._recorder
            assert recorder is not None
            recorder.wait()
            try:
                for static, gradient in zip(step.incoming, present(incoming), strict=True):
                    static.copy_(gradient)
                return step.backward()
            finally:
                recorder.done()


class _Replay(torch.autograd.Function):
    """A replayed tower as one autograd node, from pixels and trained parameters to the outputs."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        runner: TrainingRunner,
        call: _Call,
        route: Route,
        pixels_TP: Tensor,
        *trained_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Saved tensors raise if they change before the backward, as in stock. Gradients pass frozen weights, too.
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
    def backward(ctx: FunctionContext, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        pixels_TP, *parameters = ctx.saved_tensors
        gradients = ctx.runner.backward(ctx.call, incoming, parameters)
        if gradients is None:
            leaf_TP = pixels_TP.detach().requires_grad_(ctx.needs_input_grad[3])
            with ctx.call.recorded, torch.autocast(**ctx.autocast):
                gradients = run_eagerly(ctx.call.step, ctx.route.bound, leaf_TP, parameters, incoming)
        return None, None, None, *gradients
