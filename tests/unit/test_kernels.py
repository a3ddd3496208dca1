"""Compare kernels with their plain-torch references: interpreted on a CPU, compiled at real shapes on a GPU.

`test_backward.py` has those that trained operations launch, too.

The interpreter truncates to bf16 where hardware rounds, and cannot multiply it: on a CPU kernels run in fp16.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.interpreter import INTERPRETED, interpreted
from support.kernel_table import DEFINED, KERNELS
from support.kernels import Target, compile_for_hopper, draw, tables
from tiny import relative_error

from hf_vit_accel.ops import launch
from hf_vit_accel.ops.activation import pad_swiglu, pad_swiglu_reference, swiglu, swiglu_reference
from hf_vit_accel.ops.embedding import rope_gather_back
from hf_vit_accel.ops.fp8.quantize import (
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
    sample_reference,
)
from hf_vit_accel.ops.fp8.scales import E4M3, LARGEST, fit
from hf_vit_accel.ops.heads import shape_heads_, shape_heads_reference
from hf_vit_accel.ops.launch import triton, why_not_triton
from hf_vit_accel.ops.mlp import MANY_ROWS, linear_swiglu, linear_swiglu_reference
from hf_vit_accel.options import checksum

SMALL = dict(device="cpu", rows=7, heads=2, dtype=torch.float16)
LARGE = dict(device="cuda", rows=2053, heads=16)
large = [pytest.mark.matrix] * (not torch.cuda.is_available())
"""Marks of sizes that on a CPU are cut down to those of another case, or need no more blocks than it."""


def test_every_kernel_stands_in_a_row() -> None:
    """A kernel without a row would run on no CPU, and no test would break its launch."""
    declared = {name for row in KERNELS.values() for _, name in row.launched}
    assert not DEFINED.keys() - declared, "declare these kernels in tests/support/kernel_table.py"


def where(test: Any) -> Any:
    """Run a kernel's test interpreted at small shapes (by test_interpreted.py) and compiled at large ones."""
    cases = [pytest.param(SMALL, id="interpreted", marks=interpreted)]
    for dtype in (torch.bfloat16, torch.float16):
        cases.append(pytest.param(LARGE | {"dtype": dtype}, id=f"gpu-{dtype}", marks=pytest.mark.gpu))
    return pytest.mark.parametrize("target", cases)(test)


def check(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """Bound the error by the reference's error against exact arithmetic; nearly all elements are equal."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    bound = max(1.05 * relative_error(expected, exact), 0.02 * torch.finfo(actual.dtype).eps)
    assert relative_error(actual, exact) <= bound
    assert float((actual != expected).float().mean()) < 0.01


@where
@pytest.mark.parametrize(
    ("width", "halves", "limit"), [(3424, True, None), (200, False, 2.0), (1024, True, 2.0), (200, True, None)]
)
def test_swiglu(target: Target, width: int, halves: bool, limit: float | None) -> None:
    gate, up = (3 * draw(target["rows"], 2 * width, target=target)).chunk(2, dim=-1)
    if not halves:
        gate = gate.contiguous()
        up = up.contiguous()
    exact = swiglu_reference(gate.double(), up.double(), limit=limit)
    check(swiglu(gate, up, limit=limit), swiglu_reference(gate, up, limit=limit), exact)
    gate[0, 0] = up[0, 1] = float("nan")
    assert swiglu(gate, up, limit=limit)[0, :2].isnan().all(), "what is no number stays none"


@where
@pytest.mark.parametrize(
    ("dim", "groups", "normed"), [(64, 1, True), (72, 2, True), (80, 1, False), (80, 2, False), (128, 2, True)]
)
def test_shape_heads(target: Target, dim: int, groups: int, normed: bool) -> None:
    """Poison the rows beyond the input: in place, no kernel writes to them."""
    heads = target["heads"]
    key_heads = target["heads"] // groups
    memory = draw(target["rows"] + 1, (heads + 2 * key_heads) * dim, target=target)
    memory[-1] = float("nan")
    qkv = memory[:-1]
    weights = tuple(draw(dim, target=target, seed=seed) for seed in range(2 * normed))
    sizes = (heads, key_heads, 1e-5)
    v = qkv[:, (heads + key_heads) * dim :].clone()
    exact = shape_heads_reference(qkv.double(), *sizes, *(w.double() for w in weights))
    expected = shape_heads_reference(qkv, *sizes, *weights)
    actual = shape_heads_(qkv, *sizes, *weights)
    assert (actual.data_ptr() == qkv.data_ptr()) == (groups == 1) and memory[-1].isnan().all()
    check(actual, expected, exact)
    assert torch.equal(
        actual[:, 2 * heads * dim :], v.unflatten(-1, (key_heads, dim)).repeat_interleave(groups, 1).flatten(1)
    )


@where
@pytest.mark.parametrize(
    ("width", "inner", "rows", "biased", "limit"),
    [
        *((3420, 1280, rows, True, None) for rows in (1, 130, None)),
        pytest.param(3456, 1280, None, True, None, marks=large),
        *((width, inner, rows, True, None) for width, inner in ((72, 56), (7, 8)) for rows in (1, None)),
        *((100, 96, 130, biased, limit) for biased in (True, False) for limit in (None, 0.5)),
        *((width, inner, MANY_ROWS, True, 0.5) for width, inner in ((72, 56), (100, 96))),
    ],
)
def test_linear_swiglu(
    target: Target, width: int, inner: int, rows: int | None, biased: bool, limit: float | None
) -> None:
    if target["device"] == "cpu":
        rows = rows or target["rows"]
        width = min(width, 108)
        inner = min(inner, 136)
    x = draw(rows or target["rows"], inner, target=target)
    gate, up = (draw(width, inner, target=target, seed=seed) * inner**-0.5 for seed in range(2))
    biases = [draw(width, target=target, seed=seed) if biased else None for seed in range(2)]
    down = draw(inner, width, target=target)
    wide = (None if t is None else t.double() for t in (x, gate, up, *biases, down))
    exact, _ = linear_swiglu_reference(*wide, limit=limit)
    expected, expected_down = linear_swiglu_reference(x, gate, up, *biases, down, limit=limit)
    # Nothing may be read beyond a tensor, or left unwritten: what memory held before is poison.
    torch.full((4 * (expected.numel() + expected_down.numel()),), float("nan"), dtype=x.dtype, device=x.device)
    actual, actual_down = linear_swiglu(x, gate, up, *biases, down, limit=limit)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert relative_error(actual, exact) <= 1.05 * relative_error(expected, exact)
    assert torch.equal(actual_down, expected_down)
    assert (actual_down is down) == (width % 8 == 0)
    off = torch.cat([gate.flatten()[:1], gate.flatten()])[1:].view_as(gate)  # from two bytes off a multiple of 16
    assert torch.equal(linear_swiglu(x, off, up.t().contiguous().t(), *biases, down, limit=limit)[0], actual)


@where
@pytest.mark.parametrize(("width", "inner"), [(3420, 1280), (3424, 1280), (212, 160), (7, 9)])
def test_pad_swiglu(target: Target, width: int, inner: int) -> None:
    outer = inner
    if target["device"] == "cpu":  # some programs
        width, inner, outer = {3420: (420, 16, 24), 3424: (424, 16, 16)}.get(width, (width, min(inner, 16), inner))
    weights = [draw(width, inner, target=target, seed=seed) for seed in range(2)]
    biases = [draw(width, target=target, seed=seed) for seed in range(2)]
    down = draw(outer, width, target=target)
    strided = draw(outer, 2 * width, target=target)[:, ::2]
    for first_biases, last in ((biases, down), (biases, strided), ([None, biases[1]], down)):
        arguments = *weights, *first_biases, last
        for actual, expected in zip(pad_swiglu(*arguments), pad_swiglu_reference(*arguments), strict=True):
            assert torch.equal(actual, expected) and actual.is_contiguous()
    assert pad_swiglu(*weights, None, None, down)[1] is None


def test_reasons_against_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    cuda = torch.device("cuda", 0)
    assert "runs on cuda" in (why_not_triton(cpu, torch.bfloat16) or "")
    assert "float32" in (why_not_triton(cuda, torch.float32) or "")
    assert why_not_triton(cuda, torch.bfloat16) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "bfloat16" in (why_not_triton(cpu, torch.bfloat16) or "") and why_not_triton(cpu, torch.float16) is None
    monkeypatch.setattr("hf_vit_accel.ops.launch.triton", None)
    assert "not installed" in (why_not_triton(cuda, torch.bfloat16) or "")


@pytest.fixture
def exact_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert by torch, which saturates: the interpreter's conversion to 8 bits does not carry into the exponent."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    torch_dtypes = {tl.float16: torch.float16, tl.float32: torch.float32}

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == tl.float8e4nv:
            return torch.from_numpy(x.copy()).clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            wide = torch.from_numpy(x.copy()).view(E4M3).to(torch_dtypes[target]).numpy()
            return wide.view(f"uint{target.primitive_bitwidth}")
        return original(x, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def extremes() -> torch.Tensor:
    """Return amax (L, 3, H) in which any size stands beside any other."""
    sizes = torch.tensor([0.0, 1e-45, 1e-30, 1e-5, 1.0, 1e5, 1e16, 1e30, 3e38])
    amax_L3H = torch.stack([amax_3.view(-1, 1).expand(3, 2) for amax_3 in torch.cartesian_prod(sizes, sizes, sizes)])
    return torch.cat((amax_L3H, amax_L3H.roll(1, 1), amax_L3H.flip(0)), 2)


def test_scales_of_extremes_are_normal_numbers() -> None:
    """Put a silent head beside one of huge numbers: the scale that all scores share stays finite."""
    amax_L3H = extremes()
    scales_L3H = fit(amax_L3H)
    assert (scales_L3H >= torch.finfo(torch.float32).tiny).all() and scales_L3H.isfinite().all()
    products_LH = scales_L3H[:, 0] * scales_L3H[:, 1]
    assert (products_LH == products_LH[:, :1]).all() and (1 / products_LH).isfinite().all()
    assert ((amax_L3H * scales_L3H <= LARGEST) | (amax_L3H > 1e16)).all()


@where
@pytest.mark.parametrize(
    ("dim", "padded", "turned"),
    [
        *((72, 128, 1.0), (16, 64, 100.0), (24, 32, 0.001)),
        *(pytest.param(*sizes, marks=large) for sizes in ((64, 64, 1.0), (72, 128, 100.0), (72, 128, 0.001))),
        pytest.param(80, 128, 1.0, marks=large),
    ],
)
def test_quantize(exact_e4m3: None, target: Target, dim: int, padded: int, turned: float) -> None:
    """Compare bit for bit, scales and amax too; poisoned padding rows reach neither.

    `turned` is what a rotation multiplies numbers by, which no sample of rows tells.
    """
    rows = target["rows"]
    heads = target["heads"]
    used = rows - 2
    qkv_T3HD = draw(rows, 3, heads, dim, target=target)
    angles_TD = draw(rows, dim // 2, target=target, dtype=torch.float32).repeat(1, 2)
    qkv_T3HD *= torch.tensor([2.0**-head for head in range(heads)]).view(-1, 1).to(qkv_T3HD)
    qkv_T3HD[:, 0, -1] *= 30
    qkv_T3HD[:, 2] = qkv_T3HD[:, 2] * 0.01 + torch.linspace(-3, 3, heads * dim).view(heads, dim).to(qkv_T3HD)
    qkv_T3HD[used:] = float("nan")
    qkv_T3HD[used, ..., [0, dim // 2]] = 1e4  # which a rotation pairs
    qkv_T3HD[0, :, 0, 1] = torch.tensor([float("inf"), float("nan"), float("-inf")])
    cos_TD = angles_TD.cos() * turned
    sin_TD = angles_TD.sin() * turned
    used_1 = torch.tensor([used], dtype=torch.int32, device=target["device"])
    scaling_43H = torch.full((4, 3, heads), float("nan"), device=target["device"])
    out, mean_HD = quantize(qkv_T3HD, cos_TD, sin_TD, used_1, scaling_43H, padded)

    center_HD, expected_3H = sample_reference(qkv_T3HD, used)
    assert relative_error(mean_HD, center_HD) < 1e-6 and relative_error(scaling_43H[0], expected_3H) < 1e-6
    expected, used_now, amax = quantize_reference(qkv_T3HD, cos_TD, sin_TD, used, mean_HD, scaling_43H[0], padded)
    assert torch.equal(used_now, fit(scaling_43H[0])) == (turned < 2), "what was expected serves, or what was found"
    assert torch.equal(scaling_43H[1], amax) and torch.equal(scaling_43H[2], used_now)
    assert scaling_43H[3, 0, 0].item() == 1 / (used_now[0, 0] * used_now[1, 0]).item()
    assert torch.equal(out.float().nan_to_num(1e3), expected.float().nan_to_num(1e3))
    assert out[:, 0, 0].isnan().sum() == out[:, 0].isnan().sum() > 0
    assert not out[..., dim:].float().any()
    assert (out.float().abs().nan_to_num(0) <= LARGEST).all()

    back = dequantize(out[2], used_now[2], mean_HD, target["dtype"])
    assert torch.equal(
        back.nan_to_num(7), dequantize_reference(expected[2], used_now[2], mean_HD, target["dtype"]).nan_to_num(7)
    )
    clean = slice(1, used)
    error = relative_error(back[clean], qkv_T3HD[clean, 2])
    assert error < 0.04


@where
def test_quantize_by_fixed_scales_cuts_off(exact_e4m3: None, target: Target) -> None:
    rows = target["rows"]
    heads = target["heads"]
    dim = 72
    qkv_T3HD = draw(rows, 3, heads, dim, target=target)
    angles_TD = draw(rows, dim // 2, target=target, dtype=torch.float32).repeat(1, 2)
    scaling_43H = torch.full((4, 3, heads), 1.0, device=target["device"])
    scaling_43H[1] = 2.5
    used_1 = torch.tensor([rows], dtype=torch.int32, device=target["device"])
    tables = angles_TD.cos(), angles_TD.sin()
    out, mean_HD = quantize(qkv_T3HD, *tables, used_1, scaling_43H, 128, fixed_scales=True)
    expected, scales, amax = quantize_reference(
        qkv_T3HD, *tables, rows, mean_HD, scaling_43H[0], 128, fixed_scales=True
    )
    assert (scaling_43H[0] == 1).all() and torch.equal(scaling_43H[2], scales)
    assert torch.equal(scaling_43H[1], amax.clamp(min=2.5))
    assert torch.equal(out.float(), expected.float()) and (out.float() == LARGEST).any()


HOPPER: Target = dict(device="cpu", dtype=torch.bfloat16)


def launch_quantisation() -> None:
    qkv = draw(7, 3, 4, 72, target=HOPPER)
    used_1 = torch.tensor([7], dtype=torch.int32)
    scaling = torch.ones(4, 3, 4)
    out, center = quantize(qkv, *tables(7, 72, HOPPER), used_1, scaling, 128)
    dequantize(out[2], scaling[2, 2], center, torch.bfloat16)


def launch_product() -> None:
    gate, up = draw(2, 100, 96, target=HOPPER)
    linear_swiglu(draw(7, 96, target=HOPPER), gate, up, gate[:, 0], up[:, 0], draw(96, 100, target=HOPPER), limit=0.5)
    gate, up = draw(2, 104, 96, target=HOPPER)
    linear_swiglu(draw(MANY_ROWS, 96, target=HOPPER), gate, up, None, None, gate.T)


def launch_rotation_back() -> None:
    parts = tuple(draw(1, 4, 7, 72, target=HOPPER) for _ in range(3))
    rope_gather_back(parts, *tables(7, 72, HOPPER), draw(7, 3, 4, 72, target=HOPPER))


def launch_others() -> None:
    numbers = torch.zeros(8, 3, dtype=torch.int64)
    checksum.sum_images(numbers.int(), numbers, numbers)
    checksum.sum_weights([], numbers[:2], numbers)
    shape_heads_(draw(7, 12 * 80, target=HOPPER), 4, 4, 1e-5, draw(80, target=HOPPER), draw(80, target=HOPPER))


LAUNCHES = launch_quantisation, launch_product, launch_rotation_back, launch_others
"""Launches of kernels, or of constants of kernels, that `test_backward.py` does not compile."""


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize(
    ("launch_kernels", "capability"),
    [*((launch, 90) for launch in LAUNCHES), (launch_quantisation, 100), (launch_quantisation, 120)],
)
def test_launches_compile(launch_kernels: Callable[[], None], capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper, and those of FP8 for Blackwell."""
    compiled = compile_for_hopper(monkeypatch, capability=capability)
    launch_kernels()
    assert compiled


MEMORY = torch.zeros(64, dtype=torch.int32)
ARGUMENTS = (
    *(0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1),
    *(1.0, 0.5, None, True, MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.float(), MEMORY.half()[8:], MEMORY.bfloat16()[1:]),
)


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler")
def test_launches_tell_apart_the_arguments_that_triton_does() -> None:
    jit = importlib.import_module("triton.runtime.jit")
    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("this Triton tells arguments apart in Python")
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    blocks = ([8, 8], [8, 16], [16, 8])
    wide = [
        launch.descriptor_of(MEMORY.to(dtype).view(8, 8), block)
        for dtype, block in zip((torch.float16, torch.bfloat16, torch.float16), blocks, strict=True)
    ]
    by_kind: dict[Any, Any] = {}
    for argument in (*ARGUMENTS, *wide):
        specialisation = jit.native_specialize_impl(backend, argument, False, True, True)
        assert by_kind.setdefault(launch.kind_of(argument), specialisation) == specialisation, argument
    assert len(by_kind) > 15


@pytest.mark.skipif(triton is None, reason="needs Triton's descriptors")
def test_descriptors_are_those_that_triton_checks() -> None:
    """Make what Triton's constructor accepts; a matrix that it refuses is copied."""
    matrix = torch.rand(16, 16).half()
    for x in (matrix, matrix[1:]):
        assert launch.descriptor_of(x, [8, 8]) == launch.TensorDescriptor.from_tensor(x, [8, 8])
    for x in (matrix.flatten()[1:129].view(8, 16), matrix.t()):
        descriptor = launch.descriptor_of(x, [8, 8])
        assert descriptor == launch.TensorDescriptor.from_tensor(descriptor.base, [8, 8])
        assert torch.equal(descriptor.base, x) and descriptor.base is not x
