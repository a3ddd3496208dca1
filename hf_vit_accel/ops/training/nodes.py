"""Operations that bring their own backward, and the layers that are made of them.

A complete layer is one node of autograd's graph instead of six, where all its operations have a backward: with few rows
a training step is bound by the host, by Python and autograd's engine. Other layers run operation by operation.
`T` rows, `E` width, `F` width of a product, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.add_norm import widened
from hf_vit_accel.ops.base import AddThen, Apply, FunctionContext, Gradients
from hf_vit_accel.ops.training.norm_backward import NormRecipe

if TYPE_CHECKING:
    from hf_vit_accel.ops import LayerOps

V = TypeVar("V")
Rows = Tensor
TrainedLayer = Callable[..., tuple[Rows, Rows | None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OpWithBackward:
    """An autograd function with its arguments after the rows: the current weights, then settings without gradients.

    Attributes:
        takes_norm: whether the last argument is the `NormRecipe` of its rows.
        fault: the name to report if the forward fails.
    """

    function: type[torch.autograd.Function]
    weights: Callable[[], Sequence[Any]] = tuple
    settings: tuple[object, ...] = ()
    takes_norm: bool = False
    fault: str = machine.KERNELS

    def __call__(self, *rows: Rows | None, recipe: NormRecipe | None = None) -> Any:
        if not self.takes_norm:
            return self._apply(*rows, *self.weights(), *self.settings)
        return self._apply(*rows, *self.weights(), *self.settings, recipe)

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return machine.guarded(self.fault, self.function.apply)

    @cached_property
    def forward(self) -> Callable[..., Any]:
        """Return the function's forward, which takes a context first."""
        return machine.guarded(self.fault, self.function.forward)

    @cached_property
    def backward(self) -> Callable[..., Any]:
        """Return the function's bare backward: the outer function's own is once-differentiable already."""
        return self.function.backward.__wrapped__  # type: ignore[attr-defined]


class NormWithBackward(OpWithBackward):
    """Compute (x + delta, norm of it)."""

    def __call__(self, *rows: Any, recipe: NormRecipe | None = None) -> tuple[Rows, Rows]:
        return self.with_recipe(*rows)[:2]

    def with_recipe(self, x_TE: Rows, delta_TE: Rows | None) -> tuple[Rows, Rows, NormRecipe]:
        """Return x + delta, the norm of it, and the recipe of the normed rows."""
        weights = self.weights()
        x_TE = widened(x_TE, delta_TE)
        sum_TE, normed_TE = self._apply(x_TE.contiguous(), delta_TE, *weights, *self.settings)
        return sum_TE, normed_TE, NormRecipe(sum_TE, *weights, *self.settings)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProductThen:
    """A trained product of normed rows, and a function of its result that is a node of its own."""

    product: OpWithBackward
    then: Apply

    def __call__(self, x_TE: Rows, recipe: NormRecipe | None = None) -> Rows:
        return self.then(self.product(x_TE, recipe=recipe))


def normed(norm: AddThen, product: Apply, width: int | None = None) -> AddThen:
    """Build (x, delta) to x + delta and the product of its norm; a trained product receives the norm's recipe.

    `width` is that of the product's rows, each of which may hold several normed rows.
    """
    norm_node = _unguarded(norm)
    product_node = _unguarded(product)
    if isinstance(norm_node, NormWithBackward) and isinstance(product_node, OpWithBackward | ProductThen):

        def run_trained(x_TE: Rows, delta_TE: Rows | None) -> tuple[Rows, Rows]:
            sum_TE, normed_TE, recipe = norm_node.with_recipe(x_TE, delta_TE)
            if width is not None:
                normed_TE = normed_TE.view(-1, width)
            return sum_TE, product_node(normed_TE, recipe=recipe)

        return run_trained

    def run(x_TE: Rows, delta_TE: Rows | None) -> tuple[Rows, Rows]:
        sum_TE, normed_TE = norm(x_TE, delta_TE)
        if width is not None:
            normed_TE = normed_TE.view(-1, width)
        return sum_TE, product(normed_TE)

    return run


def _unguarded(operation: object) -> object:
    """Return the operation that `guarded` wraps. An `OpWithBackward` guards its forward by itself."""
    return getattr(operation, "__wrapped__", operation)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerNode:
    """A complete layer as one node. With one of every part, eager steps took 1.12 times as long (Qwen3-VL-8B, H200)."""

    parts: Sequence[OpWithBackward]
    """norm1, qkv, attention, proj, norm2 and MLP, in the order in which they run."""

    @cached_property
    def constants(self) -> tuple[int, ...]:
        """Count the arguments of every part that follow its weights; they have no gradients."""
        return tuple(len(part.settings) + part.takes_norm for part in self.parts)

    def __call__(
        self, qkv_shape: tuple[int, ...], cos_TD: Rows, sin_TD: Rows, x_TE: Rows, delta_TE: Rows | None
    ) -> tuple[Rows, Rows | None]:
        """Return the residual stream, (T, E), and the MLP's result that the next norm adds to it, (T, E)."""
        x_TE = widened(x_TE, delta_TE)
        counts = []
        weights: list[object] = []
        for part in self.parts:
            part_weights = part.weights()
            counts.append(len(part_weights))
            weights += part_weights
        return _Layer.apply(self, qkv_shape, tuple(counts), cos_TD, sin_TD, x_TE.contiguous(), delta_TE, *weights)


def trained_layer(layer: LayerOps, attend: Callable[[Rows, Rows, Rows], Rows]) -> TrainedLayer:
    """Build a layer with gradients from its operations and its attention: one node, or operations that run one by one.

    It takes (3, H, D), cos, sin, x and delta, and returns what `LayerNode` does.
    """
    node = layer_node_of(layer, attend)
    if node is not None:
        return node
    project = normed(layer.norm1, layer.qkv)
    finish = normed(layer.norm2, layer.mlp)

    def run(
        qkv_shape: tuple[int, ...], cos_TD: Rows, sin_TD: Rows, x_TE: Rows, delta_TE: Rows | None
    ) -> tuple[Rows, Rows]:
        x_TE, qkv_TF = project(x_TE, delta_TE)
        attended_THD = attend(qkv_TF.view(-1, *qkv_shape), cos_TD, sin_TD)
        return finish(x_TE, layer.proj(attended_THD.flatten(1)))

    return run


def layer_node_of(operations: LayerOps, attend: object) -> LayerNode | None:
    """Build one node from a layer's operations and its attention; None where one of the six is no `OpWithBackward`."""
    built = operations.norm1, operations.qkv, attend, operations.proj, operations.norm2, operations.mlp
    parts = []
    for guarded_part in built:
        part = _unguarded(guarded_part)
        if not isinstance(part, OpWithBackward):
            return None
        parts.append(part)
    return LayerNode(parts=parts)


class InnerContext:
    """The context of an autograd function that runs inside another one.

    Between forward and backward the outer function saves the tensors, so that autograd's hooks and version checks see
    them. Tensors that no gradient needs are None.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Store tensors; the outer function takes them away."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: undefined gradients already arrive as None."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: the outer function knows beforehand which arguments need gradients."""


class _PartContext(InnerContext):
    """The context of one part of a layer, which has so many weights, and how to run its backward."""

    def __init__(self, part: OpWithBackward, needs_input_grad: tuple[bool, ...], weights: int) -> None:
        super().__init__(needs_input_grad)
        self.part = part
        self.weights = weights

    def backward(self, saved: tuple[Tensor | None, ...], *gradients: Rows | None) -> tuple[Gradients, Gradients]:
        """Run the part's backward, if a gradient arrives and one is needed; return those of its rows and weights."""
        rows = len(self.needs_input_grad) - self.weights - len(self.part.settings) - self.part.takes_norm
        arrives = gradients[0] is not None or gradients[-1] is not None
        if not arrives or not any(self.needs_input_grad):
            return (None,) * rows, (None,) * self.weights
        self.saved_tensors = saved
        results = self.part.backward(self, *gradients)
        self.saved_tensors = ()
        return results[:rows], results[rows : rows + self.weights]


@lru_cache(maxsize=1024)
def _layer_needs(
    needs_input_grad: tuple[bool, ...], counts: tuple[int, ...], constants: tuple[int, ...]
) -> list[tuple[bool, ...]]:
    """Work out which arguments of every part need a gradient: rows, weights, then constants that have none."""
    needs_x, needs_delta, *needs_weights = needs_input_grad
    of_norm1, of_qkv, of_attend, of_proj, of_norm2, of_mlp = _split(needs_weights, counts)
    norm1 = needs_x, needs_delta, *of_norm1
    qkv = any(norm1), *of_qkv
    attend = any(qkv), False, False, *of_attend  # its rows, cos and sin
    proj = any(attend), *of_proj
    norm2 = needs_x or needs_delta, any(proj), *of_norm2  # the sum of norm1, and the result of proj
    mlp = any(norm2), *of_mlp
    needs_of_parts = norm1, qkv, attend, proj, norm2, mlp
    return [(*needs, *(False,) * count) for needs, count in zip(needs_of_parts, constants, strict=True)]


class _Layer(torch.autograd.Function):
    """Run the parts of a `LayerNode` one after the other, and their backwards in reverse."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        layer: LayerNode,
        qkv_shape: tuple[int, ...],
        counts: tuple[int, ...],
        cos_TD: Rows,
        sin_TD: Rows,
        x_TE: Rows,
        delta_TE: Rows | None,
        *flat_weights: Any,
    ) -> tuple[Rows, Rows | None]:
        ctx.set_materialize_grads(False)
        needs = _layer_needs(ctx.needs_input_grad[5:], counts, layer.constants)
        norm1, qkv, attend, proj, norm2, mlp = layer.parts
        norm1_weights, qkv_weights, _, proj_weights, norm2_weights, mlp_weights = _split(flat_weights, counts)
        contexts = [_PartContext(*part) for part in zip(layer.parts, needs, counts, strict=True)]
        of_norm1, of_qkv, of_attend, of_proj, of_norm2, of_mlp = contexts

        sum_TE, normed_TE = norm1.forward(of_norm1, x_TE, delta_TE, *norm1_weights, *norm1.settings)
        recipe = NormRecipe(sum_TE, *norm1_weights, *norm1.settings)
        qkv_TF = qkv.forward(of_qkv, normed_TE, *qkv_weights, *qkv.settings, recipe)
        qkv_T3HD = qkv_TF.view(qkv_TF.shape[0], *qkv_shape)  # Python's unflatten takes 8 us
        attended_THD = attend.forward(of_attend, qkv_T3HD, cos_TD, sin_TD, *attend.settings)
        attended_TF = attended_THD.flatten(1)
        del attended_THD
        # None: no recipe, since attended rows come from no norm.
        projected_TE = proj.forward(of_proj, attended_TF, *proj_weights, *proj.settings, None)
        sum_TE, normed_TE = norm2.forward(of_norm2, sum_TE, projected_TE, *norm2_weights, *norm2.settings)
        recipe = NormRecipe(sum_TE, *norm2_weights, *norm2.settings)
        out_TE = mlp.forward(of_mlp, normed_TE, *mlp_weights, *mlp.settings, recipe)

        # autograd saves the tensors of all parts: its hooks see them, and an output that is saved makes no cycle.
        tensors: list[Tensor | None] = []
        saved_counts = []
        for context in contexts:
            tensors += context.saved_tensors
            saved_counts.append(len(context.saved_tensors))
            context.saved_tensors = ()
        ctx.save_for_backward(*tensors)
        ctx.qkv_shape = qkv_shape
        ctx.contexts = contexts
        ctx.saved_counts = saved_counts
        return sum_TE, out_TE

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dsum_TE: Rows | None, dout_TE: Rows | None) -> Gradients:
        norm1, qkv, attend, proj, norm2, mlp = ctx.contexts
        saved = _split(ctx.saved_tensors, ctx.saved_counts)  # popped from the end: freed part by part
        (dnormed_TE,), dmlp = mlp.backward(saved.pop(), dout_TE)
        (dsum_TE, dprojected_TE), dnorm2 = norm2.backward(saved.pop(), dsum_TE, dnormed_TE)
        (dattended_TF,), dproj = proj.backward(saved.pop(), dprojected_TE)
        dattended_THD = None if dattended_TF is None else dattended_TF.view(-1, *ctx.qkv_shape[1:])
        (dqkv_T3HD, _, _), dattend = attend.backward(saved.pop(), dattended_THD)
        dqkv_TF = None if dqkv_T3HD is None else dqkv_T3HD.flatten(1)
        (dnormed_TE,), dqkv = qkv.backward(saved.pop(), dqkv_TF)
        (dx_TE, ddelta_TE), dnorm1 = norm1.backward(saved.pop(), dsum_TE, dnormed_TE)
        if not ctx.needs_input_grad[6]:  # without delta
            ddelta_TE = None
        return None, None, None, None, None, dx_TE, ddelta_TE, *dnorm1, *dqkv, *dattend, *dproj, *dnorm2, *dmlp


def _split(flat: Sequence[V], counts: Sequence[int]) -> list[tuple[V, ...]]:
    """Split the values of all parts into those of every part."""
    parts = []
    start = 0
    for count in counts:
        parts.append(tuple(flat[start : start + count]))
        start += count
    return parts
