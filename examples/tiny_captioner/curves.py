"""Trains the tiny captioners from scratch, stock with several seeds and patched with the first, and compares curves.

    python examples/tiny_captioner/curves.py --json build/curves.json

A patched model is to learn as the stock one does: the distance of its losses from stock's with the same seed, in means
of ten steps, is to stay within what seeds change in stock, and so is what it knows in the end; with several patched
trainings, on average. Exits with 1 if
not, or if a call of the patched tower did not go the fast path. Trainings do not wait for each other: --at-once of
them run in processes of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator

import hf_vit_accel
from hf_vit_accel import machine

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from finetuning.curve import draw

MEAN_OF, SHARES = 10, ("tokens", "exact")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training. losses: means of ten steps. tokens: share of held-out captions' tokens that the model would have
    chosen. exact: share of captions that it writes without a mistake.
    """

    seed: int
    losses: tuple[float, ...]
    tokens: float
    exact: float
    fast: int = 0
    stock: int = 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a family's trainings gave. furthest: the largest distance of patched from stock, over the spread of seeds
    there; up to 1 it is within. problems: what is not as it should be.
    """

    family: str
    stock: tuple[Run, ...]
    patched: tuple[Run, ...]
    furthest: float
    mean_distance: float
    mean_spread: float
    problems: tuple[str, ...]


def run(family: str, seed: int, *, patched: bool, scenes: int, steps: int, **settings: Any) -> Run:
    """Train one model from scratch and look at what it knows of scenes that it never saw."""
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    tokenizer = train.build_tokenizer()
    model = train.build_model(family, tokenizer, seed).to(accelerator.device)
    if patched:
        hf_vit_accel.patch(model)
    losses = train.train(model, family, tokenizer, accelerator, steps=steps, seed=seed, **settings)
    found = [float(loss) for loss in losses]
    (status,) = hf_vit_accel.status(model).towers
    calls = dict(fast=status.calls, stock=status.stock_calls) if patched else {}
    return Run(
        seed=seed,
        losses=tuple(statistics.fmean(found[at : at + MEAN_OF]) for at in range(0, steps, MEAN_OF)),
        tokens=tokens(model, family, tokenizer, scenes),
        exact=train.accuracy(model, family, tokenizer, scenes),
        **calls,
    )


@torch.no_grad()
def tokens(model: Any, family: str, tokenizer: Any, scenes: int) -> float:
    """The share of the held-out captions' tokens that are the likeliest, given those before."""
    device, right, count = next(model.parameters()).device, 0, 0
    model.eval()
    for batch in train.held_out(family, scenes):
        inputs = train.encode(batch, family, tokenizer, device, answer=True)
        labels = inputs.pop("labels")[:, 1:]
        found = model(**inputs, position_ids=train.position_ids(model, inputs)).logits[:, :-1].argmax(-1)
        right += int(((found == labels) & (labels != -100)).sum())
        count += int((labels != -100).sum())
    return right / count


def trainings(
    families: list[str], seeds: int, patched: int, at_once: int, **settings: Any
) -> Iterator[tuple[str, list[Run], list[Run]]]:
    """Each family with its trainings of stock, one a seed, and those patched, with the first of these seeds."""
    ways = [(seed, False) for seed in range(seeds)] + [(seed, True) for seed in range(patched)]
    wanted = [(family, *way) for family in families for way in ways]
    with ExitStack() as stack:
        everywhere: Any = map
        if at_once > 1:
            spawn = multiprocessing.get_context("spawn")
            everywhere = stack.enter_context(ProcessPoolExecutor(at_once, mp_context=spawn)).map
        found = everywhere(partial(_run, **settings), wanted)
        for family in families:
            runs = list(islice(found, len(ways)))
            yield family, runs[:seeds], runs[seeds:]


def _run(wanted: tuple[str, int, bool], **settings: Any) -> Run:
    family, seed, patched = wanted
    return run(family, seed, patched=patched, **settings)


def compare(family: str, stock: list[Run], patched: list[Run]) -> Comparison:
    """Each patched training beside stock of its seed, measured by what seeds change; what they know, on average."""
    pairs = [(ours, next(run for run in stock if run.seed == ours.seed)) for ours in patched]
    distances = [[abs(a - b) for a, b in zip(ours.losses, same.losses, strict=True)] for ours, same in pairs]
    spreads = [max(at) - min(at) for at in zip(*(run.losses for run in stock), strict=True)]
    furthest = max(distance / spread for each in distances for distance, spread in zip(each, spreads, strict=True))
    problems = [] if furthest <= 1 else [f"a loss is {furthest:.2f} times as far from stock's as seeds are apart"]
    for name in SHARES:
        shares = [getattr(run, name) for run in stock]
        apart = abs(statistics.fmean(getattr(ours, name) - getattr(same, name) for ours, same in pairs))
        spread = max(shares) - min(shares)
        if apart > spread:
            problems.append(f"the share of right {name} differs by {apart:.2%}, seeds by {spread:.2%}")
    fast, slow = (sum(getattr(run, name) for run in patched) for name in ("fast", "stock"))
    if slow or not all(run.fast for run in patched):
        problems.append(f"the patched tower ran the stock forward {slow} times, its own {fast} times")
    return Comparison(
        family=family,
        stock=tuple(stock),
        patched=tuple(patched),
        furthest=furthest,
        mean_distance=statistics.fmean(distance for each in distances for distance in each),
        mean_spread=statistics.fmean(spreads),
        problems=tuple(problems),
    )


def report(found: Comparison) -> None:
    """Print what a comparison gave."""
    print(
        f"{found.family}: patched is {found.mean_distance:.2g} from the losses of stock with its seed, on average; "
        f"{len(found.stock)} seeds are {found.mean_spread:.2g} apart; at most {found.furthest:.2g} of that"
    )
    for name in SHARES:
        ours, stock = (", ".join(f"{getattr(run, name):.1%}" for run in runs) for runs in (found.patched, found.stock))
        print(f"  right {name}: patched {ours}; stock {stock}")
    print(*(f"  PROBLEM: {problem}\n" for problem in found.problems), sep="", end="", flush=True)


def plot(found: Comparison, folder: Path) -> None:
    """Draw all losses into FAMILY.svg."""
    runs = {f"stock, seed {run.seed}": run for run in found.stock}
    runs |= {f"patched, seed {run.seed}": run for run in found.patched}
    lines = {name: [((at + 1) * MEAN_OF, loss) for at, loss in enumerate(run.losses)] for name, run in runs.items()}
    draw(folder / f"{found.family}.svg", f"{found.family}: loss over the steps", lines)


def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(train.FAMILIES),
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Trainings of stock.")] = 5,
    patched: Annotated[int, typer.Option(min=1, help="Patched trainings, with the first of these seeds.")] = 1,
    batch: Annotated[int, typer.Option(min=2)] = 192,
    rate: float = 1.5e-3,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes to judge by.")] = 500,
    workers: Annotated[int, typer.Option(min=0, help="Processes that draw scenes, of each training.")] = 12,
    at_once: Annotated[int, typer.Option(min=1, help="Trainings at once, all on one GPU.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw FAMILY.svg into this folder.")] = None,
) -> None:
    """Train, compare, report."""
    settings: dict[str, Any] = dict(steps=steps, batch=batch, rate=rate, scenes=scenes, workers=workers)
    found = []
    for family, stock, ours in trainings(families.split(","), seeds, min(patched, seeds), at_once, **settings):
        found.append(compare(family, stock, ours))
        report(found[-1])
        if plots is not None:
            plot(found[-1], plots)
    if json_path is not None:
        device = machine.cuda_device_name() if torch.cuda.is_available() else "cpu"
        result = {"versions": machine.versions(), "device": device} | settings
        result["families"] = [asdict(each) for each in found]
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if any(each.problems for each in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
