"""Embed document pages with a ColQwen model whose vision tower hf_vit_accel accelerates, and search them.

    python examples/embed_pages.py pages --output index --model vidore/colqwen2-v1.0-hf
    accelerate launch --num_processes 4 examples/embed_pages.py pages --output index --model vidore/colqwen2-v1.0-hf
    python examples/embed_pages.py --output index --query "How did revenue develop in 2023?"

Every batch becomes a safetensors file, which is never incomplete: embeddings (tokens, dim) by the key of a page. A page
is skipped if it was embedded with the same model and settings, and has the same bytes. Inputs are those of
`batch_caption.py`.

A run is all that was embedded with one model and the same settings. A query searches the run of the pages and options
beside it. Without pages, it searches the only run, or that of `--run`. Pages that are gone or unreadable now are still
found. A page is named by its path below the folder that held all inputs of the run's first call.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import transformers
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import BatchFeature, PreTrainedModel, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

try:
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
except ModuleNotFoundError:
    raise SystemExit("This program needs accelerate: pip install accelerate") from None

sys.path.insert(0, str(Path(__file__).resolve().parent))
from embedding.index import Plan, Settings, choose_run, find_runs, name_of, paths_of_files, plan
from embedding.pages import Batch, Page, Reader
from media.batches import cost, halve_on_oom, measured, pack, spread
from media.checkpoints import config_of, identity
from media.files import fingerprint, lock, part_of, say
from media.launchers import end_with_launcher
from media.pictures import REFUSE_ABOVE
from media.processors import limit_pixels

import hf_vit_accel


def load(
    model: str, revision: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a retriever of transformers and its processor.

    Raises:
        ValueError: if there is no checkpoint, or it holds another kind of model
    """
    disable_progress_bar()
    config = config_of(model, revision)
    name = (config.architectures or ["no architecture"])[0]
    if not name.endswith("ForRetrieval") or not hasattr(transformers, name):
        raise ValueError(f"{model} holds {name}, which is no retriever. Name a checkpoint of ColQwen2ForRetrieval.")
    loaded = getattr(transformers, name).from_pretrained(model, revision=revision, dtype=dtype)
    return loaded.to(device).eval(), transformers.AutoProcessor.from_pretrained(model, revision=revision)


@torch.inference_mode()
def embed(model: PreTrainedModel, inputs: BatchFeature) -> list[torch.Tensor]:
    """Embed a batch; return the embeddings (tokens, dim) of every row without its padding."""
    on_device = {name: value.to(model.device) for name, value in inputs.items()}
    if "pixel_values" in on_device:
        on_device["pixel_values"] = on_device["pixel_values"].to(model.dtype)
    embeddings = model(**on_device).embeddings
    masks = on_device["attention_mask"].bool()
    return [row[mask] for row, mask in zip(embeddings, masks, strict=True)]


def max_sim(query: torch.Tensor, page: torch.Tensor) -> float:
    """Sum the largest similarity of every query token to a page's tokens (ColBERT, Khattab and Zaharia, 2020)."""
    return float((query.float() @ page.float().t()).amax(1).sum())


def search(
    output: Path, name: str | None, queries: Sequence[str], top: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Print the best pages of a run for every query.

    Args:
        output: the folder of the embeddings
        name: the name of the run; None for the only one
        queries: the texts to search for
        top: the number of pages to print for a query
        dtype: the dtype of the model
        device: the device of the model

    Raises:
        ValueError: if there is no such run, no name for one of several, or if the run's model changed since
    """
    runs = find_runs(output)
    name = choose_run(runs, output, name)
    run = runs[name]
    checkpoint = run.metadata["model"]
    revision = run.metadata["revision"] or None
    if fingerprint(identity(checkpoint, revision, output)[0]) != run.metadata["checkpoint"]:
        raise ValueError(
            f"{checkpoint} changed since run {name} embedded its pages. Embed them again, and query these."
        )
    say(f"searching {len(run.pages)} pages (run {name}, model {checkpoint})")
    model, processor = load(checkpoint, revision, dtype, device)
    embedded_queries = embed(model, processor.process_queries(list(queries)))
    scores: dict[str, list[float]] = {}
    for path in run.files:
        with safe_open(path, "pt", device=str(model.device)) as file:
            for key in file.keys():  # noqa: SIM118, it is no dict
                scores[key] = [max_sim(query, file.get_tensor(key)) for query in embedded_queries]
    for index, query in enumerate(queries):
        print(f"{query}")
        for key in sorted(scores, key=lambda key: -scores[key][index])[:top]:
            print(f"  {scores[key][index]:8.3f}  {key}")


def compare(model: PreTrainedModel, inputs: BatchFeature, attention: str) -> None:
    """Print the pages per second of the stock and of the patched tower, and the difference of their embeddings."""
    embeddings = {}
    for name in ("stock", "patched"):
        if name == "patched":
            hf_vit_accel.patch(model, attention=attention)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            embeddings[name] = torch.cat(embed(model, inputs)).float().cpu()  # waits for the GPU
            times.append(time.perf_counter() - start)
        print(f"{name}: {len(inputs['input_ids']) / median(times[1:]):.2f} pages a second")
    error = (embeddings["patched"] - embeddings["stock"]).norm() / embeddings["stock"].norm()
    print(f"relative L2 difference of the embeddings: {float(error):.1e}", flush=True)
    hf_vit_accel.unpatch(model)


def embed_batches(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    batches: Iterable[Batch],
    files: Iterator[Path],
    metadata: dict[str, str],
) -> tuple[int, int]:
    """Embed batches into files. A batch that does not fit into the memory is halved.

    Args:
        model: the retriever
        processor: the model's processor
        batches: the pages that were read
        files: the paths of the files to write
        metadata: the metadata of every file

    Returns:
        The numbers of pages that were embedded and that could not be.
    """
    embedded = 0
    failed = 0
    for batch in batches:

        def run(pages: Sequence[Page], batch: Batch = batch) -> list[torch.Tensor]:
            is_complete = batch.inputs is not None and len(pages) == len(batch.pages)
            return embed(
                model, batch.inputs if is_complete else processor.process_images([page.image for page in pages])
            )

        results = halve_on_oom(run, batch.pages) if batch.pages else []
        tensors = {}
        embedded_pages = {}
        errors = list(batch.errors)
        for page, result in zip(batch.pages, results, strict=True):
            if isinstance(result, torch.Tensor):
                tensors[name_of(page.item)] = result.cpu()
                embedded_pages[name_of(page.item)] = {"checksum": page.checksum, "stamp": page.stamp}
            else:
                errors.append(f"{page.item.key}: {result}")
        for error in errors:
            say(f"not embedded: {error}")
        if tensors:
            with part_of(next(files)) as part:
                save_file(tensors, part, metadata | {"pages": json.dumps(embedded_pages)})
        embedded += len(tensors)
        failed += len(errors)
    return embedded, failed


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run that embeds pages; `main` explains them."""

    inputs: list[str]
    output: Path
    model: str
    revision: str | None
    min_pixels: int | None
    max_pixels: int | None
    batch_tokens: int
    batch_size: int
    attention: str
    no_patch: bool
    beside: bool
    column: str | None
    split: str
    decoders: int


def shared_plan(options: Options, settings: Settings, state: PartialState, stack: ExitStack) -> Plan:
    """Plan the run in the first process, which locks the folder; give the plan to all processes.

    Raises:
        OSError: if the first process could not read the inputs or write to the folder
        ValueError: if the first process found a mistake in the options
    """
    answer: list[Plan | Exception | None] = [None]
    if state.is_main_process:
        try:
            stack.enter_context(lock(options.output, alone=True))
            identified, title = identity(options.model, options.revision, options.output, write=True)
            say(f"model {title}")
            revision = str(identified.get("revision") or "")  # the commit: a branch may move
            metadata = dict(model=options.model, revision=revision, checkpoint=fingerprint(identified))
            settings = identified | settings
            sources = dict(column=options.column, split=options.split)
            answer = [plan(options.inputs, options.output, settings, metadata, **sources)]
        except (OSError, ValueError) as error:
            answer = [error]  # all processes raise it: the others would wait forever
    (planned,) = broadcast_object_list(answer)
    if isinstance(planned, Exception):
        raise planned
    return planned


def embed_pages(options: Options, dtype: torch.dtype, state: PartialState) -> tuple[str, int]:
    """Embed the pages that have no embeddings yet.

    Returns:
        The name of the run, and the number of pages that could not be embedded.
    """
    model, processor = load(options.model, options.revision, dtype, state.device)
    limit_pixels(processor, options.min_pixels, options.max_pixels)
    settings = {"pixels": dict(processor.image_processor.size), "dtype": str(dtype)}
    with ExitStack() as stack, ThreadPoolExecutor(options.decoders) as pool:
        planned = shared_plan(options, settings, state, stack)
        tasks = measured(planned.tasks, processor, REFUSE_ABOVE, options.decoders, state)
        costs = [cost(task, 0) for task in tasks]
        share = [tasks[index] for index in spread(costs, state.num_processes)[state.process_index]]
        batches = list(pack(share, options.batch_tokens, options.batch_size))
        reader = Reader(processor, pool)
        if options.beside and batches:
            compare(model, reader.read(batches[0]).inputs, options.attention)
        elif options.beside and state.is_main_process:
            say("--compare timed nothing: the first process has no page to embed")
        if not options.no_patch:
            hf_vit_accel.patch(model, attention=options.attention)
        files = paths_of_files(options.output, planned.number, state.process_index)
        begin = time.perf_counter()
        embedded, failed = embed_batches(model, processor, reader.ahead(batches), files, planned.metadata)
        of_processes = gather_object([(embedded, failed, time.perf_counter() - begin)])
    pages = sum(embedded for embedded, _, _ in of_processes)
    failures = sum(failed for _, failed, _ in of_processes)
    seconds = max(seconds for _, _, seconds in of_processes)
    if state.is_main_process:
        say(f"{pages} pages embedded, {pages / seconds:.2f} a second; {failures} could not be")
    return planned.metadata["run"], failures


def check(inputs: list[str] | None, queries: list[str] | None, model: str | None, run: str | None) -> None:
    """Raise BadParameter for options of `main` that do not belong together."""
    if not inputs and not queries:
        raise typer.BadParameter("name pages to embed, or a --query")
    if not all(text.strip() for text in queries or []):
        raise typer.BadParameter("it is empty", param_hint="--query")
    if inputs and run is not None:
        raise typer.BadParameter("pages and options name a run themselves", param_hint="--run")
    if not inputs and model is not None:
        raise typer.BadParameter(
            "without pages, a query takes the model of its run: leave it out", param_hint="--model"
        )
    if inputs and model is None:
        raise typer.BadParameter("name one, such as vidore/colqwen2-v1.0-hf", param_hint="--model")


def main(
    inputs: Annotated[list[str] | None, typer.Argument(help="Folders, globs, pictures, .txt, .tar, .parquet.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the embeddings; an earlier run is resumed.")] = Path("index"),
    model: Annotated[str | None, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    query: Annotated[list[str] | None, typer.Option(help="Print the best pages for this text. Repeatable.")] = None,
    run: Annotated[str | None, typer.Option(help="Run to search without pages, where there are several.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many pages to print for a query.")] = 5,
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pages are enlarged to it.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pages are reduced to it.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384,
    batch_size: Annotated[int, typer.Option(min=1, help="Most pages in a batch.")] = 32,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    no_patch: Annotated[bool, typer.Option("--no-patch", help="Run the stock vision tower.")] = False,
    beside: Annotated[bool, typer.Option("--compare", help="Time the first batch stock and patched, too.")] = False,
    column: Annotated[str | None, typer.Option(help="Column of the pictures, in parquet files and datasets.")] = None,
    split: Annotated[str, typer.Option(help="Split of datasets.")] = "train",
    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8,
) -> None:
    """Embed pages, and answer queries with them. Exits with 1 if pages could not be embedded."""
    check(inputs, query, model, run)
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    dtype = torch.bfloat16 if state.device.type == "cuda" else torch.float32
    failures = 0
    try:
        if inputs and model is not None:
            options = Options(
                inputs=inputs,
                output=output,
                model=model,
                revision=revision,
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                batch_tokens=batch_tokens,
                batch_size=batch_size,
                attention=attention,
                no_patch=no_patch,
                beside=beside,
                column=column,
                split=split,
                decoders=decoders,
            )
            run, failures = embed_pages(options, dtype, state)
        if query and state.is_main_process:
            search(output, run, query, top, dtype, state.device)
    except KeyboardInterrupt:
        print("stopped; start the same command to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    except (OSError, ValueError, hf_vit_accel.BackendUnavailableError) as error:
        raise (typer.BadParameter(str(error)) if state.is_main_process else typer.Exit(2)) from None
    finally:
        state.destroy_process_group()
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    end_with_launcher()
    typer.run(main)
