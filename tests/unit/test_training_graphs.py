"""The graphs of training steps without a GPU: the recorder replays by running again, on poisoned buffers.

Gradients must be stock's whatever a program does between a forward and its backward. On a GPU the captures are real.
"""

import copy
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import transformers
from support.cpu_graphs import Recorder
from support.graphs import Grid, patch_training
from support.recorded_ops import OperationRecorder
from support.towers import SHALLOW, TOWERS
from tiny import TINY, all_equal, outputs_of, pixels_for, relative_error, tower_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel import GraphConfig
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.tower.state import state_of

CONFIG = GraphConfig(max_tokens=128, exact_after=1)
SMALL: Grid = [(1, 6, 8)]
LARGE: Grid = [(1, 4, 6), (1, 8, 8)]
VIDEO: Grid = [(2, 6, 4), (1, 2, 2)]
LAYOUTS: list[Grid] = [SMALL, LARGE, VIDEO]

Tensors = list[torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


class Pair(NamedTuple):
    """A stock tower, and one like it that the test patches."""

    stock: nn.Module
    tower: nn.Module


@pytest.fixture(params=TOWERS)
def pair(request: pytest.FixtureRequest, on_cpu: type[Recorder]) -> Pair:
    return pair_of(request.param)


@pytest.fixture
def one_pair(on_cpu: type[Recorder]) -> Pair:
    """A pair of one family, for behaviour that families share."""
    return pair_of("shallow")


def pair_of(family: str) -> Pair:
    model = (SHALLOW if family == "shallow" else TINY[family]).build()
    return Pair(tower_of(model), tower_of(copy.deepcopy(model)))


def patch(tower: nn.Module, config: GraphConfig = CONFIG, **kwargs: object) -> TrainingRunner:
    """Patch with training graphs whose buffers are poisoned; return the runner."""
    return patch_training(tower, config, **kwargs)


def patch_in_passes(tower: nn.Module) -> None:
    """Patch so that a call of `LARGE` runs in two passes, and again in its backward."""
    hf_vit_accel.patch(tower, max_rows=40, cuda_graphs=False, strict=True)


def forward(tower: nn.Module, grid: Grid, seed: int = 0) -> Tensors:
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, seed, device=weight.device, dtype=weight.dtype)
    return outputs_of(tower(pixels, grid_thw=torch.tensor(grid)))


def is_used_by_models(index: int) -> bool:
    """Return whether models use an output: all but the hidden states, which transformers 4.57 does not return."""
    return index > 0 or transformers.__version__.startswith("4.")


def loss_of(outputs: Tensors, seed: int, uses: Callable[[int], bool] = is_used_by_models) -> torch.Tensor:
    """Sum randomly weighted outputs. uses: whether an index counts; by default those that models use."""
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for index, output in enumerate(outputs):
        weight = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        if uses(index) or len(outputs) == 1:
            terms.append((output * weight).sum())
    return torch.stack(terms).sum()


def take_gradients(tower: nn.Module) -> Gradients:
    """Return the gradient of every parameter, and clear them."""
    gradients = {name: parameter.grad for name, parameter in tower.named_parameters()}
    tower.zero_grad(set_to_none=True)
    return gradients


def train(tower: nn.Module, grid: Grid, seed: int = 0, uses: Callable[[int], bool] = is_used_by_models) -> Gradients:
    """Run a forward and backward; return the gradients."""
    loss_of(forward(tower, grid, seed), seed, uses).backward()
    return take_gradients(tower)


def assert_same(gradients: Gradients, expected: Gradients, bound: float = 1e-4) -> None:
    """Check that gradients are near stock's, and None where stock's are."""
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        stock_gradient = expected[name]
        assert (gradient is None) == (stock_gradient is None), name
        if gradient is not None and float(stock_gradient.abs().max()) >= 1e-6:
            assert relative_error(gradient, stock_gradient) < bound, name


def compare(pair: Pair, run: Callable[[nn.Module], Gradients | None]) -> None:
    """Run the same on both towers and compare the gradients: those that it returns, and the parameters'."""
    results = []
    for tower in pair:
        returned = run(tower) or {}
        results.append(take_gradients(tower) | returned)
    expected, gradients = results
    assert_same(gradients, expected)


# --- steps as programs make them --------------------------------------------------------------------------------------


def test_steps_of_several_layouts(pair: Pair) -> None:
    """Every step has new pixels, weights that an optimiser changed in place, and poisoned buffers."""
    patch(pair.tower, strict=True)
    optimisers = [torch.optim.SGD(tower.parameters(), lr=1e-3) for tower in pair]
    for seed, grid in enumerate(itertools.islice(itertools.cycle(LAYOUTS), 6)):
        losses = [loss_of(forward(tower, grid, seed), seed) for tower in pair]
        assert relative_error(losses[1], losses[0]) < 1e-4
        for loss in losses:
            loss.backward()
        stock_gradients, gradients = (
            {name: parameter.grad for name, parameter in tower.named_parameters()} for tower in pair
        )
        assert_same(gradients, stock_gradients)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    status = hf_vit_accel.status(pair.tower).towers[0].training
    assert status.replays == 6 and not status.eager and status.captures == len(LAYOUTS)
    assert "training" in str(hf_vit_accel.status(pair.tower))


def test_the_loss_may_use_other_outputs(one_pair: Pair) -> None:
    """A parameter that a loss does not reach has no gradient, not one of zeros."""
    runner = patch(one_pair.tower)
    last = len(forward(one_pair.stock, SMALL)) - 1
    choices = [bool, bool, lambda index: index == 0, lambda index: True, lambda index: index == last, bool]
    for seed, uses in enumerate(choices * 2):
        assert_same(train(one_pair.tower, SMALL, seed, uses), train(one_pair.stock, SMALL, seed, uses))
    assert runner.status().replays


def test_gradients_of_pixels(one_pair: Pair) -> None:
    runner = patch(one_pair.tower, strict=True)

    def run(tower: nn.Module) -> Gradients:
        pixels = pixels_for(tower, LARGE, 3).double().requires_grad_()
        loss_of(outputs_of(tower(pixels.float(), grid_thw=torch.tensor(LARGE))), 5).backward()
        assert pixels.grad.dtype == torch.float64
        return {"pixels": pixels.grad}

    for is_frozen in (False, True, True):
        for tower in one_pair:
            tower.requires_grad_(not is_frozen)
        compare(one_pair, run)
    assert runner.status().replays == 3


def test_gradients_are_added_up_and_never_overwritten(one_pair: Pair) -> None:
    stock, tower = one_pair
    patch(tower)
    for seed in range(3):
        for either in one_pair:
            loss_of(forward(either, SMALL, seed), seed).backward()
    gradients = take_gradients(tower)
    expected = take_gradients(stock)
    assert_same(gradients, expected)
    kept = [torch.autograd.grad(loss_of(forward(tower, SMALL, 6), 6), list(tower.parameters())) for tower in one_pair]
    outputs = forward(tower, SMALL, 7)
    copies = [output.detach().clone() for output in outputs]
    loss_of(outputs, 7).backward()
    take_gradients(tower)
    train(tower, SMALL, 8)
    assert_same(gradients, expected)
    assert all_equal(outputs, copies)
    for gradient, stock_gradient in zip(kept[1], kept[0], strict=True):  # nothing but the caller holds these
        assert relative_error(gradient, stock_gradient) < 1e-4


def test_two_forwards_before_their_backwards(one_pair: Pair) -> None:
    """The halves of a contrastive batch: the second forward runs eagerly. `GraphMachine` has other orders and sizes."""
    runner = patch(one_pair.tower, strict=True)
    for _ in range(2):
        train(one_pair.tower, SMALL)

    def run(tower: nn.Module) -> None:
        losses = [loss_of(forward(tower, SMALL, seed), seed) for seed in range(2)]
        for loss in losses:
            loss.backward()

    compare(one_pair, run)
    assert runner.status().eager == {"the gradients of an earlier call are still to come": 1}
    assert runner.status().replays == 3


def test_a_forward_without_a_backward_does_not_block_the_next(one_pair: Pair) -> None:
    stock, tower = one_pair
    runner = patch(tower, strict=True)
    train(tower, SMALL)
    gc.disable()
    try:
        for seed in range(3):
            forward(tower, SMALL, seed)
    finally:
        gc.enable()
    assert_same(train(tower, SMALL, 5), train(stock, SMALL, 5))
    assert not runner.status().eager


@pytest.mark.parametrize("written", ["weight", "frozen weight", "pixels"])
@pytest.mark.parametrize("in_passes", [False, True], ids=["replayed", "in passes"])
def test_writing_before_the_backward_raises_as_in_stock(one_pair: Pair, written: str, in_passes: bool) -> None:
    """Gradients go through frozen weights, too; a graph or a pass would read all of them as they are now."""
    for tower in one_pair:
        tower.blocks[0].attn.qkv.weight.requires_grad_(written != "frozen weight")
    patch_in_passes(one_pair.tower) if in_passes else patch(one_pair.tower)
    for _ in range(2):
        train(one_pair.tower, LARGE)
    for tower in one_pair:
        pixels = pixels_for(tower, LARGE)
        loss = loss_of(outputs_of(tower(pixels, grid_thw=torch.tensor(LARGE))), 0)
        with torch.no_grad():
            (pixels if written == "pixels" else tower.blocks[0].attn.qkv.weight).mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place since its forward)"):
            loss.backward()


def test_a_parameter_of_two_layers_has_one_gradient(one_pair: Pair) -> None:
    stock, tower = one_pair
    for either in one_pair:
        either.blocks[1].attn.qkv.weight = either.blocks[0].attn.qkv.weight
    runner = patch(tower, strict=True)
    for seed in range(3):
        expected = train(stock, SMALL, seed)
        assert_same(train(tower, SMALL, seed), expected)
        loss = loss_of(forward(tower, SMALL, seed), seed)
        for _ in range(2):  # replayed, and computed again
            take_gradients(tower)
            loss.backward(retain_graph=True)
        assert_same(take_gradients(tower), expected)
    assert runner.status().replays == 6


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpointed_tower(one_pair: Pair, is_reentrant: bool) -> None:
    """A forward that checkpointing runs again must save as many tensors as before."""
    runner = patch(one_pair.tower, strict=is_reentrant)
    train(one_pair.tower, SMALL)
    for seed in range(3):

        def run(tower: nn.Module, seed: int = seed) -> Gradients:
            def checkpointed(pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(outputs_of(tower(pixels, grid_thw=torch.tensor(SMALL))))

            pixels = pixels_for(tower, SMALL, seed).requires_grad_()
            outputs = checkpoint(checkpointed, pixels, use_reentrant=is_reentrant)
            loss_of(list(outputs), seed).backward()
            return {"pixels": pixels.grad}

        compare(one_pair, run)
    assert (runner.status().replays > 1) == is_reentrant


def test_third_party_hooks_on_gradients_are_called_and_those_on_saved_tensors_run_eagerly(one_pair: Pair) -> None:
    stock, tower = one_pair
    runner = patch(tower)
    train(tower, SMALL)
    calls = []
    weight = tower.blocks[0].attn.qkv.weight
    handle = weight.register_hook(lambda gradient: calls.append("gradient") or gradient * 2)
    expected = train(stock, SMALL, 1)
    gradients = train(tower, SMALL, 1)
    handle.remove()
    assert calls == ["gradient"]
    expected["blocks.0.attn.qkv.weight"] *= 2
    assert_same(gradients, expected)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    assert_same(train(tower, SMALL, 2), train(stock, SMALL, 2))
    assert calls == ["gradient", "accumulated"] and not runner.status().eager
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        assert_same(train(tower, SMALL, 3), train(stock, SMALL, 3))
    assert list(runner.status().eager.values()) == [1]


# --- what happens between a forward and its backward ------------------------------------------------------------------


def frequencies_of(tower: nn.Module) -> torch.Tensor:
    return tower.rotary_pos_emb.inv_freq


def linear_of(tower: nn.Module) -> nn.Linear:
    return tower.blocks[1].attn.qkv


def move_weights(tower: nn.Module) -> None:
    """Give weights other memory of the same values, and spoil the former memory, as whoever gets it next does."""
    for parameter in tower.parameters():
        former = parameter.data
        parameter.data = former.clone()
        former.fill_(float("nan"))


def replace_weight(tower: nn.Module) -> None:
    linear_of(tower).weight = nn.Parameter(torch.zeros_like(linear_of(tower).weight))


@dataclass(frozen=True)
class Event:
    """Something between a forward and its backward; `is_ours_alone` leaves stock alone, whose backward would raise."""

    act: Callable[[nn.Module], object]
    is_ours_alone: bool = False
    family: str = "shallow"


EVENTS = {
    "another step": Event(lambda tower: train(tower, SMALL, 4)),
    "a step of another layout": Event(lambda tower: train(tower, LARGE, 4)),
    "another forward": Event(lambda tower: vars(tower).update(outputs=forward(tower, SMALL, 5))),
    "patched again": Event(lambda tower: hf_vit_accel.patch(tower, cuda_graphs=True), is_ours_alone=True),
    "unpatched": Event(hf_vit_accel.unpatch, is_ours_alone=True),
    "weights move": Event(move_weights, is_ours_alone=True),
    "a weight is replaced": Event(replace_weight),
    "a layer is frozen": Event(lambda tower: tower.blocks[1].requires_grad_(False)),
    "a weight is hooked": Event(lambda tower: linear_of(tower).weight.register_hook(lambda gradient: gradient * 2)),
    "frequencies are written": Event(lambda tower: frequencies_of(tower).mul_(0.5), family="qwen2_5_vl"),
    "frequencies are written by .data": Event(lambda tower: frequencies_of(tower).data.mul_(0.5), family="qwen2_5_vl"),
    "frequencies are assigned": Event(
        lambda tower: setattr(tower.rotary_pos_emb, "inv_freq", frequencies_of(tower) * 0.5)
    ),
}
"""Stock keeps the tables made of frequencies."""


ELSEWHERE = {
    "before any step": ("frequencies are written", "a weight is hooked"),
    "between two backwards": (
        "another step", "unpatched", "weights move", "a layer is frozen", "a weight is hooked",
        "frequencies are written",
    ),
    "in passes": ("frequencies are written", "frequencies are written by .data", "frequencies are assigned"),
}  # fmt: skip
PLACES = [("after steps", name) for name in EVENTS]
PLACES += [(place, name) for place, names in ELSEWHERE.items() for name in names]


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_gradients_are_those_of_the_forward(recorded: type[OperationRecorder], place: str, name: str) -> None:
    """The first gradients are replayed, the second computed again; a graph reads the memory of its capture."""
    event = EVENTS[name]
    pair = pair_of(event.family)
    patch_in_passes(pair.tower) if place == "in passes" else patch(pair.tower)
    grid = LARGE if place == "in passes" else SMALL
    for _ in range(0 if place == "before any step" else 2):
        train(pair.tower, grid)
    results = []
    for tower in pair:
        parameters = dict(tower.named_parameters())
        loss = loss_of(forward(tower, grid), 0)
        if place == "between two backwards":
            loss.backward(retain_graph=True)
        if tower is pair.tower or not event.is_ours_alone:
            event.act(tower)
        frequencies = frequencies_of(tower)
        loss.backward(retain_graph=place != "between two backwards")
        if place != "between two backwards":
            loss.backward()
        assert frequencies_of(tower) is frequencies
        results.append({name: parameter.grad for name, parameter in parameters.items()})
    assert_same(results[1], results[0])
    assert place != "in passes" or hf_vit_accel.status(pair.tower).towers[0].passes


def test_parameters_of_a_functional_call(one_pair: Pair) -> None:
    """The gradients belong to the parameters that were passed."""
    patch(one_pair.tower)
    train(one_pair.tower, SMALL)
    pixels = pixels_for(one_pair.stock, SMALL)

    def run(tower: nn.Module) -> Gradients:
        parameters = {}
        for name, parameter in tower.named_parameters():
            parameters[name] = nn.Parameter(parameter.detach() * 1.1)
        arguments = {"hidden_states": pixels, "grid_thw": torch.tensor(SMALL)}
        output = torch.func.functional_call(tower, parameters, kwargs=arguments)
        loss = loss_of(outputs_of(output), 0)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: parameter.grad for name, parameter in parameters.items()}

    compare(one_pair, run)


# --- what is captured, what is stored ---------------------------------------------------------------------------------


@pytest.mark.parametrize("switched", ["trained parameters", "precision"])
def test_a_switch_that_is_set_back_finds_its_graphs_again(one_pair: Pair, switched: str) -> None:
    """A graph contains the gradients of what was trained at its capture, and the precision of its products."""
    stock, tower = one_pair
    runner = patch(tower)
    for is_on in (True, False, True, False):
        for changed in one_pair:
            changed.merger.requires_grad_(is_on or switched == "precision")
        torch.set_float32_matmul_precision("high" if is_on and switched == "precision" else "highest")
        assert_same(train(tower, SMALL), train(stock, SMALL))
    assert (runner.status().captures, runner.status().replays) == (2, 4) and not runner.status().stale


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def towers_on_gpu(family: str, dtype: torch.dtype) -> Pair:
    """Return an eager patched tower, and one like it to patch with graphs."""
    model = TINY[family].build().to("cuda", dtype)
    eager = tower_of(copy.deepcopy(model))
    hf_vit_accel.patch(eager)
    return Pair(eager, tower_of(model))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", TOWERS)
def test_gpu_replayed_steps_equal_eager_steps(family: str, dtype: torch.dtype) -> None:
    """Between the steps: layouts in random order, changed weights, losses that stay, dropped routes, calls without
    gradients, and third-party work.
    """
    pair = towers_on_gpu(family, dtype)
    eager, tower = pair
    # fp32 has sdpa alone, whose inference calls cannot be captured.
    hf_vit_accel.patch(tower, cuda_graphs=CONFIG, strict=dtype == torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    optimisers = [torch.optim.SGD(either.parameters(), lr=1e-3, foreach=True) for either in pair]
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    losses: dict[nn.Module, torch.Tensor] = {}
    for seed in range(24):
        if seed % 5 == 4:
            state_of(tower).routes.cache.clear()
        grid = LAYOUTS[int(torch.randint(3, (), generator=generator))]
        gradients: dict[nn.Module, Gradients] = {}
        for either in (tower, eager):
            losses[either] = loss_of(forward(either, grid, seed), seed)
            if seed % 3 == 0:
                with torch.no_grad():
                    forward(either, LAYOUTS[seed % 2], seed)
            poison_free_memory()
            losses[either].backward()
            gradients[either] = {}
            for name, parameter in either.named_parameters():
                gradients[either][name] = None if parameter.grad is None else parameter.grad.clone()
        assert_same(gradients[tower], gradients[eager], bound=bound)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        for source, target in zip(eager.parameters(), tower.parameters(), strict=True):
            target.data.copy_(source.data)
    status = state_of(tower).training_runner.status()
    assert status.replays == 24 and not status.eager


def poison_free_memory() -> None:
    """Fill memory that torch's allocator holds free with NaN."""
    tensors = []
    for size in (1 << 20, 1 << 8):
        for _ in range(40):
            tensors.append(torch.full((size,), float("nan"), device="cuda"))


@pytest.mark.gpu
def test_gpu_a_step_waits_for_nothing_and_runs_on_any_stream() -> None:
    eager, tower = towers_on_gpu("qwen2_5_vl", torch.bfloat16)
    hf_vit_accel.patch(tower, cuda_graphs=CONFIG, strict=True)
    for _ in range(2):
        train(tower, SMALL)
    pixels = pixels_for(tower, SMALL, device="cuda", dtype=torch.bfloat16)
    incoming = [torch.ones_like(output) for output in forward(eager, SMALL)[1:]]

    def run(either: nn.Module) -> None:
        torch.autograd.backward(outputs_of(either(pixels, grid_thw=torch.tensor(SMALL)))[1:], incoming)

    run(eager)
    expected = take_gradients(eager)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(tower)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            assert_same(take_gradients(tower), expected, bound=2e-2)
    assert state_of(tower).training_runner.status().replays == 5


@pytest.mark.gpu
@pytest.mark.parametrize("has_graph", [False, True])
def test_gpu_a_capture_without_memory_is_tried_again(has_graph: bool) -> None:
    """has_graph: whether the pool already holds another graph."""
    recorder = CudaRecorder(torch.device("cuda"))
    result = torch.zeros(4, device="cuda")
    if has_graph:
        (add_one,), _ = recorder.record(lambda: result.add_(torch.ones(1 << 20, device="cuda")[:4]))
    failures = 1

    def run() -> None:
        nonlocal failures
        threes = torch.full((1 << 20,), 3.0, device="cuda")
        if torch.cuda.is_current_stream_capturing() and failures:
            failures -= 1
            raise torch.OutOfMemoryError("none left")
        result.copy_(threes[:4])

    (replay,), _ = recorder.record(run)
    for _ in range(2):
        result.zero_()
        replay()
        assert result.tolist() == [3.0] * 4
    if has_graph:
        add_one()
        assert result.tolist() == [4.0] * 4
    (replay,), _ = recorder.record(lambda: result.fill_(5.0))
    replay()
    assert result.tolist() == [5.0] * 4


def bytes_in_pools() -> int:
    """Return the device memory that pools of graphs hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))


@pytest.mark.gpu
def test_gpu_status_counts_the_memory_of_graphs_which_is_bounded() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # pools of other tests
    tower = tower_of(TINY["qwen3_vl"].build().to("cuda", torch.bfloat16))
    hf_vit_accel.patch(tower, cuda_graphs=GraphConfig(max_tokens=4096, exact_after=1))
    for _ in range(2):
        train(tower, [(1, 8, 3840 // 2)], 0)
    bound = state_of(tower).training_runner.status().nbytes
    assert bound > 0, "the largest step was captured"
    hf_vit_accel.unpatch(tower)
    gc.collect()
    torch.cuda.empty_cache()
    bytes_before = bytes_in_pools()
    hf_vit_accel.patch(tower, cuda_graphs=GraphConfig(max_tokens=4096, exact_after=1, max_training_bytes=bound))
    for seed in range(24):
        for tokens in range(512, 4096, 256):
            before = state_of(tower).training_runner.status()
            train(tower, [(1, 8, tokens // 2)], seed)
            after = state_of(tower).training_runner.status()
            assert bytes_in_pools() - bytes_before <= after.nbytes + (24 << 20), (tokens, after)
            if after.captures > before.captures:
                assert before.nbytes <= bound or len(after.graphs) == 1, "captured although there was no room"
