"""Run benchmarks with tiny models on a CPU: what they verify, what they time, and that patched towers run fast."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import EXAMPLES, ROOT
from support.backends import add_spoiled, hide_gpu
from tiny import TINY, tower_of
from torch import nn

from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tools.bench import towers
from hf_vit_accel.tools.bench import ways as bench_ways

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS)]

import everything  # noqa: E402
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


TOWER = TINY["qwen2_5_vl"].vision | dict(depth=2, fullatt_block_indexes=[1])


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
        assert ours["calls"] == {"fast": 4 * ways.WAYS[ours["way"]].batches, "stock": 0}
        assert 0 <= ours["difference"] < 0.05
        assert ours["slower"] == pytest.approx(100 * (ours["ms"] / stock["ms"] - 1))
        assert ours["total_gb"] == {"without graphs": None, "default": None}, "a CPU does not report its memory"


# --- commands and programs --------------------------------------------------------------------------------------------


def test_every_shown_command_is_the_one_that_runs() -> None:
    for name, job in everything.JOBS.items():
        shown = shlex.split(job.command_line())
        arguments = job.arguments(Path("x.json"))
        assert shown[0] in ("hf-vit-accel", "python", "torchrun"), name
        assert shown[1:-2] == arguments[-len(shown) + 1 : -2], name
        scripts = [word for word in arguments if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts)


LACKING = [
    program
    for program, package in {"liger": "liger_kernel", "quantised": "bitsandbytes"}.items()
    if importlib.util.find_spec(package) is None
]


def import_all(folder: Path, programs: list[Path]) -> None:
    """Import programs of a folder. Modules of the two folders have equal names, so those of the other one go first."""
    folders = (str(BENCHMARKS), str(EXAMPLES))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folders):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(folders))]
    for program in programs:
        runpy.run_path(str(program), run_name="program")


@pytest.mark.parametrize("folder", [BENCHMARKS, EXAMPLES], ids=lambda path: path.name)
def test_every_program_can_be_imported(folder: Path) -> None:
    """Most of them need a GPU, so that no other test here would notice a renamed import."""
    programs = [path for path in sorted(folder.glob("*.py")) if path.stem not in LACKING]
    assert len(programs) > 5
    process = get_context("fork").Process(target=import_all, args=(folder, programs))
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback stands above"


def test_without_hides_packages_from_imports_and_find_spec(tmp_path: Path) -> None:
    """Other packages are visible, and the module gets its arguments."""
    (tmp_path / "seen.py").write_text(
        "import sys\n"
        "from importlib.util import find_spec\n"
        "try:\n"
        "    import typer.main\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, find_spec('typer'), find_spec('numpy').name, sys.argv[1:])\n"
    )
    command = [sys.executable, str(BENCHMARKS / "without.py"), "typer,flash_attn", "seen", "--rounds", "2"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert output == "typer None numpy ['--rounds', '2']\n"
