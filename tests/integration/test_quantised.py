"""Towers whose Linears are quantised: these are called, everything else is ours. Results and gradients are stock's.

Stand-ins of the same shape run everywhere, bitsandbytes, torchao and quanto where they are installed.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from support import quantised
from support.changes import Change
from support.cpu_graphs import SMALL, Recorder
from support.cpu_graphs import status_of as graphs_of
from support.libraries import lora
from support.patching import check_calls, check_stock, mean_errors, run, training_step
from support.tensors import flat
from support.towers import alike
from support.uses import prompt_with_labels
from tiny import FAMILIES, GRIDS, TINY, assert_close, checkpoint_layers, pixels_for, relative_error, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.graphs import called

WAYS: dict[str, tuple[Change, str | None]] = {
    "modules with a scale": (quantised.int8_linears, None),
    "tensor subclasses": (quantised.int8_weights, None),
    "packed": (quantised.packed_linears, None),
    "bitsandbytes, 4 bit": (quantised.bitsandbytes_4bit, "bitsandbytes"),
    "bitsandbytes, 8 bit": (quantised.bitsandbytes_8bit, "bitsandbytes"),
    "torchao": (quantised.torchao_int8, "torchao"),
    "quanto": (quantised.quanto_int8, "optimum.quanto"),
}


ALL = r".*(visual\.blocks|language_model).*(qkv|proj)"
TEXT = r".*language_model.*_proj"


def quantise(model: nn.Module, way: str) -> nn.Module:
    change, package = WAYS[way]
    if package is not None:
        pytest.importorskip(package)
    return change(model, ExitStack())


def with_adapters(model: nn.Module, adapted: str) -> nn.Module:
    pytest.importorskip("peft")
    return lora(adapted)(model, ExitStack()).train()


def call(tower: nn.Module, dtype: torch.dtype, *, autocast: bool) -> list[torch.Tensor]:
    grid = GRIDS["mixed"]
    pixels = pixels_for(tower, grid).to(tower.patch_embed.proj.weight.dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        return flat(tower(pixels, grid_thw=torch.tensor(grid)))


@pytest.fixture(params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES[1:])])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return TINY[request.param].build()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("prepared", "autocast"),
    [*alike((False, False), (False, True), (True, False)), (True, True)],
    ids=["", "autocast", "upcast", "upcast, autocast"],
)
@pytest.mark.parametrize("dtype", alike(torch.bfloat16, torch.float16))
def test_outputs_have_the_values_and_dtypes_of_stock(
    model: nn.Module, way: str, dtype: torch.dtype, prepared: bool, autocast: bool
) -> None:
    """`from_pretrained(quantization_config=...)`, then perhaps `prepare_model_for_kbit_training`, as TRL does."""
    model = quantise(model.to(dtype), way)
    if prepared and not way.startswith(("packed", "bits")):
        pytest.skip("PEFT does not upcast such models")
    if prepared:
        quantised.upcast(model)
    tower = tower_of(model)
    call(tower, dtype, autocast=autocast)  # bitsandbytes casts biases at the first call
    expected = call(tower, dtype, autocast=autocast)
    hf_vit_accel.patch(model)
    results = call(tower, dtype, autocast=autocast)
    assert [result.dtype for result in results] == [tensor.dtype for tensor in expected]
    assert_close(results, expected, 2 * torch.finfo(dtype).eps)
    check_calls(model, 1, 0)
    hf_vit_accel.unpatch(model)
    for result, value in zip(call(tower, dtype, autocast=autocast), expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize("way", ["packed", "bitsandbytes, 4 bit", "bitsandbytes, 8 bit"])
@pytest.mark.parametrize(
    ("checkpointed", "adapted"),
    [
        pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in ((None, ALL), (True, TEXT), (False, ALL))))
        for cell in itertools.product((None, True, False), (ALL, TEXT))
    ],
)
def test_a_step_of_qlora(model: nn.Module, way: str, checkpointed: bool | None, adapted: str) -> None:
    """TRL's and LLaMA-Factory's: quantised and upcast, LoRA on all Linears or the text's, bf16 autocast.

    Expected are stock's gradients without checkpoints: with them, stock Qwen3-VL gives none behind frozen embeddings.
    The text amplifies roundings, so that single gradients of stock are off by up to 7%.
    """
    model = with_adapters(quantised.upcast(quantise(model.bfloat16(), way)), adapted)
    if checkpointed is not None:
        model.enable_input_require_grads()
    inputs = prompt_with_labels(model)

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(**inputs).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]

    with quantised.computing_in_fp32(model):
        exact = step()
    with torch.autocast("cpu", torch.bfloat16):
        step()
        expected = step()
        if checkpointed is not None:
            checkpoint_layers(model, reentrant=checkpointed)
        hf_vit_accel.patch(model)
        results = step()
    assert len(expected) > 1 and all(float(gradient.norm()) > 0 for gradient in expected)
    assert [result.dtype for result in results] == [value.dtype for value in expected]
    for result, value, truth in zip(results, expected, exact, strict=True):
        bound = max(2 * relative_error(value, truth), torch.finfo(torch.bfloat16).eps)
        assert relative_error(result, truth) <= bound, "one seed: the mean of the tower's is 1.1 at most, as below"
    status = hf_vit_accel.status(model).towers[0]
    assert status.calls and not status.stock_calls, str(status)


def test_gradients_of_adapters_on_packed_linears_are_as_exact_as_stock_s(model: nn.Module) -> None:
    """QLoRA's tower alone, under bf16 autocast: the mean error of every gradient over ten seeds.

    Patch embeddings that are rounded otherwise (2 of 15,360 values) change the error of a gradient in a small image by
    up to 1.7 times with one seed, and by 0.99 to 1.05 times over thirty.
    """
    model = with_adapters(quantised.upcast(quantise(model.bfloat16(), "packed")), ALL)
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    seeds = range(10)

    def gradients() -> list[list[torch.Tensor]]:
        return [training_step(tower, grid, pixels_for(tower, grid, seed)) for seed in seeds]

    with quantised.computing_in_fp32(model):
        exact = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        stock = mean_errors(gradients(), exact)
        hf_vit_accel.patch(model)
        ours = mean_errors(gradients(), exact)
    check_calls(model, len(seeds), 0)
    assert len(ours) > 10
    for error, of_stock in zip(ours, stock, strict=True):
        assert error <= max(1.1 * of_stock, torch.finfo(torch.bfloat16).eps), (ours, stock)


@pytest.mark.parametrize("way", ["packed", "tensor subclasses"])
def test_gradients_through_called_modules_are_those_of_stock(model: nn.Module, way: str) -> None:
    """In fp32 they are equal to rounding: of pixels, norms, positions and patch embedding."""
    tower = tower_of(quantise(model, way))
    grid = GRIDS["mixed"]
    expected = training_step(tower, grid)
    hf_vit_accel.patch(model)
    assert_close(training_step(tower, grid), expected, 1e-4)
    check_calls(model, 1, 0)


def known(name: str, forward: Callable[[nn.Linear, torch.Tensor], torch.Tensor] | None = None) -> type:
    """Return a stand-in for bitsandbytes' 4-bit linear, which is known to treat each row by itself."""
    methods = {} if forward is None else {"forward": forward}
    return type(name, (quantised.PackedLinear,), {"__module__": "bitsandbytes.nn.modules", **methods})


def test_graphs_replay_called_linears_and_follow_their_weights(on_cpu: type[Recorder], model: nn.Module) -> None:
    """PEFT's `merge_adapter` puts other packed weights in the place of those that a graph has read."""
    tower = tower_of(quantised.replace_linears(model, known("Linear4bit")))
    grid = GRIDS["image"]
    expected = run(tower, grid)
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for _ in range(3):
        assert_close(run(tower, grid), expected)
    assert graphs_of(model).replays == 3 and not graphs_of(model).stale, graphs_of(model)
    for block in tower.blocks:
        block.attn.proj.weight.scale = block.attn.proj.weight.scale * 2
    changed = run(tower, grid)
    assert graphs_of(model).stale and graphs_of(model).replays == 4
    assert relative_error(changed[0], expected[0]) > 1e-3
    check_stock(model, grid, changed, 1e-5)


def at_odds(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return quantised.PackedLinear.forward(self, x) * self.calls


def waiting(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(at_odds, "a replay of a Linear4bit computes something else"), (waiting, "a Linear4bit cannot be captured")],
    ids=["a count in Python", "a kernel that waits"],
)
def test_a_trial_refuses_linears_that_graphs_replay_wrongly(
    on_cpu: type[Recorder], model: nn.Module, forward: Callable[[nn.Linear, torch.Tensor], torch.Tensor], reason: str
) -> None:
    linear = known("Linear4bit", forward)
    quantised.replace_linears(model, linear)
    block = tower_of(model).blocks[0]
    why = called.reason_against_capture([block.attn.proj], torch.float32, torch.device("cpu"))
    assert why is not None and reason in why


def test_patch_says_how_to_mend_weights_that_keep_a_tower_stock(model: nn.Module) -> None:
    """Layerwise casting, as of diffusers: plain modules store their weights in float8 between calls."""
    tower = tower_of(model)
    for block in tower.blocks:
        block.norm1.weight.data = block.norm1.weight.data.to(torch.float8_e4m3fn)
    with pytest.warns(UserWarning, match=r"stays stock: parameters of several dtypes.*llm_int8_skip_modules"):
        hf_vit_accel.patch(model)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["packed", "bitsandbytes, 4 bit", "bitsandbytes, 8 bit"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("prepared", [False, True], ids=["", "upcast"])
def test_dtypes_and_values_on_a_gpu(model: nn.Module, way: str, prepared: bool, autocast: bool) -> None:
    """CUDA's autocast computes a LayerNorm in fp32, so rows of stock widen from layer to layer."""
    model = quantise(model.bfloat16().cuda(), way)
    if prepared:
        quantised.upcast(model)
    tower = tower_of(model)
    grid = torch.tensor(GRIDS["mixed"], device="cuda")
    dtype = tower.patch_embed.proj.weight.dtype

    def step() -> list[torch.Tensor]:
        pixels = pixels_for(tower, GRIDS["mixed"]).to("cuda", dtype).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                outputs = flat(tower(pixels, grid_thw=grid))
            trained = flat(tower(pixels, grid_thw=grid))
        sum(output.float().square().mean() for output in trained).backward()
        return [*outputs, *(output.detach() for output in trained), pixels.grad]

    step()
    expected = step()
    hf_vit_accel.patch(model)
    for _ in range(4):  # the last ones are replayed
        results = step()
        assert [result.dtype for result in results] == [tensor.dtype for tensor in expected]
        assert_close(results, expected, 3e-2)
    status = hf_vit_accel.status(model).towers[0]
    assert not status.stock_calls, str(status)
