"""Run benchmarks with tiny models on a CPU: what they time and train, and that patched towers run fast."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny import TINY, tower_of
from torch import nn

pytest.importorskip("peft")
FOLDER = Path(__file__).parents[2] / "benchmarks"
TEXT = dict(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
)
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
IMAGE, START, END, VIDEO = range(390, 394)


@pytest.fixture
def whole_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("whole_call")
    monkeypatch.setattr(module, "TEXT", {"tiny": ("Qwen2_5_VL", TEXT)})
    monkeypatch.setattr(module, "SHAPES", {"tiny": ("Qwen2_5_VLVisionConfig", TOWER)})
    yield module
    sys.modules.pop("whole_call")


@pytest.fixture
def training_step(whole_call: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = importlib.import_module("training_step")
    monkeypatch.setattr(module, "IMAGE", IMAGE)
    monkeypatch.setattr(module, "START", START)
    monkeypatch.setattr(module, "END", END)
    build = whole_call.build
    monkeypatch.setattr(module, "build", lambda name, **device: build(name, IMAGE, VIDEO, START, END, **device))
    yield module
    sys.modules.pop("training_step")


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("ways")
    sys.modules.pop("ways")


@pytest.mark.matrix  # a benchmark, which users do not run
def test_each_way_trains_what_its_name_says(
    training_step: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[set[str]] = []
    train = training_step.train

    def train_and_record(model: nn.Module, *arguments: object) -> list[float]:
        trained.append({name for name, parameter in model.named_parameters() if parameter.requires_grad})
        return train(model, *arguments)

    monkeypatch.setattr(training_step, "train", train_and_record)
    path = tmp_path / "steps.json"
    training_step.main(models="tiny", images=2, side=4, steps=1, rounds=1, rank=2, json_path=path)
    document = json.loads(path.read_text())
    of_adapters, of_adapters_patched, of_tower, of_tower_patched = trained
    assert of_adapters == of_adapters_patched and of_tower == of_tower_patched
    assert all("language_model" in name and "lora" in name for name in of_adapters)
    assert all("visual" in name for name in of_tower)
    assert [(row["model"], row["way"]) for row in document["rows"]] == [("tiny", way) for way in training_step.WAYS]
    for row in document["rows"]:
        # Counted are all steps of the trainer and all calls of the tower alone.
        assert row["stock_calls"] == 0 and row["fast_calls"] >= training_step.WARM_UPS + 1
        assert row["share_of_stock"] == row["patched"]["step"] / row["stock"]["step"]
        assert row["peak_gb"] == {"without graphs": None, "default": None}, "a CPU does not report its memory"


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


@pytest.fixture
def max_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("max_rows")
    sys.modules.pop("max_rows")


@pytest.mark.matrix  # a benchmark, which users do not run
def test_every_size_of_pass_is_timed(max_rows: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tiny_tower(model: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return tower_of(TINY["qwen2_5_vl"].build()).to(dtype).requires_grad_(False)

    monkeypatch.setattr(max_rows, "build_tower", tiny_tower)
    monkeypatch.setattr(max_rows, "HEIGHT", 4)
    monkeypatch.setattr(max_rows, "WIDTH", 4)
    monkeypatch.setattr(max_rows, "SIZES", (None, 32, 48, max_rows.AUTO_ROWS))
    path = tmp_path / "max_rows.json"

    max_rows.main(models="tiny", frames=6, rounds=2, million=12, json_path=path)

    document = json.loads(path.read_text())
    assert [row["frames"] for row in document["rows"]] == [[6], [2, 2, 2], [3, 3], [6]]
    assert all(row["ms"] > 0 and row["alone_ms"] > 0 and row["error"] < 1e-5 for row in document["rows"])
    assert document["million"]["rows"] == 12 * 4 * 4


def test_a_layer_is_timed_without_the_rest_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    checks = importlib.import_module("checks")
    monkeypatch.setattr(checks, "GRID", ((1, 4, 4),))
    clock = iter(range(10_000))
    monkeypatch.setattr(checks.time, "perf_counter", lambda: 1e-6 * next(clock))
    tower = tower_of(TINY["qwen3_vl"].build()).requires_grad_(False)
    assert checks.measure_layer(tower, calls=10) == pytest.approx({"median": 1, "least": 1}, rel=1e-3)
