"""`cuda_graphs="auto"`, the default: which calls are replayed, and the bounds that keep captures from ever hurting.

On a CPU a recorder stands in that replays by running again, on poisoned buffers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.cpu_graphs import Masked, Recorder, status_of
from support.graphs import Grid, patch, patch_training
from support.towers import SHALLOW
from tiny import assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FlexConfig, GraphConfig, ReuseConfig, backends
from hf_vit_accel.backends import Plan, Request, Rule
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs import memory
from hf_vit_accel.graphs.budgets import Bin
from hf_vit_accel.graphs.policy import NO_ROOM
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.options import passes as one_pass_module
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


def test_the_default_is_auto(on_cpu: type[Recorder], model: nn.Module) -> None:
    assert hf_vit_accel.patch(model) is model
    run_tower(tower_of(model), IMAGE)
    run_tower(tower_of(model), IMAGE)
    assert status_of(model).replays == 1
    hf_vit_accel.patch(model, cuda_graphs=False)
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model) is None


def test_a_size_is_captured_when_it_comes_again(on_cpu: type[Recorder], model: nn.Module) -> None:
    expected = run_tower(tower_of(model), IMAGE)
    patch(model, "auto")
    ways = []
    for _ in range(5):
        assert_close(run_tower(tower_of(model), IMAGE), expected)
        ways.append(last_call(model))
    padded = "replayed (captured at the 2nd call)"
    exact = "replayed (captured at the 3rd call)"
    assert ways == [f"eager: {COMES_AGAIN}", padded, exact, exact, exact]
    assert status_of(model).captures == 2 and status_of(model).eager == {COMES_AGAIN: 1}
    assert "last call  replayed (captured at the 3rd call)" in str(hf_vit_accel.status(model))


ASKED_FOR = pytest.param(GraphConfig(max_tokens=128), id="asked for", marks=pytest.mark.matrix)
BOTH_KINDS = pytest.mark.parametrize("config", ["auto", ASKED_FOR])
"""Graphs that nobody asked for, and graphs that the user did."""


class OnlyInGraphs(Masked):
    """The backend that exact replays take, and eager calls do not. It raises, always or in captures only."""

    name = "torch_cudnn"
    raises = True

    def reasons_against(self, request: Request) -> list[str]:
        """Refuse replays of other layouts where they are not served."""
        is_refused = request.replay == "padded" and not self.replays_other_layouts
        return [*super().reasons_against(request), *(["its launches depend on the layout"] if is_refused else [])]

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Attend, or raise."""
        if self.raises:
            raise RuntimeError("no engine found")
        return super().attend(q_THD, k_THD, v_THD, plan)


@pytest.fixture
def only_in_graphs(on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> OnlyInGraphs:
    """Let graphs of exact shapes attend by a backend of their own."""
    backend = OnlyInGraphs()
    exact = Rule(kind="full", in_exact_graph=True, order=("torch_cudnn", "sdpa"), measured="")
    other = Rule(kind="full", order=("sdpa",), measured="")
    monkeypatch.setattr(backends, "AUTO", (exact, other))
    all_backends = tuple(backend if each.name == backend.name else each for each in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", all_backends)
    return backend


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_backend_that_fails_in_a_capture_is_disabled_and_another_is_captured(
    only_in_graphs: OnlyInGraphs, model: nn.Module, grad: bool
) -> None:
    tower = tower_of(model)
    expected = run_tower(copy.deepcopy(tower), IMAGE)
    patch(model, "auto")
    for grid in ([(1, 4, 4)], [(1, 8, 8)], [(1, 4, 8)], IMAGE):
        for _ in range(12):
            if grad:
                train(tower, grid)
            else:
                outputs = run_tower(tower, grid)
    status = hf_vit_accel.status(model).towers[0]
    graphs = status.training if grad else status.graphs
    assert "no engine found" in state_of(tower).faults["torch_cudnn"] and status.backends == {"full": "sdpa"}
    assert str(graphs.last).startswith("replayed") and graphs.off is None and len(graphs.graphs) >= 4
    if not grad:
        assert_close(outputs, expected)


@BOTH_KINDS
def test_a_backend_that_fails_in_captures_only_stays_enabled(
    only_in_graphs: OnlyInGraphs,
    on_cpu: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    config: GraphConfig | str,
) -> None:
    """Whatever fails in a capture may be the capture's fault. So the backend runs eagerly, which decides."""
    record = Recorder.record

    def failing(self: Recorder, *runs: Callable[[], None], **options: Any) -> Any:
        only_in_graphs.raises = True
        try:
            return record(self, *runs, **options)
        finally:
            only_in_graphs.raises = False

    monkeypatch.setattr(on_cpu, "record", failing)
    only_in_graphs.raises = False
    tower = tower_of(model)
    expected = run_tower(copy.deepcopy(tower), IMAGE)
    patch(model, config)
    ways = []
    for _ in range(5):
        assert_close(run_tower(tower, IMAGE), expected)
        ways.append(last_call(model))
    assert not state_of(tower).faults and "capture failed: Fault: torch_cudnn" in ways[2]
    assert ways[3] == ways[4] == ways[1], "padded, as before"
    assert ways[1].startswith("replayed")


def test_large_calls_stay_eager(on_cpu: type[Recorder], model: nn.Module) -> None:
    runner = patch(model, "auto")
    runner.policy.thresholds = replace(runner.policy.thresholds, most_rows=47)
    assert ways_of(model, [IMAGE] * 4) == ["eager"] * 4 and "keep the GPU busy" in last_call(model)
    assert ways_of(model, [[(1, 4, 4)]] * 2) == ["eager", "replayed"]


@pytest.fixture
def slower_if_padded(on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager calls and exact graphs attend by a backend that serves one layout, padded graphs by another."""
    backend = OnlyInGraphs()
    monkeypatch.setattr(backend, "raises", False)
    monkeypatch.setattr(backend, "replays_other_layouts", False)
    monkeypatch.setattr(backends, "AUTO", (Rule(kind="full", order=("torch_cudnn", "sdpa"), measured=""),))
    all_backends = tuple(backend if each.name == backend.name else each for each in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", all_backends)


def test_padding_waits_where_it_needs_a_slower_backend(slower_if_padded: None, model: nn.Module) -> None:
    """Above some rows the exact shape is awaited, which any backend can replay."""
    for padded_rows, second in ((47, "eager"), (48, "replayed")):
        runner = patch(model, "auto")
        runner.policy.thresholds = replace(runner.policy.thresholds, padded_rows=padded_rows)
        assert ways_of(model, [IMAGE] * 4) == ["eager", second, "replayed", "replayed"]
        assert hf_vit_accel.status(model).towers[0].backends == {"full": "torch_cudnn"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_named_backend_that_serves_one_layout_is_captured_when_a_shape_came_often(
    only_in_graphs: OnlyInGraphs, model: nn.Module, strict: bool
) -> None:
    only_in_graphs.raises = False
    only_in_graphs.replays_other_layouts = False
    patch(model, GraphConfig(max_tokens=128), attention="torch_cudnn", strict=strict)
    ways = []
    for _ in range(4):
        run_tower(tower_of(model), IMAGE)
        ways.append(last_call(model))
    assert ways[:2] == [f"eager: {EXACT_ONLY}"] * 2 and ways[2] == ways[3] == "replayed (captured at the 3rd call)"
    assert hf_vit_accel.status(model).towers[0].backends == {"full": "torch_cudnn"}


def test_a_named_backend_that_failed_leaves_its_calls_to_one_that_can_be_padded(
    only_in_graphs: OnlyInGraphs, model: nn.Module
) -> None:
    only_in_graphs.replays_other_layouts = False
    patch(model, GraphConfig(max_tokens=128), attention="torch_cudnn")
    for width in (4, 6, 8, 10):
        run_tower(tower_of(model), [(1, 4, width)])
    assert status_of(model).replays == 4 and "torch_cudnn" in state_of(tower_of(model)).faults


def test_little_free_memory_prevents_captures(on_cpu: type[Recorder], model: nn.Module) -> None:
    on_cpu.free_bytes = 4000  # an eighth is less than one graph needs
    patch(model, "auto")
    for _ in range(6):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model).captures == 0 and "too little memory" in last_call(model)
    on_cpu.free_bytes = 8 << 20
    on_cpu.nbytes = 2 << 20  # one graph takes more than an eighth, which is known afterwards
    for grid in (IMAGE, IMAGE, IMAGE, [(1, 4, 4)], [(1, 4, 4)]):
        run_tower(tower_of(model), grid)
    status = status_of(model)
    assert status.captures == 1 and NO_ROOM in status.eager


def encode_when_no_graph_is_held(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager calls run out of memory as long as graphs are held."""
    encode = one_pass_module.encode

    def encode_or_run_out(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if runner._graphs:
            memory._give_up_graphs(0, 1 << 40, 0, 0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(*args, **kwargs)

    monkeypatch.setattr(one_pass_module, "encode", encode_or_run_out)


def test_an_eager_call_finds_the_memory_of_graphs(
    on_cpu: type[Recorder], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_size: Grid = [(1, 8, 20)]
    expected = run_tower(tower_of(hf_vit_accel.patch(copy.deepcopy(model), cuda_graphs=False)), new_size)
    runner = patch(model, "auto")
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert runner._graphs
    encode_when_no_graph_is_held(runner, monkeypatch)
    assert_close(run_tower(tower_of(model), new_size), expected)
    with pytest.raises(torch.OutOfMemoryError):  # nothing is left that could be dropped
        monkeypatch.setattr(runner, "_graphs", {"held": "for ever"})
        run_tower(tower_of(model), new_size)


def test_a_profiler_of_another_thread_prevents_captures(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, "auto")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        thread = threading.Thread(target=ways_of, args=(model, [IMAGE] * 4))
        thread.start()
        thread.join()
    assert status_of(model).captures == 0
    assert last_call(model) == "eager: no graph is captured under a profiler"
    run_tower(tower_of(model), IMAGE)
    assert last_call(model).startswith("replayed")


def test_new_sizes_are_replayed_after_graphs_of_others_filled_the_memory(
    on_cpu: type[Recorder], model: nn.Module
) -> None:
    on_cpu.free_bytes = 1 << 30
    on_cpu.nbytes = on_cpu.free_bytes // 8 // 5
    patch(model, "auto")
    tower = tower_of(model)
    for _ in range(20):
        for width in (4, 8, 12, 16, 20, 24):
            run_tower(tower, [(1, 4, width)])
    held_before = {label for label, _, _ in status_of(model).graphs}
    replays_before = status_of(model).replays
    for _ in range(30):
        for width in (28, 32, 40):
            run_tower(tower, [(1, 4, width)])
    status = status_of(model)
    assert status.eager[NO_ROOM] >= 16 and {label for label, _, _ in status.graphs}.isdisjoint(held_before)
    assert status.replays - replays_before > 45, "more than half of the new calls"
    assert status.nbytes <= 7 * on_cpu.nbytes


def test_a_score_mod_is_never_captured(on_cpu: type[Recorder], model: nn.Module) -> None:
    """It may read tensors and numbers that a graph would keep as they were."""
    hf_vit_accel.patch(model, attention=FlexConfig(score_mod=lambda score, b, h, q, k: score * 0.5))
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model) is None


def test_nothing_is_counted_on_a_cpu(model: nn.Module) -> None:
    hf_vit_accel.patch(model)
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model) is None and "graphs" not in str(hf_vit_accel.status(model))


def test_strict_accepts_calls_that_stay_eager(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, "auto", strict=True)
    on_cpu.fail = RuntimeError("no capture")
    for _ in range(4):
        run_tower(tower_of(model), IMAGE)
    assert status_of(model).replays == 0


def test_graphs_go_when_memory_runs_out(on_cpu: type[Recorder], model: nn.Module) -> None:
    """Call the observer as torch does for a failed allocation of any program on the device."""
    runner = patch(model, "auto")
    expected = run_tower(tower_of(model), IMAGE)
    for _ in range(3):
        run_tower(tower_of(model), IMAGE)
    assert runner._graphs and runner in memory._stores
    memory._give_up_graphs(0, 1 << 40, 0, 0)
    assert not runner._graphs and not runner._arena
    for _ in range(4):
        assert_close(run_tower(tower_of(model), IMAGE), expected)
    assert not runner._graphs and "memory ran out" in last_call(model)
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), IMAGE)
    run_tower(tower_of(model), IMAGE)
    assert status_of(model).replays == 1, "patching again allows graphs again"


def ways_of(model: nn.Module, grids: list[Grid]) -> list[str]:
    """Call a tower with each grid; return how each call ran, up to its first word."""
    tower = tower_of(model)
    ways = []
    for grid in grids:
        run_tower(tower, grid)
        ways.append(last_call(tower).split()[0].rstrip(":"))
    return ways


SIZES: list[Grid] = [[(1, 4, 4 * width)] for width in range(1, 13)]


def test_sizes_that_were_warmed_up_are_replayed_from_the_first_call(on_cpu: type[Recorder], model: nn.Module) -> None:
    """Replays need not pay for captures that the user asked for, and other sizes are captured as without them."""
    patch(model, "auto")
    hf_vit_accel.warmup(model, SIZES, progress=False)
    assert status_of(model).captures == len(SIZES)
    assert ways_of(model, SIZES) == ["replayed"] * len(SIZES)
    assert ways_of(model, [[(1, 8, 28)]] * 3) == ["eager", "replayed", "replayed"]


def test_more_kinds_of_calls_than_graphs_are_replayed_in_part(on_cpu: type[Recorder], model: nn.Module) -> None:
    """Dropped graphs are captured again as replays pay for it, and graphs that stay are replayed."""
    runner = patch(model, "auto")
    runner.policy.thresholds = replace(runner.policy.thresholds, most_graphs=4)
    grids: list[Grid] = [[(1, 2, 2 * (32 // count))] * count for count in (1, 2, 4, 8, 16, 32)]
    ways = ways_of(model, grids * 20)
    status = status_of(model)
    assert ways[40:].count("replayed") > len(ways[40:]) // 2
    assert status.captures <= FREE_CAPTURES + status.replays // REPLAYS_PER_CAPTURE + 1


# --- training ---------------------------------------------------------------------------------------------------------


def train(tower: nn.Module, grid: Grid) -> dict[str, torch.Tensor]:
    """Run a forward and backward; return the gradients, and clear them."""
    pixels = pixels_for(tower, grid)
    outputs = outputs_of(tower(pixels, grid_thw=torch.tensor(grid)))
    torch.stack([output.square().sum() for output in outputs[1:]]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in tower.named_parameters() if parameter.grad is not None}
    tower.zero_grad(set_to_none=True)
    return gradients


def test_steps_are_captured_when_their_layout_comes_often(on_cpu: type[Recorder], model: nn.Module) -> None:
    stock = tower_of(copy.deepcopy(model))
    tower = tower_of(model)
    expected = train(stock, IMAGE)
    runner = patch_training(tower, "auto")
    for _ in range(5):
        gradients = train(tower, IMAGE)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert runner.status().captures == 1 and runner.status().replays == 3
    assert "training" in str(hf_vit_accel.status(model))


FOUR_SIZES: list[Grid] = [[(1, 4, 4)], [(1, 4, 8)], [(1, 8, 8)], [(1, 8, 12)]]
TWO_PASSES: Grid = [(1, 6, 8), (1, 4, 4)]
"""Two passes where one has at most 48 rows."""


def test_exact_graphs_that_the_user_ruled_out_are_not_awaited(only_in_graphs: OnlyInGraphs, model: nn.Module) -> None:
    only_in_graphs.raises = False
    only_in_graphs.replays_other_layouts = False
    never_exact = GraphConfig(max_tokens=128, exact_after=0)
    patch(model, never_exact, attention="torch_cudnn")
    assert ways_of(model, [IMAGE] * 4) == ["eager"] * 4
    assert "exact_after=0" in last_call(model)
    patch(model, never_exact, attention="torch_cudnn", strict=True)
    with pytest.raises(hf_vit_accel.FallbackError, match="exact_after=0"):
        run_tower(tower_of(model), IMAGE)


def test_strict_does_not_raise_for_a_graph_that_nobody_asked_for(
    only_in_graphs: OnlyInGraphs, model: nn.Module
) -> None:
    """A backend that only the exact graph would use fails in the capture. The eager call has what was asked for."""
    patch(model, "auto", strict=True)
    assert ways_of(model, [IMAGE] * 6)[-1] == "replayed"


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
    monkeypatch.setattr(one_pass_module, "AUTOMATIC_ON", ())  # as after `model.cpu()`
    run_tower(tower_of(model), IMAGE)
    assert last_call(model) == "eager: such calls are never replayed"


def test_a_call_of_which_one_pass_runs_eagerly_is_reported_as_eager(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, GraphConfig(max_tokens=8, exact_after=0), max_rows=48)
    assert ways_of(model, [TWO_PASSES]) == ["eager"] and status_of(model).replays == 1


def test_a_call_whose_features_are_all_known_is_reported_as_neither(on_cpu: type[Recorder], model: nn.Module) -> None:
    hf_vit_accel.patch(model, reuse=ReuseConfig(across_calls=True))
    for seed in (0, 1, 2, 3, 3):
        run_tower(tower_of(model), IMAGE, seed)
    assert last_call(model).startswith("no image was encoded")


def test_strict_pads_a_call_whose_exact_capture_fails(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, GraphConfig(max_tokens=128, exact_after=3), strict=True)
    ways_of(model, [FOUR_SIZES[0], FOUR_SIZES[0], FOUR_SIZES[2], FOUR_SIZES[2]])
    on_cpu.fail = torch.OutOfMemoryError("CUDA out of memory")
    assert ways_of(model, [FOUR_SIZES[0], FOUR_SIZES[2], FOUR_SIZES[0]]) == ["replayed"] * 3
    with pytest.raises(hf_vit_accel.FallbackError, match="capture failed: OutOfMemoryError"):
        run_tower(tower_of(model), FOUR_SIZES[3])


def run_out_from(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory run out in captures of so many rows or more."""
    capture = Runner._capture

    def failing(self: Runner, batch: Any, route: Route, bin_: Bin, recorder: Any) -> Any:
        if route.metadata.rows >= rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(self, batch, route, bin_, recorder)

    monkeypatch.setattr(Runner, "_capture", failing)


def test_captures_that_run_out_of_memory_are_given_up_until_warmup(on_cpu: type[Recorder], model: nn.Module) -> None:
    patch(model, "auto")
    on_cpu.fail = torch.OutOfMemoryError("CUDA out of memory")
    assert set(ways_of(model, SIZES * 4)) == {"eager"}
    assert status_of(model).eager["capture failed: OutOfMemoryError: CUDA out of memory"] == 3
    assert "3 captures failed" in status_of(model).off
    on_cpu.fail = None
    hf_vit_accel.warmup(model, SIZES[:1], progress=False)
    assert ways_of(model, SIZES[:1]) == ["replayed"]


@BOTH_KINDS
def test_warmup_captures_what_fits(
    on_cpu: type[Recorder], model: nn.Module, monkeypatch: pytest.MonkeyPatch, config: GraphConfig | str
) -> None:
    """A size that runs out of memory keeps `warmup` from no other, also shortly after another such capture."""
    run_out_from(96, monkeypatch)
    patch(model, config)
    ways_of(model, [FOUR_SIZES[3]] * 3)
    hf_vit_accel.warmup(model, sizes=[FOUR_SIZES[3], *FOUR_SIZES[:3]], progress=False)
    assert status_of(model).captures == 3
    assert ways_of(model, FOUR_SIZES[:3]) == ["replayed"] * 3


@BOTH_KINDS
def test_calls_that_no_backend_can_pad_are_captured_exactly(
    on_cpu: type[Recorder], model: nn.Module, monkeypatch: pytest.MonkeyPatch, config: GraphConfig | str
) -> None:
    """Only sdpa serves fp32, for example. No size makes up a quarter of the calls."""
    monkeypatch.setattr(Masked, "replays_other_layouts", False)
    patch(model, config)
    sizes: list[Grid] = [[(1, 4, 4 * width)] for width in range(1, 7)]
    assert ways_of(model, sizes * 12)[-6:] == ["replayed"] * 6
