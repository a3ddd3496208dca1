"""Test `max_rows`: passes equal one call, take the memory of a pass, and survive memory running out."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cpu_graphs import Recorder
from support.families import CLASSES, DIFFERENT, GRIDS, build, classes_like, run, trained
from support.grids import drawn, frames_of
from support.patching import status_of
from support.tensors import flat
from support.towers import ONE_TOWER
from tiny import (
    TINY,
    assert_close,
    checkpoint_layers,
    largest_error,
    merged_of,
    outputs_of,
    pixels_for,
    relative_error,
    tower_of,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.options import passes
from hf_vit_accel.options.passes import cut

Grid = list[tuple[int, int, int]]
VIDEO: Grid = [(1, 4, 6), (7, 4, 4), (1, 2, 18)]


# --- where a call is cut ----------------------------------------------------------------------------------------------


def test_passes_hold_all_frames_in_order_within_bounds_and_are_as_few_as_can_be() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        grid = tuple(drawn(generator))
        limit = generator.randint(1, rows_of(grid) + 5)
        pieces = cut(grid, limit)
        units = frames_of(grid)
        assert [unit for piece in pieces for unit in frames_of(piece)] == units
        assert all(rows_of(piece) <= limit or len(frames_of(piece)) == 1 for piece in pieces)
        fewest = 0  # filling every pass in order needs the fewest passes
        room = -1
        for unit in units:
            room -= rows_of((unit,))
            if room < 0:
                fewest = fewest + 1
                room = limit - rows_of((unit,))
        assert len(pieces) == fewest


@pytest.mark.parametrize(
    ("max_rows", "is_cuda", "grad", "cut_in"),
    [
        ("auto", True, False, "1 calls in 4 passes"),
        ("auto", True, True, None),  # passes with gradients run twice
        ("auto", False, False, None),
        (None, True, False, None),
        (100, False, True, "1 calls in 2 passes"),
        (40, True, False, "1 calls in 5 passes"),
    ],
)
def test_which_calls_are_cut(
    max_rows: Any, is_cuda: bool, grad: bool, cut_in: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "AUTO_ROWS", 60)
    monkeypatch.setattr(passes, "CUT_ON", ("cpu",) if is_cuda else ("cuda",))
    tower = hf_vit_accel.patch(tower_of(TINY["qwen2_vl"].build()), max_rows=max_rows, strict=True)
    with torch.set_grad_enabled(grad):
        tower(pixels_for(tower, VIDEO), grid_thw=torch.tensor(VIDEO))
    assert status_of(tower).passes == cut_in


# --- what is cut equals what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", classes_like(*DIFFERENT))
def test_every_tower_in_passes_equals_one_pass_with_its_gradients(entry: Any) -> None:
    tower = build(*entry)
    grid = GRIDS[1]
    hf_vit_accel.patch(tower, strict=True)
    expected = run(tower, grid)
    outputs, gradients = trained(tower, grid)
    hf_vit_accel.patch(tower, strict=True, max_rows=50)
    assert_close(run(tower, grid), expected)
    actual, ours = trained(tower, grid)
    assert_close(actual, outputs)
    assert largest_error(ours, gradients) < 1e-5
    summary = f"2 calls in {2 * len(cut(tuple(grid), 50))} passes"
    assert status_of(tower).passes == summary and status_of(tower).calls == 2
    assert f"  passes     {summary}" in str(hf_vit_accel.status(tower))


def test_passes_over_checkpointed_layers() -> None:
    tower = build(*next(entry for entry in CLASSES if entry[0].name == "qwen3_vl"))
    expected, gradients = trained(tower, GRIDS[1])
    hf_vit_accel.patch(tower.train(), strict=True, max_rows=50)
    checkpoint_layers(tower, reentrant=False)
    actual, ours = trained(tower, GRIDS[1])
    assert_close(actual, expected)
    assert largest_error(ours, gradients) < 1e-4


def other_parameters(tower: Any) -> list[torch.Tensor]:
    """Return gradients of weights that modules hold during the forward alone; some have none."""
    new = {name: torch.nn.Parameter(p.detach() * 1.1, "norm" in name) for name, p in tower.named_parameters()}
    inputs = pixels_for(tower, GRIDS[1]), torch.tensor(GRIDS[1])
    merged_of(torch.func.functional_call(tower, new, inputs)).square().sum().backward()
    return [weight.grad for weight in new.values() if weight.requires_grad]


def data_swapped(tower: Any) -> list[torch.Tensor]:
    """Return gradients of weights whose memory is exchanged before the backward; stock saves Linears' operands."""
    loss = hold(tower, GRIDS[1])[-1].square().sum()
    for module in tower.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data * 1.5
    loss.backward()
    return [parameter.grad for parameter in tower.parameters()]


@pytest.mark.parametrize("way", [other_parameters, data_swapped])
def test_a_pass_runs_again_with_the_weights_of_its_forward(way: Callable[[Any], list[torch.Tensor]]) -> None:
    stock = tower_of(TINY["qwen2_5_vl"].build())
    tower = hf_vit_accel.patch(copy.deepcopy(stock), max_rows=50, strict=True)
    assert largest_error(way(tower), way(stock)) < 1e-4
    assert status_of(tower).passes


def test_an_adapter_that_is_switched_before_its_passes_run_again_raises() -> None:
    """Raise, since the recomputed products would lack the adapter of the forward."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(TINY["qwen2_5_vl"].build(), peft.LoraConfig(target_modules=["qkv", "proj"], r=2))
    tower = tower_of(hf_vit_accel.patch(model, max_rows=50))
    tower.merger.requires_grad_(True)

    def loss() -> torch.Tensor:
        return hold(tower, GRIDS[1])[-1].square().sum()

    with model.disable_adapter():
        without = loss()
    with pytest.raises(RuntimeError, match="an adapter was switched or scaled since its forward"):
        without.backward()
    loss().backward()
    assert status_of(tower).passes and not status_of(tower).fallbacks


def hold(tower: Any, grid: Grid) -> list[torch.Tensor]:
    output = tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid))
    return outputs_of(output)


class Held(TorchDispatchMode):
    """Count the bytes of new tensors that still exist, and their peak."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.given = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
        self.storages = {}
        self.peak = 0

    def now(self) -> int:
        self.storages = {storage: size for storage, size in self.storages.items() if not storage.expired()}
        return sum(self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        for storage in self.given:
            self.storages.pop(storage, None)
        self.peak = max(self.peak, self.now())
        return result


def nbytes(output: Any) -> int:
    return sum(tensor.nbytes for tensor in flat(output))


@pytest.mark.parametrize("family", ONE_TOWER)
def test_bytes_beyond_the_outputs_are_a_pass_whatever_the_length(
    family: str, references: list[str], on_cpu: type[Recorder]
) -> None:
    """Hold the bound from the first call on, which creates all cached values."""
    beyond = []
    for frames in (12, 48):
        tower = tower_of(TINY[family].build())
        grid = [(frames, 4, 6)]
        pixels = pixels_for(tower, grid)
        grid_thw = torch.tensor(grid)
        hf_vit_accel.patch(tower, max_rows=96, strict=True)
        with torch.no_grad(), Held(pixels, *tower.parameters(), *tower.buffers()) as memory:
            for _ in range(2):
                memory.peak = 0
                beyond.append(-nbytes(tower(pixels, grid_thw=grid_thw)) + memory.peak)
    first, second, first_of_long, second_of_long = beyond
    assert 96 * 4 * 144 < second <= first and first_of_long <= first and second_of_long <= second, beyond


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_the_backward_pass_saves_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save only inputs, since the backward runs the passes again one at a time."""
    tower = tower_of(TINY["qwen2_vl"].build())
    pixels = pixels_for(tower, VIDEO).requires_grad_()
    grid = torch.tensor(VIDEO)
    saved = []
    for max_rows in (None, 40):
        hf_vit_accel.patch(tower, max_rows=max_rows)
        memory: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: memory.append(x) or x, lambda x: x):  # noqa: B023
            tower(pixels, grid_thw=grid)
        actual = {storage(x) for x in memory if x.numel()}  # torch 2.11 keeps an empty one for each pass
        saved.append(len(actual - {storage(tensor) for tensor in (pixels, *tower.parameters())}))
    assert saved[0] > 20 and saved[1] == 0


def tight(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """Raise out-of-memory for more rows than a limit; return the number of rows of every try."""
    tried = []
    encode = passes.encode

    def encoded(route: Any, pixels_TP: torch.Tensor, *others: Any, **options: object) -> Any:
        tried.append(len(pixels_TP))
        if len(pixels_TP) > limit:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")
        return encode(route, pixels_TP, *others, **options)

    monkeypatch.setattr(passes, "encode", encoded)
    return tried


@pytest.mark.parametrize("grad", [False, True])
def test_memory_that_runs_out_halves_passes_once(monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    tower = tower_of(TINY["qwen2_vl"].build().requires_grad_(grad))
    grid = [(12, 4, 4)]
    pixels = pixels_for(tower, grid)
    grid_thw = torch.tensor(grid)
    expected = tower(pixels, grid_thw=grid_thw)
    hf_vit_accel.patch(tower, max_rows=100, strict=True)
    with monkeypatch.context() as small:
        tried = tight(small, 64)
        for _ in range(2):
            actual = tower(pixels, grid_thw=grid_thw)
            assert relative_error(merged_of(actual), merged_of(expected)) < 1e-5
    assert tried == [96, 48, 48, 48, 48] + [48] * 4
    words = " with gradients" if grad else ""
    assert status_of(tower).passes == f"2 calls in 8 passes, at most 50 rows{words} since memory ran out"
    with monkeypatch.context() as smaller:
        tight(smaller, 40)
        with pytest.raises(torch.OutOfMemoryError, match=r"20\.00 GiB"):
            tower(pixels, grid_thw=grid_thw)
    assert status_of(tower).calls == 2 and not status_of(tower).fallbacks


def test_layers_that_fsdp_shards_are_not_run_in_passes(tmp_path: Path) -> None:
    """Refuse passes, since each rank has other pictures and all must gather a layer equally often."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tower = tower_of(TINY["qwen2_vl"].build())
        for block in tower.blocks:
            fully_shard(block, mesh=mesh)
        hf_vit_accel.patch(tower, max_rows=40)
        output = tower(pixels_for(tower, VIDEO), grid_thw=torch.tensor(VIDEO))
        assert len(merged_of(output)) == rows_of(VIDEO) // 4 and status_of(tower).passes is None
        assert status_of(tower).calls == 1
        assert status_of(tower).fallbacks == {"not cut by max_rows: FSDP2 gathers weights at each pass": 1}
    finally:
        dist.destroy_process_group()
