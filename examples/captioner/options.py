"""The options of `caption`, and a decorator that makes a command of a function of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import typer

from captioner.files import Settings

MaxFailures = Annotated[float, typer.Option(min=0, max=1, help="Exit with 1 if a larger share of records are errors.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    inputs: Annotated[
        list[str],
        typer.Argument(help="Folders, pictures, videos, .txt lists of paths, .tar shards, .parquet files."),
    ]
    output: Annotated[Path, typer.Option(help="Folder for the records; an earlier run into it is resumed.")]
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")]
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None
    prompt: Annotated[
        list[str], typer.Option(help="May name {name}, {stem}, {folder}, {key}, {kind} and metadata. Repeatable.")
    ] = ("Describe this {kind}.",)  # type: ignore[assignment]
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy decoding.")] = 0.0
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of sampling; the seed of every record is derived from it.")] = 0
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Most items of a batch: 1024, 256 if sampled, 64 without GPU or patch.")
    ] = None
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="By default bfloat16 on CUDA, else float32."),
    ] = None
    no_patch: Annotated[
        bool, typer.Option("--no-patch", help="Use stock transformers; for a comparison, take another --output.")
    ] = False
    column: Annotated[str | None, typer.Option(help="Column of the pictures in parquet files.")] = None
    root: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder that keys are relative to; else that of the last run."),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Caption the first items only.")] = None
    attempt: Annotated[int, typer.Option(min=1, help="Caption everything anew with a number that is new.")] = 1
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed items again.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what a run would do, and stop.")] = False
    max_failures: MaxFailures = 0.5

    def __post_init__(self) -> None:
        if not all(prompt.strip() for prompt in self.prompt):
            raise typer.BadParameter("the prompt is empty: say what the captions shall tell", param_hint="--prompt")

    @property
    def prompts(self) -> list[str]:
        return list(dict.fromkeys(self.prompt))

    def settings(self, on_cuda: bool) -> Settings:
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": [self.temperature, self.top_p, self.seed] if self.temperature else None,
            "dtype": self.dtype or ("bfloat16" if on_cuda else "float32"),
            "pixels": [self.min_pixels, self.max_pixels],
        }
        return settings if self.attempt == 1 else settings | {"attempt": self.attempt}


def takes_options(run: Callable[[Options], None]) -> Callable[..., None]:
    """Give a function of `Options` a parameter for every option, as typer reads them."""

    @wraps(run)
    def run_with_options(**values: object) -> None:
        run(Options(**values))  # type: ignore[arg-type]

    run_with_options.__annotations__ = get_type_hints(Options, include_extras=True)
    run_with_options.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined]
    return run_with_options
