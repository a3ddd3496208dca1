"""The proof of a tower's class: whatever the process around it does, and what becomes of one that cannot run."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.towers import ONE_TOWER
from tiny import GRIDS, TINY, assert_close, run_tower, tower_of
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

import hf_vit_accel
from hf_vit_accel.families import family_of
from hf_vit_accel.tower import proof as proofs
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]


@pytest.fixture(params=ONE_TOWER)
def tower(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tower of which nothing was proven or warned of yet."""
    monkeypatch.setattr(proofs, "_PROOFS", {})
    monkeypatch.setattr(proofs, "_WARNED", set())
    return tower_of(TINY[request.param].build())


def prove(tower: Any) -> proofs.Proof:
    family = family_of(tower)
    assert family is not None
    return proofs.prove(tower, family)


# --- bad moments ----------------------------------------------------------------------------------------------------


@contextmanager
def empty_weights() -> Iterator[None]:
    """As accelerate's `init_empty_weights`: parameters of all modules go to the meta device."""
    init_empty_weights = pytest.importorskip("accelerate").init_empty_weights
    with init_empty_weights():
        yield


@contextmanager
def global_hooks() -> Iterator[None]:
    """Hooks that change what any module takes, returns and computes gradients of, and that count calls."""
    with ExitStack() as stack:
        for name in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            register = getattr(torch_module, f"register_module_{name}_hook")
            stack.callback(register(lambda *given: 1 / 0).remove)
        yield


@contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)  # any device, the CPU too, would leave a mode behind


MOMENTS: dict[str, Callable[[], Any]] = {
    "init_empty_weights": empty_weights,
    **{f"SDP kernel {kind.name}": lambda kind=kind: sdpa_kernel(kind) for kind in SDPBackend.__members__.values()},
    "global hooks": global_hooks,
    "default device": default_device,
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "reduced precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "fake tensors": FakeTensorMode,
    "counted FLOPs": lambda: FlopCounterMode(display=False),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
"""What users have around `patch`, most of it for the whole process."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_proof_does_not_depend_on_its_moment(tower: Any, moment: str) -> None:
    expected = run_tower(tower, GRID)
    with MOMENTS[moment](), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*stays stock")
        hf_vit_accel.patch(tower)
    assert prove(tower).fast is None
    assert_close(run_tower(tower, GRID), expected)
    assert (state_of(tower).calls, state_of(tower).stock_calls) == (1, 0)


def test_global_hooks_count_what_they_count_of_stock(tower: Any) -> None:
    seen: list[str] = []
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        run_tower(tower, GRID)
        of_stock = seen.copy()
        seen.clear()
        hf_vit_accel.patch(tower)
        assert seen == []
        run_tower(tower, GRID)
    finally:
        handle.remove()
    assert seen == of_stock


# --- proofs that cannot run -----------------------------------------------------------------------------------------


class Moment:
    """A time in which no twin can be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempts, self.bad, build = 0, True, proofs._twin

        def twin(*given: Any) -> Any:
            self.attempts += given[-1] == torch.float64
            if self.bad:
                raise RuntimeError("no twin now")
            return build(*given)

        monkeypatch.setattr(proofs, "_twin", twin)


def test_a_proof_that_could_not_run_is_tried_again(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the warning sends nobody to another version."""
    moment, expected = Moment(monkeypatch), run_tower(tower, GRID)
    with pytest.warns(UserWarning, match="later calls try again") as caught:
        hf_vit_accel.patch(tower)
    assert "no twin now" in str(caught[0].message) and "newer" not in str(caught[0].message)
    moment.bad = False
    assert_close(run_tower(tower, GRID), expected)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls, status.against_fast) == (1, 0, ())
    assert moment.attempts == 2


def test_attempts_become_rare(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 63 calls: one to patch, then after 1, 2, 4, 8, 16 and 32 calls more."""
    moment = Moment(monkeypatch)
    with pytest.warns(UserWarning) as caught:
        hf_vit_accel.patch(tower)
        for _ in range(63):
            run_tower(tower, [(1, 2, 2)])
    assert len(caught) == 1
    assert moment.attempts == 7
    assert state_of(tower).stock_calls == 63


def test_a_proof_is_shared_once_another_tower_has_made_it(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, other = Moment(monkeypatch), type(tower)(tower.config).eval()
    with pytest.warns(UserWarning):
        hf_vit_accel.patch(tower)
        for _ in range(4):
            run_tower(tower, [(1, 2, 2)])
    moment.bad = False
    for _ in range(8):
        prove(other)
    attempts = moment.attempts
    run_tower(tower, [(1, 2, 2)])
    assert state_of(tower).calls == 1 and moment.attempts == attempts


def test_attempts_from_several_threads(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, expected = Moment(monkeypatch), run_tower(tower, GRID)
    with pytest.warns(UserWarning):
        hf_vit_accel.patch(tower)
    moment.bad = False
    outputs: list[Any] = []
    threads = [threading.Thread(target=lambda: outputs.append(run_tower(tower, GRID))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(outputs) == 4
    [assert_close(output, expected) for output in outputs]
    assert prove(tower).fast is None


def test_a_verdict_is_kept(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that differ, or parts that are not there, are no matter of the moment."""
    family = family_of(tower)
    assert family is not None
    first = prove(tower)
    assert prove(tower) is first and first.backoff is None
    monkeypatch.setattr(proofs, "_PROOFS", {})
    monkeypatch.setattr(proofs, "_verdict", lambda *_: ("differs", None))
    differing = prove(tower)
    assert (differing.fast, differing.backoff) == ("differs", None) and prove(tower) is differing


def test_parts_that_are_not_there_are_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tower_of(TINY["qwen2_vl"].build())
    monkeypatch.setattr(proofs, "_PROOFS", {})
    monkeypatch.setattr(proofs, "_WARNED", set())
    init = type(tower.blocks[0]).__init__

    def renamed(block: Any, *args: Any, **kwargs: Any) -> None:
        init(block, *args, **kwargs)
        block.norm_1 = block.norm1
        del block.norm1

    monkeypatch.setattr(type(tower.blocks[0]), "__init__", renamed)
    with pytest.warns(UserWarning, match="look for a newer hf_vit_accel"):
        hf_vit_accel.patch(tower)
    assert "is not built as qwen2_vl is known" in (prove(tower).fast or "") and prove(tower).backoff is None
