"""What the captioners' command lines know in common, and how a dataclass of options becomes a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from media.pictures import REFUSE_ABOVE

from captioning.prepare import Wanted

__all__ = ["MaxFailures", "OnRay", "Options", "command"]

_TINY = Path(__file__).resolve().parent.parent / "tiny_captioner" / "qwen3_vl"
_PROMPT, _TINY_PROMPT = "Describe this {kind}.", "describe this {kind} ."

MaxFailures = Annotated[float, typer.Option(min=0, max=1, help="Exit with 1 if a larger share of records are errors.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to be captioned, with what, and how. The records of a run are the same, whatever captions them."""

    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, globs, pictures, videos, .txt lists of paths, .tar shards, .parquet files, dataset:NAME."
        ),
    ]
    output: Annotated[Path, typer.Option(help="Folder for the records; an earlier run into it is resumed.")]
    model: Annotated[str | None, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None
    demo: Annotated[bool, typer.Option("--demo", help="A toy model, which knows drawn scenes and nothing else.")] = (
        False
    )
    prompt: Annotated[
        list[str] | None, typer.Option(help="May name {name}, {stem}, {folder}, {kind} and metadata. Repeatable.")
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64
    temperature: Annotated[float, typer.Option(min=0, help="0 for greedy decoding.")] = 0.0
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0
    seed: Annotated[int, typer.Option(help="Of sampling; every record has one of its own, made of this.")] = 0
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller pictures are enlarged to it.")] = None
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger pictures are reduced to it.")] = None
    refuse_above: Annotated[int, typer.Option(min=1, help="Pictures of more pixels are errors.")] = REFUSE_ABOVE
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most vision tokens (merged patches) in a batch.")] = 16384
    batch_size: Annotated[int, typer.Option(min=1, help="Most items in a batch.")] = 64
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto"
    cuda_graphs: Annotated[bool, typer.Option(help="Replay the tower from CUDA graphs.")] = False
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="By default bfloat16 on CUDA, else float32."),
    ] = None
    no_patch: Annotated[bool, typer.Option("--no-patch", help="The stock vision tower, for comparison.")] = False
    column: Annotated[str | None, typer.Option(help="Of the pictures, in parquet files and datasets.")] = None
    split: Annotated[str, typer.Option(help="Of datasets.")] = "train"
    root: Annotated[
        Path | None, typer.Option(help="Keys are paths below it; by default that of the folder's last run.")
    ] = None
    skip_with: Annotated[
        str | None, typer.Option(help="Pass over pictures that have a file of this extension beside them, as .txt.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Caption everything anew.")] = False
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed items again.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False
    max_failures: MaxFailures = 0.5

    def __post_init__(self) -> None:
        if self.demo == (self.model is not None):
            raise typer.BadParameter(
                "name a model, such as --model Qwen/Qwen3-VL-8B-Instruct, or --demo for a toy that knows drawn scenes "
                "only",
                param_hint="--model",
            )

    @property
    def named(self) -> str:
        """The model's folder or name."""
        return self.model or str(_TINY)

    @property
    def decoding(self) -> tuple[int, float, float, int]:
        """How captions are written, as `Captioner` takes it."""
        return self.max_new_tokens, self.temperature, self.top_p, self.seed

    def dtype_on(self, cuda: bool) -> str:
        """The dtype's name."""
        return self.dtype or ("bfloat16" if cuda else "float32")

    def wanted(self, cuda: bool) -> Wanted:
        """What `prepare` asks for. settings: those that change captions."""
        made = {
            "model": self.named,
            "prompts": list(dict.fromkeys(self.prompt or [_TINY_PROMPT if self.demo else _PROMPT])),
            "settings": {
                "max_new_tokens": self.max_new_tokens,
                "sampling": [self.temperature, self.top_p, self.seed] if self.temperature else None,
                "dtype": self.dtype_on(cuda),
                "pixels": [self.min_pixels, self.max_pixels],
            },
        }
        return Wanted(
            **{field.name: getattr(self, field.name) for field in fields(Wanted) if field.name not in made}, **made
        )


@dataclass(frozen=True, kw_only=True)
class OnRay(Options):
    """What only a cluster knows."""

    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Of the models; by default gpu where the cluster has one.")
    ] = None
    actors: Annotated[
        int | None, typer.Option(min=1, help="Most models at a time; by default one a GPU, or half the CPUs.")
    ] = None


def command(app: typer.Typer) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Makes a command of a function of one argument, a dataclass whose fields are annotated as typer's options."""

    def decorate(run: Callable[[Any], None]) -> Callable[..., None]:
        options = next(each for name, each in get_type_hints(run).items() if name != "return")
        hints = get_type_hints(options, include_extras=True)

        @wraps(run)
        def called(**values: Any) -> None:
            run(options(**values))

        defaults = {
            each.name: inspect.Parameter.empty if each.default is MISSING else each.default for each in fields(options)
        }
        called.__annotations__ = hints
        called.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
                for name, default in defaults.items()
            ]
        )
        app.command()(called)
        return called

    return decorate
