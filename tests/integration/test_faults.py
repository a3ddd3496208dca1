"""Errors that are no faults of backends or kernels reach the user: memory that runs out, users' modules, invariants."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import GRID, StockModels, fail_once, faults_of
from support.patching import status_of
from support.towers import alike
from tiny import TINY, assert_close, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FlexConfig
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.engine import route
from hf_vit_accel.ops import add_norm

pytestmark = pytest.mark.usefixtures("afresh")


@pytest.mark.parametrize("name", ["blocks.1.attn.proj", "blocks.2.mlp", "blocks.0.norm1", "merger", "merger.mlp.0"])
def test_errors_of_a_users_module_are_the_users(references: list[str], name: str) -> None:
    model = TINY["qwen2_5_vl"].build()
    tower = tower_of(model)
    error = RuntimeError("mine")
    calls = []

    def fail(x: torch.Tensor, **kwargs: object) -> None:
        calls.append(x)
        raise error

    tower.get_submodule(name).forward = fail
    hf_vit_accel.patch(model)
    calls.clear()  # `patch` tries exchanged parts
    with pytest.raises(RuntimeError, match="mine") as raised:
        run_tower(tower, GRID)
    assert raised.value is error and len(calls) == 1 and not faults_of(model)


def test_errors_of_a_score_mod_reach_its_author(stock_models: StockModels) -> None:
    def score_mod(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        if broken:
            raise KeyError("mine")
        return score

    model, expected = stock_models["qwen2_vl"]
    broken = True
    hf_vit_accel.patch(model, attention=FlexConfig(score_mod=score_mod))
    with pytest.raises(KeyError, match="mine"):
        run_tower(tower_of(model), GRID)
    broken = False
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).backends["full"] == "flex" and not status_of(model).fallbacks


# --- memory that runs out, and our own invariants -------------------------------------------------------------------

# Owner and name of a function, and which of its calls fails. The first three run once a layout only.
PLACES: dict[str, tuple[Any, str, int]] = {
    "metadata": (route, "build", 0),
    "the host's plan": (Sdpa, "plan", 0),
    "the copy to the device": (route, "send", 0),
    "a product of the second layer": (nn.functional, "linear", 6),
    "attention in the second such layer": (Sdpa, "attend", 1),
    "a kernel": (add_norm, "add_norm_reference", 3),  # the stand-in of the kernel calls this
}


@pytest.mark.parametrize("strict", alike(False, True), ids=["", "strict"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_that_is_no_fault_reaches_the_user(
    references: list[str],
    stock_models: StockModels,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    strict: bool,
) -> None:
    """The same error is raised, with nothing added; nothing is counted or remembered."""
    model, expected = stock_models["qwen2_5_vl"]
    tower = tower_of(model)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    hf_vit_accel.patch(model, strict=strict)
    for _ in range(1 if place in list(PLACES)[:3] else 2):  # with a new layout, and with a cached one
        with monkeypatch.context() as broken:
            owner, name, after = PLACES[place]
            fail_once(broken, owner, name, error, after)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                run_tower(tower, GRID)
        assert raised.value is error and error.args == ("CUDA out of memory. Tried to allocate 20.00 GiB.",)
        assert error.__cause__ is None and error.__context__ is None and not getattr(error, "__notes__", ())
        assert not faults_of(model) and not status_of(model).fallbacks
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).stock_calls == 0 and "norms" in status_of(model).fused


# --- on a GPU ---------------------------------------------------------------------------------------------------------

WITHOUT = """
import torch
from tiny import GRIDS, TINY, assert_close, run_tower, tower_of
import hf_vit_accel
model = TINY["qwen2_5_vl"].build().to("cuda", torch.bfloat16)
expected = run_tower(tower_of(model), GRIDS["mixed"])
hf_vit_accel.patch(model, cuda_graphs=GRAPHS)
for _ in range(3):
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected, 3e-2)
status = hf_vit_accel.status(model).towers[0]
assert status.calls == 3 and status.fused == ("patch_embed",), status
assert any("no fused kernel can serve the call" in reason for reason in status.fallbacks), status.fallbacks
print("served")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_a_cache_folder_that_cannot_be_written(tmp_path: Path, graphs: bool) -> None:
    """Run a new process, since this one has compiled kernels in memory."""
    (tmp_path / "file").touch()
    folder = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "file" / "below"),
    }
    code = WITHOUT.replace("GRAPHS)", f"{graphs})")
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and "served" in process.stdout, process.stderr[-3000:]
