"""Runs every benchmark, several at a time where there are several GPUs, and writes the JSON files of the tables.

    python examples/benchmark/everything.py                            all, on every GPU, into examples/benchmark
    python examples/benchmark/everything.py --only training,towers --output build
    python examples/benchmark/everything.py --commands                 what would run

A job has one GPU and its share of the CPU's cores to itself, but for those that want several GPUs: they run alone, when
all others are over. Models of one job are timed by a process each, on any of the GPUs. What a process printed lies
beside its file, in `parts`. A job's file is written when its last process is over: a run that is stopped leaves what
was done. A job of which a process fails leaves the file of an earlier run as it is.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_vit_accel import machine
from hf_vit_accel.tools import bench

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
QWEN = ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b")
OTHERS = ("qwen3.5", "glm-ocr", "glm-4.1v-9b", "glm-5.3-flash", "paddleocr-vl", "ernie-4.5-vl", "dots3-note")
OTHERS += ("qwen2.5-omni-7b", "exaone-4.5")
MODULES = {
    "hf-vit-accel": "hf_vit_accel",
    "torch.distributed.run": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What makes one file.

    command: as the pages tell it, without `--json`. models: timed by a process each, as if each were named by its
    `--model`. seconds: about what a process takes, for those that take long to begin first. gpus: 0 for all that
    there are.
    """

    file: str
    command: str
    models: tuple[str, ...] = ()
    option: str = "--model"
    seconds: int = 100
    gpus: int = 1

    def told(self) -> str:
        """The command that makes the whole file."""
        models = f" {self.option} {','.join(self.models)}" if self.models else ""
        return f"{self.command}{models} --json examples/benchmark/{self.file}"

    def parts(self) -> list[Job]:
        """Jobs that can run beside each other."""
        return [replace(self, models=(model,)) for model in self.models] or [self]

    def words(self, path: Path) -> list[str]:
        """What is run."""
        command = self.command.replace("torchrun", "torch.distributed.run --standalone").split(" ", 1)
        module = MODULES.get(command[0])
        start = [sys.executable, *(["-m", module] if module else [])]
        models = [self.option, ",".join(self.models)] if self.models else []
        return [*start, *shlex.split(command[1]), *models, "--json", str(path)]


def _bench(file: str, options: str, models: tuple[str, ...] = QWEN, seconds: int = 100) -> Job:
    return Job(file=file, command=f"hf-vit-accel bench {options}", models=models, seconds=seconds)


def _script(file: str, script: str, models: tuple[str, ...] = (), seconds: int = 100, **more: Any) -> Job:
    command = f"python examples/benchmark/{script}"
    return Job(file=file, command=command, models=models, option="--models", seconds=seconds, **more)


JOBS = {
    "towers": _bench(
        "towers.json",
        "--rounds 2 --baselines sdpa,flash_attention_3 --backends "
        "auto,auto+graph,flash_attention_4,flash_attention_3,flashinfer_cudnn,torch_varlen",
        seconds=200,
    ),
    "plain": Job(  # a plain install: torch's own attention
        file="plain.json",
        command="python examples/benchmark/without.py flash_attn,flash_attn_interface,flashinfer,quack hf_vit_accel "
        "bench --rounds 2 --baselines sdpa --backends auto",
        models=QWEN,
        seconds=60,
    ),
    "training": _bench(
        "training.json",
        '--train --rounds 2 --sizes "one 448²,one 1024²,16 x 512²,one page" '
        "--baselines sdpa,flash_attention_2,compile_blocks",
        seconds=300,
    ),
    "checkpointing": _bench(
        "checkpointing.json",
        '--train --checkpointing --rounds 2 --sizes "16 x 512²" --backends auto --baselines sdpa,compile_blocks',
        seconds=60,
    ),
    "families": _bench(
        "families.json", '--rounds 2 --sizes "16 x 512²,one 448²" --backends auto,auto+graph', OTHERS, seconds=30
    ),
    "families_training": _bench(
        "families_training.json",
        '--train --rounds 2 --sizes "16 x 512²" --backends auto --baselines sdpa,compile_blocks',
        OTHERS,
        seconds=60,
    ),
    "small": _bench(
        "small.json",
        '--rounds 6 --sizes "one 448²" --backends auto,auto+graph,flashinfer_cudnn+graph '
        "--baselines sdpa,flash_attention_3,graph,compile+graph",
        QWEN[:2],
        seconds=150,
    ),
    "hosts": _bench(  # of one machine: beside those of others it is called hosts_NAME.json
        "hosts.json", '--rounds 2 --sizes "one 448²" --backends auto,auto+graph --baselines sdpa', QWEN[:2], seconds=30
    ),
    "checks": _script("checks.json", "checks.py", seconds=30),
    "flex": _bench(
        "flex.json",
        '--sizes "one 448²,16 x 512²" --backends flex,flex+graph,flashinfer_cudnn,flashinfer_cudnn+graph,auto',
        QWEN[:2],
        seconds=60,
    ),
    "fp8": _bench(
        "fp8.json", '--rounds 3 --sizes "one page,1x72x72" --backends flashinfer_cudnn,auto,auto+fp8', QWEN[1:]
    ),
    "lora": _script("lora.json", "lora.py", QWEN, seconds=40),
    "max_rows": _script("max_rows.json", "max_rows.py", seconds=130),
    "long_video": Job(
        file="long_video.json", command="python examples/long_video.py --random qwen3-vl-8b --tokens 16", seconds=100
    ),
    "reuse": _script("reuse.json", "reuse.py --seconds 0.6 --calls 200", ("qwen3-vl-8b",), seconds=110),
    "first_token": _script("first_token.json", "first_token.py", seconds=100),
    "training_step": _script("training_step.json", "training_step.py", seconds=100),
    "captioning": Job(
        file="captioning.json",
        command="accelerate launch --num_processes {gpus} examples/benchmark/captioning_benchmark.py build/captioning "
        "--pictures 160",
        seconds=400,
        gpus=0,
    ),
    "ways": Job(
        file="ways.json", command="torchrun --nproc-per-node {gpus} examples/benchmark/ways.py", seconds=250, gpus=0
    ),
    "data_parallel": Job(
        file="data_parallel.json",
        command="torchrun --nproc-per-node {gpus} examples/benchmark/data_parallel.py",
        seconds=250,
        gpus=0,
    ),
}


def put_together(job: Job, documents: list[dict[str, Any]], commit: str | None) -> dict[str, Any]:
    """One document of those of a job's parts, with what each was measured on."""
    machines = [found.get("machine") for found in documents if found.get("machine")] or [bench.host()]
    common = {"versions": machine.versions(), "dtype": "bfloat16"}
    whole = {**common, **documents[0], "command": job.told(), "commit": commit, "machine": machines[0]}
    whole["machines"] = [machine for index, machine in enumerate(machines) if machine not in machines[:index]]
    if len(documents) > 1:
        whole["rows"] = [row for found in documents for row in found["rows"]]
    return whole


def run(job: Job, path: Path, gpus: list[str], cores: list[int], limit: float) -> str | None:
    """Make one file; why it is not there, or not whole, if so."""
    path.unlink(missing_ok=True)
    known = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    places = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": os.pathsep.join(known)}
    begin = time.monotonic()
    with path.with_suffix(".txt").open("w") as printed:
        process = subprocess.Popen(
            job.words(path), stdout=printed, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | places
        )
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, cores)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    took = time.monotonic() - begin
    print(f"{took:5.0f} s  {path.stem}{'' if code == 0 else f'  ended with {code}'}", flush=True)
    return None if code == 0 else f"{path.stem}: " + ("too long" if code is None else f"exit code {code}")


def main(
    only: Annotated[str, typer.Option(help="Comma-separated names of JOBS.")] = ",".join(JOBS),
    output: Annotated[Path, typer.Option(help="Folder of the files.")] = HERE,
    gpus: Annotated[int, typer.Option(min=1)] = max(torch.cuda.device_count(), 1),
    limit: Annotated[float, typer.Option(help="Seconds for one process.")] = 1800,
    commit: Annotated[str | None, typer.Option(help="What is measured; by default what git says.")] = None,
    commands: Annotated[bool, typer.Option("--commands", help="Print what would run, and nothing else.")] = False,
) -> None:
    """Run the jobs and write their files. Exits with 1 if one failed."""
    jobs = {name: JOBS[name] for name in only.split(",")}
    jobs = {name: replace(job, command=job.command.replace("{gpus}", str(gpus))) for name, job in jobs.items()}
    if commands:
        print(*(job.told() for job in jobs.values()), sep="\n")
        return
    if commit is None:
        told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        commit = told.stdout.strip() or None
    output = output.resolve()  # processes run in another folder
    build = output / "parts"
    build.mkdir(parents=True, exist_ok=True)
    parts = [(name, index, part) for name, job in jobs.items() for index, part in enumerate(job.parts())]
    paths = {(name, index): build / f"{'_'.join([name, *part.models])}.json" for name, index, part in parts}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:gpus] if visible else [*map(str, range(gpus))]
    free: queue.Queue[int] = queue.Queue()
    for gpu in range(len(names)):
        free.put(gpu)
    ended: dict[Path, str | None] = {}
    writes = threading.Lock()
    all_cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(all_cores) // len(names)

    def made(name: str, path: Path, problem: str | None) -> None:
        found = [each for (of, _), each in paths.items() if of == name]
        with writes:
            ended[path] = problem
            if any(ended.get(each, "not over") for each in found):
                return
            ended[path] = f"{path.stem}: no file was made"  # until it is
            whole = put_together(jobs[name], [json.loads(each.read_text(encoding="utf-8")) for each in found], commit)
            text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
            (output / jobs[name].file).write_text(text, encoding="utf-8")
            ended[path] = None

    def one(name: str, part: Job, path: Path, gpu: int) -> None:
        try:
            made(name, path, run(part, path, [names[gpu]], all_cores[gpu * share : (gpu + 1) * share], limit))
        finally:
            free.put(gpu)

    threads = []
    for name, index, part in sorted(parts, key=lambda each: -each[2].seconds):
        if part.gpus == 1:
            gpu = free.get()
            threads.append(threading.Thread(target=one, args=(name, part, paths[name, index], gpu)))
            threads[-1].start()
    for thread in threads:
        thread.join()
    for name, index, part in parts:
        if part.gpus != 1:
            made(name, paths[name, index], run(part, paths[name, index], names, [], limit))
    wrong = [problem for path in paths.values() if (problem := ended.get(path, f"{path.stem}: broke off"))]
    print(*wrong, sep="\n")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
