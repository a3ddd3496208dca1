"""Test FSDP2: sharded layers run fast, with the gradients of one process and the dtypes of a policy."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.libraries import start_process_group
from support.ranks import run_on_ranks
from support.towers import two_layers
from support.uses import prompt_with_labels
from tiny import TINY, chat_inputs, checkpoint_layers, outputs_of, pixels_for, relative_error, tower_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import hf_vit_accel
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.state import state_of

GRIDS = [[(1, 4, 6), (1, 2, 10)], [(2, 4, 4)]]
"""The pictures of every rank."""
CASES = [("qwen2_5_vl", None), ("qwen2_5_vl", False), ("qwen3_vl", True)]
CASES += [("qwen2_5_vl", "blocks"), ("qwen3_vl", "wrappers")]
"""Families, and whether their checkpoints are reentrant; None without checkpoints.

With wrappers that checkpoint, accelerate shards the blocks inside, and torchtitan the wrappers.
"""


def loss_of(tower: nn.Module, rank: int) -> torch.Tensor:
    config_holder = tower.module if isinstance(tower, FullyShardedDataParallel) else tower
    output = tower(pixels_for(config_holder, GRIDS[rank]), grid_thw=torch.tensor(GRIDS[rank]))
    return torch.stack([tensor.float().square().mean() for tensor in outputs_of(output)]).sum()


def shard(
    tower: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    blocks: list[nn.Module] | None = None,
) -> None:
    policy = policy or MixedPrecisionPolicy()
    for module in (*(blocks or tower.blocks), tower):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def check_gradients(rank: int) -> None:
    """Compare the gradients of two ranks with those of one process that encodes the pictures of both."""
    mesh = init_device_mesh("cpu", (2,))
    for family, reentrant in CASES:
        model = two_layers(family).build().train()
        expected = tower_of(copy.deepcopy(model))
        ((loss_of(expected, 0) + loss_of(expected, 1)) / 2).backward()
        if isinstance(reentrant, bool):
            checkpoint_layers(model, reentrant=reentrant)
        tower = tower_of(hf_vit_accel.patch(model, strict=True))
        next(tower.blocks[0].parameters()).requires_grad_(False)
        blocks = list(tower.blocks)
        if isinstance(reentrant, str):
            tower.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in blocks)
        shard(tower, mesh, blocks=blocks if reentrant == "blocks" else None)
        for _ in range(2):  # at the second step, weights have been gathered and freed before
            tower.zero_grad()
            loss_of(tower, rank).backward()
        assert hf_vit_accel.status(model).towers[0].calls == 2
        for name, parameter in tower.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad.full_tensor()
                name = name.replace("_checkpoint_wrapped_module.", "")
                assert relative_error(gradient, expected.get_parameter(name).grad) < 1e-4, (family, reentrant, name)


def shard_as_accelerate_does(model: nn.Module, version: int) -> nn.Module:
    """Shard a model by the plugin that `fsdp_version` in accelerate's config makes; `Accelerator` asks for GPUs."""
    utils = pytest.importorskip("accelerate.utils")
    wrapped = ["Qwen2_5_VLVisionBlock", "Qwen2_5_VLDecoderLayer"]
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=version, transformer_cls_names_to_wrap=wrapped, cpu_ram_efficient_loading=False
    )
    if version == 2:
        state = SimpleNamespace(fsdp_plugin=plugin)
        device = torch.device("cpu")
        accelerator = SimpleNamespace(state=state, mixed_precision="no", is_main_process=True, device=device)
        return utils.fsdp2_prepare_model(accelerator, model)
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=True, device_id=torch.device("cpu")
    )


def check_versions(rank: int) -> None:
    """Compare two steps of both versions with those of one process; version 1 is stock, with one warning."""
    stock = two_layers("qwen2_5_vl").build().train()
    inputs = prompt_with_labels(stock)
    expected = stock(**inputs).loss
    expected.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in stock.parameters() if parameter.grad is not None]).norm()
    for version in (1, 2):
        stock.zero_grad(set_to_none=True)
        model = shard_as_accelerate_does(copy.deepcopy(stock), version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hf_vit_accel.patch(model)
            for _ in range(2):
                model.zero_grad()
                loss = model(**inputs).loss
                loss.backward()
        assert relative_error(loss, expected) < 1e-5
        if isinstance(model, FullyShardedDataParallel):
            sharded_norm = model.clip_grad_norm_(1e9)
        else:
            sharded_norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
        assert relative_error(sharded_norm, norm) < 1e-4
        [status] = hf_vit_accel.status(model).towers
        advice = [str(warning.message) for warning in caught if "FSDP 1" in str(warning.message)]
        if version == 1:
            assert len(advice) == 1 and "fsdp_version: 2" in advice[0]
            assert status.calls == 0 and status.fallbacks[fsdp.VERSION_1] == status.stock_calls
        else:
            assert not advice and status.calls > 0 and status.stock_calls == 0, str(status)


@pytest.mark.parametrize("check", [check_gradients, check_versions], ids=["families", "versions of accelerate"])
def test_two_ranks_have_the_gradients_of_one_process(check: Callable[[int], None], tmp_path: Path) -> None:
    """Run all cases in the same two processes."""
    run_on_ranks(check, 2, tmp_path)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with ExitStack() as stack:
        start_process_group(stack)
        yield init_device_mesh("cpu", (1,))


@pytest.mark.parametrize(
    ("family", "shards", "dtype"),
    [("qwen2_5_vl", torch.float32, torch.bfloat16), ("qwen3_vl", torch.bfloat16, torch.float32)],
    ids=["usual", "wider"],
)
def test_mixed_precision_of_a_complete_tower(
    mesh: DeviceMesh, references: list[str], family: str, shards: torch.dtype, dtype: torch.dtype
) -> None:
    """Operations and attention are those of the dtype in which weights are gathered."""
    model = two_layers(family).build().to(shards)
    stock = tower_of(copy.deepcopy(model))
    tower = tower_of(hf_vit_accel.patch(model, strict=True))
    for module in (stock, tower):
        shard(module, mesh, MixedPrecisionPolicy(param_dtype=dtype))
        loss_of(module, 0).backward()
    for name, parameter in stock.named_parameters():
        gradient = tower.get_parameter(name).grad.full_tensor()
        assert gradient.dtype == parameter.grad.dtype
        assert relative_error(gradient, parameter.grad.full_tensor()) < 0.1, name
    state = state_of(tower)
    for spec in state.snapshot(tower).specs.values():
        assert spec.request.dtype == dtype and spec.ops is not None and "norms" in spec.ops.fused
    assert state.fast_calls == 1 and not state.faults


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
DIFFERENT = "in torch.bfloat16, the others are in torch.float32"


@pytest.mark.parametrize(
    ("of_layers", "of_tower", "of_model", "reason"),
    [
        (MIXED, None, MIXED, None),
        (None, MIXED, None, None),
        (MIXED, MixedPrecisionPolicy(), None, DIFFERENT),
        (MIXED, None, None, DIFFERENT),
    ],
    ids=["layers and model", "tower", "policies differ", "layers"],
)
def test_status_between_calls_reports_what_calls_will_do(
    mesh: DeviceMesh,
    references: list[str],
    of_layers: MixedPrecisionPolicy | None,
    of_tower: MixedPrecisionPolicy | None,
    of_model: MixedPrecisionPolicy | None,
    reason: str | None,
) -> None:
    """Between calls, weights are shards of another class and dtype than in a call. Patching reads them there too."""
    model = TINY["qwen3_vl"].build()
    tower = tower_of(hf_vit_accel.patch(model))
    for policy, modules in ((of_layers, tower.blocks), (of_tower, [tower]), (of_model, [model])):
        for module in modules if policy is not None else ():
            fully_shard(module, mesh=mesh, mp_policy=policy)
    for called in (False, True):
        [status] = hf_vit_accel.status(model).towers
        if reason is None:
            assert status.against_fast == () and ("norms" in status.fused) == bool(status.calls), str(status)
            hf_vit_accel.patch(model, strict=True)
        else:
            assert len(status.against_fast) == 1 and reason in status.against_fast[0], str(status)
            assert not status.fused, str(status)
        if not called and reason is None and of_model is None:
            loss_of(tower, 0)
            assert hf_vit_accel.status(model).towers[0].calls == 1


def test_a_tower_that_only_its_model_gathers_is_expected_fast(
    mesh: DeviceMesh, recwarn: pytest.WarningsRecorder
) -> None:
    """accelerate shards the model, and the language model's layers alone: fsdp_transformer_layer_cls_to_wrap."""
    model = TINY["qwen3_vl"].build()
    for module in (*model.model.language_model.layers, model):
        fully_shard(module, mesh=mesh)
    hf_vit_accel.patch(model, strict=True)
    assert not [str(warning.message) for warning in recwarn if "stays stock" in str(warning.message)]
    for called in (False, True):
        [status] = hf_vit_accel.status(model).towers
        assert status.against_fast == () and status.calls == called
        model(**chat_inputs(model, GRIDS[0]))


def test_a_tower_that_its_sharded_model_leaves_out_is_read_as_it_is(mesh: DeviceMesh) -> None:
    """accelerate's `ignored_modules` (fsdp2_prepare_model in utils/fsdp_utils.py): nothing casts its weights."""
    model = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    tower.blocks[0].norm1.bfloat16()
    fully_shard(model, mesh=mesh, ignored_params=set(tower.parameters()))
    with pytest.raises(hf_vit_accel.FallbackError, match="several dtypes"):
        hf_vit_accel.patch(model, strict=True)


def test_a_sharded_module_inside_a_layer_runs_stock(mesh: DeviceMesh) -> None:
    model = TINY["qwen3_vl"].build()
    stock = tower_of(copy.deepcopy(model))
    tower = tower_of(hf_vit_accel.patch(model))
    for module in (stock, tower):
        fully_shard(module.blocks[1].mlp, mesh=mesh)
    assert relative_error(loss_of(tower, 0), loss_of(stock, 0)) < 1e-5
    [status] = hf_vit_accel.status(model).towers
    assert status.stock_calls == 1 and any("which is no layer, by itself" in reason for reason in status.fallbacks)


def test_a_third_party_hook_on_a_sharded_block_runs_stock(mesh: DeviceMesh) -> None:
    model = TINY["qwen3_vl"].build()
    tower = tower_of(hf_vit_accel.patch(model))
    for block in tower.blocks:
        fully_shard(block, mesh=mesh)
    shapes: list[torch.Size] = []
    tower.blocks[2].register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    loss_of(tower, 0)
    assert len(shapes) == 1 and hf_vit_accel.status(model).towers[0].stock_calls == 1
    assert "forward" not in vars(tower.blocks[0])
