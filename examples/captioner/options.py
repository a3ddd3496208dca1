"""The options that both captioners share, and a decorator that makes a command of a dataclass of options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from transformers import PreTrainedModel

from captioner.files import Settings, fingerprint
from captioner.model import reuse_for
from captioner.pictures import REFUSE_ABOVE
from hf_vit_accel.backends import backend_named

_TINY = Path(__file__).resolve().parents[2] / "tests" / "tiny_captioner" / "qwen3_vl"
_PROMPT = "Describe this {kind}."
_TINY_PROMPT = "describe this {kind} ."

MaxFailures = Annotated[float, typer.Option(min=0, max=1, help="Exit with 1 if a larger share of records are errors.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of both captioners. The records of a run are equal, whichever program makes them."""

    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, globs, pictures, videos, .txt lists of paths, .tar shards, .parquet files, dataset:NAME."
        ),
    ]
    output: Annotated[Path, typer.Option(help="Folder for the records; an earlier run into it is resumed.")]
    model: Annotated[str | None, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None
    demo: Annotated[bool, typer.Option("--demo", help="Use a toy model, which knows drawn scenes only.")] = False
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="May name {name}, {stem}, {folder}, {key}, {kind} and metadata. Repeatable."),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy decoding.")] = 0.0
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of sampling; the seed of every record is derived from it.")] = 0
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None
    refuse_above: Annotated[int, typer.Option(min=1, help="Pictures of more pixels are errors.")] = REFUSE_ABOVE
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384
    batch_size: Annotated[int, typer.Option(min=1, help="Most items in a batch.")] = 64
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto"
    no_decode_graphs: Annotated[
        bool, typer.Option("--no-decode-graphs", help="Generate tokens by stock's method; also with --no-patch.")
    ] = False
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="By default bfloat16 on CUDA, else float32."),
    ] = None
    no_patch: Annotated[
        bool, typer.Option("--no-patch", help="Use stock transformers; for a comparison, take another --output.")
    ] = False
    column: Annotated[str | None, typer.Option(help="Column of the pictures in parquet files and data sets.")] = None
    split: Annotated[str, typer.Option(help="Split of data sets.")] = "train"
    root: Annotated[
        Path | None, typer.Option(help="Folder that keys are relative to; by default that of the folder's last run.")
    ] = None
    skip_with: Annotated[
        str | None, typer.Option(help="Pass over pictures that have a file of this extension beside them, as .txt.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Caption the first items only.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Caption everything anew.")] = False
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed items again.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what a run would do, and stop.")] = False
    max_failures: MaxFailures = 0.5

    def __post_init__(self) -> None:
        if self.demo and self.model is not None:
            raise typer.BadParameter("name --model or --demo, not both", param_hint="--model")
        if not self.demo and self.model is None:
            raise typer.BadParameter(
                "name a model, such as --model Qwen/Qwen3-VL-8B-Instruct, or --demo for a toy that knows drawn scenes "
                "only",
                param_hint="--model",
            )
        if not all(prompt.strip() for prompt in self.prompts):
            raise typer.BadParameter("the prompt is empty: say what the captions shall tell", param_hint="--prompt")
        try:
            if self.attention != "auto":
                backend_named(self.attention)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--attention") from None

    @property
    def named(self) -> str:
        """Return the model's folder or name."""
        return self.model or str(_TINY)

    @property
    def prompts(self) -> list[str]:
        """Return the prompts, without duplicates."""
        default = _TINY_PROMPT if self.demo else _PROMPT
        return list(dict.fromkeys(self.prompt or [default]))

    @property
    def decoding(self) -> tuple[int, float, float, int, bool]:
        """Return the arguments of `Captioner` that decide how captions are generated."""
        decode_graphs = not (self.no_patch or self.no_decode_graphs)
        return self.max_new_tokens, self.temperature, self.top_p, self.seed, decode_graphs

    def patching(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments of `hf_vit_accel.patch`."""
        return {"attention": self.attention, "reuse": reuse_for(model, self.prompts)}

    def dtype_on(self, on_cuda: bool) -> str:
        """Return the name of the model's dtype."""
        return self.dtype or ("bfloat16" if on_cuda else "float32")

    def settings(self, on_cuda: bool) -> Settings:
        """Return the options that change captions, beside the checkpoint."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "sampling": [self.temperature, self.top_p, self.seed] if self.temperature else None,
            "dtype": self.dtype_on(on_cuda),
            "pixels": [self.min_pixels, self.max_pixels],
        }

    @property
    def command(self) -> str:
        """Return a fingerprint of the options that make this the same command, but for `--overwrite`."""
        command = {
            "inputs": self.inputs,
            "folder": os.getcwd(),
            "prompts": self.prompts,
            "items": [self.column, self.split, str(self.root), self.skip_with, self.limit],
            "model": [self.no_patch, self.no_decode_graphs, self.attention],
        }
        return fingerprint(command)


@dataclass(frozen=True, kw_only=True)
class OnRay(Options):
    """Options of `captioner/on_ray.py`."""

    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Device of the models; by default gpu if the cluster has one.")
    ] = None
    actors: Annotated[
        int | None, typer.Option(min=1, help="Most models at a time; by default one a GPU, or half the CPUs.")
    ] = None


OptionsType = TypeVar("OptionsType", bound=Options)


def command(app: typer.Typer) -> Callable[[Callable[[OptionsType], None]], Callable[..., None]]:
    """Make a command of a function of one argument, a dataclass whose fields are annotated as typer's options."""

    def decorate(run: Callable[[OptionsType], None]) -> Callable[..., None]:
        (options_type,) = (hint for name, hint in get_type_hints(run).items() if name != "return")
        hints = get_type_hints(options_type, include_extras=True)

        @wraps(run)
        def run_with_options(**values: object) -> None:
            run(options_type(**values))

        parameters = []
        for option in fields(options_type):
            default = inspect.Parameter.empty if option.default is MISSING else option.default
            parameters.append(
                inspect.Parameter(
                    option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[option.name]
                )
            )
        run_with_options.__annotations__ = hints
        run_with_options.__signature__ = inspect.Signature(parameters)
        app.command()(run_with_options)
        return run_with_options

    return decorate
