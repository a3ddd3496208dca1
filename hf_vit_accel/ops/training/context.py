"""The contexts of autograd functions: autograd's own, and that of a function inside another one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

FunctionContext = Any
"""autograd's context of a function, which takes any attribute; or an `InnerContext`."""
Gradients = tuple[Tensor | None, ...]
"""What a backward returns: one gradient for every argument of the forward."""
Saved = tuple[Any, ...]
"""Tensors that a forward saved, and None in the place of those that no gradient needs."""


class InnerContext:
    """The context of an autograd function that runs inside another one.

    Between forward and backward the outer function saves the tensors, so that autograd's hooks and version checks see
    them.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Saved = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Store tensors; the outer function takes them away."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: undefined gradients already arrive as None."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: the outer function knows beforehand which arguments need gradients."""
