"""Times whole vision towers, stock and patched, on real shapes with random weights; verifies before timing.

    python examples/benchmark/towers.py --output examples/benchmark/towers.json

Contenders run interleaved in one process and every number is a median. The inputs are those of a captioning or
document workload: one small image, one medium, one page, a batch, a mixed batch, a short video.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hf_vit_accel
from hf_vit_accel import env

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-vl-7b": (
        "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        dict(depth=32, embed_dim=1280, hidden_size=3584, num_heads=16, mlp_ratio=4, patch_size=14),
    ),
    "qwen2.5-vl-7b": (
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        dict(depth=32, hidden_size=1280, out_hidden_size=3584, num_heads=16, intermediate_size=3420, patch_size=14)
        | dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
    ),
    "qwen3-vl-8b": (
        "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
        "Qwen3VLVisionConfig",
        dict(depth=27, hidden_size=1152, out_hidden_size=4096, num_heads=16, intermediate_size=4304, patch_size=16)
        | dict(num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24]),
    ),
}

SIZES: dict[str, list[tuple[int, int, int]]] = {
    "one 448²": [(1, 28, 28)],
    "one 1024²": [(1, 64, 64)],
    "one page": [(1, 136, 106)],
    "16 x 512²": [(1, 32, 32)] * 16,
    "8 mixed": [(1, 28, 28), (1, 64, 64), (1, 46, 82), (1, 20, 30), (1, 96, 54), (1, 36, 36), (1, 72, 68), (1, 12, 46)],
    "video 8 x 36x64": [(8, 36, 64)],
}


def build_tower(model: str, device: str, dtype: torch.dtype) -> Any:
    """A tower of the model's real shape with random weights, as `from_pretrained` would leave it."""
    path, config_name, arguments = MODELS[model]
    module, name = path.rsplit(".", 1)
    kind = getattr(__import__(module, fromlist=[name]), name)
    torch.manual_seed(0)
    with torch.device(device):
        tower = kind(getattr(transformers, config_name)(**arguments))
    for parameter in tower.parameters():  # as loading does: buffers (the rotary frequencies) stay in fp32
        parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False)


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Merged features and deepstack features of a tower's output."""
    return [output.pooler_output, *(output.get("deepstack_features") or [])]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative L2 error of the outputs; infinite where one is not finite."""
    worst = 0.0
    for f, e in zip(found, expected, strict=True):
        error = float((f.float() - e.float()).norm() / e.float().norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


@contextmanager
def contender(tower: Any, attention: str) -> Iterator[None]:
    """The tower stock with an attention of transformers' own ("stock sdpa"), or patched with a backend."""
    if attention.startswith("stock "):
        former = tower.config._attn_implementation
        tower.config._attn_implementation = attention.removeprefix("stock ")
        try:
            yield
        finally:
            tower.config._attn_implementation = former
    else:
        with hf_vit_accel.patched(tower, attention=attention, strict=True):
            yield


def time_ms(run: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each repeat, by CUDA events around one forward, after a synchronisation."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def measure(
    model: str, attentions: list[str], sizes: list[str], dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    """One row per size and contender: median and spread in milliseconds, errors against an fp32 run of stock."""
    tower = build_tower(model, "cuda", dtype)
    reference = build_tower(model, "cuda", torch.float32)
    reference.load_state_dict({name: value.float() for name, value in tower.state_dict().items()})
    rows = []
    for size in sizes:
        grid = torch.tensor(SIZES[size], device="cuda")
        count = int(grid.prod(1).sum())
        generator = torch.Generator("cuda").manual_seed(1)
        pixels = torch.randn(count, tower.patch_embed.proj.weight[0].numel(), device="cuda", generator=generator).to(
            dtype
        )
        with torch.no_grad():
            expected = outputs_of(reference(pixels.float(), grid_thw=grid))
            errors, times = {}, {attention: [] for attention in attentions}
            for attention in attentions:
                with contender(tower, attention):
                    errors[attention] = relative_error(outputs_of(tower(pixels, grid_thw=grid)), expected)
            for _ in range(rounds):
                for attention in attentions:
                    with contender(tower, attention):
                        for _ in range(2):
                            tower(pixels, grid_thw=grid)
                        times[attention] += time_ms(lambda: tower(pixels, grid_thw=grid), 4)  # noqa: B023
        del expected
        for attention in attentions:
            rows.append(
                dict(
                    model=model,
                    size=size,
                    patches=count,
                    contender=attention,
                    ms=round(statistics.median(times[attention]), 3),
                    ms_low=round(min(times[attention]), 3),
                    ms_high=round(max(times[attention]), 3),
                    error=errors[attention],
                )
            )
            typer.echo(
                f"{model:14} {size:16} {count:6} {attention:22} {rows[-1]['ms']:9.2f} ms "
                f"({rows[-1]['ms_low']:.2f}-{rows[-1]['ms_high']:.2f})  error {errors[attention]:.2e}  "
                f"{statistics.median(times[attentions[0]]) / rows[-1]['ms']:.2f}x"
            )
    return rows


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw milliseconds per contender, a panel per model, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    models, sizes, contenders = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "size", "contender")
    )
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 4.2), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        times = {(row["size"], row["contender"]): row["ms"] for row in rows if row["model"] == model}
        for index, name in enumerate(contenders):
            height = 0.8 / len(contenders)
            at = [place + index * height for place in range(len(sizes))]
            bars = panel.barh(at, [times[size, name] for size in sizes], height=height, label=name)
            speedups = [f"{times[size, contenders[0]] / times[size, name]:.1f}x" for size in sizes]
            panel.bar_label(bars, speedups, fontsize=7, padding=2)
        panel.set_yticks([place + 0.4 - height / 2 for place in range(len(sizes))], sizes)
        panel.set_title(model)
        panel.set_xlabel("ms, tower forward (lower is better)")
        panel.margins(x=0.12)
        panel.invert_yaxis()
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"{result['device']}, {result['dtype']}, torch {result['versions']['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    output: Annotated[Path | None, typer.Option(help="where to write the JSON")] = None,
    figure: Annotated[Path | None, typer.Option(help="where to draw it (PNG)")] = None,
    models: Annotated[str, typer.Option(help="comma-separated")] = ",".join(MODELS),
    sizes: Annotated[str, typer.Option(help="comma-separated; all by default")] = ",".join(SIZES),
    attentions: Annotated[str, typer.Option(help="comma-separated; the first is the baseline")] = (
        "stock sdpa,auto,flashinfer_cudnn,torch_varlen"
    ),
    rounds: Annotated[int, typer.Option(help="interleaved rounds of four forwards each")] = 5,
) -> None:
    """Run the benchmark and print a table; the first contender is what speed-ups are relative to."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    rows: list[dict[str, Any]] = []
    for model in models.split(","):
        rows += measure(model, attentions.split(","), sizes.split(","), torch.bfloat16, rounds)
    result = dict(versions=env.versions(), device=env.cuda_device_name(), dtype="bfloat16", rows=rows)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    if figure is not None:
        plot(result, figure)


if __name__ == "__main__":
    typer.run(main)
