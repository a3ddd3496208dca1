"""Run benchmarks with tiny models on a CPU: what they verify, what they time, and that patched towers run fast."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import everything
import measuring
import pytest
import shapes
import torch
import torch.distributed as dist
import training
import transformers
import ways
from packaging.version import Version
from programs import EXAMPLES, ROOT
from support.backends import add_spoiled, hide_gpu
from support.ranks import runner
from tiny import TINY, tower_of
from torch import nn
from torch.multiprocessing import start_processes

from hf_vit_accel.families import FAMILIES, Family
from hf_vit_accel.tools import bench

BENCHMARKS = ROOT / "benchmarks"
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
    chosen = bench.choose(tower, backends, baselines)
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


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.attention_only], ids=lambda f: f.name)
def test_every_family_has_a_shape(family: Family) -> None:
    packages = {module.rpartition(".")[0] for module, _ in family.towers}
    if not any(map(importlib.util.find_spec, packages)):
        pytest.skip(f"this transformers lacks {family.name}")
    kinds = {model: bench.tower_class(bench.vision_config(model)) for model in shapes.SHAPES}
    models = [model for model, kind in kinds.items() if (kind.__module__, kind.__name__) in family.towers]
    assert models
    for model in models:
        bench.build_tower(model, torch.device("meta"), torch.bfloat16)


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


# --- tiny runs --------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_warm_up() -> None:
    """Every other round runs backwards. Steps that warm up are not timed, and each contender is set up once a round."""
    events: list[str] = []

    def set_up(name: str) -> Callable[[], None]:
        events.append(f"set up {name}")
        return partial(events.append, name)

    times = measuring.time_set_ups("ab", set_up, 2, 3, warm_ups=2, after=lambda name: events.append(f"after {name}"))
    turns = {name: [f"set up {name}", *[name] * 5, f"after {name}"] for name in "ab"}
    assert events == [*turns["a"], *turns["b"], *turns["b"], *turns["a"]]
    assert {name: len(of_name) for name, of_name in times.items()} == {"a": 6, "b": 6}


def test_time_before_a_call_is_not_timed() -> None:
    [elapsed] = measuring.time_calls(lambda: None, 1, warm_ups=0, before=lambda: time.sleep(0.05))
    assert elapsed < 50
    assert measuring.run_once(lambda: time.sleep(0.05)).ms >= 50
    begin = measuring.now()
    time.sleep(0.05)
    assert measuring.now() - begin >= 50


def test_a_run_on_a_gpu_waits_for_it_and_reports_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is counted from the begin of the run on, in all and beyond what was allocated before."""
    events: list[str] = []
    monkeypatch.setattr(measuring, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(measuring, "milliseconds", lambda step, cuda: (step(), 5.0)[1] if cuda else 0.0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    assert measuring.run_once(lambda: events.append("run")) == (5.0, None, 3.0, 2.0)
    assert measuring.peak_gigabytes(lambda: events.append("run")) == 2.0
    measuring.now()
    assert events == ["reset", "run", "reset", "run", "wait"]


MODEL = "qwen3-vl-8b"
Script = Any
"""A module of benchmarks/."""


def measure_by_command(script: Script, path: Path, *options: str) -> list[dict[str, Any]]:
    """Run a script of towers as its command does, with one tiny model; return the rows of its file."""
    sys.argv = [f"{script.__name__}.py", f"--models={MODEL}", f"--json={path}", *options]
    script.measure_models(script.__doc__, "", script.measure_model, options={"rounds": 1})
    return list(json.loads(path.read_text())["rows"])


def run_training_step(script: Script, folder: Path) -> None:
    """Two steps of `Trainer` warm up. Both ways to train are timed, and the patched tower runs fast."""
    script.IMAGES, script.SIDE, script.SMALL_SIDE, script.STEPS = 1, 4, 4, 1
    rows = measure_by_command(script, folder / "steps.json", "--rounds=2")
    assert [row["way"] for row in rows] == list(script.WAYS)
    for row in rows:
        assert row["fast_calls"] == 10 and row["stock_calls"] == 0, "3 of `Trainer`, 7 of the tower alone"
        for contender in ("stock", "patched"):
            assert 0 < row[contender]["low"] <= row[contender]["step"] <= row[contender]["high"] < 60
            assert 0 < row[contender]["tower"] < 60
    script.now = partial(next, itertools.accumulate([0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0]))
    model = script.prepared(script.build(MODEL, device="cpu"), script.WAYS[0])
    sample = script.batch(model.base_model.model.model.visual, 1, 4)
    assert script.train(model, sample, 4) == [3.0, 4.0]


def run_max_rows(script: Script, folder: Path) -> None:
    """The first call of the longest video is timed as well, and every pass alone."""
    script.HEIGHT, script.WIDTH, script.FRAMES, script.MILLION_FRAMES, script.SIZES = 4, 6, 4, 5, (None, 48)
    rows = measure_by_command(script, folder / "rows.json")
    assert [row["frames"] for row in rows] == [[4], [2, 2]] and all(row["ms"] > 0 for row in rows)
    assert rows[0]["alone_ms"] == rows[0]["ms"] and rows[1]["alone_ms"] > 0
    assert len(script.MILLION["seconds"]) == 2 and script.MILLION["outputs_gb"] > 0
    assert script.MILLION["beyond_gb"] == [None, None], "a CPU does not report its memory"


def run_long_video(script: Script, folder: Path) -> None:
    """Stock and patched fit, say the same, and are timed."""
    path = folder / "video.json"
    options = ["--seconds=4", "--height=64", "--width=96", "--tokens=3", f"--json={path}"]
    sys.argv = ["long_video.py", f"--random={MODEL}", *options]
    script.main()
    stock, patched = json.loads(path.read_text())["rows"]
    assert (stock["way"], patched["way"]) == ("stock", "patched") and stock["text"] == patched["text"]
    for step in ("encode", "generate"):
        assert stock[step]["seconds"] > 0 and patched[step]["seconds"] > 0


def half_a_second(step: Callable[[], object], *, cuda: bool) -> float:
    """Run a step, and say that it took 500 ms."""
    step()
    return 500.0


def run_captioning(script: Script, folder: Path) -> None:
    """Every run comes twice, and the second is timed: six records a round and contender. Headers count, too."""
    script.LONGEST, script.milliseconds = 16, half_a_second
    script.main(folder, pictures=3, model=MODEL, tokens="1", rounds=2, json_path=folder / "rates.json")
    [row] = json.loads((folder / "rates.json").read_text())["rows"]
    assert row["all"] == {"stock": [3.0, 3.0], "patched": [3.0, 3.0]} and row["stock"] == row["patched"] == 3.0
    assert row["ms waiting"].keys() == {"stock", "patched"}
    for way in script.WAYS:
        records = list((folder / MODEL / f"{way}_1").rglob("*.jsonl"))
        assert sum(path.read_text().count('"tokens"') for path in records) >= 12


class FakeEngine:
    """Stand in for vLLM's engine."""

    def __init__(self, model: str, **settings: object) -> None:
        self.config = json.loads((Path(model) / "config.json").read_text())

    def apply_model(self, function: Callable[[nn.Module], None]) -> None:
        function(nn.Linear(2, 2))

    def generate(self, requests: list[Any], sampling: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
        ids = [[0] * of_request["max_tokens"] for _, of_request in zip(requests, sampling, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=of_request)]) for of_request in ids]


def run_beside_vllm(script: Script, folder: Path) -> None:
    """Both sides run all jobs, on one clock."""
    captioning = sys.modules["captioning_benchmark"]
    script.LONGEST = captioning.LONGEST = 16
    script.milliseconds = captioning.milliseconds = half_a_second
    script.UNEQUAL_TOKENS = 3
    script.PICTURES, script.MANY, script.CALLS, script.CALL_TOKENS = 3, 5, {"2 x 4x6": (2, (4, 6))}, (1, 2)
    sys.modules["vllm"] = SimpleNamespace(LLM=FakeEngine, SamplingParams=dict)
    path = folder / "beside.json"
    for side in ("ours", "vllm"):
        script.main(folder, side=side, model=MODEL, tokens="1", runs=2, json_path=path)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["side"], row["job"], row["tokens"]) for row in rows] == [
        (side, *job)
        for side in ("ours", "vllm")
        for job in (
            ("captioning", 1),
            ("captioning, unequal lengths", 3),
            ("captioning many, unequal lengths", 3),
            ("2 x 4x6", 1),
            ("2 x 4x6", 2),
        )
    ]
    times = [row["ms"] for row in rows]
    assert times == [*[1000] * 3, *[500] * 7], "headers of pictures are read before, and count"
    assert [row["pictures/s"] for row in rows if "pictures/s" in row] == [3.0, 3.0, 5.0, 6.0, 6.0, 10.0]
    lengths = [row["tokens of a picture"] for row in rows]
    assert lengths == [1, *lengths[1:3], 1, 2] * 2, "vLLM makes captions of our lengths"
    assert all(0 < length <= 3 for length in lengths)


TINY_RUNS = {
    "training_step": run_training_step,
    "max_rows": run_max_rows,
    "long_video": run_long_video,
    "captioning_benchmark": run_captioning,
    "beside_vllm": run_beside_vllm,
}


def run_tiny(_: int, name: str, folder: Path) -> None:
    """Run a script in this forked process, with tiny models under the names of the large ones."""
    torch.cuda.is_available = lambda: False
    import_all(BENCHMARKS, [])
    whole_call = importlib.import_module("whole_call")
    vision = TINY["qwen3_vl"].vision | {"patch_size": 16}
    bench.SHAPES[MODEL] = ("qwen3_vl", vision)
    whole_call.TEXT = {MODEL: ("Qwen3VL", TINY["qwen3_vl"].text | {"vocab_size": 152064})}
    script = importlib.import_module(name)
    TINY_RUNS[name](script, folder)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="the scripts need transformers 5.17")
@pytest.mark.parametrize("name", TINY_RUNS)
def test_a_script_runs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    start_processes(run_tiny, (name, tmp_path), nprocs=1, start_method="fork")


def check_data_parallel(rank: int) -> None:
    """Compare a call that two ranks share with that of one, in three rounds."""
    program = importlib.import_module("data_parallel")
    tower = tower_of(TINY["qwen2_5_vl"].build())
    groups = {2: dist.new_group([0, 1])}
    rows = program.in_turns(tower, [(1, 4, 6), (1, 4, 4)], groups, 3)
    assert rows.keys() == {1, 2} and all(row["ms"] > 0 and row["difference"] < 1e-4 for row in rows.values())
    assert rows[2]["status"] and not rows[2]["fallbacks"]


def test_calls_that_ranks_share_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner(tmp_path, monkeypatch)(check_data_parallel, 2)


# --- commands and programs --------------------------------------------------------------------------------------------


def test_every_shown_command_is_the_one_that_runs() -> None:
    for name, job in everything.JOBS.items():
        shown = shlex.split(job.command_line())
        arguments = job.arguments(Path("x.json"))
        assert shown[0] in ("hf-vit-accel", "python", "torchrun"), name
        assert shown[1:-2] == arguments[-len(shown) + 1 : -2], name
        scripts = [word for word in arguments if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts)


LACKING = [] if importlib.util.find_spec("bitsandbytes") else ["quantised"]


def import_all(folder: Path, programs: list[Path]) -> None:
    """Import programs of a folder. Modules of the two folders have equal names, so those of the other one go first."""
    folders = (str(BENCHMARKS), str(EXAMPLES))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folders):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(folders))]
    for program in programs:
        runpy.run_path(str(program), run_name="program")


def test_help_needs_no_liger() -> None:
    command = [sys.executable, str(BENCHMARKS / "without.py"), "liger_kernel", "liger", "--help"]
    paths = os.pathsep.join([str(BENCHMARKS), *sys.path])
    help_text = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": paths}, text=True)
    assert "Time Liger's kernels beside ours" in help_text and "--layers" in help_text


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


def test_one_clock_times_all_benchmarks() -> None:
    """`everything.py` measures no model: it bounds how long a script may run."""
    clocks = re.compile(r"perf_counter|monotonic|\btime\.time|Event\(")
    scripts = [path.name for path in BENCHMARKS.glob("*.py") if clocks.search(path.read_text())]
    assert sorted(scripts) == ["everything.py", "measuring.py"]
