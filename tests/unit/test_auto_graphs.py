"""`cuda_graphs="auto"`, the default: which calls are replayed, and the bounds that keep captures from ever hurting.

On a CPU a recorder stands in that replays by running again, on poisoned buffers.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from support.cpu_graphs import Masked, Recorder, status_of
from support.faults import raises
from support.graphs import Grid, patch
from support.patching import training_step
from support.towers import SHALLOW
from tiny import assert_close, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FlexConfig, GraphConfig, backends
from hf_vit_accel.backends import Rule
from hf_vit_accel.graphs import called, memory
from hf_vit_accel.graphs.policy import NO_ROOM
from hf_vit_accel.options import passes
from hf_vit_accel.tower.state import state_of

IMAGE: Grid = [(1, 6, 8)]
COMES_AGAIN = "a size is captured when it comes again"
EXACT_ONLY = "the backend replays exact shapes only, from the time that they came often"
FREE_CAPTURES = 5
REPLAYS_PER_CAPTURE = 8
"""What captures cost, as docs/cuda-graphs.md tells users."""


@pytest.fixture
def model() -> nn.Module:
    return SHALLOW.build()


def last_call(model: nn.Module) -> str:
    """Return what `status` says of the last inference call."""
    return str(status_of(model).last)


def test_a_size_is_captured_when_it_comes_again(on_cpu: type[Recorder], model: nn.Module) -> None:
    expected = run_tower(tower_of(model), IMAGE)
    hf_vit_accel.patch(model)  # "auto" is the default
    ways = []
    for _ in range(5):
        assert_close(run_tower(tower_of(model), IMAGE), expected)
        ways.append(last_call(model))
    padded = "replayed (captured at call 2)"
    exact = "replayed (captured at call 3)"
    assert ways == [f"eager: {COMES_AGAIN}", padded, exact, exact, exact]
    assert status_of(model).captures == 2 and status_of(model).eager == {COMES_AGAIN: 1}
    assert "last call  replayed (captured at call 3)" in str(hf_vit_accel.status(model))


class BrokenInGraphs(Masked):
    """The backend that exact replays take, and eager calls do not. It raises."""

    name = "torch_cudnn"
    attend = raises(RuntimeError("no engine found"))  # as cuDNN does for a shape that it does not know


def test_a_backend_that_fails_in_a_captured_step_is_disabled_and_another_is_captured(
    on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Inference meets such a fault in `test_faults_of_kernels.py`."""
    exact = Rule(kind="full", in_exact_graph=True, order=("torch_cudnn", "sdpa"), measured="")
    other = Rule(kind="full", order=("sdpa",), measured="")
    monkeypatch.setattr(backends, "AUTO", (exact, other))
    monkeypatch.setattr(backends, "BACKENDS", (BrokenInGraphs(), *backends.BACKENDS))
    tower = tower_of(model)
    patch(model, "auto")
    for grid in ([(1, 4, 4)], [(1, 8, 8)], [(1, 4, 8)], IMAGE):
        for _ in range(12):
            training_step(tower, grid)
    status = hf_vit_accel.status(model).towers[0]
    assert "no engine found" in state_of(tower).faults["torch_cudnn"] and status.backends == {"full": "sdpa"}
    graphs = status.training
    assert str(graphs.last).startswith("replayed") and graphs.off is None and len(graphs.graphs) >= 4


@pytest.mark.parametrize("strict", [False, True])
def test_a_named_backend_that_serves_one_layout_is_captured_when_a_shape_came_often(
    on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, model: nn.Module, strict: bool
) -> None:
    monkeypatch.setattr(Masked, "replays_other_layouts", False)
    patch(model, GraphConfig(max_tokens=128), attention="sdpa", strict=strict)
    assert ways_of(model, [IMAGE] * 2) == ["eager"] * 2 and last_call(model) == f"eager: {EXACT_ONLY}"
    assert ways_of(model, [IMAGE] * 2) == ["replayed"] * 2


def test_little_free_memory_prevents_captures(on_cpu: type[Recorder], model: nn.Module) -> None:
    """One graph takes more than an eighth of the free memory, which is known afterwards."""
    patch(model, "auto")
    on_cpu.free_bytes = 8 << 20
    on_cpu.nbytes = 2 << 20
    ways_of(model, [IMAGE, IMAGE, IMAGE, [(1, 4, 4)], [(1, 4, 4)]])
    assert status_of(model).captures == 1 and NO_ROOM in status_of(model).eager


def test_a_score_mod_is_never_captured(on_cpu: type[Recorder], model: nn.Module) -> None:
    """It may read tensors and numbers that a graph would keep as they were."""
    hf_vit_accel.patch(model, attention=FlexConfig(score_mod=lambda score, b, h, q, k: score * 0.5))
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model) is None


def test_graphs_go_when_memory_runs_out(on_cpu: type[Recorder], model: nn.Module) -> None:
    """Call the observer as torch does for a failed allocation of any program on the device."""
    runner = patch(model, "auto")
    expected = run_tower(tower_of(model), IMAGE)
    ways_of(model, [IMAGE] * 3)
    assert runner.status().graphs
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert not runner.status().graphs and not runner.static_buffers()
    for _ in range(4):
        assert_close(run_tower(tower_of(model), IMAGE), expected)
    assert not runner.status().graphs and "memory ran out" in last_call(model)
    hf_vit_accel.patch(model)
    assert ways_of(model, [IMAGE] * 2)[-1] == "replayed", "patching again allows graphs again"
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert ways_of(model, [IMAGE] * 2) == ["eager"] * 2
    hf_vit_accel.warmup(model, [IMAGE], progress=False)
    assert ways_of(model, [IMAGE]) == ["replayed"], "so does warmup"


class OutOfMemory(nn.Linear):
    """A third-party linear for whose call memory runs out: torch calls the observer, and frees what it keeps."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        memory._give_up_graphs(0, 1 << 40, 0, 0)
        return super().forward(input)


def test_graphs_stay_when_memory_runs_out_within_a_trial(on_cpu: type[Recorder], model: nn.Module) -> None:
    """A quantised linear (bitsandbytes) is tried for graphs in the middle of a decision about them."""
    runner = patch(model, "auto")
    ways_of(model, [IMAGE] * 3)
    assert runner.status().graphs
    why = called.reason_against_capture([OutOfMemory(4, 4)], torch.float32, torch.device("cpu"))
    assert why is None and runner.status().graphs


def test_a_store_that_another_thread_changes_meanwhile_is_passed_over() -> None:
    """torch raises its own error behind the observer, not one of ours (AttributeError, RuntimeError)."""

    class Changing:
        devices = iter([torch.device("cuda", 0), None])

        @property
        def device(self) -> torch.device | None:
            return next(self.devices)

        def give_up(self, why: str) -> bool:
            raise RuntimeError("OrderedDict mutated during iteration")

    store = Changing()
    memory._stores.add(store)
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert next(store.devices) is None, "the device was read once"


def ways_of(model: nn.Module, grids: list[Grid]) -> list[str]:
    """Call a tower with each grid; return how each call ran, up to its first word."""
    tower = tower_of(model)
    ways = []
    for grid in grids:
        run_tower(tower, grid)
        ways.append(last_call(tower).split()[0].rstrip(":"))
    return ways


SIZES: list[Grid] = [[(1, 4, 4 * width)] for width in range(1, 13)]


def test_dropped_graphs_are_captured_again_as_replays_pay_for_it(on_cpu: type[Recorder], model: nn.Module) -> None:
    """There are more kinds of calls than graphs, and those that stay are replayed."""
    runner = patch(model, "auto")
    runner.policy.thresholds = replace(runner.policy.thresholds, most_graphs=4)
    grids: list[Grid] = [[(1, 2, 2 * (32 // count))] * count for count in (1, 2, 4, 8, 16, 32)]
    ways = ways_of(model, grids * 20)
    status = status_of(model)
    assert ways[40:].count("replayed") > len(ways[40:]) // 2
    assert status.captures <= FREE_CAPTURES + status.replays // REPLAYS_PER_CAPTURE + 1


def test_status_names_the_way_of_the_last_call(
    on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    patch(model, "auto", max_rows=48)
    assert ways_of(model, [IMAGE] * 4)[-1] == "replayed"
    run_tower(tower_of(model), [(2, 6, 8)])
    assert last_call(model) == "eager: long calls of several passes"
    with tower_of(model).rotary_pos_emb.register_forward_hook(lambda *_: None):
        run_tower(tower_of(model), IMAGE)
    assert last_call(model) == "the original forward ran"
    assert ways_of(model, [IMAGE]) == ["replayed"]
    with monkeypatch.context() as patches, pytest.raises(MemoryError):
        patches.setattr(Masked, "attend", Mock(side_effect=MemoryError))
        run_tower(tower_of(model), [(1, 4, 4)])
    assert last_call(model).startswith("replayed"), "the call that raised has no way"
    monkeypatch.setattr(passes, "AUTOMATIC_ON", ())  # as after `model.cpu()`
    run_tower(tower_of(model), IMAGE)
    assert last_call(model) == "eager: such calls are never replayed"


def test_captures_that_run_out_of_memory_are_given_up_until_warmup(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, "auto")
    on_cpu.fail = torch.OutOfMemoryError("CUDA out of memory")
    assert set(ways_of(model, SIZES * 4)) == {"eager"}
    assert status_of(model).eager["capture failed: OutOfMemoryError: CUDA out of memory"] == 3
    assert "3 captures failed" in status_of(model).off
    on_cpu.fail = None
    hf_vit_accel.warmup(model, SIZES[:1], progress=False)
    assert ways_of(model, SIZES[:1]) == ["replayed"]
