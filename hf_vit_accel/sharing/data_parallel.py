"""One call shared by the ranks of a process group: each encodes a part of the images and frames, all get all features.

Every rank holds the whole tower and is given the same call, as beside a text model under tensor parallelism. All decide
the same split from the grid. When a rank is through with its share, or has failed, it says so in a header of 520 bytes;
where all are through, one grouped exchange brings each rank's rows of all outputs, uneven as they are, to all. With
the header goes a checksum of the call's pixels and of the weight that embeds them: ranks that hold other ones encode
each for itself, as stock does.

With gradients, all ranks must make the same loss of the features. Then each has what its own part of the work adds to
the gradients of pixels and weights, and their sum over ranks, made once, is what one process would have.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_vit_accel import machine
from hf_vit_accel.engine.passes import Serve
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.layout import Grid
from hf_vit_accel.ops.base import Slots, replaced
from hf_vit_accel.sharing.checksum import words_of
from hf_vit_accel.sharing.ranks import RankError, Ranks
from hf_vit_accel.sharing.split import Places, loads, split

LEAST = {"eager": 4096, "graphs": 1024}
"""What sharing must save, in rows, to pay: an exchange takes as long as some hundred rows, and an eager forward as long
as its launches, however few rows it has.

Two H200, images of 448², ms alone / shared, Qwen2.5-VL-7B, Qwen3-VL-8B. Eager, 3136 rows saved: 18.7 / 20.6, 15.1 /
17.4; 8192: 40.7 / 23.0, 34.4 / 23.4. With CUDA graphs, 784: 5.0 / 4.3, 4.8 / 4.6; 1568: 9.3 / 6.6, 8.1 / 6.6.
"""

_THROUGH, _WHOLE, _FAILED, _OUT_OF_MEMORY = range(4)
_WORDS, _OUTPUTS, _TEXT = 64, 8, 28
"""Of a header: its length without the checksum, how many outputs it can describe (rows, width, dtype), and where its
text begins. Before the outputs: what became of the share, digests of the call and of how it is served, and how many
outputs there are."""

_ODD = 0x9E3779B1  # so that a column weighs nothing that a row does
_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


class _WholeError(Exception):
    """A rank cannot take its share and says why: each encodes everything."""


class Sharing:
    """The calls of one tower that it shares with other ranks; a context around each call, however it ends.

    counts: of calls, by what became of them. unmet: why the last call was not shared, though it would have paid.
    """

    def __init__(self, ranks: Ranks, *, graphs: bool) -> None:
        self.ranks, self.counts = ranks, Counter[str]()
        self._least = LEAST["graphs" if graphs else "eager"]
        self.unmet: list[str] = []
        self._calls = 0
        self._grid: Grid = ()
        self._due: Places | None = None  # of a call for which the others wait for this rank
        self._checksum: Tensor | None = None  # of the weight that embeds its pixels, then also of these

    def __str__(self) -> str:
        told = ", ".join(f"{count} calls {what}" for what, count in self.counts.items())
        return f"rank {self.ranks.rank} of {self.ranks.size}, {told or 'no calls yet'}"

    def __enter__(self) -> None:
        self._calls, self._due, self.unmet = self._calls + 1, None, []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._due is not None and isinstance(error, Exception):
            status = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else _FAILED
            with suppress(RankError):  # this rank has an error of its own to raise
                self._tell(status, text=f"{type(error).__name__}: {error}")
        self._due = None

    def begin(self, grid: Grid, distinct: Grid, snapshot: Any, checkpoints: Sequence[Any]) -> bool:
        """Whether a call is shared. All ranks find the same, and from here on wait for one another.

        distinct: of its grid, what is encoded; it is another on a rank whose pixels are others. snapshot: of the tower;
        checkpoints: of its layers, in a call with gradients.
        """
        clips, full = snapshot.geometry.clips, sum(snapshot.full_layers) / len(snapshot.full_layers)
        costs = loads(grid, split(grid, self.ranks.size, clips=clips, full=full), clips=clips, full=full)
        self._due = None
        if sum(costs) - max(costs) < self._least:
            self.counts["too small to share"] += 1
            return False
        self.unmet = self._reasons_against(snapshot, checkpoints)
        if self.unmet:
            return False
        self._grid, self._due = grid, Places(distinct, split(distinct, self.ranks.size, clips=clips, full=full))
        self._checksum = checksum(snapshot.parts.projection.weight.flatten(1))
        return True

    def _reasons_against(self, snapshot: Any, checkpoints: Sequence[Any]) -> list[str]:
        """What is the same on all ranks."""
        reasons = ["not shared by ranks: FSDP2 shards layers"] if snapshot.sharded else []
        reasons += [f"not shared by ranks: {why}" for why in snapshot.mixing]
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            averaged, own = (set(dist.get_process_group_ranks(g)) for g in (ddp.process_group, self.ranks.group))
            if len(averaged & own) > 1:
                reasons.append("not shared by ranks: DDP averages gradients over the same ones")
        if any(each is not None and each.reentrant for each in checkpoints):
            reasons.append("not shared by ranks: reentrant checkpoints bring gradients to weights past their sum")
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # A rank without a share saves nothing: under somebody's checkpoint it would not run the tower again.
            reasons.append("not shared by ranks: what gradients need is saved by hooks of somebody else")
        if len(snapshot.parts.deepstack) > _OUTPUTS - 2:
            reasons.append(f"not shared by ranks: more than {_OUTPUTS} outputs")
        return reasons

    def serve(self, serve: Serve, spec: Spec, tower: nn.Module, grid: Grid, pixels_TP: Tensor) -> list[Any]:
        """All outputs of a call that has begun. Raises what another rank met, as a RankError or an OutOfMemoryError."""
        places, rank, grad = self._due, self.ranks.rank, spec.request.grad
        assert places is not None
        mine, slots = places.grid_of(rank), _trained(tower) if grad else []
        weights = {id(place[name]): place[name] for place, name in slots}  # one that several modules share once
        assert self._checksum is not None  # one more sync only where words go by the host
        self._checksum = (self._checksum + checksum(pixels_TP)).to(self.ranks.device)
        how = grad, pixels_TP.requires_grad, spec.request.dtype, [tuple(each.shape) for each in weights.values()]
        try:
            if grad:
                token, share_TP, *others = _Share.apply(self, places, pixels_TP, *weights.values())
                by = dict(zip(weights, others, strict=True))
                with replaced(slots, [by[id(place[name])] for place, name in slots]):
                    outputs = serve(mine, share_TP) if mine else []
                outputs = list(_Gather.apply(self, how, token, *outputs))
            else:
                outputs = serve(mine, places.taken(pixels_TP, rank)) if mine else []
                outputs = self.gather(how, outputs, pixels_TP.device)
        except _WholeError as error:
            self.unmet = [str(error)]
        if self.unmet:
            self.counts["encoded by each rank alone"] += 1
            return serve(grid, pixels_TP)
        self.counts["shared"] += 1
        return outputs

    def decline(self, reasons: Sequence[str]) -> None:
        """Tell the others, if they wait, that this rank takes no share, for it runs the stock way."""
        if self._due is not None:
            self.counts["encoded by each rank alone"] += 1
            with suppress(_WholeError):
                self._tell(_WHOLE, text="; ".join(reasons))

    def gather(self, how: Any, outputs: list[Tensor], at: torch.device) -> list[Tensor]:
        """All rows of all outputs, of this rank's. how: what must be the same on all ranks beside the call."""
        places, rank = self._due, self.ranks.rank
        assert places is not None and len(outputs) <= _OUTPUTS
        told = [word for each in outputs for word in (len(each), each.shape[1], _DTYPES.index(each.dtype))]
        parts = [each.contiguous().view(-1).view(torch.uint8) for each in outputs]
        mine = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=at)
        # What may not fit is allocated before the others hear that this rank is through.
        room = _room(places, told, rank, rank, at) if told else None
        headers = self._tell(_THROUGH, how=how, outputs=told)
        if room is None:
            filled = max(range(len(headers)), key=lambda each: headers[each][3])
            room = _room(places, headers[filled][4 : 4 + headers[filled][3]], filled, rank, at)
        messages, shapes, whole = room
        when = "while features were exchanged"
        by_rank = self.ranks.to_all(mine, messages, when=when)
        unpacked = [_unpacked(message, each) for message, each in zip(by_rank, shapes, strict=True)]
        for index, output in enumerate(whole):
            places.put_together([each[index] for each in unpacked], output)
        self.ranks.settle(at, when=when)
        return whole

    def _tell(self, status: int, *, how: Any = None, outputs: Sequence[int] = (), text: str = "") -> list[list[int]]:
        """Every rank's header, by rank. Raises, the same on all, what any of them tells of."""
        assert self._due is not None
        call, self._due = (self._calls, self._grid), None  # nobody waits for this rank any more
        letters = text.encode("ascii", "replace")[: 8 * (_WORDS - _TEXT)].ljust(8 * (_WORDS - _TEXT), b"\0")
        words = [int.from_bytes(letters[at : at + 8], "little", signed=True) for at in range(0, len(letters), 8)]
        before = [status, _digest(call), _digest(how), len(outputs), *outputs]
        header = [*before, *[0] * (_TEXT - len(before)), *words]
        last, self._checksum = self._checksum, None
        if status != _THROUGH or last is None:
            last = torch.zeros(1, dtype=torch.int64, device=self.ranks.device)
        headers = self.ranks.words(header, last, when="for word that they are through with their shares")

        if status >= _FAILED:
            return headers
        failed = {rank: each for rank, each in enumerate(headers) if each[0] >= _FAILED}
        if failed:
            told = "; ".join(f"rank {rank} of the group failed: {_text(each)}" for rank, each in failed.items())
            memory = all(each[0] == _OUT_OF_MEMORY for each in failed.values())
            raise torch.OutOfMemoryError(told) if memory else RankError(told)
        _check_same([each[1] for each in headers], "grid_thw, and as many calls before it")
        whole = {rank: _text(each) for rank, each in enumerate(headers) if each[0] == _WHOLE}
        if whole:
            raise _WholeError("; ".join(f"not shared: rank {rank} of the group: {why}" for rank, why in whole.items()))
        _check_same([each[2] for each in headers], "gradients, dtype and weights that are trained")
        if others := _others([each[-1] for each in headers]):
            raise _WholeError(
                f"not shared: pixel values or weights on {', '.join(others)} of the group are not those of the others"
            )
        return headers


def _digest(value: Any) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _text(header: list[int]) -> str:
    letters = b"".join(word.to_bytes(8, "little", signed=True) for word in header[_TEXT:_WORDS])
    return letters.rstrip(b"\0").decode()


def checksum(rows_TP: Tensor) -> Tensor:
    """(1,) int64 of the bits of rows, of the rows' order and of that within them, without a host sync.

    It is against mistakes (another picture, channels in another order), not against who looks for rows of the same sum.
    """
    words_TW = words_of(rows_TP)
    sums = words_TW.sum(1), words_TW.sum(0) * _ODD
    rows, columns = ((each * torch.arange(1, 2 * len(each), 2, device=each.device)).sum() for each in sums)
    return (rows + columns).view(1)


def _others(words: list[int]) -> list[str]:
    """Ranks whose word is not the most common one."""
    common = max(words, key=words.count)
    return [str(rank) for rank, each in enumerate(words) if each != common]


def _check_same(digests: list[int], what: str) -> None:
    if others := _others(digests):
        raise RankError(
            f"expected the same call on every rank ({what}), got another on {', '.join(others)} of the group; give "
            "all ranks the same images in the same order, or patch with data_parallel=False"
        )


Room = tuple[list[Tensor], list[list[tuple[int, int, torch.dtype]]], list[Tensor]]


def _room(places: Places, told: Sequence[int], rank: int, own: int, at: torch.device) -> Room:
    """Where messages of ranks other than the own go, what each holds, and where outputs are put together.

    told: of the outputs of a rank, in the words of a header.
    """
    kinds = [(told[k], told[k + 1], _DTYPES[told[k + 2]]) for k in range(0, len(told), 3)]
    of = places.rows[rank]
    shapes = [[(rows * count // of, width, dtype) for count, width, dtype in kinds] for rows in places.rows]
    sizes = [sum(count * width * dtype.itemsize for count, width, dtype in each) for each in shapes]
    messages = [torch.empty(0 if r == own else size, dtype=torch.uint8, device=at) for r, size in enumerate(sizes)]
    whole = [torch.empty(places.total * count // of, width, dtype=dtype, device=at) for count, width, dtype in kinds]
    return messages, shapes, whole


def _unpacked(message: Tensor, shapes: Sequence[tuple[int, int, torch.dtype]]) -> list[Tensor]:
    """Outputs out of bytes."""
    pieces = message.split([rows * width * dtype.itemsize for rows, width, dtype in shapes])
    return [piece.view(dtype).view(shape) for piece, (*shape, dtype) in zip(pieces, shapes, strict=True)]


# --- gradients --------------------------------------------------------------------------------------------------------


def _trained(tower: nn.Module) -> Slots:
    """Where modules hold parameters that require a gradient."""
    places = [module._parameters for module in tower.modules()]
    return [(at, name) for at in places for name, each in at.items() if each is not None and each.requires_grad]


class _Share(torch.autograd.Function):
    """Pixels and weights to a token, the pixels of this rank's share, and the weights; back, the sums over all ranks.

    The token comes back from `_Gather` on every rank, also where there is no share: all take part, in one order.
    """

    @staticmethod
    def forward(ctx: Any, sharing: Sharing, places: Places, pixels_TP: Tensor, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ranks, ctx.places, ctx.weights = sharing.ranks, places, weights
        share_TP = places.taken(pixels_TP, sharing.ranks.rank).detach()
        ctx.like = [(each.shape, each.dtype, each.device) for each in (share_TP, *weights)]
        if not pixels_TP.requires_grad:
            ctx.mark_non_differentiable(share_TP)
        return torch.zeros((), device=pixels_TP.device), share_TP, *(each.detach() for each in weights)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, _: Any, *given: Tensor | None) -> tuple[Any, ...]:
        ranks, places, (needs_pixels, *needs) = ctx.ranks, ctx.places, ctx.needs_input_grad[2:]
        dshare_TP, *found = (
            torch.zeros(shape, dtype=dtype, device=device) if each is None else each
            for each, (shape, dtype, device) in zip(given, ctx.like, strict=True)
        )
        asked = [index for index, need in enumerate(needs) if need]
        # What no rank's outputs were made of has no gradient, which an optimizer tells from a gradient of zeros.
        reached = dshare_TP.new_tensor([given[1 + index] is not None for index in asked], dtype=torch.float32)
        terms = [*(found[index] for index in asked), reached]
        sums = ranks.add_up(terms, when="while gradients were summed") if asked else [reached]
        dpixels_TP = None
        if needs_pixels:
            room = [dshare_TP.new_empty(rows, dshare_TP.shape[1]) for rows in places.rows]
            by_rank = ranks.to_all(dshare_TP.contiguous(), room, when="while gradients of pixels were exchanged")
            dpixels_TP = dshare_TP.new_empty(places.total, dshare_TP.shape[1])
            places.put_together(by_rank, dpixels_TP)
        ranks.settle(dshare_TP.device, when="while gradients were exchanged")
        dweights: list[Any] = [None] * len(needs)
        for index, total, ranks_reached in zip(asked, sums, sums[-1].tolist(), strict=False):
            hooks = ctx.weights[index]._backward_hooks or ctx.weights[index]._post_accumulate_grad_hooks
            dweights[index] = total if ranks_reached or hooks else None  # they would be called with None
        return None, None, dpixels_TP, *dweights


class _Gather(torch.autograd.Function):
    """The outputs of this rank's share to all; back, the share's rows of their gradient, which each rank has whole."""

    @staticmethod
    def forward(ctx: Any, sharing: Sharing, how: Any, token: Tensor, *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.places, ctx.rank, ctx.count = sharing._due, sharing.ranks.rank, len(outputs)
        ctx.token = token.detach()
        return tuple(sharing.gather(how, list(outputs), token.device))

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        own = [None if each is None else ctx.places.taken(each, ctx.rank) for each in given[: ctx.count]]
        return None, None, ctx.token, *own
