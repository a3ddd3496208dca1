"""Test patched towers on a GPU: exactness of every backend, one wait per forward, streams, memory, captures."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from support.backends import skip_for
from support.patching import check_error_bound
from tiny import FAMILIES, GRIDS, TINY, assert_close, merged_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.backends import BACKENDS, backend_named
from hf_vit_accel.tower.state import state_of

pytestmark = pytest.mark.gpu
NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture(scope="module", params=list(TINY))
def shared(request: pytest.FixtureRequest) -> nn.Module:
    """Return one model per family, for tests that do not change it."""
    return TINY[request.param].build()


@pytest.fixture
def tower(shared: nn.Module) -> nn.Module:
    """Return a copy of the shared model's tower, on the GPU in bf16."""
    return tower_of(copy.deepcopy(shared)).to("cuda", torch.bfloat16)


def is_usable(name: str) -> bool:
    return not backend_named(name).reasons_against_machine()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_towers_are_as_exact_as_stock(shared: nn.Module, dtype: torch.dtype) -> None:
    check_error_bound(shared, dtype, "cuda", ["auto", *[name for name in NAMES if is_usable(name)]])


def test_fp32_equals_stock(shared: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # stock's convolution would use it
    model = copy.deepcopy(shared).cuda()
    for grid in GRIDS.values():
        expected = run_tower(tower_of(model), grid)
        with hf_vit_accel.patched(model, strict=True):
            assert_close(run_tower(tower_of(model), grid), expected)


def waits_of(run: Callable[[], object]) -> list[str]:
    """Return the places where a run makes the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("attention", NAMES)
def test_one_wait_per_forward(tower: nn.Module, attention: str, grid: str) -> None:
    """Cover a new layout, a known one, a grid on the host, and a call through the stock forward."""
    skip_for(backend_named(attention).reasons_against_machine())
    waits_of(lambda: torch.ones(1, device="cuda").tolist())  # the first wait of a process is reported twice
    pixels = pixels_for(tower, GRIDS[grid], device="cuda", dtype=torch.bfloat16)
    on_host = torch.tensor(GRIDS[grid])
    on_gpu = on_host.cuda()

    def waits(grid_thw: torch.Tensor, **options: bool) -> list[str]:
        return waits_of(lambda: tower(pixels, grid_thw=grid_thw, **options))

    with torch.no_grad():
        hf_vit_accel.patch(tower, attention=attention, strict=True)
        tower(pixels, grid_thw=on_gpu)
        hf_vit_accel.patch(tower, attention=attention, strict=True)  # drops the cached layouts
        for grid_thw, count in ((on_gpu, 1), (on_gpu, 1), (on_host, 0)):
            places = waits(grid_thw)
            assert len(places) == count, places
        hf_vit_accel.patch(tower, attention=attention)
        tower(pixels, grid_thw=on_gpu, output_attentions=True)
        places = waits(on_gpu, output_attentions=True)
        assert len(places) == 1, places


def gradients_of(tower: nn.Module) -> torch.Tensor:
    """Return the gradients of all parameters in fp32, for pixels that are rounded to bf16."""
    grid = GRIDS["mixed"]
    pixels = pixels_for(tower, grid).bfloat16().to("cuda", tower.patch_embed.proj.weight.dtype)
    merged_of(tower(pixels, grid_thw=torch.tensor(grid, device="cuda"))).float().square().mean().backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return torch.cat([gradient.float().flatten() for gradient in gradients])


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn", "torch_cudnn", "torch_varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_stock(family: str, attention: str) -> None:
    if attention != "auto":
        skip_for(backend_named(attention).reasons_against_machine())
    tower = tower_of(TINY[family].build()).cuda()
    for parameter in tower.parameters():  # buffers, such as rotary frequencies, stay in fp32
        parameter.data = parameter.data.bfloat16()
    exact = gradients_of(copy.deepcopy(tower).float())
    stock = gradients_of(copy.deepcopy(tower))
    hf_vit_accel.patch(tower, attention=attention)
    assert relative_error(gradients_of(tower), exact) <= max(1.2 * relative_error(stock, exact), 2**-7)
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (1, 0)


def test_memory_is_that_of_stock(tower: nn.Module) -> None:
    run_tower(tower, GRIDS["mixed"])  # cuBLAS keeps a workspace from its first use
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hf_vit_accel.patch(tower, attention="torch_varlen")
    assert torch.cuda.memory_allocated() == before
    run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.unpatch(tower)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before * 1.05


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_outer_capture_is_an_error_that_names_our_option(family: str, is_warm: bool) -> None:
    tower = tower_of(TINY[family].build().to("cuda", torch.bfloat16))
    pixels = pixels_for(tower, GRIDS["images"], device="cuda", dtype=torch.bfloat16)
    expected = run_tower(tower, GRIDS["images"])
    hf_vit_accel.patch(tower)
    if is_warm:
        run_tower(tower, GRIDS["images"])
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with torch.no_grad(), pytest.raises(RuntimeError, match="cuda_graphs=True"), capture:
        tower(pixels, grid_thw=torch.tensor(GRIDS["images"]))
    assert_close(run_tower(tower, GRIDS["images"]), expected, 3e-2)
