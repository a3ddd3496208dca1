"""Run benchmarks with tiny models on a CPU: what they verify, what they time, and that patched towers run fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.backends import add_spoiled, hide_gpu
from tiny import TINY, tower_of
from torch import nn

from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tools.bench import towers
from hf_vit_accel.tools.bench import ways as bench_ways

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS)]

import measuring  # noqa: E402
import shapes  # noqa: E402
import training  # noqa: E402
import ways  # noqa: E402

CPU = torch.device("cpu")
GRID = ((1, 4, 4), (1, 2, 4))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's CUDA device, if it has one."""
    hide_gpu(monkeypatch)
    for benchmark in (measuring, training, ways):
        monkeypatch.setattr(benchmark, "DEVICE", CPU)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tower() -> nn.Module:
    tower = tower_of(TINY["qwen2_5_vl"].build(fresh=True))
    del tower.blocks[2:]
    return tower.to(torch.bfloat16).requires_grad_(True).train()


def measured(tower: nn.Module, backends: list[str], baselines: list[str]) -> dict[str, dict[str, Any]]:
    chosen = bench_ways.choose(tower, backends, baselines)
    return {row["contender"]: row for row in training.measure("tiny", tower, {"size": GRID}, chosen, rounds=1)}


def test_every_gradient_is_compared(tower: nn.Module) -> None:
    """Stock's own errors stand beside, and set-ups that cannot run are skipped."""
    rows = measured(tower, ["auto", "sdpa"], ["sdpa", "graph", "compile+graph"])
    timed = {name: row for name, row in rows.items() if row["status"] == "timed"}
    assert timed.keys() == {"stock sdpa", "auto", "sdpa"}
    assert all(row["problem"] for name, row in rows.items() if name not in timed)
    names = {name for name, _ in tower.named_parameters()} | {"pixels", "output 0"}
    for row in timed.values():
        assert row["worst"] in names and 1e-4 < row["error"] <= row["bound"] < 0.1 and row["ms"] > 0
        assert 0 < row["error_ratio_mean"] <= row["error_ratio"]
    assert all(parameter.grad is None for parameter in tower.parameters())


def test_a_wrong_gradient_is_not_timed(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is right, but the gradient of one product is a quarter too large."""

    class Louder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.25

    add_spoiled(monkeypatch, Louder.apply, differentiable=True)
    rows = measured(tower, ["spoiled", "sdpa"], ["sdpa"])
    assert rows["sdpa"]["status"] == "timed" and rows["spoiled"]["status"] == "wrong"
    assert rows["spoiled"]["ms"] is None and "is allowed, of " in rows["spoiled"]["problem"]


@pytest.mark.skipif(len(towers.SHAPES) < 9 + len(shapes.OTHERS), reason="this transformers lacks some families")
def test_every_family_has_a_shape() -> None:
    kinds = {towers.tower_class(towers.vision_config(model)).__name__ for model in towers.SHAPES}
    fast = [family for family in FAMILIES if not family.attention_only]
    assert all(kinds & {name for _, name in family.towers} for family in fast)
    for model in shapes.OTHERS:
        towers.build_tower(model, torch.device("meta"), torch.bfloat16)


TOWER = dict(
    depth=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=40,
    patch_size=4,
    window_size=16,
    fullatt_block_indexes=[1],
    out_hidden_size=32,
)


def test_every_way_to_train_is_fast_and_has_stocks_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": TOWER,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "ways.json"
    model = str(tmp_path / "config.json")
    options = [f"--models={model}", "--sizes=1x4x4+1x2x4", "--rounds=1", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["ways.py", *options])
    ways.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows[::2]] == [row["way"] for row in rows[1::2]] == list(ways.WAYS)
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["contender"], ours["contender"]) == ("stock sdpa", "auto")
        assert (
            ours["calls"] == {"fast": 4 * ways.WAYS[ours["way"]].batches, "stock": 0} and 0 <= ours["difference"] < 0.05
        )
        assert ours["slower"] == pytest.approx(100 * (ours["ms"] / stock["ms"] - 1))
        assert ours["total_gb"] == {"without graphs": None, "default": None}, "a CPU does not report its memory"
