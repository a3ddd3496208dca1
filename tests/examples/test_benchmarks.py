"""Run benchmarks with tiny models on a CPU: what they verify, what they time, and that patched towers run fast."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.backends import add_spoiled, hide_gpu
from support.ranks import run_on_ranks, share_small_calls
from tiny import TINY, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import FAMILIES
from hf_vit_accel.options import passes as tower_module
from hf_vit_accel.tools.bench import towers
from hf_vit_accel.tools.bench import ways as bench_ways

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS)]

import long_video  # noqa: E402
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
    for benchmark in (measuring, training, ways, long_video):
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


# --- long videos, and calls over several GPUs -------------------------------------------------------------------------


def _run_benchmark(rank: int, path: str) -> None:
    spec: Any = importlib.util.spec_from_file_location("shared", BENCHMARKS / "data_parallel.py")
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.DEVICE = CPU
    benchmark.build_tower = lambda *_: tower_of(TINY["qwen2_5_vl"].build()).requires_grad_(False)
    benchmark.SIZES = {"16 x 512²": [(1, 4, 4)] * 16, "32 pages": [(1, 8, 6)] * 7}
    dist.init_process_group = lambda *_, **__: None  # this rank has a group
    dist.destroy_process_group = lambda: None
    sizes = "--sizes=" + ",".join(benchmark.SIZES)
    sys.argv = ["data_parallel.py", "--models=tiny", sizes, "--rounds=1", "--json", path]
    benchmark.main()


def test_every_number_of_ranks_is_timed_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_small_calls(monkeypatch)
    hf_vit_accel.patch(TINY["qwen2_5_vl"].build())  # forked ranks inherit the proof
    path = tmp_path / "results.json"
    run_on_ranks(_run_benchmark, 4, tmp_path, str(path))
    runs = json.loads(path.read_text())["runs"]
    assert [run["ranks"] for run in runs] == [2, 4]
    for run in runs:
        count = run["ranks"]
        assert [row["balance"] for row in run["towers"]] == pytest.approx([1.0, -(-7 // count) / (7 / count)])
        for row in run["towers"]:
            assert row["difference"] < 1e-5 and row["status"] == f"rank 0 of {count}, 2 calls shared"
            assert row["shared_by_alone"] == row["shared_ms"] / row["alone_ms"] and row["balance_measured"] >= 1.0


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    return TINY["qwen3_vl"].build()


def test_half_as_many_frames_are_tried_until_all_fits(
    model: transformers.PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    encode = tower_module.encode

    def encode_at_most_300_rows(route: object, pixels_TP: torch.Tensor, *others: object, **options: object) -> object:
        if len(pixels_TP) > 300:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return encode(route, pixels_TP, *others, **options)

    monkeypatch.setattr(tower_module, "encode", encode_at_most_300_rows)
    monkeypatch.setattr(long_video, "build", lambda *_, **__: model)
    options = {"random": "qwen3-vl-8b", "seconds": 6, "height": 32, "width": 32, "tokens": 3}
    options["json"] = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["x", *(f"--{name}={value}" for name, value in options.items())])
    long_video.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == printed
    assert [(row["way"], row["fps"], row["patches"], "text" in row) for row in printed] == [
        ("stock", 2.0, 384, True),
        ("patched", 2.0, 384, False),
        ("patched", 1.0, 192, True),
    ]
