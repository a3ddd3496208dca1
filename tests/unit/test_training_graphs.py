"""Graphs of forward and backward, without a GPU: the recorder replays by running again, on poisoned buffers.

What is asked: gradients are stock's whatever a program does between a forward and its backward. On a GPU: the same with
real captures.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import TOWERS
from support.graphs import patch_training
from tiny import TINY, checkpoint_layers, outputs_of, pixels_for, relative_error, tower_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel import FallbackError, GraphConfig
from hf_vit_accel.graphs import step as step_module
from hf_vit_accel.graphs import training as training_module
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.tower.state import state_of

Grid = list[tuple[int, int, int]]
CONFIG = GraphConfig(max_tokens=128, exact_after=1)
SMALL, LARGE, VIDEO = [(1, 6, 8)], [(1, 4, 6), (1, 8, 8)], [(2, 6, 4), (1, 2, 2)]
LAYOUTS: list[Grid] = [SMALL, LARGE, VIDEO]


def patch(tower: Any, config: GraphConfig = CONFIG, **kwargs: Any) -> Any:
    """Patch with training graphs whose buffers are poisoned; return the runner."""
    return patch_training(tower, config, **kwargs)


def grown(tower: Any) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter, taken off."""
    found = {name: parameter.grad for name, parameter in tower.named_parameters()}
    tower.zero_grad(set_to_none=True)
    return found


def weighted(outputs: list[torch.Tensor], seed: int, among: Callable[[int], bool] = bool) -> torch.Tensor:
    """A loss of outputs; `among`: by their index, by default all but the first, as models use them."""
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for index, output in enumerate(outputs):
        weight = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        if among(index):
            terms.append((output * weight).sum())
    return torch.stack(terms).sum()


def forward(tower: Any, grid: Grid, seed: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, seed, device=weight.device, dtype=weight.dtype)
    return outputs_of(tower(pixels, grid_thw=torch.tensor(grid), **kwargs))


def step(tower: Any, grid: Grid, seed: int = 0, **kwargs: Any) -> dict[str, torch.Tensor | None]:
    weighted(forward(tower, grid, seed), seed, **kwargs).backward()
    return grown(tower)


def assert_same(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-4) -> None:
    """Gradients where stock has one, none elsewhere, and near."""
    assert {name for name, each in found.items() if each is None} == {n for n, each in expected.items() if each is None}
    for name, each in found.items():
        if each is not None:
            assert relative_error(each, expected[name]) < bound or float(expected[name].abs().max()) < 1e-6, name


@pytest.fixture(params=TOWERS)
def pair(request: Any, on_cpu: Any) -> Iterator[tuple[Any, Any]]:
    """A stock tower and one like it, to be patched."""
    model = TINY[request.param].build()
    yield tower_of(model), tower_of(copy.deepcopy(model))


@pytest.fixture
def one(on_cpu: Any) -> tuple[Any, Any]:
    """The same of one family, where families do not differ."""
    model = TINY["qwen3_vl"].build()
    return tower_of(model), tower_of(copy.deepcopy(model))


# --- steps as programs make them --------------------------------------------------------------------------------------


def test_steps_of_several_layouts(pair: Any) -> None:
    """New pixels each time, weights that an optimiser changes in place, the graphs' buffers spoilt between."""
    _stock, tower = pair
    runner = patch(tower, strict=True)
    optimisers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in pair]
    for seed, grid in enumerate(itertools.islice(itertools.cycle(LAYOUTS), 9)):
        losses = []
        for each in pair:
            losses.append(weighted(forward(each, grid, seed), seed))
            losses[-1].backward()
        assert relative_error(losses[1], losses[0]) < 1e-4
        kept = [{name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None} for each in pair]
        assert_same(kept[1], kept[0])
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    told = hf_vit_accel.status(tower).towers[0].training
    # The first step told which outputs gradients are given for; from then on they are all replayed.
    assert told.replays == 9 and not told.eager and told.captures == 4
    assert runner._used[0] is False and all(runner._used[1:])
    assert "training" in str(hf_vit_accel.status(tower))


def test_which_outputs_have_gradients_may_change(pair: Any) -> None:
    """A parameter that a loss does not reach has no gradient, not one of zeros."""
    stock, tower = pair
    patch(tower)
    count = len(forward(stock, SMALL))
    for seed, among in enumerate([bool, bool, lambda i: i == 0, lambda i: True, lambda i: i == count - 1, bool] * 2):
        assert_same(step(tower, SMALL, seed, among=among), step(stock, SMALL, seed, among=among))
    assert state_of(tower).training.status().replays


def test_what_is_trained_may_change(pair: Any) -> None:
    stock, tower = pair
    patch(tower)

    def freeze(part: str) -> None:
        for each in pair:
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(part in name)

    for seed, part in enumerate(["", "blocks.1", "merger", "merger", "patch_embed", "bias", "bias", ""]):
        freeze(part)
        assert_same(step(tower, LARGE, seed), step(stock, LARGE, seed))


def test__gradients_of_pixels(pair: Any) -> None:
    _stock, tower = pair
    patch(tower, strict=True)
    for frozen in (False, True, True):
        found = []
        for each in pair:
            each.requires_grad_(not frozen)
            pixels = pixels_for(each, LARGE, 3).double().requires_grad_()
            weighted(outputs_of(each(pixels.float(), grid_thw=torch.tensor(LARGE))), 5).backward()
            found.append(grown(each) | {"pixels": pixels.grad})
        assert found[1]["pixels"].dtype == torch.float64
        assert_same(found[1], found[0])
    runner = state_of(tower).training
    assert runner.status().replays == 3
    assert not any(each.pixels_TP.requires_grad for each in runner._graphs.values()), "a buffer holds a graph"


def test_gradients_are_added_up_and_never_overwritten(one: Any) -> None:
    stock, tower = one
    patch(tower)
    for seed in range(3):
        for each in one:
            weighted(forward(each, SMALL, seed), seed).backward()
    first, expected = grown(tower), grown(stock)
    assert_same(first, expected)
    outputs = forward(tower, SMALL, 7)
    copies = [each.detach().clone() for each in outputs]
    weighted(outputs, 7).backward()
    grown(tower)
    step(tower, SMALL, 8)
    assert_same(first, expected)
    assert all(map(torch.equal, outputs, copies)), "what a call returned is its caller's"


def test_two_forwards_before_their_backwards(one: Any) -> None:
    """As the halves of a contrastive batch: the second one runs eagerly, and so do their gradients come right."""
    stock, tower = one
    runner = patch(tower, strict=True)
    step(tower, SMALL), step(tower, SMALL)
    for order in (1, -1):
        found = []
        for each in (tower, stock):
            losses = [weighted(forward(each, grid, seed), seed) for seed, grid in enumerate([SMALL, SMALL, LARGE])]
            for loss in losses[::order]:
                loss.backward()
            found.append(grown(each))
        assert_same(*found)
    assert runner.status().eager == {"the gradients of an earlier call are still to come": 4}
    assert runner.status().replays == 4


def test_a_forward_without_a_backward_stands_in_nobodys_way(one: Any) -> None:
    stock, tower = one
    runner = patch(tower, strict=True)
    step(tower, SMALL)
    gc.disable()
    try:
        for seed in range(3):
            outputs = forward(tower, SMALL, seed)
            call = weakref.ref(runner._last())
            del outputs
            assert call() is None, "kept by a cycle"
    finally:
        gc.enable()
    assert_same(step(tower, SMALL, 5), step(stock, SMALL, 5))
    assert not runner.status().eager


def test_a_retained_graph(one: Any) -> None:
    """Its second backward finds the memory of the first one written to."""
    _stock, tower = one
    patch(tower)
    step(tower, SMALL)
    for again in (False, True):
        found = []
        for each in one:
            loss = weighted(forward(each, SMALL, 3), 3)
            loss.backward(retain_graph=True)
            if again:
                step(each, SMALL, 4)
            loss.backward()
            found.append(grown(each))
        assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "between", ["closed", "repatched", "unpatched", "another layout", "no gradients", "weights move"]
)
def test_what_happens_between_forward_and_backward(one: Any, between: str) -> None:
    _stock, tower = one
    patch(tower)
    step(tower, SMALL), step(tower, LARGE)
    found = []
    for each in one:
        losses = [weighted(forward(each, SMALL, 3), 3)]
        if between == "closed" and each is tower:
            state_of(tower).close()
        elif between == "repatched" and each is tower:
            hf_vit_accel.patch(tower, cuda_graphs=True)
        elif between == "unpatched" and each is tower:
            hf_vit_accel.unpatch(tower)
        elif between == "another layout":
            losses.append(weighted(forward(each, LARGE, 1), 1))
        elif between == "no gradients":
            with torch.no_grad():
                forward(each, SMALL, 9), forward(each, LARGE, 9)
        elif between == "weights move":  # with the same values, and a call that notices
            for parameter in each.parameters():
                parameter.data = parameter.data.clone()
            losses.append(weighted(forward(each, LARGE, 1), 1))
        torch.stack(losses).sum().backward()
        found.append(grown(each))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_change_before_the_backward_raise_as_in_stock(one: Any, frozen: bool) -> None:
    """Gradients go through frozen ones, too; a graph would read them as they are now."""
    for each in one:
        each.blocks[0].attn.qkv.weight.requires_grad_(not frozen)
    runner = patch(one[1])
    step(one[1], SMALL), step(one[1], SMALL)
    spoil_replays(runner)
    for each in one:
        loss = weighted(forward(each, SMALL), 0)
        with torch.no_grad():
            each.blocks[0].attn.qkv.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def spoil_replays(runner: Any) -> None:
    """Backward graphs must not be replayed from here on."""
    for step_ in runner._graphs.values():
        step_.backward = partial(pytest.fail, "replayed")


def test_pixels_of_inference_mode(one: Any) -> None:
    """They cannot be saved for a gradient; a frozen embedding needs none of them."""
    patch(one[1])
    with torch.inference_mode():
        pixels = pixels_for(one[1], SMALL)
    for _ in range(3):
        found = []
        for each in one:
            each.patch_embed.requires_grad_(False)
            weighted(outputs_of(each(pixels, grid_thw=torch.tensor(SMALL))), 0).backward()
            found.append(grown(each))
        assert_same(found[1], found[0])


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_graph_whose_weights_moved_before_the_backward_is_not_replayed(one: Any, how: str) -> None:
    """It would read where they were (frozen ones, too), though no call came that could have noticed."""
    for each in one:
        each.blocks[0].requires_grad_(False)
    runner = patch(one[1])
    step(one[1], SMALL), step(one[1], SMALL)
    if how == "moved":
        spoil_replays(runner)
    found = []
    for each in one:
        loss, kept = weighted(forward(each, SMALL), 0), dict(each.named_parameters())
        for linear in (each.blocks[0].attn.qkv, each.blocks[1].attn.qkv):
            if how == "moved":
                linear.weight.data = linear.weight.data.clone()
            else:  # a gradient goes to the one that was there
                linear.weight = nn.Parameter(torch.zeros_like(linear.weight))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({name: parameter.grad for name, parameter in kept.items()})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("again", [False, True], ids=["replayed", "computed anew"])
@pytest.mark.parametrize("what", ["frozen", "hooked"])
def test_parameters_that_are_frozen_or_hooked_before_the_backward(one: Any, what: str, again: bool) -> None:
    """A frozen one gets no gradient, a hook is called as often as in stock."""
    patch(one[1])
    step(one[1], SMALL), step(one[1], SMALL)
    found, calls = [], []
    for each in one:
        loss = weighted(forward(each, SMALL), 0)
        if again:
            loss.backward(retain_graph=True)
        if what == "frozen":
            each.blocks[1].requires_grad_(False)
        else:
            each.blocks[1].attn.qkv.weight.register_hook(lambda grad: calls.append(1) or grad * 2)
        loss.backward()
        found.append(grown(each))
    assert_same(found[1], found[0])
    assert len(calls) == (2 if what == "hooked" else 0)


def test_a_parameter_of_two_layers_has_one_gradient(one: Any) -> None:
    for each in one:
        each.blocks[1].attn.qkv.weight = each.blocks[0].attn.qkv.weight
    stock, tower = one
    runner = patch(tower, strict=True)
    for seed in range(3):
        assert_same(step(tower, SMALL, seed), step(stock, SMALL, seed))
        loss = weighted(forward(tower, SMALL, seed), seed)
        for _ in range(2):  # computed anew, too
            grown(tower)
            loss.backward(retain_graph=True)
        assert_same(grown(tower), step(stock, SMALL, seed))
    assert runner.status().replays == 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_as_a_whole(one: Any, reentrant: bool) -> None:
    """A forward that is run again for its gradient must save what it saved."""
    _stock, tower = one
    runner = patch(tower, strict=reentrant)
    step(tower, SMALL)
    for seed in range(3):
        found = []
        for each in one:
            pixels = pixels_for(each, SMALL, seed).requires_grad_()
            run = partial(lambda each, p: tuple(outputs_of(each(p, grid_thw=torch.tensor(SMALL)))), each)
            weighted(list(checkpoint(run, pixels, use_reentrant=reentrant)), seed).backward()
            found.append(grown(each) | {"pixels": pixels.grad})
        assert_same(found[1], found[0])
    assert (runner.status().replays > 1) == reentrant


def test_hooks_of_others(one: Any) -> None:
    stock, tower = one
    runner = patch(tower)
    step(tower, SMALL)
    calls, weight = [], tower.blocks[0].attn.qkv.weight
    handle = weight.register_hook(lambda grad: calls.append(1) or grad * 2)
    expected = step(stock, SMALL, 1)
    found = step(tower, SMALL, 1)
    handle.remove()
    assert calls == [1]
    expected["blocks.0.attn.qkv.weight"] *= 2
    assert_same(found, expected)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
    assert_same(step(tower, SMALL, 2), step(stock, SMALL, 2))
    assert calls == [1, 2] and list(runner.status().eager.values()) == [1]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        assert_same(step(tower, SMALL, 3), step(stock, SMALL, 3))
    assert list(runner.status().eager.values()) == [1, 1]


def test_layers_that_are_checkpointed_and_modules_of_others_run_eagerly(one: Any) -> None:
    stock, tower = one
    runner = patch(tower)

    class Adapter(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    checkpoint_layers(tower.train(), reentrant=False)
    assert_same(step(tower, SMALL), step(stock, SMALL))
    tower.eval()
    tower.blocks[0].attn.qkv.__class__ = Adapter
    assert_same(step(tower, SMALL), step(stock, SMALL))
    assert len(runner.status().eager) == 2 and not runner.status().captures


def test_under_autocast(one: Any) -> None:
    """As eagerly, bit for bit, also where gradients are computed anew."""
    _, tower = one
    twin = hf_vit_accel.patch(copy.deepcopy(tower))
    patch(tower)
    for seed, again in enumerate([False, False, True]):
        found = []
        for each in (tower, twin):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = forward(each, SMALL, seed)
            loss = weighted(outputs, seed)
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
            found.append((*outputs, *[p.grad for p in each.parameters() if p.grad is not None]))
            grown(each)
        assert all(map(torch.equal, *found))
    assert state_of(tower).training.status().replays == 3


def test_parts_of_a_call(one: Any) -> None:
    """Equal pictures encoded once, and passes with gradients."""
    _stock, tower = one
    for options in ({"reuse": True}, {"max_rows": 48}):
        patch(tower, **options)
        for seed in range(4):
            found = []
            for each in one:
                pixels = pixels_for(each, SMALL, seed).repeat(3, 1)
                weighted(outputs_of(each(pixels, grid_thw=torch.tensor(SMALL * 3))), seed).backward()
                found.append(grown(each))
            assert_same(found[1], found[0])


# --- what is captured, what is held -----------------------------------------------------------------------------------


def test_layouts_are_captured_when_they_come_often_and_are_small(one: Any) -> None:
    stock, tower = one
    runner = patch(tower, GraphConfig(max_tokens=16, exact_after=3), strict=True)
    for seed in range(5):
        assert_same(step(tower, SMALL, seed), step(stock, SMALL, seed))
        assert_same(step(tower, LARGE, seed), step(stock, LARGE, seed))
    assert runner.status().replays == 3 and sum(runner.status().eager.values()) == 7
    for config in (GraphConfig(max_training_bytes=0), GraphConfig(exact_after=0)):
        hf_vit_accel.patch(tower, cuda_graphs=config)
        assert_same(step(tower, SMALL), step(stock, SMALL))
        training = state_of(tower).training
        assert training is None or not training.status().captures


def test_memory_is_bounded(one: Any, on_cpu: Any) -> None:
    """When graphs took too much all go, after some steps that ran eagerly."""
    stock, tower = one
    del stock.blocks[1:], tower.blocks[1:]
    on_cpu.nbytes = 1 << 20
    bound = GraphConfig(max_tokens=128, exact_after=1, max_training_bytes=3 << 19)
    runner, gone = patch(tower, bound, strict=True), 0
    for seed in range(24):
        for grid in LAYOUTS:
            before = runner.status().graphs
            assert_same(step(tower, grid, seed), step(stock, grid, seed))
            assert len(runner.status().graphs) <= 2 and runner.status().nbytes < 3 << 20
            gone += len(runner.status().graphs) < len(before)
    assert gone and 4 <= runner.status().captures <= 8


def test_a_backward_whose_graph_is_gone(one: Any) -> None:
    stock, tower = one
    runner = patch(tower)
    step(tower, SMALL), step(tower, SMALL)
    losses = [weighted(forward(each, SMALL), 0) for each in one]
    assert runner.status().replays == 3
    runner._drop()
    for loss in losses:
        loss.backward()
    assert_same(grown(tower), grown(stock))


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_capture_without_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """From the first graph on, once what is cached was given back: within a capture the allocator frees none of it."""
    told: list[Any] = []
    graphs = SimpleNamespace(current_stream=lambda device: stream, mem_get_info=lambda device: (1000 - len(told), 0))
    graphs.stream, graphs.CUDAGraph = lambda stream: nullcontext(), lambda: SimpleNamespace(replay=len(told))
    graphs.empty_cache, stream = partial(told.append, "emptied"), SimpleNamespace(wait_stream=lambda other: None)
    for name, value in vars(graphs).items():
        monkeypatch.setattr(torch.cuda, name, value)

    def capture(graph: Any, run: Any) -> None:
        run()
        if run is runs[1] and told.count("captured") < 2 * failures:
            told.append("captured")
            raise torch.OutOfMemoryError("none left")
        told.append("captured")

    runs = [partial(told.append, "forward"), partial(told.append, "backward")]
    recorder = object.__new__(CudaRecorder)
    vars(recorder).update(_device=None, _stream=stream, _capture=capture)
    once = ["forward", "captured", "backward", "captured"]
    wanted = ["forward", "backward", *once, *["emptied", *once] * min(failures, 1)]
    if failures == 2:
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(*runs)
    else:
        replays, nbytes = recorder.record(*runs)
        assert len(replays) == 2 and nbytes == 4
    assert told == wanted


def test_a_graph_keeps_all_that_it_reads(one: Any, on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph holds memory only by its address; routes that were long unused are dropped."""
    tower, bound = one[1], []
    runner, record = patch(tower), on_cpu.record

    def spied(*args: Any) -> Any:
        bound.append(args[0])
        return training_encode(*args)

    def forgetful(self: Any, *runs: Any) -> Any:
        return [list for _ in runs], record(self, *runs)[1]  # as CUDA's: these know nothing of what they run

    training_encode = step_module.encode
    monkeypatch.setattr(step_module, "encode", spied)
    monkeypatch.setattr(on_cpu, "record", forgetful)
    step(tower, SMALL)
    assert runner.status().captures == 1
    read = [weakref.ref(each) for each in bound[0].tensors.values()]
    bound.clear()
    state_of(tower).routes.cache.clear()
    gc.collect()
    assert read and all(each() is not None for each in read)


def test_nothing_that_is_captured_ends_at_a_parameter(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node may be held by DDP or an earlier loss, and belong to a stream that cannot be captured."""
    tower, ends = one[1], []
    patch(tower)
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in tower.parameters()]
    gradients = step_module._gradients_of

    def spied(outputs: Any, *rest: Any) -> Any:
        seen, todo = set(), [output.grad_fn for output in outputs if output.requires_grad]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [each for each, _ in node.next_functions]
        ends.append([node for node in seen if hasattr(node, "variable")])
        return gradients(outputs, *rest)

    monkeypatch.setattr(step_module, "_gradients_of", spied)
    loss = weighted(forward(tower, SMALL), 0)
    loss.backward()
    assert len(ends) >= 2 and all(len(each) > 10 for each in ends), "warmed up, and captured or replayed"
    assert not {id(node) for each in ends for node in each} & set(map(id, nodes))


def test_parameters_are_back_after_a_capture_that_breaks_off(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, tower = one
    runner, before = patch(tower), dict(tower.named_parameters())
    encode = step_module.encode

    def broken(*args: Any) -> Any:
        encode(*args)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(step_module, "encode", broken)
    assert_same(step(tower, SMALL), step(stock, SMALL))
    assert "none left" in str(runner.status())
    after = dict(tower.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


def test_another_precision_makes_graphs_stale(one: Any) -> None:
    """What products in fp32 and 16 bits compute in is a decision of the host's, and stands in the graph."""
    runner, matmul = patch(one[1]), torch.backends.cuda.matmul
    ways = ("allow_tf32", True), ("fp32_precision", "tf32"), ("allow_fp16_reduced_precision_reduction", False)
    for name, value in ways:
        for seed in range(3):
            step(one[1], SMALL, seed)  # weights that are replaced at call after call run eagerly
        before, captures = getattr(matmul, name), runner.status().captures
        setattr(matmul, name, value)
        try:
            step(one[1], SMALL)
            assert runner.status().captures == captures + 1, name
        finally:
            setattr(matmul, name, before)


def test_a_capture_that_fails(one: Any, on_cpu: Any) -> None:
    stock, tower = one
    runner = patch(tower)
    on_cpu.fail = torch.OutOfMemoryError("none left")
    assert_same(step(tower, SMALL), step(stock, SMALL))
    on_cpu.fail = None
    assert_same(step(tower, SMALL), step(stock, SMALL))
    assert runner.status().eager == {"capture failed: OutOfMemoryError: none left": 2}
    assert_same(step(tower, LARGE), step(stock, LARGE))
    assert runner.status().captures == 1
    patch(tower, strict=True)
    on_cpu.fail = RuntimeError("again")
    with pytest.raises(FallbackError, match="capture failed"):
        step(tower, SMALL)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", TOWERS)
def test_gpu_steps_are_as_eagerly(family: str, dtype: torch.dtype) -> None:
    """Layouts in random order, weights that change, losses that are kept, routes that are dropped, calls without
    gradients and foreign work between.
    """
    model = TINY[family].build().to("cuda", dtype)
    twin, tower = tower_of(copy.deepcopy(model)), tower_of(model)
    # In fp32 there is sdpa alone, which serves no graph without gradients.
    hf_vit_accel.patch(twin), hf_vit_accel.patch(tower, cuda_graphs=CONFIG, strict=dtype == torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    optimisers = [torch.optim.SGD(each.parameters(), lr=1e-3, foreach=True) for each in (twin, tower)]
    bound, kept = 2e-2 if dtype == torch.bfloat16 else 1e-4, {}
    for seed in range(24):
        if seed % 5 == 4:
            state_of(tower).routes.cache.clear()
        grid = LAYOUTS[int(torch.randint(3, (), generator=generator))]
        found = []
        for each in (tower, twin):
            loss = kept[each] = weighted(forward(each, grid, seed), seed)
            if seed % 3 == 0:
                with torch.no_grad():
                    forward(each, LAYOUTS[seed % 2], seed)
            spoilt = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 20, 1 << 8) for _ in range(40)]
            del spoilt
            loss.backward()
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in each.named_parameters()})
        assert_same(*found, bound=bound)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        for one_, other in zip(twin.parameters(), tower.parameters(), strict=True):
            other.data.copy_(one_.data)
    told = state_of(tower).training.status()
    assert told.replays == 24 and not told.eager


@pytest.mark.gpu
def test_gpu_a_step_waits_for_nothing_and_runs_on_any_stream() -> None:
    tower = tower_of(TINY["qwen2_5_vl"].build().to("cuda", torch.bfloat16))
    twin = hf_vit_accel.patch(copy.deepcopy(tower))
    hf_vit_accel.patch(tower, cuda_graphs=CONFIG, strict=True)
    step(tower, SMALL), step(tower, SMALL)
    pixels = pixels_for(tower, SMALL, device="cuda", dtype=torch.bfloat16)
    incoming = [torch.ones_like(each) for each in forward(twin, SMALL)[1:]]
    torch.autograd.backward(outputs_of(twin(pixels, grid_thw=torch.tensor(SMALL)))[1:], incoming)
    expected = grown(twin)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.autograd.backward(outputs_of(tower(pixels, grid_thw=torch.tensor(SMALL)))[1:], incoming)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            assert_same(grown(tower), expected, bound=2e-2)
    assert state_of(tower).training.status().replays == 5
    assert training_module.TrainingRunner is type(state_of(tower).training)


@pytest.mark.gpu
@pytest.mark.parametrize("held_before", [False, True])
def test_gpu_a_capture_whose_memory_ran_out_is_tried_again(held_before: bool) -> None:
    recorder, found = CudaRecorder(torch.device("cuda")), torch.zeros(4, device="cuda")
    if held_before:
        (other,), _ = recorder.record(lambda: found.add_(torch.ones(1 << 20, device="cuda")[:4]))
    fails = 1

    def run() -> None:
        nonlocal fails
        kept = torch.full((1 << 20,), 3.0, device="cuda")
        if torch.cuda.is_current_stream_capturing() and fails:
            fails -= 1
            raise torch.OutOfMemoryError("none left")
        found.copy_(kept[:4])

    (replay,), _ = recorder.record(run)
    for _ in range(2):
        found.zero_()
        replay()
        assert found.tolist() == [3.0] * 4
    if held_before:
        other()
        assert found.tolist() == [4.0] * 4
    (replay,), _ = recorder.record(lambda: found.fill_(5.0))
    replay()
    assert found.tolist() == [5.0] * 4


@pytest.mark.gpu
def test_gpu_what_graphs_hold_is_told_and_bounded() -> None:
    def in_pools() -> int:
        return sum(each["total_size"] for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0))

    gc.collect()
    torch.cuda.empty_cache()  # pools of other tests
    tower, others = tower_of(TINY["qwen3_vl"].build().to("cuda", torch.bfloat16)), in_pools()
    bound, gone = 96 << 20, 0
    hf_vit_accel.patch(tower, cuda_graphs=GraphConfig(max_tokens=4096, exact_after=1, max_training_bytes=bound))
    for seed in range(3):
        for tokens in range(512, 4096, 256):
            before = state_of(tower).training.status()
            step(tower, [(1, 8, tokens // 2)], seed)
            after = state_of(tower).training.status()
            assert in_pools() - others <= after.nbytes + (24 << 20), (tokens, after)
            gone += len(after.graphs) < len(before.graphs)
            if after.captures > before.captures:
                assert before.nbytes <= bound or len(after.graphs) == 1, "captured although there was no room"
    assert gone
