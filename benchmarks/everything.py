"""Run every benchmark, several at a time where there are several GPUs, and write the JSON files of the tables.

    python benchmarks/everything.py                            all, on every GPU, into benchmarks
    python benchmarks/everything.py --only training,towers --output build
    python benchmarks/everything.py --commands                 what would run

A job has one GPU and its share of the CPU's cores to itself. Jobs that need several GPUs run alone, after all others.
Every model of a script is timed by a process of its own, on any of the GPUs. Most runs of `bench` time all models in
one process, since a process takes ten seconds to start. The folder `parts` holds the file and the output of every
process. A job's file is written when its last process ends, so a run that is stopped keeps the finished jobs. If a
process of a job fails, the job's earlier file stays as it is.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import host, write_json

from hf_vit_accel import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QWEN = ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b")
Document = dict[str, Any]
"""The content of a JSON file."""
OTHERS = (
    *("qwen3.5", "glm-ocr", "glm-4.1v-9b", "glm-5.3-flash", "paddleocr-vl", "ernie-4.5-vl"),
    *("qwen2.5-omni-7b", "exaone-4.5"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe how one JSON file is made.

    Args:
        file: the name of the JSON file
        command: the command as the pages show it, without `--json`
        models: the models
        option: the option that names a model
        seconds: the estimated time of a model; long processes begin first
        gpus: the number of GPUs that a process needs; 0 for all
        is_shared: whether one process times all models, or each has its own
    """

    file: str
    command: str
    models: tuple[str, ...] = ()
    option: str = "--model"
    seconds: int = 100
    gpus: int = 1
    is_shared: bool = False

    def command_line(self) -> str:
        """Return the command that makes the complete file, as the pages show it."""
        models = f" {self.option} {','.join(self.models)}" if self.models else ""
        return f"{self.command}{models} --json benchmarks/{self.file}"

    def parts(self) -> list[Job]:
        """Split the job into the jobs of its processes."""
        if self.is_shared:
            return [replace(self, seconds=self.seconds * len(self.models))]
        return [replace(self, models=(model,)) for model in self.models] or [self]

    def arguments(self, path: Path) -> list[str]:
        """Return the arguments of the process that writes its results to `path`."""
        command = self.command.replace("torchrun", "torch.distributed.run --standalone")
        program, _, options = command.partition(" ")
        start = [sys.executable]
        if program == "torch.distributed.run":
            start += ["-m", program]
        models = [self.option, ",".join(self.models)] if self.models else []
        return [*start, *shlex.split(options), *models, "--json", str(path)]


def _bench(file: str, options: str, models: tuple[str, ...] = QWEN, seconds: int = 100) -> Job:
    return Job(
        file=file, command=f"python benchmarks/towers.py {options}", models=models, seconds=seconds, is_shared=True
    )


def _script(file: str, script: str, models: tuple[str, ...] = (), seconds: int = 100) -> Job:
    command = f"python benchmarks/{script}"
    return Job(file=file, command=command, models=models, option="--models", seconds=seconds)


JOBS = {
    "towers": Job(  # a process for each model: together they take the longest of all benches
        file="towers.json",
        command="python benchmarks/towers.py --rounds 2 --baselines sdpa,flash_attention_2,flash_attention_3 "
        "--backends auto,auto+graph,flash_attention_3,flash_attention_4,flashinfer_cudnn,torch_cudnn,torch_varlen",
        models=QWEN,
        seconds=120,
    ),
    "cuda_extra": Job(  # what `pip install hf-vit-accel[cuda]` brings
        file="cuda_extra.json",
        command="python benchmarks/without.py flash_attn_interface hf_vit_accel bench --rounds 2 "
        '--sizes "one 448²,one page,16 x 512²" --baselines sdpa --backends auto,auto+graph',
        models=QWEN,
        seconds=25,
        is_shared=True,
    ),
    "plain": Job(  # a plain install: torch's own attention
        file="plain.json",
        command="python benchmarks/without.py flash_attn,flash_attn_interface,flashinfer hf_vit_accel "
        "bench --rounds 2 --baselines sdpa --backends auto,auto+graph",
        models=QWEN,
        seconds=50,
        is_shared=True,
    ),
    "held_out": _bench(  # sizes of no other file: odd images, thumbnails, a video
        "held_out.json",
        '--rounds 2 --sizes "1x38x62+1x6x94+1x50x18,1x8x8*256,6x30x52" '
        "--backends auto,auto+graph,flash_attention_3,flash_attention_4,flashinfer_cudnn --baselines sdpa",
        seconds=40,
    ),
    "slow_host": Job(
        file="slow_host.json",
        command="python benchmarks/slowed.py hf_vit_accel bench --rounds 2 "
        '--sizes "one 448²,one 1024²,6x30x52,16 x 512²" --backends auto,auto+graph,auto+eager --baselines sdpa',
        models=QWEN,
        seconds=110,
        is_shared=True,
    ),
    "training": _script(
        "training.json",
        'training.py --rounds 2 --sizes "one 448²,16 x 512²" --backends auto,auto+graph,flash_attention_4 '
        "--baselines sdpa,flash_attention_2,compile_blocks",
        QWEN[:2],
        seconds=130,
    ),
    "families": _bench(
        "families.json", '--rounds 2 --sizes "16 x 512²,one 448²" --backends auto,auto+graph', OTHERS, seconds=25
    ),
    "small": _bench(
        "small.json",
        '--rounds 2 --sizes "one 448²" --backends auto,auto+graph,flashinfer_cudnn+graph '
        "--baselines sdpa,flash_attention_3,graph,compile+graph",
        QWEN[:2],
        seconds=40,
    ),
    "random_calls": _script("random_calls.json", "random_calls.py", QWEN[:2], seconds=60),
    "flex": _bench(
        "flex.json",
        '--rounds 2 --sizes "one 448²,16 x 512²" '
        "--backends flex,flex+graph,flashinfer_cudnn,flashinfer_cudnn+graph,auto",
        QWEN[:2],
        seconds=50,
    ),
    "fp8": _bench(
        "fp8.json",
        '--rounds 2 --sizes "one page,1x92x92,one 448²" --backends flashinfer_cudnn,auto,auto+fp8',
        seconds=35,
    ),
    "lora": _script("lora.json", "lora.py", QWEN[:2], seconds=60),
    "max_rows": _script("max_rows.json", "max_rows.py", seconds=100),
    "pages": _script("pages.json", "pages.py", QWEN[:2], seconds=60),
    "long_video": _script("long_video.json", "long_video.py --random qwen3-vl-8b --tokens 16", seconds=25),
    "quantised": _script("quantised.json", "quantised.py --rounds 1", QWEN[:2], seconds=150),
    "liger": _script("liger.json", "liger.py --layers 28 --rounds 2 --calls 5", QWEN[:2], seconds=200),
    "reuse": _script("reuse.json", "reuse.py --rounds 1 --calls 200", QWEN[:2], seconds=65),
    "whole_call": _script("whole_call.json", "whole_call.py --tokens 0,1,64 --rounds 2", QWEN[:2], seconds=170),
    "embedding": _script("embedding.json", "embedding.py --rounds 3", QWEN[:2], seconds=120),
    "training_step": _script("training_step.json", "training_step.py", QWEN[:2], seconds=95),
    "captioning": Job(
        file="captioning.json",
        command="python benchmarks/captioning_benchmark.py build/captioning --pictures 96 --tokens 1,32 --rounds 1",
        models=QWEN[:2],
        seconds=80,
    ),
    "ways": _script("ways.json", "ways.py", QWEN[:2], seconds=160),
    "captions": _script("captions.json", "parity.py --scenes 300", seconds=120),
    "data_parallel": Job(
        file="data_parallel.json",
        command="torchrun --nproc-per-node {gpus} benchmarks/data_parallel.py --rounds 3 "
        '--sizes "16 x 512²,64 x 512²,video 64 x 36x64,32 pages"',
        seconds=120,
        gpus=0,
    ),
}
"""The jobs by the name that `--only` takes."""


def merge(job: Job, documents: Sequence[Document], commit: str | None) -> Document:
    """Merge the documents of a job's parts, with every machine that measured one of them."""
    machines = [document["machine"] for document in documents if document.get("machine")] or [host()]
    common = {"versions": machine.versions(), "dtype": "bfloat16"}
    merged = {**common, **documents[0], "command": job.command_line(), "commit": commit, "machine": machines[0]}
    merged["machines"] = [facts for index, facts in enumerate(machines) if facts not in machines[:index]]
    if len(documents) > 1:
        merged["rows"] = [row for document in documents for row in document["rows"]]
    return merged


def run(job: Job, path: Path, gpus: Sequence[str], limit: float) -> str | None:
    """Run the process that writes one file.

    Args:
        job: the part of a job to run
        path: the file that the process writes; its output goes to the same name with .txt
        gpus: the visible GPUs
        limit: the seconds after which the process is killed

    Returns:
        The reason why the file is missing or incomplete; None if it was written.
    """
    path.unlink(missing_ok=True)
    folders = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": os.pathsep.join(folders)}
    begin = time.monotonic()
    with path.with_suffix(".txt").open("w") as printed:
        process = subprocess.Popen(
            job.arguments(path), stdout=printed, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | variables
        )
        problem = None
        try:
            code = process.wait(limit)
            if code != 0:
                problem = f"exit code {code}"
            elif not path.exists():
                problem = "no file was made"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"killed after {limit:.0f} s"
    seconds = time.monotonic() - begin
    print(f"{seconds:5.0f} s  {path.stem}{f': {problem}' if problem else ''}", flush=True)
    return f"{path.stem}: {problem}" if problem else None


@dataclass(frozen=True)
class Part:
    """One process of a job, and the file that it writes."""

    name: str
    job: Job
    path: Path


def run_all(parts: Sequence[Part], gpus: Sequence[str], limit: float) -> Iterator[tuple[Part, str | None]]:
    """Run the parts that need one GPU beside each other, longest first, then the others alone.

    Yields:
        Every part that has ended, and the problem if there was one.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // len(gpus)
    free: queue.Queue[int] = queue.Queue()
    for gpu in range(len(gpus)):
        free.put(gpu)

    def run_on_a_free_gpu(part: Part) -> tuple[Part, str | None]:
        gpu = free.get()
        try:
            own_cores = cores[gpu * share : (gpu + 1) * share]
            if own_cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, own_cores)  # of this thread alone; the process that it starts inherits it
            return part, run(part.job, part.path, [gpus[gpu]], limit)
        finally:
            free.put(gpu)

    pool = ThreadPoolExecutor(len(gpus))
    try:
        longest_first = sorted(parts, key=lambda part: -part.job.seconds)
        ends = [pool.submit(run_on_a_free_gpu, part) for part in longest_first if part.job.gpus == 1]
        for end in as_completed(ends):
            yield end.result()
    finally:
        pool.shutdown(cancel_futures=True)
    for part in parts:
        if part.job.gpus != 1:
            yield part, run(part.job, part.path, gpus, limit)


def described_commit() -> str | None:
    """Ask git for the commit of this tree; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]  # no tag, always a hash
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return answer.strip() or None


def main(
    only: Annotated[str, typer.Option(help="Comma-separated names of JOBS.")] = ",".join(JOBS),
    output: Annotated[Path, typer.Option(help="Folder of the files.")] = HERE,
    gpus: Annotated[int, typer.Option(min=1)] = max(torch.cuda.device_count(), 1),
    limit: Annotated[float, typer.Option(help="Seconds after which a process is killed.")] = 1800,
    commit: Annotated[str | None, typer.Option(help="The measured commit; by default git is asked.")] = None,
    commands: Annotated[bool, typer.Option("--commands", help="Print the commands without running them.")] = False,
) -> None:
    """Run the jobs and write their files. Exits with 1 if a job failed."""
    jobs = {}
    for name in only.split(","):
        jobs[name] = replace(JOBS[name], command=JOBS[name].command.replace("{gpus}", str(gpus)))
    if commands:
        print(*(job.command_line() for job in jobs.values()), sep="\n")
        return
    output = output.resolve()  # processes run in another folder
    build = output / "parts"
    build.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, job in jobs.items():
        for part in job.parts():
            models = part.models if len(part.models) == 1 else ()
            parts.append(Part(name, part, build / f"{'_'.join([name, *models])}.json"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:gpus] if visible else [str(gpu) for gpu in range(gpus)]
    commit = commit or described_commit()
    problems: list[str] = []
    ended: set[Path] = set()
    for part, problem in run_all(parts, names, limit):
        if problem:
            problems.append(problem)
            continue
        ended.add(part.path)
        paths = [other.path for other in parts if other.name == part.name]
        if ended.issuperset(paths):
            documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            job = jobs[part.name]
            write_json(output / job.file, merge(job, documents, commit))
    print(*problems, sep="\n")
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
