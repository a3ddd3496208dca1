"""What Linears with adapters make of rows: x W^T + b + (x A^T) (s B)^T, where s is an adapter's scaling.

PEFT makes the adapter's share a tensor of its own, scales it to another, adds it to a third, and casts on the way; here
one small product adds to the result of the large one, in both directions, and the gradient of W is made only where it
is trained.

`T` rows, `E` width of the input, `F` width of the output, `G` that width rounded up to a multiple of 8, `R` the ranks
of all adapters of some products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import ACTIVATIONS, swiglu, swiglu_reference
from hf_vit_accel.ops.base import Context, filled
from hf_vit_accel.ops.lora.modules import Lora
from hf_vit_accel.ops.training.column_sum import column_sum
from hf_vit_accel.ops.training.gelu_backward import gelu, gelu_gradient
from hf_vit_accel.ops.training.norm_backward import keep, kept
from hf_vit_accel.ops.training.swiglu_backward import aligned, swiglu_gradient
from hf_vit_accel.ops.training.trained import Frame, Trained


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How Linears lie side by side in one product. widths: of each; spare: zeros after each, where there are some.

    inner: E; more: columns of zeros after the rows' own E. dtype: of the rows.
    """

    widths: tuple[int, ...]
    spare: tuple[int, ...]
    inner: int
    more: int
    dtype: torch.dtype

    def given(self, weights: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Weights, biases, (which Linear, scaling) of each adapter, and the matrices of these."""
        count = len(self.widths)
        places, *matrices = weights[2 * count :]
        return weights[:count], weights[count : 2 * count], places, matrices[: len(places)], matrices[len(places) :]

    def start(self, index: int) -> int:
        """Where the columns of a Linear's result begin."""
        return sum(self.widths[:index]) + sum(self.spare[:index])

    def join(self, weights: Sequence[Any], biases: Sequence[Any] | None) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias, if there is any, of the one product."""
        whole = [_padded(each, self.more, rows) for each, rows in zip(weights, self.spare, strict=True)]
        if biases is None or (some := filled(weights, biases)) is None:
            return _cat(whole), None
        some = [F.pad(bias, (0, rows)) if rows else bias for bias, rows in zip(some, self.spare, strict=True)]
        return _cat(whole), _cat(some)

    def stack(self, places: Any, each_a: Sequence[Any], each_b: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """A (R, E) and s B (F, R) of each adapter, as they add to the one product."""
        total, a_RE, b_FR = self.start(len(self.widths)), [], []
        for (index, scaling), a, b in zip(places, each_a, each_b, strict=True):
            start, rank = self.start(index), -len(a) % 8
            share = _scaled(b, scaling).to(self.dtype)
            a_RE.append(_padded(a.to(self.dtype), self.more, rank))
            whole = start or len(b) < total
            b_FR.append(F.pad(share, (0, rank, start, total - start - len(b))) if rank or whole else share)
        return a_RE, b_FR

    def matrices(self, places: Any, each_a: Sequence[Any], each_b: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """`stack` as two matrices, each written once; no gradient flows through it."""
        ranks, total, first = [-(-len(a) // 8) * 8 for a in each_a], self.start(len(self.widths)), 0
        whole = len(places) == 1 and not self.more and ranks[0] == len(each_a[0]) and total == len(each_b[0])
        new = each_a[0].new_empty if whole else each_a[0].new_zeros
        a_RE = new((sum(ranks), self.inner + self.more), dtype=self.dtype)
        b_FR = new((total, sum(ranks)), dtype=self.dtype)
        for (index, scaling), a, b, rank in zip(places, each_a, each_b, ranks, strict=True):
            a_RE[first : first + len(a), : self.inner].copy_(a)
            start = self.start(index)
            torch.mul(b, scaling, out=b_FR[start : start + len(b), first : first + len(a)])
            first += rank
        return a_RE, b_FR


def _scaled(x: Tensor, scaling: Any) -> Tensor:
    """By a number, or by a tensor on the device, as PEFT's hot swapping has it: then without asking what it holds."""
    return x if not isinstance(scaling, Tensor) and scaling == 1 else x * scaling


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def adapted_reference(x_TE: Tensor, *rest: Any) -> Tensor:
    """What Linears with adapters make of rows, side by side; a PEFT module's result, if it is one.

    rest: the Linears' weights, their biases, (which of them, scaling) of each adapter, all A, all B, `Sides`, `Norm`.
    """
    *given, sides, _ = rest
    weights, biases, *adapters = sides.given(given)
    out_TF, (a_RE, b_FR) = F.linear(x_TE, *sides.join(weights, biases)), sides.stack(*adapters)
    for a, b in zip(a_RE, b_FR, strict=True):
        out_TF = out_TF + F.linear(F.linear(x_TE, a), b)
    return out_TF


def _product_in(dtypes: Sequence[torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    """x y, for who takes it in these dtypes: of bf16 in fp32 as it was added up, where all want that."""
    if x.is_cuda and x.dtype == torch.bfloat16 and set(dtypes) == {torch.float32}:
        return torch.mm(x, y, out_dtype=torch.float32)
    return x @ y


class AdaptedFunction(torch.autograd.Function):
    """`adapted_reference` with one sum of products for all adapters, rounded after it.

    remakes: who makes x again, given the gradient of x.
    joined: the weight and the bias of the one product, where they are there already.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *rest: Any) -> Tensor:
        *given, ctx.sides, norm = rest
        weights, biases, ctx.places, each_a, each_b = ctx.sides.given(given)
        needs_x, *needs = ctx.needs_input_grad
        places = len(ctx.places)
        after = 2 * len(weights) + 1
        needs_weights, needs_a = needs[: len(weights)], needs[after : after + places]
        ctx.needs = needs_weights, needs[len(weights) : after - 1], needs_a, needs[after + places : after + 2 * places]
        ctx.needs_x, ctx.dtypes, ctx.ranks = needs_x, [m.dtype for m in (*each_a, *each_b)], list(map(len, each_a))
        out_TF = F.linear(x_TE, *(getattr(ctx, "joined", None) or ctx.sides.join(weights, biases)))
        keeps = not hasattr(ctx, "remakes") and (any(needs_weights) or any(needs_a))
        tensors, ctx.settings = keep(x_TE, norm) if keeps else ((), None)
        a_RE = b_FR = u_TR = None
        if ctx.places:
            a_RE, b_FR = ctx.sides.matrices(ctx.places, each_a, each_b)
            u_TR = F.linear(x_TE, a_RE)
            out_TF.addmm_(u_TR, b_FR.t())
        ctx.save_for_backward(a_RE, b_FR, u_TR, *(weights if needs_x else [None] * len(weights)), *tensors)
        return out_TF

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Any, ...]:
        sides, places = ctx.sides, ctx.places
        dx_TE = du_TR = x_TE = None  # type: Any
        needs_weights, needs_biases, needs_a, needs_b = ctx.needs
        a_RE, b_FR, u_TR, *saved = ctx.saved_tensors
        weights, tensors = saved[: len(sides.widths)], saved[len(sides.widths) :]
        dy_TF = dy_TF.contiguous()
        if places and (ctx.needs_x or any(needs_a)):
            du_TR = dy_TF @ b_FR
        if ctx.needs_x:
            dx_TE = dy_TF @ (getattr(ctx, "joined", None) or sides.join(weights, None))[0]
            if du_TR is not None:
                dx_TE.addmm_(du_TR, a_RE)
        db_FR = _product_in(ctx.dtypes[len(places) :], dy_TF.t(), u_TR) if any(needs_b) else None
        dbias = column_sum(dy_TF) if any(needs_biases) else None
        if getattr(ctx, "remakes", None) is not None:
            x_TE = ctx.remakes(dx_TE)
        elif any(needs_weights) or any(needs_a):
            x_TE = kept(tensors, ctx.settings, len(dy_TF))
        dweight = dy_TF.t() @ x_TE if any(needs_weights) else None
        da_RE = None
        if du_TR is not None and any(needs_a):
            da_RE = _product_in(ctx.dtypes[: len(places)], du_TR.t(), x_TE)

        found: list[Tensor | None] = []
        for needs, whole in ((needs_weights, dweight), (needs_biases, dbias)):
            for index, (need, width) in enumerate(zip(needs, sides.widths, strict=True)):
                part = whole[sides.start(index) :][:width] if need and whole is not None else None
                found.append(part if part is None or part.dim() < 2 else part[:, : sides.inner].contiguous())
        each_da: list[Tensor | None] = []
        each_db: list[Tensor | None] = []
        first = 0
        for at, (index, scaling) in enumerate(places):
            rank, rows = ctx.ranks[at], slice(sides.start(index), sides.start(index) + sides.widths[index])
            dtypes = ctx.dtypes[at], ctx.dtypes[at + len(places)]
            da = da_RE[first : first + rank, : sides.inner].to(dtypes[0]) if needs_a[at] and da_RE is not None else None
            db = db_FR[rows, first : first + rank].to(dtypes[1]) if needs_b[at] and db_FR is not None else None
            each_da.append(da)
            each_db.append(None if db is None else _scaled(db, scaling))
            first += -(-rank // 8) * 8
        return dx_TE, *found, None, *each_da, *each_db, None, None


def product(loras: Sequence[Lora], context: Context, inner: int | None = None) -> Any:
    """Rows (T, E) to what Linears make of them, side by side, each of some filled up with zeros to `G`.

    inner: how many columns the rows have, where that is more than E; those beyond are zeros.
    """
    widths, own = tuple(len(lora.base.weight) for lora in loras), loras[0].base.in_features
    spare = tuple(-width % 8 if len(loras) > 1 else 0 for width in widths)
    sides = Sides(widths=widths, spare=spare, inner=own, more=(inner or own) - own, dtype=context.dtype)
    read = context.reader(*((lora.base, name) for name in ("weight", "bias") for lora in loras))

    def weights() -> list[Any]:
        active = [(index, *each) for index, lora in enumerate(loras) for each in lora.active()]  # it may unmerge some
        places = tuple((index, scaling) for index, _, _, _, scaling in active)
        return [*read(), places, *(each[1].weight for each in active), *(each[2].weight for each in active)]

    if context.trains_by_kernels and not any(lora.drops for lora in loras):
        return Trained(function=AdaptedFunction, weights=weights, settings=(sides,), takes_norm=True)

    def run(x_TE: Tensor) -> Tensor:
        dropouts = [each[2] for lora in loras for each in lora.active()]
        bases, biases, *adapters = sides.given(weights())
        if context.trains_by_kernels:  # which keeps no padded copy of the weights
            out_TF: Tensor = AdaptedFunction.apply(x_TE, *bases, *biases, (), sides, None)
        else:
            out_TF = F.linear(x_TE, *sides.join(bases, biases))
        a_RE, b_FR = sides.stack(*adapters)
        for dropout, a, b in zip(dropouts, a_RE, b_FR, strict=True):
            out_TF.addmm_(F.linear(dropout(x_TE), a), b.t())
        return out_TF

    return run


# --- MLPs -------------------------------------------------------------------------------------------------------------


def activated_reference(z: Tensor, kind: str, limit: float | None = None) -> Tensor:
    """The activation of rows (T, F); of a SwiGLU, kind "silu", of gate and up side by side, (T, 2 F)."""
    if kind == "silu":
        return swiglu_reference(*z.chunk(2, dim=-1), limit=limit)
    return ACTIVATIONS[kind](z)


def _activate(z: Tensor, kind: str, limit: float | None) -> Tensor:
    return swiglu(*z.chunk(2, dim=-1), limit=limit) if kind == "silu" else gelu(z, kind)


def _activate_back(z: Tensor, dh_TF: Tensor, kind: str, limit: float | None) -> tuple[Any, Tensor]:
    """The gradient of z, and h again; what dh held is lost."""
    dz = torch.empty_like(z)
    if kind == "silu":
        swiglu_gradient(z, dh_TF, dz, limit)
        return dz, dh_TF
    gelu_gradient(z, dh_TF, dh_TF, dz, kind, needs_h=True)
    return dh_TF, dz


class Activated(torch.autograd.Function):
    """`activated_reference` as one kernel in each direction, that keeps its input only."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: str, limit: float | None = None) -> Tensor:
        ctx.save_for_backward(z)
        ctx.settings = kind, limit
        return _activate(z, kind, limit)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dh_TF: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        return _activate_back(z, dh_TF.clone(memory_format=torch.contiguous_format), *ctx.settings)[0], None, None


def adapted_mlp_reference(x_TE: Tensor, *rest: Any) -> Tensor:
    """An MLP whose Linears have adapters, (T, E).

    rest: how many weights `AdaptedFunction` takes for its first products; those, and those of the last one; `Sides` of
    both, the activation, its limit, `Norm`.
    """
    count, *given, first, last, kind, limit, norm = rest
    z = adapted_reference(x_TE, *given[:count], first, norm)
    return adapted_reference(activated_reference(z, kind, limit), *given[count:], last, None)


class AdaptedMlp(torch.autograd.Function):
    """`adapted_mlp_reference` as one node of autograd's graph, by kernels.

    What the activation made is made again, as in `gelu_backward`.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *rest: Any) -> Tensor:
        count, *given, first, last, kind, limit, norm = rest
        needs_x, _, *needs = ctx.needs_input_grad
        ctx.first = Frame((needs_x, *needs[:count], False, False))
        ctx.last = Frame((any(ctx.first.needs_input_grad), *needs[count : len(given)], False, False))
        ctx.settings, ctx.count = (kind, limit), len(given)
        if kind == "silu":  # a kernel fills up the weights of all three
            _join(ctx, given[0], given[1], given[2:4], given[count], given[count + 1])
        z = AdaptedFunction.forward(ctx.first, x_TE, *given[:count], first, norm)
        if any(ctx.first.needs_input_grad):
            ctx.last.remakes = None  # nothing is kept for it
        out_TE = AdaptedFunction.forward(ctx.last, _activate(z, kind, limit), *given[count:], last, None)
        of_first, of_last = ctx.first.saved_tensors, ctx.last.saved_tensors
        ctx.first.saved_tensors = ctx.last.saved_tensors = ()
        ctx.first.joined = ctx.last.joined = None
        ctx.split = len(of_first)
        ctx.save_for_backward(z if any(ctx.first.needs_input_grad) else None, *of_first, *of_last)
        return out_TE

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Any, ...]:
        z, *saved = ctx.saved_tensors
        first, last, dz = ctx.first, ctx.last, None
        first.saved_tensors, last.saved_tensors = saved[: ctx.split], saved[ctx.split :]
        if ctx.settings[0] == "silu" and first.needs_x:
            _join(ctx, saved[3], saved[4], None, saved[ctx.split + 3], None)

        def remakes(dh_TF: Tensor) -> Tensor:
            nonlocal dz
            dz, h_TF = _activate_back(z, dh_TF, *ctx.settings)
            return h_TF

        if z is not None:
            last.remakes = remakes
        _, *of_last = AdaptedFunction.backward(last, dy_TE)
        dx_TE, of_first = None, [None] * (len(first.needs_input_grad) - 1)
        if dz is not None:
            dx_TE, *of_first = AdaptedFunction.backward(first, dz)
        first.saved_tensors = last.saved_tensors = ()
        first.joined = last.joined = last.remakes = None  # they hold what they were made of
        return dx_TE, None, *of_first[:-2], *of_last[:-2], *[None] * 5


def _join(ctx: Any, gate_FE: Any, up_FE: Any, biases: Any, down_EF: Any, down_E: Any) -> None:
    """The weights of a SwiGLU's products, each with its bias, for the two that follow."""
    weight, bias, down_EG = aligned(gate_FE, up_FE, biases, down_EF)
    ctx.first.joined, ctx.last.joined = (weight, bias), (down_EG, down_E)


def mlp(before: Sequence[Lora], after: Lora, kind: str, limit: float | None, context: Context) -> Any:
    """An MLP whose Linears have adapters: two products with an activation between them, or a SwiGLU, kind "silu"."""
    width = len(before[0].base.weight)
    first = product(before, context)
    last = product([after], context, inner=-(-width // 8) * 8 if len(before) > 1 else width)
    if not (isinstance(first, Trained) and isinstance(last, Trained)):
        return lambda x_TE: last(Activated.apply(first(x_TE), kind, limit))

    def weights() -> list[Any]:
        of_first = first.weights()
        return [len(of_first), *of_first, *last.weights()]

    settings = *first.settings, *last.settings, kind, limit
    return Trained(function=AdaptedMlp, weights=weights, settings=settings, takes_norm=True)
