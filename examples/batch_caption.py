"""Captions pictures and videos with a Qwen-VL model whose vision tower is accelerated by hf_vit_accel.

    python examples/batch_caption.py caption photos --output captions --model Qwen/Qwen3-VL-8B-Instruct
    accelerate launch --num_processes 4 examples/batch_caption.py caption photos --output captions --model ...
    python examples/batch_caption.py merge captions captions.jsonl    # or .parquet, metadata.jsonl, a webdataset's .tar
    python examples/batch_caption.py merge captions photos            # photos/NAME.txt beside every photos/NAME.jpg

Every process writes one shard of JSON lines into the output folder, as soon as a batch is done. What has a record of
the same model, prompt and settings is not captioned again: after a kill, start the same command once more, with any
number of processes. Processes wait for each other only until all have loaded the model and the work is shared out,
through a common file system.
"""

# ruff: noqa: E402, as Ctrl-C is told from before what takes seconds to import

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn


def _leave(*_: object) -> NoReturn:
    os.write(1, b"\nstopped before anything was begun\n")
    os._exit(130)


_PRESSED: list[float] = []


def _stop(*_: object) -> None:
    """The first Ctrl-C ends the run; others would only end how it ends, unless that takes long."""
    _PRESSED.append(time.monotonic())
    if len(_PRESSED) == 1:
        raise KeyboardInterrupt
    if _PRESSED[-1] - _PRESSED[0] > 2:
        os.write(1, b"\nstopped at once; start the same command, without --overwrite, to go on\n")
        os._exit(130)


if __name__ == "__main__":  # what follows takes seconds to import
    signal.signal(signal.SIGINT, _leave)

import accelerate
import torch
import transformers
import typer
from accelerate import PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, parse_flag_from_env
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
from captioning.captioner import Captioner, load_model, reuse_for, why_not_on_gpu
from captioning.exports import Export, Texts
from captioning.journal import Journal, Record
from captioning.options import MaxFailures, Options, command
from captioning.plan import missing_processes
from captioning.prepare import Prepared, prepare
from captioning.progress import Progress, clear, read_counts, summary
from captioning.worker import Worker
from media.batches import cost, measured, pack, spread
from media.files import CANNOT_WRITE, lock, say, some
from media.pictures import REFUSE_ABOVE
from media.processors import limit_pixels, load_processor

import hf_vit_accel


def entry_of(options: Options, ready: Prepared, processes: int | None, device: str, status: str) -> dict[str, Any]:
    """What the manifest holds of a run. processes: None for as many as there are."""
    modules = (torch, transformers, accelerate, hf_vit_accel)
    return {
        "run": ready.run,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": ready.title,
        "settings": ready.settings,
        "prompts": ready.prompts,
        "inputs": options.inputs,
        "root": ready.root,
        "column": options.column,
        "split": options.split,
        "records": ready.plan.expected,
        "processes": processes,
        "device": device,
        "versions": {module.__name__: module.__version__ for module in modules} | {"python": platform.python_version()},
        "status": status,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Here(Options):
    """What only processes of one's own know."""

    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8
    memory: Annotated[float, typer.Option(min=0.1, help="GiB for pictures ahead of the model, per process.")] = 2.0
    processor_on: Annotated[
        Literal["auto", "cpu", "gpu"],
        typer.Option(help="Where pictures are resized and cut into patches; auto: on the GPU, with torchvision."),
    ] = "auto"


@command(app)
def caption(options: Here) -> None:
    """Caption pictures and videos."""
    named, output = options.named, options.output
    Image.MAX_IMAGE_PIXELS = max(options.refuse_above, REFUSE_ABOVE)  # else Pillow refuses what is allowed here
    # Sharing out the work waits for the slowest: a folder of millions takes its time.
    # Without being told of the CPU, a `PartialState` takes each of several processes on it for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, **InitProcessGroupKwargs(timeout=timedelta(hours=6)).to_kwargs())
    process, processes, first = state.process_index, state.num_processes, state.is_main_process
    on_cuda = state.device.type == "cuda"
    dtype = getattr(torch, options.dtype_on(on_cuda))
    journal = Journal(output)
    loaded = False
    try:
        with ExitStack() as stack:
            answer: list[Any] = [None]
            if first:
                if options.demo:
                    print("the toy of the demo: it knows drawn scenes and nothing else")
                if warning := missing_processes(processes):
                    print(warning)
                try:
                    answer = [(prepare(options.wanted(on_cuda), stack), None)]
                except (OSError, ValueError) as error:
                    answer = [(None, str(error))]
            ready, mistake = broadcast_object_list(answer)[0]
            if mistake is not None:
                raise typer.BadParameter(mistake) if first else typer.Exit(2)
            plan, run, tasks = ready.plan, ready.run, ready.plan.tasks
            if not first and not options.dry_run:
                stack.enter_context(lock(output, alone=False))
            commit = ready.settings.get("revision")
            processor = processor_for(options, commit, first) if tasks else None
            vlm = None
            if tasks and not options.dry_run:
                try:
                    vlm = load_model(named, dtype, state.device, commit)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    raise cannot_load(options, error, first) from None
            if vlm is not None and not options.no_patch:
                try:
                    how = dict(attention=options.attention, cuda_graphs=options.cuda_graphs)
                    hf_vit_accel.patch(vlm, **how, reuse=reuse_for(vlm, ready.prompts))
                except (ValueError, hf_vit_accel.BackendUnavailableError) as error:
                    raise refused(str(error), "--attention", first) from None
            loaded = True
            if first and not options.dry_run:  # nobody writes yet: all wait for each other's share of the headers
                clear(output / ".progress")
                nothing = "nothing to do" if vlm is None else "stock" if options.no_patch else None
                status = nothing or str(hf_vit_accel.status(vlm))
                device = torch.cuda.get_device_name() if on_cuda else "cpu"
                journal.begin(entry_of(options, ready, processes, device, status), partial(plan.revised, run))
            tasks = measured(tasks, processor, options.refuse_above, options.decoders, state)
            state.destroy_process_group()  # from here on nobody waits for anybody
            costs = [cost(task, options.max_new_tokens) for task in tasks]
            shares = spread(costs, processes)
            if options.dry_run:
                for number, share in enumerate(shares if first else []):
                    batches = list(pack([tasks[index] for index in share], options.batch_tokens, options.batch_size))
                    tokens = sum(tasks[index].tokens for index in share)
                    load = sum(costs[index] for index in share) / (sum(costs) or 1)
                    print(
                        f"  process {number}: {len(share)} items, {tokens} tokens, {len(batches)} batches, {load:.1%}"
                    )
                return

            total = sum(costs[index] for index in shares[process])
            progress = Progress(output / ".progress", process, processes, len(shares[process]), total)
            if vlm is not None:
                against = why_not_on_gpu(processor, state.device)
                if first and against and options.processor_on == "gpu":
                    print(f"pictures are prepared on the CPU: {'; '.join(against)}", flush=True)
                on_gpu = options.processor_on != "cpu" and not against
                captioner = Captioner(vlm, processor, *options.decoding)
                captioner.pictures_on = state.device if on_gpu else torch.device("cpu")
                Worker(
                    captioner=captioner,
                    journal=journal,
                    progress=progress,
                    process=process,
                    run=run,
                    batch_tokens=options.batch_tokens,
                    batch_size=options.batch_size,
                    refuse_above=options.refuse_above,
                    decoders=options.decoders,
                    memory=int(options.memory * 2**30),
                    slack=4.0 if on_gpu else 1.0,
                ).work([tasks[index] for index in shares[process]])
            progress.close()
    except KeyboardInterrupt:
        stop("stopped", 130, options.overwrite and loaded, first)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        stop(f"cannot write to {output}: {error.strerror}", 1, options.overwrite and loaded, True)
    all_counts = read_counts(output / ".progress", processes)
    all_ended = len(all_counts) == processes and all(counts.items == counts.of for counts in all_counts)
    if first and vlm is not None and not options.no_patch:
        print(hf_vit_accel.status(vlm))
    if first or all_ended:
        print(summary(all_counts))
    if all_ended:  # so this is the process that ended last
        exit_by(journal.merged(run), plan.expected, options.max_failures, ready.clashed)


def sentence(error: BaseException) -> str:
    """The first line of an error, in which libraries say what is wrong."""
    text = _first_line(str(error)) or type(error).__name__
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def processor_for(options: Options, commit: str | None, first: bool) -> Any:
    """The model's processor, told how large pictures are to be. Ends a process for a mistake in either."""
    try:
        processor = load_processor(options.named, commit)
    except Exception as error:
        raise cannot_load(options, error, first) from None
    try:
        limit_pixels(processor, options.min_pixels, options.max_pixels)
    except ValueError as error:
        raise refused(str(error), "--min-pixels", first) from None
    return processor


def cannot_load(options: Options, error: Exception, first: bool) -> Exception:
    """What ends a process without a model."""
    return refused(f"cannot load {options.named}: {sentence(error)}", "--model", first)


def refused(message: str, option: str, first: bool) -> Exception:
    """What ends a process for a mistake in an option: the first one says which."""
    return typer.BadParameter(message, param_hint=option) if first else typer.Exit(2)


def stop(why: str, code: int, overwriting: bool, speaks: bool) -> NoReturn:
    """Ends a run that is to be started again."""
    if speaks:
        how = "start the same command" + (" without --overwrite" if overwriting else "")
        first = "mend that, and " if code == 1 else ""
        print(f"\n{why}; what is captioned so far is kept: {first}{how} to go on", flush=True)
    raise typer.Exit(code)


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
    run: Annotated[str | None, typer.Option(help="Of the manifest's runs; by default the newest.")] = None,
    all_prompts: Annotated[bool, typer.Option("--all-prompts", help="Not only those of the newest run.")] = False,
    extension: Annotated[str, typer.Option(help="Of text files.")] = ".txt",
    prefix: Annotated[str, typer.Option(help="Put before captions in texts, as a trigger word.")] = "",
    suffix: Annotated[str, typer.Option(help="Put after captions in texts.")] = "",
    shard_size: Annotated[int, typer.Option(min=1, help="Pictures in a .tar, with %05d in the name.")] = 10_000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that merge did not write, too.")
    ] = False,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Join the shards into one file, sorted by key. Exits with 1 if records are missing or not written, too."""
    journal = Journal(folder)
    try:
        entry, chosen = journal.newest(run), journal.select(run, all_prompts=all_prompts)
        texts = Texts(extension=extension, prefix=prefix, suffix=suffix)
        export = Export(folder, entry, texts=texts, overwrite=overwrite, samples=shard_size)
        try:
            export(chosen.records, result)
        except OSError as error:
            reason = error.strerror or error
            say(f"cannot write {result}: {reason}; what was there before is there still: mend that, and merge again")
            raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if chosen.prompts:
        print(f"{chosen.prompts} records of other prompts are here, too: --all-prompts merges them")
    if chosen.runs:
        print(f"{chosen.runs} records of other runs are here, too: --run NAME, of {folder / 'manifest.json'}")
    if export.absent:
        where = result if result.is_dir() else result.parent
        what = f"{len(export.absent)} pictures are not in {where}, or others of their names are"
        say(f"{what}, and got no text: {some(export.absent)}")
    for line in export.refused[:20]:
        say(f"not written: {line}")
    if export.refused:
        print(
            f"{len(export.refused)} not written; --extension .caption names texts otherwise, --overwrite replaces files"
        )
    failed = bool(export.refused) or not export.written
    exit_by(chosen.records, entry["records"], max_failures, failed)


def exit_by(records: Sequence[Record], expected: int, max_failures: float, failed: bool = False) -> None:
    """Says how many records there are, and ends with 1 if some are missing or too many are errors."""
    failures = Counter(_first_line(record.error or "") for record in records if record.status == "error")
    errors = failures.total()
    for error, count in failures.most_common(5):
        say(f"  error, {count} x {error}")
    if len(failures) > 5:
        print(f"  and {len(failures) - 5} other errors")
    print(f"{len(records) - errors} of {len(records)} records have captions")
    if len(records) < expected:
        print(f"{expected - len(records)} records are missing: wait for the run, or start it once more")
    if failed or len(records) < expected or errors > max_failures * len(records):
        raise typer.Exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _stop)
    app()
