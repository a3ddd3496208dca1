"""Measure images per second of `captioner/main.py` with a full-size model of random weights, stock and patched.

    accelerate launch --num_processes 2 benchmarks/captioning_benchmark.py FOLDER --model qwen3-vl-8b

Every CUDA device needs 20 GB of free memory. The pictures are drawn first. They are JPEGs of noise: 70% below 480
pixels a side, 25% up to 1200, 5% of 1700 x 2200. The tokenizer is a tiny model's, so the captions are empty.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import typer
from accelerate.utils import gather_object
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "examples"), str(ROOT / "tests")]

from captioner import main as batch_caption  # noqa: E402
from captioner.batches import Bounds, Task  # noqa: E402
from captioner.model import Captioner  # noqa: E402
from measuring import DEVICE, Row, document_of, take_turns, write_json  # noqa: E402
from whole_call import build  # noqa: E402

import hf_vit_accel  # noqa: E402
from hf_vit_accel.tools.bench import milliseconds  # noqa: E402

CHECKPOINTS = {
    "qwen2.5-vl-7b": ROOT / "tests" / "tiny_captioner" / "qwen2_5_vl",
    "qwen3-vl-8b": ROOT / "tests" / "tiny_captioner" / "qwen3_vl",
}
"""The models, with the tiny checkpoint whose processor each of them takes."""
PATCH_SIDE = {"qwen2.5-vl-7b": 28, "qwen3-vl-8b": 32}
"""The side of a merged token in pixels."""
LONGEST = 4096
"""Merged tokens of the largest picture; larger ones are reduced to it."""
PROMPT = "describe this picture ."


def draw(folder: Path, index: int) -> None:
    """Draw the picture of an index, which decides its size and content."""
    chance = np.random.default_rng(index)
    kind = chance.random()
    if kind < 0.7:
        width, height = chance.integers(224, 480, 2)
    elif kind < 0.95:
        width, height = chance.integers(512, 1200, 2)
    else:
        width = 1700
        height = 2200
    coarse = chance.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((int(width), int(height))).save(folder / f"{index:05d}.jpg", quality=85)


_load_processor = batch_caption.load_processor
_bounds = Captioner.bounds


def model_of(checkpoint: str) -> str:
    """Return the name of the full-size model that takes a tiny checkpoint's processor."""
    return next(name for name, path in CHECKPOINTS.items() if str(path) == checkpoint)


WAYS = {"stock": ["--no-patch"], "patched": []}
"""Options of the captioner by contender."""
current_options: list[str] = []
"""Of the run that is going on."""


@cache
def load_model(checkpoint: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the full-size model once."""
    token = load_processor(checkpoint).tokenizer.convert_tokens_to_ids
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    model = build(model_of(checkpoint), *(token(f"<|{name}|>") for name in names), device=device).to(dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = token("<|endoftext|>")
    return model


def load_processor(checkpoint: str, revision: str | None = None) -> ProcessorMixin:
    """Load the tiny model's processor, for pictures of the usual sizes."""
    processor = _load_processor(checkpoint)
    largest = LONGEST * PATCH_SIDE[model_of(checkpoint)] ** 2
    processor.image_processor.size = {"shortest_edge": 56**2, "longest_edge": largest}
    return processor


class _KeptBounds(dict[tuple[object, ...], Bounds]):
    """The bounds of batches by model and options: steps that are held would make those of a later run smaller."""

    def of(self, captioner: Captioner, *limits: int | None) -> Bounds:
        """Return the bounds of the first run with these options."""
        key = id(captioner.model), captioner.patching is None, captioner.max_new_tokens, *limits
        if key not in self:
            self[key] = _bounds(captioner, *limits)
        return replace(self[key])


class TimedWorker(batch_caption.Worker):
    """Time the work of this process, from the first header that is read to the last record."""

    last: ClassVar[TimedWorker]
    ms_of_headers: ClassVar[float]
    ms = 0.0

    def work(self, tasks: Sequence[Task]) -> None:
        """Caption all tasks."""
        ms_of_work = milliseconds(partial(super().work, tasks), cuda=DEVICE.type == "cuda")
        self.ms = TimedWorker.ms_of_headers + ms_of_work
        TimedWorker.last = self


_measured = batch_caption.measured


def timed_headers(*arguments: Any) -> list[Task]:
    """Read the headers of all pictures, as the captioner does before its work, and time it."""
    tasks: list[list[Task]] = []
    TimedWorker.ms_of_headers = milliseconds(lambda: tasks.append(_measured(*arguments)), cuda=False)
    return tasks[0]


def fresh_model(
    checkpoint: str, dtype: torch.dtype, device: torch.device, revision: str | None = None
) -> PreTrainedModel:
    """Return the full-size model as the last run left it, or as stock. A patched run patches it again."""
    model = load_model(checkpoint, dtype, device)
    return hf_vit_accel.unpatch(model) if "--no-patch" in current_options else model


def draw_all(folder: Path, pictures: int) -> None:
    """Draw the pictures in several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(draw, folder), range(pictures), chunksize=16))


def run_captioner(arguments: Sequence[str]) -> TimedWorker:
    """Run the captioner's command line in this process; return the worker that did it."""
    batch_caption.app(list(arguments), standalone_mode=False)
    return TimedWorker.last


def prepare_runs() -> None:
    """Let all runs of this process take the full-size model, and time their work."""
    batch_caption.load_model = fresh_model
    batch_caption.load_processor = load_processor
    batch_caption.Worker = TimedWorker
    batch_caption.measured = timed_headers
    kept = _KeptBounds()
    Captioner.bounds = lambda captioner, *limits: kept.of(captioner, *limits)
    # Several runs share this process, so the end of a run must not end the process group.
    batch_caption.PartialState.destroy_process_group = lambda self: None  # type: ignore[method-assign]


def measure_tokens(model: str, folder: Path, pictures: int, tokens: int, rounds: int) -> Row:
    """Time stock and patched in turns; return the row of a number of new tokens.

    Each run comes twice, the first time to warm up: its batches have shapes that came before. Graphs that are captured
    release the memory that torch keeps, so stock's first run after a patched one must get it anew.
    """
    state = batch_caption.PartialState()
    attempts = count(1)
    waiting: dict[str, list[float]] = {way: [] for way in WAYS}

    def run(way: str) -> TimedWorker:
        if state.is_main_process:
            print(f"### {way}, {tokens} new tokens", flush=True)
        arguments = ["caption", str(folder / "pictures"), "--output", str(folder / f"{way}_{tokens}")]
        arguments += ["--model", str(CHECKPOINTS[model]), "--prompt", PROMPT, "--attempt", str(next(attempts))]
        current_options[:] = WAYS[way]
        worker = run_captioner([*arguments, "--max-new-tokens", str(tokens), *WAYS[way]])
        state.wait_for_everyone()
        return worker

    def turn(way: str) -> list[float]:
        run(way)
        worker = run(way)
        of_processes = gather_object([(worker.ms, worker.progress.waited)])
        waiting[way].append(1e3 * statistics.mean(seconds for _, seconds in of_processes) / pictures)
        return [max(elapsed for elapsed, _ in of_processes)]

    times = take_turns(WAYS, turn, rounds)
    rates = {way: [1e3 * pictures / elapsed for elapsed in of_way] for way, of_way in times.items()}
    medians = {way: statistics.median(of_way) for way, of_way in rates.items()}
    ms_waiting = {way: statistics.median(of_way) for way, of_way in waiting.items()}
    return {"model": model, "tokens": tokens, **medians, "all": rates, "ms waiting": ms_waiting}


def measure(model: str, folder: Path, pictures: int, tokens: Sequence[int], rounds: int) -> list[Row]:
    """Caption the same pictures with every number of new tokens; print the summary of every run."""
    prepare_runs()
    state = batch_caption.PartialState()
    folder = folder / model  # another process may measure the other model at the same time
    if state.is_main_process:
        draw_all(folder / "pictures", pictures)
    state.wait_for_everyone()
    drawn = len(list((folder / "pictures").iterdir()))  # an earlier run may have drawn more
    return [measure_tokens(model, folder, drawn, number, rounds) for number in tokens]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for pictures and records.")],
    pictures: Annotated[int, typer.Option(min=1)] = 640,
    model: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CHECKPOINTS),
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens.")] = "1,32,128",
    rounds: Annotated[int, typer.Option(min=1, help="Times that every way runs, in turns.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the rates of stock and patched to this file.")
    ] = None,
) -> None:
    """Measure every model, and write the rows."""
    processes = batch_caption.PartialState().num_processes
    document = document_of([], gpus=processes, images=pictures)
    for name in model.split(","):
        document["rows"] += measure(name, folder, pictures, [int(number) for number in tokens.split(",")], rounds)
        write_json(json_path, document)
        load_model.cache_clear()
        gc.collect()
        torch.cuda.empty_cache()  # the next model plans its batches by the free memory


if __name__ == "__main__":
    typer.run(main)
