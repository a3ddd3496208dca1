"""Run benchmarks with tiny models on a CPU: what they time and train, and that patched towers run fast."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tiny import TINY, tower_of

pytest.importorskip("peft")
FOLDER = Path(__file__).parents[2] / "benchmarks"
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


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("ways")
    sys.modules.pop("ways")


def test_every_way_to_train_is_fast_and_has_stocks_gradients(ways: ModuleType, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": TOWER,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "ways.json"
    model = str(tmp_path / "config.json")
    ways.main(models=model, sizes="1x4x4+1x2x4", rounds=1, json_path=path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows[::2]] == [row["way"] for row in rows[1::2]] == list(ways.WAYS)
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["contender"], ours["contender"]) == ("stock sdpa", "auto")
        assert (
            ours["calls"] == {"fast": 4 * ways.WAYS[ours["way"]].batches, "stock": 0} and 0 <= ours["difference"] < 0.05
        )
        assert ours["slower"] == pytest.approx(100 * (ours["ms"] / stock["ms"] - 1))
        assert ours["total_gb"] == {"without graphs": None, "default": None}, "a CPU does not report its memory"


def test_a_layer_is_timed_without_the_rest_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    checks = importlib.import_module("checks")
    monkeypatch.setattr(checks, "GRID", ((1, 4, 4),))
    clock = iter(range(10_000))
    monkeypatch.setattr(checks.time, "perf_counter", lambda: 1e-6 * next(clock))
    tower = tower_of(TINY["qwen3_vl"].build()).requires_grad_(False)
    assert checks.measure_layer(tower, calls=10) == pytest.approx({"median": 1, "least": 1}, rel=1e-3)
