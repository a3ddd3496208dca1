"""Test `every_rank`: one call of the tower in every forward, with the losses and gradients of stock in one process.

Ranks hold images, videos, both or text alone, in every order. Without `every_rank`, they would wait for each other.
"""

import copy
import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.composites import COMPOSITES
from support.libraries import TEXT_LINEARS, TOWER_LINEARS, lora
from support.ranks import prove_towers, run_on_gpus, run_on_ranks
from support.towers import two_layers
from tiny import TINY, chat_inputs, checkpoint_layers, randomise, relative_error, tower_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_vit_accel

RANKED = ("qwen2_5_vl", "qwen3_vl")
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


def batch_of(model: nn.Module, kind: str, seed: int) -> dict[str, Any]:
    """Return the inputs and labels of a batch of one kind, on the device of this rank."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's has another class
    inputs: dict[str, Any] = chat_inputs(model, GRIDS[kind], seed)
    inputs |= {"labels": inputs["input_ids"]}
    device = device_of_rank()
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def kinds_at(step: int, size: int) -> tuple[str, ...]:
    """Return what the ranks hold at a step: every order of kinds, one after the other."""
    orders = list(itertools.product(GRIDS, repeat=size))
    return orders[(step * 7 + 3) % len(orders)]  # 7 has no divisor in common with their number


def prepared(family: str, variant: str) -> tuple[Any, Any]:
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


def wrapped(model: Any, wrapper: str, size: int) -> Any:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device_of_rank().type, (size,))
    text = next(module for name, module in model.named_modules() if name.endswith("language_model"))
    tower = tower_of(model)
    for module in (*tower.blocks, tower, *text.layers):  # the model itself calls the embedding
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def without_sync(model: Any, wrapper: str, is_last: bool) -> Any:
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


TRAININGS = [
    ("qwen3_vl", "fsdp", "all weights", 5),
    ("qwen2_5_vl", "ddp", "all weights", 3),
    ("qwen3_vl", "fsdp", "lora", 2),  # ranks would wait for each other, if the dummy joined behind the text model
]
VARIED = [
    (*cell, 6) for cell in itertools.product(RANKED, ("fsdp", "ddp"), VARIANTS) if cell[1:] != ("ddp", "reentrant")
]
"""DDP does not take reentrant checkpoints."""


@pytest.mark.parametrize(
    ("family", "wrapper", "variant", "steps"),
    [*TRAININGS, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in VARIED)],
)
def test_two_ranks_train_as_one_process(family: str, wrapper: str, variant: str, steps: int, tmp_path: Path) -> None:
    prove_towers()
    run_on_ranks(check_training, 2, tmp_path, 2, family, wrapper, variant, steps)


def test_sharded_models_are_evaluated(tmp_path: Path) -> None:
    prove_towers()
    run_on_ranks(check_evaluation, 2, tmp_path, 2, "qwen3_vl")


def calls_of(model: nn.Module, inputs: dict[str, Any]) -> list[list[list[int]]]:
    """Return the grids that the tower gets in a forward."""
    grids: list[list[list[int]]] = []
    hook = tower_of(model).register_forward_pre_hook(
        lambda _, args, kwargs: grids.append(kwargs["grid_thw"].tolist()), with_kwargs=True
    )
    model(**inputs)
    hook.remove()
    return grids


def test_the_tower_is_called_once() -> None:
    model = hf_vit_accel.patch(TINY["qwen2_5_vl"].build().train(), every_rank=True)
    assert [len(calls_of(model, batch_of(model, kind, 0))) for kind in GRIDS] == [1, 1, 1, 1]
    assert calls_of(model, batch_of(model, "none", 0)) == [[[1, 2, 2]]]
    images_first = [[1, 6, 4], [1, 2, 2], [3, 4, 4], [2, 2, 2]]
    assert calls_of(model, batch_of(model, "both", 0)) == [images_first]
    with torch.no_grad():
        assert [len(calls_of(model, batch_of(model, kind, 0))) for kind in GRIDS] == [1, 1, 2, 0]
    hf_vit_accel.patch(model)
    assert [len(calls_of(model, batch_of(model, kind, 0))) for kind in GRIDS] == [1, 1, 2, 0]


def test_features_that_the_caller_has_encoded() -> None:
    """The tower is trained by its dummy where the caller gives features."""
    model = hf_vit_accel.patch(TINY["qwen3_vl"].build().train(), every_rank=True)
    if "mm_encoder_outputs" not in inspect.signature(type(model.model).forward).parameters:
        pytest.skip("this transformers takes no features")
    inputs = batch_of(model, "images", 0)
    pixels = inputs.pop("pixel_values")
    with torch.no_grad():
        features = model.model.get_image_features(pixels, inputs["image_grid_thw"], return_dict=True)
    model(**inputs, mm_encoder_outputs={"image": features}).loss.backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in tower_of(model).parameters())


@pytest.mark.parametrize("order", ["before patching", "after patching"])
def test_a_tower_that_is_saved_beside_its_original_is_trained(order: str) -> None:
    """PEFT trains a copy of the tower: `LoraConfig(modules_to_save=["visual"])`, before and after `patch`."""
    peft = pytest.importorskip("peft")
    model = TINY["qwen2_5_vl"].build().train()
    stock = copy.deepcopy(model)
    if order == "after patching":
        hf_vit_accel.patch(model, every_rank=True)
    adapted = []
    for candidate in (model, stock):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=r".*language_model.*q_proj", modules_to_save=["visual"])
        adapted.append(peft.get_peft_model(candidate, config))
    if order == "before patching":
        hf_vit_accel.patch(adapted[0], every_rank=True)
    for kind in ("none", "images", "both"):
        for candidate in adapted:
            candidate.zero_grad(set_to_none=True)
            candidate(**batch_of(candidate, kind, 0)).loss.backward()
        for (name, ours), expected in zip(adapted[0].named_parameters(), adapted[1].parameters(), strict=True):
            if ours.requires_grad:
                assert ours.grad is not None, name
                expected = torch.zeros_like(ours) if expected.grad is None else expected.grad
                torch.testing.assert_close(ours.grad, expected, atol=1e-5, rtol=1e-3)
    [status] = hf_vit_accel.status(adapted[0]).models
    assert status.every_rank == (3, 1)


def test_a_compiled_tower_gets_the_dummy() -> None:
    """`torch.compile` puts a wrapper in the place of the tower."""
    model = hf_vit_accel.patch(TINY["qwen3_vl"].build().train(), every_rank=True)
    tower = model.model.visual
    model.model.visual = torch.compile(tower, backend="eager")
    model(**batch_of(model, "none", 0)).loss.backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


def test_a_backbone_is_called_with_return_dict() -> None:
    """As transformers' ColQwen2 and TRL's value heads call it."""
    stock = TINY["qwen2_vl"].build().train()
    model = hf_vit_accel.patch(copy.deepcopy(stock), every_rank=True)
    for kind in GRIDS:
        inputs = batch_of(stock, kind, 0)
        inputs.pop("labels")
        for return_dict in (True, False):
            ours, expected = (z.model(**inputs, return_dict=return_dict) for z in (model, stock))
            assert type(ours) is type(expected)
            torch.testing.assert_close(ours[0], expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not hasattr(transformers, "ColQwen2ForRetrieval"), reason="this transformers has no ColQwen2")
def test_a_model_that_encodes_pictures_itself_calls_the_tower_once() -> None:
    """transformers' ColQwen2 calls the tower, then the backbone with embeddings. A second call would hang FSDP."""
    vlm = TINY["qwen2_vl"].build()
    config = transformers.ColQwen2Config(vlm_config=vlm.config.to_dict(), embedding_dim=16)
    stock = transformers.ColQwen2ForRetrieval(config).train()
    randomise(stock)
    model = hf_vit_accel.patch(copy.deepcopy(stock), every_rank=True)
    text = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    pictures = chat_inputs(vlm, [(1, 4, 6)])
    pictures["pixel_values"] = pictures["pixel_values"][None]
    weights = torch.linspace(-1, 1, 16)
    for count, inputs in enumerate((pictures, text, pictures, text), 1):
        for each in (stock, model):
            each.zero_grad(set_to_none=True)
            (each(**inputs).embeddings * weights).sum().backward()
        assert hf_vit_accel.status(model).towers[0].calls == count
        for (name, ours), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
            assert ours.grad is not None or expected.grad is None, name
            if expected.grad is not None:
                torch.testing.assert_close(ours.grad, expected.grad, atol=1e-4, rtol=1e-3)


def test_what_cannot_be_one_call_is_refused() -> None:
    model = COMPOSITES["ernie4_5_vl_moe"].make()
    with pytest.raises(ValueError, match=r"every_rank=True does not work with Ernie4_5_VLMoeModel: .*one call"):
        hf_vit_accel.patch(model, every_rank=True)
    assert not hf_vit_accel.status(model).towers[0].patched
    with pytest.raises(ValueError, match="pass the whole model"):
        hf_vit_accel.patch(tower_of(TINY["qwen2_vl"].build()), every_rank=True)
    model = hf_vit_accel.patch(TINY["qwen2_vl"].build(), every_rank=True)
    with pytest.raises(ValueError, match=r"\['image_cu_seqlens'\] cannot be used; drop them"):
        model(**batch_of(model, "images", 0), image_cu_seqlens=torch.tensor([0, 4]))
    model.model.get_image_features = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="methods of its own"):
        model(**batch_of(model, "images", 0))


# --- on two GPUs, which NCCL connects ---------------------------------------------------------------------------------


def check_fifty_steps(rank: int) -> None:
    """Train with FSDP2 and DDP, both families, in the same processes: a new process takes longer than the training."""
    for family in RANKED:
        for wrapper in ("fsdp", "ddp"):
            check_training(rank, 2, family, wrapper, "all weights", 50)


def check_variants(rank: int) -> None:
    for variant in ("frozen tower", "checkpointed", "lora", "accumulated"):
        check_training(rank, 2, "qwen3_vl", "fsdp", variant, 6)
    check_evaluation(rank, 2, "qwen3_vl")


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_fifty_steps, check_variants])
def test_gpu_two_ranks_train_as_one_process(check: Callable[[int], None], tmp_path: Path) -> None:
    run_on_gpus(check, 2, tmp_path)
