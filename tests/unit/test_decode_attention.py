"""The attention of a decode step: chunks of keys give what one softmax over all keys gives."""

from __future__ import annotations

import pytest
import torch
from support.interpreter import interpreted
from support.towers import alike

from hf_vit_accel.ops import decode_attention
from hf_vit_accel.ops.decode_attention import attend_in_chunks, attend_reference, why_not_in_chunks

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
def test_interpreted(shape: tuple[int, ...], processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, a few, and as many as there are; a chunk may have no visible key."""
    monkeypatch.setattr(decode_attention.machine, "multiprocessors", lambda device: processors)
    assert_exact(inputs_of(shape, torch.float16), 0.3)


def test_other_shapes_and_dtypes_are_refused() -> None:
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
def test_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_exact(inputs_of(shape, dtype, "cuda"), 0.3)
