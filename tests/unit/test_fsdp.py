"""FSDP2 over two processes: sharded layers run fast, with the gradients of one process."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import FAMILIES, TINY, checkpoint_layers, pixels_for, relative_error, tower_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import start_processes

import hf_vit_accel
from hf_vit_accel.tower import fsdp as sharding
from hf_vit_accel.tower.state import state_of

GRIDS = [[(1, 4, 6), (1, 2, 10)], [(2, 4, 4)]]


def loss_of(tower: Any, rank: int) -> torch.Tensor:
    output = tower(pixels_for(tower, GRIDS[rank]), grid_thw=torch.tensor(GRIDS[rank]))
    outputs = [output.last_hidden_state, output.pooler_output, *(output.get("deepstack_features") or ())]
    return torch.stack([each.float().square().mean() for each in outputs]).sum()


def compare(rank: int, folder: str) -> None:
    """In each process: the same seeds make the same model; each has its own pictures; gradients are averaged.

    Plain in every family, and checkpointed, reentrant or not.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for family, reentrant in [*((family, None) for family in FAMILIES), *zip(FAMILIES[1:], (False, True), strict=True)]:
        model = TINY[family].build().train()
        expected = tower_of(copy.deepcopy(model))
        (sum(loss_of(expected, each) for each in range(2)) / 2).backward()
        if reentrant is not None:
            checkpoint_layers(model, reentrant=reentrant)
        tower = tower_of(hf_vit_accel.patch(model, strict=True))
        first = next(tower.blocks[0].parameters())
        first.requires_grad_(False)
        for block in tower.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(tower, mesh=mesh)
        for _ in range(2):  # the second step meets weights that were gathered and dropped
            for parameter in tower.parameters():
                parameter.grad = None
            loss_of(tower, rank).backward()
        assert hf_vit_accel.status(model).towers[0].calls == 2
        wanted = dict(expected.named_parameters())
        for name, parameter in tower.named_parameters():
            if parameter.requires_grad:
                assert relative_error(parameter.grad.full_tensor(), wanted[name].grad) < 1e-4, (family, name)
    dist.destroy_process_group()


def test_gradients_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every family in the same two processes: forked, which is quicker, where no process uses CUDA."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    way = "spawn" if torch.cuda.is_initialized() else "fork"
    start_processes(compare, (str(tmp_path),), nprocs=2, start_method=way)


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (MixedPrecisionPolicy(), None),
        (MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32), None),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), "FSDP2 brings a layer's weights in torch.bfloat16"),
        (MixedPrecisionPolicy(output_dtype=torch.bfloat16), "FSDP2 casts what a layer returns to torch.bfloat16"),
    ],
    ids=["none", "the same", "weights", "outputs"],
)
def test_a_policy_for_layers_alone(mesh: Any, policy: Any, reason: str | None) -> None:
    tower = tower_of(TINY["qwen3_vl"].build())
    for block in tower.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    found = sharding.reasons_against(tower.blocks, torch.float32)
    assert not found if reason is None else found[0].startswith(reason)


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize(
    ("shards", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["usual", "wider"]
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_mixed_precision_of_the_whole_tower(
    mesh: Any, request: Any, family: str, shards: torch.dtype, dtype: torch.dtype, kernels: bool
) -> None:
    """Operations and attention are those of the dtype in which weights are brought, with kernels and without."""
    if kernels:
        request.getfixturevalue("references")
    model, policy = TINY[family].build().to(shards), MixedPrecisionPolicy(param_dtype=dtype)
    stock, tower = tower_of(copy.deepcopy(model)), tower_of(hf_vit_accel.patch(model, strict=True))
    for each in (stock, tower):
        for block in each.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(each, mesh=mesh, mp_policy=policy)
        loss_of(each, 0).backward()
    for name, parameter in stock.named_parameters():
        found = tower.get_parameter(name).grad.full_tensor()
        assert found.dtype == parameter.grad.dtype and relative_error(found, parameter.grad.full_tensor()) < 0.1, name
    state = state_of(tower)
    for spec in state.snapshot(tower).specs.values():
        assert spec.request.dtype == dtype and spec.ops is not None and ("norms" in spec.ops.fused) == kernels
    assert state.calls == 1 and not state.faults


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("of_layers", "of_tower", "of_model", "dtype", "reason"),
    [
        (MIXED, MIXED, None, torch.bfloat16, None),
        (MIXED, None, MIXED, torch.bfloat16, None),
        (None, MIXED, None, torch.bfloat16, None),
        (MixedPrecisionPolicy(), MixedPrecisionPolicy(), None, torch.float32, None),
        (MIXED, MixedPrecisionPolicy(), None, None, "in torch.bfloat16, the others are in torch.float32"),
        (MIXED, None, None, None, "in torch.bfloat16, the others are in torch.float32"),
    ],
    ids=["layers and tower", "layers and model", "tower", "no policy", "policies differ", "layers"],
)
def test_between_calls_status_tells_what_calls_will_find(
    mesh: Any, references: Any, of_layers: Any, of_tower: Any, of_model: Any, dtype: Any, reason: str | None
) -> None:
    """Weights are shards then, of another class and dtype than a call has. What is named at the patch holds, too."""
    model = TINY["qwen3_vl"].build()
    tower = tower_of(hf_vit_accel.patch(model))
    for policy, modules in ((of_layers, tower.blocks), (of_tower, [tower]), (of_model, [model])):
        for module in modules if policy is not None else ():
            fully_shard(module, mesh=mesh, mp_policy=policy)
    for called in (False, True):
        [status] = hf_vit_accel.status(model).towers
        specs = state_of(tower).snapshot(tower).specs.values()
        if reason is None:
            assert status.against_fast == () and "norms" in status.fused, str(status)
            assert {spec.request.dtype for spec in specs} == {dtype}
            hf_vit_accel.patch(model, strict=True)
        else:
            assert [reason in why for why in status.against_fast] == [True] and not status.fused, str(status)
        if not called and reason is None and of_model is None:
            loss_of(tower, 0)
            assert hf_vit_accel.status(model).towers[0].calls == 1


def test_what_is_sharded_beside_layers_is_stock_s(mesh: Any) -> None:
    model = TINY["qwen3_vl"].build()
    stock, tower = tower_of(copy.deepcopy(model)), tower_of(hf_vit_accel.patch(model))
    for each in (stock, tower):
        fully_shard(each.blocks[1].mlp, mesh=mesh)
    assert relative_error(loss_of(tower, 0), loss_of(stock, 0)) < 1e-5
    [status] = hf_vit_accel.status(model).towers
    assert status.stock_calls == 1 and any("which is no layer, by itself" in why for why in status.fallbacks)


def test_a_hook_of_somebody_else_s_on_a_sharded_block_is_served_by_stock(mesh: Any) -> None:
    model = TINY["qwen3_vl"].build()
    tower, seen = tower_of(hf_vit_accel.patch(model)), []
    for block in tower.blocks:
        fully_shard(block, mesh=mesh)
    tower.blocks[2].register_forward_hook(lambda module, given, made: seen.append(made.shape))
    loss_of(tower, 0)
    assert len(seen) == 1 and hf_vit_accel.status(model).towers[0].stock_calls == 1
    assert "forward" not in vars(tower.blocks[0])


def test_the_class_that_a_module_was_written_as() -> None:
    assert sharding.class_of(torch.nn.Linear(1, 1)) is torch.nn.Linear
