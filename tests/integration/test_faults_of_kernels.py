"""Faults put into kernels, and into captures of CUDA graphs: kernels are disabled, the call is reported and counted.

References stand in for all other kernels, and a recorder replays graphs by running again.
"""

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.changes import through_pickle
from support.cpu_graphs import SMALL, Recorder
from support.faults import GRID, LAUNCH_ERRORS, Flashinfer, Launches, StockModels, faults_of, raises
from support.kernel_table import KERNELS
from support.patching import status_of
from support.references import put
from support.towers import ONE_TOWER
from tiny import assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, machine
from hf_vit_accel.ops import add_norm

pytestmark = pytest.mark.usefixtures("afresh")

BreakKernel = Callable[[str, BaseException], Launches]


def run(model: nn.Module, *, trains: bool) -> list[torch.Tensor]:
    tower = tower_of(model)
    with torch.set_grad_enabled(trains):
        return [output.detach() for output in outputs_of(tower(pixels_for(tower, GRID), torch.tensor(GRID)))]


LAUNCHED: dict[str, tuple[str, bool]] = {
    "add_norm_": ("qwen2_vl", False),
    "mlp": ("qwen2_vl", True),
    "window_attention": ("qwen2_5_vl", False),
    "linear_swiglu": ("qwen2_5_vl", False),
    "quick_gelu_": ("qwen2_vl", False),
    "pad_swiglu": ("qwen2_5_vl", False),
    "swiglu": ("qwen2_5_vl", False),
    "add_norm": ("qwen2_vl", True),
    "rope_": ("qwen2_vl", False),
    "add_positions_": ("qwen3_vl", False),
    "add_positions": ("qwen3_vl", True),
}
"""Kernels with a family that launches them, with gradients or without."""
TRIED = ("add_norm_", "mlp", "window_attention", "linear_swiglu")
"""Kernels of every room; the matrix has the others."""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(pytest.param(x, "no C compiler", marks=[pytest.mark.matrix] * (x not in TRIED)) for x in LAUNCHED),
        ("add_norm_", "the kernel does not compile"),
    ],
)
def test_a_kernel_that_cannot_be_launched(
    break_kernel: BreakKernel, stock_models: StockModels, name: str, error: str
) -> None:
    family, trains = LAUNCHED[name]
    model, expected = stock_models[family]
    launches = break_kernel(name, LAUNCH_ERRORS[error])
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(run(model, trains=trains), expected)
    assert launches.tried == 1, "it is not tried again"
    check_report(model, LAUNCH_ERRORS[error])
    assert not faults_of(copy.deepcopy(model)) and not faults_of(through_pickle(model)), "a copy tries for itself"
    hf_vit_accel.patch(model, strict=True)
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"strict=True .*: kernels failed when it ran") as strict:
            run(model, trains=trains)
        assert strict.value.__context__.__cause__ is LAUNCH_ERRORS[error]
    hf_vit_accel.patch(model, fuse=False, strict=True)
    run_tower(tower_of(model), GRID)


def check_report(model: nn.Module, error: BaseException) -> None:
    """Check what `status` says after two calls, the first of which met the fault."""
    message = " ".join(str(error).split())
    reason = f"failed when it ran: {type(error).__name__}: {message}"
    status = status_of(model)
    assert (status.calls, status.stock_calls) == (2, 0)
    assert status.fused == ("patch_embed",) and status.unfused["norms"] == status.unfused["rope"] == reason
    assert status.fallbacks == {f"no fused kernel can serve the call: one {reason}": 2} and message in str(status)


def test_if_the_retry_fails_too_its_error_is_raised_and_nothing_remembered(
    break_kernel: BreakKernel, stock_models: StockModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = stock_models["qwen2_vl"]
    tower = tower_of(model)
    second_error = RuntimeError("and again")
    hf_vit_accel.patch(model)
    with monkeypatch.context() as broken:
        put(broken, vars(add_norm)["add_norm_"], raises(RuntimeError("an illegal memory access was encountered")))
        broken.setattr(nn.functional, "scaled_dot_product_attention", raises(second_error))
        with pytest.raises(RuntimeError, match="and again") as raised:
            run_tower(tower, GRID)
        assert raised.value is second_error and "illegal memory access" in " ".join(second_error.__notes__)
    assert not faults_of(model) and not status_of(model).fallbacks
    assert_close(run_tower(tower, GRID), expected)
    assert "norms" in status_of(model).fused


def test_threads_that_meet_a_fault_at_once(
    break_kernel: BreakKernel, stock_models: StockModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = stock_models["qwen2_vl"]
    together = threading.Barrier(3)
    launches = break_kernel("add_norm_", LAUNCH_ERRORS["the GPU is not known"])
    launch = KERNELS["add_norm_"].function

    def slow(*args: object, **kwargs: object) -> Any:
        together.wait(120)
        return launch(*args, **kwargs)

    put(monkeypatch, launch, slow)
    hf_vit_accel.patch(model)
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: [run_tower(tower_of(model), GRID) for _ in range(3)], range(3)))
    for outputs in itertools.chain(*results):
        assert_close(outputs, expected)
    assert launches.tried == 3 and faults_of(model) == {machine.KERNELS}


# --- faults with CUDA graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ONE_TOWER)
def test_a_kernel_that_fails_in_a_capture(
    on_cpu: type[Recorder], break_kernel: BreakKernel, stock_models: StockModels, family: str
) -> None:
    """The graph is captured again without kernels, and replayed from then on."""
    model, expected = stock_models[family]
    launches = break_kernel("add_norm_", LAUNCH_ERRORS["no C compiler"])
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for _ in range(3):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.graphs.replays >= 3 and status.graphs.off is None and status.calls == 3
    assert launches.tried == 2, "in the capture and in the eager run after it"
    assert [count for reason, count in status.fallbacks.items() if "fused kernel" in reason] == [3]
    hf_vit_accel.patch(model, cuda_graphs=SMALL, strict=True)
    with pytest.raises(FallbackError, match=r"capture failed: .*Failed to find C compiler"):
        run_tower(tower_of(model), GRID)


def test_a_backend_that_fails_after_a_capture(
    on_cpu: type[Recorder], flashinfer: Flashinfer, stock_models: StockModels
) -> None:
    """It fails in a stock call, which drops the graphs that use it."""
    model, expected = stock_models["qwen3_vl"]
    tower = tower_of(model)
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and status_of(model).graphs.captures
    flashinfer.run = raises(RuntimeError("EXECUTION_FAILED"))
    with tower.rotary_pos_emb.register_forward_hook(lambda *_: None):
        assert_close(run_tower(tower, GRID), expected)
    for _ in range(3):
        assert_close(run_tower(tower, GRID), expected)
    status = status_of(model)
    assert status.graphs.replays >= 3 and status.backends["full"] == "sdpa"
    assert [count for reason, count in status.fallbacks.items() if "EXECUTION_FAILED" in reason] == [4]
