"""Measure offline jobs by vLLM and by plain transformers with this library, one after the other on one GPU.

    python benchmarks/beside_vllm.py /tmp/jobs --model qwen3-vl-8b --side ours --json build/beside.json
    python benchmarks/beside_vllm.py /tmp/jobs --model qwen3-vl-8b --side vllm --json build/beside.json

Both sides may have an environment of their own: the second adds its rows to the file of the first. vLLM gets a folder
with the full-size config, and weights drawn as transformers draws them. Both read the same JPEGs, take the same prompt
and decode greedily, without an end. Captions of unequal lengths end at any of many tokens on our side, which is to run
first. vLLM makes as many tokens of each picture. A side runs every job once to warm up; then the median of some runs
counts. The job of many pictures, half a minute long, is timed once.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import typer
from captioning_benchmark import (
    CHECKPOINTS,
    LONGEST,
    PATCH_SIDE,
    PROMPT,
    draw_all,
    load_model,
    load_processor,
    prepare_runs,
    run_captioner,
)
from measuring import DEVICE, Row, document_of, write_json
from PIL import Image
from transformers.generation.stopping_criteria import EosTokenCriteria
from whole_call import TEXT

import hf_vit_accel
from hf_vit_accel.tools.bench import SHAPES, milliseconds

PICTURES = 256
MANY = 1024
CALLS = {"32 x 34x46": (32, (34, 46)), "one 64x64": (1, (64, 64))}
"""Calls of `generate` by name: pictures, and the rows and columns of patches of each."""
CALL_TOKENS = (1, 64)
VLLM_SETTINGS: dict[str, Any] = dict(
    load_format="dummy",
    dtype="bfloat16",
    max_num_batched_tokens=16384,
    max_num_seqs=1024,
    max_model_len=8192,
    mm_processor_cache_gb=0,
    enable_prefix_caching=False,
    limit_mm_per_prompt={"image": 1, "video": 0},
)
"""What was fastest, and no cache that a second run of the same pictures would hit."""


class Run(NamedTuple):
    """The milliseconds of a run, and the new tokens of a picture, on average."""

    ms: float
    length: float


Job = Callable[[int], Run]
"""Runs a job with so many new tokens of a picture at most."""
Generate = Callable[[Sequence[Image.Image], int], float]
"""Makes so many tokens about every picture at most, and returns their average."""
CAPTIONING = "captioning"
UNEQUAL = "captioning, unequal lengths"
MANY_UNEQUAL = "captioning many, unequal lengths"
UNEQUAL_TOKENS = 256
ONE_IN = 64
"""Of all tokens, one in so many ends a caption of unequal length. Random weights repeat themselves: some never end."""
WARM_UPS = 3
"""Of calls: the third of a size at the latest is captured. Captioning runs once to warm up."""


def checkpoint_of(model: str, folder: Path) -> Path:
    """Write a folder that vLLM loads: the full-size config, and the tiny checkpoint's tokenizer and processor."""
    tiny = CHECKPOINTS[model]
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((tiny / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    text = TEXT[model][1]
    layers = text["num_hidden_layers"]
    config["text_config"] |= text | {"layer_types": ["full_attention"] * layers, "max_window_layers": layers}
    config["text_config"]["max_position_embeddings"] = 128000
    config["text_config"]["rope_parameters"] = dict(
        text["rope_parameters"], mrope_interleaved=model.startswith("qwen3")
    )
    config["vision_config"] |= SHAPES[model][1]
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        processor = json.loads((folder / name).read_text())
        processor["size"] = {"shortest_edge": 56**2, "longest_edge": LONGEST * PATCH_SIDE[model] ** 2}
        (folder / name).write_text(json.dumps(processor))
    return folder


def opened(paths: Sequence[Path]) -> list[Image.Image]:
    """Decode JPEGs in threads."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda path: Image.open(path).convert("RGB"), paths))


def noise(pictures: int, rows: int, columns: int, model: str) -> list[Image.Image]:
    """Draw pictures of so many rows and columns of patches."""
    side = PATCH_SIDE[model] // 2
    values = np.random.default_rng(0).integers(0, 256, (pictures, rows * side, columns * side, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in values]


def on_device(image: Image.Image) -> torch.Tensor:
    """Return the bytes (3, H, W) of a picture on the device, which turns them faster than a host does."""
    return torch.from_numpy(np.array(image)).to(DEVICE).permute(2, 0, 1)


def prompt_of(processor: Any) -> str:
    """Return the prompt with the place of a picture."""
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text


def calls_of(model: str, generate: Generate, *, cuda: bool) -> dict[str, Job]:
    """Return the jobs that are one call of `generate`, by name."""
    jobs: dict[str, Job] = {}
    for name, (number, (rows, columns)) in CALLS.items():
        jobs[name] = partial(timed, generate, noise(number, rows, columns, model), cuda=cuda)
    return jobs


def timed(generate: Generate, images: Sequence[Image.Image], tokens: int, *, cuda: bool) -> Run:
    """Time a call of `generate`."""
    lengths: list[float] = []
    ms = milliseconds(lambda: lengths.append(generate(images, tokens)), cuda=cuda)
    return Run(ms, lengths[0])


def ends_of(model: str) -> list[int]:
    """Return the tokens that end captions of unequal lengths."""
    return list(range(ONE_IN - 1, TEXT[model][1]["vocab_size"], ONE_IN))


def has_ended(criterion: EosTokenCriteria, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
    """Look up whether the last token of every row ends it.

    Stands in for transformers' criterion, which compares with a few tokens, but sorts thousands and waits for the GPU.
    """
    if not hasattr(criterion, "is_end_V"):
        ends = criterion.eos_token_id.to(input_ids.device)
        criterion.is_end_V = torch.zeros(1 << 18, dtype=torch.bool, device=ends.device).index_fill_(0, ends, True)
    table: torch.Tensor = criterion.is_end_V
    return table[input_ids[:, -1]]


def drawn(folder: Path, number: int) -> list[Path]:
    """Draw so many pictures, unless they are there."""
    if not folder.exists():
        draw_all(folder, number)
    return sorted(folder.glob("*.jpg"))


def lengths_file(model: str, pictures: Sequence[Path]) -> Path:
    """Return where our side leaves the tokens of each picture's caption, in the order of the pictures."""
    return pictures[0].parent.with_name(f"{model}-lengths-of-{len(pictures)}.json")


def redraw(model: torch.nn.Module) -> None:
    """Draw the matrices of a model in vLLM as transformers draws them: zeros would take less power."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02)


def jobs_of_vllm(model: str, folder: Path, few: Sequence[Path], many: Sequence[Path]) -> dict[str, Job]:
    """Start vLLM's engine; return its jobs by name."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # it carries `redraw` to the engine's process
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process may have used CUDA
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    checkpoint = checkpoint_of(model, folder / f"{model}-config")
    engine = LLM(
        model=str(checkpoint),
        compilation_config={"cudagraph_mm_encoder": True},
        disable_log_stats=True,
        **VLLM_SETTINGS,
    )
    engine.apply_model(redraw)
    text = prompt_of(load_processor(str(CHECKPOINTS[model])))

    def generate_lengths(images: Sequence[Image.Image], lengths: Sequence[int]) -> float:
        sampling = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        requests = [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(lengths)
        return statistics.mean(lengths)

    def generate(images: Sequence[Image.Image], tokens: int) -> float:
        return generate_lengths(images, [tokens] * len(images))

    def caption(tokens: int) -> Run:
        return timed(lambda paths, tokens: generate(opened(paths), tokens), few, tokens, cuda=False)

    def caption_unequally(pictures: Sequence[Path], tokens: int) -> Run:
        lengths = json.loads(lengths_file(model, pictures).read_text())  # missing until our side ran
        return timed(lambda paths, _: generate_lengths(opened(paths), lengths), pictures, tokens, cuda=False)

    return {
        CAPTIONING: caption,
        UNEQUAL: partial(caption_unequally, few),
        MANY_UNEQUAL: partial(caption_unequally, many),
        **calls_of(model, generate, cuda=False),  # the GPU is another process's
    }


def jobs_of_ours(model: str, folder: Path, few: Sequence[Path], many: Sequence[Path]) -> dict[str, Job]:
    """Return our jobs by name: the captioner for a folder, and `generate` of a patched model for a call."""
    checkpoint = str(CHECKPOINTS[model])
    full_size: Any = load_model(checkpoint, torch.bfloat16, DEVICE)
    processor = load_processor(checkpoint)
    text = prompt_of(processor)
    attempts = iter(range(1, 1000))
    prepare_runs()
    EosTokenCriteria.__call__ = has_ended
    hf_vit_accel.patch(full_size)  # as the captioner does: calls may run alone

    def caption(pictures: Sequence[Path], tokens: int, ends: list[int] | None = None) -> Run:
        full_size.generation_config.eos_token_id = ends
        output = folder / f"{model}-{tokens}-of-{len(pictures)}"
        if not output.exists():  # the first run with so many tokens plans its batches without earlier steps in memory
            hf_vit_accel.unpatch(full_size)
        arguments = ["caption", str(pictures[0].parent), "--output", str(output)]
        arguments += ["--model", checkpoint, "--prompt", PROMPT, "--attempt", str(next(attempts))]
        worker = run_captioner([*arguments, "--max-new-tokens", str(tokens)])
        full_size.generation_config.eos_token_id = None
        if ends is not None:
            tokens_of = {record.key: record.tokens for record in worker.journal.records() if record.run == worker.run}
            lengths_file(model, pictures).write_text(json.dumps([tokens_of[path.name] for path in pictures]))
        return Run(worker.ms, worker.progress.counts["text"] / len(pictures))

    def generate(images: Sequence[Image.Image], tokens: int) -> float:
        pictures = [on_device(image) for image in images]
        options = {"return_tensors": "pt", "device": DEVICE}
        inputs = processor(text=[text] * len(images), images=pictures, images_kwargs=options)
        for name, value in inputs.items():
            if isinstance(value, list):  # tokens, of rows of one length: transformers takes 26 ms for 32 rows
                inputs[name] = torch.from_numpy(np.array(value))
        length = inputs["input_ids"].shape[1]
        config = copy.deepcopy(full_size.generation_config)
        config.update(max_new_tokens=tokens, do_sample=False)
        output = full_size.generate(
            **inputs.to(DEVICE, dtype=torch.bfloat16),
            generation_config=config,
            custom_generate=hf_vit_accel.graphed_decoding,
        )
        assert output.shape[1] == length + tokens
        return tokens

    return {
        CAPTIONING: partial(caption, few),
        UNEQUAL: partial(caption, few, ends=ends_of(model)),
        MANY_UNEQUAL: partial(caption, many, ends=ends_of(model)),
        **calls_of(model, generate, cuda=DEVICE.type == "cuda"),
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for pictures and records.")],
    side: Annotated[Literal["vllm", "ours"], typer.Option(help="Which side runs.")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CHECKPOINTS)}.")] = "qwen2.5-vl-7b",
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens of captions.")] = "1,32,128",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of every job, but of many pictures.")] = 3,
    only: Annotated[str, typer.Option(help="Run the jobs whose name has this word.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the rows of this side to this file.")] = None,
) -> None:
    """Measure one side; print and keep its rows."""
    few, many = drawn(folder / "pictures", PICTURES), drawn(folder / "many", MANY)
    jobs = {"vllm": jobs_of_vllm, "ours": jobs_of_ours}[side](model, folder, few, many)
    before = json.loads(json_path.read_text()) if json_path is not None and json_path.exists() else document_of([])
    tokens_of_captions = {CAPTIONING: [int(number) for number in tokens.split(",")]}
    tokens_of_captions |= {UNEQUAL: [UNEQUAL_TOKENS], MANY_UNEQUAL: [UNEQUAL_TOKENS]}
    pictures_of = {CAPTIONING: few, UNEQUAL: few, MANY_UNEQUAL: many}
    for name, job in jobs.items():
        if only not in name:
            continue
        for number in tokens_of_captions.get(name, CALL_TOKENS):
            row: Row = {"model": model, "job": name, "tokens": number, "side": side}
            warm_ups = 1 if name in tokens_of_captions else WARM_UPS
            count = 1 if name == MANY_UNEQUAL else runs
            timed_runs = [job(number) for _ in range(warm_ups + count)][warm_ups:]
            times = [run.ms for run in timed_runs]
            row |= {"ms": statistics.median(times), "all": times}
            row["tokens of a picture"] = statistics.mean(run.length for run in timed_runs)
            if name in tokens_of_captions:
                row["pictures/s"] = 1e3 * len(pictures_of[name]) / row["ms"]
            if side == "ours" and DEVICE.type == "cuda":
                row["GB"] = torch.cuda.max_memory_allocated() / 1e9  # of all jobs so far, weights included
            print(row, flush=True)
            before["rows"].append(row)
            write_json(json_path, before)


if __name__ == "__main__":
    typer.run(main)
