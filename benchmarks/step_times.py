"""Time one token of `graphed_decoding`, in the tree that PYTHONPATH names. Alternate two trees to compare them.

for run in 1 2 3; do for tree in BEFORE AFTER; do PYTHONPATH=$tree python benchmarks/step_times.py; done; done
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hf_vit_accel
from hf_vit_accel.tools.bench.timing import milliseconds

TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": dict(
        model="Qwen2_5_VLForConditionalGeneration",
        config="Qwen2_5_VLConfig",
        text=dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4),
    ),
    "qwen3_vl": dict(
        model="Qwen3VLForConditionalGeneration",
        config="Qwen3VLConfig",
        text=dict(
            hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128
        ),
    ),
}
"""The widths of the 7B and 8B models."""


def build(name: str, layers: int) -> Any:
    """Return a model with random weights in bf16, whose tower has one layer."""
    entry = TEXTS[name]
    sections = [16, 24, 24] if name == "qwen2_5_vl" else [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    text = entry["text"] | dict(num_hidden_layers=layers, vocab_size=152064, rope_parameters=rope)
    config = getattr(transformers, entry["config"])(text_config=text, vision_config={"depth": 1})
    with torch.device("cuda"):
        return getattr(transformers, entry["model"])._from_config(config, dtype=torch.bfloat16).eval()


def time_call(model: Any, rows: int, tokens: int) -> float:
    """Return the milliseconds of a call that generates some tokens after a prompt of 500."""
    ids = torch.randint(1000, 2000, (rows, 500), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, custom_generate=hf_vit_accel.graphed_decoding)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    return milliseconds(lambda: model.generate(**inputs, **options), cuda=True)


def main(layers: Annotated[int, typer.Option(help="Layers of the text model.")] = 8, rounds: int = 5) -> None:
    """Print the milliseconds of one further token: of both models, with 1 and 32 rows."""
    print(Path(hf_vit_accel.__file__).parent.parent)
    for name in TEXTS:
        model = build(name, layers)
        for rows in (1, 32):
            time_call(model, rows, 110)  # captures
            times = [(time_call(model, rows, 110) - time_call(model, rows, 10)) / 100 for _ in range(rounds)]
            print(f"{name}, {layers} layers, {rows} rows: {min(times):.3f} to {max(times):.3f} ms a token")
        print(hf_vit_accel.status(model).decoding)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
