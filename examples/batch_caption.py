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

import errno
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn


def _leave(*_: object) -> NoReturn:
    os.write(1, b"\nstopped before anything was begun\n")
    os._exit(130)


if __name__ == "__main__":  # what follows takes seconds to import
    signal.signal(signal.SIGINT, _leave)

import accelerate
import torch
import transformers
import typer
from accelerate import PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object, parse_flag_from_env
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent))
from captioning.batches import VIDEO_TOKENS, Task, cost, limit_pixels, pack, spread, vision_tokens
from captioning.captioner import Captioner, load_processor, why_not_on_gpu
from captioning.exports import Export, Texts
from captioning.journal import Journal, Record, lock
from captioning.pictures import REFUSE_ABOVE, upright_size
from captioning.plan import missing_processes
from captioning.prepare import Wanted, prepare, say, some
from captioning.progress import Progress, clear, read_counts, summary
from captioning.sources import Item, open_item
from captioning.worker import Worker

import hf_vit_accel

TINY = Path(__file__).resolve().parent / "tiny_captioner" / "qwen3_vl"
PROMPT, TINY_PROMPT = "Describe this {kind}.", "describe this {kind} ."


def header_of(item: Item, processor: Any, refuse_above: int) -> tuple[int, int]:
    """Merged vision tokens and pixels, from the header; 0 for what cannot be read."""
    if item.kind == "video":
        return VIDEO_TOKENS, 0
    try:
        with open_item(item) as file:
            width, height = upright_size(file, refuse_above)
            return vision_tokens(processor, width, height), width * height
    except Exception:  # it is decoded later all the same, and its error recorded
        return 0, 0


def measured(
    tasks: Sequence[Task], processor: Any, refuse_above: int, decoders: int, state: PartialState
) -> list[Task]:
    """The tasks with their sizes, from headers that the processes read together."""
    mine = [task.item for task in tasks[state.process_index :: state.num_processes]]
    with ThreadPoolExecutor(decoders) as pool:
        sizes = list(pool.map(lambda item: header_of(item, processor, refuse_above), mine))
    by_process = gather_object([sizes])
    found = (by_process[index % state.num_processes][index // state.num_processes] for index in range(len(tasks)))
    return [replace(task, tokens=tokens, pixels=pixels) for task, (tokens, pixels) in zip(tasks, found, strict=True)]


def load_model(model: str, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> Any:
    """The model, ready to caption."""
    disable_progress_bar()
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, revision=revision)
    return loaded.to(device).eval()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
MaxFailures = Annotated[float, typer.Option(min=0, max=1, help="Exit with 1 if a larger share of records are errors.")]


@app.command()
def caption(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, globs, pictures, videos, .txt lists of paths, .tar shards, .parquet files, dataset:NAME."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the records; an earlier run into it is resumed.")],
    model: Annotated[str | None, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="A toy model, which knows drawn scenes and nothing else.")
    ] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(help="May name {name}, {stem}, {folder}, {kind} and metadata. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling; every record has one of its own, made of this.")] = 0,
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None,
    refuse_above: Annotated[int, typer.Option(min=1, help="Pictures of more pixels are errors.")] = REFUSE_ABOVE,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384,
    batch_size: Annotated[int, typer.Option(min=1, help="Most items in a batch.")] = 64,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    cuda_graphs: Annotated[bool, typer.Option(help="Replay the tower from CUDA graphs.")] = False,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="By default bfloat16 on CUDA, else float32."),
    ] = None,
    no_patch: Annotated[bool, typer.Option("--no-patch", help="The stock vision tower, for comparison.")] = False,
    column: Annotated[str | None, typer.Option(help="Of the pictures, in parquet files and datasets.")] = None,
    split: Annotated[str, typer.Option(help="Of datasets.")] = "train",
    root: Annotated[
        Path | None, typer.Option(help="Keys are paths below it; by default that of the folder's last run.")
    ] = None,
    skip_with: Annotated[
        str | None, typer.Option(help="Pass over pictures that have a file of this extension beside them, as .txt.")
    ] = None,
    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8,
    memory: Annotated[float, typer.Option(min=0.1, help="GiB for pictures ahead of the model, per process.")] = 2.0,
    processor_on: Annotated[
        Literal["auto", "cpu", "gpu"],
        typer.Option(help="Where pictures are resized and cut into patches; auto: on the GPU, with torchvision."),
    ] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Caption everything anew.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed items again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Caption pictures and videos."""
    if demo == (model is not None):
        raise typer.BadParameter(
            "name a model, such as --model Qwen/Qwen3-VL-8B-Instruct, or --demo for a toy that knows drawn scenes only",
            param_hint="--model",
        )
    named = model or str(TINY)
    Image.MAX_IMAGE_PIXELS = max(refuse_above, REFUSE_ABOVE)  # else Pillow refuses what is allowed here
    # Sharing out the work waits for the slowest: a folder of millions takes its time.
    # Without being told of the CPU, a `PartialState` takes each of several processes on it for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, **InitProcessGroupKwargs(timeout=timedelta(hours=6)).to_kwargs())
    process, processes, first = state.process_index, state.num_processes, state.is_main_process
    on_cuda = state.device.type == "cuda"
    dtype = dtype or ("bfloat16" if on_cuda else "float32")
    prompts = list(dict.fromkeys(prompt or [TINY_PROMPT if demo else PROMPT]))
    settings = {
        "max_new_tokens": max_new_tokens,
        "sampling": [temperature, top_p, seed] if temperature else None,
        "dtype": dtype,
        "pixels": [min_pixels, max_pixels],
    }
    wanted = Wanted(
        inputs=inputs,
        output=output,
        model=named,
        revision=revision,
        settings=settings,
        prompts=prompts,
        column=column,
        split=split,
        root=root,
        skip_with=skip_with,
        limit=limit,
        refuse_above=refuse_above,
        overwrite=overwrite,
        retry_errors=retry_errors,
        dry_run=dry_run,
    )
    journal = Journal(output)
    loaded = False
    try:
        with ExitStack() as stack:
            answer: list[Any] = [None]
            if first:
                if demo:
                    print("the toy of the demo: it knows drawn scenes and nothing else")
                if warning := missing_processes(processes):
                    print(warning)
                try:
                    answer = [(prepare(wanted, stack), None)]
                except (OSError, ValueError) as error:
                    answer = [(None, str(error))]
            ready, mistake = broadcast_object_list(answer)[0]
            if mistake is not None:
                raise typer.BadParameter(mistake) if first else typer.Exit(2)
            plan, run, tasks = ready.plan, ready.run, ready.plan.tasks
            if not first and not dry_run:
                stack.enter_context(lock(output, alone=False))
            commit = ready.settings.get("revision")
            vlm, processor = None, None
            try:
                if tasks:
                    processor = load_processor(named, commit)
                if tasks and not dry_run:
                    vlm = load_model(named, getattr(torch, dtype), state.device, commit)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise _refused(f"cannot load {named}: {_sentence(error)}", "--model", first) from None
            if processor is not None:
                try:
                    limit_pixels(processor, min_pixels, max_pixels)
                except ValueError as error:
                    raise _refused(str(error), "--min-pixels", first) from None
            if vlm is not None and not no_patch:
                try:
                    hf_vit_accel.patch(vlm, attention=attention, cuda_graphs=cuda_graphs)
                except (ValueError, hf_vit_accel.BackendUnavailableError) as error:
                    raise _refused(str(error), "--attention", first) from None
            loaded = True
            if first and not dry_run:  # nobody writes yet: all wait for each other's share of the headers
                journal.repair()
                journal.rewrite(partial(plan.revised, run))
                clear(output / "progress")
                versions = {each.__name__: each.__version__ for each in (torch, transformers, accelerate, hf_vit_accel)}
                status = "stock" if no_patch else str(hf_vit_accel.status(vlm)) if vlm is not None else "nothing to do"
                entry = {
                    "run": run,
                    "begun": datetime.now(UTC).isoformat(timespec="seconds"),
                    "model": ready.title,
                    "settings": ready.settings,
                    "prompts": prompts,
                    "inputs": inputs,
                    "root": ready.root,
                    "column": column,
                    "split": split,
                    "records": plan.expected,
                    "processes": processes,
                    "device": torch.cuda.get_device_name() if on_cuda else "cpu",
                    "versions": versions | {"python": platform.python_version()},
                    "status": status,
                }
                journal.note(entry)
            tasks = measured(tasks, processor, refuse_above, decoders, state)
            state.destroy_process_group()  # from here on nobody waits for anybody
            costs = [cost(task, max_new_tokens) for task in tasks]
            shares = spread(costs, processes)
            if dry_run:
                for number, share in enumerate(shares if first else []):
                    batches = list(pack([tasks[index] for index in share], batch_tokens, batch_size))
                    tokens = sum(tasks[index].tokens for index in share)
                    load = sum(costs[index] for index in share) / (sum(costs) or 1)
                    print(
                        f"  process {number}: {len(share)} items, {tokens} tokens, {len(batches)} batches, {load:.1%}"
                    )
                return

            total = sum(costs[index] for index in shares[process])
            progress = Progress(output / "progress", process, processes, len(shares[process]), total)
            if vlm is not None:
                against = why_not_on_gpu(processor, state.device)
                if first and against and processor_on == "gpu":
                    print(f"pictures are prepared on the CPU: {'; '.join(against)}", flush=True)
                on_gpu = processor_on != "cpu" and not against
                captioner = Captioner(vlm, processor, max_new_tokens, temperature, top_p, seed)
                captioner.pictures_on = state.device if on_gpu else torch.device("cpu")
                Worker(
                    captioner=captioner,
                    journal=journal,
                    progress=progress,
                    process=process,
                    run=run,
                    batch_tokens=batch_tokens,
                    batch_size=batch_size,
                    refuse_above=refuse_above,
                    decoders=decoders,
                    memory=int(memory * 2**30),
                    slack=4.0 if on_gpu else 1.0,
                ).work([tasks[index] for index in shares[process]])
            progress.close()
    except KeyboardInterrupt:
        _stop("stopped", 130, overwrite and loaded, first)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES):
            raise
        _stop(f"cannot write to {output}: {error.strerror}", 1, overwrite and loaded, True)
    all_counts = read_counts(output / "progress", processes)
    all_ended = len(all_counts) == processes and all(counts.items == counts.of for counts in all_counts)
    if first and vlm is not None and not no_patch:
        print(hf_vit_accel.status(vlm))
    if first or all_ended:
        print(summary(all_counts))
    if all_ended:  # so this is the process that ended last
        _exit_by(journal.merged(run), plan.expected, max_failures, ready.clashed)


def _sentence(error: BaseException) -> str:
    """The first line of an error, in which libraries say what is wrong."""
    text = _first_line(str(error)) or type(error).__name__
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _refused(message: str, option: str, first: bool) -> Exception:
    return typer.BadParameter(message, param_hint=option) if first else typer.Exit(2)


def _stop(why: str, code: int, overwriting: bool, speaks: bool) -> NoReturn:
    if speaks:
        how = "start the same command without --overwrite" if overwriting else "start the same command"
        print(f"\n{why}; what is captioned so far is kept: {how} to go on", flush=True)
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
        export(chosen.records, result)
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
    _exit_by(chosen.records, entry["records"], max_failures, failed)


def _exit_by(records: Sequence[Record], expected: int, max_failures: float, failed: bool = False) -> None:
    failures = Counter(_first_line(record.error or "") for record in records if record.status == "error")
    errors = failures.total()
    for error, count in failures.most_common(5):
        say(f"  error, {count} x {error}")
    if len(failures) > 5:
        print(f"  and {len(failures) - 5} other errors")
    print(f"{len(records) - errors} of {len(records)} records have captions")
    if len(records) < expected:
        print(f"{expected - len(records)} records are missing: start the same run once more")
    if failed or len(records) < expected or errors > max_failures * len(records):
        raise typer.Exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app()
