"""The benchmark: its floor, what it verifies, what it prints, writes and draws, and that stock is stock."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from click.testing import Result
from support.towers import alike
from test_families import CLASSES, build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from hf_vit_accel import backends, machine
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tools import bench, cli
from hf_vit_accel.tools.bench import baselines, contenders, towers, verify
from hf_vit_accel.tools.bench.measure import _time
from hf_vit_accel.tools.bench.profile import part_of
from hf_vit_accel.tools.bench.work import Errors, draw_batch, outputs_of, results

GRID = ((1, 4, 6), (3, 8, 4))
SIZE = "1x4x6+3x8x4"
FAMILY_NAMES = tiny.FAMILIES
MEASURED = Path(__file__).parents[2] / "examples" / "benchmark" / "towers.json"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a CUDA device, whatever this one has."""
    monkeypatch.setattr(machine, "has_cuda", lambda: False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a tiny model's config.json and nothing else; of the family that has windows."""
    return write_config("qwen2_5_vl", tmp_path)


def write_config(name: str, folder: Path) -> Path:
    model = tiny.TINY[name]
    config = getattr(transformers, model.config)(vision_config=model.vision, text_config=model.text, **tiny._TOKENS)
    config.save_pretrained(folder / name)
    return folder / name


def command(*options: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, options)])


def in_words(result: Result) -> str:
    """What was written to standard error, without the box that is drawn around it."""
    return " ".join(result.stderr.replace("│", " ").split())


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Put a backend in front of `BACKENDS` that is sdpa, its results changed."""

    class Spoiled(Sdpa):
        name = "spoiled"
        needs = Needs(cuda=False, differentiable=True)

        def attend(self, *arguments: Any) -> Any:
            return change(super().attend(*arguments))

    monkeypatch.setattr(backends, "BACKENDS", (Spoiled(), *backends.BACKENDS))


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
    found = [bench.matrix_flops(tower, bench.SIZES[size]) / (bench.PEAK * 1e9) for size in sizes]
    assert found == pytest.approx(floors, rel=0.03)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_matrix_flops_are_those_that_torch_counts(name: str) -> None:
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
    result = command("--model", checkpoint, "--sizes", f"{SIZE},1x2x2", "--rounds", 1, "--json", tmp_path / "r.json")
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


def test_a_run_that_is_stopped_leaves_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    lines = bench.lines

    def stopped(block: Any, **options: Any) -> Any:
        if block[0].size == "1x2x2":
            raise KeyboardInterrupt
        return lines(block, **options)

    monkeypatch.setattr(bench, "lines", stopped)
    result = command("--model", checkpoint, "--sizes", f"{SIZE},1x2x2", "--rounds", 1, "--json", tmp_path / "r.json")
    assert result.exit_code != 0
    assert {row["size"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]} == {SIZE}


def test_a_floor_of_ones_own(tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    result = command("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--peak", 2, "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["peak_tflops"] == 2 and "floor: all matrix FLOPs at 2 TFLOP/s" in result.stdout
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])


def test_the_default_on_a_cpu_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def record(models: Any, sizes: Any, **options: Any) -> Any:
        asked.update(options, models=models, sizes=sizes)
        return iter(())

    monkeypatch.setattr(bench, "bench", record)
    assert command().exit_code == 0
    assert (asked["models"], list(asked["sizes"]), asked["attentions"]) == (["qwen3-vl-2b"], ["1x8x8"], ["auto"])
    assert (asked["rounds"], asked["peak"]) == (1, None)
    assert command("--model", "qwen2-vl-2b", "--sizes", "one 448^2", "--rounds", 2).exit_code == 0
    assert (asked["models"], list(asked["sizes"]), asked["attentions"]) == (["qwen2-vl-2b"], ["one 448²"], None)
    monkeypatch.setattr(bench, "device_of_choice", lambda: torch.device("cuda"))
    monkeypatch.setattr(bench, "peak_of", lambda *_: 123.0)
    assert command().exit_code == 0
    assert len(asked["models"]) == 3 and list(asked["sizes"]) == list(bench.SIZES) and asked["attentions"] is None
    assert (asked["rounds"], asked["peak"]) == (5, 123.0)


def test_the_floor_is_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert towers.peak_of(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(machine, "cuda_device_name", lambda: "NVIDIA H200")
    assert towers.peak_of(cuda, torch.bfloat16) == bench.PEAK
    monkeypatch.setattr(machine, "cuda_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.zeros(1, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert towers.peak_of(cuda, torch.bfloat16) not in (None, bench.PEAK)


def test_what_runs_is_shown(tmp_path: Path) -> None:
    checkpoint = write_config("qwen3_vl", tmp_path)
    result = command("--model", checkpoint, "--sizes", SIZE, "--rounds", 2, "--backends", "flashinfer_cudnn,sdpa")
    told = [line for line in result.stderr.splitlines() if line.startswith("... ")]
    assert "flashinfer_cudnn cannot run: " in told[0]  # before the work
    assert any("building the tower" in line for line in told) and any("verifying sdpa" in line for line in told)
    assert told[-1].endswith("timing, round 2 of 2")


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
    ("change", "said"),
    [
        (lambda out: out * 1.05, "relative error"),
        (lambda out: out.index_fill(0, torch.tensor([7]), float("nan")), "relative error inf"),
        (lambda out: out.no_such_method(), "AttributeError"),
    ],
    ids=["scaled", "nan", "raises"],
)
def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Any, said: str) -> None:
    spoil(monkeypatch, change)
    checkpoint = write_config("qwen2_vl", tmp_path)
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled,sdpa")
    result = command(*options, "--json", tmp_path / "r.json")
    assert result.exit_code == 1
    rows = {row["contender"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "stock sdpa": "timed",
        "spoiled": "wrong",
        "sdpa": "timed",
    }
    assert rows["spoiled"]["ms"] is None and said in rows["spoiled"]["problem"]
    assert any(line.split()[:2] == ["spoiled", "WRONG:"] for line in result.stdout.splitlines())


def test_a_second_call_is_verified_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def stale(out: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return out if len(calls) <= tiny.TINY["qwen2_vl"].vision["depth"] else out * 2

    spoil(monkeypatch, stale)
    checkpoint = write_config("qwen2_vl", tmp_path)
    assert command("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled").exit_code == 1


@pytest.mark.parametrize("train", [False, True])
def test_contenders_share_parameters_and_gradients_alone(train: bool) -> None:
    """A copy of the weights for each would not fit. What one leaves on its modules, no other sees; nor its gradient."""
    tower = tiny.tower_of(tiny.TINY["qwen2_vl"].build()).requires_grad_(train).train(train)
    seen: list[nn.Module] = []

    @contextmanager
    def opened(own: Any, grid: Any) -> Any:
        seen.append(own)
        assert not any("trace" in vars(module) for module in own.modules())
        for module in own.modules():
            module.trace = "left"
        with baselines.stock("sdpa", own, grid) as run:
            yield run

    both = [contenders.Contender(name=name, open=opened) for name in "ab"]
    for rows in bench.measure("tiny", tower, {"one": GRID, "two": GRID}, both, rounds=1):
        assert [row.status for row in rows] == ["timed", "timed"]
        assert all(parameter.grad is None for parameter in tower.parameters())
    assert len(seen) == 4 and all(
        modules.isdisjoint(other.modules()) for other in seen for modules in [{*tower.modules()}]
    )
    for each in seen:
        assert all(mine is its for mine, its in zip(tower.parameters(), each.parameters(), strict=True))
        assert {id(b) for b in each.buffers()}.isdisjoint(map(id, tower.buffers()))


def test_what_cannot_run_is_skipped_with_its_reasons(tmp_path: Path) -> None:
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
    ("options", "said"),
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
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "patched", lambda *_, **__: pytest.fail("work began"))
    result = command("--model", "qwen3-vl-2b", "--sizes", "1x2x2", *options)
    assert result.exit_code == 2
    assert re.search(said.replace(".:", r"\.:"), in_words(result)), in_words(result)


def test_training(checkpoint: Path, tmp_path: Path) -> None:
    """Forward and backward: every gradient compared, stock's own errors beside, what has no backward told."""
    baselines = ",".join(bench.BASELINES)
    size, grid = "1x4x4+1x2x4", ((1, 4, 4), (1, 2, 4))  # products of bf16 are slow on a CPU
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
        assert row["peak_gb"] is None  # a CPU does not tell
        assert 0.9 < row["error_ratio_mean"] <= row["error_ratio"] <= (1 if name == "stock sdpa" else 1.1) + 1e-6
    told = {name: row["problem"] for name, row in rows.items() if row["status"] == "skipped"}
    assert "CUDA graphs need cuda" in told["auto+graph"] and "no backward" in told["stock graph"]
    assert "no backward" in told["stock flash_attention_3"] and "CUDA" in told["stock flash_attention_2"]
    assert all(told.values()) and "of stock" in result.stdout and "parts of one step of auto" in result.stdout


@pytest.mark.parametrize(("settles", "batches", "status"), [(8, 8, "timed"), (99, 20, "wrong"), (1, 5, "timed")])
def test_an_error_near_its_bound_is_measured_in_more_batches(
    monkeypatch: pytest.MonkeyPatch, settles: int, batches: int, status: str
) -> None:
    """A gradient of few numbers is not called wrong by chance, and not called right before it is."""
    module = sys.modules["hf_vit_accel.tools.bench.measure"]
    judge = verify.judge
    seen: list[str] = []

    def judged(contender: Any, errors: Any, own: Any, tower: Any) -> Any:
        verdict = judge(contender, errors, own, tower)
        seen.append(contender.name)
        near = contender.name == "auto" and seen.count("auto") < settles
        return replace(verdict, error=1.05 * verdict.bound) if near else verdict

    monkeypatch.setattr(verify, "judge", judged)
    monkeypatch.setattr(module, "_time", lambda steps, *args, **kwargs: {name: [1.0] for name in steps})
    tower = tiny.tower_of(tiny.TINY["qwen2_vl"].build()).to(torch.bfloat16).requires_grad_(True)
    chosen = contenders.choose(tower, ["auto"], ["sdpa"])
    [rows] = bench.measure("tiny", tower, {"one": ((1, 2, 2),)}, chosen, rounds=1)
    assert seen.count("auto") == batches and {row.contender: row.status for row in rows}["auto"] == status


def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forward is right, and one product's gradient a quarter too large."""

    class Louder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.25

    spoil(monkeypatch, Louder.apply)
    checkpoint = write_config("qwen3_vl", tmp_path)
    options = ("--train", "--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "spoiled,sdpa")
    result = command(*options, "--baselines", "sdpa", "--json", tmp_path / "r.json")
    assert result.exit_code == 1
    rows = {row["contender"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert rows["sdpa"]["status"] == "timed" and rows["spoiled"]["status"] == "wrong"
    assert rows["spoiled"]["ms"] is None and re.search(
        "is allowed, of .*(qkv|norm1|patch_embed)", rows["spoiled"]["problem"]
    )


def test_checkpointing(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path) -> None:
    """Of stock and patched."""
    module, again = sys.modules["hf_vit_accel.tools.bench.measure"], []
    timed = module._time

    def counted(steps: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        assert all(step.run.tower.is_gradient_checkpointing for step in steps.values())
        again.extend(steps)
        return timed(steps, *args, **kwargs)

    monkeypatch.setattr(module, "_time", counted)
    options = ("--model", checkpoint, "--sizes", SIZE, "--rounds", 1, "--backends", "auto", "--checkpointing")
    assert command("--train", *options, "--json", tmp_path / "r.json").exit_code == 0
    assert again == ["stock sdpa", "auto"] and json.loads((tmp_path / "r.json").read_text())["checkpointing"] is True
    refused = command(*options)
    assert refused.exit_code == 2 and "--checkpointing needs --train" in refused.output


def test_the_defaults_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(bench, "bench", lambda models, sizes, **more: asked.update(more, sizes=sizes) or iter(()))
    assert command("--train", "--model", "qwen3-vl-2b").exit_code == 0
    assert asked["train"] and asked["attentions"] == ["auto"] and list(asked["sizes"]) == ["1x8x8"]
    assert asked["baselines"] == ["sdpa", "flash_attention_2", "liger", "compile_blocks"]
    monkeypatch.setattr(bench, "device_of_choice", lambda: torch.device("cuda"))
    monkeypatch.setattr(bench, "peak_of", lambda *_: 123.0)
    assert command("--train").exit_code == 0
    assert list(asked["sizes"]) == ["one 448²", "one 1024²", "16 x 512²", "one page"]
    assert command().exit_code == 0 and not asked["train"] and asked["baselines"] == ["sdpa"]


def gradients(run: baselines.Run, seed: int = 0) -> dict[str, torch.Tensor]:
    return results(run, draw_batch(run, GRID, seed))


@pytest.mark.matrix  # `bench` itself holds what it times to stock
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_compiled_blocks_train_as_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is compiled, whatever their number, and none falls back to eager beyond a limit of recompiles."""
    compiled, compile_stock = [], torch.compile

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile_stock(forward, backend=count, **options))
    tower = tiny.tower_of(tiny.TINY[name].build()).requires_grad_(True).train()
    with baselines.stock("sdpa", deepcopy(tower), GRID) as run:
        expected = gradients(run)
    with baselines._compiled_blocks("sdpa", tower, GRID) as run:
        found = gradients(run)
        first = len(compiled)
        gradients(run, 1)
        assert 0 < first == len(compiled)  # nothing is compiled again
    assert found.keys() == expected.keys() and {"pixels", "output 0"} < found.keys()
    assert len(found) > len(tower.blocks) * 8
    for key, value in expected.items():
        tiny.assert_close([found[key]], [value])


@pytest.mark.parametrize("name", alike("qwen2_5_vl", "qwen2_vl", "qwen3_vl"))
def test_compiled_blocks_are_whole_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's varlen attention, traced without a GPU: one graph for all blocks of a kind, forward and backward."""
    graphs, compile_stock, grid = [], torch.compile, ((1, 16, 12),)  # larger than a window

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def whole(forward: Any, **options: Any) -> Any:
        return compile_stock(forward, backend=keep, fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", whole)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = tiny.tower_of(tiny.TINY[name].build(fresh=True)).requires_grad_(True).train()
        pixels = tiny.pixels_for(tower, list(grid))
        with baselines._compiled_blocks("flash_attention_2", tower, grid) as run:
            outputs = outputs_of(run(pixels))
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    kinds = 2 if name == "qwen2_5_vl" else 1
    assert len(graphs) == kinds and all("varlen_attn" in graph for graph in graphs)
    assert all(parameter.grad is not None for parameter in tower.parameters())


@pytest.mark.parametrize("name", ["Qwen2_5_VisionTransformerPretrainedModel", "Exaone4_5_VisionModel"])
def test_flash_attention_2_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package torch's own varlen function serves: one call a layer with all segments, and its backward.

    It takes as many heads of keys as of queries.
    """
    from torch.nn.attention import varlen

    calls = []

    def attend(q: Any, k: Any, v: Any, cu: torch.Tensor, cu_k: Any, longest: int, longest_k: int, *, scale: Any) -> Any:
        calls.append(longest)
        assert q.shape == k.shape == v.shape
        parts = zip(*(x.split(cu.diff().tolist()) for x in (q, k, v)), strict=True)
        outs = [
            nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), scale=scale)
            for part in parts
        ]
        return torch.cat([out.transpose(0, 1) for out in outs])

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    tower = build(*next(each for each in CLASSES if each[2] == name)).requires_grad_(True).train()
    with baselines.stock("sdpa", deepcopy(tower), GRID) as run:
        expected = gradients(run)
    with baselines._stock_without_syncs("flash_attention_2", tower, GRID) as run:
        found = gradients(run)
    assert len(calls) == 2 * len(tower.blocks)  # once to learn the outputs' shapes
    for key, value in expected.items():
        tiny.assert_close([found[key]], [value])


def test_liger_trains_what_the_tower_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tiny.tower_of(tiny.TINY["qwen3_vl"].build()).requires_grad_(True).train()
    module = sys.modules[type(tower).__module__]
    monkeypatch.setattr(
        baselines, "_apply_liger", lambda _: {"apply_rotary_pos_emb_vision": module.apply_rotary_pos_emb_vision}
    )
    with baselines.stock("sdpa", deepcopy(tower), GRID) as run:
        expected = gradients(run)
    with baselines._liger("sdpa", tower, GRID) as run:
        assert run.tower is not tower and run.tower.training
        found = gradients(run)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tiny.assert_close([found[key]], [value])


def test_errors_of_what_is_missing_or_not_finite() -> None:
    one, errors = torch.ones(4), Errors()
    errors.add({"a": one, "b": one, "c": one / 0}, {"a": one * 1.25, "c": one, "d": one})
    errors.add({"a": one, "b": one}, {"a": one, "b": one, "d": one})
    found = errors.by_name()
    assert found["a"] == pytest.approx(0.2 / 2**0.5)
    assert all(found[name] == float("inf") for name in "bcd")


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
        assert result.exit_code == 2 and "pip install matplotlib" in in_words(result)
    pytest.importorskip("matplotlib")
    assert command(*options).exit_code == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_measurements_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(json.loads(MEASURED.read_text()), tmp_path / "towers.png")
    assert (tmp_path / "towers.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        bench.plot({"rows": []}, tmp_path / "none.png")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_stock_given_its_metadata_is_the_same(name: str) -> None:
    tower = tiny.tower_of(tiny.TINY[name].build())
    pixels = tiny.pixels_for(tower, list(GRID))
    expected = tiny.run_tower(tower, list(GRID))
    with torch.no_grad(), baselines._stock_without_syncs("sdpa", tower, GRID) as run:
        tiny.assert_close(tiny.outputs_of(run(pixels)), expected, bound=0)


def test_flash_attention_3_as_a_module_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function under a private name: one call a layer with all segments, through the operator."""
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, scale: float) -> Any:
        calls.append(longest)
        assert q.shape == k.shape == v.shape
        parts = zip(*(x.split(cu.diff().tolist()) for x in (q, k, v)), strict=True)
        heads_first = [[x.transpose(0, 1) for x in part] for part in parts]
        outs = [nn.functional.scaled_dot_product_attention(*part, scale=scale) for part in heads_first]
        return torch.cat([out.transpose(0, 1) for out in outs])

    library = torch.library.Library("hf_vit_accel", "IMPL")
    library.impl("flash_attention_3", attend, "CPU")
    try:
        tower = tiny.tower_of(tiny.TINY["qwen2_5_vl"].build())
        expected = tiny.run_tower(tower, list(GRID))
        monkeypatch.setattr(baselines, "is_flash_attn_3_available", lambda: False)
        with torch.no_grad(), baselines.stock("flash_attention_3", tower, GRID) as run:
            tiny.assert_close(tiny.outputs_of(run(tiny.pixels_for(tower, list(GRID)))), expected)
    finally:
        library._destroy()
    assert len(calls) == len(tower.blocks)


def test_liger_is_applied_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which replaces a function and a class of the modeling module as the real one does."""
    tower = tiny.tower_of(tiny.TINY["qwen3_vl"].build())
    module = sys.modules[type(tower).__module__]
    before = dict(vars(module))
    rotated = []

    def rotate(*arguments: Any) -> Any:
        rotated.append(None)
        return before["apply_rotary_pos_emb_vision"](*arguments)

    def apply(*, fused_linear_cross_entropy: bool) -> None:
        vars(module).update(apply_rotary_pos_emb_vision=rotate, a_new_name=1)

    liger = ModuleType("liger_kernel.transformers")
    vars(liger)["apply_liger_kernel_to_qwen3_vl"] = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    expected = tiny.run_tower(tower, list(GRID))
    with torch.no_grad(), baselines._liger("sdpa", tower, GRID) as run:
        assert vars(module) == before
        tiny.assert_close(tiny.outputs_of(run(tiny.pixels_for(tower, list(GRID)))), expected)
        assert len(rotated) == len(tower.blocks) and vars(module) == before
    vars(liger)["apply_liger_kernel_to_qwen3_vl"] = lambda **_: None
    with pytest.raises(RuntimeError, match="replaces nothing"), baselines._liger("sdpa", tower, GRID):
        pass


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = tiny.TINY["qwen3_vl"].build(seed=3)
    model.save_pretrained(tmp_path)
    tower = bench.build_tower(str(tmp_path), torch.device("cpu"), torch.float32, weights=True)
    loaded, saved = tower.state_dict(), tiny.tower_of(model).state_dict()
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
def test_every_family_is_verified_and_counted(family: Any) -> None:
    """Tiny: the products that run are those that are counted, and what is patched is what stock returns."""
    for module, name in family.towers:
        kind: Any = getattr(pytest.importorskip(module), name)
        config = kind.config_class()
        for field, value in family.tiny.items():
            setattr(config, field, value)
        config._attn_implementation_internal = "sdpa"
        tower, grid = tiny.randomise(kind(config).eval()).requires_grad_(False), ((1, 4, 8), (1, 8, 8))
        stock = baselines.Run(tower, lambda pixels, tower=tower, grid=grid: tower(pixels, grid_thw=torch.tensor(grid)))
        batch, errors = draw_batch(stock, grid, 0), Errors()
        expected = results(stock, batch)
        with contenders._patched("sdpa", tower, grid) as run:
            errors.add(results(run, batch), expected)
        assert max(errors.by_name().values()) < 1e-5
        tower.config._attn_implementation_internal = "eager"
        with FlopCounterMode(display=False) as counter:
            tower(batch.pixels_TP, grid_thw=torch.tensor(grid))
        # Rotations are counted by torch alone, grouped products of experts by us alone.
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


def test_every_other_round_goes_backwards() -> None:
    """So that no contender always runs behind the same, perhaps hotter, neighbour."""
    turns: list[str] = []
    steps = {name: lambda name=name: turns.append(name) for name in "abc"}
    _time(steps, 2, cuda=False)
    order = [name for name, before in zip(turns, ["", *turns], strict=False) if name != before]
    assert order == ["a", "b", "c", "b", "a"]


def test_what_got_slower_is_told(tmp_path: Path) -> None:
    def rows(**ms: float) -> dict[str, Any]:
        made = [
            dict(model="m", size="s", contender=name, ms=one, ms_low=one - 1, ms_high=one + 1)
            for name, one in ms.items()
        ]
        return {"device": "A", "rows": [*made, dict(model="m", size="s", contender="skipped", ms=None)]}

    lines = list(
        bench.slower(rows(same=10.1, slow=20, noisy=11, fast=5, new=3), rows(same=10, slow=10, noisy=10, fast=9))
    )
    assert lines[0] == "slower: m, s, slow: 20.00 ms, before 10.00 (2.00x)"
    assert lines[1:] == ["4 compared, 1 slower by more than 3% and the spread of their runs"]
    assert next(bench.slower(rows(), rows() | {"device": "B"})) == "measured on A, before on B"
    options = "--model", write_config("qwen3_vl", tmp_path), "--sizes", SIZE, "--rounds", 1, "--backends", "sdpa"
    assert command(*options, "--json", tmp_path / "old.json").exit_code == 0
    old = json.loads((tmp_path / "old.json").read_text())
    assert old["machine"]["cores"] >= 1
    for row in old["rows"]:
        row |= {key: row[key] / 1000 for key in ("ms", "ms_low", "ms_high")}
    (tmp_path / "old.json").write_text(json.dumps(old))
    told = command(*options, "--compare", tmp_path / "old.json").stdout
    assert told.count("slower: ") == len(old["rows"]) == 2
    row, other = old["rows"][0], ({"train": True}, {"dtype": "bfloat16"}, {"rows": [dict(model=1)]})
    no_spread = old | {"rows": [{key: row[key] for key in row.keys() - {"ms_high"}}]}
    for text in ("{}", "[", *(json.dumps(old | each) for each in other), json.dumps(no_spread)):
        (tmp_path / "bad.json").write_text(text)
        failed = command(*options, "--compare", tmp_path / "bad.json")
        assert failed.exit_code == 2 and "bench --json wrote" in failed.output


def test_of_a_machine_what_nvidia_smi_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def smi(words: list[str], **kwargs: Any) -> Any:
        asked.append(words)
        return SimpleNamespace(stdout="580.1, 1980, 1985, 700.00\n")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(bench.report.subprocess, "run", smi)
    found = bench.host()
    assert found["driver"] == "580.1" and (found["clock"], found["largest_clock"], found["power"]) == (
        1980,
        1985,
        700.0,
    )
    assert asked[0][asked[0].index("-i") + 1] == "3"
    monkeypatch.setattr(bench.report.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="[N/A]\n"))
    assert bench.host().keys() == {"cpu", "cores"}


def test_towers_that_could_attend_in_fp8_are_timed_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 serves packed rows alone: what stands against the tower is asked of those."""
    asked: list[Any] = []
    monkeypatch.setattr(type(backends.FP8), "reasons_against", lambda self, request: asked.append(request) or [])
    tower = tiny.tower_of(tiny.TINY["qwen3_vl"].build())
    (found,) = bench.choose(tower, ["auto+fp8"], [])
    assert asked[-1].packed and found.open is not None and found.bound == 0.1
