"""Operations with gradients of their own: each by itself a node of autograd's graph, or all of a layer together one.

One node a layer, instead of six and the views between them: what Python and autograd's engine do between launches is
what a step with few rows takes. `T` rows, `E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.training.column_sum import flattened
from hf_vit_accel.ops.training.norm_backward import Norm, norm_of, remember

Rows = Tensor
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """An operation with a gradient of its own, which takes rows, weights and settings in this order.

    function: the autograd function that runs it. weights: as they are now, in the dtype of the rows.
    takes_norm: whether its last argument is what its rows were made of by a norm. fault: the name of what failed, if
    its forward does.
    """

    function: Any
    weights: Callable[[], Sequence[Any]] = tuple
    settings: tuple[Any, ...] = ()
    takes_norm: bool = False
    fault: str = machine.KERNELS

    def __call__(self, *rows: Any, norm: Norm | None = None) -> Any:
        """Alone: one node."""
        extra = (norm or norm_of(rows[0]),) if self.takes_norm else ()
        return self._alone(*rows, *self.weights(), *self.settings, *extra)

    @cached_property
    def _alone(self) -> Any:
        return machine.guarded(self.fault, self.function.apply)

    @cached_property
    def forward(self) -> Any:
        """The function's forward, which takes a context first."""
        return machine.guarded(self.fault, self.function.forward)

    @cached_property
    def backward(self) -> Any:
        """The function's backward as it is written: the layer's own is what `once_differentiable` guards."""
        return self.function.backward.__wrapped__


class TrainedNorm(Trained):
    """(x, delta) to (x + delta, the norm of it); the product that is given the norm knows what it was made of."""

    def __call__(self, *rows: Any, norm: Norm | None = None) -> tuple[Rows, Rows]:
        (x_TE, delta_TE), weights = rows, self.weights()
        sum_TE, normed_TE = self._alone(x_TE.contiguous(), delta_TE, *weights, *self.settings)
        remember(normed_TE, Norm(sum_TE, *weights, *self.settings))
        return sum_TE, normed_TE


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedLayer:
    """All that a layer computes, as one node. parts: norm1, qkv, attend, proj, norm2, mlp."""

    parts: tuple[Trained, ...]

    @cached_property
    def unneeded(self) -> tuple[int, ...]:
        """How many arguments, after a part's weights, have no gradient."""
        return tuple(len(part.settings) + part.takes_norm for part in self.parts)

    def __call__(
        self, heads: tuple[int, ...], cos_TD: Rows, sin_TD: Rows, x_TE: Rows, delta_TE: Rows | None
    ) -> tuple[Rows, Rows | None]:
        """The residual stream, (T, E), and what it is still to receive, (T, E) or None. heads: (3, H, D)."""
        weights = [part.weights() for part in self.parts]
        rows = cos_TD, sin_TD, x_TE.contiguous(), delta_TE
        return _Layer.apply(self, heads, tuple(map(len, weights)), *rows, *chain.from_iterable(weights))


def layer_of(operations: Any, attend: Any) -> TrainedLayer | None:
    """One node for a layer's operations and its attention; None where one of them is not `Trained`."""
    found = operations.norm1, operations.qkv, attend, operations.proj, operations.norm2, operations.mlp
    parts = tuple(getattr(part, "__wrapped__", part) for part in found)  # they guard themselves
    return TrainedLayer(parts=parts) if all(isinstance(part, Trained) for part in parts) else None


class Frame:
    """An autograd function's context, where it is run as a part of another function."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Until the function that this one is a part of saves them."""
        self.saved_tensors = tensors

    # The parts are given None for what needs no gradient, as they ask for: nothing is to be done.
    set_materialize_grads = staticmethod(bool)

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Which parts need a gradient is known before they run."""


@lru_cache(maxsize=1024)
def _needs(given: tuple[bool, ...], counts: tuple[int, ...], unneeded: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    """Which arguments of each part need a gradient. given: of x, of delta, of all weights; counts: of each part's."""
    needs_x, needs_delta, *of_weights = given
    after = [(*needs, *(False,) * rest) for needs, rest in zip(_split(of_weights, counts), unneeded, strict=True)]
    norm1 = needs_x, needs_delta, *after[0]
    qkv = any(norm1), *after[1]
    attend = any(qkv), False, False, *after[2]
    proj = any(attend), *after[3]
    norm2 = needs_x or needs_delta, any(proj), *after[4]
    return norm1, qkv, attend, proj, norm2, (any(norm2), *after[5])


class _Layer(torch.autograd.Function):
    """The functions of `TrainedLayer`'s parts, one after the other, and back."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TrainedLayer,
        heads: tuple[int, ...],
        counts: tuple[int, ...],
        cos_TD: Rows,
        sin_TD: Rows,
        x_TE: Rows,
        delta_TE: Rows | None,
        *flat: Any,
    ) -> tuple[Rows, Rows | None]:
        ctx.set_materialize_grads(False)
        norm1, qkv, attend, proj, norm2, mlp = layer.parts
        needs = _needs(ctx.needs_input_grad[5:], counts, layer.unneeded)
        of_norm1, of_qkv, of_attend, of_proj, of_norm2, of_mlp = frames = list(map(Frame, needs))
        in_norm1, in_qkv, _, in_proj, in_norm2, in_mlp = _split(flat, counts)
        sum_TE, normed_TE = norm1.forward(of_norm1, x_TE, delta_TE, *in_norm1, *norm1.settings)
        norm = Norm(sum_TE, *in_norm1, *norm1.settings)
        qkv_TF = qkv.forward(of_qkv, normed_TE, *in_qkv, *qkv.settings, norm)
        rows = qkv_TF.view(qkv_TF.shape[0], *heads), cos_TD, sin_TD  # Python's unflatten takes 8 us
        attended_TF = attend.forward(of_attend, *rows, *attend.settings).flatten(1)
        made_TE = proj.forward(of_proj, attended_TF, *in_proj, *proj.settings, None)
        sum_TE, normed_TE = norm2.forward(of_norm2, sum_TE, made_TE, *in_norm2, *norm2.settings)
        norm = Norm(sum_TE, *in_norm2, *norm2.settings)
        made_TE = mlp.forward(of_mlp, normed_TE, *in_mlp, *mlp.settings, norm)
        # All by autograd's own means: hooks see them, and a result that is kept makes no cycle.
        saved = [frame.saved_tensors for frame in frames]
        ctx.save_for_backward(*chain.from_iterable(saved))
        for frame in frames:
            frame.saved_tensors = ()
        ctx.layer, ctx.heads, ctx.counts, ctx.frames, ctx.saved = layer, heads, counts, frames, list(map(len, saved))
        return sum_TE, made_TE

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dsum_TE: Rows | None, ddelta_TE: Rows | None) -> tuple[Any, ...]:
        parts, frames, counts = ctx.layer.parts, ctx.frames, ctx.counts
        saved, gradients = _split(ctx.saved_tensors, ctx.saved), [()] * len(parts)

        def back(at: int, rows: int, *given: Rows | None) -> Any:
            """Gradients of a part's rows; those of its weights are put aside."""
            frame = frames[at]
            frame.saved_tensors, saved[at] = saved[at], ()
            if any(frame.needs_input_grad) and (given[0] is not None or given[-1] is not None):
                found = parts[at].backward(frame, *given)
            else:
                found = (None,) * len(frame.needs_input_grad)
            frame.saved_tensors = ()
            gradients[at] = found[rows : rows + counts[at]]
            return found[:rows]

        (dnormed_TE,) = back(5, 1, ddelta_TE)
        dsum_TE, dproj_TE = back(4, 2, dsum_TE, dnormed_TE)
        (dattended,) = back(3, 1, dproj_TE)
        dqkv_T3HD, _, _ = back(2, 3, None if dattended is None else dattended.view(-1, *ctx.heads[1:]))
        (dnormed_TE,) = back(1, 1, None if dqkv_T3HD is None else flattened(dqkv_T3HD))
        dx_TE, ddelta_TE = back(0, 2, dsum_TE, dnormed_TE)
        ddelta_TE = ddelta_TE if ctx.needs_input_grad[6] else None
        return None, None, None, None, None, dx_TE, ddelta_TE, *chain.from_iterable(gradients)


def _split(flat: Iterable[V], counts: Iterable[int]) -> list[tuple[V, ...]]:
    rest = iter(flat)
    return [tuple(islice(rest, count)) for count in counts]
