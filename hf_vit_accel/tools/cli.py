"""The command line: `hf-vit-accel doctor` checks what runs here, `hf-vit-accel bench` how fast it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.tools import doctor as examination
from hf_vit_accel.tools.bench import (
    BASELINES,
    SHAPES,
    SIZES,
    Row,
    build_tower,
    check,
    choose,
    lines,
    measure,
    parse_size,
    say,
)

MODELS = "qwen2-vl-7b,qwen2.5-vl-7b,qwen3-vl-8b"
"""Models timed by default on a GPU."""
CPU_MODEL = "qwen3-vl-2b"
CPU_SIZE = "1x4x4"
"""Model and size timed by default on a CPU, small enough to end within a minute."""
ENOUGH_ROUNDS = 5
NOISE = "few rounds on a CPU: the errors count, the times are noise and no sign of a GPU's; take --rounds 5, or a GPU"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

app = typer.Typer(
    help="Fast, exact vision towers for Hugging Face vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
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
    """Say what runs on this machine, and whether it computes right.

    Runs every usable attention backend against a reference. Exits with 1 if a backend computes something wrong or
    crashes, or a GPU that is here cannot be used, else with 0.
    \f
    The keys of the JSON object; every other value is text, null stands for "none":

    - ok: bool, whether no backend is wrong and no GPU unusable.
    - versions: name to version or null.
    - untested: list of sentences about packages that are newer than those tested.
    - gpus: list of {index, name, capability ("9.0"), memory (bytes)}.
    - gpu_problem: why the GPUs cannot be used.
    - devices: device to the dtypes checked there (each backend in those that it takes).
    - backends: list of {name, status, reasons, checks}.
      status: "usable"; "unusable" (reasons say why); "wrong".
      checks: list of {device, dtype, head_dim, packed (q, k, v as views of one projection), grad (whether gradients
      are compared, too), bound, error, problem}.
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
            help=f"Comma-separated: a built-in shape ({', '.join(SHAPES)}), a checkpoint's folder or hub id, or a "
            f"config.json; by default {MODELS}, on a CPU {CPU_MODEL}."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated: names out of {', '.join(SIZES)} (in pixels; ^2 stands for ²), or frames x height "
            "x width in patches such as 1x64x64*16+8x36x64 (*n repeats, + joins); by default all names, on a CPU "
            f"{CPU_SIZE}."
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated attention backends and "auto". "+graph" after a name: captured at the first call; '
            '"+eager": never; "+fp8": in FP8 where that pays. By default "auto" and all backends that can run; on a '
            'CPU "auto".'
        ),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help=f"Comma-separated stock set-ups out of {', '.join(BASELINES)}.")
    ] = "sdpa",
    dtype: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(DTYPES)}; by default bf16 on CUDA, fp32 on CPU.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of timing; by default 5, on a CPU 1.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Load the checkpoint's weights, not random ones.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
) -> None:
    """Verify a tower with every backend, then time it beside stock.

    The reference is an fp32 run of stock transformers. Exits with 1 if a way computes something wrong or a backend
    crashes; it is not timed.
    \f
    The keys of the JSON object; null stands for "none":

    - versions: name to version or null.
    - device, dtype: text.
    - rounds: int.
    - rows: list of objects with these keys.
      model, size, contender: text.
      patches: int.
      status: "timed"; "wrong" (the error is above the bound, or it crashed); "skipped" (it cannot run here).
      problem: why it is wrong or was skipped.
      ms, ms_low, ms_high: median, least and most milliseconds.
      speedup: over the first contender.
      error, bound: the largest relative L2 error of an output, and the largest that passes.
    """
    device = torch.device("cuda" if machine.has_cuda() else "cpu")
    is_cpu = device.type == "cpu"
    dtype = dtype or ("fp32" if is_cpu else "bf16")
    rounds = rounds or (1 if is_cpu else 5)
    models = _split(model or (CPU_MODEL if is_cpu else MODELS))
    attentions = _split(backends) if backends is not None else ["auto"] if is_cpu else None
    try:
        _refuse_unknown("dtype", [dtype], DTYPES)
        _refuse_unknown("baselines", _split(baselines), BASELINES)
        if attentions == [] and not _split(baselines):
            raise ValueError("nothing to time: name a backend or a baseline")
        grids = dict(parse_size(size) for size in _split(sizes or (CPU_SIZE if is_cpu else ",".join(SIZES))))
        for name in models:
            check(name, list(grids.values()), attentions or [], device, DTYPES[dtype])
            if weights and (name in SHAPES or Path(name).is_file()):
                raise ValueError(f"{name!r} has no weights to load: pass a checkpoint's folder or hub id")
        if json_path is not None:
            json_path.open("a").close()
    except (ValueError, OSError) as error:  # the user's mistakes, before anything runs
        raise typer.BadParameter(str(error)) from error
    result = {
        "versions": machine.versions(),
        "device": "cpu" if is_cpu else torch.cuda.get_device_name(),
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "rounds": rounds,
    }
    rows: list[Row] = []
    output = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries may print when they are first used
        for name in models:
            say(f"{name}: building the tower")
            tower = build_tower(name, device, DTYPES[dtype], weights=weights)
            ways = choose(tower, attentions, _split(baselines))
            for size, grid in grids.items():
                rows_of_size = measure(name, tower, size, grid, ways, rounds)
                rows += rows_of_size
                typer.echo("\n".join(lines(rows_of_size)), file=output)
                if is_cpu and rounds < ENOUGH_ROUNDS:
                    typer.echo(f"  {NOISE}", file=output)
                if json_path is not None:  # after every size, so that a stopped run keeps its results
                    json_path.write_text(json.dumps(result | {"rows": rows}, indent=1, allow_nan=False) + "\n")
    if any(row["status"] == "wrong" for row in rows):
        raise typer.Exit(1)


def _refuse_unknown(option: str, names: list[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {option} {', '.join(unknown)}: choose out of {', '.join(known)}")


def _split(names: str) -> list[str]:
    """Split at commas; leave out blanks."""
    return [name.strip() for name in names.split(",") if name.strip()]
