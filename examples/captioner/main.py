"""Caption pictures and videos with a Qwen-VL model whose vision tower is accelerated by hf_vit_accel.

python examples/captioner/main.py caption photos --output captions --model Qwen/Qwen3-VL-8B-Instruct
accelerate launch --num_processes 4 examples/captioner/main.py caption photos --output captions --model ...
python examples/captioner/main.py merge captions captions.jsonl  # or photos/metadata.jsonl
python examples/captioner/main.py merge captions photos          # photos/NAME.txt beside every photos/NAME.jpg
"""

# ruff: noqa: E402, a launcher may be killed during the imports, which take seconds

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated


def _stop(*_: object) -> None:
    """Handle Ctrl-C once. A launcher passes it on again while the run ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide modules of other packages
    from captioner.files import end_with_launcher

    end_with_launcher()
    signal.signal(signal.SIGINT, _stop)

import torch
import typer
from transformers import PreTrainedModel, ProcessorMixin

try:
    from accelerate import PartialState
    from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, parse_flag_from_env
except ModuleNotFoundError:
    raise SystemExit("This program needs accelerate: pip install accelerate") from None

import hf_vit_accel
from captioner.batches import measured, share
from captioner.exports import Export
from captioner.files import CANNOT_WRITE, lock, say, some
from captioner.journal import Journal
from captioner.messages import cannot_load, exit_by, incomplete, stop
from captioner.model import Captioner, load_model
from captioner.options import MaxFailures, Options, takes_options
from captioner.prepare import Prepared, prepare
from captioner.processors import limit_pixels, load_processor
from captioner.progress import Progress
from captioner.worker import Worker

_SHOWN_FILES = 20
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@takes_options
def caption(options: Options) -> None:
    """Caption pictures and videos."""
    state = _join_processes()
    try:
        with ExitStack() as stack:
            ready = _caption(options, state, stack)
    except KeyboardInterrupt:
        if not state.is_main_process:
            raise typer.Exit(130) from None
        stop("stopped", 130)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        stop(f"cannot write to {options.output}: {error.strerror}", 1)
    if options.dry_run:
        return
    records = Journal(options.output).select(ready.entry["run"]).records
    is_complete = len(records) >= ready.plan.expected_by_prompt.total()  # so the other processes have ended, too
    if is_complete and (ready.plan.tasks or state.is_main_process):
        exit_by(records, 0, options.max_failures, ready.clashed)


def _join_processes() -> PartialState:
    # Without `cpu`, every process on a CPU would take itself for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    # Processes wait for the slowest one to read its headers, which takes long in a folder of millions.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return PartialState(cpu=cpu, **patience.to_kwargs())


def _caption(options: Options, state: PartialState, stack: ExitStack) -> Prepared:
    """Caption the share of this process. The output folder is locked as long as the stack is open."""
    ready = _prepare(options, state, stack)
    if options.dry_run:
        return ready
    captioner = _load(options, state, ready) if ready.plan.tasks else None
    journal = Journal(options.output, ready.start)
    if state.is_main_process:  # the others write only after all headers are read, below
        status = "stock" if options.no_patch else "nothing to do"
        if captioner and not options.no_patch:
            status = str(hf_vit_accel.status(captioner.model))
        device = torch.cuda.get_device_name() if state.device.type == "cuda" else "cpu"
        journal.note(ready.entry | {"processes": state.num_processes, "device": device, "status": status})
        if ready.plan.updates:
            journal.append(0, ready.plan.updates)
    begin = time.perf_counter()
    tasks = measured(ready.plan.tasks, captioner.processor if captioner else None, state)
    state.destroy_process_group()  # from here on no process waits for another
    if captioner is None:
        return ready
    tasks = share(tasks, state.process_index, state.num_processes)
    progress = Progress(len(tasks), sum(task.tokens for task in tasks), begin=begin, is_shown=state.is_main_process)
    worker = Worker(
        captioner=captioner,
        journal=journal,
        progress=progress,
        process=state.process_index,
        run=ready.entry["run"],
        bounds=captioner.bounds(options.batch_size),
    )
    worker.work(tasks)
    if state.is_main_process and not options.no_patch:
        print(hf_vit_accel.status(captioner.model))
    print(f"  process {state.process_index}: {progress.summary()}", flush=True)
    return ready


def _prepare(options: Options, state: PartialState, stack: ExitStack) -> Prepared:
    answer: list[tuple[Prepared | None, str | None]] = [(None, None)]
    if state.is_main_process:
        try:
            answer = [(prepare(options, state.device.type == "cuda", stack), None)]
        except (OSError, ValueError) as error:
            answer = [(None, str(error))]
    ready, mistake = broadcast_object_list(answer)[0]
    if ready is None:
        raise typer.BadParameter(mistake or "") if state.is_main_process else typer.Exit(2)
    if not state.is_main_process and not options.dry_run:
        stack.enter_context(lock(options.output, alone=False))
    return ready


def _load(options: Options, state: PartialState, ready: Prepared) -> Captioner:
    commit = ready.entry["settings"].get("revision")
    dtype = getattr(torch, ready.entry["settings"]["dtype"])
    reuse = len(options.prompts) > 1 and hf_vit_accel.ReuseConfig(across_calls=True)  # of what `generate` encodes
    try:
        processor: ProcessorMixin = load_processor(options.model, commit)
        limit_pixels(processor, options.min_pixels, options.max_pixels)
        model: PreTrainedModel = load_model(options.model, dtype, state.device, commit)
        return Captioner(
            model,
            processor,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            patching=None if options.no_patch else {"reuse": reuse},
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise typer.BadParameter(cannot_load(options, error)) if state.is_main_process else typer.Exit(2) from None


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="The output folder of `caption`.")],
    result: Annotated[
        Path,
        typer.Argument(
            help="A .jsonl file; metadata.jsonl, as imagefolder data sets have it; or a folder, for NAME.txt beside "
            "every NAME.jpg in it."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Name of a run in the manifest; by default the newest.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Merge this prompt, as `caption` got it. Repeatable; by default those of the last start."),
    ] = None,
    extension: Annotated[str, typer.Option(help="Extension of text files.")] = ".txt",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that merge did not write, too.")
    ] = False,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Join the records into one file, sorted by key. Exits with 1 if records are missing or unwritten, or texts old.

    If other prompts or runs have captions of pictures that the newest ones lack, name the one to merge.
    """
    try:
        selection = Journal(folder).select(run, prompt)
        if selection.others and not run and not prompt:
            raise ValueError(incomplete(selection))
        export = Export(folder, selection.entry, extension=extension, overwrite=overwrite)
        try:
            export(selection.records, result)
        except OSError as error:
            reason = error.strerror or error
            say(f"cannot write {result}: {reason}; the former file is still there: remove the cause, and merge again")
            raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if export.written:
        print(f"wrote {export.contents} of run {selection.entry['run']} to {result}")
    elif not any(record.has_text for record in selection.records):
        print(f"nothing was written to {result}: no record has a caption")
    if export.absent:
        folder = result if result.is_dir() else result.parent
        say(f"{len(export.absent)} pictures are not in {folder}, and got no text: {some(export.absent)}")
    for line in export.refused[:_SHOWN_FILES]:
        say(f"not written: {line}")
    if export.refused:
        print(f"{len(export.refused)} not written")
    has_failed = bool(export.refused) or not export.written
    exit_by(selection.records, selection.missing, max_failures, has_failed)


if __name__ == "__main__":
    app()
