"""Caption pictures and videos as `captioner/main.py` does, on the machines of a Ray cluster.

    python examples/captioner/on_ray.py photos 'shards/*.tar' --output captions --model Qwen/Qwen3-VL-8B-Instruct
    python examples/captioner/main.py merge captions captions.jsonl

Any CPU of the cluster decodes pictures and cuts them into patches. Every GPU has an actor with a patched model. All
machines need hf_vit_accel, and the pictures, the output folder and the model under the same names. Records equal
those of `main.py`: either program goes on where the other one stopped. Machines may leave and join at any time: the
batches of a lost machine are captioned by another one.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import typer

try:
    import ray
    from ray.data.exceptions import ExecutionTimeoutError
except ImportError as error:
    raise SystemExit(f"This program needs Ray Data ({error}): pip install 'ray[data]'") from None

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide modules of other packages
from captioner.batches import Task, cost, pack
from captioner.cluster import captioned, connect, measured
from captioner.journal import Entry, Journal
from captioner.main import processor_for
from captioner.messages import exit_by, manifest_entry, sentence, stop
from captioner.options import OnRay, command
from captioner.prepare import Prepared, prepare
from captioner.progress import Progress, clear, read_counts, summary
from captioner.stages import Job, anywhere

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(app)
def caption(options: OnRay) -> None:
    """Caption pictures and videos on a Ray cluster."""
    options = replace(options, output=options.output.resolve())
    on_gpu = connect(options)
    with ExitStack() as stack:
        try:
            ready = prepare(options, on_gpu, stack)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        try:
            work(options, ready, on_gpu)
        except KeyboardInterrupt:
            stop("stopped", 130, drop_overwrite=_has_begun_anew(options, ready), prints=True)
        except (ray.exceptions.RayError, ExecutionTimeoutError, OSError) as error:
            reason = f"the cluster gave up: {sentence(getattr(error, 'cause', None) or error)}"
            stop(reason, 1, drop_overwrite=_has_begun_anew(options, ready), prints=True)
    if not options.dry_run:
        exit_by(Journal(options.output).merged(ready.run), ready.plan.expected, options.max_failures, ready.clashed)


def _has_begun_anew(options: OnRay, ready: Prepared) -> bool:
    """Tell whether the run of `--overwrite` is noted, so that it goes on without that option."""
    return options.overwrite and any(run["run"] == ready.run for run in Journal(options.output).manifest()["runs"])


def work(options: OnRay, ready: Prepared, on_gpu: bool) -> None:
    """Caption the items that have no records."""
    journal = Journal(options.output)
    plan = ready.plan
    progress_folder = options.output / ".progress"
    commit = ready.settings.get("revision")
    job = Job(options=options, run=ready.run, commit=commit, on_gpu=on_gpu)
    if plan.tasks:
        processor_for(options, commit, True)  # reports a mistake once, before every worker would
    device = "Ray, " + ("GPUs" if on_gpu else "CPUs")
    entry = manifest_entry(options, ready, options.actors, device, "nothing to do")
    if not options.dry_run:
        journal.begin(entry, lambda record: plan.revised(ready.run, record))
        clear(progress_folder)
    tasks = measured(job, [anywhere(task) for task in plan.tasks])
    batches = list(pack(tasks, options.batch_tokens, options.batch_size))
    print(f"{len(tasks)} items, {sum(task.tokens for task in tasks)} tokens, {len(batches)} batches", flush=True)
    if options.dry_run:
        return
    costs = {task.item.key: cost(task, options.max_new_tokens) for task in tasks}
    progress = Progress(progress_folder, 0, 1, len(tasks), sum(costs.values()))
    if batches:
        _caption_batches(job, batches, costs, progress, entry)
    progress.close()
    print(summary(read_counts(progress_folder, 1)))


def _caption_batches(
    job: Job, batches: list[list[Task]], costs: dict[str, float], progress: Progress, entry: Entry
) -> None:
    """Caption the batches, and note how the model runs once the first one is done."""
    assert isinstance(job.options, OnRay)
    model_status = ""
    for counts in captioned(job, batches, job.options.actors):
        batch = batches[counts.pop("number")]
        status = counts.pop("status")
        progress.add(items=len(batch), cost=sum(costs[task.item.key] for task in batch), **counts)
        if not model_status:
            model_status = status
            Journal(job.options.output).note(entry | {"status": status}, instead=True)
    print(model_status)


if __name__ == "__main__":
    app()
