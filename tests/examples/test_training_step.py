"""The benchmark of a training step: what it trains, and that the patched tower serves every step."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
FOLDER = Path(__file__).parents[2] / "examples" / "benchmark"
TEXT = dict(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2)
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TOWER = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=40, patch_size=4, window_size=16)
TOWER |= dict(fullatt_block_indexes=[1], out_hidden_size=32)


def test_both_ways_train_what_they_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    first_token = importlib.import_module("first_token")
    step = importlib.import_module("training_step")
    monkeypatch.setattr(first_token, "TEXT", {"tiny": ("Qwen2_5_VL", TEXT | {"rope_parameters": ROPE})})
    monkeypatch.setattr(first_token, "SHAPES", {"tiny": ("Qwen2_5_VLVisionConfig", TOWER)})
    monkeypatch.setattr(step, "IMAGE", 390), monkeypatch.setattr(step, "START", 391)
    monkeypatch.setattr(step, "END", 392)
    build, trained = first_token.build, []
    monkeypatch.setattr(step, "build", lambda name, **device: build(name, 390, 393, 391, 392, **device))
    train = step.train
    monkeypatch.setattr(
        step,
        "train",
        lambda model, *rest: (
            (trained.append({n for n, p in model.named_parameters() if p.requires_grad})) or train(model, *rest)
        ),
    )
    target = tmp_path / "steps.json"
    step.main(model="tiny", images=2, side=4, steps=1, rounds=1, rank=2, json_path=target)
    found = json.loads(target.read_text())
    assert all("language_model" in name and "lora" in name for name in trained[0]) and trained[0] == trained[1]
    assert all("visual" in name for name in trained[2]) and trained[2] == trained[3]
    for way in step.WAYS:
        # What patched steps ran of the tower: every step of the trainer and every forward of the tower alone.
        assert found[way]["stock_calls"] == 0 and found[way]["fast_calls"] >= step.WARM_UPS + 1
        assert found[way]["share_of_stock"] == found[way]["patched"]["step"] / found[way]["stock"]["step"]
    sys.modules.pop("training_step"), sys.modules.pop("first_token")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_every_way_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool) -> None:
    """The benchmark of ways to train: stock and patched have the same gradients, and every step is fast."""
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced alike, in less time
    ways = importlib.import_module("ways")
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": TOWER,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    target, chosen = tmp_path / "ways.json", [way for way in ways.WAYS if (way == "torch.compile") == compiled]
    asked: Any = dict(models=str(tmp_path / "config.json"), sizes="1x4x4+1x2x4", ways=";".join(chosen))
    ways.main(**asked, rounds=1, json_path=target)
    rows = json.loads(target.read_text())["rows"]
    assert [row["way"] for row in rows[::2]] == [row["way"] for row in rows[1::2]] == chosen
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["contender"], ours["contender"]) == ("stock sdpa", "auto")
        assert ours["calls"] == {"fast": 4, "stock": 0} and 0 <= ours["difference"] < 0.05
        assert ours["slower"] == pytest.approx(100 * (ours["ms"] / stock["ms"] - 1))
    sys.modules.pop("ways")
