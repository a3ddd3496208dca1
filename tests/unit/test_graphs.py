"""The runner of inference graphs without a GPU: its recorder replays by running the encoder again.

Before each replay every static buffer is poisoned, so a graph may read only what was written for it. On a GPU the
captures are real.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_graphs import SMALL, Recorder, status_of
from support.graphs import Grid, draw_grid, patch
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, GraphConfig, backends
from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.graphs import policy, recorder, runner, store
from hf_vit_accel.graphs.store import STALE_REASONS
from hf_vit_accel.tower.state import state_of

Tensors = list[torch.Tensor]
IMAGE: Grid = [(1, 6, 8)]
ODD_INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "integers": lambda p, g: ((p * 10).to(torch.int32), g),
    "wider floats": lambda p, g: (p.double() * 1.1, g),
    "padding rows in the grid": lambda p, g: (p, torch.cat([g.new_zeros(1, 3), g])),
}


@pytest.mark.parametrize("case", ODD_INPUTS)
def test_odd_input_is_replayed(on_cpu: type[Recorder], model: nn.Module, case: str) -> None:
    """Inputs that stock casts and views itself, between calls of the usual form."""
    tower = tower_of(model)
    grid = [(1, 4, 6), (1, 2, 2)]
    usual = pixels_for(tower, grid), torch.tensor(grid)
    odd = ODD_INPUTS[case](*usual)
    with torch.no_grad():
        expected = [outputs_of(tower(*inputs)) for inputs in (usual, odd)]
        patch(model)
        for _ in range(3):
            for inputs, outputs in zip((usual, odd), expected, strict=True):
                assert_close(outputs_of(tower(*inputs)), outputs)
    assert status_of(model).replays == 6 and not status_of(model).eager


# --- what is replayed -------------------------------------------------------------------------------------------------


@functools.cache
def run_eagerly(family: str, grids: tuple[tuple[tuple[int, int, int], ...], ...]) -> list[Tensors]:
    """Return the outputs of a family's stock tower, for the tests of all backends."""
    tower = tower_of(TINY[family].build())
    return [run_tower(tower, list(grid), seed) for seed, grid in enumerate(grids)]


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param("qwen2_vl", "auto", marks=pytest.mark.matrix),
        ("qwen2_5_vl", "auto"),
        ("qwen3_vl", "auto"),
        ("qwen2_5_vl", "flex"),
    ],
)
def test_a_stream_of_layouts_equals_eager(on_cpu: type[Recorder], family: str, attention: str) -> None:
    model = TINY[family].build()
    rng = np.random.default_rng(0)
    grids = [draw_grid(rng) for _ in range(25)]
    grids += [[(1, 4, 12), (1, 4, 4)], [(1, 8, 8)], [(4, 4, 4)], [(1, 2, 32)], [(2, 4, 8)]]  # 16 tokens, five layouts
    expected = run_eagerly(family, tuple(map(tuple, grids)))
    patch(model, attention=attention)
    replayed = [run_tower(tower_of(model), grid, seed) for seed, grid in enumerate(grids)]
    for outputs, eager in zip(replayed, expected, strict=True):  # all at the end: no replay may change earlier outputs
        assert_close(outputs, eager)
    status = status_of(model)
    assert status.replays >= len(grids) and not status.eager and status.captures == len(status.graphs)
    assert status.captures < len(grids) and 1 < status.padding < 1.4
    assert hf_vit_accel.status(model).towers[0].calls == len(grids)
    assert "replays" in str(hf_vit_accel.status(model))


def test_a_call_beyond_the_largest_budget_is_cut_between_images(on_cpu: type[Recorder], model: nn.Module) -> None:
    grid: Grid = [(1, 10, 12), (2, 8, 8), (1, 14, 14), (1, 2, 2), (1, 16, 12)]
    expected = run_tower(tower_of(model), grid)
    patch(model)
    assert_close(run_tower(tower_of(model), grid), expected)
    assert status_of(model).replays == 2


def test_images_beyond_the_largest_budget_run_eagerly(on_cpu: type[Recorder], model: nn.Module) -> None:
    expected = run_tower(tower_of(model), [(1, 24, 24)])
    patch(model, strict=True)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), [(1, 24, 24)]), expected)
    status = status_of(model)
    assert status.eager == {"an image or video exceeds the largest budget of 128 merged tokens": 2}
    assert status.replays == 0


def test_frequent_shapes_are_captured_exactly(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, GraphConfig(max_tokens=128, exact_after=3))
    for grid in ([(1, 10, 12)], [(1, 26, 22)]):  # within the budgets, and beyond them
        expected = run_tower(tower_of(model), grid)
        for _ in range(4):
            assert_close(run_tower(tower_of(model), grid), expected)
    beyond = run_tower(tower_of(model), [(1, 22, 26)], seed=5)
    exact = [label for label, _, _ in status_of(model).graphs if "exactly" in label]
    assert len(exact) >= 2 and status_of(model).captures <= 5
    hf_vit_accel.unpatch(model)
    assert_close(beyond, run_tower(tower_of(model), [(1, 22, 26)], seed=5))


# --- what makes graphs stale ------------------------------------------------------------------------------------------


def _move_data(model: nn.Module) -> None:
    for parameter in tower_of(model).parameters():
        parameter.data = parameter.data * 1.2


MOVED = STALE_REASONS["memory"]
OTHER_SPEC = STALE_REASONS["spec"]
CHANGES = {
    "move": (_move_data, {MOVED: 1}),
    "double": (lambda model: model.double(), {OTHER_SPEC: 1}),
}


@pytest.mark.parametrize(("change", "reasons"), CHANGES.values(), ids=CHANGES)
def test_graphs_go_stale_with_what_they_captured(
    on_cpu: type[Recorder], model: nn.Module, change: Callable[[nn.Module], object], reasons: dict[str, int]
) -> None:
    """Numbers and switches of modules have tests in tests/unit/test_ops.py."""
    patch(model)
    grid: Grid = [(1, 6, 8), (1, 12, 12)]
    before = run_tower(tower_of(model), grid)
    change(model)
    outputs = run_tower(tower_of(model), grid)
    assert status_of(model).captures == 2 and len(status_of(model).graphs) == 1
    assert status_of(model).stale == reasons
    assert all(f"stale      1 x {why}" in str(hf_vit_accel.status(model)) for why in reasons)
    hf_vit_accel.unpatch(model)
    assert_close(outputs, run_tower(tower_of(model), grid))
    difference = max(relative_error(now, earlier) for now, earlier in zip(outputs, before, strict=True))
    assert outputs[-1].dtype != before[-1].dtype or difference > 1e-4


# --- what runs eagerly ------------------------------------------------------------------------------------------------


def test_captures_stop_where_weights_change_at_every_call(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model)
    for _ in range(12):
        _move_data(model)
        run_tower(tower_of(model), IMAGE)
    assert status_of(model).captures <= 5
    assert status_of(model).eager == {policy.CHANGED: 8}
    for _ in range(12):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model).replays >= 8


def test_strict_holds_for_replays(on_cpu: type[Recorder], model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named backend that cannot serve the call is noticed before anything is replayed."""
    monkeypatch.setattr("hf_vit_accel.api.require", lambda name, **_: None)
    patch(model, attention="torch_varlen", strict=True)
    with pytest.raises(FallbackError, match="torch_varlen cannot serve the call"):
        run_tower(tower_of(model), IMAGE)
    patch(model, attention="torch_varlen")
    run_tower(tower_of(model), IMAGE)
    status = hf_vit_accel.status(model).towers[0]
    assert status.graphs.replays == 1 and any("torch_varlen cannot serve" in why for why in status.fallbacks)
    assert status.backends["full"] == "sdpa"


def test_third_party_modules_run_eagerly(on_cpu: type[Recorder], model: nn.Module) -> None:
    """A flag may switch an adapter off, which no graph would notice."""

    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor

    tower = tower_of(model)
    patch(model)
    tower.blocks[0].attn.proj = Adapter(tower.blocks[0].attn.proj)
    for factor in (2.0, 1.0, 0.5):
        tower.blocks[0].attn.proj.factor = factor
        outputs = run_tower(tower, IMAGE)
        with hf_vit_accel.patched(model, fuse=False):
            assert_close(outputs, run_tower(tower, IMAGE))
    (why,) = status_of(model).eager
    assert "Adapter" in why and status_of(model).eager[why] == 3
    hf_vit_accel.patch(model, cuda_graphs=True, strict=True)
    with pytest.raises(FallbackError, match=r"not replayed from a CUDA graph: .*Adapter"):
        run_tower(tower, IMAGE)


def test_a_failed_capture_leaves_the_model_working(on_cpu: type[Recorder], model: nn.Module) -> None:
    expected = {grid: run_tower(tower_of(model), [grid]) for grid in ((1, 6, 8), (1, 8, 16), (1, 4, 4), (1, 20, 20))}
    patch(model)
    on_cpu.fail = RuntimeError("out of luck\nand more")
    for _ in range(2):
        for grid, outputs in expected.items():
            assert_close(run_tower(tower_of(model), [grid]), outputs)
    status = status_of(model)
    assert status.replays == status.captures == 0 and "3 captures failed" in (status.off or "")
    assert "capture failed: RuntimeError: out of luck" in status.eager
    on_cpu.fail = None
    hf_vit_accel.patch(model, cuda_graphs=SMALL, strict=True)
    assert_close(run_tower(tower_of(model), IMAGE), expected[1, 6, 8])
    assert status_of(model).replays == 1
    on_cpu.fail = RuntimeError("again")
    with pytest.raises(FallbackError, match="capture failed"):
        run_tower(tower_of(model), [(1, 2, 2)])


def test_backends_that_cannot_be_captured_say_so(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    monkeypatch.setattr(recorder, "why_not_graphs", lambda device: None)
    monkeypatch.setattr(store, "CudaRecorder", Recorder)
    hf_vit_accel.patch(model, cuda_graphs=True)
    run_tower(tower_of(model), IMAGE)
    assert status_of(model).eager == {"sdpa cannot be captured for other layouts": 1}
    hf_vit_accel.patch(model, cuda_graphs=True, strict=True)
    with pytest.raises(FallbackError, match="sdpa cannot be captured"):
        run_tower(tower_of(model), IMAGE)


def test_on_cpu_graphs_are_left_out_and_counted(model: nn.Module) -> None:
    hf_vit_accel.patch(model, cuda_graphs=True)
    run_tower(tower_of(model), IMAGE)
    assert status_of(model).eager == {"the tensors are on cpu, CUDA graphs need cuda": 1}


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_graph_goes(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, GraphConfig(max_tokens=128, exact_after=0, max_graphs=3))
    grids: list[Grid] = [[(1, 2, 2 * tokens)] for tokens in (4, 8, 12, 16, 20, 24)]
    for grid in [*grids, *grids]:
        run_tower(tower_of(model), grid)
    status = status_of(model)
    assert len(status.graphs) == 3 and status.captures == 12
    run_tower(tower_of(model), grids[-3])  # the oldest of three becomes the latest used
    run_tower(tower_of(model), [(1, 2, 56)])
    run_tower(tower_of(model), grids[-3])
    assert status_of(model).captures == 13, "the least recently used one went"
    taken = sum(nbytes for _, nbytes, _ in status.graphs)
    assert status.nbytes > 2 * taken, "status counts the memory that dropped graphs leave for later ones"


def test_a_deleted_model_is_freed(on_cpu: type[Recorder]) -> None:
    model = TINY["qwen2_vl"].build()
    on_cpu.record = lambda self, run: (run(), (lambda: None, 0))[1]
    patch(model)
    run_tower(tower_of(model), IMAGE)
    seen = weakref.ref(tower_of(model))
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


class Adapted(nn.Module):
    """Add a low-rank layer's result to a linear layer's, as an adapter does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora(x)


def _linear(tower: nn.Module) -> nn.Module:
    attention = tower.blocks[1].attn
    old = attention.proj
    attention.proj = copy.deepcopy(old)
    return old


def _adapter(tower: nn.Module) -> nn.Module:
    """Unload an adapter: only its base stays."""
    attention = tower.blocks[2].attn
    old = attention.proj
    attention.proj = old.base_layer
    return old.lora


@pytest.mark.parametrize(
    ("replace", "trains"),
    [(_linear, True), (_adapter, False)],
)
def test_the_next_call_frees_replaced_modules(
    on_cpu: type[Recorder],
    references: list[str],
    model: nn.Module,
    replace: Callable[[nn.Module], nn.Module],
    trains: bool,
) -> None:
    """Stored routes, graphs and features refer to the modules that they were made of."""
    tower = tower_of(model).requires_grad_(trains)
    grid = [(1, 4, 6), (1, 2, 2)]
    if replace is _adapter:
        tower.blocks[2].attn.proj = Adapted(tower.blocks[2].attn.proj).requires_grad_(trains)
    config = GraphConfig(max_tokens=128, exact_after=1)
    hf_vit_accel.patch(model, cuda_graphs=config, reuse=hf_vit_accel.ReuseConfig(across_calls=True))

    def call() -> None:
        outputs = outputs_of(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)))
        if trains:
            torch.stack([output.square().mean() for output in outputs[1:] or outputs]).sum().backward()
            tower.zero_grad(set_to_none=True)

    for _ in range(3):
        call()
    state = state_of(tower)
    assert (state.training_runner if trains else state.inference_runner).status().captures == (replace is not _adapter)
    replaced = [weakref.ref(parameter) for parameter in replace(tower).parameters()]
    call()
    gc.collect()
    assert replaced and not any(parameter() is not None for parameter in replaced)


def test_inference_mode_does_not_spoil_the_buffers(on_cpu: type[Recorder], model: nn.Module) -> None:
    tower = tower_of(model)
    expected = run_tower(tower, IMAGE)
    patch(model)
    pixels = pixels_for(tower, IMAGE)
    grid = torch.tensor(IMAGE)
    with torch.inference_mode():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)
    assert_close(run_tower(tower, IMAGE), expected)
    with torch.inference_mode():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)
    assert status_of(model).captures == 1


def test_warmup_captures_every_budget(on_cpu: type[Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    model = TINY["qwen2_5_vl"].build()  # windows are captured, too
    patch(model)
    status = hf_vit_accel.warmup(model, progress=False).towers[0].graphs
    assert status is not None and status.captures == len(status.budgets) == len(status.graphs)
    for grid in (IMAGE, [(1, 4, 18)], [(2, 8, 8)]):
        run_tower(tower_of(model), grid)
    assert not any("exactly" in label for label, _, _ in status_of(model).graphs)
    for _ in range(3):
        hf_vit_accel.warmup(model, progress=False)
    assert status_of(model).captures == status.captures, "nothing is left to capture for images of a few frames"
    hf_vit_accel.patch(model, cuda_graphs=GraphConfig(max_tokens=64, exact_after=0))
    with pytest.raises(ValueError, match="expected sizes as a list of calls"):
        hf_vit_accel.warmup(model, IMAGE)  # type: ignore[list-item]
    status = hf_vit_accel.warmup(model, [IMAGE, ((1, 24, 24), (1, 2, 2))]).towers[0].graphs
    assert status is not None
    assert sum("exactly" in label for label, _, _ in status.graphs) == 2
    assert "580 patches exactly" in "".join(capsys.readouterr())


def test_warmup_needs_graphs_or_sizes() -> None:
    model = TINY["qwen2_vl"].build()
    for unpatched_sizes in ([GRIDS["images"]], None):
        with pytest.raises(ValueError, match=r"^no tower to warm up: call hf_vit_accel\.patch\(model\) first"):
            hf_vit_accel.warmup(model, unpatched_sizes)
    with pytest.raises(ValueError, match=r"^expected sizes, since .* no graphs.*sizes=\[\["):
        hf_vit_accel.warmup(hf_vit_accel.patch(model))
    with pytest.raises(ValueError, match=r"^No sizes given"):
        hf_vit_accel.warmup(model, [])
    assert hf_vit_accel.warmup(model, [GRIDS["images"]], progress=False).towers[0].calls == 1
    wrong: list[Any] = [[[(1, -2, 8)]], [[(1.5, 4, 4)]], [[]], 5]
    for sizes in wrong:
        with pytest.raises(ValueError, match="expected sizes as a list of calls"):
            hf_vit_accel.warmup(model, sizes)


# --- on a GPU -------------------------------------------------------------------------------------------------------

CAPTURABLE = [backend.name for backend in BACKENDS if backend.replays_other_layouts]


def usable(attention: str) -> str:
    """Return a backend's name, or skip the test where it cannot run."""
    reasons = backends.backend_named(attention).reasons_against_machine()
    if reasons:
        pytest.skip("; ".join(reasons))
    return attention


def poison(graphs: runner.Runner) -> None:
    """Fill all static buffers with NaN."""
    for buffer in graphs._arena.values():
        buffer.fill_(float("nan"))
    for graph in graphs._graphs.values():
        graph.packed.fill_(251)
        graph.pixels_TP.fill_(float("nan"))
        for output in graph.outputs:
            output.fill_(float("nan"))


def assert_equal(outputs: Tensors, expected: Tensors) -> None:
    """Check that outputs are equal bit for bit."""
    for output, expected_output in zip(outputs, expected, strict=True):
        assert torch.equal(output, expected_output)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", CAPTURABLE)
def test_gpu_a_stream_of_layouts(model: nn.Module, attention: str) -> None:
    """Bit-equal to the eager fused tower at exact shapes, as exact as stock at padded ones."""
    tower = tower_of(model.to("cuda", torch.bfloat16))
    exact = copy.deepcopy(tower).float()
    rng = np.random.default_rng(0)
    grids = [draw_grid(rng) for _ in range(20)]
    grids += [[(1, 4, 12), (1, 4, 4)], [(1, 8, 8)], [(4, 4, 4)], [(1, 2, 32)], [(2, 4, 8)]] + [[(1, 40, 42)]] * 3
    hf_vit_accel.patch(tower, attention=usable(attention))
    eager = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    for exact_after in (0, 1):
        config = GraphConfig(max_tokens=128, exact_after=exact_after, max_graphs=20)
        hf_vit_accel.patch(tower, attention=attention, cuda_graphs=config, strict=True)
        replayed = []
        for seed, grid in enumerate(grids):
            poison(state_of(tower).inference_runner)
            replayed.append(run_tower(tower, grid, seed))
        for seed, (outputs, expected) in enumerate(zip(replayed, eager, strict=True)):
            if exact_after:
                assert_equal(outputs, expected)
                continue
            pixels = pixels_for(tower, grids[seed], seed, device="cuda", dtype=torch.bfloat16).float()
            with torch.no_grad():
                truth = outputs_of(exact(pixels, grid_thw=torch.tensor(grids[seed], device="cuda")))
            for output, eager_output, exact_output in zip(outputs, expected, truth, strict=True):
                bound = max(1.2 * relative_error(eager_output, exact_output), torch.finfo(torch.bfloat16).eps)
                assert relative_error(output, exact_output) <= bound, grids[seed]
        assert status_of(tower).replays >= len(grids) - 3 * (not exact_after)


@pytest.mark.gpu
def test_gpu_weights_and_memory(model: nn.Module) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    grid: Grid = [(1, 6, 8), (1, 12, 12)]
    hf_vit_accel.patch(tower)
    run_tower(tower, grid)  # libraries take their own workspaces
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    hf_vit_accel.patch(tower, cuda_graphs=SMALL, strict=True)
    run_tower(tower, grid)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.1)
    updated = run_tower(tower, grid)
    assert status_of(tower).captures == 1
    for parameter in tower.parameters():
        parameter.data = parameter.data * 1.1
    moved = run_tower(tower, grid)
    assert status_of(tower).captures == 2
    hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, grid), moved, 2e-2)
    assert relative_error(updated[1], moved[1]) > 2e-2
    hf_vit_accel.unpatch(tower)
    del updated, moved
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


@pytest.mark.gpu
def test_gpu_a_failed_capture_leaves_the_model_working(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    hf_vit_accel.patch(tower, attention="torch_varlen")  # of auto's, some serve no graph
    expected = run_tower(tower, IMAGE)
    hf_vit_accel.patch(tower, attention="torch_varlen", cuda_graphs=SMALL)
    encode = runner.encode

    def waits(*args: object) -> Tensors:
        outputs = encode(*args)
        outputs[0].sum().item()  # not allowed while a stream is captured
        return outputs

    monkeypatch.setattr(runner, "encode", waits)
    assert_close(run_tower(tower, IMAGE), expected)
    monkeypatch.setattr(runner, "encode", encode)
    (why,) = status_of(tower).eager
    assert "capture failed" in why
    assert_close(run_tower(tower, IMAGE), expected)
    assert_close(run_tower(tower, [(1, 8, 16)]), run_tower(tower, [(1, 8, 16)]))
    assert status_of(tower).replays == 2, "other shapes are captured"


@pytest.mark.gpu
def test_gpu_a_replay_waits_for_nothing(model: nn.Module) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    hf_vit_accel.patch(tower, cuda_graphs=SMALL, strict=True)
    pixels = pixels_for(tower, IMAGE, device="cuda", dtype=torch.bfloat16)
    on_gpu = torch.tensor(IMAGE, device="cuda")
    on_cpu = torch.tensor(IMAGE)
    with torch.no_grad():
        tower(pixels, grid_thw=on_cpu)
        torch.cuda.set_sync_debug_mode("error")
        try:
            tower(pixels, grid_thw=on_cpu)
            with pytest.raises(RuntimeError, match="synchronizing"):
                tower(pixels, grid_thw=on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
