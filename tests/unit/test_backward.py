"""Compare every trained operation with autograd of its reference: outputs, every gradient, frozen tensors.

One table of cases. On a CPU Triton's interpreter runs them at small sizes; on a GPU they are compiled, at real sizes.
Exact is the reference in fp64. The bound is stock's own error: the reference's error under autograd in the same dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.interpreter import INTERPRETED, interpreted
from support.kernels import Target, compile_for_hopper, draw, tables
from tiny import relative_error
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.ops import product as product_module
from hf_vit_accel.ops.activation import ACTIVATIONS
from hf_vit_accel.ops.add_norm import add_norm_reference
from hf_vit_accel.ops.embedding import AddPositions, Rope, add_positions_reference, rope_reference
from hf_vit_accel.ops.heads import ShapeHeads, shape_heads_reference
from hf_vit_accel.ops.launch import triton
from hf_vit_accel.ops.lora import JoinedLinears
from hf_vit_accel.ops.product import ProductFunction, product_reference
from hf_vit_accel.ops.training import column_sum as column_sum_module
from hf_vit_accel.ops.training.mlp import MlpFunction, activated_reference
from hf_vit_accel.ops.training.norm_backward import AddNormFunction, NormRecipe
from hf_vit_accel.ops.window_attention import WindowAttention, window_attention_reference

GELUS = [kind for kind in ACTIVATIONS if kind != "silu"]
linear_reference = torch.nn.functional.linear
add_norm = AddNormFunction.apply

ONE_LINEAR = JoinedLinears(widths=(0,), padding=(0,), in_features=0, extra_features=0, dtype=torch.float32)
"""One Linear without adapters. Nothing is joined, so its sizes are not read."""
Tensors = dict[str, torch.Tensor]
Weight = torch.Tensor | None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Weight, recipe: NormRecipe | None = None) -> torch.Tensor:
    return ProductFunction.apply(x, weight, bias, (), ONE_LINEAR, recipe)


def side_by_side(weights: Sequence[torch.Tensor], *, padded: bool = False, extra: int = 0) -> JoinedLinears:
    return JoinedLinears(
        widths=tuple(len(weight) for weight in weights),
        padding=tuple(-len(weight) % 8 * padded for weight in weights),
        in_features=weights[0].shape[1],
        extra_features=extra,
        dtype=weights[0].dtype,
    )


def mlp_weights(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """List the arguments of an MLP without adapters: weights and biases before its activation, and those after it."""
    return [len(before) + 1, *before, (), *after, ()]


def mlp_settings(before: Sequence[Any], after: Sequence[Any], kind: str, limit: float | None = None) -> list[Any]:
    weights = before[: len(before) // 2]
    swiglu = kind == "silu"
    last = side_by_side(after[:1], extra=-len(weights[0]) % 8 * swiglu)
    return [side_by_side(weights, padded=swiglu), last, kind, limit]


def mlp(x: torch.Tensor, before: Sequence[Any], after: Sequence[Any], *settings: Any, recipe: Any = None) -> Any:
    return MlpFunction.apply(x, *mlp_weights(before, after), *mlp_settings(before, after, *settings), recipe)


def mlp_reference(
    x: torch.Tensor,
    before: Sequence[Any],
    after: Sequence[Any],
    kind: str,
    limit: float | None = None,
    recipe: Any = None,
) -> torch.Tensor:
    count = len(before) // 2
    z = torch.cat([linear_reference(x, before[index], before[count + index]) for index in range(count)], dim=-1)
    return linear_reference(activated_reference(z, kind, limit), *after)


@dataclass(frozen=True)
class Case:
    """Describe an operation and the tensors that it trains; `roundings` are allowed errors in units of eps."""

    leaves: Tensors
    operation: Callable[[Tensors], Any]
    reference: Callable[[Tensors], Any]
    roundings: float = 0.3

    def outputs(self, function: Callable[[Tensors], Any], leaves: Tensors) -> tuple[torch.Tensor, ...]:
        outputs = function(leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def leaves(target: Target, **shapes: tuple[int, ...]) -> Tensors:
    """Draw tensors: rows of normal values, weights that keep the size of a product, norms' weights around one."""
    drawn = {name: draw(*shape, target=target, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return {
        name: value * value.shape[-1] ** -0.5 if name.startswith("w") and value.ndim == 2 else value
        for name, value in drawn.items()
    }


def sized(target: Target, small: int, large: int) -> int:
    return min(small, target.get("most_rows", small)) if target["device"] == "cpu" else large


def norm_case(width: int, target: Target, *, rms: bool, delta: bool, wide: bool = False) -> Case:
    """Add and normalise; `wide` keeps all tensors but delta and the result in fp32."""
    used = sized(target, width, width)
    rows = min(sized(target, 5, target["rows"]), target["rows"]), used
    drawn = leaves(target, x=rows, scale=(used,)) | (leaves(target, delta=rows) if delta else {})
    drawn |= {} if rms else leaves(target, bias=(used,))
    drawn["x"] = drawn["x"] + 0.5
    if wide:
        drawn |= {name: value.float() for name, value in drawn.items() if name != "delta"}

    def call(function: Any) -> Callable[[Tensors], Any]:
        def run(p: Tensors) -> Any:
            dtype = p["x"].dtype if p["x"].dtype == torch.float64 else target["dtype"]
            return function(p["x"], p.get("delta"), p["scale"], p.get("bias"), 1e-6, rms, dtype)

        return run

    return Case(drawn, call(add_norm), call(add_norm_reference))


def rope_case(dim: int, target: Target) -> Case:
    cos, sin = tables(target["rows"], dim, target)
    return Case(
        leaves(target, qkv=(target["rows"], 3, target["heads"], dim)),
        lambda p: Rope.apply(p["qkv"], cos, sin),
        lambda p: rope_reference(p["qkv"], cos, sin),
    )


def window_case(dim: int, lengths: list[int], target: Target) -> Case:
    repeated = lengths * sized(target, 1, 20)
    cos, sin = tables(sum(repeated), dim, target)
    offsets = torch.tensor([0, *repeated]).cumsum(0).to(torch.int32).to(target["device"])
    settings = cos, sin, offsets, dim**-0.5
    return Case(
        leaves(target, qkv=(sum(repeated), 3, target["heads"], dim)),
        lambda p: WindowAttention.apply(p["qkv"], *settings),
        lambda p: window_attention_reference(p["qkv"], *settings),
        roundings=1.0,  # a softmax's weights are rounded before the product, in stock's kernels too
    )


def linear_case(inner: int, width: int, target: Target, *, bias: bool = True) -> Case:
    drawn = leaves(target, x=(target["rows"], inner), w=(width, inner))
    drawn |= leaves(target, b=(width,)) if bias else {}
    return Case(
        drawn,
        lambda p: linear(p["x"], p["w"], p.get("b")),
        lambda p: linear_reference(p["x"], p["w"], p.get("b")),
    )


def mlp_case(
    kind: str,
    sizes: tuple[int, int],
    real: tuple[int, int],
    target: Target,
    *,
    biases: str = "012",
    limit: float | None = None,
    shift: float = 0.0,
) -> Case:
    """Run an MLP; `shift` moves its inner values far below zero, where formulas of the activation cancel."""
    gates = 2 if kind == "silu" else 1
    inner, width = (sized(target, *pair) for pair in zip(sizes, real, strict=True))
    widths = {f"w{index}": (width, inner) for index in range(gates)}
    drawn = leaves(target, x=(target["rows"], inner), **widths, w2=(inner, width))
    used_biases = [name for name in biases if name == "2" or int(name) < gates]
    drawn |= leaves(target, **{f"b{name}": (inner if name == "2" else width,) for name in used_biases})
    drawn |= {"w0": 2 * drawn["w0"]} if gates == 1 else {}
    drawn |= {"b0": drawn["b0"] + shift} if shift else {}

    def call(function: Any) -> Callable[[Tensors], Any]:
        def run(p: Tensors) -> Any:
            before = [p.get(f"{name}{index}") for name in "wb" for index in range(gates)]
            return function(p["x"], before, (p["w2"], p.get("b2")), kind, limit)

        return run

    return Case(drawn, call(mlp), call(mlp_reference))


def positions_case(taps: int, width: int, target: Target) -> Case:
    generator = torch.Generator().manual_seed(0)
    rows = sized(target, 9, target["rows"])
    indices = torch.randint(0, 36, (rows, taps), generator=generator, dtype=torch.int32).to(target["device"])
    weights = torch.rand(rows, taps, generator=generator).to(target["device"])
    return Case(
        leaves(target, x=(rows, width), table=(36, width)),
        lambda p: AddPositions.apply(p["x"], p["table"], indices, weights),
        lambda p: add_positions_reference(p["x"], p["table"], indices, weights),
    )


def heads_case(dim: int, groups: int, target: Target, *, normed: bool) -> Case:
    heads = target["heads"]
    key_heads = target["heads"] // groups
    drawn = leaves(target, qkv=(target["rows"], (heads + 2 * key_heads) * dim))
    drawn |= leaves(target, q=(dim,), k=(dim,)) if normed else {}

    def call(function: Any) -> Callable[[Tensors], Any]:
        return lambda p: function(p["qkv"], heads, key_heads, 1e-5, *((p["q"], p["k"]) if normed else ()))

    return Case(drawn, call(ShapeHeads.apply), call(shape_heads_reference))


def joined_case(biases: str, target: Target) -> Case:
    """Run three Linears as one product, of normed rows that are recomputed."""
    inner = sized(target, 24, 1152)
    widths = [72 * target["heads"], 72, 72]
    drawn = leaves(target, x=(target["rows"], inner), scale=(inner,))
    drawn |= leaves(target, **{f"w{i}": (width, inner) for i, width in enumerate(widths)})
    drawn |= leaves(target, **{f"b{i}": (widths[int(i)],) for i in biases})

    def call(norm_function: Any, product: Any, recipe: Any) -> Callable[[Tensors], Any]:
        def run(p: Tensors) -> Any:
            weights = [p[f"w{i}"] for i in range(3)]
            flat = [*weights, *(p.get(f"b{i}") for i in range(3)), ()]
            settings = p["scale"], None, 1e-6
            total, x = norm_function(p["x"], None, *settings, True)
            return total, product(x, *flat, side_by_side(weights), recipe(total, *settings, True))

        return run

    ours = call(add_norm, ProductFunction.apply, NormRecipe)
    return Case(drawn, ours, call(add_norm_reference, product_reference, lambda *_: None), roundings=1.5)


CASES: dict[str, Callable[[Target], Case]] = {
    **{
        f"norm {width} {'rms' if rms else 'layer'}{' delta' * delta}": partial(norm_case, width, rms=rms, delta=delta)
        for width, rms, delta in [
            *((80, rms, delta) for rms in (False, True) for delta in (False, True)),
            (144, False, True),
            (1152, False, True),
            (1280, True, True),
            *([(1024, False, True)] * (not INTERPRETED)),
        ]
    },
    **{
        f"norm 144 {'rms' if rms else 'layer'} of fp32": partial(norm_case, 144, rms=rms, delta=True, wide=True)
        for rms in (True, False)
    },
    **{f"rope {dim}": partial(rope_case, dim) for dim in (80, 72)},
    "window 80": partial(window_case, 80, [64, 16, 1, 37, 0, 48]),
    "window 72": partial(window_case, 72, [64, 3]),
    "linear 144": partial(linear_case, 144, 432),
    "linear 80, no bias": partial(linear_case, 80, 212, bias=False),
    "linear 1152": partial(linear_case, 1152, 30),
    **{f"mlp {kind}": partial(mlp_case, kind, (80, 212), (1152, 4304)) for kind in GELUS},
    "mlp gelu_tanh, no bias": partial(mlp_case, "gelu_tanh", (144, 130), (1280, 5120), biases=""),
    "swiglu unaligned": partial(mlp_case, "silu", (24, 132), (1280, 3420)),
    "swiglu aligned": partial(mlp_case, "silu", (80, 72), (1280, 3456)),
    "swiglu, odd": partial(mlp_case, "silu", (80, 61), (1280, 3419)),
    "swiglu, no bias": partial(mlp_case, "silu", (80, 36), (1280, 3420), biases=""),
    "swiglu, cut off": partial(mlp_case, "silu", (80, 61), (1280, 3419), limit=0.75),
    "swiglu, one bias": partial(mlp_case, "silu", (80, 36), (1280, 3420), biases="1"),
    "mlp gelu_tanh, closed": partial(mlp_case, "gelu_tanh", (80, 208), (1152, 4304), shift=-4.0),
    **{
        f"heads {dim} {groups}{' normed' * normed}": partial(heads_case, dim, groups, normed=normed)
        for dim, groups, normed in ((64, 1, True), (80, 2, False), (72, 2, True))
    },
    "joined": partial(joined_case, "012"),
    "joined, two biases": partial(joined_case, "02"),
    "joined, no bias": partial(joined_case, ""),
    "positions 4": partial(positions_case, 4, 144),
    "positions 16": partial(positions_case, 16, 300),
}
ALIKE = {f"mlp {kind}" for kind in GELUS if kind != "gelu_tanh"} | {"swiglu, odd", "swiglu, no bias", "swiglu, cut off"}
ALIKE |= {"norm 80 layer", "norm 80 rms delta", "norm 144 layer of fp32", "window 80", "mlp gelu_tanh, closed"}
ALIKE |= {"heads 64 1 normed", "heads 80 2"}
"""Those that differ from another case in sizes, in what is left out, or in a part that has a case of its own.

They are interpreted in fp16, each trained whole, by plain gradients; in fp32 and with parts frozen in the matrix.
On a GPU all are.
"""
IN_FP32 = {"norm 80 layer delta", "window 72", "linear 144", "swiglu unaligned", "positions 4"}
"""Those that are interpreted in fp32, too. Masks and tiles are those of fp16; the matrix has all."""
OF_THE_MATRIX = {"norm 80 rms", "norm 144 layer delta", "norm 1152 layer delta", "norm 1280 rms delta", "rope 80"}
OF_THE_MATRIX |= {"linear 1152", "swiglu aligned", "joined", "joined, no bias", "positions 16"}
"""Alike, too, and interpreted in the matrix alone: they launch what others of the table launch."""
assert CASES.keys() >= ALIKE | OF_THE_MATRIX
SMALL = dict(device="cpu", rows=21, heads=2)
LARGE = dict(device="cuda", rows=2053, heads=16)
DTYPES = [
    *(
        pytest.param(SMALL | {"dtype": dtype}, id=f"interpreted-{dtype}", marks=interpreted)
        for dtype in (torch.float16, torch.float32)
    ),
    *(
        pytest.param(LARGE | {"dtype": dtype}, id=f"gpu-{dtype}", marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


def cells(dtypes: list[Any], alike: Callable[[str, Target], bool]) -> list[Any]:
    """Return every case in all dtypes; the matrix alone interprets those that differ little."""

    def left_out(name: str, target: Target) -> bool:
        return alike(name, target) or (name in OF_THE_MATRIX and target["device"] == "cpu")

    return [
        pytest.param(
            name,
            *target.values,
            id=f"{name}-{target.id}",
            marks=[*target.marks, *[pytest.mark.matrix] * left_out(name, *target.values)],
        )
        for name in CASES
        for target in dtypes
    ]


@pytest.fixture(autouse=True)
def kernels_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels for few rows too, where operations otherwise use aten or save tensors."""
    for module in (column_sum_module, product_module):
        monkeypatch.setattr(module, "MANY_ROWS", 0)
    # cuBLAS may add up halves of a product in fp16: the errors compared are then its choice of an algorithm.
    products = torch.backends.cuda.matmul
    before = products.allow_fp16_reduced_precision_reduction
    products.allow_fp16_reduced_precision_reduction = False
    yield
    products.allow_fp16_reduced_precision_reduction = before


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill fresh memory with NaN."""

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh_tensor = make(*args, **kwargs)
            if fresh_tensor.is_floating_point() and not fresh_tensor.requires_grad:
                fresh_tensor.fill_(float("nan"))
            return fresh_tensor

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield


def fresh(drawn: Tensors, dtype: torch.dtype | None = None, only: set[str] | None = None) -> Tensors:
    return {
        name: value.detach().to(dtype or value.dtype).clone().requires_grad_(only is None or name in only)
        for name, value in drawn.items()
    }


def gradients(outputs: tuple[torch.Tensor, ...], wide: Tensors, incoming: list[torch.Tensor | None]) -> Tensors:
    pairs = []
    for out, gradient in zip(outputs, incoming, strict=True):
        if gradient is not None and out.requires_grad:
            pairs.append((out, gradient.to(out.dtype)))
    torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return {name: value.grad for name, value in wide.items() if value.grad is not None}


def check(actual: Tensors, stock: Tensors, exact: Tensors, roundings: float = 0.3) -> None:
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert (value.shape, value.dtype) == (stock[name].shape, stock[name].dtype), name
        units = 4 * max(1.0, roundings) if value.dtype == torch.float32 else min(roundings, 1.0)
        bound = max(1.1 * relative_error(stock[name], exact[name]), units * torch.finfo(value.dtype).eps)
        assert relative_error(value, exact[name]) <= bound, name


def incoming_for(outputs: tuple[torch.Tensor, ...], kind: str) -> list[torch.Tensor | None]:
    incoming: list[torch.Tensor | None] = []
    for seed, out in enumerate(outputs):
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype).to(out.device)
        if kind == "strided" and seed == 0:
            gradient = gradient[:1].expand_as(out)
        elif kind == "strided":
            gradient = gradient.transpose(0, -1).contiguous().transpose(0, -1)
        incoming.append(None if kind == f"without {seed}" and len(outputs) > 1 else gradient)
    return incoming


INCOMING = "plain", "strided", "without 0", "without 1"


def compare(case: Case, kind: str) -> None:
    """Compare outputs and gradients of one kind of incoming gradients with exact ones and the reference's."""
    runs = {}
    for key, function, dtype in (
        ("exact", case.reference, torch.float64),
        ("stock", case.reference, None),
        ("operation", case.operation, None),
    ):
        mine = fresh(case.leaves, dtype)
        outputs = case.outputs(function, mine)
        if kind.startswith("without") and len(outputs) == 1:
            return
        results = gradients(outputs, mine, incoming_for(outputs, kind))
        runs[key] = results | {f"output {index}": out.detach() for index, out in enumerate(outputs)}
    check(runs["operation"], runs["stock"], runs["exact"], case.roundings)


@pytest.mark.parametrize(
    ("name", "target"), cells(DTYPES, lambda name, target: target["dtype"] == torch.float32 and name not in IN_FP32)
)
def test_outputs_and_gradients(name: str, target: Target) -> None:
    case = CASES[name](target)
    is_alike = target["dtype"] == torch.float32 or (name in ALIKE and target["device"] == "cpu")
    for kind in ("plain",) if is_alike else INCOMING:
        compare(case, kind)


def run(case: Case, mine: Tensors, way: str = "") -> Tensors:
    """Return the operation's gradients, checkpointed or not, which are bit for bit the same every time."""
    values = [value.to(case.leaves[name].dtype) for name, value in mine.items()]  # not leaves, if they are fp32

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return case.outputs(case.operation, dict(zip(mine, values, strict=True)))

    outputs = checkpoint(function, *values, use_reentrant=way == "reentrant") if way else function(*values)
    return gradients(outputs, mine, incoming_for(outputs, "plain"))


@pytest.mark.parametrize(
    ("name", "target"),
    cells([DTYPES[0], *DTYPES[2:]], lambda name, target: name in ALIKE and target["device"] == "cpu"),
)
def test_frozen_and_checkpointed(name: str, target: Target) -> None:
    """Train one of any two tensors and freeze the other; checkpoint; cast weights from fp32."""
    atomic = "positions" in name and target["device"] == "cuda"  # they add in any order
    smallest = {"rows": 3, "most_rows": 9}  # compared with itself, and slow
    case = CASES[name](target | (smallest if target["device"] == "cpu" else {}))
    all_names = set(case.leaves)
    expected = run(case, fresh(case.leaves))
    for only in separating(sorted(all_names)):
        actual = run(case, fresh(case.leaves, only=only))
        assert actual.keys() == only
        assert all(relative_error(actual[key], expected[key]) <= torch.finfo(target["dtype"]).eps for key in only), only
    for way in ("reentrant", "not"):
        actual = run(case, fresh(case.leaves), way)
        assert actual.keys() == all_names, way
        assert all(same(actual[key], expected[key], atomic) for key in all_names), way
    masters = run(case, fresh(case.leaves, torch.float32))
    assert all(same(masters[key], expected[key].float(), atomic) for key in all_names)


def separating(names: list[str]) -> list[set[str]]:
    """Return sets by the bits of numbers: of any two names, one set contains the first and not the second."""
    sets = []
    for bit in range((len(names) - 1).bit_length()):
        for value in (0, 1):
            sets.append({name for index, name in enumerate(names) if index >> bit & 1 == value})
    return sets


def same(actual: torch.Tensor, expected: torch.Tensor, atomic: bool) -> bool:
    return torch.equal(actual, expected) or (atomic and relative_error(actual, expected) <= 1e-3)


@pytest.mark.parametrize("target", DTYPES[:1])
def test_second_derivatives_raise(target: Target) -> None:
    """Raise also for constant incoming gradients, else a gradient penalty would be dropped silently."""
    x = draw(target["rows"], 80, target=target).requires_grad_()
    weight = draw(30, 80, target=target, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, weight, None).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.square().sum().backward()
    (dx,) = torch.autograd.grad(linear(x, weight, None).sum(), x)
    assert not dx.requires_grad


@pytest.mark.parametrize("target", DTYPES)
def test_a_product_after_a_norm_keeps_no_normed_rows(target: Target) -> None:
    """Count what autograd saves between forward and backward: no tensor that only a frozen part needs."""
    rows = target["rows"]
    width = 80
    inner = 36
    p = leaves(target, x=(rows, width), delta=(rows, width), scale=(width,), wg=(inner, width), w2=(width, inner))

    def saved(function: Callable[[Tensors], Any], only: set[str]) -> int:
        mine = fresh(p, only=only)
        saved = {}
        pointers = {tensor.data_ptr() for tensor in mine.values()}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in pointers:
                saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function(mine)
        return sum(saved.values())

    def layer(p: Tensors) -> Any:
        total, x = add_norm(p["x"], p["delta"], p["scale"], None, 1e-6, True)
        norm = NormRecipe(total, p["scale"], None, 1e-6, True)
        return mlp(x, (p["wg"], p["wg"], None, None), (p["w2"], None), "silu", recipe=norm)

    assert saved(layer, set(p)) == rows * (width + 1 + 2 * 40)  # the sum, its statistics, gate and up
    assert saved(lambda p: linear(p["x"], p["wg"], None), {"wg"}) == 0
    assert saved(lambda p: linear(2 * p["x"], p["wg"], None), {"x"}) == 0
    assert saved(lambda p: linear(p["x"].exp(), p["wg"], None), {"scale"}) == 0


COMPILED = "norm 80 layer delta", "norm 1152 layer delta", "norm 144 rms of fp32", "rope 72", "window 72", "positions 4"
COMPILED += "mlp gelu", "mlp gelu_tanh", "mlp quick_gelu", "swiglu, cut off", "heads 72 2 normed", "joined"
"""Cases that launch every kernel of a trained operation, with all that it may compute."""


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_launches_compile_for_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name](SMALL | {"dtype": torch.bfloat16})
    compiled = compile_for_hopper(monkeypatch)
    outputs = case.outputs(case.operation, fresh(case.leaves))
    gradients(outputs, {}, incoming_for(outputs, "plain"))
    assert compiled
