"""Captions pictures and videos with a Qwen-VL model whose vision tower is accelerated by hf_vit_accel.

    python examples/batch_caption.py caption photos --output captions --model Qwen/Qwen3-VL-8B-Instruct
    accelerate launch --num_processes 4 examples/batch_caption.py caption photos --output captions --model ...
    python examples/batch_caption.py merge captions captions.jsonl    # or captions.parquet
    python examples/batch_caption.py merge captions photos            # photos/NAME.txt beside every photos/NAME.jpg

Every process writes one shard of JSON lines into the output folder, as soon as a batch is done. What has a record of
the same model, prompt and settings is not captioned again: after a kill, start the same command once more, with any
number of processes. Processes wait for each other only while the work is shared out, through a common file system.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

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
from captioning.batches import VIDEO_TOKENS, Task, cost, pack, spread, vision_tokens
from captioning.captioner import Captioner, load_processor
from captioning.journal import Journal, Record, export, fingerprint, lock
from captioning.pictures import MAX_PIXELS, upright_size
from captioning.progress import Progress, clear, read_counts, summary
from captioning.sources import Item, find, open_item, size
from captioning.worker import Worker

import hf_vit_accel

TINY = Path(__file__).resolve().parent / "tiny_captioner" / "qwen3_vl"
PROMPT, TINY_PROMPT = "Describe this {kind}.", "describe this {kind} ."


def tokens_of(item: Item, processor: Any, max_pixels: int) -> int:
    """Merged vision tokens, from the header; 0 for what cannot be read."""
    if item.kind == "video":
        return VIDEO_TOKENS
    try:
        with open_item(item) as file:
            return vision_tokens(processor, *upright_size(file, max_pixels))
    except Exception:  # it is decoded later all the same, and its error recorded
        return 0


def pending(
    items: Sequence[Item], prompts: Sequence[str], records: Iterable[Record], *, retry_errors: bool
) -> tuple[list[Task], set[tuple[str, str]]]:
    """What is still to do, and the (key, prompt) of records that hold no more: the file has another size now.

    records: those of the same model and settings.
    """
    sizes = {item.key: size(item) for item in items}
    # The error of a damaged shard stands under the shard's own name, which is no item's once the shard is mended.
    mended = {Path(item.file).name for item in items if item.row or item.length is not None} - sizes.keys()
    done, stale = set(), set()
    for record in records:
        changed = sizes.get(record.key) not in (None, record.bytes) or record.key in mended
        retried = retry_errors and record.status == "error" and record.key in sizes and record.prompt in prompts
        (stale if changed or retried else done).add((record.key, record.prompt))
    done -= stale
    tasks = []
    for item in items:
        missing = tuple(prompt for prompt in prompts if (item.key, prompt) not in done)
        if missing:
            tasks.append(Task(item=item, prompts=missing, tokens=0))
    return tasks, stale


def identity(model: str) -> dict[str, Any]:
    """What tells one model from another: name, and for a folder the sizes and times of weights and settings."""
    path = Path(model)
    if not path.is_dir():
        return {"model": model}
    files = sorted(file for file in path.iterdir() if file.suffix in (".bin", ".jinja", ".json", ".safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {"model": str(path.resolve()), "files": stats}


def measured(tasks: Sequence[Task], processor: Any, max_pixels: int, decoders: int, state: PartialState) -> list[Task]:
    """The tasks with their tokens, from headers that the processes read together."""
    mine = [task.item for task in tasks[state.process_index :: state.num_processes]]
    with ThreadPoolExecutor(decoders) as pool:
        counts = list(pool.map(lambda item: tokens_of(item, processor, max_pixels), mine))
    by_process = gather_object([counts])
    return [
        replace(task, tokens=by_process[index % state.num_processes][index // state.num_processes])
        for index, task in enumerate(tasks)
    ]


def load_model(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model, ready to caption."""
    disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).to(device).eval()


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
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = str(TINY),
    prompt: Annotated[
        list[str] | None, typer.Option(help="May name {name}, {stem}, {folder}, {kind} and metadata. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling; every record has one of its own, made of this.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384,
    batch_size: Annotated[int, typer.Option(min=1, help="Most items in a batch.")] = 64,
    max_pixels: Annotated[int, typer.Option(min=1, help="Larger pictures are refused.")] = MAX_PIXELS,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    cuda_graphs: Annotated[bool, typer.Option(help="Replay the tower from CUDA graphs.")] = False,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="By default bfloat16 on CUDA, else float32."),
    ] = None,
    no_patch: Annotated[bool, typer.Option("--no-patch", help="The stock vision tower, for comparison.")] = False,
    column: Annotated[str | None, typer.Option(help="Of the pictures, in parquet files and datasets.")] = None,
    split: Annotated[str, typer.Option(help="Of datasets.")] = "train",
    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what is in the output folder.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed items again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Caption pictures and videos."""
    Image.MAX_IMAGE_PIXELS = max(max_pixels, MAX_PIXELS)  # else Pillow refuses what is allowed here
    # Sharing out the work waits for the slowest: a folder of millions takes its time.
    # Without being told of the CPU, a `PartialState` takes each of several processes on it for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, **InitProcessGroupKwargs(timeout=timedelta(hours=6)).to_kwargs())
    process, processes, first = state.process_index, state.num_processes, state.is_main_process
    on_cuda = state.device.type == "cuda"
    dtype = dtype or ("bfloat16" if on_cuda else "float32")
    prompts = list(dict.fromkeys(prompt or [TINY_PROMPT if model == str(TINY) else PROMPT]))
    settings = identity(model) | {
        "max_new_tokens": max_new_tokens,
        "sampling": [temperature, top_p, seed] if temperature else None,
        "dtype": dtype,
    }
    run, journal = fingerprint(settings), Journal(output)
    with ExitStack() as stack:
        plan: list[Any] = [None]
        if first:
            try:
                items = find(inputs, column=column, split=split)[:limit]
                share_lock = None if dry_run else stack.enter_context(lock(output, alone=True))
                known = [] if overwrite else [record for record in journal.records() if record.run == run]
                tasks, stale = pending(items, prompts, known, retry_errors=retry_errors)
                print(f"{len(items)} items, {len(tasks)} of them to caption (run {run})", flush=True)
                if share_lock is not None:
                    journal.clear() if overwrite else journal.repair()
                    journal.drop(lambda record: record.run == run and (record.key, record.prompt) in stale)
                    clear(output / "progress")
                    share_lock()
                plan = [(tasks, len(items) * len(prompts), None)]
            except (OSError, ValueError) as error:
                plan = [(None, None, str(error))]
        tasks, expected, mistake = broadcast_object_list(plan)[0]
        if mistake is not None:
            raise typer.BadParameter(mistake) if first else typer.Exit(2)
        if not first and not dry_run:
            stack.enter_context(lock(output, alone=False))
        processor = load_processor(model)
        tasks = measured(tasks, processor, max_pixels, decoders, state)
        state.destroy_process_group()  # from here on nobody waits for anybody
        costs = [cost(task, max_new_tokens) for task in tasks]
        shares = spread(costs, processes)
        if dry_run:
            for number, share in enumerate(shares if first else []):
                batches = list(pack([tasks[index] for index in share], batch_tokens, batch_size))
                tokens = sum(tasks[index].tokens for index in share)
                load = sum(costs[index] for index in share) / (sum(costs) or 1)
                print(f"  process {number}: {len(share)} items, {tokens} tokens, {len(batches)} batches, {load:.1%}")
            return

        vlm = load_model(model, getattr(torch, dtype), state.device)
        if not no_patch:
            try:
                hf_vit_accel.patch(vlm, attention=attention, cuda_graphs=cuda_graphs)
            except (ValueError, hf_vit_accel.BackendUnavailableError) as error:
                raise typer.BadParameter(str(error), param_hint="--attention") from None
        if first:
            modules = (torch, transformers, accelerate, hf_vit_accel)
            versions = {module.__name__: module.__version__ for module in modules}
            entry = {
                "run": run,
                "begun": datetime.now(UTC).isoformat(timespec="seconds"),
                "settings": settings,
                "prompts": prompts,
                "inputs": inputs,
                "records": expected,
                "processes": processes,
                "device": torch.cuda.get_device_name() if on_cuda else "cpu",
                "versions": versions | {"python": platform.python_version()},
                "status": "stock" if no_patch else str(hf_vit_accel.status(vlm)),
            }
            journal.note(entry)
        total = sum(costs[index] for index in shares[process])
        progress = Progress(output / "progress", process, processes, len(shares[process]), total)
        Worker(
            captioner=Captioner(vlm, processor, max_new_tokens, temperature, top_p, seed),
            journal=journal,
            progress=progress,
            process=process,
            run=run,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            max_pixels=max_pixels,
            decoders=decoders,
        ).work([tasks[index] for index in shares[process]])
        progress.close()
        all_counts = read_counts(output / "progress", processes)
        all_ended = len(all_counts) == processes and all(counts.items == counts.of for counts in all_counts)
        if first and not no_patch:
            print(hf_vit_accel.status(vlm))
        if first or all_ended:
            print(summary(all_counts))
        if all_ended:  # so this is the process that ended last
            _exit_by(journal.merged(run), expected, max_failures)


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="The output folder of `caption`.")],
    result: Annotated[
        Path, typer.Argument(help="A .jsonl or .parquet file; or a folder, for NAME.txt beside every NAME.jpg in it.")
    ],
    run: Annotated[str | None, typer.Option(help="Of the manifest's runs; by default the newest.")] = None,
    max_failures: MaxFailures = 0.5,
) -> None:
    """Join the shards into one file, sorted by key and prompt. Exits with 1 if records are missing, too."""
    journal = Journal(folder)
    entries = [entry for entry in journal.manifest()["runs"] if run in (None, entry["run"])]
    if not entries:
        raise typer.BadParameter(f"no run {run or ''} has written to {folder}".replace("  ", " "))
    records = journal.merged(entries[-1]["run"])
    try:
        export(records, result)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    _exit_by(records, entries[-1]["records"], max_failures)


def _exit_by(records: Sequence[Record], expected: int, max_failures: float) -> None:
    failed = sum(record.status == "error" for record in records)
    print(f"{len(records) - failed} of {len(records)} records have captions")
    if len(records) < expected:
        print(f"{expected - len(records)} records are missing: start the same run once more")
    if len(records) < expected or failed > max_failures * len(records):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
