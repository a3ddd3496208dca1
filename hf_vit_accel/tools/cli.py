"""The command line: `hf-vit-accel doctor` says what runs here and if it is right, `hf-vit-accel bench` how fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_vit_accel
from hf_vit_accel.tools import bench as benchmark
from hf_vit_accel.tools import doctor as examination

MODELS, CPU_MODEL, CPU_SIZE = "qwen2-vl-7b,qwen2.5-vl-7b,qwen3-vl-8b", "qwen3-vl-2b", "1x8x8"
"""What is timed by default; on a CPU little enough to end within a few minutes."""
TRAIN_SIZES, TRAIN_BASELINES = "one 448²,one 1024²,16 x 512²,one page", "sdpa,flash_attention_2,liger,compile_blocks"
"""The same of trainings."""

app = typer.Typer(
    help="Fast, exact vision towers for Hugging Face vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-vit-accel {hf_vit_accel.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fast, exact vision towers for Hugging Face vision-language models."""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what runs on this machine, and run every usable attention backend against a reference.

    Exits with 1 if a backend computes something wrong or crashes, or a GPU that is here cannot be used, else with 0.
    \f
    The keys of the JSON object; everything else is text, null stands for "none":

    - ok: bool, whether no backend is wrong and no GPU unusable.
    - versions: name to version or null.
    - gpus: list of {index, name, capability ("9.0"), memory (bytes)}. gpu_problem: why they could not be asked.
    - devices: device to the dtypes checked there (each backend in those that it takes).
    - backends: in order of preference, list of {name, status, reasons, checks}.
      status: "usable"; "unusable" (reasons say why); "wrong"; "unchecked" (nothing against it but nothing was run).
      checks: list of {device, dtype, head_dim, packed (q, k, v as views of one projection), bound, error, problem}.
    - auto: {device, dtype, head_dim, layers ({"full": name, "window": name}), problem}.
    """
    with redirect_stdout(sys.stderr):  # libraries may print when they are first used
        report = examination.examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2, allow_nan=False))
    else:
        for line in examination.lines(report):
            typer.echo(line)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: a built-in shape ("
            + ", ".join(benchmark.SHAPES)
            + f"), a checkpoint's folder or hub id, or a config.json; by default {MODELS}, on a CPU {CPU_MODEL}."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated: names out of {', '.join(benchmark.SIZES)} (in pixels; ^2 will do for ²), or frames "
            "x height x width in patches such as 1x64x64*16+8x36x64 (*n repeats, + joins); by default all names, on a "
            f"CPU {CPU_SIZE}, with --train {TRAIN_SIZES}."
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated attention backends and "auto", each with "+fp8" after it in FP8 where that pays, and '
            'with "+graph" at the end replayed from a CUDA graph; by default "auto", "auto+graph" and every backend '
            'that can run; with --train "auto".'
        ),
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated stock set-ups out of {', '.join(benchmark.BASELINES)}; by default sdpa, with "
            f"--train {TRAIN_BASELINES}."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Forward and backward, every parameter trained, all gradients verified.")
    ] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With --train: with gradient checkpointing, stock and patched.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(benchmark.DTYPES)}; by default bf16 on CUDA, fp32 on CPU.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved rounds of four timed forwards; by default 5, on a CPU 1.")
    ] = None,
    peak: Annotated[
        float | None,
        typer.Option(min=0.001, help="TFLOP/s that the floor assumes; by default this GPU's, measured; none on a CPU."),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Load the checkpoint's weights, not random ones.")] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Break one forward of the first backend down into parts, per model and size."),
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the times into this PNG (needs matplotlib).")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Say what got slower since this file was written by --json.")
    ] = None,
) -> None:
    """Verify a vision tower with every backend against an fp32 run of stock transformers, then time it beside stock.

    Exits with 1 if a contender computes something wrong or a backend crashes; it is not timed.
    \f
    The keys of the JSON object; null stands for "none":

    - versions: name to version or null. device, dtype: text. train, checkpointing: bool. rounds: int. peak_tflops: what
      floor_ms assumes, or null. machine: {cpu, cores, driver, clock, largest_clock (MHz), power (W)}, as far as they
      are known.
    - rows: list of {model, size, patches, contender, status, floor_ms, bound, ms, ms_low, ms_high, ratio (ms over
      floor_ms), speedup (over the first contender), error, worst, error_ratio, error_ratio_mean, peak_gb, problem,
      parts}. worst: the output or gradient whose error comes nearest to its bound; error and bound are its.
      error_ratio: the largest error over stock's own in the dtype. peak_gb: beyond the weights, with --train on CUDA.
      status: "timed"; "wrong" (the error is above the bound, or it crashed); "skipped" (it cannot run here).
      parts: list of {part, us, share (0 to 1), kernels, per_layer}, for the row that was profiled.
    """
    with _usage_errors():
        if plot_path is not None:
            benchmark.require_matplotlib()
        for path in (json_path, plot_path):
            _check_writable(path)
        if dtype is not None and dtype not in benchmark.DTYPES:
            raise ValueError(f"expected a dtype out of {', '.join(benchmark.DTYPES)}, got {dtype}")
        device = benchmark.device_of_choice()
        on_cpu = device.type == "cpu"
        chosen = benchmark.DTYPES[dtype] if dtype else benchmark.default_dtype(device)
        if checkpointing and not train:
            raise ValueError("expected --train with --checkpointing: without gradients nothing is computed again")
        kind = {"dtype": str(chosen).removeprefix("torch."), "train": train, "checkpointing": checkpointing}
        before = None if compare is None else _read_result(compare, **kind)
        if train or (on_cpu and model is None):  # several backends are as many copies of the tower
            backends = backends or ("auto,auto+graph" if train and not on_cpu else "auto")
        sizes = sizes or (CPU_SIZE if on_cpu else TRAIN_SIZES if train else ",".join(benchmark.SIZES))
        baselines = (TRAIN_BASELINES if train else "sdpa") if baselines is None else baselines
        rounds = rounds or (1 if on_cpu else 5)
        peak = peak or benchmark.peak_of(device, chosen)
        blocks = benchmark.bench(
            _listed(model or (CPU_MODEL if on_cpu else MODELS)),
            dict(benchmark.parse_size(size) for size in _listed(sizes)),
            attentions=None if backends is None else _listed(backends),
            baselines=_listed(baselines),
            dtype=chosen,
            rounds=rounds,
            peak=peak,
            weights=weights,
            with_profile=profile,
            train=train,
            checkpointing=checkpointing,
            say=lambda line: typer.echo(f"... {line}", err=True),
        )
    times = ", three times," if train else ""
    floor = f"floor: all matrix FLOPs{times} at {peak:.4g} TFLOP/s" if peak else "no floor on a CPU"
    typer.echo(f"{str(chosen).removeprefix('torch.')}; {floor}")
    rows: list[benchmark.Row] = []
    output = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries may print when they are first used
        for block in blocks:
            known_model = bool(rows) and rows[-1].model == block[0].model
            rows += block
            for line in benchmark.lines(block, train=train, skipped=not known_model):
                typer.echo(line, file=output)
            result = benchmark.document(
                rows, dtype=chosen, rounds=rounds, peak=peak, train=train, checkpointing=checkpointing
            )
            if json_path is not None:  # after every block: a run that is stopped leaves what it found
                json_path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if before is not None and rows:
        for line in benchmark.slower(result, before):
            typer.echo(line)
    if plot_path is not None and any(row.ms is not None for row in rows):
        benchmark.plot(result, plot_path)
    if any(row.status == "wrong" for row in rows):
        raise typer.Exit(1)


def _check_writable(path: Path | None) -> None:
    """Raise ValueError for a file that could not be written when all is done."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")


def _read_result(path: Path, **same: Any) -> dict[str, Any]:
    """What `bench --json` wrote of the same kind of work. Raises ValueError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if all({"model", "size", "contender", "ms", "ms_high"} <= row.keys() for row in found["rows"]):
            told = {key: found.get(key, False) for key in same}
            if other := [f"{key} {told[key]}, not {value}" for key, value in same.items() if told[key] != value]:
                raise ValueError(f"it is of {' and '.join(other)}")
            return dict(found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"expected a file that bench --json wrote, got {path}: {error}") from error
    raise ValueError(f"expected a file that bench --json wrote, got {path}: its rows are of something else")


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """The user's mistakes as typer reports them."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
