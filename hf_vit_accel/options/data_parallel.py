"""One call shared by the ranks of a process group: each encodes a part of the images and frames, all get all features.

Every rank holds the whole tower and makes the same calls, as beside a text model under tensor parallelism. All ranks
derive the same split from the grid. A rank that is done with its share, or has failed, says so in a header of 4 kB.
When all are done, one grouped exchange brings the rows of every rank to all ranks; shares may be uneven. The header
carries a checksum of the call's pixels and of the weight that embeds them. If ranks disagree there, each encodes the
whole call alone, as stock does.

With gradients, all ranks must compute the same loss. Each rank then has its own part of the gradients of pixels and
weights. Their sum over ranks, made once, is the gradient that one process would have.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_vit_accel.engine.facts import TowerFacts
from hf_vit_accel.layout import Grid
from hf_vit_accel.options.checksum import words_of
from hf_vit_accel.options.header import Header, OutputShape, ShareResult, digest
from hf_vit_accel.options.ranks import RankError, Ranks
from hf_vit_accel.options.share import Share
from hf_vit_accel.options.split import Assignment, loads, split

LEAST = {"eager": 4096, "graphs": 1024}
"""Rows that sharing must save to pay: an exchange costs some hundred rows, an eager forward at least its launches.

On two H200s a call that saved 3136 rows took 18.7 ms alone and 20.6 shared (measured by hand).
"""

_COLUMN_WEIGHT = 0x9E3779B1  # odd, so that a column of the checksum never weighs what a row does


class NotSharedError(Exception):
    """A rank cannot take its share: every rank encodes the whole call. The message is the reason."""


class Sharing:
    """The shared calls of one tower. Enter it around each call, so that the other ranks hear of an error.

    Attributes:
        ranks: The process group.
        counts: Calls by their result.
    """

    def __init__(self, ranks: Ranks, *, graphs: bool) -> None:
        self.ranks = ranks
        self.counts: Counter[str] = Counter()
        self._least = LEAST["graphs" if graphs else "eager"]
        self._calls = 0
        self._grid: Grid = ()  # of the call for which the other ranks wait
        self._others_wait = False

    def __str__(self) -> str:
        results = ", ".join(f"{count} calls {result}" for result, count in self.counts.items())
        return f"rank {self.ranks.rank} of {self.ranks.size}, {results or 'no calls yet'}"

    def __enter__(self) -> None:
        self._calls += 1
        self._others_wait = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._others_wait and isinstance(error, Exception):
            result = ShareResult.OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else ShareResult.FAILED
            with suppress(RankError):  # this rank raises its own error
                self.exchange_headers(result, text=f"{type(error).__name__}: {error}")
        self._others_wait = False

    @property
    def others_wait(self) -> bool:
        """Whether the other ranks wait for this rank's header of a call."""
        return self._others_wait

    def split(self, grid: Grid, distinct: Grid, facts: TowerFacts) -> Assignment | None:
        """Return which rank encodes what, or None for a call that is too small: `grid` decides, so all ranks agree.

        Args:
            distinct: The part of it that is encoded, without repeated images. If it differs by rank, checksums tell.
        """
        clips = facts.geometry.clips
        full = sum(facts.full_layers) / len(facts.full_layers)
        costs = loads(grid, split(grid, self.ranks.size, clips=clips, full=full), clips=clips, full=full)
        if sum(costs) - max(costs) < self._least:
            return None
        return Assignment(distinct, split(distinct, self.ranks.size, clips=clips, full=full))

    def reasons_against(self, facts: TowerFacts, *, reentrant: bool) -> list[str]:
        """Return reasons not to share a call; identical on every rank."""
        reasons = ["FSDP2 shards layers"] if facts.sharded_layers else []
        reasons += facts.mixing
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            averaging_ranks = set(dist.get_process_group_ranks(ddp.process_group))
            if len(averaging_ranks & set(dist.get_process_group_ranks(self.ranks.group))) > 1:
                reasons.append("DDP averages gradients over the same ones")
        if reentrant:
            reasons.append("reentrant checkpoints bring gradients to weights past their sum")
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # A rank without a share saves nothing: under an outer checkpoint it would not run the tower again.
            reasons.append("saved-tensor hooks are active (checkpointing?)")
        return [f"not shared by ranks: {reason}" for reason in reasons]

    def note_others_wait(self, grid: Grid) -> None:
        """Note that the other ranks now wait for this rank's header of a call."""
        self._grid = grid
        self._others_wait = True

    def decline(self, reasons: Sequence[str]) -> None:
        """Tell waiting ranks that this rank takes no share, since it runs the stock forward."""
        if self._others_wait:
            with suppress(NotSharedError):
                self.exchange_headers(ShareResult.ALONE, text="; ".join(reasons))

    def start(
        self, assignment: Assignment, facts: TowerFacts, tower: nn.Module, pixels_TP: Tensor, *, grad: bool
    ) -> Share:
        """Return this rank's share of a call, with the checksums to compare. Nothing is exchanged yet.

        Args:
            assignment: The result of `split`.
            tower: The tower. If `grad`, aliases replace its trained weights while the share is encoded.
        """
        embedding = rows_checksum(facts.parts.projection.weight.flatten(1))
        # One more sync only where words are exchanged by the host.
        call_checksum = (embedding + rows_checksum(pixels_TP)).to(self.ranks.device)
        exchange_headers = partial(self.exchange_headers, call_checksum=call_checksum)
        roots = [tower, *facts.parts.modules()]
        return Share(self.ranks, assignment, roots, pixels_TP, exchange_headers, grad=grad)

    def exchange_headers(
        self,
        result: ShareResult,
        *,
        options: object = None,
        outputs: Sequence[OutputShape] = (),
        call_checksum: Tensor | None = None,
        text: str = "",
    ) -> list[Header]:
        """Send this rank's header and return those of all ranks, by rank.

        Args:
            options: Whatever must be equal on all ranks beside the call.
            call_checksum: Of pixels and weight, shape (1,); ignored unless the share is done.
            text: The reason, if it is not done.

        Raises:
            NotSharedError: A rank encodes alone, or ranks hold different pixels or weights.
            RankError: A rank failed or made another call. The same on all ranks that are done.
            OutOfMemoryError: Every failed rank ran out of memory.
        """
        header = Header(
            result=result,
            call=digest((self._calls, self._grid)),
            options=digest(options),
            outputs=tuple(outputs),
            text=text,
        )
        if result is not ShareResult.DONE or call_checksum is None:
            call_checksum = torch.zeros(1, dtype=torch.int64, device=self.ranks.device)
        when = "for word that they are through with their shares"
        try:
            words_by_rank = self.ranks.words(header.pack(), call_checksum, when=when)
        except RankError:
            self._others_wait = False
            raise
        self._others_wait = False  # if memory ran out instead, nothing was sent, and they still wait
        headers = [Header.unpack(words) for words in words_by_rank]
        if result < ShareResult.FAILED:
            _check_headers(headers)
        return headers


def _check_headers(headers: Sequence[Header]) -> None:
    """Raise if a rank failed, is alone, or differs from the others. Every rank that is done raises the same error."""
    failed = {rank: header for rank, header in enumerate(headers) if header.result >= ShareResult.FAILED}
    if failed:
        message = "; ".join(f"rank {rank} of the group failed: {header.text}" for rank, header in failed.items())
        only_memory = all(header.result is ShareResult.OUT_OF_MEMORY for header in failed.values())
        raise torch.OutOfMemoryError(message) if only_memory else RankError(message)
    _check_same([header.call for header in headers], "grid_thw, and as many calls before it")
    alone = {rank: header for rank, header in enumerate(headers) if header.result is ShareResult.ALONE}
    if alone:
        raise NotSharedError(
            "; ".join(f"not shared: rank {rank} of the group: {header.text}" for rank, header in alone.items())
        )
    _check_same([header.options for header in headers], "gradients, dtype and weights that are trained")
    different = _different_ranks([header.checksum for header in headers])
    if different:
        raise NotSharedError(
            f"not shared: pixel values or weights on {', '.join(different)} of the group are not those of the others"
        )


def rows_checksum(rows_TP: Tensor) -> Tensor:
    """Return an int64 checksum of the bits of rows and of their order, shape (1,), without a host sync.

    It detects mistakes: another image, channels in another order. It is not a cryptographic hash.

    `options/checksum.py` has a stronger one, which mixes every word. It finds candidates for reuse, by a kernel. This
    one compares the inputs of ranks, by a few operations of torch.
    """
    words_TW = words_of(rows_TP)
    total = torch.zeros((), dtype=torch.int64, device=words_TW.device)
    for sums in (words_TW.sum(1), words_TW.sum(0) * _COLUMN_WEIGHT):
        odd_numbers = torch.arange(1, 2 * len(sums), 2, device=sums.device)
        total = total + (sums * odd_numbers).sum()
    return total.view(1)


def _different_ranks(words: list[int]) -> list[str]:
    """Return the ranks whose word is not the most common one."""
    common = max(words, key=words.count)
    return [str(rank) for rank, word in enumerate(words) if word != common]


def _check_same(digests: list[int], what: str) -> None:
    different = _different_ranks(digests)
    if different:
        raise RankError(
            f"expected the same call on every rank ({what}), got another on {', '.join(different)} of the group; give "
            "all ranks the same images in the same order, or patch with data_parallel=False"
        )
