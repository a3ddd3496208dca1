"""One call shared by the ranks of a process group: each encodes a part of the images and frames, all get all features.

Every rank holds the whole tower and makes the same calls, as beside a text model under tensor parallelism. All ranks
derive the same split from the grid. A rank that is done with its share, or has failed, says so in a `Report`. When all
are done, every rank sends its rows to all others; shares may be uneven. Reports carry a checksum of the call's pixels
and of the weight that embeds them. If ranks disagree there, each encodes the whole call alone, as stock does.

With gradients, all ranks must compute the same loss. Each rank then has its own part of the gradients of pixels and
weights. Their sum over ranks, made once, is the gradient that one process would have.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_vit_accel import machine
from hf_vit_accel.config import Ranks
from hf_vit_accel.engine.call import Attempt, Batch, Encode, FastPlan
from hf_vit_accel.layout import Grid
from hf_vit_accel.ops.base import FunctionContext, replaced
from hf_vit_accel.options.checksum import words_of
from hf_vit_accel.options.ranks import RankError, add_up, gather, to_all
from hf_vit_accel.options.split import Assignment, split

LEAST = 4096
"""Rows that sharing must save to pay: an exchange costs some hundred rows, a forward at least its launches.

On two H200s a call that saved 3136 rows took 18.7 ms alone and 20.6 shared (measured by hand).
"""

_COLUMN_WEIGHT = 0x9E3779B1  # odd, so that a column of the checksum never weighs what a row does

OutputShape = tuple[int, int, torch.dtype]
"""Rows, columns and dtype of one output of a tower."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank tells the others about a call.

    Attributes:
        kind: Gradients, dtype and trained weights, equal on all ranks that are done.
        checksum: Of the pixels of the whole call and of the weight that embeds them.
        outputs: Shapes of the outputs of its share; empty for a rank without a share.
    """

    grid: Grid
    why_alone: str | None = None
    error: str | None = None
    is_out_of_memory: bool = False
    kind: object = None
    checksum: int = 0
    outputs: tuple[OutputShape, ...] = ()


class _NotSharedError(Exception):
    """A rank cannot take its share: every rank encodes the whole call. The message is the reason."""


class Sharing:
    """Encodes this rank's share of a batch, and returns the outputs of all ranks."""

    def __init__(self, encode: Encode, ranks: Ranks) -> None:
        self.counts: Counter[str] = Counter()
        self._encode = encode
        self._ranks = ranks

    def __str__(self) -> str:
        results = ", ".join(f"{count} calls {result}" for result, count in self.counts.items())
        return f"rank {self._ranks.rank} of {self._ranks.size}, {results or 'no calls yet'}"

    def __call__(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of a batch: shared by the ranks, or encoded by each alone."""
        plan = batch.plan
        if batch.attempt.exchanged is not None:
            return self._encode_alone(batch, batch.attempt.exchanged)
        if self._is_too_small(plan):
            outputs = self._encode(batch)
            self.counts["too small to share"] += 1
            return outputs
        reasons = self._reasons_against(plan)
        if reasons:
            batch.note(reasons)
            return self._encode(batch)
        try:
            if plan.why_whole is not None:  # other ranks may have no hooks
                self._exchange(batch.attempt, Report(grid=plan.inputs.grid, why_alone=plan.why_whole))
            return self._encode_share(batch)
        except _NotSharedError as error:
            why_alone = plan.why_whole or str(error)
        return self._encode_alone(batch, why_alone)

    def decline(self, plan: FastPlan, attempt: Attempt, reasons: Sequence[str]) -> None:
        """Tell ranks that wait for a call why this rank takes no share of it: it runs the stock forward."""
        if attempt.exchanged is not None:
            return
        if self._is_too_small(plan):
            self.counts["too small to share"] += 1
            return
        attempt.reasons += self._reasons_against(plan)
        if attempt.reasons:
            return
        with suppress(_NotSharedError):
            self._exchange(attempt, Report(grid=plan.inputs.grid, why_alone="; ".join(reasons)))
        self.counts["encoded by each rank alone"] += 1

    def _is_too_small(self, plan: FastPlan) -> bool:
        """Return whether sharing a call would not pay. The grid of the whole call decides, so all ranks agree."""
        rows = self._assignment(plan, plan.inputs.grid).rows
        return sum(rows) - max(rows) < LEAST

    def _assignment(self, plan: FastPlan, grid: Grid) -> Assignment:
        full_layers = plan.spec.full_layers
        return Assignment(grid, split(grid, self._ranks.size, full=sum(full_layers) / len(full_layers)))

    def _reasons_against(self, plan: FastPlan) -> list[str]:
        """Return reasons not to share a call; identical on every rank."""
        reasons = ["FSDP2 shards layers"] if plan.reading.sharded_layers else []
        reasons += plan.reading.mixing
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            averaging_ranks = set(dist.get_process_group_ranks(ddp.process_group))
            if len(averaging_ranks & set(dist.get_process_group_ranks(self._ranks.group))) > 1:
                reasons.append("DDP averages gradients over the same ones")
        if plan.has_reentrant_checkpoints:
            reasons.append("reentrant checkpoints bring gradients to weights past their sum")
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # A rank without a share saves nothing: under an outer checkpoint it would not run the tower again.
            reasons.append("saved-tensor hooks are active (checkpointing?)")
        if plan.hidden_states:
            reasons.append("hidden states are requested")
        return [f"not shared by ranks: {reason}" for reason in reasons]

    def _encode_alone(self, batch: Batch, why: str) -> list[Tensor]:
        batch.attempt.exchanged = why
        batch.note([why])
        outputs = self._encode(batch)
        self.counts["encoded by each rank alone"] += 1
        return outputs

    def _encode_share(self, batch: Batch) -> list[Tensor]:
        """Encode this rank's share, and exchange outputs. The other ranks hear of an error that ends the call."""
        plan = batch.plan
        attempt = batch.attempt
        try:
            embedding = plan.reading.parts.projection.weight.flatten(1)
            checksum = rows_checksum(embedding) + rows_checksum(batch.pixels_TP)
            share = Share(self._ranks, self._assignment(plan, batch.grid), batch)
            outputs: list[Tensor] = []
            if share.batch.grid:
                with share.replaced:
                    outputs = self._encode(share.batch)
            shapes = tuple((len(output), output.shape[1], output.dtype) for output in outputs)
            # Allocate before the other ranks hear that this one is done: it may fail.
            buffers = share.buffers(shapes, self._ranks.rank) if shapes else []
            kind = (*share.kind, plan.spec.request.dtype)
            report = Report(grid=plan.inputs.grid, kind=kind, checksum=int(checksum), outputs=shapes)
            reports = self._exchange(attempt, report)
            if not shapes:
                first = next(rank for rank, report in enumerate(reports) if report.outputs)
                buffers = share.buffers(reports[first].outputs, first)
            outputs = share.gather(outputs, buffers)
        except Exception as error:
            if attempt.exchanged is None:
                self._tell_unless_repeated(batch, error)
            raise
        self.counts["shared"] += 1
        return outputs

    def _tell_unless_repeated(self, batch: Batch, error: Exception) -> None:
        """Tell the other ranks of an error, unless another attempt follows: they wait for it."""
        try:
            batch.attempt.prepare_another(error)
        except Exception as final:
            report = Report(
                grid=batch.plan.inputs.grid,
                error=f"{type(final).__name__}: {final}",
                is_out_of_memory=isinstance(final, torch.OutOfMemoryError),
            )
            batch.attempt.exchanged = "this call failed"
            with suppress(RankError):  # this rank raises its own error
                gather(self._ranks, report)
            raise

    def _exchange(self, attempt: Attempt, report: Report) -> list[Report]:
        """Send this rank's report and return those of all ranks, by rank; raise what `_check` finds in them."""
        attempt.exchanged = "this call was shared"
        reports = gather(self._ranks, report)
        _check(reports)
        return reports


def _check(reports: Sequence[Report]) -> None:
    """Raise if a rank failed, is alone, or differs from the others. Every rank that is done raises the same error."""
    failed = {rank: report for rank, report in enumerate(reports) if report.error is not None}
    if failed:
        message = "; ".join(f"rank {rank} of the group failed: {report.error}" for rank, report in failed.items())
        only_memory = all(report.is_out_of_memory for report in failed.values())
        raise torch.OutOfMemoryError(message) if only_memory else RankError(message)
    _check_same([report.grid for report in reports], "grid_thw")
    alone = {rank: report.why_alone for rank, report in enumerate(reports) if report.why_alone is not None}
    if alone:
        raise _NotSharedError("; ".join(f"not shared: rank {rank} of the group: {why}" for rank, why in alone.items()))
    _check_same([report.kind for report in reports], "gradients, dtype and weights that are trained")
    different = _different_ranks([report.checksum for report in reports])
    if different:
        raise _NotSharedError(
            f"not shared: pixel values or weights on {', '.join(different)} of the group are not those of the others"
        )


def _different_ranks(values: Sequence[object]) -> list[str]:
    """Return the ranks whose value is not the most common one."""
    common = max(values, key=list(values).count)
    return [str(rank) for rank, value in enumerate(values) if value != common]


def _check_same(values: Sequence[object], what: str) -> None:
    different = _different_ranks(values)
    if different:
        raise RankError(
            f"expected the same call on every rank ({what}), got another on {', '.join(different)} of the group; give "
            "all ranks the same images in the same order, or patch with data_parallel=False"
        )


def rows_checksum(rows_TP: Tensor) -> Tensor:
    """Return an int64 checksum of the bits of rows and of their order, shape (1,), without a host sync.

    It detects mistakes of ranks: another image, channels in another order. `options/checksum.py` has a stronger one.
    """
    words_TW = words_of(rows_TP)
    total = torch.zeros((), dtype=torch.int64, device=words_TW.device)
    for sums in (words_TW.sum(1), words_TW.sum(0) * _COLUMN_WEIGHT):
        odd_numbers = torch.arange(1, 2 * len(sums), 2, device=sums.device)
        total = total + (sums * odd_numbers).sum()
    return total.view(1)


class Share:
    """One rank's share of a call: its rows, and aliases of trained weights.

    Gradients of an alias reach `_TakeShare`, which sums them over the ranks.

    Attributes:
        batch: What this rank encodes; empty for a rank without a share. Its plan has aliases of the trained weights.
        kind: What must be equal on all ranks beside the call.
        replaced: Within this context the tower holds these aliases.
    """

    def __init__(self, ranks: Ranks, assignment: Assignment, batch: Batch) -> None:
        plan = batch.plan
        grad = plan.spec.request.grad
        pixels_TP = batch.pixels_TP
        self._ranks = ranks
        self._assignment = assignment
        # A weight that modules share counts once.
        weights = {id(weight): weight for weight in plan.parameters if grad and weight.requires_grad}
        self.kind = (grad, pixels_TP.requires_grad, [tuple(weight.shape) for weight in weights.values()])
        self._token: Tensor | None = None
        self.replaced: AbstractContextManager[None] = nullcontext()
        if grad:
            self._token, share_TP, *aliases = _TakeShare.apply(ranks, assignment, pixels_TP, *weights.values())
            alias_of = dict(zip(weights, aliases, strict=True))
            dicts = plan.reading.parameter_dicts
            slots = [(dict_, name) for dict_ in dicts for name in dict_ if id(dict_[name]) in alias_of]
            self.replaced = replaced(slots, [alias_of[id(dict_[name])] for dict_, name in slots])
            plan = replace(plan, parameters=tuple(alias_of.get(id(weight), weight) for weight in plan.parameters))
        else:
            share_TP = assignment.share_of(pixels_TP, ranks.rank)
        self.batch = replace(batch, plan=plan, grid=assignment.grid_of(ranks.rank), pixels_TP=share_TP)

    def buffers(self, shapes: Sequence[OutputShape], shapes_of: int) -> list[list[Tensor]]:
        """Return empty outputs for every rank, none for this one, then for the whole call: `shapes` are one rank's."""
        rows_by_rank = self._assignment.rows
        counts = [0 if rank == self._ranks.rank else rows for rank, rows in enumerate(rows_by_rank)]
        return [
            [
                torch.empty(
                    rows * count // rows_by_rank[shapes_of], width, dtype=dtype, device=self.batch.pixels_TP.device
                )
                for count, width, dtype in shapes
            ]
            for rows in (*counts, self._assignment.total)
        ]

    def gather(self, outputs: list[Tensor], buffers: list[list[Tensor]]) -> list[Tensor]:
        """Return all rows of all outputs on every rank, in these buffers."""
        *by_rank, complete = buffers
        rank = self._ranks.rank
        if outputs:
            by_rank[rank] = [output.detach().contiguous() for output in outputs]
        to_all(self._ranks, by_rank[rank], by_rank)
        for index, output in enumerate(complete):
            self._assignment.put_together([outputs_there[index] for outputs_there in by_rank], output)
        if self._token is None:
            return complete
        return list(_Gather.apply(self._assignment, rank, complete, self._token, *outputs))


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
        sums = add_up(ranks, [*(dweights_here[index] for index in needed), reached]) if needed else [reached]
        dpixels_TP = None
        if needs_pixels:
            by_rank = [dshare_TP.new_empty(rows, dshare_TP.shape[1]) for rows in assignment.rows]
            by_rank[ranks.rank] = dshare_TP.contiguous()
            to_all(ranks, [by_rank[ranks.rank]], [[rows_TP] for rows_TP in by_rank])
            dpixels_TP = dshare_TP.new_empty(assignment.total, dshare_TP.shape[1])
            assignment.put_together(by_rank, dpixels_TP)
        dweights: list[Tensor | None] = [None] * len(needs_weights)
        for index, total, ranks_reached in zip(needed, sums, sums[-1].tolist(), strict=False):
            weight = ctx.weights[index]
            has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
            dweights[index] = total if ranks_reached or has_hooks else None  # hooks would be called with None
        return None, None, dpixels_TP, *dweights


class _Gather(torch.autograd.Function):
    """Returns the complete outputs of a call. Its backward takes this rank's rows of their gradient."""

    @staticmethod
    def forward(
        ctx: FunctionContext, assignment: Assignment, rank: int, complete: list[Tensor], token: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.assignment = assignment
        ctx.rank = rank
        ctx.count = len(outputs)
        ctx.token = token.detach()
        return tuple(complete)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, *gradients: Tensor | None) -> tuple[object, ...]:
        rows = [
            None if gradient is None else ctx.assignment.share_of(gradient, ctx.rank)
            for gradient in gradients[: ctx.count]
        ]
        return None, None, None, ctx.token, *rows
