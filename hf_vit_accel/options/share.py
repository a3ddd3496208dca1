"""One rank's share of a call: its rows, aliases of trained weights, and the exchange of all outputs.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.ops.base import Slots, replaced
from hf_vit_accel.ops.training.context import FunctionContext
from hf_vit_accel.options.header import Header, OutputShape, ShareResult
from hf_vit_accel.options.ranks import Ranks
from hf_vit_accel.options.split import Assignment


class Share(AbstractContextManager[None]):
    """One rank's share of a call. Within the with block, the tower holds aliases of its trained weights.

    Gradients of an alias reach `_TakeShare`, which sums them over the ranks.

    Attributes:
        grid: What this rank encodes; empty for a rank without a share.
        pixels_TP: Its rows.
    """

    def __init__(
        self,
        ranks: Ranks,
        assignment: Assignment,
        roots: Sequence[nn.Module],
        pixels_TP: Tensor,
        exchange_headers: Callable[..., list[Header]],
        *,
        grad: bool,
    ) -> None:
        self.ranks = ranks
        self.assignment = assignment
        self._exchange_headers = exchange_headers
        self._device = pixels_TP.device
        self._grad = grad
        self._replaced: AbstractContextManager[None] = nullcontext()
        self.grid = assignment.grid_of(ranks.rank)
        slots = _trained_slots(roots) if grad else []
        # A weight that modules share counts once.
        weights = {id(parameters[name]): parameters[name] for parameters, name in slots}
        self._options: tuple[object, ...] = (
            grad,
            pixels_TP.requires_grad,
            [tuple(weight.shape) for weight in weights.values()],
        )
        if grad:
            self._token, self.pixels_TP, *aliases = _TakeShare.apply(ranks, assignment, pixels_TP, *weights.values())
            alias_of = dict(zip(weights, aliases, strict=True))
            self._replaced = replaced(slots, [alias_of[id(parameters[name])] for parameters, name in slots])
        else:
            self.pixels_TP = assignment.share_of(pixels_TP, ranks.rank)

    def __enter__(self) -> None:
        self._replaced.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replaced.__exit__(kind, error, trace)

    def gather(self, outputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return all rows of all outputs on every rank.

        Args:
            outputs: Of this rank's share; empty for a rank without one.
            dtype: The dtype that the tower computes in, equal on all ranks.

        Raises:
            NotSharedError, RankError, OutOfMemoryError: See `Sharing.exchange_headers`.
        """
        self._options = (*self._options, dtype)
        if self._grad:
            return list(_Gather.apply(self, self._token, *outputs))
        return self.exchange(outputs)

    def exchange(self, outputs: list[Tensor]) -> list[Tensor]:
        """Do the work of `gather`, without gradients."""
        assignment = self.assignment
        device = self._device
        rank = self.ranks.rank
        shapes = [OutputShape(len(output), output.shape[1], output.dtype) for output in outputs]
        parts = [output.contiguous().view(-1).view(torch.uint8) for output in outputs]
        message = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
        # Allocate before the other ranks hear that this one is done: it may fail.
        buffers = _Buffers(assignment, shapes, rank, rank, device) if shapes else None
        headers = self._exchange_headers(ShareResult.DONE, options=self._options, outputs=shapes)
        if buffers is None:
            outputs_by_rank = [header.outputs for header in headers]
            first = max(range(len(headers)), key=lambda index: len(outputs_by_rank[index]))
            buffers = _Buffers(assignment, outputs_by_rank[first], first, rank, device)
        messages_by_rank = self.ranks.to_all(message, buffers.messages, when="while features were exchanged")
        return buffers.join(assignment, messages_by_rank)


class _Buffers:
    """Memory for the messages of the other ranks and for the complete outputs.

    Attributes:
        messages: One buffer of bytes a rank; this rank's own is empty.
    """

    def __init__(
        self,
        assignment: Assignment,
        shapes: Sequence[OutputShape],
        rank_of_shapes: int,
        rank: int,
        device: torch.device,
    ) -> None:
        rows_there = assignment.rows[rank_of_shapes]
        self._shapes_by_rank = [
            [OutputShape(rows * shape.rows // rows_there, shape.width, shape.dtype) for shape in shapes]
            for rows in assignment.rows
        ]
        self.messages = []
        for other, shapes_there in enumerate(self._shapes_by_rank):
            size = 0 if other == rank else sum(shape.nbytes for shape in shapes_there)
            self.messages.append(torch.empty(size, dtype=torch.uint8, device=device))
        self._complete = [
            torch.empty(assignment.total * shape.rows // rows_there, shape.width, dtype=shape.dtype, device=device)
            for shape in shapes
        ]

    def join(self, assignment: Assignment, messages_by_rank: Sequence[Tensor]) -> list[Tensor]:
        """Return the complete outputs, written from the messages of all ranks."""
        outputs_by_rank = []
        for message, shapes in zip(messages_by_rank, self._shapes_by_rank, strict=True):
            pieces = message.split([shape.nbytes for shape in shapes])
            outputs_by_rank.append(
                [
                    piece.view(shape.dtype).view(shape.rows, shape.width)
                    for piece, shape in zip(pieces, shapes, strict=True)
                ]
            )
        for index, output in enumerate(self._complete):
            assignment.put_together([outputs[index] for outputs in outputs_by_rank], output)
        return self._complete


# --- gradients --------------------------------------------------------------------------------------------------------


def _trained_slots(roots: Sequence[nn.Module]) -> Slots:
    """List where modules store parameters that require a gradient.

    Args:
        roots: The tower, and modules that torch does not find inside it, as in a plain list of blocks.
    """
    slots: list[tuple[dict[str, Any], str]] = []
    seen: set[nn.Module] = set()
    for root in roots:
        for _, module in root.named_modules(seen):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    slots.append((module._parameters, name))
    return slots


class _TakeShare(torch.autograd.Function):
    """Return a token, this rank's pixels, and aliases of the weights. The backward sums gradients over all ranks.

    The token comes back from `_Gather` on every rank, also on one without a share: all take part, in one order.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, ranks: Ranks, assignment: Assignment, pixels_TP: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.ranks = ranks
        ctx.assignment = assignment
        ctx.weights = weights
        share_TP = assignment.share_of(pixels_TP, ranks.rank).detach()
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (share_TP, *weights)]
        if not pixels_TP.requires_grad:
            ctx.mark_non_differentiable(share_TP)
        return torch.zeros((), device=pixels_TP.device), share_TP, *(weight.detach() for weight in weights)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, _: object, *gradients: Tensor | None) -> tuple[object, ...]:
        ranks = ctx.ranks
        assignment = ctx.assignment
        needs_pixels, *needs_weights = ctx.needs_input_grad[2:]
        filled = []
        for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=True):
            filled.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
        dshare_TP, *dweights_here = filled
        needed = [index for index, needs in enumerate(needs_weights) if needs]
        # A weight that no rank's outputs depend on gets no gradient: an optimizer tells that from zeros.
        reached = dshare_TP.new_tensor([gradients[1 + index] is not None for index in needed], dtype=torch.float32)
        terms = [*(dweights_here[index] for index in needed), reached]
        sums = ranks.add_up(terms, when="while gradients were summed") if needed else [reached]
        dpixels_TP = None
        if needs_pixels:
            buffers = [dshare_TP.new_empty(rows, dshare_TP.shape[1]) for rows in assignment.rows]
            by_rank = ranks.to_all(dshare_TP.contiguous(), buffers, when="while gradients of pixels were exchanged")
            dpixels_TP = dshare_TP.new_empty(assignment.total, dshare_TP.shape[1])
            assignment.put_together(by_rank, dpixels_TP)
        dweights: list[Tensor | None] = [None] * len(needs_weights)
        for index, total, ranks_reached in zip(needed, sums, sums[-1].tolist(), strict=False):
            weight = ctx.weights[index]
            has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
            dweights[index] = total if ranks_reached or has_hooks else None  # hooks would be called with None
        return None, None, dpixels_TP, *dweights


class _Gather(torch.autograd.Function):
    """Brings the outputs of this rank's share to all ranks. Its backward takes the share's rows of their gradient."""

    @staticmethod
    def forward(ctx: FunctionContext, share: Share, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.assignment = share.assignment
        ctx.rank = share.ranks.rank
        ctx.count = len(outputs)
        ctx.token = token.detach()
        return tuple(share.exchange(list(outputs)))

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, *gradients: Tensor | None) -> tuple[object, ...]:
        rows = [
            None if gradient is None else ctx.assignment.share_of(gradient, ctx.rank)
            for gradient in gradients[: ctx.count]
        ]
        return None, ctx.token, *rows
