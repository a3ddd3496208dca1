"""Compare the captions of patched models with those of the stock model, on scenes that the tiny captioners never saw.

    python benchmarks/parity.py --scenes 1000 --json build/parity.json
    python benchmarks/parity.py --only fp8 --dtypes bfloat16           FP8 beside stock; needs a GPU

The stock model and every way to patch it that runs on this machine caption the same held-out scenes. They run in bf16
and fp16 on a GPU, and in fp32 on a CPU. The rows are printed as a Markdown table. The script exits with 1 if an
accuracy differs from stock's by more than half a point. FP8 is not exact: it may differ by one point, and in 1% of the
captions. The script also exits with 1 if a patched model did not run as its row says. No time is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_vit_accel
from hf_vit_accel import Fp8Config, GraphConfig, Status
from hf_vit_accel.backends import BACKENDS, FP8

CAPTIONERS = Path(__file__).resolve().parents[1] / "tests" / "tiny_captioner"
sys.path.append(str(CAPTIONERS))

from scene_batches import PATCH, Inputs, encode  # noqa: E402
from scene_batches import held_out as held_out_scenes  # noqa: E402

FAMILIES = list(PATCH)
POINTS = 0.5
"""The largest difference from stock's accuracy, in points."""
FP8_POINTS = 1.0
"""The same for FP8."""
FP8_ALWAYS = Fp8Config(min_seqlen=0)
"""The defaults leave out pictures as small as these."""
CALIBRATED = "fp8, calibrated"
GRAPHS = GraphConfig(max_tokens=100 * 2 * 7 * 7, exact_after=2)
"""The budget of the largest batch, 100 videos of 2 x 7 x 7 merged tokens, so that every call is replayed. The first
call of a shape is padded, later ones are exact. The default's largest budget suits single images: larger batches run in
several replays, or eagerly."""
Options = dict[str, Any]
"""The arguments of `hf_vit_accel.patch`."""
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Batch:
    """The model's inputs for some scenes, and their right captions."""

    inputs: Inputs
    expected: list[str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one way to patch."""

    family: str
    dtype: str
    way: str
    scenes: int
    right: int  # captions
    stock_right: int  # captions of the stock model
    changed: int = 0  # captions that differ from stock's
    calls: int = 0  # of the tower, fast
    replays: int = 0
    points: float = POINTS  # the largest allowed difference of accuracy
    problems: tuple[str, ...] = ()  # why the row proves nothing

    @property
    def difference(self) -> float:
        """The accuracy above stock's, in points."""
        return 100 * (self.right - self.stock_right) / self.scenes

    @property
    def failed(self) -> bool:
        """Whether the difference is too large, or the row proves nothing."""
        has_changed = self.points == FP8_POINTS and self.changed > self.scenes * FP8_POINTS / 100
        return abs(self.difference) > self.points or has_changed or bool(self.problems)

    def __str__(self) -> str:
        cells = (self.family, self.dtype, self.way, f"{self.right / self.scenes:.1%}", f"{self.difference:+.1f}")
        return "| " + " | ".join((*cells, str(self.changed))) + " |"


HEADER = """| Family | dtype | Way | Accuracy | Difference to stock, points | Captions that differ from stock's |
|---|---|---|---|---|---|"""


@cache
def load_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a trained checkpoint."""
    return transformers.AutoTokenizer.from_pretrained(CAPTIONERS / family)


def load(family: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a trained checkpoint with transformers."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        CAPTIONERS / family, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def held_out(family: str, count: int, *, size: int = 100, device: torch.device | str = "cpu") -> list[Batch]:
    """Encode scenes that the models were never trained on."""
    batches = []
    for batch in held_out_scenes(family, count, size):
        inputs = encode(batch, family, load_tokenizer(family), torch.device(device))
        batches.append(Batch(inputs, batch["captions"]))
    return batches


@torch.no_grad()
def greedy(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Return the greedy tokens (rows, at most 24) after the prompts."""
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :]


def captions(model: PreTrainedModel, family: str, batches: Sequence[Batch]) -> list[str]:
    """Return the greedy captions of all scenes."""
    found: list[str] = []
    for batch in batches:
        found += load_tokenizer(family).batch_decode(greedy(model, batch.inputs), skip_special_tokens=True)
    return found


def score(captions: list[str], batches: Sequence[Batch]) -> int:
    """Count the captions that are exactly right."""
    expected = [words for batch in batches for words in batch.expected]
    return sum(caption.split() == other.split() for caption, other in zip(captions, expected, strict=True))


def ways(device: torch.device | str, dtype: torch.dtype) -> dict[str, Options]:
    """Return every way to patch that a device offers in a dtype, by name."""
    on_cuda = torch.device(device).type == "cuda"
    usable = [b for b in BACKENDS if (on_cuda or not b.needs.cuda) and not b.reasons_against_machine()]
    found: dict[str, Options] = {"auto": {}, "auto, nothing fused": {"fuse": False}}
    if on_cuda and any(backend.replays_other_layouts for backend in usable):
        found["auto, cuda_graphs=True"] = {"cuda_graphs": True}
    for backend in usable:
        found[backend.name] = {"attention": backend.name}
        if on_cuda and backend.replays_other_layouts:
            found[f"{backend.name}, graphs"] = {"attention": backend.name, "cuda_graphs": GRAPHS}
    if on_cuda and not FP8.reasons_against_machine():
        found |= {way: {"fp8": FP8_ALWAYS} for way in ("fp8", CALIBRATED)}
        found["fp8, graphs"] = {"fp8": FP8_ALWAYS, "cuda_graphs": GRAPHS}
    return found


def compare(
    family: str, dtype: torch.dtype, device: torch.device | str, batches: Sequence[Batch], only: str = ""
) -> Iterator[Row]:
    """Yield a row for the stock model, then one for every way to patch it whose name begins with `only`."""
    model = load(family, dtype, device)
    stock = captions(model, family, batches)
    stock_right = score(stock, batches)
    common = dict(family=family, dtype=str(dtype).removeprefix("torch."), scenes=len(stock), stock_right=stock_right)
    yield Row(**common, way="stock", right=stock_right)
    for way, options in ways(device, dtype).items():
        if not way.startswith(only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            if way == CALIBRATED:  # the first batch calibrates
                path = hf_vit_accel.calibrate(model, [batches[0].inputs], Path(folder, "maxima.json"))
                options = {"fp8": Fp8Config(amax_file=path, min_seqlen=0)}
            with hf_vit_accel.patched(model, **options):
                patched = captions(model, family, batches)
                status = hf_vit_accel.status(model)
        (tower,) = status.towers
        yield Row(
            **common,
            way=way,
            right=score(patched, batches),
            changed=sum(caption != other for caption, other in zip(patched, stock, strict=True)),
            calls=tower.calls,
            replays=tower.graphs.replays if tower.graphs else 0,
            points=FP8_POINTS if "fp8" in options else POINTS,
            problems=tuple(unproven(status, options, len(batches))),
        )


def unproven(status: Status, options: Mapping[str, Any], calls: int) -> list[str]:
    """Return the reasons to doubt that a model ran as the options of `patch` say, in this number of fast calls."""
    (tower,) = status.towers
    problems = [f"{count} x {why}" for why, count in tower.fallbacks.items()]
    if tower.calls < calls or tower.stock_calls:
        problems.append(f"expected {calls} fast calls, counted {tower.calls}, and {tower.stock_calls} stock calls")
    named = options.get("attention")
    others = set(tower.backends.values()) - {named, "fused kernel"}
    if named and others:
        problems.append(f"{', '.join(sorted(others))} attended instead of {named}")
    if "fp8" in options and tower.backends["full"] != FP8.name:
        problems.append(f"{tower.backends['full']} attended instead of {FP8.name}")
    if "; not " in str(tower.fp8):
        problems.append(f"fp8: {tower.fp8}")
    if bool(tower.fused) != options.get("fuse", True):
        problems.append(f"fused: {', '.join(tower.fused) or 'nothing'}")
    graphs = options.get("cuda_graphs")
    if graphs:
        assert tower.graphs is not None
        # The default's budgets leave out calls that gain nothing from a graph. GRAPHS leave out no call.
        reasons = [reason for reason in tower.graphs.eager if graphs is not True or "failed" in reason]
        problems += [f"{tower.graphs.eager[reason]} calls without a graph: {reason}" for reason in reasons]
        if tower.graphs.replays < (1 if graphs is True else calls):
            problems.append(f"{tower.graphs.replays} graphs replayed in {calls} calls")
    return problems


def main(
    scenes: Annotated[int, typer.Option(help="Held-out scenes for each model, in batches of 100.", min=1)] = 1000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
    only: Annotated[str, typer.Option(help="Compare only ways whose names begin like this.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated; by default all dtypes of the device.")] = "",
) -> None:
    """Caption held-out scenes with stock and patched models. Exits with 1 if the captions got worse."""
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    chosen_dtypes = [getattr(torch, name) for name in dtypes.split(",") if name] or DTYPES[device.type]
    print(HEADER)
    for family in FAMILIES:
        batches = held_out(family, scenes, device=device)
        for dtype in chosen_dtypes:
            for row in compare(family, dtype, device, batches, only):
                print(row, flush=True)
                rows.append(row)
        del batches
    if not any(row.way != "stock" for row in rows):
        raise typer.BadParameter(f"no way that runs here begins with {only!r}: give another --only")
    failed = [row for row in rows if row.failed]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{scenes} scenes on {name}, {versions}: {len(failed)} rows failed")
    for row in failed:
        problems = (*row.problems, f"{row.difference:+.2f} points")
        print(f"- {row.family}, {row.dtype}, {row.way}: {'; '.join(problems)}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        names = [str(dtype).removeprefix("torch.") for dtype in chosen_dtypes]
        report = {"device": name, "dtype": ", ".join(names), "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
