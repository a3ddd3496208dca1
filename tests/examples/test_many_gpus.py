"""Run the benchmarks of long videos and of one call over several GPUs with tiny models on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.ranks import run_on_ranks, share_small_calls
from tiny import TINY, tower_of

import hf_vit_accel
from hf_vit_accel.tower import one_pass as tower_module

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS)]

import long_video  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def small_calls_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_small_calls(monkeypatch)


def prove(family: str) -> None:
    """Patch a model of the family, so that forked ranks inherit its proof."""
    hf_vit_accel.patch(TINY[family].build())


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
    sys.argv = ["data_parallel.py", "--models=tiny", sizes, "--rounds=1", "--calls=0", "--no-pays", "--json", path]
    benchmark.main()


def test_the_benchmark_times_every_number_of_ranks_in_one_run(small_calls_are_shared: None, tmp_path: Path) -> None:
    prove("qwen2_5_vl")
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


ARGUMENTS = Namespace(seconds=6.0, height=16, width=24)


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    return TINY["qwen3_vl"].build()


def test_stock_and_patched_generate_the_same_text(model: transformers.PreTrainedModel) -> None:
    rows = []
    for is_patched in (False, True):
        if is_patched:
            hf_vit_accel.patch(model, max_rows=60, strict=True)
        with torch.inference_mode():
            rows.append(long_video.run(model, long_video.inputs_of(model, ARGUMENTS, 2.0), 5))
    for row in rows:
        assert row["patches"] == 6 * 4 * 6 and row["tokens"] == 6 * (6 + 2) + 22 and len(row["text"]) == 5
        assert row["encode"]["seconds"] > 0 < row["generate"]["seconds"]
    assert rows[0]["text"] == rows[1]["text"]
    assert hf_vit_accel.status(model).towers[0].passes == "2 calls in 6 passes"


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
