"""Test towers with Liger's kernels on a GPU: outputs, gradients of LoRA, what is fused, and what is replayed."""

import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from support import libraries
from tiny import TINY, assert_close, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.tower import proof as proofs

pytestmark = pytest.mark.gpu
GRID = [(1, 6, 8)]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
ORDERS = ["classes before the model", "model before patch", "model after patch", "model after calls"]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's convolution would round fp32 to TF32, which the product in its place does not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def apply_liger(like: nn.Module, **options: object) -> None:
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)
    getattr(monkey_patch, f"apply_liger_kernel_to_{like.config.model_type}")(**options)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A model on the GPU. Names in transformers' file are put back afterwards, and nothing was proven yet."""
    model = TINY[request.param].build().cuda()
    namespace = vars(sys.modules[type(model).__module__])
    former = dict(namespace)
    forward = type(model).forward
    monkeypatch.setattr(proofs, "_PROOFS", {})
    try:
        yield model
    finally:
        type(model).forward = forward
        namespace.update(former)


def with_liger(model: nn.Module, order: str, **options: object) -> nn.Module:
    try:
        if order.startswith("classes"):
            apply_liger(model)
            other = type(model)._from_config(model.config).eval().to("cuda", model.dtype)
            other.load_state_dict(model.state_dict())
            return hf_vit_accel.patch(other, **options)
        if order == "model before patch":
            apply_liger(model, model=model)
            return hf_vit_accel.patch(model, **options)
        hf_vit_accel.patch(model, **options)
        if order == "model after calls":
            for _ in range(4):
                run_tower(tower_of(model), GRID)
        apply_liger(model, model=model)
    except ImportError as error:  # Liger 0.8.5 imports outputs that transformers 5.23 has no more
        pytest.skip(str(error))
    return model


def assert_fast(tower: nn.Module) -> None:
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 0 and status.against_fast == ()
    unfused = {name: why for name, why in status.unfused.items() if "the kernel is for bfloat16" not in why}
    assert not {"norms", "mlp", "rope", "mergers"} & unfused.keys(), unfused


@pytest.mark.parametrize("order", ORDERS)
def test_gpu_in_bf16_as_exact_as_stock_and_replayed(model: nn.Module, order: str) -> None:
    exact = run_tower(tower_of(model), GRID)
    model.to(torch.bfloat16)
    stock = run_tower(tower_of(model), GRID)
    tower = tower_of(with_liger(model, order, cuda_graphs=True))
    for _ in range(5):
        outputs = run_tower(tower, GRID)
    rounding = torch.finfo(torch.bfloat16).eps
    for ours, theirs, truth in zip(outputs, stock, exact, strict=True):
        assert relative_error(ours, truth) <= max(1.1 * relative_error(theirs, truth), rounding)
    assert_fast(tower)
    graphs = hf_vit_accel.status(tower).towers[0].graphs
    assert graphs is not None and str(graphs.last).startswith("replayed"), graphs


def gradients_of_adapters(tower: nn.Module) -> list[torch.Tensor]:
    tower.zero_grad(set_to_none=True)
    pixels = pixels_for(tower, GRID, device="cuda")
    output = tower(pixels, grid_thw=torch.tensor(GRID, device="cuda")).pooler_output
    output.square().mean().backward()
    return [p.grad for name, p in tower.named_parameters() if "lora_" in name and p.grad is not None]


@pytest.mark.parametrize("order", ORDERS)
def test_gpu_the_gradients_of_lora_are_those_of_stock(model: nn.Module, order: str) -> None:
    pytest.importorskip("peft")
    stock = libraries.lora(libraries.TOWER_LINEARS)(copy.deepcopy(model), None).train()
    expected = gradients_of_adapters(tower_of(stock))
    adapted = libraries.lora(libraries.TOWER_LINEARS)(with_liger(model, order), None).train()
    tower = tower_of(adapted)
    for _ in range(4):
        gradients = gradients_of_adapters(tower)
    assert len(gradients) == len(expected) > 0
    assert_close(gradients, expected, 1e-4)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_gpu_the_proof_does_not_depend_on_tf32(model: nn.Module, dtype: torch.dtype, precision: str) -> None:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        tower = tower_of(with_liger(model.to(dtype), "model before patch"))
        run_tower(tower, GRID)
        assert_fast(tower)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(former)


def test_gpu_a_model_that_is_patched_on_the_cpu_and_then_moved(
    model: nn.Module, recwarn: pytest.WarningsRecorder
) -> None:
    """`Trainer` moves a model that was patched before: nothing warns, and the first call on the GPU is fast."""
    expected = run_tower(tower_of(model), GRID)
    model.cpu()
    tower = tower_of(with_liger(model, "model before patch"))
    model.cuda()
    assert_close(run_tower(tower, GRID), expected, 1e-5)
    assert_fast(tower)
    assert not [w for w in recwarn if "stays stock" in str(w.message)]
