"""The runner of inference graphs without a GPU: its recorder replays by running the encoder again.

Before each replay every static buffer is poisoned, so a graph may read only what was written for it. On a GPU the
captures are real.
"""

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support.backends import skip_for
from support.cpu_graphs import SMALL, Recorder, status_of
from support.graphs import Grid, draw_grid, patch
from support.patching import training_step
from tiny import GRIDS, TINY, all_equal, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, GraphConfig, backends
from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.graphs import budgets, runner
from hf_vit_accel.graphs.recorder import CudaRecorder

Tensors = list[torch.Tensor]
IMAGE: Grid = [(1, 6, 8)]


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


class Event:
    """What a recorder sees of an event."""

    stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream


class Stream:
    """What a recorder sees of a stream."""

    device_index = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waited_for: list[Any] = []
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.stream)


@pytest.mark.parametrize("has_waited", [True, False])
def test_a_use_waits_for_the_last_one_on_another_stream(monkeypatch: pytest.MonkeyPatch, has_waited: bool) -> None:
    """The first call of decoding makes its recorder in its midst, and so has not waited."""
    device = torch.device("cuda", 1)
    first, second = Stream(), Stream()
    current = {device: first}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[device].cuda_stream, raising=False)
    recorder = CudaRecorder(device)
    if has_waited:
        recorder.wait()
    recorder.done()
    current[device] = second
    recorder.wait()
    assert second.waited_for == [first]
    recorder.wait()
    assert second.waited_for == [first], "a stream need not wait for itself"


def test_on_cpu_graphs_are_left_out_and_counted(model: nn.Module) -> None:
    hf_vit_accel.patch(model, cuda_graphs=True)
    run_tower(tower_of(model), IMAGE)
    assert status_of(model).eager == {"the tensors are on cpu, CUDA graphs need cuda": 1}


def test_the_next_call_frees_replaced_modules(on_cpu: type[Recorder], references: list[str], model: nn.Module) -> None:
    """Stored routes and graphs refer to the modules that they were made of."""
    tower = tower_of(model)
    grid = [(1, 4, 6), (1, 2, 2)]
    hf_vit_accel.patch(model, cuda_graphs=GraphConfig(max_tokens=128, exact_after=1))

    for _ in range(3):
        training_step(tower, grid)
    assert hf_vit_accel.status(model).towers[0].training.captures
    attention = tower.blocks[1].attn
    replaced = [weakref.ref(parameter) for parameter in attention.proj.parameters()]
    attention.proj = copy.deepcopy(attention.proj)
    training_step(tower, grid)
    gc.collect()
    assert replaced and not any(parameter() is not None for parameter in replaced)


@pytest.mark.parametrize("exact_after", [0, 1], ids=["padded", "exact"])
def test_a_graph_serves_layouts_of_equal_sizes(on_cpu: type[Recorder], model: nn.Module, exact_after: int) -> None:
    """It reads the positions of the layout that it replays, and those of the former one no longer."""
    tower = tower_of(model)
    strip: Grid = [(1, 2, 24)]
    expected = {tuple(grid): run_tower(tower, grid) for grid in (IMAGE, strip)}
    patch(model, GraphConfig(max_tokens=128, exact_after=exact_after))
    for grid in (IMAGE, strip, strip, IMAGE, IMAGE):
        assert_close(run_tower(tower, grid), expected[tuple(grid)])
    status = status_of(model)
    assert status.captures <= 2 and status.replays == 5  # windows of a strip are others


@pytest.mark.parametrize("exact_after", [0, 1], ids=["padded", "exact"])
def test_outputs_of_a_call_stay_after_the_next_one(on_cpu: type[Recorder], model: nn.Module, exact_after: int) -> None:
    """The caller gets copies of the buffers of a graph."""
    patch(model, GraphConfig(max_tokens=128, exact_after=exact_after))
    tower = tower_of(model)
    kept = [
        (outputs, [output.clone() for output in outputs]) for outputs in (run_tower(tower, IMAGE) for _ in range(4))
    ]
    run_tower(tower, IMAGE, seed=9)
    for outputs, before in kept:
        assert all(map(torch.equal, outputs, before))
    assert hf_vit_accel.status(model).towers[0].graphs.replays >= 3


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
    patch(model, GraphConfig(max_tokens=32, exact_after=0))
    status = hf_vit_accel.warmup(model, progress=False).towers[0].graphs
    assert status is not None and status.captures == len(status.budgets) == len(status.graphs)
    for grid in (IMAGE, [(1, 4, 18)], [(2, 8, 8)]):
        run_tower(tower_of(model), grid)
    assert not any("exactly" in label for label, _, _ in status_of(model).graphs)
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


@pytest.mark.parametrize("largest", [1, 4, 5, 64, 1280, 4096])
def test_the_ladder_pads_little(largest: int) -> None:
    steps = budgets.ladder(largest)
    assert steps[-1] == largest and list(steps) == sorted(set(steps))
    tokens = np.arange(16, largest + 1)
    if len(tokens):
        padded = np.array(steps)[np.searchsorted(steps, tokens)]
        assert (padded / tokens).max() < 1.25 and (padded / tokens).mean() < 1.12
        assert (padded - tokens)[tokens > 512].max(initial=0) < 64


# --- on a GPU -------------------------------------------------------------------------------------------------------

CAPTURABLE = [backend.name for backend in BACKENDS if backend.replays_other_layouts]


@pytest.mark.gpu
@pytest.mark.usefixtures("kept_recorder")
@pytest.mark.parametrize("attention", CAPTURABLE)
def test_gpu_a_stream_of_layouts(model: nn.Module, attention: str) -> None:
    """Bit-equal to the eager fused tower at exact shapes, as exact as stock at padded ones."""
    skip_for(backends.backend_named(attention).reasons_against_machine())
    tower = tower_of(model.to("cuda", torch.bfloat16))
    exact = copy.deepcopy(tower).float()
    rng = np.random.default_rng(0)
    grids = [draw_grid(rng) for _ in range(20)]
    grids += [[(1, 4, 12), (1, 4, 4)], [(1, 8, 8)], [(4, 4, 4)], [(1, 2, 32)], [(2, 4, 8)]] + [[(1, 40, 42)]] * 3
    hf_vit_accel.patch(tower, attention=attention)
    eager = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    for exact_after in (0, 1):
        config = GraphConfig(max_tokens=128, exact_after=exact_after, max_graphs=20)
        patch(tower, config, attention=attention, strict=True)
        replayed = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
        for seed, (outputs, expected) in enumerate(zip(replayed, eager, strict=True)):
            if exact_after:
                assert all_equal(outputs, expected)
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
