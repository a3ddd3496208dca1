"""CUDA graphs as a state machine: random calls, changes and faults, and what must hold after every one of them.

On a CPU a recorder stands in that replays by running again, on poisoned buffers. No rule knows how the policy decides:

- outputs and gradients are stock's,
- captures stay within what replays have paid for,
- memory stays within its bound,
- after any fault, at any point, every later call is answered.
"""

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.cpu_graphs import Masked, Recorder
from support.graphs import Grid, patch, patch_training
from support.towers import SHALLOW
from tiny import assert_close, outputs_of, pixels_for, tower_of

import hf_vit_accel
from hf_vit_accel import GraphConfig
from hf_vit_accel.graphs import memory

GRIDS: dict[str, Grid] = {
    "small": [(1, 4, 4)],
    "image": [(1, 6, 8)],
    "strip": [(1, 2, 24)],  # as many rows as "image"
    "two": [(1, 4, 6), (1, 6, 4)],  # as many rows, in another layout
    "clip": [(3, 4, 4)],
    "large": [(1, 16, 16), (1, 12, 8)],
}
FREE_CAPTURES = 5
STALE_TIMES = 4
REPLAYS_PER_CAPTURE = 8
CALLS_PER_CAPTURE = 256
"""What captures cost, as docs/cuda-graphs.md tells users."""

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
FAULTS = st.sampled_from([OUT_OF_MEMORY, RuntimeError("operation not permitted when stream is capturing")])


def run_out() -> None:
    raise OUT_OF_MEMORY


class GraphMachine(RuleBasedStateMachine):
    """A patched tower beside a stock one that sees the same changes."""

    recorder: type[Recorder]
    config: GraphConfig | str = "auto"

    def __init__(self) -> None:
        super().__init__()
        self.recorder.fail = None
        self.recorder.free_bytes = 64 << 30
        self.recorder.nbytes = 1000
        self.attend_faults: list[Callable[[], None]] = []
        self.calls = 0
        self.seed = 0
        self.warmed_up = 0
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @initialize()
    def build(self) -> None:
        self.stock: Any = SHALLOW.build()
        self.model: Any = copy.deepcopy(self.stock)
        self.patch()

    def patch(self) -> None:
        patch(self.model, self.config)
        patch_training(tower_of(self.model), self.config)
        self.warmed_up = 0

    @property
    def towers(self) -> tuple[Any, Any]:
        return tower_of(self.stock), tower_of(self.model)

    def run(self, grid: Grid, *, grad: bool, **options: bool) -> None:
        """Make a call of both towers, and a backward of both; compare all results."""
        self.calls += 1
        self.seed += 1
        results = []
        for tower in self.towers:
            pixels_TP = pixels_for(tower, grid, self.seed)
            tower.zero_grad()
            with torch.set_grad_enabled(grad):
                outputs = outputs_of(tower(pixels_TP, grid_thw=torch.tensor(grid), **options))
            if grad and any(output.requires_grad for output in outputs):
                sum((output * output).sum() for output in outputs[1:]).backward()
            gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
            results.append(([output.detach() for output in outputs], gradients))
        (expected, expected_gradients), (ours, our_gradients) = results
        assert_close(ours, expected)
        self.kept = [*self.kept[-8:], *((output, output.clone()) for output in ours)]
        assert len(our_gradients) == len(expected_gradients)
        if expected_gradients:
            assert_close(our_gradients, expected_gradients, 1e-4)

    @rule(name=st.sampled_from(sorted(GRIDS)), count=st.integers(1, 4), grad=st.booleans())
    def call(self, name: str, count: int, grad: bool) -> None:
        for _ in range(count):
            self.run(GRIDS[name], grad=grad)

    @rule(grad=st.booleans())
    def call_all(self, grad: bool) -> None:
        for grid in GRIDS.values():
            self.run(grid, grad=grad)

    @rule(names=st.lists(st.sampled_from(sorted(GRIDS)), min_size=2, max_size=3))
    def call_in_threads(self, names: list[str]) -> None:
        stock, tower = self.towers
        inputs = []
        for name in names:
            self.seed += 1
            inputs.append((pixels_for(tower, GRIDS[name], self.seed), torch.tensor(GRIDS[name])))

        def work(tower: Any, pixels_TP: torch.Tensor, grid_N3: torch.Tensor) -> list[torch.Tensor]:
            with torch.no_grad():
                return outputs_of(tower(pixels_TP, grid_thw=grid_N3))

        with ThreadPoolExecutor(len(names)) as threads:
            answers = [threads.submit(work, tower, *of_call) for of_call in inputs]
        self.calls += len(names)
        for answer, of_call in zip(answers, inputs, strict=True):
            assert_close(answer.result(), work(stock, *of_call))

    @rule(first=st.sampled_from(sorted(GRIDS)), second=st.sampled_from(sorted(GRIDS)), reverse=st.booleans())
    def train_on_two_calls_at_once(self, first: str, second: str, reverse: bool) -> None:
        """As a loss over two pictures does: both forwards come before any backward."""
        self.calls += 2
        self.seed += 1
        gradients = []
        for tower in self.towers:
            tower.zero_grad()
            losses = []
            for name in (first, second):
                pixels_TP = pixels_for(tower, GRIDS[name], self.seed)
                outputs = outputs_of(tower(pixels_TP, grid_thw=torch.tensor(GRIDS[name])))
                losses.append(torch.stack([(output * output).sum() for output in outputs[1:]]).sum())
            if losses[0].requires_grad:
                for loss in losses[::-1] if reverse else losses:
                    loss.backward()
            gradients.append([parameter.grad for parameter in tower.parameters() if parameter.grad is not None])
        assert len(gradients[0]) == len(gradients[1])
        if gradients[0]:
            assert_close(gradients[1], gradients[0], 1e-4)

    @rule(precision=st.sampled_from(["highest", "high"]))
    def set_precision(self, precision: str) -> None:
        """A CPU computes alike, but graphs of one setting serve no call of the other."""
        torch.set_float32_matmul_precision(precision)

    @rule(name=st.sampled_from(sorted(GRIDS)))
    def call_for_hidden_states(self, name: str) -> None:
        self.run(GRIDS[name], grad=False, output_hidden_states=True)

    @rule(name=st.sampled_from(sorted(GRIDS)))
    def warm_up(self, name: str) -> None:
        before = hf_vit_accel.status(self.model).towers[0].graphs
        hf_vit_accel.warmup(self.model, sizes=[GRIDS[name]], progress=False)
        graphs = hf_vit_accel.status(self.model).towers[0].graphs
        self.calls += 1
        self.warmed_up += (graphs.captures if graphs else 0) - (before.captures if before else 0)

    def teardown(self) -> None:
        torch.set_float32_matmul_precision("highest")

    @rule(factor=st.sampled_from([0.9, 1.1]))
    def write_weights(self, factor: float) -> None:
        with torch.no_grad():
            for tower in self.towers:
                for parameter in tower.parameters():
                    parameter.mul_(factor)

    @rule(which=st.integers(0, 200))
    def replace_a_weight(self, which: int) -> None:
        """As `load_state_dict(assign=True)` and optimizers with flat storage do: other memory, other values."""
        for tower in self.towers:
            parameters = list(tower.parameters())
            parameter = parameters[which % len(parameters)]
            parameter.data = parameter.data * 0.9 + 0.01

    @rule(trained=st.sampled_from(["all", "none", "merger"]))
    def choose_trained(self, trained: str) -> None:
        for tower in self.towers:
            for name, parameter in tower.named_parameters():
                parameter.requires_grad_(trained == "all" or (trained == "merger" and name.startswith("merger")))

    @rule(mode=st.booleans())
    def toggle_training(self, mode: bool) -> None:
        for model in (self.stock, self.model):
            model.train(mode)

    @rule()
    def hook_for_one_call(self) -> None:
        handles = [tower.rotary_pos_emb.register_forward_hook(lambda *_: None) for tower in self.towers]
        self.run(GRIDS["image"], grad=False)
        for handle in handles:
            handle.remove()

    @rule(error=FAULTS, count=st.integers(1, 5), grad=st.booleans())
    def captures_fail(self, error: Exception, count: int, grad: bool) -> None:
        self.recorder.fail = error
        for _ in range(count):
            self.run(GRIDS["image"], grad=grad)
            self.run(GRIDS["two"], grad=grad)
        self.recorder.fail = None

    @rule(grad=st.booleans(), name=st.sampled_from(sorted(GRIDS)))
    def memory_runs_out_in_attention(self, grad: bool, name: str) -> None:
        """The call itself may raise; the tower must answer the next one."""
        self.attend_faults.append(run_out)
        with contextlib.suppress(torch.OutOfMemoryError):
            self.run(GRIDS[name], grad=grad)
        self.attend_faults.clear()

    @rule(grad=st.booleans(), name=st.sampled_from(sorted(GRIDS)), is_our_own=st.booleans(), in_thread=st.booleans())
    def the_device_is_full(self, grad: bool, name: str, is_our_own: bool, in_thread: bool) -> None:
        """torch tells of a failed allocation, of this call or of another program: while it is captured or replayed."""

        def fill() -> None:
            notify = partial(memory._give_up_graphs, 0, 1 << 40, 0, 0)
            if in_thread:
                other = threading.Thread(target=notify)
                other.start()
                other.join()
            else:
                notify()
            if is_our_own:
                run_out()

        self.attend_faults.append(fill)
        with contextlib.suppress(torch.OutOfMemoryError):
            self.run(GRIDS[name], grad=grad)
        self.attend_faults.clear()

    @rule(gibibytes=st.sampled_from([0, 1, 64]))
    def others_take_memory(self, gibibytes: int) -> None:
        self.recorder.free_bytes = gibibytes << 30

    @rule()
    def copy_the_model(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.warmed_up = 0

    @rule()
    def patch_again(self) -> None:
        self.patch()

    @invariant()
    def outputs_of_earlier_calls_stay(self) -> None:
        assert all(torch.equal(output, copy_of_output) for output, copy_of_output in self.kept)

    @invariant()
    def captures_are_paid_for(self) -> None:
        if self.config != "auto" or not hasattr(self, "model"):
            return
        status = hf_vit_accel.status(self.model).towers[0]
        for graphs in (status.graphs, status.training):
            if graphs is None:
                continue
            stale = min(sum(graphs.stale.values()) + sum(graphs.kept.values()), STALE_TIMES)
            rebuilt = status.rebuilds
            free = FREE_CAPTURES * (1 + stale + rebuilt) + self.warmed_up
            paid = graphs.replays // REPLAYS_PER_CAPTURE + self.calls // CALLS_PER_CAPTURE
            assert graphs.captures <= free + paid

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "model"):
            return
        status = hf_vit_accel.status(self.model).towers[0]
        is_automatic = self.config == "auto"
        most_bytes = 1 << 30 if is_automatic else self.config.max_bytes
        most_training_bytes = 8 << 30 if is_automatic else self.config.max_training_bytes
        for graphs, bound in ((status.graphs, most_bytes), (status.training, most_training_bytes)):
            if graphs is not None:
                # The arena of static buffers, and the last graph that was captured, come on top.
                assert graphs.nbytes <= bound + 2 * self.recorder.nbytes + (64 << 20)


class ScarceMemory(GraphMachine):
    """Graphs of a third of a gigabyte each: the bound is reached after three."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder.nbytes = 350 << 20

    @invariant()
    def captures_are_paid_for(self) -> None:
        """Dropped for lack of room, graphs may be captured anew: `memory_is_bounded` counts here."""


class FewGraphs(GraphMachine):
    """Graphs that the user asked for: fewer than sizes, and budgets that cut the large call in two."""

    config = GraphConfig(max_tokens=64, exact_after=3, max_graphs=2)


class OneLayout(GraphMachine):
    """A backend whose graphs serve one layout, so that nothing is padded."""


MACHINES = {"auto": GraphMachine, "scarce memory": ScarceMemory, "few graphs": FewGraphs, "one layout": OneLayout}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_whatever_happens(on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, machine: type[GraphMachine]) -> None:
    current: list[GraphMachine] = []
    attend = Masked.attend

    def attend_or_fail(self: Masked, *args: Any) -> torch.Tensor:
        if current and current[-1].attend_faults:
            current[-1].attend_faults.pop()()
        return attend(self, *args)

    def make() -> GraphMachine:
        current.append(machine())
        return current[-1]

    monkeypatch.setattr(Masked, "attend", attend_or_fail)
    monkeypatch.setattr(Masked, "replays_other_layouts", machine is not OneLayout)
    monkeypatch.setattr(machine, "recorder", on_cpu, raising=False)
    options = settings(settings.get_profile("same"), max_examples=4, stateful_step_count=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_state_machine_as_test(make, settings=options)
