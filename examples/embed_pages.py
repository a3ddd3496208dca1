"""Embeds document pages with a ColQwen model whose vision tower is accelerated by hf_vit_accel, and searches them.

    python examples/embed_pages.py pages --output index --model vidore/colqwen2-v1.0-hf
    accelerate launch --num_processes 4 examples/embed_pages.py pages --output index --model vidore/colqwen2-v1.0-hf
    python examples/embed_pages.py --output index --query "How did revenue develop in 2023?"

Each batch is a safetensors file, written whole or not at all: a page's key to its embeddings, (tokens, dim). A page
that is there, of the same model, settings and file size, is not embedded again. Inputs are those of `batch_caption.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent))
from media.batches import Task, cost, halve_on_oom, measured, pack, spread
from media.checkpoints import identity
from media.files import fingerprint, lock, part_of, say
from media.items import Item, open_item, size
from media.pictures import REFUSE_ABOVE, read_image
from media.processors import limit_pixels, reduced
from media.sources import find

import hf_vit_accel

Page = tuple[Item, Image.Image]


def shards(output: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Every file of embeddings with its metadata, the earliest first; what is no such file is passed over."""
    for path in sorted(output.glob("pages-*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                yield path, file.metadata()
        except Exception as error:  # safetensors has errors of its own
            say(f"passed over: {path}: {error}")


def name_of(item: Item) -> str:
    """Its key as a tensor's name: file names need not be UTF-8."""
    return item.key.encode("utf-8", "backslashreplace").decode()


def load(model: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A retriever of transformers, ready to embed, and its processor; ValueError for another model."""
    disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model, revision=revision)
    name = (config.architectures or ["no architecture"])[0]
    if not name.endswith("ForRetrieval") or not hasattr(transformers, name):
        raise ValueError(f"expected a retriever such as ColQwen2ForRetrieval, {model} holds {name}")
    loaded = getattr(transformers, name).from_pretrained(model, revision=revision, dtype=dtype)
    return loaded.to(device).eval(), transformers.AutoProcessor.from_pretrained(model, revision=revision)


@torch.inference_mode()
def embed(model: Any, inputs: Any) -> list[torch.Tensor]:
    """Embeddings of every row of a batch, (tokens, dim), without its padding."""
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    found = model(**inputs).embeddings
    return [row[mask.bool()] for row, mask in zip(found, inputs["attention_mask"], strict=True)]


def max_sim(query: torch.Tensor, page: torch.Tensor) -> float:
    """The sum over a query's tokens of their largest similarity to a page's (ColBERT, Khattab and Zaharia, 2020)."""
    return float((query.float() @ page.float().t()).amax(1).sum())


def search(output: Path, queries: Sequence[str], top: int, load_for: Callable[[str, str | None], Any]) -> None:
    """Print the best pages of the newest run for every query."""
    found = list(shards(output))
    if not found:
        raise ValueError(f"no pages are embedded in {output}; name pages to embed, and --model")
    newest = found[-1][1]
    model, processor = load_for(newest["model"], newest["revision"] or None)
    asked = embed(model, processor.process_queries(list(queries)))
    scores: dict[str, list[float]] = {}
    for path, metadata in found:
        if metadata["run"] == newest["run"]:
            with safe_open(path, "pt", device=str(model.device)) as file:
                for key in file.keys():  # noqa: SIM118, it is no dict
                    scores[key] = [max_sim(query, file.get_tensor(key)) for query in asked]
    for index, query in enumerate(queries):
        print(f"{query}")
        for key in sorted(scores, key=lambda key: -scores[key][index])[:top]:
            print(f"  {scores[key][index]:8.3f}  {key}")


def compare(model: Any, inputs: Any, attention: str) -> None:
    """Print how many pages a second the model embeds with the stock tower and with the patched one, and the error."""
    found = {}
    for name in ("stock", "patched"):
        if name == "patched":
            hf_vit_accel.patch(model, attention=attention)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            found[name] = torch.cat(embed(model, inputs)).float().cpu()  # waits for the GPU
            times.append(time.perf_counter() - start)
        print(f"{name}: {len(inputs['input_ids']) / median(times[1:]):.2f} pages a second")
    error = (found["patched"] - found["stock"]).norm() / found["stock"].norm()
    print(f"relative L2 difference of the embeddings: {float(error):.1e}", flush=True)
    hf_vit_accel.unpatch(model)


def plan(inputs: list[str], output: Path, settings: dict[str, Any], **choice: Any) -> tuple[list[Task], str, int]:
    """The pages that have no embeddings of this run yet, the run's name, and the number of its next file."""
    run, known, number = fingerprint(settings), {}, 0
    for path, metadata in shards(output):
        known |= json.loads(metadata["bytes"]) if metadata["run"] == run else {}
        number = int(path.stem.split("-")[1]) + 1
    found = find(inputs, **choice)
    pages = [item for item in found.items if item.kind == "image"]
    left = [item for item in pages if name_of(item) not in known or known[name_of(item)] != size(item)]
    others = len(found.items) - len(pages) + sum(map(len, found.passed_over.values()))
    say(f"{len(pages)} pages, {len(left)} of them to embed (run {run}); {others} other files are passed over")
    return [Task(item=item, prompts=(), tokens=0) for item in left], run, number


def ahead(batches: Iterable[Any], prepare: Callable[[Any], Any]) -> Iterator[Any]:
    """What `prepare` makes of each batch, two of them in the making."""
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            waiting.append(pool.submit(prepare, batch))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read(processor: Any, pool: ThreadPoolExecutor, batch: Sequence[Task]) -> tuple[list[Page], Any, list[str]]:
    """A batch's pages, what the model takes of them, and what is wrong with others."""

    def one(task: Task) -> Page | str:
        try:
            with open_item(task.item) as file:
                return task.item, read_image(file, resize=reduced(processor))[0]
        except Exception as error:  # Pillow's decoders raise anything for damaged files
            return f"{task.item.key}: {error}"

    def fits(page: Page) -> Page | str:
        try:
            return processor.process_images([page[1]]) and page
        except Exception as error:  # as for an aspect ratio of more than 200
            return f"{page[0].key}: {error}"

    found = list(pool.map(one, batch))
    pages = [page for page in found if not isinstance(page, str)]
    try:
        inputs = processor.process_images([image for _, image in pages]) if pages else None
    except Exception:  # one that is refused would cost the whole batch: find it
        found = [page if isinstance(page, str) else fits(page) for page in found]
        pages = [page for page in found if not isinstance(page, str)]
        inputs = processor.process_images([image for _, image in pages]) if pages else None
    return pages, inputs, [each for each in found if isinstance(each, str)]


def work(
    model: Any, processor: Any, batches: Iterable[Any], files: Iterator[Path], metadata: dict[str, str]
) -> tuple[int, int]:
    """Embed batches into files; how many pages were, and how many could not be. A batch that is too large is halved."""
    done = failed = 0

    def run(ready: Any, pages: Sequence[Page]) -> list[Any]:
        whole = ready is not None and len(ready["input_ids"]) == len(pages)
        return embed(model, ready if whole else processor.process_images([image for _, image in pages]))

    for pages, inputs, told in batches:
        made = halve_on_oom(partial(run, inputs), pages) if pages else []
        found = [(item, rows) for (item, _), rows in zip(pages, made, strict=True)]
        tensors = {name_of(item): rows.cpu() for item, rows in found if isinstance(rows, torch.Tensor)}
        told += [f"{item.key}: {error}" for item, error in found if isinstance(error, Exception)]
        for line in told:
            say(f"not embedded: {line}")
        if tensors:
            sizes = json.dumps({name_of(item): size(item) for item, _ in found if name_of(item) in tensors})
            with part_of(next(files)) as part:
                save_file(tensors, part, metadata | {"bytes": sizes})
        done, failed = done + len(tensors), failed + len(told)
    return done, failed


def main(
    inputs: Annotated[list[str] | None, typer.Argument(help="Folders, globs, pictures, .txt, .tar, .parquet.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the embeddings; an earlier run is resumed.")] = Path("index"),
    model: Annotated[str | None, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    query: Annotated[list[str] | None, typer.Option(help="Print the best pages for it. Repeatable.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many pages a query is answered with.")] = 5,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pages are reduced to it.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384,
    batch_size: Annotated[int, typer.Option(min=1, help="Most pages in a batch.")] = 32,
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    no_patch: Annotated[bool, typer.Option("--no-patch", help="The stock vision tower.")] = False,
    beside: Annotated[bool, typer.Option("--compare", help="Time the first batch stock and patched, too.")] = False,
    column: Annotated[str | None, typer.Option(help="Of the pictures, in parquet files and datasets.")] = None,
    split: Annotated[str, typer.Option(help="Of datasets.")] = "train",
    decoders: Annotated[int, typer.Option(min=1, help="Threads that decode, per process.")] = 8,
) -> None:
    """Embed pages, and answer queries with them. Exits with 1 if pages could not be embedded."""
    if not inputs and not query:
        raise typer.BadParameter("name pages to embed, or a --query")
    if inputs and model is None:
        raise typer.BadParameter("name one, such as vidore/colqwen2-v1.0-hf", param_hint="--model")
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    first, dtype = state.is_main_process, torch.bfloat16 if state.device.type == "cuda" else torch.float32
    failures = 0
    try:
        if inputs and model is not None:
            loaded, processor = load(model, revision, dtype, state.device)
            limit_pixels(processor, None, max_pixels)
            with ExitStack() as stack, ThreadPoolExecutor(decoders) as pool:
                answer: list[Any] = [None]
                if first:
                    try:
                        stack.enter_context(lock(output, alone=True))
                        settings, title = identity(model, revision, output, write=True)
                        settings |= {"pixels": dict(processor.image_processor.size), "dtype": str(dtype)}
                        say(f"model {title}")
                        answer = [plan(inputs, output, settings, column=column, split=split)]
                    except (OSError, ValueError) as error:
                        answer = [error]
                (found,) = broadcast_object_list(answer)
                if isinstance(found, Exception):
                    raise found
                tasks, run, number = found
                tasks = measured(tasks, processor, REFUSE_ABOVE, decoders, state)
                share = spread([cost(task, 0) for task in tasks], state.num_processes)[state.process_index]
                batches = list(pack([tasks[index] for index in share], batch_tokens, batch_size))
                ready = partial(read, processor, pool)
                if beside and batches:
                    compare(loaded, ready(batches[0])[1], attention)
                if not no_patch:
                    hf_vit_accel.patch(loaded, attention=attention)
                metadata = dict(run=run, model=model, revision=revision or "")
                files = (output / f"pages-{n:08d}-{state.process_index:05d}.safetensors" for n in count(number))
                begin = time.perf_counter()
                done, failed = work(loaded, processor, ahead(batches, ready), files, metadata)
                each = gather_object([(done, failed, time.perf_counter() - begin)])
                pages, failures, seconds = (sum(e[0] for e in each), sum(e[1] for e in each), max(e[2] for e in each))
                if first:
                    say(f"{pages} pages embedded, {pages / seconds:.2f} a second; {failures} could not be")
        if query and first:
            search(output, query, top, partial(load, dtype=dtype, device=state.device))
    except (OSError, ValueError, hf_vit_accel.BackendUnavailableError) as error:
        raise (typer.BadParameter(str(error)) if first else typer.Exit(2)) from None
    finally:
        state.destroy_process_group()
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
