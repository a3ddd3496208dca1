"""Train on several ranks with `every_rank`, beside stock, which runs the batches of all ranks in one process."""

import copy
import itertools
from contextlib import ExitStack, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tiny import chat_inputs, checkpoint_layers, relative_error, tower_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_vit_accel
from support.libraries import TEXT_LINEARS, TOWER_LINEARS, lora
from support.towers import two_layers

Model: TypeAlias = Any
"""A model of transformers or an argument of its methods, which have no types."""
Inputs = dict[str, Any]
"""The arguments of a model's forward by name."""


GRIDS: dict[str, list[tuple[int, int, int]]] = {
    "images": [(1, 4, 6), (1, 8, 8)],
    "videos": [(2, 4, 4), (3, 2, 6)],
    "both": [(3, 4, 4), (1, 6, 4), (2, 2, 2), (1, 2, 2)],
    "none": [],
}
VARIANTS = ("all weights", "frozen tower", "checkpointed", "reentrant", "lora", "accumulated")


def device_of_rank() -> torch.device:
    """Return the device of this rank: a GPU of its own with NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


def batch_of(model: nn.Module, kind: str, seed: int) -> Inputs:
    """Return the inputs and labels of a batch of one kind, on the device of this rank."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's has another class
    inputs: Inputs = chat_inputs(model, GRIDS[kind], seed)
    inputs |= {"labels": inputs["input_ids"]}
    device = device_of_rank()
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def kinds_at(step: int, size: int) -> tuple[str, ...]:
    """Return what the ranks hold at a step: every order of kinds, one after the other."""
    orders = list(itertools.product(GRIDS, repeat=size))
    return orders[(step * 7 + 3) % len(orders)]  # 7 has no divisor in common with their number


def prepared(family: str, variant: str) -> tuple[Model, Model]:
    """Return a stock model and an equal one that is patched."""
    stock = two_layers(family).build().train()
    if variant == "lora":
        with ExitStack() as stack:
            stock = lora(f"{TOWER_LINEARS}|{TEXT_LINEARS}")(stock, stack).train()
    stock = stock.to(device_of_rank())
    if variant == "frozen tower":
        tower_of(stock).requires_grad_(False)
    model = copy.deepcopy(stock)
    if variant in ("checkpointed", "reentrant"):
        checkpoint_layers(model, reentrant=variant == "reentrant")
    return stock, hf_vit_accel.patch(model, every_rank=True)


def wrapped(model: Model, wrapper: str, size: int) -> Model:
    """Wrap a model in DDP or in FSDP2."""
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device_of_rank().type, (size,))
    text = next(module for name, module in model.named_modules() if name.endswith("language_model"))
    tower = tower_of(model)
    for module in (*tower.blocks, tower, *text.layers):  # the model itself calls the embedding
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def without_sync(model: Model, wrapper: str, is_last: bool) -> Model:
    """Return a context in which only the last backward of a step sums gradients over the ranks."""
    if wrapper == "ddp":
        return nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that FSDP2 has sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_training(rank: int, size: int, family: str, wrapper: str, variant: str, steps: int) -> None:
    """Compare losses, gradients and weights with those of stock, which runs the batches of all ranks here."""
    stock, model = prepared(family, variant)
    names = [name for name, parameter in stock.named_parameters() if parameter.requires_grad]
    parallel = wrapped(model, wrapper, size)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (stock, model)]
    parts = 2 if variant == "accumulated" else 1
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for part in range(parts):
            kinds = kinds_at(step * parts + part, size)
            batches = [batch_of(stock, kind, step * size + index) for index, kind in enumerate(kinds)]
            losses = []
            for batch in batches:
                losses.append(stock(**batch).loss)
                (losses[-1] / size).backward()
            with without_sync(parallel, wrapper, part == parts - 1):
                loss = parallel(**batches[rank]).loss
                loss.backward()
            assert relative_error(loss, losses[rank]) < 1e-4, (step, kinds)
        gradients = dict(zip(names, [p for p in model.parameters() if p.requires_grad], strict=True))
        total = torch.stack([p.grad.norm() for p in stock.parameters() if p.grad is not None]).norm()
        for name in names:
            gradient = gradients[name].grad
            assert gradient is not None, name
            expected = stock.get_parameter(name).grad
            expected = torch.zeros_like(stock.get_parameter(name)) if expected is None else expected
            error = (full(gradient) - expected).norm() / (expected.norm() + 1e-3 * total)
            assert error < 1e-3, (step, kinds, name, error)
        for optimizer in optimizers:
            optimizer.step()
    [status] = hf_vit_accel.status(model).models
    assert status.every_rank is not None and status.every_rank[0] == steps * parts
    assert hf_vit_accel.status(model).towers[0].stock_calls == 0


def check_evaluation(rank: int, size: int, family: str) -> None:
    """Evaluate a sharded model without gradients: ranks without pictures call the tower as well."""
    stock, model = prepared(family, "all weights")
    parallel = wrapped(model, "fsdp", size)
    for step in range(3):
        kinds = kinds_at(step, size)
        batch = batch_of(stock, kinds[rank], step)
        with torch.no_grad():
            assert relative_error(parallel.eval()(**batch).logits, stock.eval()(**batch).logits) < 1e-4
    [status] = hf_vit_accel.status(model).models
    assert status.every_rank is not None and status.every_rank[0] == 3
