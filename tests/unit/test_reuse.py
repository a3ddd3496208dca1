"""Test `reuse`: checksums, equal items of a call, gradients of copies, kept features, weights that change."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreter import DEVICES
from support.towers import alike
from tiny import TINY, assert_close, outputs_of, pixels_for, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, FlexConfig, ReuseConfig
from hf_vit_accel.machine import KERNELS, guarded
from hf_vit_accel.options import checksum
from hf_vit_accel.options import reuse as reuse_module
from hf_vit_accel.options.reuse import WeightTable
from hf_vit_accel.tower.state import state_of

ACROSS = ReuseConfig(across_calls=True)
Entry = tuple[int, int, int]
Item = tuple[torch.Tensor, Entry]
both_ways = pytest.mark.parametrize("config", [True, ACROSS], ids=["within", "across"])
kernel_devices = pytest.mark.parametrize("device", DEVICES)

# --- checksums --------------------------------------------------------------------------------------------------------


def item_sums(
    pixels_TP: torch.Tensor, grid: list[Entry], sum_images: Callable[..., None] = checksum.sum_images_reference
) -> list[int]:
    """Return the checksum of every item, and check the grid beside it."""
    out = torch.zeros(1 + 4 * len(grid), dtype=torch.int64, device=pixels_TP.device)
    sum_images(checksum.words_of(pixels_TP), torch.tensor(grid, device=pixels_TP.device), out)
    assert out[1:].view(-1, 4)[:, :3].tolist() == [list(row) for row in grid] and not out[0]
    return out[1:].view(-1, 4)[:, 3].tolist()


@kernel_devices
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, 300),
        (torch.float16, 301),
        pytest.param(torch.bfloat16, 6, marks=[pytest.mark.matrix] * (not torch.cuda.is_available())),  # 258 items
    ],
    ids=str,
)
def test_kernels_equal_their_references(device: str, dtype: torch.dtype, width: int) -> None:
    """Cover items of one block and of several, more items than are read together, and weights of several chunks."""
    grid = [(1, 2, 2), (2, 2, 4), (0, 2, 2), (1, 4, 4)] if width > 6 else [(0, 2, 2)] * 256 + [(1, 1, 1), (1, 2, 1)]
    pixels = torch.randn(sum(t * h * w for t, h, w in grid), width).to(dtype).to(device)
    assert item_sums(pixels, grid, checksum.sum_images) == item_sums(pixels, grid)

    tensors = [torch.randn(size).to(device, dtype) for size in (17_000, 3000, 2, 0, 8)]
    table = WeightTable(tensors, [])
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    checksum.sum_weights(tensors, table.chunks_2C, sums[:1])
    checksum.sum_weights_reference(tensors, table.chunks_2C, sums[1:])
    assert sums[0] == sums[1] != 0

    words = checksum.words_of(tensors[1][None])[0]
    pairs = [(words[:7], words[:7].clone())]
    for count, changed in ((1500, 1499), (1500, 0), (1024, 1023), (1, 0)):
        other = words.clone()
        other[changed] ^= -(2**31)
        pairs += [(words[:count], other[:count]), (words[1:count], words.clone()[1:count])]
    assert checksum.equal_pairs(pairs) == [True] + 4 * [False, True]


@kernel_devices
@pytest.mark.parametrize(
    "grid", [[(1, 2, 2)], [(-3, 2, 7), (2**40, 2**40, 3), (1, 2, 2)], [(5, 100, 100)] * 2, [(2**62, 3, 1)] * 3], ids=str
)
def test_grids_that_do_not_fit_write_nothing_else(device: str, grid: list[Entry]) -> None:
    """The host refuses such a grid only after the kernel has run."""
    words = torch.ones(8, 300, dtype=torch.int32, device=device)
    for sum_images in (checksum.sum_images, checksum.sum_images_reference):
        out = torch.zeros(1 + 4 * len(grid) + 4, dtype=torch.int64, device=device)
        sum_images(words, torch.tensor(grid, device=device), out[:-4])
        assert not out[-4:].any() and out[:4].tolist() == [0, *grid[0]]


@pytest.fixture(scope="module", params=alike("qwen2_5_vl", "qwen3_vl"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tower(family: str) -> nn.Module:
    """Return a frozen tower: features of no other are kept."""
    return tower_of(TINY[family].build()).requires_grad_(False)


def item(tower: nn.Module, entry: Entry = (1, 4, 6), seed: int = 0) -> Item:
    return pixels_for(tower, [entry], seed), entry


def call(tower: nn.Module, items: list[Item], **kwargs: object) -> list[torch.Tensor]:
    pixels = torch.cat([pixels for pixels, _ in items])
    return outputs_of(tower(pixels, grid_thw=torch.tensor([entry for _, entry in items]), **kwargs))


def alone(tower: nn.Module, items: list[Item]) -> list[torch.Tensor]:
    """Encode the distinct items without reuse, in the order of their first appearance, and repeat them by loops."""

    def key(one: Item) -> tuple[Entry, bytes]:
        return one[1], one[0].view(torch.uint8).numpy().tobytes()

    distinct = {key(one): one for one in reversed(items)}
    order = list(dict.fromkeys(key(one) for one in items))
    with hf_vit_accel.patched(tower), torch.no_grad():
        outputs = call(tower, [distinct[name] for name in order])
    total = sum(len(distinct[name][0]) for name in order)
    repeated = []
    for output in outputs:
        pieces = output.split([len(distinct[name][0]) * len(output) // total for name in order])
        by_key = dict(zip(order, pieces, strict=True))
        repeated.append(torch.cat([by_key[key(one)] for one in items]))
    return repeated


def same(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether outputs are equal bit for bit, NaN included."""
    pairs = zip(outputs, expected, strict=True)
    return all(one.detach().numpy().tobytes() == two.numpy().tobytes() for one, two in pairs)


def counts(tower: nn.Module) -> tuple[int, int, int]:
    """Return the numbers of items, of encoded ones, and of those taken from earlier calls."""
    status = hf_vit_accel.status(tower).towers[0].reuse
    return status.items, status.encoded, status.hits


CHANGED_PIXELS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x[-1, -1].mul_(1.0001),
    lambda x: x[0, 0].fill_(-0.0),
    lambda x: x[0, 0].fill_(0.0),
    lambda x: x[1, 3].fill_(float("nan")),
    lambda x: x[1, 3].copy_(torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)),
    lambda x: x.copy_(x.flip(0)),
]


Choice = tuple[Entry, int, int]
"""A grid row, the seed of its pixels, and the index of their change."""


@st.composite
def multisets(draw: st.DrawFn) -> list[Choice]:
    """Draw items in any order, some of them repeatedly."""
    entries = st.sampled_from([(1, 4, 6), (1, 6, 4), (1, 2, 12), (3, 2, 4), (1, 2, 2), (1, 8, 8)])
    changes = st.integers(0, len(CHANGED_PIXELS) - 1)
    kinds = draw(st.lists(st.tuples(entries, st.integers(0, 1), changes), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))  # type: ignore[no-any-return]


def test_any_multiset_equals_its_distinct_items_alone(tower: nn.Module) -> None:
    """Cover near-copies, equal pixels under other grids, NaN of other bits and both zeros, in one call and across."""
    within = hf_vit_accel.patch(copy.deepcopy(tower), reuse=True, strict=True)
    across = hf_vit_accel.patch(copy.deepcopy(tower), reuse=ACROSS, strict=True)

    @given(chosen=multisets())
    @settings(settings.get_profile("same"), max_examples=15)
    def check(chosen: list[Choice]) -> None:
        items = []
        for entry, seed, change in chosen:
            pixels = pixels_for(tower, [(1, 8, 8)], seed)[: entry[0] * entry[1] * entry[2]].clone()
            CHANGED_PIXELS[change](pixels)
            items.append((pixels, entry))
        expected = alone(tower, items)
        distinct = len({(entry, pixels.numpy().tobytes()) for pixels, entry in items})
        before = counts(within)
        with torch.no_grad():
            assert same(call(within, items), expected)
            for output, wanted_output in zip(call(across, items), expected, strict=True):  # beside other items, maybe
                torch.testing.assert_close(output, wanted_output, atol=1e-4, rtol=1e-4, equal_nan=True)
        if len({entry for _, entry in items}) < len(items):
            assert counts(within)[:2] == (before[0] + len(items), before[1] + distinct)

    check()
    items, encoded, hits = counts(across)
    assert 0 < hits < items and 0 < encoded < items and counts(within)[1] < counts(within)[0]


def use_constant_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all items the same checksum; weights keep theirs."""

    def sum_images(words_TW: torch.Tensor, grid_N3: torch.Tensor, out: torch.Tensor) -> None:
        out[1:] = nn.functional.pad(grid_N3, (0, 1)).flatten()

    monkeypatch.setattr(reuse_module, "_IN_TORCH", (sum_images, *reuse_module._IN_TORCH[1:]))


@both_ways
def test_items_of_equal_checksums_are_distinguished_by_their_bits(
    tower: nn.Module, monkeypatch: pytest.MonkeyPatch, config: bool | ReuseConfig
) -> None:
    a, b, c = (item(tower, seed=seed) for seed in range(3))
    zeros = torch.zeros_like(a[0])
    negative_zeros = -zeros
    calls = [[a, b, a, b, c], [b], [a], [c, b, a], [(zeros, a[1]), (negative_zeros, a[1])], [(negative_zeros, a[1])]]
    expected = [alone(tower, items) for items in calls]
    use_constant_checksums(monkeypatch)
    hf_vit_accel.patch(tower, reuse=config, strict=True)
    with torch.no_grad():
        for items, outputs in zip(calls, expected, strict=True):
            assert_close(call(tower, items), outputs)
    assert counts(tower)[1] > 6, "collisions are encoded"


def test_the_host_waits_once_and_with_candidates_twice(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.numel()) or tolist(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("a wait of its own"))
    with torch.no_grad():
        call(tower, [item(tower), item(tower, seed=1)])
        assert reads == [6, 9], "a grid on the host, then everything on the device"
        call(tower, [item(tower), item(tower, seed=2)])
        assert reads[2:] == [6, 9, 1], "one pair of candidates"


@both_ways
def test_padding_rows_are_no_items_and_wrong_grids_are_refused(tower: nn.Module, config: bool | ReuseConfig) -> None:
    pixels, entry = item(tower)
    expected = alone(tower, [(pixels, entry)] * 2)
    hf_vit_accel.patch(tower, reuse=config, strict=True)
    padded = torch.tensor([(0, 2, 2), entry, (0, 0, 0), entry, (0, 4, 4)])
    twice = torch.cat([pixels, pixels])
    with torch.no_grad():
        assert same(outputs_of(tower(twice, grid_thw=padded)), expected)
        for rows in ([], [(0, 2, 2)] * 2, [entry] * 3, [(1, 4, -6)] * 2, [(2**62, 2**62, 4)] * 2, [(1, 3, 8)] * 2):
            with pytest.raises(ValueError, match="grid_thw"):
                tower(twice, grid_thw=torch.tensor(rows, dtype=torch.int64).view(-1, 3))
        with pytest.raises(ValueError, match="rows of pixel values"):
            tower(twice[:0], grid_thw=padded)
    assert counts(tower) == (2, 1, 0)


def gradients(tower: nn.Module, items: list[Item], *, pixels: bool) -> list[torch.Tensor]:
    """Return the gradients of all parameters (and of the pixels) of a loss that weighs every copy differently."""
    tower.zero_grad()
    leaves = torch.cat([item_pixels for item_pixels, _ in items]).requires_grad_(pixels)
    outputs = outputs_of(tower(leaves, grid_thw=torch.tensor([entry for _, entry in items])))
    generator = torch.Generator().manual_seed(3)
    sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs).backward()
    grads = [parameter.grad.clone() for parameter in tower.parameters() if parameter.grad is not None]
    return [*grads, leaves.grad] if pixels else grads


@pytest.mark.parametrize("pixels", [False, True], ids=["", "pixels"])
def test_gradients_of_copies_add_up(tower: nn.Module, pixels: bool) -> None:
    tower = tower.double().requires_grad_()
    a, b, c = (item(tower, entry, seed) for seed, entry in enumerate([(1, 4, 6), (2, 4, 4), (1, 4, 6)]))
    items = [(one.double(), entry) for one, entry in (a, b, a, c, a, b)]
    stock = gradients(tower, items, pixels=pixels)
    hf_vit_accel.patch(tower, reuse=ACROSS, strict=True)
    assert_close(gradients(tower, items, pixels=pixels), stock, 1e-6)  # the rotation is in fp32, in stock, too
    assert counts(tower) == ((0, 0, 0) if pixels else (6, 3, 0)), "copies of pixels have gradients of their own"


# --- across calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [["outputs"], ["pixels"], ["outputs", "pixels"]], ids=" and ".join)
def test_callers_may_write_to_outputs_and_pixels(tower: nn.Module, written: list[str]) -> None:
    items = [item(tower), item(tower, seed=1)]
    expected = alone(tower, items)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        for chosen in (items, items, items[:1], items):
            pixels = torch.cat([one for one, _ in chosen])
            for output in outputs_of(tower(pixels, grid_thw=torch.tensor([entry for _, entry in chosen]))):
                if "outputs" in written:
                    output.fill_(float("nan"))
            if "pixels" in written:
                pixels.fill_(7.0)
        assert_close(call(tower, items), expected)


def test_features_of_inference_mode_serve_gradients_later(tower: nn.Module) -> None:
    items = [item(tower), item(tower, seed=1)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.inference_mode():
        expected = call(tower, items)
        assert all(x.is_inference() for x in expected)
    outputs = call(tower, items)  # gradients are recorded, the tower is frozen
    assert counts(tower) == (4, 2, 2) and not any(x.is_inference() or x.requires_grad for x in outputs)
    assert hf_vit_accel.status(tower).towers[0].layouts == (1, 0, 1), "a call that encodes nothing asks for no layout"
    head = nn.Linear(outputs[-1].shape[-1], 3)
    head(outputs[-1]).sum().backward()
    assert_close([head.weight.grad], [expected[-1].sum(0).expand(3, -1)])


def test_the_least_recently_used_go(tower: nn.Module) -> None:
    items = [item(tower, seed=seed) for seed in range(3)]
    hf_vit_accel.patch(tower)
    with torch.no_grad():
        nbytes = items[0][0].nbytes + sum(x.nbytes for x in call(tower, items[:1]))
        hf_vit_accel.patch(tower, reuse=ReuseConfig(across_calls=True, gigabytes=2.5 * nbytes / 1e9))
        a, b, c, large = ([one] for one in (*items, item(tower, (3, 14, 10))))
        for items, hits in ((a, 0), (b, 0), (a, 1), (c, 1), (a, 2), (b, 2), (large, 2), (a, 3), (large, 3), (b, 4)):
            call(tower, items)
            status = hf_vit_accel.status(tower).towers[0].reuse
            assert status.hits == hits and status.nbytes == status.held * nbytes <= 2.5 * nbytes
    reuse = state_of(tower).reuse
    hf_vit_accel.unpatch(tower)
    assert reuse.status().held == reuse.status().nbytes == 0


def test_dtypes_grids_and_modes_are_distinguished(tower: nn.Module) -> None:
    pixels, entry = item(tower)
    pixels = pixels.half().float()
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        for converted in (pixels, pixels.half(), pixels.double(), pixels.half().view(torch.bfloat16)):
            tower(converted, grid_thw=torch.tensor([entry]))
        for grid in ((1, 6, 4), (2, 6, 2)):
            tower(pixels, grid_thw=torch.tensor([grid]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tower(pixels, grid_thw=torch.tensor([entry]))
        setting = torch.backends.cuda.matmul
        before = setting.fp32_precision
        try:
            setting.fp32_precision = "ieee" if before == "tf32" else "tf32"
            tower(pixels, grid_thw=torch.tensor([entry]))
        finally:
            setting.fp32_precision = before
        assert counts(tower) == (8, 8, 0)
        tower(pixels, grid_thw=torch.tensor([entry]))
    assert counts(tower) == (9, 8, 1)
    tower.requires_grad_()
    assert all(x.requires_grad for x in call(tower, [item(tower)] * 2)), "a trained tower encodes"
    hf_vit_accel.patch(tower, reuse=ACROSS, fuse=False)
    assert hf_vit_accel.status(tower).towers[0].reuse.nbytes == 0, "other settings start anew"


# --- weights that change ----------------------------------------------------------------------------------------------


def weight_of(tower: nn.Module) -> nn.Parameter:
    return tower.blocks[1].attn.proj.weight


def write_flat_buffer(tower: nn.Module) -> None:
    """Write to a buffer that all parameters are views of, as ZeRO does."""
    parameters = list(tower.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    nn.utils.vector_to_parameters(flat, parameters)
    flat[len(flat) // 2].add_(0.5)


def swap_contents(tower: nn.Module) -> None:
    one, two = [block.norm1.weight.data for block in tower.blocks[:2]]
    former = one.clone()
    one.copy_(two)
    two.copy_(former)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "the last bias": lambda tower: [*tower.parameters()][-1].data[-1].add_(0.5),
    "permuted rows": lambda tower: weight_of(tower).data.copy_(weight_of(tower).data.flip(0)),
    "a flat buffer": write_flat_buffer,
    "through numpy": lambda tower: weight_of(tower).numpy()[0].__iadd__(1),
    "contents swapped": swap_contents,
}
"""Changes of a tower between two calls of the same picture."""


@pytest.mark.parametrize("name", CHANGES)
def test_no_feature_is_stale(name: str) -> None:
    tower = tower_of(TINY["qwen2_5_vl" if name in list(CHANGES)[::2] else "qwen3_vl"].build()).requires_grad_(False)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    items = [item(tower), item(tower, (1, 8, 8), 1), item(tower)]
    with torch.no_grad():
        before = call(tower, items)
        assert same(call(tower, items), before) and counts(tower) == (6, 2, 3)
        torch.manual_seed(1)
        CHANGES[name](tower)
        outputs = [call(tower, items) for _ in range(2)]
        hf_vit_accel.unpatch(tower)
        expected = call(tower, items)
    for of_one_call in outputs:
        assert_close(of_one_call, expected, 1e-5)
    assert not same(before, expected), "the change matters"


def test_third_party_modules_are_not_trusted(tower: nn.Module) -> None:
    """LoRA may be random in training. At a later call it may act on other state that Python holds."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False, lora_dropout=0.5)
    peft.inject_adapter_in_model(config, tower)
    tower.eval().requires_grad_(False)
    items = [item(tower), item(tower)]
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        assert same(call(tower, items), call(tower, items)) and counts(tower) == (4, 2, 0)
        assert [why for why in state_of(tower).fallbacks if "might act otherwise at a later call" in why]
        tower.train()
        assert not torch.equal(*call(tower, items)[-1].chunk(2)), "two copies are dropped out differently"
        assert counts(tower) == (4, 2, 0)
        assert [why for why in state_of(tower).fallbacks if "may be random in training" in why]
        hf_vit_accel.patch(tower, reuse=True, strict=True)
        with pytest.raises(FallbackError, match="may be random in training"):
            call(tower, items)


def test_reasons_against_keeping_are_reported(tower: nn.Module) -> None:
    """Cover tensors beside parameters and buffers, weights that are no rows of words, and a score_mod."""
    tower.blocks[0].mlp.table = torch.ones(3)
    hf_vit_accel.patch(tower, reuse=ACROSS)
    with torch.no_grad():
        call(tower, [item(tower)])
        del tower.blocks[0].mlp.table
        call(tower, [item(tower)])
        weight = next(weight for weight in tower.blocks.parameters() if weight.dim() == 2 and len({*weight.shape}) == 2)
        weight.data = weight.data.view(weight.shape[::-1]).t()  # of the same shape, at the same address
        call(tower, [item(tower)])
        assert sorted(state_of(tower).fallbacks) == [
            "a module holds a tensor that is neither parameter nor buffer",
            "a parameter is not contiguous, or does not lie in whole words of memory",
        ]
        score_mod = FlexConfig(score_mod=lambda score, b, h, q, k: score - (q - k).abs())
        hf_vit_accel.patch(tower, reuse=ACROSS, attention=score_mod)
        call(tower, [item(tower)])
        assert list(state_of(tower).fallbacks) == ["a score_mod may read what changes between calls"]


def test_a_failed_kernel_is_replaced_by_its_reference(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(reuse_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(reuse_module, "_BY_KERNELS", (guarded(KERNELS, fail),) * 2)
    items = [item(tower), item(tower)]
    expected = alone(tower, items)
    hf_vit_accel.patch(tower, reuse=True)
    with torch.no_grad():
        for _ in range(2):
            assert same(call(tower, items), expected)
    assert counts(tower) == (4, 2, 0) and "no C compiler" in state_of(tower).faults["kernels"]


@pytest.mark.gpu
def test_every_stream_uses_features_of_its_own() -> None:
    """What the first stream keeps is not yet computed when the second one asks for it."""
    tower = tower_of(TINY["qwen3_vl"].build()).requires_grad_(False).cuda().half()
    entry = (1, 32, 32)
    one, two = (pixels_for(tower, [entry], seed).half().cuda() for seed in range(2))
    grid = torch.tensor([entry], device="cuda")
    with torch.no_grad():
        expected = outputs_of(tower(one, grid_thw=grid))
        hf_vit_accel.patch(tower, reuse=ACROSS)
        first = torch.cuda.Stream()
        second = torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(first):
                torch.cuda._sleep(2_000_000)
                tower(one, grid_thw=grid)
            with torch.cuda.stream(second):
                outputs = outputs_of(tower(one, grid_thw=grid))
            with torch.cuda.stream(first):
                tower(two, grid_thw=grid)
            torch.cuda.synchronize()
            assert_close(outputs, expected, 5e-3)
    assert counts(tower)[2] > 0
