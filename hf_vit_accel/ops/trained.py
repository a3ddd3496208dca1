"""Operations with gradients of their own: each by itself a node of autograd's graph, or all of a layer together one.

One node a layer, instead of six and the views between them: what Python and autograd's engine do between launches is
what a step with few rows takes. `T` rows, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from hf_vit_accel import env
from hf_vit_accel.ops.norm_backward import Norm, norm_of, remember

Rows = torch.Tensor
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """An operation with a gradient of its own, which takes rows, weights and settings in this order.

    alone: what runs it; function: the autograd function of that. weights: as they are now, in the dtype of the rows.
    takes_norm: whether its last argument is what its rows were made of by a norm. adds, of a layer's proj: whether it
    and the MLP add to the residual stream, which they take after that. fault: the name of what failed, if its forward
    does.
    """

    alone: Callable[..., Any]
    function: Any
    weights: Callable[[], Sequence[Any]] = tuple
    settings: tuple[Any, ...] = ()
    takes_norm: bool = False
    adds: bool = False
    fault: str = env.KERNELS

    def __call__(self, *rows: Any, norm: Norm | None = None) -> Any:
        """Alone: one node."""
        extra = (norm or norm_of(rows[0]),) if self.takes_norm else ()
        return self._alone(*rows, *self.weights(), *self.settings, *extra)

    @cached_property
    def _alone(self) -> Any:
        return env.guarded(self.fault, self.alone)

    @cached_property
    def forward(self) -> Any:
        """The function's forward, which takes a context first."""
        return env.guarded(self.fault, self.function.forward)

    @cached_property
    def backward(self) -> Any:
        """The function's backward as it is written: the layer's own is what `once_differentiable` guards."""
        return self.function.backward.__wrapped__


class TrainedNorm(Trained):
    """(x, delta) to (x + delta, the norm of it); the product that is given the norm knows what it was made of."""

    def __call__(self, *rows: Any, norm: Norm | None = None) -> tuple[Rows, Rows]:
        (x_TE, delta_TE), weights = rows, self.weights()
        sum_TE, normed_TE = self._alone(x_TE, delta_TE, *weights, *self.settings)
        remember(normed_TE, Norm(sum_TE, *weights, *self.settings))
        return sum_TE, normed_TE


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedLayer:
    """All that a layer computes, as one node."""

    norm1: Trained
    qkv: Trained
    attend: Trained
    proj: Trained
    norm2: Trained
    mlp: Trained

    def __call__(
        self, heads: tuple[int, ...], cos_TD: Rows, sin_TD: Rows, x_TE: Rows, delta_TE: Rows | None
    ) -> tuple[Rows, Rows | None]:
        """The residual stream, (T, E), and what it is still to receive, (T, E) or None. heads: (3, H, D)."""
        weights = [part.weights() for part in (self.norm1, self.qkv, self.proj, self.norm2, self.mlp)]
        rows = cos_TD, sin_TD, x_TE.contiguous(), delta_TE
        flat = (weight for weights_of_part in weights for weight in weights_of_part)
        out: tuple[Rows, Rows | None] = _Layer.apply(self, heads, list(map(len, weights)), *rows, *flat)
        return out


def layer_of(operations: Any, attend: Any) -> TrainedLayer | None:
    """One node for a layer's operations and its attention; None where one of them is not `Trained`."""
    names = "norm1", "qkv", "proj", "norm2", "mlp"
    found = {name: getattr(operations, name) for name in names} | {"attend": attend}
    parts = {name: getattr(part, "__wrapped__", part) for name, part in found.items()}  # they guard themselves
    return TrainedLayer(**parts) if all(isinstance(part, Trained) for part in parts.values()) else None


class Frame:
    """An autograd function's context, where it is run as a part of another function."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Until the function that this one is a part of saves them."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """The parts are given None for what needs no gradient, as they ask for."""


class _Layer(torch.autograd.Function):
    """The functions of `TrainedLayer`'s parts, one after the other, and back."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TrainedLayer,
        heads: tuple[int, ...],
        counts: list[int],
        cos_TD: Rows,
        sin_TD: Rows,
        x_TE: Rows,
        delta_TE: Rows | None,
        *flat: torch.Tensor | None,
    ) -> tuple[Rows, Rows | None]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.frames, ctx.heads = layer, [], heads
        needs_x, needs_delta, *needs_flat = ctx.needs_input_grad[5:]
        adds = layer.proj.adds
        weights: list[list[Any]] = list(_split(flat, counts))
        needed = list(_split(needs_flat, counts))

        def run(part: Trained, at: int | None, rows: tuple[Any, ...], needs: tuple[bool, ...], *rest: Any) -> Any:
            """rest: the norm that made the rows, and the residual stream, whose gradient is the result's."""
            own, needs_own = (weights[at], needed[at]) if at is not None else ([], [])
            frame = Frame((*needs, *needs_own, *(False for _ in (*part.settings, *rest[:1]))))
            ctx.frames.append(frame)
            made = part.forward(frame, *rows, *own, *part.settings, *rest)
            return made, any(frame.needs_input_grad)

        # A norm that adds nothing is told that it does: so it sums up the gradient, for the bias of what was added.
        needs = needs_x, needs_x if adds and delta_TE is None else needs_delta
        (sum_TE, normed_TE), flows = run(layer.norm1, 0, (x_TE, delta_TE), needs)
        norm = Norm(sum_TE, *weights[0], *layer.norm1.settings)
        qkv, flows = run(layer.qkv, 1, (normed_TE,), (flows,), norm)
        rows = qkv.view(len(qkv), *heads), cos_TD, sin_TD  # Python's unflatten takes 8 us
        attended_THD, flows = run(layer.attend, None, rows, (flows, False, False))
        made_TE, flows = run(layer.proj, 2, (attended_THD.flatten(1),), (flows,), None, *[sum_TE] * adds)
        pair = (made_TE, None) if adds else (sum_TE, made_TE)
        (sum_TE, normed_TE), flows = run(layer.norm2, 3, pair, (needs_x or needs_delta, flows))
        norm = Norm(sum_TE, *weights[3], *layer.norm2.settings)
        made_TE, flows = run(layer.mlp, 4, (normed_TE,), (flows,), norm, *[sum_TE] * adds)
        # All by autograd's own means: hooks see them, and a result that is kept makes no cycle.
        ctx.save_for_backward(*(tensor for frame in ctx.frames for tensor in frame.saved_tensors))
        ctx.saved = [len(frame.saved_tensors) for frame in ctx.frames]
        for frame in ctx.frames:
            frame.saved_tensors = ()
        return (made_TE, None) if adds else (sum_TE, made_TE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum_TE: Rows | None, ddelta_TE: Rows | None) -> tuple[Any, ...]:
        layer, gradients = ctx.layer, {}
        saved = dict(zip(map(id, ctx.frames), _split(ctx.saved_tensors, ctx.saved), strict=True))
        frames = dict(zip(("norm1", "qkv", "attend", "proj", "norm2", "mlp"), ctx.frames, strict=True))

        def back(name: str, rows: int, *given: Rows | None) -> tuple[Rows | None, ...]:
            """Gradients of a part's rows; those of its weights are put aside."""
            frame, part = frames[name], getattr(layer, name)
            flows = any(frame.needs_input_grad) and any(each is not None for each in given)
            if flows:
                frame.saved_tensors = tuple(saved.pop(id(frame)))
                found = part.backward(frame, *given)
                frame.saved_tensors = ()
            else:
                found = (None,) * len(frame.needs_input_grad)
            gradients[name] = found[rows : len(found) - len(part.settings) - part.takes_norm]
            return tuple(found[:rows])

        (dnormed_TE,) = back("mlp", 1, dsum_TE if layer.proj.adds else ddelta_TE)
        dsum_TE, dproj_TE = back("norm2", 2, dsum_TE, dnormed_TE)
        (dattended,) = back("proj", 1, dproj_TE)
        dqkv_T3HD, *_ = back("attend", 3, None if dattended is None else dattended.view(-1, *ctx.heads[1:]))
        (dnormed_TE,) = back("qkv", 1, None if dqkv_T3HD is None else dqkv_T3HD.flatten(1))
        dx_TE, ddelta_TE = back("norm1", 2, dsum_TE, dnormed_TE)
        ddelta_TE = ddelta_TE if ctx.needs_input_grad[6] else None
        order = "norm1", "qkv", "proj", "norm2", "mlp"
        return None, None, None, None, None, dx_TE, ddelta_TE, *(each for name in order for each in gradients[name])


def _split(flat: Sequence[V], counts: list[int]) -> Iterator[list[V]]:
    rest = iter(flat)
    return (list(islice(rest, count)) for count in counts)
