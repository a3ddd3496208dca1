"""What runs between and inside the products of a text model: each kernel beside its reference, and whole calls."""

import copy
import random
from typing import Any

import pytest
import torch
from support.interpreter import DEVICES, interpreted
from support.towers import alike
from test_prefill import batch
from tiny import TINY
from torch._subclasses import FakeTensorMode

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.decoding import layers
from hf_vit_accel.decoding.steps import steps_of
from hf_vit_accel.decoding.text_models import read_model
from hf_vit_accel.ops import decode_attention
from hf_vit_accel.ops.decode_attention import attend_in_chunks, attend_reference, why_not_in_chunks
from hf_vit_accel.ops.mlp import is_faster_in_one_launch
from hf_vit_accel.ops.place_heads import Cache, Norms, place_heads, place_heads_reference
from hf_vit_accel.ops.token_products import (
    is_faster,
    token_products,
    token_products_reference,
    token_swiglu,
    token_swiglu_reference,
)


def dtype_on(device: str) -> torch.dtype:
    return torch.float16 if device == "cpu" else torch.bfloat16


def assert_rounded(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that a result is one of two roundings of what was computed in a wider dtype."""
    assert result.shape == expected.shape
    eps = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), expected.double(), rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "key_heads", "dim"), [(1, 4, 2, 8), (5, 7, 1, 128), (3, 3, 3, 40)])
def test_heads_are_placed(
    device: str, has_norms: bool, cached: bool, tokens: int, heads: int, key_heads: int, dim: int
) -> None:
    """Queries and keys are stock's to rounding, and nothing but the tokens' slots is written."""
    dtype = dtype_on(device)
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, n, dim, device=device, dtype=dtype) for n in (heads, key_heads, key_heads))
    cos, sin = (torch.randn(tokens, dim, device=device, dtype=dtype) for _ in range(2))
    norms: Norms | None = None
    if has_norms:
        q_weight, k_weight = torch.randn(2, dim, device=device, dtype=dtype).unbind()
        norms = q_weight, k_weight, 1e-6
    results = []
    for function in (place_heads, place_heads_reference):
        is_kernel = function is place_heads
        inputs = [x.clone() if is_kernel else x.double() for x in (query, key, value, cos, sin)]
        cache: Cache | None = None
        if cached:
            rows = torch.tensor([2, 0, 2, 1, 0], device=device)[:tokens]
            slots = torch.tensor([6, 3, 5, 0, 4], device=device)[:tokens]
            keys, values = torch.full((2, 3, key_heads, 7, dim), 5.0, device=device, dtype=inputs[0].dtype).unbind()
            cache = keys, values, rows, slots
        wide = norms if is_kernel or norms is None else (norms[0].double(), norms[1].double(), norms[2])
        results.append([*function(*inputs, wide, cache), *(() if cache is None else cache[:2])])
        if is_kernel:
            assert all(map(torch.equal, inputs[:3], (query, key, value)))
    for result, expected in zip(*results, strict=True):
        assert_rounded(result, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "width", "outputs", "has_bias"),
    [
        (1, 40, (3, 8), True),
        (1, 2051, (5,), False),
        pytest.param(1, 8196, (33, 1, 7), True, marks=[pytest.mark.matrix] * (not torch.cuda.is_available())),
        (2, 40, (5,), False),
        (19, 2051, (33, 1, 7), True),
        (32, 160, (64, 8), False),
        (33, 128, (70, 5), False),
        (131, 256, (130, 33, 8), True),
    ],
)
def test_products_of_few_tokens(device: str, tokens: int, width: int, outputs: tuple[int, ...], has_bias: bool) -> None:
    dtype = dtype_on(device)
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weights = [torch.randn(size, width, device=device, dtype=dtype) / width**0.5 for size in outputs]
    biases = [torch.randn(size, device=device, dtype=dtype) if has_bias else None for size in outputs]
    wide = [None if bias is None else bias.double() for bias in biases]
    expected = token_products_reference(x.double(), [weight.double() for weight in weights], wide)
    for result, of_reference in zip(token_products(x, weights, biases), expected, strict=True):
        assert_rounded(result, of_reference)


@pytest.mark.parametrize(
    ("tokens", "sizes", "capability", "expected"),
    [
        (1, [4096], 8, True),
        (2, [4096], 9, False),
        (32, [4096, 1024, 1024], 8, True),
        (33, [4096, 1024, 1024], 9, True),
        (33, [4096], 9, False),
        (256, [4096, 1024, 1024], 9, True),
        (257, [4096, 1024, 1024], 9, False),  # two waves
        (384, [3584, 512, 512], 9, True),
        (64, [4096, 1024, 1024], 8, False),
        (64, [4096, 1024, 1024], 10, False),
    ],
)
def test_products_take_the_kernel_where_it_was_measured_to_be_faster(
    tokens: int, sizes: list[int], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(machine, "cuda_capability", lambda index: (capability, 0))
    with FakeTensorMode():
        weights = [torch.empty(size, 4096, device="cuda:0") for size in sizes]
        narrow = [torch.empty(size, 4090, device="cuda:0") for size in sizes]
        assert is_faster(tokens, weights) == expected
        assert not is_faster(64, narrow)


@pytest.mark.parametrize(
    ("rows", "shape", "capability", "expected"),
    [
        (8192, (18944, 3584), 9, True),
        (8191, (18944, 3584), 9, False),
        (8192, (18944, 3584), 10, False),
        (8192, (18940, 3584), 9, False),
        (8192, (18944, 3580), 9, False),
    ],
)
def test_a_swiglu_of_many_rows_is_one_kernel_where_it_was_measured_to_be_faster(
    rows: int, shape: tuple[int, int], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(machine, "cuda_capability", lambda index: (capability, 0))
    with FakeTensorMode():
        assert is_faster_in_one_launch(rows, torch.empty(shape, device="cuda:0")) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "width", "outputs"), [(1, 40, 5), (1, 2100, 39), (2, 40, 5), (19, 330, 70), (32, 160, 64)]
)
def test_swiglu_of_few_tokens(device: str, tokens: int, width: int, outputs: int) -> None:
    dtype = dtype_on(device)
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    gate, up = torch.randn(2, outputs, width, device=device, dtype=dtype) / width**0.5
    result = token_swiglu(x, gate, up)
    assert_rounded(result, token_swiglu_reference(*(tensor.double() for tensor in (x, gate, up))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 7] if torch.cuda.is_available() else alike(7, 1))
@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_vl", "qwen2_5_vl"))
def test_hidden_states_are_as_exact_as_stocks(family: str, tokens: int, device: str) -> None:
    """Beside stock in fp32: the error is at most 1.1 times stock's in half precision, or a rounding."""
    exact = TINY[family].build().to(device)
    half = copy.deepcopy(exact).to(dtype_on(device))
    text = half.model.language_model
    reading = read_model(half)
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(5 if tokens > 1 or device == "cuda" else 1):
        torch.manual_seed(seed)
        embeds = torch.randn(1, tokens, 32, device=device).to(half.dtype)
        positions = torch.randint(0, 90, (3, 1, tokens), device=device)
        given = dict(attention_mask=None, position_ids=positions, use_cache=False)
        before = embeds.clone()
        with torch.no_grad():
            expected = exact.model.language_model(inputs_embeds=embeds.float(), **given).last_hidden_state
            stock = text(inputs_embeds=embeds, **given).last_hidden_state
            attend = layers.CausalAttention([tokens], embeds.device)
            ours = layers.norm(text.norm, layers.run_layers(reading, embeds, positions, attend))
        assert torch.equal(embeds, before) and ours.dtype == half.dtype
        errors += torch.tensor([float((x.double() - expected).norm() / expected.norm()) for x in (ours, stock)])
    assert errors[0] <= max(1.1 * errors[1], 5 * torch.finfo(half.dtype).eps), errors


def logits_of(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the logits (B, steps, V) of a call that decodes some tokens, and the tokens with the prompts."""
    options |= dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, output_logits=True)
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    return torch.stack(output.logits, dim=1).double(), output.sequences.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_gpu_logits_are_as_exact_as_stocks(family: str, rows: int) -> None:
    """Of every step, over ten prompts: the error is at most 1.1 times stock's, or a rounding. All take equal tokens."""
    device = "cuda"
    half = TINY[family].build().to(device, torch.bfloat16)
    exact = copy.deepcopy(half).float()
    errors = torch.zeros(2, dtype=torch.float64)
    seeds = 10
    for seed in range(seeds):
        drawn = batch(half, random.Random(seed), rows)
        inputs = {name: x.to(device, half.dtype if x.is_floating_point() else x.dtype) for name, x in drawn.items()}
        wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
        expected, tokens = logits_of(exact, wide)

        def next_token(row: int, ids: torch.Tensor, tokens: list[list[int]] = tokens) -> list[int]:
            return [tokens[row][len(ids)]]

        given = dict(prefix_allowed_tokens_fn=next_token)
        ours, our_tokens = logits_of(half, inputs, custom_generate=hf_vit_accel.graphed_decoding, **given)
        stock, stock_tokens = logits_of(half, inputs, **given)
        assert our_tokens == stock_tokens == tokens
        errors += torch.tensor([float((x - expected).norm() / expected.norm()) for x in (ours, stock)]) / seeds
    assert steps_of(half).decoded == seeds, str(steps_of(half))
    assert errors[0] <= max(1.1 * errors[1], 2**-8), errors


# --- the attention of a decode step: chunks of keys give what one softmax over all keys gives -------------------------

Inputs = tuple[torch.Tensor, ...]
SHAPES = [(1, 2, 7, 384, 64), (3, 2, 4, 256, 128), (2, 1, 17, 128, 32), (6, 1, 2, 640, 32)]
"""Samples, key heads, queries of a key head, slots, head dim."""


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Draw inputs; samples have padding on the left, other lengths, and large values where nothing may look.

    They are taken in any order, which changes nothing.
    """
    batch, key_heads, group, slots, dim = shape
    torch.manual_seed(0)
    query = torch.randn(batch, key_heads, group, dim)
    key = torch.randn(batch, key_heads, slots, dim)
    value = torch.randn(batch, key_heads, slots, dim)
    mask = torch.zeros(batch, 1, 1, slots)
    ends = torch.zeros(batch, 2, dtype=torch.int32)
    for sample in range(batch):
        length = slots - 1 - 67 * sample % (slots // 2)
        first = 61 * sample % length
        mask[sample, ..., :first] = float("-inf")
        mask[sample, ..., first + 9 : first + 12] = float("-inf")  # as of padding on the right of a prompt
        mask[sample, ..., length:] = float("-inf")
        key[sample, :, length:] = 100.0
        value[sample, :, length:] = 100.0
        key[sample, :, : max(0, first - 64)] = float("nan")
        value[sample, :, length + 64 :] = float("nan")
        ends[sample] = torch.tensor([first, length])
    query, key, value, mask = (tensor.to(device, dtype) for tensor in (query, key, value, mask))
    return query, key, value, mask, ends.to(device), torch.randperm(batch, dtype=torch.int32).to(device)


def on_one_axis(inputs: Inputs) -> Inputs:
    """Lay the samples out one after the other, each from its first visible slot on, with blocks of 64 of its own."""
    query, key, value, mask, ends, order = inputs
    parts: list[list[torch.Tensor]] = [[], [], []]
    begin = 0
    new_ends = torch.zeros_like(ends)
    for sample, (first, end) in enumerate(ends.tolist()):
        size = -(-(end - first) // 64) * 64
        hidden = mask.new_full((1, 1, 1, size - (end - first)), float("-inf"))
        spare = key.new_full((1, key.shape[1], hidden.shape[-1], key.shape[-1]), 100.0)
        parts[0].append(torch.cat([key[sample : sample + 1, :, first:end], spare], dim=2))
        parts[1].append(torch.cat([value[sample : sample + 1, :, first:end], spare], dim=2))
        parts[2].append(torch.cat([mask[sample : sample + 1, :, :, first:end], hidden], dim=3))
        new_ends[sample] = torch.tensor([begin, begin + end - first])
        begin += size
    key, value = (torch.cat(of_samples, dim=2) for of_samples in parts[:2])
    return query, key, value, torch.cat(parts[2], dim=3), new_ends, order


def assert_exact(inputs: Inputs, scale: float) -> None:
    """Check that the error is that of rounding the weights and the output, in rows and on one axis."""
    query, key, value, mask = (tensor.double().nan_to_num(0.0, neginf=-torch.inf) for tensor in inputs[:4])
    expected = ((scale * (query @ key.mT) + mask).softmax(-1) @ value).float()
    longest = key.shape[2]
    for tensors in (inputs, on_one_axis(inputs)):
        assert why_not_in_chunks(*tensors[:4]) is None
        result = attend_in_chunks(*tensors, scale, longest)
        assert result.shape == expected.shape and result.dtype == inputs[0].dtype
        bound = 3 * torch.finfo(result.dtype).eps
        assert float((result.float() - expected).norm() / expected.norm()) < bound
        plain = attend_reference(*(x.nan_to_num(0.0, neginf=-torch.inf) for x in tensors), scale, longest)
        assert float((plain.float() - expected).norm() / expected.norm()) < bound


@interpreted
@pytest.mark.parametrize("processors", [1, *alike(40, 2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_step_interpreted(
    shape: tuple[int, ...], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk, a few, and as many as there are; a chunk may have no visible key."""
    monkeypatch.setattr(decode_attention.machine, "multiprocessors", lambda device: processors)
    assert_exact(inputs_of(shape, torch.float16), 0.3)


def test_attention_of_other_shapes_and_dtypes_is_refused() -> None:
    query, key, value, mask, *_ = inputs_of(SHAPES[0], torch.float16)
    shape = "the kernel has no such shape"
    assert why_not_in_chunks(query[..., :48], key[..., :48], value[..., :48], mask) == shape
    assert why_not_in_chunks(query, key[:, :, :100], value[:, :, :100], mask[..., :100]) == shape
    assert why_not_in_chunks(query, key, value, mask.float()) == "the dtypes differ"
    assert why_not_in_chunks(*(tensor.float() for tensor in (query, key, value, mask))) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (1, 4, 7, 1280, 128), (32, 8, 4, 1280, 128), (1, 4, 7, 10240, 128), (64, 4, 7, 5120, 128)]
)
def test_gpu_attention_of_a_step(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_exact(inputs_of(shape, dtype, "cuda"), 0.3)
