"""Captions pictures and videos as `batch_caption.py` does, on the machines of a Ray cluster.

    python examples/caption_on_ray.py photos 'shards/*.tar' --output captions --model Qwen/Qwen3-VL-8B-Instruct
    python examples/batch_caption.py merge captions captions.jsonl

Any CPU of the cluster decodes pictures and cuts them into patches; on every GPU an actor has a patched model. All of
them need hf_vit_accel, and the pictures, the output folder and the model under the same names. Records are written as
parquet files, and are those of `batch_caption.py`: either goes on where the other one stopped. A machine may go or come
at any time: what it was at is done by another one.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
import typer
from ray.data.exceptions import ExecutionTimeoutError

sys.path.insert(0, str(Path(__file__).resolve().parent))
from batch_caption import entry_of, exit_by, processor_for, sentence, stop
from captioning.cluster import captioned, connect, measured
from captioning.journal import Batches, Journal
from captioning.options import OnRay, command
from captioning.prepare import Prepared, prepare
from captioning.progress import Progress, clear, read_counts, summary
from captioning.stages import Job, anywhere
from media.batches import cost, pack

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(app)
def caption(options: OnRay) -> None:
    """Caption pictures and videos on a Ray cluster."""
    options = replace(options, output=options.output.resolve())
    on_gpu = connect(options)
    with ExitStack() as stack:
        try:
            ready = prepare(options.wanted(on_gpu), stack)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        try:
            work(options, ready, on_gpu)
        except KeyboardInterrupt:
            stop("stopped", 130, _begun_anew(options, ready), True)
        except (ray.exceptions.RayError, ExecutionTimeoutError, OSError) as error:
            why = getattr(error, "cause", None) or error
            stop(f"the cluster gave up: {sentence(why)}", 1, _begun_anew(options, ready), True)
    if not options.dry_run:
        exit_by(Journal(options.output).merged(ready.run), ready.plan.expected, options.max_failures, ready.clashed)


def _begun_anew(options: OnRay, ready: Prepared) -> bool:
    """Whether `--overwrite` has done its part: the run that it asks for is noted, and is gone on with without it."""
    return options.overwrite and any(run["run"] == ready.run for run in Journal(options.output).manifest()["runs"])


def work(options: OnRay, ready: Prepared, on_gpu: bool) -> None:
    """Caption what is left."""
    journal, plan, counted = Journal(options.output), ready.plan, options.output / ".progress"
    commit = ready.settings.get("revision")
    job = Job(options=options, run=ready.run, commit=commit, on_gpu=on_gpu, folder=options.output)
    if plan.tasks:
        processor_for(options, commit, True)  # else every worker would say what is wrong
    entry = entry_of(options, ready, options.actors, "Ray, " + ("GPUs" if on_gpu else "CPUs"), "nothing to do")
    if not options.dry_run:
        journal.begin(entry, partial(plan.revised, ready.run))
        clear(counted)
    tasks = measured(job, [anywhere(task) for task in plan.tasks])
    costs = {task.item.key: cost(task, options.max_new_tokens) for task in tasks}
    batches = list(pack(tasks, options.batch_tokens, options.batch_size))
    print(f"{len(tasks)} items, {sum(task.tokens for task in tasks)} tokens, {len(batches)} batches", flush=True)
    if options.dry_run:
        return
    progress = Progress(counted, 0, 1, len(tasks), sum(costs.values()))
    if batches:
        records, known = Batches.new(options.output), ""
        for done in captioned(replace(job, folder=records.folder), batches, options.actors):
            batch, status = batches[done.pop("number")], done.pop("status")
            progress.add(items=len(batch), cost=sum(costs[task.item.key] for task in batch), **done)
            if not known:
                known = status
                journal.note(entry | {"status": status}, instead=True)
        records.fold()
        print(known)
    progress.close()
    print(summary(read_counts(counted, 1)))


if __name__ == "__main__":
    app()
