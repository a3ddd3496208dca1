"""Train the tiny captioners from scratch, stock with several seeds and patched with the first, and compare curves.

    python tests/tiny_captioner/curves.py --json build/curves.json

A patched model should learn as the stock model does. The script compares the losses of patched and stock with the same
seed, as means of ten steps. They may differ by as much as stock's losses differ between seeds. The same holds for the
right tokens and captions at the end, where the mean of all patched trainings counts. The script exits with 1 if a
difference is larger, or if a call of the patched tower ran stock. `--at-once` trainings run in processes of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator

import hf_vit_accel
from hf_vit_accel import machine

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train
from chart import draw
from scene_batches import encode, held_out, position_ids
from tiny_models import FAMILIES, build_model, build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

MEAN_OF = 10
"""The steps of a mean."""
SHARES = ("tokens", "exact")

Settings = dict[str, Any]
"""The settings of all trainings: steps, batch, rate, scenes and workers."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one training.

    Args:
        seed: the seed
        losses: the means of every ten steps
        tokens: the share of held-out captions' tokens that are the model's first choice
        exact: the share of captions that the model writes without a mistake
        fast: the tower's calls on the fast path
        stock: the tower's calls that ran stock
    """

    seed: int
    losses: tuple[float, ...]
    tokens: float
    exact: float
    fast: int = 0
    stock: int = 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of a family's trainings.

    Args:
        family: a name of `tiny_models.FAMILIES`
        stock: the trainings of stock
        patched: the patched trainings
        furthest: the largest difference from stock, divided by the difference between seeds; at most 1 is allowed
        mean_distance: the mean difference of a loss from stock
        mean_spread: the mean difference of a loss between seeds
        problems: the reasons why the comparison fails
    """

    family: str
    stock: tuple[Run, ...]
    patched: tuple[Run, ...]
    furthest: float
    mean_distance: float
    mean_spread: float
    problems: tuple[str, ...]


def run(family: str, seed: int, *, patched: bool, scenes: int, steps: int, **settings: Any) -> Run:
    """Train one model from scratch and evaluate it on held-out scenes.

    Args:
        family: a name of `tiny_models.FAMILIES`
        seed: decides the weights and the scenes
        patched: whether the model is patched
        scenes: the held-out scenes to evaluate with
        steps: the number of steps
        settings: the other arguments of `train.train`
    """
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    tokenizer = build_tokenizer()
    model = build_model(family, tokenizer, seed).to(accelerator.device)
    if patched:
        hf_vit_accel.patch(model)
    trained = train.train(model, family, tokenizer, accelerator, steps=steps, seed=seed, **settings)
    losses = [float(loss) for loss in trained]
    status = hf_vit_accel.status(model).towers[0]
    calls = dict(fast=status.calls, stock=status.stock_calls) if patched else {}
    return Run(
        seed=seed,
        losses=tuple(statistics.fmean(losses[first : first + MEAN_OF]) for first in range(0, steps, MEAN_OF)),
        tokens=tokens(model, family, tokenizer, scenes),
        exact=train.accuracy(model, family, tokenizer, scenes),
        **calls,
    )


@torch.no_grad()
def tokens(model: PreTrainedModel, family: str, tokenizer: PreTrainedTokenizerFast, scenes: int) -> float:
    """Return the share of the held-out captions' tokens that are the likeliest after the tokens before them."""
    device = next(model.parameters()).device
    right = 0
    count = 0
    model.eval()
    for batch in held_out(family, scenes):
        inputs = encode(batch, family, tokenizer, device, answer=True)
        labels = inputs.pop("labels")[:, 1:]
        likeliest = model(**inputs, position_ids=position_ids(model, inputs)).logits[:, :-1].argmax(-1)
        right += int(((likeliest == labels) & (labels != -100)).sum())
        count += int((labels != -100).sum())
    return right / count


@dataclass(frozen=True)
class Training:
    """One training to run."""

    family: str
    seed: int
    patched: bool
    settings: Settings


def trainings(
    families: list[str], seeds: int, patched: int, at_once: int, **settings: Any
) -> Iterator[tuple[str, list[Run], list[Run]]]:
    """Yield every family with its trainings of stock and its patched trainings.

    Args:
        families: names of `tiny_models.FAMILIES`
        seeds: the number of trainings of stock, one a seed
        patched: the number of patched trainings, with the first seeds
        at_once: the number of processes that train at the same time
        settings: the settings of all trainings
    """
    ways = [(seed, False) for seed in range(seeds)] + [(seed, True) for seed in range(patched)]
    requested = [Training(family, seed, is_patched, settings) for family in families for seed, is_patched in ways]
    if at_once > 1:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(at_once, mp_context=spawn) as pool:
            yield from _by_family(families, seeds, len(ways), pool.map(_run, requested))
    else:
        runs = (_run(training) for training in requested)
        yield from _by_family(families, seeds, len(ways), runs)


def _by_family(
    families: list[str], seeds: int, count: int, runs: Iterator[Run]
) -> Iterator[tuple[str, list[Run], list[Run]]]:
    """Group the runs by family as they end; `count` runs belong to a family."""
    for family in families:
        of_family = [next(runs) for _ in range(count)]
        yield family, of_family[:seeds], of_family[seeds:]


def _run(training: Training) -> Run:
    return run(training.family, training.seed, patched=training.patched, **training.settings)


def compare(family: str, stock: list[Run], patched: list[Run]) -> Comparison:
    """Compare every patched training with stock of its seed; differences between seeds are the limit."""
    stock_of_seed = {run.seed: run for run in stock}
    pairs = [(ours, stock_of_seed[ours.seed]) for ours in patched]
    spreads = [max(losses) - min(losses) for losses in zip(*(run.losses for run in stock), strict=True)]
    distances = []
    ratios = []
    for ours, same_seed in pairs:
        of_pair = [abs(loss - other) for loss, other in zip(ours.losses, same_seed.losses, strict=True)]
        distances += of_pair
        ratios += [distance / spread for distance, spread in zip(of_pair, spreads, strict=True)]
    problems = []
    if max(ratios) > 1:
        problems.append(f"a loss is {max(ratios):.2f} times as far from stock's as seeds are apart")
    for name in SHARES:
        differences = [getattr(ours, name) - getattr(same_seed, name) for ours, same_seed in pairs]
        difference = abs(statistics.fmean(differences))
        shares = [getattr(run, name) for run in stock]
        spread = max(shares) - min(shares)
        if difference > spread:
            problems.append(f"the share of right {name} differs by {difference:.2%}, seeds by {spread:.2%}")
    fast_calls = sum(run.fast for run in patched)
    stock_calls = sum(run.stock for run in patched)
    if stock_calls or not all(run.fast for run in patched):
        problems.append(f"the patched tower ran the stock forward {stock_calls} times, its own {fast_calls} times")
    return Comparison(
        family=family,
        stock=tuple(stock),
        patched=tuple(patched),
        furthest=max(ratios),
        mean_distance=statistics.fmean(distances),
        mean_spread=statistics.fmean(spreads),
        problems=tuple(problems),
    )


def report(comparison: Comparison) -> None:
    """Print a comparison."""
    print(
        f"{comparison.family}: patched is {comparison.mean_distance:.2g} from the losses of stock with its seed, on "
        f"average; {len(comparison.stock)} seeds are {comparison.mean_spread:.2g} apart; at most "
        f"{comparison.furthest:.2g} of that"
    )
    for name in SHARES:
        patched = ", ".join(f"{getattr(run, name):.1%}" for run in comparison.patched)
        stock = ", ".join(f"{getattr(run, name):.1%}" for run in comparison.stock)
        print(f"  right {name}: patched {patched}; stock {stock}")
    for problem in comparison.problems:
        print(f"  PROBLEM: {problem}", flush=True)


def plot(comparison: Comparison, folder: Path) -> None:
    """Draw all losses into FAMILY.svg."""
    runs = {f"stock, seed {run.seed}": run for run in comparison.stock}
    runs |= {f"patched, seed {run.seed}": run for run in comparison.patched}
    lines = {}
    for name, run_of_line in runs.items():
        lines[name] = [((index + 1) * MEAN_OF, loss) for index, loss in enumerate(run_of_line.losses)]
    draw(folder / f"{comparison.family}.svg", f"{comparison.family}: loss over the steps", lines)


def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(FAMILIES),
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Trainings of stock.")] = 5,
    patched: Annotated[int, typer.Option(min=1, help="Patched trainings, with the first of these seeds.")] = 1,
    batch: Annotated[int, typer.Option(min=2)] = 192,
    rate: float = 1.5e-3,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes to evaluate with.")] = 500,
    workers: Annotated[int, typer.Option(min=0, help="Processes of a training that draw scenes.")] = 12,
    at_once: Annotated[int, typer.Option(min=1, help="Trainings at once, all on one GPU.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw FAMILY.svg into this folder.")] = None,
) -> None:
    """Train all models, compare them, and print and write the comparisons. Exits with 1 if one fails."""
    settings: Settings = dict(steps=steps, batch=batch, rate=rate, scenes=scenes, workers=workers)
    comparisons = []
    for family, stock, ours in trainings(families.split(","), seeds, min(patched, seeds), at_once, **settings):
        comparison = compare(family, stock, ours)
        comparisons.append(comparison)
        report(comparison)
        if plots is not None:
            plot(comparison, plots)
    if json_path is not None:
        device = machine.cuda_device_name() if torch.cuda.is_available() else "cpu"
        result = {"versions": machine.versions(), "device": device} | settings
        result["families"] = [asdict(comparison) for comparison in comparisons]
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if any(comparison.problems for comparison in comparisons):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
