"""Test the proof of a tower's class: at bad moments, in child processes, and where it cannot run."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from support.towers import ONE_TOWER
from tiny import GRIDS, TINY, assert_close, relative_error, run_tower, tower_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing import start_processes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.families import family_of
from hf_vit_accel.tower import proof as proofs
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]


@pytest.fixture(params=ONE_TOWER)
def tower(request: pytest.FixtureRequest, nothing_proven: None) -> nn.Module:
    """Return a tower about which nothing was proven or warned yet."""
    return tower_of(TINY[request.param].build())


def prove(tower: nn.Module) -> proofs.Proof:
    family = family_of(tower)
    assert family is not None
    return proofs.prove(tower, family)


def global_hooks(stack: ExitStack) -> None:
    """Register global hooks of all kinds, which raise an error."""
    for name in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        register = getattr(torch_module, f"register_module_{name}_hook")
        stack.callback(register(lambda *_: 1 / 0).remove)


def default_device(stack: ExitStack) -> None:
    torch.set_default_device("meta")
    stack.callback(torch.set_default_device, None)  # any device, the CPU too, would leave a mode behind


def settings_and_modes(stack: ExitStack) -> None:
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float16)
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium")
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    for context in (
        torch.autograd.set_detect_anomaly(True),
        FlopCounterMode(display=False),
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: x),
    ):
        stack.enter_context(context)


MOMENTS: dict[str, Callable[[ExitStack], object]] = {
    "init_empty_weights": lambda stack: stack.enter_context(pytest.importorskip("accelerate").init_empty_weights()),
    "SDP kernel": lambda stack: stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "global hooks": global_hooks,
    "default device": default_device,
    "device context": lambda stack: stack.enter_context(torch.device("meta")),
    "fake tensors": lambda stack: stack.enter_context(FakeTensorMode()),
    "settings and modes": settings_and_modes,
}
"""Settings and contexts that users have around `patch`, most of them for the complete process."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_proof_does_not_depend_on_its_moment(tower: nn.Module, moment: str) -> None:
    expected = run_tower(tower, GRID)
    with ExitStack() as stack, warnings.catch_warnings():
        MOMENTS[moment](stack)
        warnings.filterwarnings("error", ".*stays stock")
        hf_vit_accel.patch(tower)
    assert prove(tower).why_not_fast is None
    assert_close(run_tower(tower, GRID), expected)
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (1, 0)


def test_a_proof_that_could_not_run_is_tried_again(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next patch. Calls try nothing, and the warning does not suggest another version."""
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    expected = run_tower(tower, GRID)
    attempt = Mock(side_effect=RuntimeError("no twin now"))
    with monkeypatch.context() as bad_moment, pytest.warns(UserWarning, match="until it is patched again") as caught:
        bad_moment.setattr(proofs, "build_twin", attempt)
        hf_vit_accel.patch(tower)
        attempts = attempt.call_count
        for _ in range(3):
            assert_close(run_tower(tower, GRID), expected, 0.0)
    assert len(caught) == 1 and attempt.call_count == attempts
    assert "no twin now" in str(caught[0].message) and "newer" not in str(caught[0].message)
    assert_close(run_tower(hf_vit_accel.patch(tower), GRID), expected)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls, status.against_fast) == (1, 0, ())


@pytest.mark.usefixtures("nothing_proven")
def test_missing_parts_are_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tower_of(TINY["qwen2_vl"].build())
    init = type(tower.blocks[0]).__init__

    def init_with_another_name(block: nn.Module, *args: object, **kwargs: object) -> None:
        init(block, *args, **kwargs)
        block.norm_1 = block.norm1
        del block.norm1

    monkeypatch.setattr(type(tower.blocks[0]), "__init__", init_with_another_name)
    with pytest.warns(UserWarning, match="look for a newer hf_vit_accel"):
        hf_vit_accel.patch(tower)
    assert "is not built as qwen2_vl is known" in (prove(tower).why_not_fast or "") and prove(tower).is_verdict


def prove_in_child(_: int, tower: nn.Module) -> None:
    assert prove(tower).why_not_fast is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_proof_in_a_forked_child(tower: nn.Module) -> None:
    child = start_processes(prove_in_child, (tower,), nprocs=1, join=False, daemon=True, start_method="fork")
    assert child.join(timeout=60), "it waits for a lock that its parent held"


def test_a_tower_with_a_method_of_its_own_stays_stock() -> None:
    tower = tower_of(TINY["qwen2_5_vl"].build())
    method = getattr(tower, "permute_input_for_window_attn", None)
    if method is None:
        pytest.skip("this transformers has no such method")
    before = run_tower(tower, GRID)
    tower.permute_input_for_window_attn = lambda tensor, *args, **kwargs: method(1.5 * tensor, *args, **kwargs)
    expected = run_tower(tower, GRID)
    assert relative_error(expected[0], before[0]) > 0.1, "the change matters"
    hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, GRID), expected)
    status = hf_vit_accel.status(tower).towers[0]
    assert (status.calls, status.stock_calls) == (0, 1)
