"""The benchmark: its floor, its verdicts, and what it prints, writes and draws."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from click.testing import Result
from hf_vit_accel.tools.bench.profile import part_of
from hf_vit_accel.tools.bench.work import Errors, draw_batch, results
from support.backends import Spoil, add_spoiled, hide_gpu
from support.families import tiny_tower
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from hf_vit_accel import backends, machine
from hf_vit_accel.families import FAMILIES, Family
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools import bench, cli
from hf_vit_accel.tools.bench import baselines, contenders, towers, verify
from hf_vit_accel.tools.bench.timing import time_in_turns

Row = dict[str, Any]

GRID = ((1, 4, 6), (3, 8, 4))
SIZE = "1x4x6+3x8x4"
DEPTH = 2
FAMILY_NAMES = tiny.FAMILIES
MEASURED = Path(__file__).parents[2] / "benchmarks" / "towers.json"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's CUDA device, if it has one."""
    hide_gpu(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the config.json of a tiny model, which has windows."""
    return write_config("qwen2_5_vl", tmp_path)


def write_config(name: str, folder: Path) -> Path:
    """Write the config.json of a tiny model of `DEPTH` layers into a folder, without weights; return the folder."""
    model = tiny.TINY[name]
    vision = model.vision | {"depth": DEPTH}
    if "deepstack_visual_indexes" in vision:
        vision |= {"deepstack_visual_indexes": [0]}
    config = getattr(transformers, model.config)(vision_config=vision, text_config=model.text, **tiny._TOKENS)
    config.save_pretrained(folder / name)
    return folder / name


def command(*options: object) -> Result:
    """Run `hf-vit-accel bench`."""
    return CliRunner().invoke(cli.app, ["bench", *(str(option) for option in options)])


def rows_of(path: Path) -> dict[str, Row]:
    """Return the rows of a JSON file by contender; the last size's, if there are several."""
    return {row["contender"]: row for row in json.loads(path.read_text())["rows"]}


def error_text(result: Result) -> str:
    """Return standard error without the box that is drawn around it."""
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("model", "floors"),
    [
        ("qwen3-vl-8b", (0.99, 7.32, 49.2, 21.4)),
        ("qwen2.5-vl-7b", (1.30, 7.13, 29.0, 27.2)),
        ("qwen2-vl-7b", (1.40, 10.1, 66.5, 30.0)),
    ],
)
def test_floor(model: str, floors: tuple[float, ...]) -> None:
    """Milliseconds at 790 TFLOP/s of 784, 4096, 14416 and 16384 patches, counted independently."""
    tower = bench.build_tower(model, torch.device("meta"), torch.bfloat16)
    sizes = ("one 448²", "one 1024²", "one page", "16 x 512²")
    computed = [bench.matrix_flops(tower, bench.SIZES[size]) / (bench.PEAK * 1e9) for size in sizes]
    assert computed == pytest.approx(floors, rel=0.03)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_matrix_flops_agree_with_torch(name: str) -> None:
    tower = tiny.tower_of(tiny.TINY[name].build())
    tower.set_attn_implementation("eager")
    pixels = tiny.pixels_for(tower, list(GRID))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(pixels, grid_thw=torch.tensor(GRID))
    rope = counter.get_total_flops() - bench.matrix_flops(tower, GRID)
    assert 0 <= rope <= 0.01 * counter.get_total_flops()  # the angles are a small product too in some families


def test_every_built_in_shape_builds() -> None:
    heads = {}
    for model in bench.SHAPES:
        tower = bench.build_tower(model, torch.device("meta"), torch.bfloat16)
        blocks = towers.family_of_tower(tower).parts(tower).blocks
        heads[model] = (len(blocks), blocks[0].attention.num_heads, blocks[0].attention.head_dim)
    qwen3 = {"qwen3-vl-2b": (24, 16, 64), "qwen3-vl-4b": (24, 16, 64), "qwen3-vl-8b": (27, 16, 72)}
    qwen3["qwen3.5"] = qwen3["paddleocr-vl"] = qwen3["qwen3-vl-8b"]
    glm = {"glm-ocr": (24, 16, 64), "glm-5.3-flash": (24, 16, 64), "glm-4.1v-9b": (24, 12, 128)}
    glm["glm-4.5v"] = glm["glm-4.1v-9b"]
    other = qwen3 | glm | {"dots3-note": (42, 24, 64)}
    assert heads == {model: other.get(model, (32, 16, 80)) for model in bench.SHAPES}


def test_sizes() -> None:
    assert bench.parse_size("1x64x64*2+8x36x64") == ("1x64x64*2+8x36x64", ((1, 64, 64), (1, 64, 64), (8, 36, 64)))
    assert bench.parse_size(" 16 x 512^2") == ("16 x 512²", ((1, 32, 32),) * 16)
    for wrong in ("", "64x64", "1x64x0", "1x64x64*0", "one 512²", "1x4x4+"):
        with pytest.raises(ValueError, match="unknown size"):
            bench.parse_size(wrong)


def test_command(checkpoint: Path, tmp_path: Path) -> None:
    sizes = f"{SIZE},1x2x2"
    backends_here = "auto,flex,sdpa"
    options = ("--sizes", sizes, "--backends", backends_here, "--rounds", 1, "--json", tmp_path / "r.json")
    result = command("--model", checkpoint, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["device"], report["dtype"], report["peak_tflops"]) == ("cpu", "float32", None)
    assert report["versions"] == machine.versions()
    rows = report["rows"]
    assert [(row["size"], row["contender"]) for row in rows] == [
        (size, contender) for size in (SIZE, "1x2x2") for contender in ("stock sdpa", "auto", "flex", "sdpa")
    ]
    for row in rows:
        assert set(row) == set(bench.Row.__dataclass_fields__)
        assert row["status"] == "timed" and row["problem"] is None and row["parts"] is None
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert 0 <= row["error"] <= row["bound"]
        assert row["ratio"] is row["floor_ms"] is None  # no GPU, no floor
    assert [row["patches"] for row in rows] == [120] * 4 + [4] * 4
    assert rows[0]["speedup"] == 1 and rows[1]["speedup"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"])
    printed = result.stdout.splitlines()
    assert printed[0] == "float32; no floor on a CPU"
    assert printed[1].startswith(f"{checkpoint}, {SIZE}: 120 patches, error <= ")
    assert [line.split()[0] for line in printed[3:7]] == ["stock", "auto", "flex", "sdpa"]
    assert f"{rows[1]['ms']:.2f}" in printed[4]


def test_a_stopped_run_keeps_its_finished_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    lines = bench.lines

    def stopped(block: list[bench.Row], **options: bool) -> Iterator[str]:
        if block[0].size == "1x2x2":
            raise KeyboardInterrupt
        return lines(block, **options)

    monkeypatch.setattr(bench, "lines", stopped)
    result = command("--model", checkpoint, "--sizes", f"{SIZE},1x2x2", "--rounds", 1, "--json", tmp_path / "r.json")
    assert result.exit_code != 0
    assert {row["size"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]} == {SIZE}


def test_a_given_peak_sets_the_floor(tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    result = command("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--peak", 2, "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["peak_tflops"] == 2 and "floor: all matrix FLOPs at 2 TFLOP/s" in result.stdout
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])


def record_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let `bench` measure nothing; return a dictionary that gets the arguments of every call."""
    recorded: dict[str, Any] = {}

    def record(models: list[str], sizes: dict[str, Grid], **options: object) -> Iterator[list[bench.Row]]:
        recorded.update(options, models=models, sizes=sizes)
        return iter(())

    monkeypatch.setattr(bench, "bench", record)
    return recorded


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bench` choose its defaults for a GPU."""
    monkeypatch.setattr(bench, "device_of_choice", lambda: torch.device("cuda"))
    monkeypatch.setattr(bench, "peak_of", lambda *_: 123.0)


def test_the_default_on_a_cpu_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    options = record_options(monkeypatch)
    assert command().exit_code == 0
    assert (options["models"], list(options["sizes"]), options["attentions"]) == (["qwen3-vl-2b"], ["1x4x4"], ["auto"])
    assert (options["rounds"], options["peak"]) == (1, None)
    assert command("--model", "qwen2-vl-2b", "--sizes", "one 448^2", "--rounds", 2).exit_code == 0
    assert (options["models"], list(options["sizes"])) == (["qwen2-vl-2b"], ["one 448²"])
    assert options["attentions"] == ["auto"]  # every other backend would take minutes more
    pretend_gpu(monkeypatch)
    assert command().exit_code == 0
    assert len(options["models"]) == 3 and list(options["sizes"]) == list(bench.SIZES)
    assert options["attentions"] is None
    assert (options["rounds"], options["peak"]) == (5, 123.0)


def test_few_rounds_on_a_cpu_are_called_noise(checkpoint: Path) -> None:
    options = ("--model", checkpoint, "--backends", "sdpa", "--sizes")
    assert command(*options, "1x2x2,1x2x4").stdout.count("the times are noise") == 2  # below every table
    assert "noise" in command(*options, "1x2x2", "--rounds", 4).output
    assert "noise" not in command(*options, "1x2x2", "--rounds", 5).output


@pytest.mark.parametrize(
    ("step_ms", "turns", "timed"), [(1600.0, 2, 1), (400.0, 4, 1), (60.0, 8, 1), (20.0, 8, 2), (4.0, 24, 7)]
)
def test_a_gpu_gets_more_timed_steps_than_a_cpu(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, turns: int, timed: int
) -> None:
    """Short steps are timed for as long as others, and in more rounds; slow ones in fewer turns."""
    ran: dict[bool, int] = {False: 0, True: 0}

    def count(step: object, *, cuda: bool, before: object) -> float:
        ran[cuda] += 1
        return step_ms

    monkeypatch.setitem(time_in_turns.__globals__, "milliseconds", count)  # no GPU here
    assert time_in_turns({"a": lambda: None}, 2, cuda=False)["a"] == [step_ms] * 4
    assert time_in_turns({"a": lambda: None}, 2, cuda=True)["a"] == [step_ms] * timed * turns
    assert ran == {False: 6, True: (timed + math.ceil(10 / step_ms)) * turns}
    assert time_in_turns({}, 1, cuda=True) == {}


def test_the_floor_is_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert towers.peak_of(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(machine, "cuda_device_name", lambda: "NVIDIA H200")
    assert towers.peak_of(cuda, torch.bfloat16) == bench.PEAK
    monkeypatch.setattr(machine, "cuda_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.zeros(1, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert towers.peak_of(cuda, torch.bfloat16) not in (None, bench.PEAK)


def test_progress_is_shown(tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    result = command("--model", checkpoint, "--sizes", SIZE, "--rounds", 2, "--backends", "flashinfer_cudnn,sdpa")
    progress = [line for line in result.stderr.splitlines() if line.startswith("... ")]
    assert "flashinfer_cudnn cannot run: " in progress[0]  # before the work
    assert any("building the tower" in line for line in progress)
    assert any("verifying sdpa" in line for line in progress)
    assert progress[-1].endswith("timing, round 2 of 2")


def test_every_key_is_documented() -> None:
    document = cli.bench.__doc__ or ""
    result = bench.document([], dtype=torch.float32, rounds=1, peak=1.0)
    for key in (*result, *bench.Row.__dataclass_fields__, *bench.Part.__dataclass_fields__):
        assert key in document


def test_a_config_file_and_half_precision(tmp_path: Path) -> None:
    path = write_config("qwen3_vl", tmp_path) / "config.json"
    options = ("--model", path, "--sizes", SIZE, "--rounds", 1, "--dtype", "bf16", "--backends", "sdpa")
    result = command(*options, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["stock sdpa", "sdpa"]
    assert all(1e-4 < row["error"] <= row["bound"] < 0.1 for row in rows)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda out: out * 1.05, "relative error"),
        (lambda out: out.index_fill(0, torch.tensor([7]), float("nan")), "relative error inf"),
        (lambda out: out.no_such_method(), "AttributeError"),
    ],
    ids=["scaled", "nan", "raises"],
)
def test_a_wrong_backend_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: Spoil, problem: str
) -> None:
    add_spoiled(monkeypatch, spoil)
    checkpoint = write_config("qwen2_vl", tmp_path)
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled,sdpa")
    result = command(*options, "--json", tmp_path / "r.json")
    assert result.exit_code == 1
    rows = rows_of(tmp_path / "r.json")
    assert {name: row["status"] for name, row in rows.items()} == {
        "stock sdpa": "timed",
        "spoiled": "wrong",
        "sdpa": "timed",
    }
    assert rows["spoiled"]["ms"] is None and problem in rows["spoiled"]["problem"]
    assert any(line.split()[:2] == ["spoiled", "WRONG:"] for line in result.stdout.splitlines())


def test_a_second_call_is_verified_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def stale(out: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return out if len(calls) <= DEPTH else out * 2

    add_spoiled(monkeypatch, stale)
    checkpoint = write_config("qwen2_vl", tmp_path)
    assert command("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled").exit_code == 1


@pytest.mark.parametrize("train", [False, True])
def test_contenders_share_parameters_alone(train: bool) -> None:
    """Copies of the weights would not fit. Traces on modules, and gradients, are no other contender's."""
    tower = tiny.tower_of(tiny.TINY["qwen2_vl"].build()).requires_grad_(train).train(train)
    del tower.blocks[DEPTH:]
    twins: list[nn.Module] = []

    @contextmanager
    def opened(twin: nn.Module, grid: Grid) -> Iterator[baselines.Run]:
        twins.append(twin)
        assert not any("trace" in vars(module) for module in twin.modules())
        for module in twin.modules():
            module.trace = "here"
        with baselines.stock("sdpa", twin, grid) as run:
            yield run

    both = [contenders.Contender(name=name, open=opened) for name in "ab"]
    for rows in bench.measure("tiny", tower, {"one": GRID, "two": GRID}, both, rounds=1):
        assert [row.status for row in rows] == ["timed", "timed"]
        assert all(parameter.grad is None for parameter in tower.parameters())
    assert len(twins) == 4
    modules = {*tower.modules()}
    buffers = {id(buffer) for buffer in tower.buffers()}
    for twin in twins:
        assert modules.isdisjoint(twin.modules())
        assert buffers.isdisjoint(id(buffer) for buffer in twin.buffers())
        for parameter, shared in zip(tower.parameters(), twin.parameters(), strict=True):
            assert parameter is shared


def test_contenders_that_cannot_run_are_skipped_with_reasons(tmp_path: Path) -> None:
    checkpoint = write_config("qwen2_5_vl", tmp_path)
    baselines = ",".join(bench.BASELINES)
    options = ("--model", checkpoint, "--sizes", f"{SIZE},1x2x2", "--rounds", 1, "--baselines", baselines)
    result = command(*options, "--backends", "flashinfer_cudnn,sdpa", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    timed = {row["contender"] for row in rows if row["status"] == "timed"}
    assert timed == {"stock sdpa", "sdpa"}
    assert all(row["problem"] for row in rows if row["status"] == "skipped")
    problems = {row["contender"]: row["problem"] for row in rows}
    assert set(problems) == {f"stock {name}" for name in bench.BASELINES} | {"flashinfer_cudnn", "sdpa"}
    assert "flash_attention_2: " in problems["stock compile+graph"]
    assert (
        result.stdout.count("skipped stock compile, stock compile_blocks, stock compile+graph, stock graph: ") == 1
    )  # not at every size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "no-such-model"), "unknown model 'no-such"),
        (("--model", "no-such/model"), "unknown model 'no-such"),
        (("--backends", "flashinfer_cudnn"), "flashinfer_cudnn cannot run: "),
        (("--json", "no-such-folder/a.json"), "cannot write no-such-folder/a.json: there is no folder no-such-folder"),
        (("--json", "."), "cannot write .: it is a folder"),
        (("--plot", "no-such-folder/a.png"), "a.png|matplotlib"),
        (("--sizes", "big"), "unknown size"),
        (("--sizes", "1x3x4"), "multiples of the merge size"),
        (("--backends", "fast"), "expected attention to be one of"),
        (("--baselines", "slow"), "unknown baselines slow: choose out of"),
        (("--dtype", "int8"), "unknown dtype int8: choose one of bf16"),
        (("--weights",), "'qwen3-vl-2b' has no weights to load: pass a checkpoint's folder"),
        (("--backends", "", "--baselines", ""), "nothing to time"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "patched", lambda *_, **__: pytest.fail("work began"))
    result = command("--model", "qwen3-vl-2b", "--sizes", "1x2x2", *options)
    assert result.exit_code == 2
    assert re.search(message.replace(".:", r"\.:"), error_text(result)), error_text(result)


def test_training(checkpoint: Path, tmp_path: Path) -> None:
    """Every gradient is compared, stock's own errors stand beside, and set-ups without a backward are skipped."""
    baselines = ",".join(bench.BASELINES)
    size = "1x4x4+1x2x4"  # small: products of bf16 are slow on a CPU
    grid = ((1, 4, 4), (1, 2, 4))
    options = ("--train", "--model", checkpoint, "--sizes", size, "--rounds", 1, "--dtype", "bf16", "--peak", 1)
    options += ("--backends", "auto,sdpa,auto+graph", "--baselines", baselines, "--profile")
    result = command(*options, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["train"] is True and "all matrix FLOPs, three times, at 1 TFLOP/s" in result.stdout
    rows = {row["contender"]: row for row in report["rows"]}
    timed = {name: row for name, row in rows.items() if row["status"] == "timed"}
    assert timed.keys() == {"stock sdpa", "auto", "sdpa"}
    tower = bench.build_tower(str(checkpoint), torch.device("cpu"), torch.bfloat16)
    names = {name for name, _ in tower.named_parameters()} | {"pixels", *(f"output {index}" for index in range(3))}
    for name, row in timed.items():
        assert row["worst"] in names and 1e-4 < row["error"] <= row["bound"] < 0.1
        assert row["floor_ms"] == pytest.approx(3 * bench.matrix_flops(tower, grid) / 1e9)
        assert row["peak_gb"] is None  # a CPU does not report it
        assert 0.9 < row["error_ratio_mean"] <= row["error_ratio"] <= (1 if name == "stock sdpa" else 1.1) + 1e-6
    problems = {name: row["problem"] for name, row in rows.items() if row["status"] == "skipped"}
    assert "CUDA graphs need cuda" in problems["auto+graph"] and "no backward" in problems["stock graph"]
    assert "no backward" in problems["stock flash_attention_3"] and "CUDA" in problems["stock flash_attention_2"]
    assert all(problems.values()) and "of stock" in result.stdout and "parts of one step of auto" in result.stdout


@pytest.mark.parametrize(("settles", "batches", "status"), [(8, 8, "timed"), (99, 20, "wrong"), (1, 5, "timed")])
def test_an_error_near_its_bound_is_compared_in_more_batches(
    monkeypatch: pytest.MonkeyPatch, settles: int, batches: int, status: str
) -> None:
    """Chance makes no gradient of few values wrong, and none right."""
    module = sys.modules["hf_vit_accel.tools.bench.measure"]
    judge = verify.judge
    judged: list[str] = []

    def judge_near(contender: contenders.Contender, *args: object) -> verify.ErrorVerdict:
        verdict = judge(contender, *args)
        judged.append(contender.name)
        is_near = contender.name == "auto" and judged.count("auto") < settles
        return replace(verdict, error=1.05 * verdict.bound) if is_near else verdict

    monkeypatch.setattr(verify, "judge", judge_near)
    monkeypatch.setattr(module, "time_in_turns", lambda steps, *args, **kwargs: {name: [1.0] for name in steps})
    tower = tiny.tower_of(tiny.TINY["qwen2_vl"].build()).to(torch.bfloat16).requires_grad_(True)
    del tower.blocks[DEPTH:]
    chosen = contenders.choose(tower, ["auto"], ["sdpa"])
    [rows] = bench.measure("tiny", tower, {"one": ((1, 2, 2),)}, chosen, rounds=1)
    assert judged.count("auto") == batches and {row.contender: row.status for row in rows}["auto"] == status


def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forward is right, but the gradient of one product is a quarter too large."""

    class Louder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.25

    add_spoiled(monkeypatch, Louder.apply, differentiable=True)
    checkpoint = write_config("qwen3_vl", tmp_path)
    options = ("--train", "--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled,sdpa")
    result = command(*options, "--baselines", "sdpa", "--json", tmp_path / "r.json")
    assert result.exit_code == 1
    rows = rows_of(tmp_path / "r.json")
    assert rows["sdpa"]["status"] == "timed" and rows["spoiled"]["status"] == "wrong"
    assert rows["spoiled"]["ms"] is None and re.search(
        "is allowed, of .*(qkv|norm1|patch_embed)", rows["spoiled"]["problem"]
    )


def test_checkpointing(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path) -> None:
    """Stock and patched towers are timed with gradient checkpointing."""
    module = sys.modules["hf_vit_accel.tools.bench.measure"]
    checkpointed: list[str] = []

    def counted(steps: dict[str, Any], *args: object, **kwargs: object) -> dict[str, list[float]]:
        for name, step in steps.items():
            assert step.run.tower.is_gradient_checkpointing
            checkpointed.append(name)
        return time_in_turns(steps, *args, **kwargs)

    monkeypatch.setattr(module, "time_in_turns", counted)
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "auto", "--checkpointing")
    assert command("--train", *options, "--json", tmp_path / "r.json").exit_code == 0
    assert (
        checkpointed == ["stock sdpa", "auto"]
        and json.loads((tmp_path / "r.json").read_text())["checkpointing"] is True
    )
    refused = command(*options)
    assert refused.exit_code == 2 and "--checkpointing needs --train" in refused.output


def test_the_defaults_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    options = record_options(monkeypatch)
    assert command("--train", "--model", "qwen3-vl-2b").exit_code == 0
    assert options["train"] and options["attentions"] == ["auto"] and list(options["sizes"]) == ["1x4x4"]
    assert options["baselines"] == ["sdpa", "flash_attention_2", "liger", "compile_blocks"]
    pretend_gpu(monkeypatch)
    assert command("--train").exit_code == 0
    assert options["attentions"] == ["auto"]
    assert list(options["sizes"]) == ["one 448²", "one 1024²", "16 x 512²", "one page"]
    assert command().exit_code == 0 and not options["train"] and options["baselines"] == ["sdpa"]


def test_missing_and_infinite_results_have_infinite_errors() -> None:
    ones = torch.ones(4)
    errors = Errors()
    errors.add({"a": ones, "b": ones, "c": ones / 0}, {"a": ones * 1.25, "c": ones, "d": ones})
    errors.add({"a": ones, "b": ones}, {"a": ones, "b": ones, "d": ones})
    by_name = errors.by_name()
    assert by_name["a"] == pytest.approx(0.2 / 2**0.5)
    assert all(by_name[name] == float("inf") for name in "bcd")


def test_profile(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--profile", "--json", tmp_path / "r.json")
    result = command(*options)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    (row,) = [row for row in rows if row["parts"]]
    assert row["contender"] == "auto"
    assert {"GEMM", "attention", "other"} <= {part["part"] for part in row["parts"]}
    assert sum(part["share"] for part in row["parts"]) == pytest.approx(1)
    assert "parts of one forward of auto" in result.stdout


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("_window_attention_kernel", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT", "GEMM"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_gelu_TNT", "GEMM"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_32x3_tn", "GEMM"),
        ("implicit_convolveNd_sgemm", "GEMM"),
        ("_add_norm_kernel", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<...>", "norm"),
        ("_rope_kernel", "rope"),
        ("_swiglu_kernel", "activation"),
        ("_quick_gelu_kernel", "activation"),
        ("_add_positions_kernel", "positions"),
        ("aten::mm", "GEMM"),
        ("aten::mul", "other"),
        ("void at::native::elementwise_kernel<128, 4, property>", "other"),
    ],
)
def test_parts(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--plot", tmp_path / "r.png")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        result = command(*options)
        assert result.exit_code == 2 and "pip install matplotlib" in error_text(result)
    pytest.importorskip("matplotlib")
    assert command(*options).exit_code == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_measurements_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(json.loads(MEASURED.read_text()), tmp_path / "towers.png")
    assert (tmp_path / "towers.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        bench.plot({"rows": []}, tmp_path / "none.png")


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = tiny.TINY["qwen3_vl"].build(seed=3)
    model.save_pretrained(tmp_path)
    tower = bench.build_tower(str(tmp_path), torch.device("cpu"), torch.float32, weights=True)
    loaded = tower.state_dict()
    saved = tiny.tower_of(model).state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    with pytest.raises(ValueError, match="cannot load weights"):
        bench.build_tower("qwen3-vl-8b", torch.device("cpu"), torch.float32, weights=True)


@pytest.mark.skipif(len(bench.SHAPES) < len(towers._SHAPES), reason="this transformers lacks some families")
def test_every_family_has_a_built_in_shape() -> None:
    kinds = {towers.tower_class(towers.vision_config(model)).__name__ for model in bench.SHAPES}
    fast = [family for family in FAMILIES if not family.attention_only]
    assert all(kinds & {name for _, name in family.towers} for family in fast)
    with pytest.raises(ValueError, match="vision tower of qwen2_vl"):
        towers.tower_class(transformers.Cosmos3EdgeVisionConfig())


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.attention_only], ids=lambda f: f.name)
def test_every_family_is_verified_and_counted(family: Family) -> None:
    """Patched tiny towers return stock's results, and run as many products as are counted."""
    grid = ((1, 4, 8), (1, 8, 8))
    for module, name in family.towers:
        tower = tiny_tower(family, module, name).requires_grad_(False)
        stock = baselines.Run(tower, lambda pixels, tower=tower: tower(pixels, grid_thw=torch.tensor(grid)))
        batch = draw_batch(stock, grid, 0)
        errors = Errors()
        expected = results(stock, batch)
        with contenders._patched("sdpa", tower, grid) as run:
            errors.add(results(run, batch), expected)
        assert max(errors.by_name().values()) < 1e-5
        tower.config._attn_implementation_internal = "eager"
        with FlopCounterMode(display=False) as counter:
            tower(batch.pixels_TP, grid_thw=torch.tensor(grid))
        # torch alone counts rotations, and `matrix_flops` alone grouped products of experts.
        assert counter.get_total_flops() == pytest.approx(towers.matrix_flops(tower, grid), rel=0.04)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "has_cuda", torch.cuda.is_available)
    options = ("--model", "qwen2.5-vl-3b,qwen3-vl-2b", "--sizes", "1x16x16+2x8x12", "--rounds", 1, "--profile")
    result = command(*options, "--baselines", "sdpa,graph", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["device"], report["dtype"]) == (torch.cuda.get_device_name(), "bfloat16")
    assert {"stock sdpa", "auto"} <= {row["contender"] for row in report["rows"] if row["status"] == "timed"}


@pytest.mark.gpu
def test_training_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "has_cuda", torch.cuda.is_available)
    options = ("--train", "--model", "qwen2.5-vl-3b,qwen3-vl-2b", "--sizes", "1x16x16+2x8x12", "--rounds", 1)
    baselines = "sdpa,flash_attention_2,compile_blocks"
    result = command(*options, "--baselines", baselines, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert all(row["status"] == "timed" and row["peak_gb"] > 0 for row in rows), result.output


def test_no_contender_always_follows_the_same_one() -> None:
    """A neighbour that heats a GPU would slow down always the same contender."""
    turns: list[str] = []
    steps = {name: lambda name=name: turns.append(name) for name in "abc"}
    time_in_turns(steps, 100, cuda=False)
    order = turns[::3]  # a turn is a warm-up and two timed steps
    assert order.count("a") == order.count("b") == order.count("c") == 100
    pairs = Counter(pairwise(order))
    assert all(30 <= pairs[pair] <= 70 for pair in permutations("abc", 2)), pairs


def test_slower_rows_are_listed(tmp_path: Path) -> None:
    def rows(**median_of: float) -> dict[str, Any]:
        timed = [
            dict(model="m", size="s", contender=name, ms=ms, ms_low=ms - 1, ms_high=ms + 1)
            for name, ms in median_of.items()
        ]
        return {"device": "A", "rows": [*timed, dict(model="m", size="s", contender="skipped", ms=None)]}

    lines = list(
        bench.slower(rows(same=10.1, slow=20, noisy=11, fast=5, new=3), rows(same=10, slow=10, noisy=10, fast=9))
    )
    assert lines[0] == "slower: m, s, slow: 20.00 ms, before 10.00 (2.00x)"
    assert lines[1:] == ["4 compared, 1 slower by more than 3% and the spread of their runs"]
    assert next(bench.slower(rows(), rows() | {"device": "B"})) == "measured on A, before on B"
    assert list(bench.slower(rows(new=1), rows(old=1)))[-1].startswith("nothing was compared: the earlier file has")
    options = "--model", write_config("qwen3_vl", tmp_path), "--sizes", "1x2x2", "--rounds", 5, "--backends", "sdpa"
    assert command(*options, "--json", tmp_path / "old.json").exit_code == 0
    old = json.loads((tmp_path / "old.json").read_text())
    assert old["machine"]["cores"] >= 1
    for row in old["rows"]:
        row |= {key: row[key] / 1000 for key in ("ms", "ms_low", "ms_high")}
    (tmp_path / "old.json").write_text(json.dumps(old))
    output = command(*options, "--compare", tmp_path / "old.json").stdout
    assert output.count("slower: ") == len(old["rows"]) == 2
    noisy = command(*options, "--rounds", 1, "--compare", tmp_path / "old.json").stdout
    last_line = noisy.splitlines()[-1]
    assert "slower by" not in noisy and last_line.startswith(f"not compared with {tmp_path / 'old.json'}: ")
    without_spread = dict(old["rows"][0])
    del without_spread["ms_high"]
    changes = ({"train": True}, {"dtype": "bfloat16"}, {"rows": [dict(model=1)]}, {"rows": [without_spread]})
    for text in ("{}", "[", *(json.dumps(old | change) for change in changes)):
        (tmp_path / "bad.json").write_text(text)
        failed = command(*options, "--compare", tmp_path / "bad.json")
        assert failed.exit_code == 2 and "bench --json wrote" in failed.output


def test_the_facts_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def smi(command: list[str], **kwargs: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="580.1, 1980, 1985, 700.00\n")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(bench.report.subprocess, "run", smi)
    facts = bench.host()
    assert facts["driver"] == "580.1"
    assert (facts["clock"], facts["largest_clock"], facts["power"]) == (1980, 1985, 700.0)
    assert commands[0][commands[0].index("-i") + 1] == "3"
    monkeypatch.setattr(bench.report.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="[N/A]\n"))
    assert bench.host().keys() == {"cpu", "cores"}


def test_fp8_is_timed_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 takes packed rows alone, so the reasons against it are those of packed rows."""
    requests: list[backends.Request] = []
    monkeypatch.setattr(type(backends.FP8), "reasons_against", lambda self, request: requests.append(request) or [])
    tower = tiny.tower_of(tiny.TINY["qwen3_vl"].build())
    (contender,) = bench.choose(tower, ["auto+fp8"], [])
    assert requests[-1].packed and contender.open is not None and contender.bound == 0.1
