"""`hf-vit-accel bench`: what is built, its verdicts, and what it prints and writes."""

import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from click.testing import Result
from support.backends import Spoil, add_spoiled
from typer.testing import CliRunner

from hf_vit_accel import machine
from hf_vit_accel.tools import bench, cli

Row = dict[str, Any]

SIZE = "1x4x6+3x8x4"
DEPTH = 2


pytestmark = pytest.mark.usefixtures("no_gpu")


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
    return CliRunner().invoke(cli.app, ["bench", *(str(option) for option in options)])


def rows_of(path: Path) -> dict[str, Row]:
    """Return the rows of a JSON file by contender; the last size's, if there are several."""
    return {row["contender"]: row for row in json.loads(path.read_text())["rows"]}


def error_text(result: Result) -> str:
    """Return standard error without the box that is drawn around it."""
    return " ".join(result.stderr.replace("│", " ").split())


def test_steps_are_timed_in_turns_after_a_warm_up() -> None:
    """The first call of a turn is slow, and is not timed. No step always follows the same one."""
    calls: list[str] = []

    def call(name: str) -> float:
        calls.append(name)
        return 200.0 if calls[-2:-1] != [name] else 100.0

    names = ["a", "b", "c"]
    times = bench.time_in_turns({name: partial(call, name) for name in names}, rounds=6)
    assert list(times) == names and {value for of_step in times.values() for value in of_step} == {100.0}
    turns = [name for name, _ in itertools.groupby(calls)]
    assert len(set(itertools.pairwise(turns))) == 6, "every step follows every other one"


def test_every_built_in_shape_builds() -> None:
    heads = {}
    names = [name for name in bench.SHAPES if re.match(r"qwen.*-vl-", name)]  # benchmarks/shapes.py adds others
    for model in names:
        tower = bench.build_tower(model, torch.device("meta"), torch.bfloat16)
        blocks = bench.family_of_tower(tower).parts(tower).blocks
        heads[model] = (len(blocks), blocks[0].attention.num_heads, blocks[0].attention.head_dim)
    qwen3 = {"qwen3-vl-2b": (24, 16, 64), "qwen3-vl-4b": (24, 16, 64), "qwen3-vl-8b": (27, 16, 72)}
    assert heads == {model: qwen3.get(model, (32, 16, 80)) for model in names} and len(names) == 9


def test_sizes() -> None:
    assert bench.parse_size("1x64x64*2+8x36x64") == ("1x64x64*2+8x36x64", ((1, 64, 64), (1, 64, 64), (8, 36, 64)))
    assert bench.parse_size(" 16 x 512^2") == ("16 x 512²", ((1, 32, 32),) * 16)
    for wrong in ("", "64x64", "1x64x0", "1x64x64*0", "one 512²", "1x4x4+"):
        with pytest.raises(ValueError, match="unknown size"):
            bench.parse_size(wrong)


def test_command(tmp_path: Path) -> None:
    """Every set-up has a row: timed, or skipped with the reason. A stopped run keeps the rows of finished sizes."""
    checkpoint = write_config("qwen2_5_vl", tmp_path)
    backends = "auto,flex,flashinfer_cudnn,auto+graph,auto+fp8"
    options: tuple[object, ...] = ("--sizes", f"{SIZE},1x2x2", "--backends", backends, "--rounds", 1)
    options += ("--baselines", "sdpa,flash_attention_2,compile", "--json", tmp_path / "r.json")
    result = command("--model", checkpoint, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["device"], report["dtype"]) == ("cpu", "float32") and report["versions"] == machine.versions()
    rows = report["rows"]
    names = ["stock sdpa", "stock flash_attention_2", "stock compile", "auto", "flex", "flashinfer_cudnn"]
    names += ["auto+graph", "auto+fp8"]
    assert [(row["size"], row["contender"]) for row in rows] == [(size, of) for size in (SIZE, "1x2x2") for of in names]
    for row in rows:
        assert set(row) <= set(re.findall(r"\w+", cli.bench.__doc__ or "")), "every key is documented"
        is_timed = row["contender"] in ("stock sdpa", "auto", "flex")
        assert row["status"] == ("timed" if is_timed else "skipped") and is_timed == (row["problem"] is None)
        if is_timed:
            assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"] and 0 <= row["error"] <= row["bound"]
    assert [row["patches"] for row in rows] == [120] * 8 + [4] * 8
    assert rows[0]["speedup"] == 1 and rows[3]["speedup"] == pytest.approx(rows[0]["ms"] / rows[3]["ms"])
    printed = result.stdout.splitlines()
    assert printed[0].startswith(f"{checkpoint}, {SIZE}: 120 patches, error <= ")
    assert f"{rows[3]['ms']:.2f}" in printed[5] and "skipped: " in printed[3]
    assert result.stdout.count("the times are noise") == 2  # below every table
    assert any("verifying flex" in line for line in result.stderr.splitlines())


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "no-such-model"), "unknown model 'no-such"),
        (("--model", "no-such/model"), "unknown model 'no-such"),
        (("--backends", "flashinfer_cudnn"), "flashinfer_cudnn cannot run: "),
        (("--json", "no-such-folder/a.json"), "No such file or directory: 'no-such-folder/a.json'"),
        (("--json", "."), "Is a directory"),
        (("--sizes", "big"), "unknown size"),
        (("--sizes", "1x3x4"), "multiples of the merge size"),
        (("--backends", "fast"), "expected attention to be one of"),
        (("--backends", "auto+fast"), r"unknown option \+fast in auto\+fast: choose out of graph"),
        (("--baselines", "slow"), "unknown baselines slow: choose out of"),
        (("--baselines", "", "--backends", ""), "nothing to time"),
        (("--dtype", "int8"), "unknown dtype int8: choose out of bf16"),
        (("--weights",), "'qwen3-vl-2b' has no weights to load: pass a checkpoint's folder"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "measure", lambda *_, **__: pytest.fail("work began"))
    result = command("--model", "qwen3-vl-2b", "--sizes", "1x2x2", *options)
    assert result.exit_code == 2
    assert re.search(message, error_text(result)), error_text(result)


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = tiny.TINY["qwen3_vl"].build(seed=3)
    model.save_pretrained(tmp_path)
    loaded = bench.build_tower(str(tmp_path), torch.device("cpu"), torch.float32, weights=True).state_dict()
    saved = tiny.tower_of(model).state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "has_cuda", torch.cuda.is_available)
    options = ("--model", "qwen2.5-vl-3b,qwen3-vl-2b", "--sizes", "1x16x16+2x8x12", "--rounds", 1)
    result = command(*options, "--baselines", "sdpa,compile", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["device"], report["dtype"]) == (torch.cuda.get_device_name(), "bfloat16")
    timed = {row["contender"] for row in report["rows"] if row["status"] == "timed"}
    assert {"stock sdpa", "stock compile", "auto"} <= timed, result.output
