"""Caption pictures and videos with a Qwen-VL model whose vision tower is accelerated by hf_vit_accel.

    python examples/captioner/main.py caption photos --output captions --model Qwen/Qwen3-VL-8B-Instruct
    accelerate launch --num_processes 4 examples/captioner/main.py caption photos --output captions --model ...
    python examples/captioner/main.py merge captions captions.jsonl  # or .parquet, metadata.jsonl, a .tar
    python examples/captioner/main.py merge captions photos          # photos/NAME.txt beside every photos/NAME.jpg

Every process writes one shard of JSON lines into the output folder, batch by batch. Items that have a record of the
same model, prompt and settings are not captioned again. After a kill, start the same command once more, with any number
of processes. Processes wait for each other only until all have loaded the model and shared out the work, through a
common file system.
"""

# ruff: noqa: E402, Ctrl-C must be handled during the imports, which take seconds

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, NoReturn


def _leave(*_: object) -> NoReturn:
    os.write(1, b"\nstopped before anything was begun\n")
    os._exit(130)


_PRESSED: list[float] = []
_PATIENCE = 2.0  # seconds after which a second Ctrl-C ends the run at once


def _stop(*_: object) -> None:
    """Handle Ctrl-C: the first one ends the run. Later ones are ignored, unless the end takes too long."""
    _PRESSED.append(time.monotonic())
    if len(_PRESSED) == 1:
        raise KeyboardInterrupt
    if _PRESSED[-1] - _PRESSED[0] > _PATIENCE:
        os.write(1, b"\nstopped at once; start the same command, without --overwrite, to go on\n")
        os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)

import torch
import typer
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

try:
    from accelerate import PartialState
    from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, parse_flag_from_env
except ModuleNotFoundError:
    raise SystemExit("This program needs accelerate: pip install accelerate") from None

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide modules of other packages
import hf_vit_accel
from captioner.batches import Task, cost, measured, pack, spread
from captioner.exports import NOT_OURS, Export, Texts
from captioner.files import CANNOT_WRITE, end_with_launcher, lock, say, some
from captioner.journal import Journal
from captioner.messages import cannot_load, exit_by, manifest_entry, partial_prompts, partial_run, refused, stop
from captioner.model import Captioner, load_model, why_not_on_gpu
from captioner.options import MaxFailures, Options, command
from captioner.pictures import REFUSE_ABOVE
from captioner.prepare import Prepared, prepare
from captioner.processors import limit_pixels, load_processor
from captioner.progress import Progress, clear, read_counts, summary
from captioner.worker import Worker
from hf_vit_accel.backends import require

_SLACK_ON_GPU = 4.0  # the GPU resizes fast, so only much larger pictures are reduced on the CPU
_SHOWN_FILES = 20
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Here(Options):
    """Options of the processes of this program, which `captioner/on_ray.py` lacks."""

    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8
    memory: Annotated[float, typer.Option(min=0.1, help="GiB for pictures ahead of the model, per process.")] = 2.0
    processor_on: Annotated[
        Literal["auto", "cpu", "gpu"],
        typer.Option(help="Where pictures are resized and cut into patches; auto: on the GPU, with torchvision."),
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            require("auto" if self.no_patch else self.attention)
        except hf_vit_accel.BackendUnavailableError as error:
            raise typer.BadParameter(str(error), param_hint="--attention") from None


@command(app)
def caption(options: Here) -> None:
    """Caption pictures and videos."""
    Image.MAX_IMAGE_PIXELS = max(options.refuse_above, REFUSE_ABOVE)  # Pillow would refuse larger pictures
    run = _Run(options, _join_processes())
    try:
        with ExitStack() as stack:
            ready = run.caption(stack)
    except KeyboardInterrupt:
        stop("stopped", 130, drop_overwrite=options.overwrite and run.is_loaded, prints=run.is_first)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        reason = f"cannot write to {options.output}: {error.strerror}"
        stop(reason, 1, drop_overwrite=options.overwrite and run.is_loaded, prints=True)
    if not options.dry_run:
        run.finish(ready)


def _join_processes() -> PartialState:
    """Join the other processes of this run."""
    # Without `cpu`, every process on a CPU would take itself for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    # Processes wait for the slowest one to read its headers, which takes long in a folder of millions.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return PartialState(cpu=cpu, **patience.to_kwargs())


class _Run:
    """The run of one process."""

    def __init__(self, options: Here, state: PartialState) -> None:
        self.options = options
        self.state = state
        self.is_first = state.is_main_process
        self.on_cuda = state.device.type == "cuda"
        self.journal = Journal(options.output)
        self.progress_folder = options.output / ".progress"
        self.is_loaded = False
        self.model: PreTrainedModel | None = None

    def caption(self, stack: ExitStack) -> Prepared:
        """Caption the share of this process. The output folder is locked as long as the stack is open."""
        options = self.options
        ready = self._prepare(stack)
        commit = ready.settings.get("revision")
        processor = processor_for(options, commit, self.is_first) if ready.plan.tasks else None
        if ready.plan.tasks and not options.dry_run:
            self.model = self._load_model(ready, commit)
        self.is_loaded = True
        if self.is_first and not options.dry_run:  # the others write only after all headers are read, below
            self._begin(ready)
        tasks = measured(ready.plan.tasks, processor, options.refuse_above, options.decoders, self.state)
        self.state.destroy_process_group()  # from here on no process waits for another
        costs = [cost(task, options.max_new_tokens) for task in tasks]
        shares = spread(costs, self.state.num_processes)
        if options.dry_run:
            if self.is_first:
                self._print_shares(tasks, costs, shares)
            return ready
        share = shares[self.state.process_index]
        total_cost = sum(costs[index] for index in share)
        progress = Progress(
            self.progress_folder, self.state.process_index, self.state.num_processes, len(share), total_cost
        )
        if self.model is not None and processor is not None:
            self._worker(self.model, processor, progress, ready.run).work([tasks[index] for index in share])
        progress.close()
        return ready

    def _prepare(self, stack: ExitStack) -> Prepared:
        """Prepare the run in the first process, and hand it to the others."""
        answer: list[tuple[Prepared | None, str | None]] = [(None, None)]
        if self.is_first:
            if self.options.demo:
                print("the toy of the demo: it knows drawn scenes and nothing else")
            try:
                answer = [(prepare(self.options, self.on_cuda, stack), None)]
            except (OSError, ValueError) as error:
                answer = [(None, str(error))]
        ready, mistake = broadcast_object_list(answer)[0]
        if ready is None:
            raise typer.BadParameter(mistake or "") if self.is_first else typer.Exit(2)
        if not self.is_first and not self.options.dry_run:
            stack.enter_context(lock(self.options.output, alone=False))
        return ready

    def _load_model(self, ready: Prepared, commit: str | None) -> PreTrainedModel:
        options = self.options
        dtype = getattr(torch, options.dtype_on(self.on_cuda))
        try:
            model = load_model(options.named, dtype, self.state.device, commit)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise cannot_load(options, error, self.is_first) from None
        if options.no_patch:
            return model
        try:
            hf_vit_accel.patch(model, **options.patching(model))
        except (ValueError, hf_vit_accel.BackendUnavailableError) as error:
            raise refused(str(error), "--attention", self.is_first) from None
        return model

    def _begin(self, ready: Prepared) -> None:
        """Make the output folder ready and note the run."""
        clear(self.progress_folder)
        if self.model is None:
            status = "nothing to do"
        else:
            status = "stock" if self.options.no_patch else str(hf_vit_accel.status(self.model))
        device = torch.cuda.get_device_name() if self.on_cuda else "cpu"
        entry = manifest_entry(self.options, ready, self.state.num_processes, device, status)
        self.journal.begin(entry, lambda record: ready.plan.revised(ready.run, record))

    def _print_shares(self, tasks: Sequence[Task], costs: Sequence[float], shares: Sequence[Sequence[int]]) -> None:
        total_cost = sum(costs) or 1
        for process, share in enumerate(shares):
            batches = list(pack([tasks[index] for index in share], self.options.batch_tokens, self.options.batch_size))
            tokens = sum(tasks[index].tokens for index in share)
            load = sum(costs[index] for index in share) / total_cost
            print(f"  process {process}: {len(share)} items, {tokens} tokens, {len(batches)} batches, {load:.1%}")

    def _worker(self, model: PreTrainedModel, processor: ProcessorMixin, progress: Progress, run: str) -> Worker:
        options = self.options
        reasons = why_not_on_gpu(processor, self.state.device)
        if self.is_first and reasons and options.processor_on == "gpu":
            print(f"pictures are prepared on the CPU: {'; '.join(reasons)}", flush=True)
        uses_gpu = options.processor_on != "cpu" and not reasons
        captioner = Captioner(model, processor, *options.decoding, patching=options.patching(model))
        captioner.pictures_on = self.state.device if uses_gpu else torch.device("cpu")
        return Worker(
            captioner=captioner,
            journal=self.journal,
            progress=progress,
            process=self.state.process_index,
            run=run,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            refuse_above=options.refuse_above,
            decoders=options.decoders,
            memory=int(options.memory * 2**30),
            slack=_SLACK_ON_GPU if uses_gpu else 1.0,
        )

    def finish(self, ready: Prepared) -> None:
        """Print how the run went. The process that ends last exits with its code."""
        all_counts = read_counts(self.progress_folder, self.state.num_processes)
        is_last = len(all_counts) == self.state.num_processes
        is_last = is_last and all(counts.items == counts.of for counts in all_counts)
        if self.is_first and self.model is not None and not self.options.no_patch:
            print(hf_vit_accel.status(self.model))
        if self.is_first or is_last:
            print(summary(all_counts))
        if is_last:
            exit_by(self.journal.merged(ready.run), ready.plan.expected, self.options.max_failures, ready.clashed)


def processor_for(options: Options, commit: str | None, is_first: bool) -> ProcessorMixin:
    """Load the model's processor and bound its pixels. A mistake in either ends the process."""
    try:
        processor = load_processor(options.named, commit)
    except Exception as error:
        raise cannot_load(options, error, is_first) from None
    try:
        limit_pixels(processor, options.min_pixels, options.max_pixels)
    except ValueError as error:
        raise refused(str(error), "--min-pixels", is_first) from None
    return processor


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="The output folder of `caption`.")],
    result: Annotated[
        Path,
        typer.Argument(
            help="A .jsonl or .parquet file; metadata.jsonl, as imagefolder data sets have it; a webdataset's .tar "
            "(several with %05d in the name); or a folder, for NAME.txt beside every NAME.jpg in it."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Name of a run in the manifest; by default the newest.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Merge this prompt, as `caption` got it. Repeatable; by default those of the last start."),
    ] = None,
    all_prompts: Annotated[bool, typer.Option("--all-prompts", help="Merge all prompts of the run.")] = False,
    extension: Annotated[str, typer.Option(help="Extension of text files.")] = ".txt",
    prefix: Annotated[str, typer.Option(help="Put before captions in texts, as a trigger word.")] = "",
    suffix: Annotated[str, typer.Option(help="Put after captions in texts.")] = "",
    shard_size: Annotated[int, typer.Option(min=1, help="Pictures in a .tar, with %05d in the name.")] = 10_000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that merge did not write, too.")
    ] = False,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Join the shards into one file, sorted by key. Exits with 1 if records are missing or unwritten, or texts old.

    If other prompts or runs have captions of pictures that the newest ones lack, name the one to merge.
    """
    journal = Journal(folder)
    try:
        if prompt and all_prompts:
            raise ValueError("name prompts by --prompt, or merge --all-prompts, not both")
        entry = journal.newest(run)
        selection = journal.select(run, named=prompt, all_prompts=all_prompts)
        if prompt:
            entry = entry | {"prompts": prompt}
        elif selection.by_prompt:
            raise ValueError(partial_prompts(entry, selection))
        if run is None and selection.by_run:
            raise ValueError(partial_run(entry, selection))
        texts = Texts(extension=extension, prefix=prefix, suffix=suffix)
        export = Export(folder, entry, texts=texts, overwrite=overwrite, samples=shard_size)
        try:
            export(selection.records, result)
        except OSError as error:
            reason = error.strerror or error
            say(f"cannot write {result}: {reason}; the former file is still there: remove the cause, and merge again")
            raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if export.written:
        print(f"wrote {export.contents} of run {entry['run']} to {result}")
    elif not any(record.has_text for record in selection.records):
        print(f"nothing was written to {result}: no record has a caption")
    if selection.prompts:
        print(f"{selection.prompts} records of other prompts are here, too: --all-prompts merges them, --prompt one")
    if selection.runs:
        print(f"{selection.runs} records of other runs are here, too: --run NAME, of {folder / 'manifest.json'}")
    _print_unwritten(export, result)
    expected = len(selection.records) + selection.missing
    has_failed = bool(export.refused or export.outdated) or not export.written
    exit_by(selection.records, expected, max_failures, has_failed, journal.can_go_on(entry))


def _print_unwritten(export: Export, result: Path) -> None:
    """Print which pictures are absent and which files were refused."""
    if export.absent:
        folder = result if result.is_dir() else result.parent
        problem = f"{len(export.absent)} pictures are not in {folder}, or changed after `caption`"
        say(f"{problem}, and got no text: {some(export.absent)}")
    if export.outdated:
        reason = "their pictures changed or lost their captions"
        say(f"{len(export.outdated)} texts of an earlier merge are outdated, since {reason}: {some(export.outdated)}")
        say("run `caption` again and merge, or remove these texts")
    for line in export.refused[:_SHOWN_FILES]:
        say(f"not written: {line}")
    if export.refused:
        has_files = any(line.endswith(NOT_OURS) for line in export.refused)
        advice = "; --extension .caption names texts otherwise, --overwrite replaces files" if has_files else ""
        print(f"{len(export.refused)} not written{advice}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _stop)
    end_with_launcher()
    app()
