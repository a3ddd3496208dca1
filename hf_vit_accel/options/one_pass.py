"""The innermost `Encode`: a batch is replayed from CUDA graphs, or encoded eagerly."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel.engine.call import Batch
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import RouteKey, Routes
from hf_vit_accel.graphs.policy import Accepted, Decision
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.machine import raise_if_any

AUTOMATIC_ON = ("cuda",)
"""The types of devices on which `cuda_graphs="auto"` captures."""


class OnePass:
    """Returns the outputs of a batch, and decides about it: which graph replays it, or by which route it is encoded."""

    def __init__(self, routes: Routes, inference: Runner | None, training: TrainingRunner | None) -> None:
        self._routes = routes
        self._inference = inference
        self._training = training

    def __call__(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of a batch, and note in its attempt how they were made."""
        plan = batch.plan
        spec = plan.spec
        is_strict = spec.settings.strict
        runner = self._training if spec.request.grad else self._inference
        is_automatic = spec.settings.graphs == "auto"
        if is_automatic and spec.request.device.type not in AUTOMATIC_ON:
            runner = None
        why_eager = "such calls are never replayed"
        route = None
        if runner is not None:
            ran = runner.run(batch)
            if not isinstance(ran, Decision):
                return ran
            why_eager = ran.reason
            if is_strict and not (is_automatic or isinstance(why_eager, Accepted)):
                raise_if_any([f"not replayed from a CUDA graph: {why_eager}"])
            if ran.routes and not is_strict:
                (route,) = ran.routes  # it fails again, and is disabled
        if route is None:
            device = spec.request.device
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            route = self._routes.cache.find(RouteKey(batch.grid, spec, stream)) or self._routes.get(batch.grid, spec)
        if is_strict:
            raise_if_any(route.unmet)
        outputs = encode(
            route.bound or route.ready(),
            batch.pixels_TP,
            plan.checkpoints,
            plan.called or plan.reading.sharded_layers,
            output_slices=batch.output_slices,
        )
        batch.attempt.passes.append((route, f"eager: {why_eager}"))
        return outputs

    def drop_graphs(self) -> None:
        """Drop all CUDA graphs, and give their memory back."""
        for runner in (self._inference, self._training):
            if runner is not None:
                runner.drop_graphs()
