"""Equal images encoded once: fingerprints, multisets of items, gradients, features kept for later calls, stale ones."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import INTERPRETED, SMALL, alike
from support.graphs import patch
from support.kernels import compile_for_hopper
from test_fuzz import FUZZ, Inputs, check, inputs, twin_of
from test_guard import entered
from tiny import TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, FlexConfig, ReuseConfig
from hf_vit_accel.config import Settings
from hf_vit_accel.families import FAMILIES, family_of
from hf_vit_accel.machine import KERNELS, LRU, guarded
from hf_vit_accel.ops.launch import triton
from hf_vit_accel.sharing import fingerprint
from hf_vit_accel.sharing import reuse as reuse_module
from hf_vit_accel.sharing.reuse import Memory, _HandOut
from hf_vit_accel.status import beyond_attention
from hf_vit_accel.tower import forward as tower_module
from hf_vit_accel.tower.state import TowerState, state_of

ACROSS = ReuseConfig(across_calls=True)
Item = tuple[torch.Tensor, tuple[int, int, int]]

# --- fingerprints -----------------------------------------------------------------------------------------------------


def prints(pixels_TP: torch.Tensor, grid: list[Any], keys: torch.Tensor, hashes: Any = None) -> list[Any]:
    """(grid row, low, high) of each item."""
    out = torch.zeros(2 + 5 * len(grid), dtype=torch.int64, device=pixels_TP.device)
    grid_N3 = torch.tensor(grid, device=pixels_TP.device)
    (hashes or fingerprint.hash_items_reference)(pixels_TP, grid_N3, keys, out)
    assert out[2:].view(-1, 5)[:, :3].tolist() == list(map(list, grid)) and not out[:2].any()
    return [tuple(row) for row in out[2:].view(-1, 5)[:, 3:].tolist()]


def keys_for(pixels_TP: torch.Tensor) -> torch.Tensor:
    return fingerprint.draw_keys(pixels_TP.device)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 by Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        one, two = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = two >> 32 ^ c1 ^ k0, two % 2**32, one >> 32 ^ c3 ^ k1, one % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def chunk_by_integers(words: list[int], place: int, keys: torch.Tensor, steps: int) -> list[int]:
    """128 bits of a chunk, as the docstring of `hash_chunks_reference` has it, by Python's integers."""
    words = [word % 2**32 for word in words] + [0] * (256 * steps - len(words))
    narrow = [key % 2**32 for key in keys[:1024].view(torch.int32).tolist()]
    *wide, seed = [key % 2**64 for key in keys[1024:].tolist()]
    low = high = 0
    for strand in range(32):
        counter = []
        for lane in range(4):
            total = 0
            for step in range(steps):
                for one in range(4):
                    x = words[256 * step + 4 * strand + one] + narrow[32 * step + 4 * lane + one]
                    y = words[256 * step + 128 + 4 * strand + one] + narrow[32 * step + 16 + 4 * lane + one]
                    total = (total + x % 2**32 * (y % 2**32)) % 2**64
            factors = wide[4 * lane : 4 * lane + 4]
            total = total % 2**32 * factors[0] + (total >> 32) * factors[1] + (32 * place + strand) * factors[2]
            counter.append((total + factors[3]) % 2**64 >> 32)
        c0, c1, c2, c3 = philox(counter, [seed % 2**32, seed >> 32])
        low, high = low + c0 + (c1 << 32), high + c2 + (c3 << 32)
    return [half % 2**64 - 2**64 * (half >> 63 & 1) for half in (low, high)]


def test_philox_is_that_of_the_paper() -> None:
    """Random123's known answers for counters and keys of zeros, and of ones."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([2**32 - 1] * 4, [2**32 - 1] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_chunks_are_hashed_as_the_formula_says() -> None:
    """For words and keys at the ends of their ranges, too."""
    keys = fingerprint.draw_keys(torch.device("cpu"))
    keys[::3], keys[1::7] = -1, 0
    ends = torch.tensor([0, -1, 2**31 - 1, -(2**31), 7], dtype=torch.int32)
    chunks = ends[torch.randint(5, (2, 512), generator=torch.Generator().manual_seed(0))]
    place = torch.tensor([2**27 - 1, 3])
    found = fingerprint.hash_chunks_reference([chunks], place, keys).tolist()
    assert found == [chunk_by_integers(*pair, keys, 2) for pair in zip(chunks.tolist(), place.tolist(), strict=True)]


def test_items_are_cut_into_chunks() -> None:
    """An item's fingerprint is the sum of its chunks', the last filled up with zeros, wherever the item begins."""
    words = torch.randint(-(2**31), 2**31, (24, 301), generator=torch.Generator().manual_seed(0)).int()
    keys = keys_for(words)
    *_, (low, high) = prints(words, [(1, 2, 4), (1, 4, 4)], keys)
    item, size = words[8:].flatten().tolist(), fingerprint.ITEM_CHUNK
    chunks = [chunk_by_integers(item[size * at : size * at + size], at, keys, 16) for at in range(2)]
    assert size < len(item) < 2 * size
    assert [(sum(halves) - half) % 2**64 for *halves, half in zip(*chunks, (low, high), strict=True)] == [0, 0]


BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@given(data=st.data())
@settings(FUZZ, max_examples=40)
def test_any_bit_anywhere_makes_another_item(data: Any) -> None:
    dtype = data.draw(st.sampled_from(list(BITS)))
    width, rows = data.draw(st.integers(1, 9) | st.sampled_from([64, 301])), 16
    pixels = data.draw(st.sampled_from([torch.zeros, torch.ones, torch.randn]))(rows, width).to(dtype)
    bits = pixels.view(BITS[dtype]).clone()
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    bits[row, column] ^= 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    if data.draw(st.booleans()):  # the sign: -0.0 and 0.0
        bits = pixels.view(BITS[dtype]).clone()
        bits[row, column] ^= torch.iinfo(BITS[dtype]).min
    other, keys = bits.view(dtype), keys_for(pixels)
    one, two = prints(torch.cat([pixels, other]), [(1, 4, 4)] * 2, keys)
    assert one != two and one[0] != two[0] and one[1] != two[1]
    assert prints(pixels, [(1, 4, 4)], keys) == [one] and prints(other, [(1, 4, 4)], keys) == [two]


@given(data=st.data())
@settings(FUZZ, max_examples=40)
def test_order_counts(data: Any) -> None:
    pixels = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    order = data.draw(st.permutations(range(8)))
    columns = data.draw(st.permutations(range(6)))
    other = pixels[order][:, columns]
    one, two = prints(torch.cat([pixels, other]), [(1, 2, 4)] * 2, keys_for(pixels))
    assert (one == two) == torch.equal(pixels, other)


def test_fingerprints_of_many_items_are_evenly_spread() -> None:
    """Items that differ in one small number: all different, in every byte of the fingerprint as in random numbers."""
    pixels = torch.arange(2560, dtype=torch.int32)[:, None].repeat(1, 3).view(torch.float32)
    found = prints(pixels, [(1, 1, 1)] * 2560, keys_for(pixels))
    assert len(set(found)) == 2560 and len({low for low, _ in found}) == len({high for _, high in found}) == 2560
    bytes_NB = torch.tensor(found).view(torch.uint8)
    for column in bytes_NB.T:
        counts = torch.bincount(column.long(), minlength=256).float()
        assert 120 < float(((counts - 10) ** 2 / 10).sum()) < 420  # chi-square, 255 degrees: 6 to 7 sigma wide


def test_an_item_is_the_same_wherever_and_however_it_lies() -> None:
    pixels = torch.randn(24, 10).half()
    keys = keys_for(pixels)
    [expected] = prints(pixels, [(1, 4, 6)], keys)
    ways = [
        pixels.t().contiguous().t(),
        pixels.repeat_interleave(2, 0)[::2],
        pixels.repeat_interleave(2, 1)[:, ::2],
        torch.cat([pixels.new_zeros(1), pixels.flatten()])[1:].view_as(pixels),
        pixels.clone().requires_grad_(),
    ]
    for way in ways:
        assert prints(way, [(1, 4, 6)], keys) == [expected]
    around = torch.cat([torch.randn(4, 10).half(), pixels, torch.randn(8, 10).half()])
    assert prints(around, [(1, 2, 2), (1, 4, 6), (2, 2, 2)], keys)[1] == expected
    assert prints(pixels, [(0, 2, 2), (1, 4, 6), (0, 0, 0)], keys)[1] == expected
    with torch.inference_mode():
        assert prints(pixels, [(1, 4, 6)], keys) == [expected]
    state = torch.get_rng_state()
    assert prints(pixels, [(1, 4, 6)], keys_for(pixels)) != [expected], "keys are drawn anew"
    assert torch.equal(torch.get_rng_state(), state), "and not by torch"


def test_odd_rows_are_filled_up() -> None:
    pixels = torch.randn(4, 5).half()
    words = fingerprint.words_of(pixels)
    assert words.shape == (4, 3) and torch.equal(words.view(torch.float16)[:, :5], pixels)
    assert not words.view(torch.int16)[:, 5].any()
    assert fingerprint.words_of(torch.zeros(4, 3, dtype=torch.bool)).shape == (4, 1)


WHERE = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu", id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")
        ),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ],
)
GRID = [(1, 2, 2), (2, 2, 4), (0, 2, 2), (1, 2, 2), (1, 4, 4)]


@WHERE
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 300), (torch.float16, 301), (torch.bfloat16, 6)], ids=str)
def test_items_by_the_kernel(device: str, dtype: torch.dtype, width: int) -> None:
    """Rows of whole and of parts of 16 bytes, items of one chunk and of two, more than are looked up at a time."""
    for grid in (GRID * (40 if device == "cuda" else 1), [(0, 2, 2)] * 65 + [(1, 1, 1)]):
        if device == "cpu" and (len(grid) > 65) != (width < 300):
            continue  # the interpreter takes its time
        rows = sum(t * h * w for t, h, w in grid)
        pixels = torch.randn(rows, width).to(dtype).to(device)
        keys = keys_for(pixels)
        assert prints(pixels, grid, keys, fingerprint.hash_items) == prints(pixels, grid, keys)


@WHERE
@pytest.mark.parametrize(
    "grid", [[(1, 2, 2)], [(-3, 2, 7), (2**40, 2**40, 3), (1, 2, 2)], [(5, 100, 100)] * 2, [(2**62, 3, 1)] * 3], ids=str
)
def test_grids_that_do_not_fit_do_no_harm(device: str, grid: Any) -> None:
    """They are refused once they are read: whatever they hold, nothing else is written."""
    words = torch.ones(8, 300, dtype=torch.int32, device=device)
    for hashes in (fingerprint.hash_items, fingerprint.hash_items_reference):
        out = torch.zeros(2 + 5 * len(grid) + 4, dtype=torch.int64, device=device)
        hashes(words, torch.tensor(grid, device=device), keys_for(words), out)
        assert not out[-4:].any() and out[:5].tolist() == [0, 0, *grid[0]]


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize(
    ("kernel", "arguments", "unroll"),
    [
        ("_items_kernel", "address:i64 grid:*i64 keys:*i64 out:*i64 rows:i32 items:i32 width:i32", 4),
        ("_memory_kernel", "addresses:*i64 counts:*i64 keys:*i64 out:*i64", 2),
    ],
)
def test_kernels_wait_for_nothing_but_memory(kernel: str, arguments: str, unroll: int) -> None:
    """Compiled for a GPU, no warp waits for another, none has memory of its own, and words come 16 bytes at a time."""
    assembly = compile_for_hopper("sharing.fingerprint", kernel, arguments, {}, dict(num_warps=1)).asm["ptx"]
    assert not any(what in assembly for what in ("bar.sync", ".local", "st.shared"))
    wide = [line for line in assembly.splitlines() if "ld.global" in line and ".v4." in line]
    assert sum("@" in line for line in wide) == 2 * unroll, "words of all steps of a turn, where there are as many"
    assert sum("@" not in line for line in wide) >= 8 * unroll, "keys, too, though nothing is known of where they lie"


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler")
def test_no_argument_decides_how_a_kernel_is_compiled() -> None:
    """A later call's may be other numbers, and lie elsewhere: the first one's kernel serves them."""
    kernels = fingerprint._items_kernel, fingerprint._memory_kernel
    assert [len(kernel.params) for kernel in kernels] == [7, 4]
    assert not any(kernel._specializes or any(each.is_constexpr for each in kernel.params) for kernel in kernels)


def test_zeros_are_handed_out_once() -> None:
    """To any number of threads, in any mode, few and many at a time."""
    with torch.inference_mode():
        desk = fingerprint.Desk(torch.device("cpu"))
        taken = [desk.zeros(3)]
    with ThreadPoolExecutor(4) as threads:
        taken += threads.map(desk.zeros, [2, 162, 163, 1000] * 200)
    for count, each in zip([3, *[2, 162, 163, 1000] * 200], taken, strict=True):
        assert each.shape == (count,) and each.dtype == torch.int64 and not each.any()
        each.fill_(-1)


@WHERE
@pytest.mark.parametrize("by", [1, 2, 3, 4])
def test_words_may_lie_anywhere(device: str, by: int) -> None:
    """Where 16 bytes cannot be loaded at once, and where they can."""
    flat = torch.randint(-(2**31), 2**31, (4100,), generator=torch.Generator().manual_seed(0)).int().to(device)
    rows = flat[by : by + 4096].view(16, 256)
    keys, grid = keys_for(flat), [(1, 2, 2), (1, 2, 6)]
    assert prints(rows, grid, keys, fingerprint.hash_items) == prints(rows, grid, keys)


@WHERE
def test_memory_by_the_kernel(device: str) -> None:
    shapes = [(129, 130), (3000,), (2,), (0,), (4, 1, 2)] * (20 if device == "cuda" else 1)
    tensors = [torch.randn(shape).to(device, (torch.float32, torch.bfloat16)[i % 2]) for i, shape in enumerate(shapes)]
    memory = Memory(tensors, SimpleNamespace(count=len(tensors)), SimpleNamespace(loose=lambda: False), None)
    keys = fingerprint.draw_keys(torch.device(device))
    found = []
    for hashes in (fingerprint.hash_memory, fingerprint.hash_memory_reference):
        out = torch.zeros(2, dtype=torch.int64, device=device)
        hashes(tensors, memory.tables, keys, out)
        found.append(out.tolist())
    assert found[0] == found[1] != [0, 0]


# --- within a call ----------------------------------------------------------------------------------------------------


windows_and_deepstack = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"], indirect=True)


@pytest.fixture(scope="module", params=alike("qwen2_5_vl", "qwen3_vl"))
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def tower(family: str) -> Any:
    """Frozen, as features are kept of no other."""
    return tower_of(TINY[family].build()).requires_grad_(False)


def item(tower: Any, entry: tuple[int, int, int] = (1, 4, 6), seed: int = 0) -> Item:
    return pixels_for(tower, [entry], seed), entry


def call(tower: Any, items: list[Item], **kwargs: Any) -> list[torch.Tensor]:
    """The outputs of a call."""
    pixels, grid = torch.cat([pixels for pixels, _ in items]), torch.tensor([entry for _, entry in items])
    return outputs_of(tower(pixels, grid_thw=grid, **kwargs))


def alone(tower: Any, items: list[Item]) -> list[torch.Tensor]:
    """What the distinct items give without reuse, in the order of their first appearance, handed out by loops."""

    def key(each: Item) -> Any:
        return each[1], each[0].numpy().tobytes()

    distinct = {key(each): each for each in reversed(items)}
    order = list(dict.fromkeys(map(key, items)))
    with hf_vit_accel.patched(tower), torch.no_grad():
        found = call(tower, [distinct[each] for each in order])
    rows = sum(len(distinct[each][0]) for each in order)
    parts = [
        dict(zip(order, x.split([len(distinct[e][0]) * len(x) // rows for e in order]), strict=True)) for x in found
    ]
    return [torch.cat([part[key(each)] for each in items]) for part in parts]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return len(found) == len(expected) and all(
        f.shape == e.shape and f.dtype == e.dtype and f.detach().numpy().tobytes() == e.numpy().tobytes()
        for f, e in zip(found, expected, strict=True)
    )


def counts(tower: Any) -> tuple[int, int, int]:
    """Items that were looked through, encoded, taken from memory."""
    found = hf_vit_accel.status(tower).towers[0].reuse
    return found.items, found.encoded, found.hits


SPOILED: list[Callable[[torch.Tensor], None]] = [
    lambda x: x[-1, -1].mul_(1.0001),
    lambda x: x[0, 0].fill_(-0.0),
    lambda x: x[0, 0].fill_(0.0),
    lambda x: x[1, 3].fill_(float("nan")),
    lambda x: x[1, 3].copy_(torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)),
    lambda x: x.copy_(x.flip(0)),
]


@st.composite
def multisets(draw: Any) -> list[tuple[tuple[int, int, int], int, int | None]]:
    """Items: entry, seed of their pixels, and how they differ from others of that seed; in any order."""
    entries = st.sampled_from([(1, 4, 6), (1, 6, 4), (1, 2, 12), (3, 2, 4), (1, 2, 2), (1, 8, 8)])
    kinds = draw(st.lists(st.tuples(entries, st.integers(0, 1), st.none() | st.integers(0, 5)), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))  # type: ignore[no-any-return]


@windows_and_deepstack
def test_multisets_are_as_their_distinct_items_alone(tower: Any) -> None:
    """Near-copies, equal pixels under other grids, NaN and both zeros; later calls, too."""
    twins = {config: twin_of(tower, reuse=config, strict=True) for config in (True, ACROSS)}
    seen = [0, 0]

    @given(chosen=multisets())
    @settings(FUZZ, max_examples=15)
    def tried(chosen: Any) -> None:
        items = []
        for entry, seed, how in chosen:
            pixels = pixels_for(tower, [(1, 8, 8)], seed)[: entry[0] * entry[1] * entry[2]].clone()
            if how is not None:
                SPOILED[how](pixels)
            items.append((pixels, entry))
        expected = alone(tower, items)
        distinct = len({(entry, pixels.numpy().tobytes()) for pixels, entry in items})
        within, across = twins.values()
        before = counts(within)
        with torch.no_grad():
            assert same(call(within, items), expected)
            for found, wanted in zip(call(across, items), expected, strict=True):  # encoded beside others, maybe
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)
        if len({entry for _, entry in items}) == len(items):
            return  # nothing to look for
        now = counts(within)
        assert (now[0] - before[0], now[1] - before[1]) == (len(items), distinct)
        seen[0] += len(items) > distinct
        seen[1] += 1

    tried()
    assert seen[0] > 4, seen
    items, encoded, hits = counts(twins[ACROSS])
    assert 0 < hits < items and encoded < items


def test_order_is_that_of_the_call(tower: Any) -> None:
    a, b, c = item(tower), item(tower, (2, 6, 4), 1), item(tower, (1, 14, 10), 2)
    expected = {id(each): [x.clone() for x in alone(tower, [each])] for each in (a, b, c)}
    hf_vit_accel.patch(tower, reuse=True, strict=True)
    for items in ([a, b, a, c, b, a], [c, c], [b, a, a, b]):
        with torch.no_grad():
            found = call(tower, items)
        assert_close(found, [torch.cat(parts) for parts in zip(*(expected[id(each)] for each in items), strict=True)])
    assert counts(tower) == (12, 6, 0)


def test_calls_without_copies_are_served_as_they_are(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very tensors; nothing is hashed where a grid on the host, or a single item, shows that there is no copy."""
    made: list[Any] = []
    drawn: list[int] = []
    encode, draw_keys = tower_module.encode, fingerprint.draw_keys
    monkeypatch.setattr(tower_module, "encode", lambda *args: made.append((args[1], encode(*args))) or made[-1][1])
    monkeypatch.setattr(fingerprint, "draw_keys", lambda *args: drawn.append(1) or draw_keys(*args))
    hf_vit_accel.patch(tower, reuse=True, strict=True)
    for grid, looked in (([(1, 4, 6)], 0), ([(1, 4, 6), (1, 6, 4)], 0), ([(1, 4, 6), (1, 4, 6)], 1)):
        pixels = pixels_for(tower, grid)
        with torch.no_grad():
            output = tower(pixels, grid_thw=torch.tensor(grid))
        assert made[-1][0].data_ptr() == pixels.data_ptr()
        assert all(x is y for x, y in zip(outputs_of(output), made[-1][1], strict=True))
        assert len(drawn) == looked


def test_without_reuse_none_of_it_is_entered(tower: Any) -> None:
    hf_vit_accel.patch(tower)
    run_tower(tower, [(1, 4, 6)] * 2)
    found = {file for file, _, _ in entered(lambda: run_tower(tower, [(1, 4, 6)] * 2))}
    assert not {file for file in found if "reuse" in file or "fingerprint" in file}


def test_the_host_waits_once(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is read from the device is read in one piece; a grid on the host is no part of it."""
    read: list[int] = []
    tolist = torch.Tensor.tolist
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.numel()) or tolist(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("a wait of its own"))
    with torch.no_grad():
        call(tower, [item(tower), item(tower, seed=1), item(tower)])
    assert read == [9, 17]


@pytest.mark.parametrize("config", [True, ACROSS], ids=["within", "across"])
def test_the_host_works_while_kernels_run(tower: Any, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """What needs no result is done after the launches and before the wait, once."""
    order: list[str] = []

    def told(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: order.append(name) or function(*args, **kwargs)

    by_torch = zip(("items", "weights"), reuse_module._BY_TORCH, strict=True)
    monkeypatch.setattr(reuse_module, "_BY_TORCH", tuple(told(*each) for each in by_torch))
    monkeypatch.setattr(reuse_module.guard, "reasons_slow", told("slow", reuse_module.guard.reasons_slow))
    monkeypatch.setattr(Memory, "fits", told("fits", Memory.fits))
    hf_vit_accel.patch(tower, reuse=config, strict=True)
    monkeypatch.setattr(torch.Tensor, "tolist", told("wait", torch.Tensor.tolist))
    expected = ["items", "slow"] if config is True else ["weights", "items", "slow", "fits"]
    for _ in range(2):
        order.clear()
        with torch.no_grad():
            call(tower, [item(tower), item(tower, seed=1)])
        assert order == ["wait", *expected, "wait"], "the first is for a grid on the host"


def test_entries_without_frames_are_no_items(tower: Any) -> None:
    pixels, entry = item(tower)
    grid = torch.tensor([(0, 2, 2), entry, (0, 0, 0), entry, (0, 4, 4)])
    expected = alone(tower, [(pixels, entry)] * 2)
    for config in (True, ACROSS):
        hf_vit_accel.patch(tower, reuse=config, strict=True)
        with torch.no_grad():
            assert same(outputs_of(tower(torch.cat([pixels, pixels]), grid_thw=grid)), expected)
        assert counts(tower) == (2, 1, 0)


@pytest.mark.parametrize("config", [True, ACROSS], ids=["within", "across"])
def test_any_input_is_served_or_refused_as_without(tower: Any, config: Any) -> None:
    patched, seen = twin_of(tower, reuse=config), []

    @given(given_=inputs(96))
    @settings(FUZZ, max_examples=15)
    def tried(given_: Inputs) -> None:
        seen.append(check(tower, patched, given_))

    tried()
    assert {"served", "refused"} <= set(seen)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(tower: Any, items: list[Item], *, pixels: bool = False) -> list[torch.Tensor]:
    """Of every parameter (and of the pixels), each copy's features with gradients of their own."""
    tower.zero_grad()
    leaves = torch.cat([each for each, _ in items]).requires_grad_(pixels)
    outputs = outputs_of(tower(leaves, grid_thw=torch.tensor([entry for _, entry in items])))
    generator = torch.Generator().manual_seed(3)
    sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs).backward()
    found = [parameter.grad.clone() for parameter in tower.parameters() if parameter.grad is not None]
    return [*found, leaves.grad] if pixels else found


@pytest.mark.parametrize("pixels", [False, True], ids=["", "pixels"])
@windows_and_deepstack
def test_gradients_are_those_of_stock(tower: Any, pixels: bool) -> None:
    tower = tower.double().requires_grad_()
    a, b, c = (item(tower, entry, seed) for seed, entry in enumerate([(1, 4, 6), (2, 4, 4), (1, 4, 6)]))
    items = [(each.double(), entry) for each, entry in (a, b, a, c, a, b)]
    stock = gradients(tower, items, pixels=pixels)
    with hf_vit_accel.patched(tower):
        expected = gradients(tower, items, pixels=pixels)
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    found = gradients(tower, items, pixels=pixels)
    assert_close(found, stock, 1e-6)  # the rotation is in fp32, in stock as in ours
    assert_close(found, expected, 1e-6)
    assert counts(tower) == ((0, 0, 0) if pixels else (6, 3, 0)), "copies of pixels have gradients of their own"


def test_a_part_that_is_trained_gets_its_gradient(tower: Any) -> None:
    trained = next(tower.merger.parameters()).requires_grad_()
    items = [item(tower), item(tower, seed=1), item(tower)]
    expected = gradients(tower, items)
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    assert_close(gradients(tower, items), expected, 1e-4)
    assert trained.grad is not None and counts(tower) == (3, 2, 0)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([2, 3, 4], [1, 0, 1, 2, 1, 2, 1, 1]),
        ([3, 3, 3], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]),
        ([3, 3, 3], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]),
        ([3, 3, 3], [0, 1, 2, 2, 1, 0]),
        ([3, 3, 3], [0, 1, 2, 0]),
        ([4, 2, 3], [0, 1, 2, 0, 1, 2]),
        ([9], [0, 0, 0, 0, 0]),
    ],
)
def test_gradients_of_copies_are_rounded_once(sizes: list[int], order: list[int]) -> None:
    """What copies add up to is the sum in fp32, whatever their number and order."""
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    out = _HandOut.apply(rows, sizes, order)
    pieces = rows.split(sizes)
    assert torch.equal(out, torch.cat([pieces[index] for index in order]))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    exact = rows.detach().float().requires_grad_()
    torch.cat([exact.split(sizes)[index] for index in order]).backward(grad.float())
    assert torch.equal(rows.grad, exact.grad.bfloat16())
    exact = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _HandOut.apply(x, sizes, order), exact)


def test_training_goes_on_as_without(tower: Any) -> None:
    """Three steps of an optimiser, each on copies."""
    items = [item(tower), item(tower, seed=1), item(tower), item(tower)]
    ends = []
    for config in (False, ACROSS):
        twin = copy.deepcopy(tower).double().requires_grad_()
        hf_vit_accel.patch(twin, reuse=config)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
        for _ in range(3):
            gradients(twin, [(pixels.double(), entry) for pixels, entry in items])
            optimizer.step()
        ends.append([parameter.detach() for parameter in twin.parameters()])
    assert_close(ends[1], ends[0], 1e-5)  # gradients of the rotation are rounded to fp32


# --- across calls -----------------------------------------------------------------------------------------------------


def test_known_items_come_from_memory_and_the_others_are_encoded_together(
    tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    encode = tower_module.encode
    monkeypatch.setattr(tower_module, "encode", lambda *a: served.append(a[0].metadata.grid) or encode(*a))
    a, b, c, d = (item(tower, entry, seed) for seed, entry in enumerate([(1, 4, 6), (2, 4, 4), (1, 8, 8), (1, 4, 6)]))
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    for items, encoded in (
        ([a, b], (a[1], b[1])),
        ([b, a], None),
        ([c, a, c, d, b], (c[1], d[1])),
        ([a], None),
        ([d, d, c], None),
    ):
        served.clear()
        with torch.no_grad():
            found = call(tower, items)
        assert served == ([] if encoded is None else [encoded])
        assert_close(found, alone(copy.deepcopy(tower), items))
    assert counts(tower) == (13, 4, 8)
    told = hf_vit_accel.status(tower).towers[0].reuse
    assert told.held == 4 and told.nbytes == sum(x.nbytes for x in alone(copy.deepcopy(tower), [a, b, c, d]))
    assert "13 items: 4 encoded, 1 copies, 8 from earlier calls; 4 held" in str(hf_vit_accel.status(tower))


def test_what_is_handed_out_may_be_written_to(tower: Any) -> None:
    items = [item(tower), item(tower, seed=1)]
    expected = alone(tower, items)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        for each in (items, items, items[:1], items):
            for output in call(tower, each):
                output.fill_(float("nan"))
        assert_close(call(tower, items), expected)


def test_features_of_inference_mode_serve_gradients_later(tower: Any) -> None:
    items = [item(tower), item(tower, seed=1)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.inference_mode():
        expected = call(tower, items)
        assert all(x.is_inference() for x in expected)
    found = call(tower, items)  # gradients are recorded, the tower is frozen
    assert counts(tower) == (4, 2, 2) and not any(x.is_inference() or x.requires_grad for x in found)
    head = nn.Linear(found[1].shape[1], 3)
    head(found[1]).sum().backward()
    assert_close([head.weight.grad], [expected[1].sum(0).expand(3, -1)])


def test_the_least_recently_used_go(tower: Any) -> None:
    items = [item(tower, seed=seed) for seed in range(4)]
    hf_vit_accel.patch(tower)
    with torch.no_grad():
        each = sum(x.nbytes for x in call(tower, items[:1]))
        hf_vit_accel.patch(tower, reuse=ReuseConfig(across_calls=True, gigabytes=2.5 * each / 1e9))
        a, b, c, large = ([one] for one in (*items[:3], item(tower, (3, 14, 10))))
        for now, hits in ((a, 0), (b, 0), (a, 1), (c, 1), (a, 2), (b, 2), (large, 2), (a, 3), (large, 3), (b, 4)):
            call(tower, now)
            told = hf_vit_accel.status(tower).towers[0].reuse
            assert told.hits == hits and told.nbytes <= 2.5 * each and told.nbytes == told.held * each


@pytest.mark.parametrize("name", ["cuda.matmul", "cudnn.conv", "mkldnn.matmul"])
def test_precisions_are_told_apart_however_they_are_set(name: str, tower: Any) -> None:
    """By torch's newer settings, which its older ones refuse to read."""
    owner, precision = name.split(".")
    setting = getattr(getattr(torch.backends, owner), precision)
    tower.requires_grad_(False)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    call(tower, [item(tower)])
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "ieee" if before == "tf32" else "tf32"
        for _ in range(2):
            call(tower, [item(tower)])
    finally:
        setting.fp32_precision = before
    assert counts(tower) == (3, 2, 1)


def test_dtypes_and_grids_are_told_apart(tower: Any) -> None:
    pixels, entry = item(tower)
    pixels = pixels.half().float()
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        for given_ in (pixels, pixels.half(), pixels.double()):
            tower(given_, grid_thw=torch.tensor([entry]))
        tower(pixels.half().view(torch.bfloat16), grid_thw=torch.tensor([entry]))  # the same bits
        for grid in ((1, 6, 4), (2, 6, 2)):
            tower(pixels, grid_thw=torch.tensor([grid]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tower(pixels, grid_thw=torch.tensor([entry]))
        torch.use_deterministic_algorithms(True)
        try:
            tower(pixels, grid_thw=torch.tensor([entry]))
        finally:
            torch.use_deterministic_algorithms(False)
        assert counts(tower) == (8, 8, 0)
        tower(pixels, grid_thw=torch.tensor([entry]))
    assert counts(tower) == (9, 8, 1)


# --- weights that change ----------------------------------------------------------------------------------------------


def _weight(tower: Any) -> Any:
    return tower.blocks[1].attn.proj.weight


def _step(make: Any) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        weight = _weight(tower).requires_grad_()
        weight.grad = torch.randn_like(weight)
        make([weight]).step()
        weight.requires_grad_(False).grad = None

    return change


def _flat(tower: Any) -> None:
    """As ZeRO has it: a buffer that parameters are views of, and that is written."""
    parameters = list(tower.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    nn.utils.vector_to_parameters(flat, parameters)
    flat[len(flat) // 2].add_(0.5)


def _merge(tower: Any) -> None:
    """As PEFT merges an adapter: through `.data`, which no version counter sees."""
    before = _weight(tower)._version
    _weight(tower).data += 0.1 * torch.randn_like(_weight(tower))
    assert _weight(tower)._version == before


def _loaded(**kwargs: Any) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        tower.load_state_dict({name: value * 1.5 for name, value in tower.state_dict().items()}, **kwargs)
        tower.requires_grad_(False)

    return change


def _numpy(tower: Any) -> None:
    _weight(tower).numpy()[0] += 1


def _inference(tower: Any) -> None:
    with torch.inference_mode():
        _weight(tower).mul_(1.5)


def _swap(tower: Any) -> None:
    one, two = tower.blocks[0].attn.proj.weight, tower.blocks[1].attn.proj.weight
    one.data, two.data = two.data, one.data


def _swap_contents(tower: Any) -> None:
    one, two = tower.blocks[0].norm1.weight.data, tower.blocks[1].norm1.weight.data
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


def _eps(tower: Any) -> None:
    for block in tower.blocks:
        setattr(block.norm1, "variance_epsilon" if hasattr(block.norm1, "variance_epsilon") else "eps", 0.5)


def _lora(tower: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    tower.eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda tower: _weight(tower).mul_(1.5),
    "through .data": lambda tower: _weight(tower).data.mul_(1.5),
    "merged as PEFT does": _merge,
    "one value": lambda tower: _weight(tower).data[-1, -1].add_(0.5),
    "the last bias": lambda tower: [*tower.parameters()][-1].data[-1].add_(0.5),
    "the sign of all": lambda tower: _weight(tower).data.neg_(),
    "other data": lambda tower: setattr(_weight(tower), "data", _weight(tower) * 1.5),
    "a new parameter": lambda tower: setattr(
        tower.blocks[1].attn.proj, "weight", nn.Parameter(_weight(tower) * 1.5, requires_grad=False)
    ),
    "load_state_dict": _loaded(),
    "load_state_dict, assigned": _loaded(assign=True),
    "SGD": _step(lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "AdamW, one by one": _step(lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=False)),
    "AdamW, foreach": _step(lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True)),
    "AdamW, fused": _step(lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True)),
    "foreach": lambda tower: torch._foreach_mul_([_weight(tower)], 1.5),
    "a flat buffer": _flat,
    "through numpy": _numpy,
    "in inference mode": _inference,
    "storage": lambda tower: _weight(tower).untyped_storage().copy_((_weight(tower) * 1.5).untyped_storage()),
    "swapped": _swap,
    "contents swapped": _swap_contents,
    "transposed in place": lambda tower: setattr(_weight(tower), "data", _weight(tower).data.t()),
    "initialised anew": lambda tower: nn.init.normal_(_weight(tower)),
    "a layer": lambda tower: setattr(tower.blocks[1].attn, "proj", copy.deepcopy(tower.blocks[0].attn.proj)),
    "a block": lambda tower: tower.blocks.__setitem__(1, copy.deepcopy(tower.blocks[0])),
    "blocks in another order": lambda tower: tower.blocks.insert(0, tower.blocks.pop(1)),
    "another dtype": lambda tower: tower.to(torch.float16).to(torch.float32),
    "a buffer": lambda tower: tower.rotary_pos_emb.inv_freq.mul_(1.5),
    "a buffer's data": lambda tower: tower.rotary_pos_emb.inv_freq.data.mul_(1.5),
    "an attribute": _eps,
    "a hook": lambda tower: tower.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5),
    "LoRA": _lora,
}
"""What is done to a tower between two calls of the same picture."""


ALIKE = {"the sign of all", "AdamW, foreach", "AdamW, one by one", "foreach", "in inference mode", "initialised anew"}
ALIKE |= {"merged as PEFT does", "load_state_dict", "SGD", "through numpy", "storage", "a buffer", "a flat buffer"}
"""Values that are written where they lie, as `.data` and AdamW write them, too."""


@pytest.mark.parametrize(
    "name", [*sorted(CHANGES.keys() - ALIKE), *(pytest.param(name, marks=pytest.mark.matrix) for name in sorted(ALIKE))]
)
def test_no_feature_is_stale(name: str) -> None:
    family = "qwen2_5_vl" if name in list(CHANGES)[::2] else "qwen3_vl"
    tower = tower_of(TINY[family].build()).requires_grad_(False)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    items = [item(tower), item(tower, (1, 8, 8), 1), item(tower)]
    with torch.no_grad():
        before = call(tower, items)
        assert same(call(tower, items), before) and counts(tower) == (6, 2, 3)
        torch.manual_seed(1)
        CHANGES[name](tower)
        found = [call(tower, items) for _ in range(2)]
        hf_vit_accel.unpatch(tower)
        expected = call(tower, items)
    for each in found:
        assert_close(each, expected, 1e-5)
    assert not same(before, expected), "the change matters"


def test_weights_that_come_back_bring_their_features_back(tower: Any) -> None:
    """An adapter's weights added and taken away bit for bit, a model moved away and back."""
    hf_vit_accel.patch(tower, reuse=ACROSS)
    weight, items = _weight(tower), [item(tower)]
    with torch.no_grad():
        before, kept = call(tower, items), weight.clone()
        weight.data.mul_(1.5)
        assert not same(call(tower, items), before)
        weight.data.copy_(kept)
        assert same(call(tower, items), before)
        tower.to(torch.float64).to(torch.float32)
        assert same(call(tower, items), before)
    assert counts(tower) == (4, 2, 2)


def test_settings_and_gradients_are_told_apart(tower: Any) -> None:
    items = [item(tower)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        call(tower, items)
    tower.requires_grad_()
    assert all(x.requires_grad for x in call(tower, items)), "what is trained is encoded"
    tower.requires_grad_(False)
    call(tower, items)
    assert counts(tower) == (2, 1, 1)
    state = state_of(tower)
    hf_vit_accel.patch(tower, reuse=ACROSS, fuse=False)
    assert state.reuse.status().nbytes == 0
    with torch.no_grad():
        call(tower, items)
    assert counts(tower) == (1, 1, 0)


def test_what_is_trained_from_now_on_is_not_kept(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread unfreezes the tower while the host would wait for what tells its items."""
    slow = reuse_module.guard.reasons_slow
    monkeypatch.setattr(
        reuse_module.guard, "reasons_slow", lambda *args, **kwargs: tower.requires_grad_() and slow(*args, **kwargs)
    )
    hf_vit_accel.patch(tower, reuse=ACROSS)
    assert all(x.requires_grad for x in call(tower, [item(tower)]))
    assert hf_vit_accel.status(tower).towers[0].reuse.held == 0


# --- what else there is -----------------------------------------------------------------------------------------------


def _lora(tower: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False, lora_dropout=0.5)
    peft.inject_adapter_in_model(config, tower)


def _dropout(tower: Any) -> None:
    tower.blocks[1].mlp = nn.Sequential(tower.blocks[1].mlp, nn.Dropout(0.5))


@pytest.mark.parametrize("add", [_lora, _dropout])
def test_modules_of_others_are_not_trusted(tower: Any, add: Callable[[Any], None]) -> None:
    """LoRA may drop out in training; and acts, at a later call, on state that Python holds."""
    add(tower)
    tower.eval().requires_grad_(False)
    items = [item(tower), item(tower)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    call(tower, items)
    assert not state_of(tower).fallbacks, "nothing is kept of what may be trained, and that is no reason to tell"
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        one, two = call(tower, items), call(tower, items)
        assert same(one, two) and counts(tower) == (4, 2, 0)
        assert [why for why in state_of(tower).fallbacks if "might act otherwise at a later call" in why]
        tower.train()
        found = call(tower, items)
        assert not torch.equal(*found[1].chunk(2)), "two copies, dropped out differently"
        assert counts(tower) == (4, 2, 0)
        assert [why for why in state_of(tower).fallbacks if "may be random in training" in why]
        hf_vit_accel.patch(tower, reuse=True, strict=True)
        with pytest.raises(FallbackError, match="may be random in training"):
            call(tower, items)
        tower.eval()
        call(tower, items)
        hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
        with pytest.raises(FallbackError, match="might act otherwise at a later call"):
            call(tower, items)


def test_tensors_that_are_no_weights_keep_nothing(tower: Any) -> None:
    """What a module holds beside parameters and buffers, and weights that are no rows of words, cannot be told."""
    tower.blocks[0].mlp.table = torch.ones(3)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        call(tower, [item(tower)])
        del tower.blocks[0].mlp.table
        call(tower, [item(tower)])
        _weight(tower).data = _weight(tower).data.t()
        call(tower, [item(tower)])
    assert counts(tower) == (1, 1, 0)
    assert sorted(state_of(tower).fallbacks) == [
        "a module holds a tensor that is neither parameter nor buffer",
        "a parameter is not contiguous, or does not lie in whole words of memory",
    ]


def test_memory_is_not_read_beyond_what_lies_there(tower: Any) -> None:
    """What lies where it did and is shorter is cut anew before a kernel is told to read it."""
    state = TowerState(family_of(tower), Settings(reuse=ACROSS), former_name=None)
    snapshot = state.snapshot(tower)
    parameters, weights = snapshot.weights()
    tensors = [*parameters, *snapshot.buffers()]
    memory = Memory.of(tensors, weights, snapshot, None)
    assert Memory.of(tensors, weights, snapshot, memory) is memory and memory.fits(tensors)
    last = parameters[-1]
    last.data = last.data[:-1]
    other = Memory.of(tensors, weights, snapshot, memory)
    assert other is not memory and other.form is not memory.form
    assert int(memory.tables["counts"].sum() - other.tables["counts"].sum()) == last[0].numel()


def test_weights_that_fit_again_are_kept_for_again(tower: Any) -> None:
    """A view that no kernel reads takes the place of a weight, and goes, at the same place in memory."""
    weight, items = _weight(tower), [item(tower)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        expected = call(tower, items)
        weight.data = weight.data.t()
        assert not same(call(tower, items), expected) and counts(tower) == (1, 1, 0)
        weight.data = weight.data.t()
        for _ in range(2):
            assert same(call(tower, items), expected)
    assert counts(tower) == (3, 2, 1)


def test_calls_of_the_stock_forward_reuse_nothing(tower: Any) -> None:
    items, seen = [item(tower), item(tower)], []
    expected = alone(tower, items)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    handle = tower.blocks[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    with torch.no_grad():
        assert_close(call(tower, items), expected)
    handle.remove()
    assert seen == [48] and counts(tower) == (0, 0, 0)


def test_nothing_is_kept_beside_a_score_mod(tower: Any) -> None:
    score_mod = FlexConfig(score_mod=lambda score, b, h, q, k: score - (q - k).abs())
    hf_vit_accel.patch(tower, reuse=ACROSS, attention=score_mod)
    state = state_of(tower)
    against = state.reuse._reasons_against_keeping(state.snapshot(tower), state.snapshot(tower).weights()[1])
    assert against == ["a score_mod may read what changes between calls"]


def test_graphs_replay_what_is_new(on_cpu: Any, tower: Any) -> None:
    a, b, c = (item(tower, entry, seed) for seed, entry in enumerate([(1, 4, 6), (2, 4, 4), (1, 8, 8)]))
    expected = {id(each): alone(tower, [each]) for each in (a, b, c)}
    for config, replays in ((True, 2), (ACROSS, 2)):
        graphs = patch(tower, SMALL, reuse=config)
        for items in ([a, b, a, a], [c, c, a]):
            with torch.no_grad():
                found = call(tower, items)
            assert_close(found, [torch.cat(x) for x in zip(*(expected[id(each)] for each in items), strict=True)])
        status = hf_vit_accel.status(tower).towers[0]
        assert status.graphs.replays == replays and not status.graphs.eager
        assert counts(tower) == ((7, 4, 0) if config is True else (7, 3, 1))
        hf_vit_accel.warmup(tower, [[(1, 4, 4)] * 3, [(1, 6, 4)]], progress=False)
        hf_vit_accel.warmup(tower, [[(1, 4, 4)] * 3, [(1, 8, 4)]], progress=False)
        labels = [graph.label for graph in graphs._graphs.values()]
        assert sum("exactly" in label for label in labels) == 3 and any("48 patches exactly" in x for x in labels)
        assert counts(tower)[0] == 7, "what is warmed up is no call"


def test_a_warmup_encodes_what_it_is_told(tower: Any) -> None:
    """Though its pictures are alike; and none of them is remembered."""
    hf_vit_accel.patch(tower, reuse=ACROSS)
    hf_vit_accel.warmup(tower, [[(1, 4, 4)] * 3], progress=False)
    state = state_of(tower)
    assert state.last.metadata.rows == 48 and counts(tower) == (0, 0, 0) and state.reuse is not None


def test_copies_and_pickles_start_empty(tower: Any) -> None:
    items = [item(tower)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        call(tower, items)
        for twin in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
            assert counts(twin) == (0, 0, 0) and state_of(twin).settings.reuse == ACROSS
            assert_close(call(twin, items), call(tower, items))
            assert counts(twin) == (1, 1, 0)
    state = state_of(tower)
    hf_vit_accel.unpatch(tower)
    assert state.reuse.status().held == state.reuse.status().nbytes == 0 and state.reuse._memory is None


def test_replaced_weights_are_not_kept_alive(tower: Any) -> None:
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        call(tower, [item(tower)])
        gone = weakref.ref(tower.blocks[1])
        tower.blocks[1] = copy.deepcopy(tower.blocks[0])
        call(tower, [item(tower)])
    gc.collect()
    assert gone() is None


def test_threads_share_a_tower(tower: Any) -> None:
    pool = [item(tower, entry, seed) for seed, entry in enumerate([(1, 4, 6), (2, 4, 4), (1, 8, 8), (1, 4, 6)])]
    expected = {id(each): alone(tower, [each]) for each in pool}
    hf_vit_accel.patch(tower, reuse=ReuseConfig(across_calls=True, gigabytes=1e-4))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(6):
            items = [pool[index] for index in torch.randint(4, (3,), generator=generator).tolist()]
            with torch.no_grad():
                found = call(tower, items)
            assert_close(found, [torch.cat(x) for x in zip(*(expected[id(each)] for each in items), strict=True)])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


def test_a_kernel_that_fails_is_gone_without(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(reuse_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(reuse_module, "_BY_KERNELS", (guarded(KERNELS, fail), None))
    items = [item(tower), item(tower)]
    expected = alone(tower, items)
    hf_vit_accel.patch(tower, reuse=True)
    with torch.no_grad():
        for _ in range(2):
            assert same(call(tower, items), expected)
    assert counts(tower) == (4, 2, 0) and "no C compiler" in state_of(tower).faults["kernels"]


def test_attention_only_towers_say_that_nothing_is_reused() -> None:
    family = next(family for family in FAMILIES if family.attention_only)
    given_ = Settings(reuse=ReuseConfig())
    assert beyond_attention(given_) == {"reuse": "this family is served attention only"}
    assert TowerState(family, given_, former_name=None).reuse is None


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (dict(across_calls=1), "across_calls to be True or False, got 1"),
        (dict(gigabytes=0), "gigabytes to be a positive number, got 0"),
        (dict(gigabytes=float("nan")), "gigabytes to be a positive number"),
        (dict(gigabytes=float("inf")), "gigabytes to be a positive number"),
        (dict(gigabytes=True), "gigabytes to be a positive number"),
        (dict(gigabytes="2"), "gigabytes to be a positive number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ReuseConfig(**arguments)


def test_reuse_is_true_false_or_a_config(tower: Any) -> None:
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match="expected reuse to be True, False or a ReuseConfig"):
            hf_vit_accel.patch(tower, reuse=wrong)
    assert state_of(tower) is None
    with hf_vit_accel.patched(tower, reuse=True):
        assert state_of(tower).settings.reuse == ReuseConfig()
    with hf_vit_accel.patched(tower):
        assert hf_vit_accel.status(tower).towers[0].reuse is None


def test_a_cache_finds_and_keeps() -> None:
    cache: LRU[str] = LRU(entries=2, cost=10)
    assert cache.find("a") is None
    for key, cost in (("a", 4), ("b", 4), ("large", 11)):
        cache.keep(key, key.upper(), cost)
    assert cache.find("a") == "A" and cache.find("large") is None and cache.held == 8
    cache.keep("c", "C", 3)
    assert cache.find("b") is None and cache.find("a") == "A" and cache.held == 7
    cache.keep("a", "AA", 6)
    assert cache.find("a") == "AA" and cache.held == 9 and len(cache) == 2


@pytest.mark.gpu
def test_features_made_on_one_stream_serve_another() -> None:
    """And memory that goes while another stream reads it is not written to."""
    tower = tower_of(TINY["qwen3_vl"].build()).requires_grad_(False).cuda().half()
    entry = (1, 32, 32)
    one, two = (pixels_for(tower, [entry], seed).half().cuda() for seed in range(2))
    grid = torch.tensor([entry], device="cuda")
    with torch.no_grad():
        expected = outputs_of(tower(one, grid_thw=grid))
        hf_vit_accel.patch(tower, reuse=ReuseConfig(across_calls=True, gigabytes=1.5e-3))
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(first):
                torch.cuda._sleep(2_000_000)
                tower(one, grid_thw=grid)
            with torch.cuda.stream(second):
                found = outputs_of(tower(one, grid_thw=grid))
            with torch.cuda.stream(first):
                tower(two, grid_thw=grid)
            torch.cuda.synchronize()
            assert_close(found, expected, 5e-3)
    assert counts(tower)[2] > 0
