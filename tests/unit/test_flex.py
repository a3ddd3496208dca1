"""FlexAttention: its block masks, a user's score_mod, and on a GPU how often it compiles.

`T` rows, `S` segments, `H` heads, `D` head dim, `B` blocks of rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import HEADS, LAYOUTS, draw, exact, request, segments_of
from support.backends import skip_for
from support.cpu_graphs import SMALL, status_of
from support.graphs import draw_grid, patch
from support.patching import training_step
from support.references import fuse_only
from support.towers import alike, both_towers
from tiny import assert_close, pixels_for, relative_error, run_tower, tower_of
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, FallbackError, FlexConfig, GraphConfig
from hf_vit_accel.backends import BACKENDS, backend_named, resolve
from hf_vit_accel.backends import flex as flex_backend
from hf_vit_accel.backends.base import plan_alone
from hf_vit_accel.backends.flex import Flex, block_mask
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops import PARTS

KINDS = ("partial", "full")


# --- block masks ----------------------------------------------------------------------------------------------------


def brute_force(lengths: list[int]) -> dict[str, list[list[int]]]:
    """Return the partial and full blocks of keys of every block of queries, from the T x T mask."""
    block = flex_backend.BLOCK
    rows = sum(lengths)
    if rows < flex_backend.FEWEST:
        lengths = [*lengths, flex_backend.FEWEST - rows]
        rows = flex_backend.FEWEST
    segment_T = np.repeat(np.arange(len(lengths)), lengths)
    mask_TT = segment_T[:, None] == segment_T
    starts = range(0, rows, block)
    tiles = [[mask_TT[i : i + block, j : j + block] for j in starts] for i in starts]
    return {
        "partial": [[j for j, tile in enumerate(row) if tile.any() and not tile.all()] for row in tiles],
        "full": [[j for j, tile in enumerate(row) if tile.all()] for row in tiles],
    }


def check_block_mask(lengths: list[int], longest: int | None = None) -> dict[str, np.ndarray]:
    arrays = block_mask(Segments(np.array(lengths, dtype=np.int32), longest))
    expected = brute_force(lengths)
    blocks = len(expected["full"])
    assert all(array.dtype == np.int32 for array in arrays.values())
    for kind in KINDS:
        counts_B = arrays[f"{kind}_counts_11B"][0, 0]
        numbers_BC = arrays[f"{kind}_blocks_11BC"][0, 0]
        assert counts_B.shape == (blocks,)
        assert counts_B.max() < numbers_BC.shape[1], "one column to spare"
        assert (numbers_BC >= 0).all() and (numbers_BC < blocks).all(), "unused numbers are valid too"
        by_query = [numbers[:count].tolist() for numbers, count in zip(numbers_BC, counts_B, strict=True)]
        assert by_query == expected[kind], "in rising order: kernels stop after the last block of keys"
        pairs = {(i, j) for i, row in enumerate(by_query) for j in row}
        assert pairs == {(j, i) for i, j in pairs}, "its own transpose, for the backward pass"
    assert max(blocks, arrays["segment_T"].shape[0]) >= 2, "no size is one: the compiler would take it for a constant"
    return arrays


lists = st.lists(st.integers(1, 40), min_size=1, max_size=25)


@given(lists, st.integers(0, 3), st.integers(0, 30))
def test_block_masks_of_random_segments(lengths: list[int], empty: int, slack: int) -> None:
    """Blocks have 8 rows, so that short sequences have many."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flex_backend, "BLOCK", 8)
        patched.setattr(flex_backend, "FEWEST", 16)
        check_block_mask([*lengths, *[0] * empty], max(lengths) + slack)


# --- score_mod ------------------------------------------------------------------------------------------------------


def near(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor, slope: float = 0.01) -> Tensor:
    """Lower scores with the distance in the sequence, twice as fast from head to head."""
    return score - slope * 2.0**head * (q_idx - kv_idx).abs()


def dense(qkv: list[Tensor], lengths: list[int], scale: float, change: Callable[..., Tensor]) -> Tensor:
    """Compute attention in float64 with changed scores, those of a segment as one (H, L, L) tensor."""
    outs = []
    for q, k, v in zip(*(x.double().split(lengths) for x in qkv), strict=True):
        heads = torch.arange(q.shape[1])
        rows = torch.arange(len(q))
        scores_HLL = torch.einsum("thd,shd->hts", q, k) * scale
        scores_HLL = change(scores_HLL, 0, heads[:, None, None], rows[:, None], rows)
        outs.append(torch.einsum("hts,shd->thd", scores_HLL.softmax(-1), v))
    return torch.cat(outs)


@pytest.mark.parametrize("layout", alike("ragged", *(name for name in LAYOUTS if name != "ragged")))
def test_score_mod_equals_a_dense_reference(layout: str) -> None:
    lengths = LAYOUTS[layout]
    table_H = torch.linspace(0.1, 0.4, HEADS)

    def by_table(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx > kv_idx, score * table_H[head], score - 0.3)

    qkv = draw(sum(lengths), 80, torch.float32, "cpu", 0, True)
    for score_mod in (near, by_table):
        call = request(score_mod=score_mod)
        out = plan_alone(Flex(), segments_of(lengths), call).attend(*qkv)
        assert relative_error(out, dense(qkv, lengths, call.scale, score_mod)) < 1e-5
        plain = exact(qkv, lengths, call.scale)
        assert max(lengths) == 1 or relative_error(out, plain) > 1e-3


def test_rows_without_any_finite_score_are_zero() -> None:
    def odd(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx % 2 == 1, score, -float("inf"))

    plan = plan_alone(Flex(), segments_of([300]), request(score_mod=odd, grad=True))
    qkv = [x.detach().requires_grad_() for x in draw(300, 80, torch.float32, "cpu", 0, True)]
    out = plan.attend(*qkv)
    assert (out[::2] == 0).all() and (out[1::2] != 0).any()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), qkv))


def test_only_flex_applies_a_score_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    call = request(score_mod=near)
    for backend in BACKENDS:
        against = [why for why in backend.reasons_against(call) if "score_mod" in why]
        assert len(against) == (backend.name != "flex")
    assert resolve("flex", call).backend.name == "flex"
    monkeypatch.setattr(Flex, "reasons_against", lambda self, request: ["not here"])
    with pytest.raises(BackendUnavailableError, match=r"flex: not here.*sdpa: a score_mod"):
        resolve("flex", call)


# --- towers ---------------------------------------------------------------------------------------------------------

GRID = [(1, 10, 6), (3, 4, 4), (1, 2, 18), (1, 20, 24)]
STEEP = FlexConfig(score_mod=partial(near, slope=0.05))


def _dense_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    offsets = kwargs.get("cu_seq_lens_q")  # transformers 4.57 calls it once a segment, without offsets
    lengths = [query.shape[2]] if offsets is None else offsets.diff().tolist()
    qkv = [x[0].transpose(0, 1) for x in (query, key, value)]
    assert STEEP.score_mod is not None
    return dense(qkv, lengths, kwargs["scaling"], STEEP.score_mod).to(query.dtype)[None], None


AttentionInterface.register("dense_flash_for_tests", _dense_attention)


def stock_with_score_mod(model: nn.Module, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Run the stock tower with a dense attention that changes scores as STEEP does."""
    config = tower_of(model).config
    former = config._attn_implementation
    config._attn_implementation_internal = "dense_flash_for_tests"
    try:
        return run()
    finally:
        config._attn_implementation_internal = former


@pytest.mark.parametrize("attention", alike(STEEP, "flex"), ids=["score_mod", "plain"])
@both_towers
def test_gradients_of_a_tower(model: nn.Module, attention: str | FlexConfig) -> None:
    tower = tower_of(model)
    step = partial(training_step, tower, GRID)
    expected = step() if attention == "flex" else stock_with_score_mod(model, step)
    hf_vit_accel.patch(model, attention=attention)
    assert_close(step(), expected, 1e-4)
    assert set(hf_vit_accel.status(model).towers[0].backends.values()) == {"flex"}


def test_a_tower_with_a_score_mod(on_cpu: object, model: nn.Module) -> None:
    """Every layer applies it, window layers too: eagerly, replayed from a graph, and by the stock forward."""
    tower = tower_of(model)
    plain = run_tower(tower, GRID)
    expected = stock_with_score_mod(model, lambda: run_tower(tower, GRID))
    assert relative_error(expected[-1], plain[-1]) > 1e-3
    hf_vit_accel.patch(model, attention=STEEP, strict=True)
    assert_close(run_tower(tower, GRID), expected)
    status = hf_vit_accel.status(model).towers[0]
    assert status.attention == "flex with a score_mod" and set(status.backends.values()) == {"flex"}
    assert "window_attention" not in status.fused and status.calls == 1
    has_windows = hasattr(tower.config, "window_size")
    assert (status.unfused["window_attention"] == "it applies no score_mod") == has_windows, status.unfused
    for exact_after in (0, 1):
        patch(model, GraphConfig(max_tokens=256, exact_after=exact_after), attention=STEEP, strict=True)
        for _ in range(2):
            assert_close(run_tower(tower, GRID), expected)
        assert status_of(model).replays
    hf_vit_accel.patch(model, attention=STEEP)
    handle = tower.rotary_pos_emb.register_forward_hook(lambda *_: None)
    assert_close(run_tower(tower, GRID), expected)
    assert hf_vit_accel.status(model).towers[0].stock_calls == 1
    handle.remove()
    hf_vit_accel.patch(model, attention=FlexConfig(), strict=True)
    assert_close(run_tower(tower, GRID), plain)
    hf_vit_accel.unpatch(model)
    assert_close(run_tower(tower, GRID), plain, 0.0)


def test_a_score_mod_is_never_left_out(model: nn.Module) -> None:
    """A call that cannot apply it raises, without `strict`, too."""
    tower = tower_of(model)
    hf_vit_accel.patch(model, attention=STEEP)
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    with torch.no_grad(), pytest.raises(FallbackError, match=r"score_mod .* supplies sequence metadata"):
        tower(pixels, grid_thw=grid, cu_seqlens=torch.tensor([0, len(pixels)]))
    for block in tower.blocks:
        block.attn.attention_dropout = 0.1
    tower.train()
    with torch.no_grad(), pytest.raises(FallbackError, match=r"score_mod .* dropped out"):
        tower(pixels, grid_thw=grid)
    tower.eval()
    hook = tower.rotary_pos_emb.register_forward_hook(lambda *_: None)
    our_name = tower.config._attn_implementation
    tower.config._attn_implementation = "sdpa"  # as unpatching a tower with the same config does
    with torch.no_grad(), pytest.raises(FallbackError, match=r"score_mod .* blocks attend by 'sdpa'"):
        tower(pixels, grid_thw=grid)
    tower.config._attn_implementation = our_name
    hook.remove()


def test_compiled_blocks_of_a_call_by_the_stock_forward(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's `compile_regions` compiles blocks. Their compiler may trace nothing that prepares flex."""
    monkeypatch.setattr(flex_backend, "compiles", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tower = tower_of(model)
    del tower.blocks[2:]  # compiling takes long
    expected = stock_with_score_mod(model, lambda: run_tower(tower, GRID))
    hf_vit_accel.patch(model, attention=STEEP)
    for block in tower.blocks:
        block.compile(backend="eager")
    handle = tower.rotary_pos_emb.register_forward_hook(lambda *_: None)
    assert_close(run_tower(tower, GRID), expected)
    assert hf_vit_accel.status(model).towers[0].stock_calls == 1
    handle.remove()
    flex_backend.compiled.cache_clear()
    torch.compiler.reset()


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Drop all compilations, and raise if anything is compiled twice."""
    backend = backend_named("flex")
    skip_for(backend.reasons_against(request("cuda", torch.bfloat16)))
    flex_backend.compiled.cache_clear()
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.gpu
def test_gpu_a_score_mod_equals_a_dense_reference(on_gpu: None) -> None:
    table_H = torch.linspace(0.1, 0.4, HEADS)

    def by_table(table_H: Tensor) -> Callable[..., Tensor]:
        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx > kv_idx, score * table_H[head], score - 0.3)

        return score_mod

    for lengths in LAYOUTS.values():
        qkv = draw(sum(lengths), 72, torch.float32, "cuda", 0, True)
        on_host = [x.cpu() for x in qkv]
        for on_cuda, on_cpu in ((near, near), (by_table(table_H.cuda()), by_table(table_H))):
            call = request("cuda", torch.float32, 72, score_mod=on_cuda)
            out = plan_alone(Flex(), segments_of(lengths), call).attend(*qkv)
            assert relative_error(out.cpu(), dense(on_host, lengths, call.scale, on_cpu)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flex", STEEP], ids=["plain", "score_mod"])
def test_gpu_a_tower_replayed_equals_eager(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, model: nn.Module, attention: str | FlexConfig
) -> None:
    """Windows run flex, too. Nothing is compiled while 100 other layouts are captured and replayed."""
    tower = tower_of(model.to("cuda", torch.bfloat16))
    fuse_only(monkeypatch, PARTS.keys() - {"window_attention"})
    rng = np.random.default_rng(0)
    grids = [draw_grid(rng, 128) for _ in range(100)]
    hf_vit_accel.patch(tower, attention=attention)
    before = compiled_graphs()
    expected = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    assert compiled_graphs() <= before + 1
    hf_vit_accel.patch(tower, attention=attention, cuda_graphs=SMALL)
    hf_vit_accel.warmup(tower, progress=False)
    before = compiled_graphs()
    for seed, grid in enumerate(grids):
        outputs = run_tower(tower, grid, seed)
        assert max(relative_error(f, e) for f, e in zip(outputs, expected[seed], strict=True)) < 1e-2, grid
    status = status_of(tower)
    assert compiled_graphs() == before and status.replays >= 100 and not status.eager
    assert not hf_vit_accel.status(tower).towers[0].stock_calls
