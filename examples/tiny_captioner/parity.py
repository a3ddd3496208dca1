"""Proves that accelerated models give the captions of the stock model, on scenes that the tiny captioners never saw.

    python examples/tiny_captioner/parity.py --scenes 1000 --json build/parity.json
    python examples/tiny_captioner/parity.py --only fp8 --dtypes bfloat16           FP8 beside stock; needs a GPU

Captions the same held-out scenes with the stock model and with every way to patch it that runs on this machine, in
bf16 and fp16 on a GPU, in fp32 on a CPU. Prints a Markdown table. Exits with 1 if any accuracy differs from stock's by
more than half a point (in FP8, which is not exact, by more than one, or if more than 1% of the captions are others), or
if a patched model did not really run the way that its row says.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hf_vit_accel
from hf_vit_accel import Fp8Config, GraphConfig, Status
from hf_vit_accel.backends import BACKENDS, FP8

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train

HERE = Path(__file__).resolve().parent
POINTS, FP8_POINTS = 0.5, 1.0
"""The largest difference to stock's accuracy, in points."""
FP8_ALWAYS = Fp8Config(min_seqlen=0)
"""These pictures are far smaller than those that FP8 pays for."""
CALIBRATED = "fp8, calibrated"
GRAPHS = GraphConfig(max_tokens=100 * 2 * 7 * 7, exact_after=2)
"""Holds the largest batch, 100 videos of 2 x 7 x 7 merged tokens, so that every call is replayed: a shape's first one
padded, later ones exactly. The default's largest budget is made for single images; batches beyond it run in several
replays, or eagerly."""
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Batch:
    """The model's inputs for some scenes, and their right captions."""

    inputs: dict[str, Any]
    expected: list[str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way gave. right: captions that are. changed: captions that differ from stock's. calls, replays: of the
    tower, on the fast path and from CUDA graphs. problems: why it does not prove what it should.
    """

    family: str
    dtype: str
    way: str
    scenes: int
    right: int
    stock_right: int
    changed: int = 0
    calls: int = 0
    replays: int = 0
    points: float = POINTS
    problems: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """Accuracy above stock's, in points."""
        return 100 * (self.right - self.stock_right) / self.scenes

    @property
    def failed(self) -> bool:
        """Whether the difference is too large or not proven."""
        others = self.points == FP8_POINTS and self.changed > self.scenes * FP8_POINTS / 100
        return abs(self.difference) > self.points or others or bool(self.problems)

    def __str__(self) -> str:
        cells = (self.family, self.dtype, self.way, f"{self.right / self.scenes:.1%}", f"{self.difference:+.1f}")
        return "| " + " | ".join((*cells, str(self.changed))) + " |"


HEADER = """| Family | dtype | Way | Accuracy | Difference to stock, points | Captions that differ from stock's |
|---|---|---|---|---|---|"""


@cache
def load_tokenizer(family: str) -> Any:
    """The tokenizer of a trained checkpoint."""
    return transformers.AutoTokenizer.from_pretrained(HERE / family)


def load(family: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """A trained checkpoint as transformers loads it."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        HERE / family, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def held_out(
    family: str, count: int, *, size: int = 100, shuffled: bool = False, device: torch.device | str = "cpu"
) -> list[Batch]:
    """The scenes that `train.accuracy` judges by, encoded. shuffled: each with another's picture."""
    batches = []
    for batch in train.held_out(family, count, size):
        given = train.shuffle(batch) if shuffled else batch
        inputs = train.encode(given, family, load_tokenizer(family), torch.device(device), answer=False)
        batches.append(Batch(inputs, batch["captions"]))
    return batches


def captions(model: Any, family: str, batches: Sequence[Batch]) -> list[str]:
    """Greedy captions of all scenes."""
    return [words for batch in batches for words in train.caption(model, load_tokenizer(family), batch.inputs)]


def score(found: list[str], batches: Sequence[Batch]) -> int:
    """How many captions are exactly right."""
    return train.exact(found, [words for batch in batches for words in batch.expected])


def ways(device: torch.device | str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Every way to patch that a device offers in a dtype, by name: the arguments of `hf_vit_accel.patch`."""
    on_cuda = torch.device(device).type == "cuda"
    usable = [b for b in BACKENDS if (on_cuda or not b.needs.cuda) and not b.reasons_against_machine()]
    found: dict[str, dict[str, Any]] = {"auto": {}, "auto, nothing fused": {"fuse": False}}
    if on_cuda and any(backend.capturable for backend in usable):
        found["auto, graphs by default"] = {"cuda_graphs": True}
    for backend in usable:
        found[backend.name] = {"attention": backend.name}
        if on_cuda and backend.capturable:
            found[f"{backend.name}, graphs"] = {"attention": backend.name, "cuda_graphs": GRAPHS}
    if on_cuda and not FP8.reasons_against_machine():
        found |= {way: {"fp8": FP8_ALWAYS} for way in ("fp8", CALIBRATED)}
        found["fp8, graphs"] = {"fp8": FP8_ALWAYS, "cuda_graphs": GRAPHS}
    return found


def compare(
    family: str, dtype: torch.dtype, device: torch.device | str, batches: Sequence[Batch], only: str = ""
) -> Iterator[Row]:
    """A row for the stock model, then one for every way to patch it whose name begins so."""
    model = load(family, dtype, device)
    stock = captions(model, family, batches)
    right, scenes, name = score(stock, batches), len(stock), str(dtype).removeprefix("torch.")
    yield Row(family=family, dtype=name, way="stock", scenes=scenes, right=right, stock_right=right)
    for way, options in ways(device, dtype).items():
        if not way.startswith(only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            if way == CALIBRATED:  # by the first batch alone
                path = hf_vit_accel.calibrate(model, [batches[0].inputs], Path(folder, "maxima.json"))
                options = {"fp8": Fp8Config(amax_file=path, min_seqlen=0)}
            with hf_vit_accel.patched(model, **options):
                found = captions(model, family, batches)
                status = hf_vit_accel.status(model)
        (tower,) = status.towers
        yield Row(
            family=family,
            dtype=name,
            way=way,
            scenes=scenes,
            right=score(found, batches),
            stock_right=right,
            changed=sum(one != other for one, other in zip(found, stock, strict=True)),
            calls=tower.calls,
            replays=tower.graphs.replays if tower.graphs else 0,
            points=FP8_POINTS if "fp8" in options else POINTS,
            problems=tuple(unproven(status, options, len(batches))),
        )


def unproven(status: Status, options: Mapping[str, Any], calls: int) -> list[str]:
    """Why a model may not have run as `patch` was asked to, after so many calls of its tower; empty if it has."""
    (tower,) = status.towers
    problems = [f"{count} x {why}" for why, count in tower.fallbacks.items()]
    if tower.calls < calls or tower.stock_calls:
        problems.append(f"expected {calls} fast calls, counted {tower.calls}, and {tower.stock_calls} stock calls")
    named = options.get("attention")
    if others := set(tower.backends.values()) - {named, "fused kernel"} if named else None:
        problems.append(f"{', '.join(sorted(others))} attended instead of {named}")
    if "fp8" in options and tower.backends["full"] != FP8.name:
        problems.append(f"{tower.backends['full']} attended instead of {FP8.name}")
    if "; not " in str(tower.fp8):
        problems.append(f"fp8: {tower.fp8}")
    if bool(tower.fused) != options.get("fuse", True):
        problems.append(f"fused: {', '.join(tower.fused) or 'nothing'}")
    if graphs := options.get("cuda_graphs"):
        assert tower.graphs is not None
        # A default's budgets leave out what would not gain; GRAPHS leave out nothing.
        left_out = [why for why in tower.graphs.eager if graphs is not True or "failed" in why]
        problems += [f"{tower.graphs.eager[why]} calls without a graph: {why}" for why in left_out]
        if tower.graphs.replays < (1 if graphs is True else calls):
            problems.append(f"{tower.graphs.replays} graphs replayed in {calls} calls")
    return problems


def main(
    scenes: Annotated[int, typer.Option(help="Held-out scenes for each model, in batches of 100.", min=1)] = 1000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows there, too.")] = None,
    only: Annotated[str, typer.Option(help="How the names of the ways begin that are compared with stock.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated, instead of all of the device's.")] = "",
) -> None:
    """Caption held-out scenes with stock and patched models and compare; exit with 1 if the captions got worse."""
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin, rows = time.perf_counter(), []
    wanted = [getattr(torch, name) for name in dtypes.split(",") if name] or DTYPES[device.type]
    print(HEADER)
    for family in train.FAMILIES:
        batches = held_out(family, scenes, device=device)
        for dtype in wanted:
            for row in compare(family, dtype, device, batches, only):
                print(row, flush=True)
                rows.append(row)
        del batches
    if not any(row.way != "stock" for row in rows):
        raise typer.BadParameter(f"expected --only to be how a way begins that runs here, got {only!r}")
    failed = [row for row in rows if row.failed]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{scenes} scenes on {where}, {versions}, {time.perf_counter() - begin:.0f} s: {len(failed)} rows failed")
    for row in failed:
        why = (*row.problems, f"{row.difference:+.2f} points")
        print(f"- {row.family}, {row.dtype}, {row.way}: {'; '.join(why)}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        report = {"device": where, "versions": versions, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
