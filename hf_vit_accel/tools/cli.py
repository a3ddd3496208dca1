"""The command line: `hf-vit-accel doctor` checks what runs here, `hf-vit-accel bench` how fast it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_vit_accel
from hf_vit_accel.layout import Grid
from hf_vit_accel.tools import bench as benchmark
from hf_vit_accel.tools import doctor as examination

MODELS = "qwen2-vl-7b,qwen2.5-vl-7b,qwen3-vl-8b"
"""Models timed by default on a GPU."""
CPU_MODEL = "qwen3-vl-2b"
CPU_SIZE = "1x4x4"
"""Model and size timed by default on a CPU, small enough to end within a minute."""
NOISE = "few rounds on a CPU: the errors count, the times are noise and no sign of a GPU's; take --rounds 5, or a GPU"
"""The warning beside times that nobody should quote."""
_ENOUGH_ROUNDS = 5
"""Rounds on a CPU from which on times are no noise."""
TRAIN_SIZES = "one 448²,one 1024²,16 x 512²,one page"
TRAIN_BASELINES = "sdpa,flash_attention_2,liger,compile_blocks"
"""Sizes and baselines timed by default with --train."""

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
      status: "usable"; "unusable" (reasons say why); "wrong"; "unchecked" (it may run, but was not run).
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


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: a built-in shape ("
        + ", ".join(benchmark.SHAPES)
        + f"), a checkpoint's folder or hub id, or a config.json; by default {MODELS}, on a CPU {CPU_MODEL}."
    ),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated: names out of {', '.join(benchmark.SIZES)} (in pixels; ^2 stands for ²), or frames x "
        "height x width in patches such as 1x64x64*16+8x36x64 (*n repeats, + joins); by default all names, with "
        f"--train {TRAIN_SIZES}; on a CPU {CPU_SIZE}, with --train, too."
    ),
]
BackendsOption = Annotated[
    str | None,
    typer.Option(
        help='Comma-separated attention backends and "auto". "+fp8" after a name: in FP8 where that pays. At the '
        'end of a name "+graph": captured at the first call; "+eager": never. By default "auto" and all backends that '
        'can run; with --train and on a CPU "auto".'
    ),
]
BaselinesOption = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated stock set-ups out of {', '.join(benchmark.BASELINES)}; by default sdpa, with --train "
        f"{TRAIN_BASELINES}."
    ),
]
TrainOption = Annotated[
    bool, typer.Option("--train", help="Forward and backward, every parameter trained, all gradients verified.")
]
CheckpointingOption = Annotated[
    bool, typer.Option("--checkpointing", help="With --train: with gradient checkpointing, stock and patched.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(benchmark.DTYPES)}; by default bf16 on CUDA, fp32 on CPU.")
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Interleaved rounds of at least four timed forwards; by default 5. On a CPU 1, of two forwards."
    ),
]
PeakOption = Annotated[
    float | None,
    typer.Option(min=0.001, help="TFLOP/s that the floor assumes; by default this GPU's, measured; none on a CPU."),
]
WeightsOption = Annotated[bool, typer.Option("--weights", help="Load the checkpoint's weights instead of random ones.")]
ProfileOption = Annotated[
    bool,
    typer.Option("--profile", help="Break one forward of the first backend down into parts, per model and size."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the times into this PNG (needs matplotlib).")]
CompareOption = Annotated[Path | None, typer.Option(help="Say what got slower since this file was written by --json.")]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The choices of one `bench`, defaults filled in. attentions: None for all that run here."""

    models: list[str]
    sizes: dict[str, Grid]
    attentions: list[str] | None
    baselines: list[str]
    dtype: torch.dtype
    rounds: int
    peak: float | None
    train: bool
    checkpointing: bool

    @property
    def dtype_name(self) -> str:
        """The dtype as documents name it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def times_are_noise(self) -> bool:
        """Whether nobody should quote the times."""
        return self.rounds < _ENOUGH_ROUNDS and benchmark.device_of_choice().type == "cpu"

    def measure(self, *, weights: bool, with_profile: bool) -> Iterator[list[benchmark.Row]]:
        """Check all choices, and return the rows of one model and size at a time. Raises ValueError."""
        return benchmark.bench(
            self.models,
            self.sizes,
            attentions=self.attentions,
            baselines=self.baselines,
            dtype=self.dtype,
            rounds=self.rounds,
            peak=self.peak,
            weights=weights,
            with_profile=with_profile,
            train=self.train,
            checkpointing=self.checkpointing,
            say=lambda line: typer.echo(f"... {line}", err=True),
        )

    def document(self, rows: list[benchmark.Row]) -> dict[str, Any]:
        """Return the rows and all choices as plain values."""
        return benchmark.document(
            rows,
            dtype=self.dtype,
            rounds=self.rounds,
            peak=self.peak,
            train=self.train,
            checkpointing=self.checkpointing,
        )


@app.command()
def bench(
    model: ModelOption = None,
    sizes: SizesOption = None,
    backends: BackendsOption = None,
    baselines: BaselinesOption = None,
    train: TrainOption = False,
    checkpointing: CheckpointingOption = False,
    dtype: DtypeOption = None,
    rounds: RoundsOption = None,
    peak: PeakOption = None,
    weights: WeightsOption = False,
    profile: ProfileOption = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
    compare: CompareOption = None,
) -> None:
    """Verify a tower with every backend, then time it beside stock.

    The reference is an fp32 run of stock transformers. Exits with 1 if a contender computes something wrong or a
    backend crashes; it is not timed.
    \f
    The keys of the JSON object; null stands for "none":

    - versions: name to version or null.
    - device, dtype: text.
    - train, checkpointing: bool.
    - rounds: int.
    - peak_tflops: the speed that floor_ms assumes, or null.
    - machine: {cpu, cores, driver, clock, largest_clock (MHz), power (W)}, as far as they are known.
    - rows: list of objects with these keys.
      model, size, contender: text.
      patches: int.
      status: "timed"; "wrong" (the error is above the bound, or it crashed); "skipped" (it cannot run here).
      problem: why it is wrong or was skipped.
      ms, ms_low, ms_high: median, least and most milliseconds.
      floor_ms: milliseconds of the matrix FLOPs at peak speed.
      ratio: ms over floor_ms.
      speedup: over the first contender.
      worst: the output or gradient whose error comes nearest to its bound.
      error, bound: the relative L2 error of worst, and the largest that passes.
      error_ratio, error_ratio_mean: the largest and the mean error over stock's own in the dtype.
      peak_gb: memory beyond the weights, with --train on CUDA.
      parts: list of {part, us, share (0 to 1), kernels, per_layer}, for the row that was profiled.
    """
    with _usage_errors():
        _check_outputs(json_path, plot_path)
        job = _job(
            model, sizes, backends, baselines, dtype, rounds=rounds, peak=peak, train=train, checkpointing=checkpointing
        )
        earlier = None if compare is None else _read_result(compare, job)
        blocks = job.measure(weights=weights, with_profile=profile)
    rows = _print_blocks(blocks, job, json_path)
    if earlier is not None and job.times_are_noise:
        typer.echo(f"not compared with {compare}: {NOISE}")
    elif earlier is not None and rows:
        for line in benchmark.slower(job.document(rows), earlier):
            typer.echo(line)
    if plot_path is not None and any(row.ms is not None for row in rows):
        benchmark.plot(job.document(rows), plot_path)
    if any(row.status == "wrong" for row in rows):
        raise typer.Exit(1)


def _job(
    model: str | None,
    sizes: str | None,
    backends: str | None,
    baselines: str | None,
    dtype: str | None,
    *,
    rounds: int | None,
    peak: float | None,
    train: bool,
    checkpointing: bool,
) -> _Job:
    """Fill in the defaults of this machine. Raises ValueError for options that do not exist or do not fit."""
    if dtype is not None and dtype not in benchmark.DTYPES:
        raise ValueError(f"unknown dtype {dtype}: choose one of {', '.join(benchmark.DTYPES)}")
    if checkpointing and not train:
        raise ValueError("--checkpointing needs --train: without gradients nothing is computed again")
    device = benchmark.device_of_choice()
    on_cpu = device.type == "cpu"
    torch_dtype = benchmark.default_dtype(device) if dtype is None else benchmark.DTYPES[dtype]
    if backends is None and (train or on_cpu):
        backends = "auto"
    if not sizes:
        default_sizes = TRAIN_SIZES if train else ",".join(benchmark.SIZES)
        sizes = CPU_SIZE if on_cpu else default_sizes
    if baselines is None:
        baselines = TRAIN_BASELINES if train else "sdpa"
    return _Job(
        models=_split(model or (CPU_MODEL if on_cpu else MODELS)),
        sizes=dict(benchmark.parse_size(size) for size in _split(sizes)),
        attentions=None if backends is None else _split(backends),
        baselines=_split(baselines),
        dtype=torch_dtype,
        rounds=rounds or (1 if on_cpu else 5),
        peak=peak or benchmark.peak_of(device, torch_dtype),
        train=train,
        checkpointing=checkpointing,
    )


def _print_blocks(blocks: Iterator[list[benchmark.Row]], job: _Job, json_path: Path | None) -> list[benchmark.Row]:
    """Print every block of rows as it is measured, and save all rows so far; return them."""
    times = ", three times," if job.train else ""
    floor = f"floor: all matrix FLOPs{times} at {job.peak:.4g} TFLOP/s" if job.peak else "no floor on a CPU"
    typer.echo(f"{job.dtype_name}; {floor}")
    rows: list[benchmark.Row] = []
    output = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries may print when they are first used
        for block in blocks:
            is_known_model = bool(rows) and rows[-1].model == block[0].model
            rows += block
            for line in benchmark.lines(block, train=job.train, skipped=not is_known_model):
                typer.echo(line, file=output)
            if job.times_are_noise:
                typer.echo(f"  {NOISE}", file=output)
            if json_path is not None:  # after every block, so that a stopped run keeps its results
                json_path.write_text(json.dumps(job.document(rows), indent=1, allow_nan=False) + "\n")
    return rows


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ValueError or ImportError for files that could not be written once all is measured."""
    if plot_path is not None:
        benchmark.require_matplotlib()
    for path in (json_path, plot_path):
        _check_writable(path)


def _check_writable(path: Path | None) -> None:
    """Raise ValueError for a file that cannot be written."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")


def _read_result(path: Path, job: _Job) -> dict[str, Any]:
    """Read a file that `bench --json` wrote for the same kind of work. Raises ValueError for any other."""
    kind: dict[str, str | bool] = {"dtype": job.dtype_name, "train": job.train, "checkpointing": job.checkpointing}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        _check_result(result, kind)
        return dict(result)
    except OSError as error:
        raise ValueError(f"cannot compare with {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot compare with {path}, which is not what bench --json wrote here: {error}") from error


def _check_result(result: Mapping[str, Any], kind: Mapping[str, str | bool]) -> None:
    """Raise ValueError for a document of another kind, and other errors for what is no document."""
    for row in result["rows"]:
        if not {"model", "size", "contender", "ms", "ms_high"} <= row.keys():
            raise ValueError("its rows hold something else")
    differences = []
    for key, value in kind.items():
        stored = result.get(key, False)
        if stored != value:
            differences.append(f"{key} {stored}, not {value}")
    if differences:
        raise ValueError(f"it holds {' and '.join(differences)}")


def _split(names: str) -> list[str]:
    """Split at commas; leave out blanks."""
    return [name.strip() for name in names.split(",") if name.strip()]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report the user's mistakes as typer does."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
