"""Checkpoint functions and wrappers of frameworks around layers: ours run inside, with the gradients of stock."""

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.patching import check_calls, gradients, run
from support.towers import ONE_TOWER, TOWERS
from tiny import GRIDS, TINY, assert_close, checkpoint_layers, outputs_of, pixels_for, tower_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hf_vit_accel

GRID = GRIDS["mixed"]


@pytest.fixture(params=ONE_TOWER)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return TINY[request.param].build().train()


def check_gradients(model: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    """Change a model and a stock copy alike, and compare two steps; return the stock one."""
    stock = copy.deepcopy(model)
    for changed in (model, stock):
        change(changed)
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(gradients(tower_of(model), GRID), gradients(tower_of(stock), GRID))
    check_calls(model, 2, 0)
    return stock


def asking(inner: Callable[..., Any], classes: list[str]) -> Callable[..., Any]:
    """Return LLaMA-Factory's checkpoint function: it asks what it runs for the module, whose weights may be trained."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "args", ()):  # transformers 5.23 hands over a partial of the class's function
            module = function.args[0]
        else:
            module = getattr(function, "func", function).__self__
        classes.append(type(module).__name__)
        if any(parameter.requires_grad for parameter in module.parameters()):
            args[0].requires_grad_(True)
        return inner(function, *args, **kwargs)

    return call


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_function_may_ask_for_the_module(model: nn.Module, reentrant: bool) -> None:
    asked: list[list[str]] = []

    def change(model: nn.Module) -> None:
        checkpoint_layers(model, reentrant=reentrant)
        asked.append([])
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = asking(module._gradient_checkpointing_func, asked[-1])

    check_gradients(model, change)
    assert asked[0] == asked[1] and asked[0], "the same module, as often"


@functools.wraps(checkpoint)
def always_reentrant(*args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Ignore `use_reentrant`, as the function that ms-swift puts in the place of torch's."""
    return checkpoint(*args, use_reentrant=True, **kwargs)


@pytest.mark.parametrize(("is_told", "max_rows"), [(True, None), (False, None), (False, 64)])
@pytest.mark.parametrize("model", TOWERS, indirect=True)
def test_layers_behind_frozen_embeddings_are_trained_under_reentrant_checkpoints(
    model: nn.Module, is_told: bool, max_rows: int | None
) -> None:
    """ms-swift's LoRA on a tower: transformers says `use_reentrant=False`, and its function re-enters regardless."""
    results = []
    for changed in (copy.deepcopy(model), model):  # the first without checkpoints: stock's embeddings require gradients
        tower = tower_of(changed)
        tower.requires_grad_(False)
        tower.blocks.requires_grad_(True)
        if changed is model:
            checkpoint_layers(changed, reentrant=is_told)
            for block in tower.blocks:
                if not is_told:
                    block._gradient_checkpointing_func = functools.partial(always_reentrant, use_reentrant=False)
            hf_vit_accel.patch(model, max_rows=max_rows)
        outputs = outputs_of(tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)))
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        assert all(parameter.grad is not None for parameter in tower.blocks.parameters())
        results.append([parameter.grad for parameter in tower.blocks.parameters()])
    assert_close(results[1], results[0])
    check_calls(model, 1, 0, *["not cut by max_rows: reentrant"] * (max_rows is not None))


# --- wrappers of layers -----------------------------------------------------------------------------------------------


def is_block(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("VisionBlock", "VLVisionBlock"))


def is_block_or_merger(module: nn.Module) -> bool:
    return is_block(module) or type(module).__name__.endswith("Merger")


def wrap_blocks(
    model: nn.Module, impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT, check_fn: Any = is_block, **kwargs: Any
) -> None:
    """Checkpoint every block, as accelerate does with `fsdp_activation_checkpointing`; by size, mergers as well."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=impl, **kwargs)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=check_fn)


WRAPS: dict[str, Callable[[nn.Module], None]] = {
    "blocks": wrap_blocks,
    "blocks, reentrant": functools.partial(wrap_blocks, impl=CheckpointImpl.REENTRANT),
    "blocks and mergers": functools.partial(wrap_blocks, check_fn=is_block_or_merger),
    "blocks and mergers, reentrant": functools.partial(
        wrap_blocks, check_fn=is_block_or_merger, impl=CheckpointImpl.REENTRANT
    ),
    "every module": lambda model: apply_activation_checkpointing(
        tower_of(model), checkpoint_wrapper, check_fn=lambda module: not isinstance(module, nn.ModuleList)
    ),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_a_wrapper_that_checkpoints_a_layer(model: nn.Module, wrap: Callable[[nn.Module], None]) -> None:
    saved: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    def bytes_of_step() -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = outputs_of(tower_of(model)(pixels_for(tower_of(model), GRID), grid_thw=torch.tensor(GRID)))
        return sum(saved) if output else 0

    stock = check_gradients(model, wrap)
    hf_vit_accel.unpatch(model)
    stock_bytes = bytes_of_step()
    hf_vit_accel.patch(model)
    assert bytes_of_step() <= 1.1 * stock_bytes, "layers are run again in the backward, as in stock"
    tower = tower_of(model)
    assert_close(run(tower, GRID), run(tower_of(stock), GRID))
    tower.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    tower_of(stock).blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    assert_close(run(tower, GRID), run(tower_of(stock), GRID))


def select_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def wrap_attention(model: nn.Module) -> None:
    for block in tower_of(model).blocks:
        block.attn = checkpoint_wrapper(block.attn)


def offload(model: nn.Module, check_fn: Callable[[nn.Module], bool] = is_block) -> None:
    """Keep what gradients need on the host, as torch's wrapper beside that of checkpoints does."""
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=offload_wrapper, check_fn=check_fn)


@pytest.mark.parametrize(
    "wrap",
    [wrap_attention, functools.partial(wrap_blocks, context_fn=select_products), offload],
    ids=["attention", "selective", "offloaded"],
)
def test_other_checkpoints_are_left_to_stock(model: nn.Module, wrap: Callable[[nn.Module], None]) -> None:
    stock = copy.deepcopy(model)
    wrap(model)
    hf_vit_accel.patch(model)
    assert_close(gradients(tower_of(model), GRID), gradients(tower_of(stock), GRID))
    check_calls(model, 0, 1, "OffloadWrapper" if wrap is offload else "CheckpointWrapper")


def is_merger(module: nn.Module) -> bool:
    return is_block_or_merger(module) and not is_block(module)


def test_mergers_in_other_wrappers_are_called(model: nn.Module) -> None:
    """torchtitan's selective checkpoints: a merger of them runs as often as in stock, and is not checkpointed twice."""
    stock = copy.deepcopy(model)
    counts = []
    for changed in (model, stock):
        select = Mock(side_effect=select_products)
        counts.append(select)
        wrap_blocks(changed, check_fn=is_merger, context_fn=select)
    hf_vit_accel.patch(model)
    assert_close(gradients(tower_of(model), GRID), gradients(tower_of(stock), GRID))
    check_calls(model, 1, 0)
    assert counts[0].call_count == counts[1].call_count > 0


def test_offloaded_mergers_are_called(model: nn.Module) -> None:
    check_gradients(model, functools.partial(offload, check_fn=is_merger))


def compile_parts(model: nn.Module) -> None:
    """Compile every part, as accelerate's `compile_regions` does."""
    tower = tower_of(model)
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = torch.compile(block, backend="eager")
    for name in ("patch_embed", "rotary_pos_emb", "merger"):
        setattr(tower, name, torch.compile(getattr(tower, name), backend="eager"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_ours_run_in_the_place_of_compiled_modules(model: nn.Module, when: str) -> None:
    stock = copy.deepcopy(model)
    if when == "before":
        compile_parts(model)
    hf_vit_accel.patch(model)
    if when == "after":
        run(tower_of(model), GRID)
        compile_parts(model)
    assert_close(run(tower_of(model), GRID), run(tower_of(stock), GRID))
    assert_close(gradients(tower_of(model), GRID), gradients(tower_of(stock), GRID))
    check_calls(model, 2 + (when == "after"), 0)
    with torch.no_grad():
        for changed in (model, stock):
            for parameter in changed.parameters():
                parameter.mul_(1.25)
    assert_close(run(tower_of(model), GRID), run(tower_of(stock), GRID))
