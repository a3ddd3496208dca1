"""Run `tensor_parallel.py`, `long_video.py` and `benchmark/data_parallel.py` of examples/ with tiny models on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
import transformers
from support.ranks import run_on_ranks, share_small_calls
from support.towers import alike
from tiny import TINY, relative_error, tower_of
from torch.distributed.tensor import DTensor

import hf_vit_accel
from hf_vit_accel.tower import forward as tower_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CAPTIONERS = Path(__file__).resolve().parents[1] / "tiny_captioner"
sys.path[:0] = [str(EXAMPLES)]

import long_video  # noqa: E402
import tensor_parallel  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def small_calls_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_small_calls(monkeypatch)


def prove(family: str) -> None:
    """Patch a model of the family, so that forked ranks inherit its proof."""
    hf_vit_accel.patch(TINY[family].build())


def _weights_that_are_split(model: torch.nn.Module) -> list[torch.Tensor]:
    layer = model.model.language_model.layers[0]
    return [layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight]


def _check_split_model(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    model = tensor_parallel.load(None, folder, CPU)
    # transformers 5.15 keeps the part of a rank in a plain tensor.
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in _weights_that_are_split(model)]
    assert not isinstance(tower_of(model).blocks[0].mlp, DTensor)
    with torch.inference_mode():
        images = tensor_parallel.measure(model, "1x8x8*3+1x4x6", 1, 6, CPU)
        video = tensor_parallel.measure(model, "6x4x4", 1, 6, CPU)
        inputs = tensor_parallel.inputs_for(model, [(1, 8, 8)] * 2)
        logits = model(**inputs).logits
    assert images["tokens are those of stock"] and images["tokens are those of patched"]
    assert images["status"] == f"rank {rank} of 2, 4 calls shared" and video["status"].endswith("2 calls shared")
    # One process that holds the complete model gives the same logits.
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    complete = transformers.AutoModelForImageTextToText.from_config(config).eval()
    assert [2 * part.numel() for part in parts] == [weight.numel() for weight in _weights_that_are_split(complete)]
    with torch.inference_mode():
        expected = complete(**inputs).logits
        of_other_pictures = complete(**inputs | {"pixel_values": -inputs["pixel_values"]}).logits
    assert relative_error(logits, expected) < 1e-5
    assert relative_error(of_other_pictures, expected) > 1e-3, "the pictures change the logits"


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_tensor_parallelism_keeps_the_tokens(small_calls_are_shared: None, family: str, tmp_path: Path) -> None:
    """transformers has no plan for Qwen3-VL's text: the example gives it Qwen3's."""
    prove(family)
    folder = tmp_path / "model"
    TINY[family].build().config.save_pretrained(folder)
    run_on_ranks(_check_split_model, 2, tmp_path, str(folder))


def _run_benchmark(rank: int, path: str) -> None:
    spec: Any = importlib.util.spec_from_file_location("shared", EXAMPLES / "benchmark" / "data_parallel.py")
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.DEVICE = CPU
    benchmark.build_tower = lambda *_: tower_of(TINY["qwen2_5_vl"].build()).requires_grad_(False)
    benchmark.SIZES = {"16 x 512²": [(1, 4, 4)] * 16, "32 pages": [(1, 8, 6)] * 7}
    benchmark.exchanges = lambda rounds: []  # gloo cannot gather buffers of different sizes
    dist.init_process_group = lambda *_, **__: None  # this rank has a group
    dist.destroy_process_group = lambda: None
    sizes = "--sizes=" + ",".join(benchmark.SIZES)
    sys.argv = ["data_parallel.py", "--models=tiny", sizes, "--rounds=1", "--calls=0", "--no-pays", "--json", path]
    benchmark.main()


def test_the_benchmark_times_every_number_of_ranks_in_one_run(small_calls_are_shared: None, tmp_path: Path) -> None:
    prove("qwen2_5_vl")
    path = tmp_path / "results.json"
    run_on_ranks(_run_benchmark, 4, tmp_path, str(path))
    runs = json.loads(path.read_text())["runs"]
    assert [run["ranks"] for run in runs] == [2, 4]
    for run in runs:
        count = run["ranks"]
        assert [row["balance"] for row in run["towers"]] == pytest.approx([1.0, -(-7 // count) / (7 / count)])
        for row in run["towers"]:
            assert row["difference"] < 1e-5 and row["status"] == f"rank 0 of {count}, 2 calls shared"
            assert row["shared_by_alone"] == row["shared_ms"] / row["alone_ms"] and row["balance_measured"] >= 1.0


ARGUMENTS = Namespace(seconds=6.0, height=16, width=24, video=None, prompt="Which one?")


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    return TINY["qwen3_vl"].build()


def test_stock_and_patched_generate_the_same_text(model: transformers.PreTrainedModel) -> None:
    rows = []
    for is_patched in (False, True):
        if is_patched:
            hf_vit_accel.patch(model, max_rows=60, strict=True)
        with torch.inference_mode():
            rows.append(long_video.run(model, long_video.inputs_of(model, None, ARGUMENTS, 2.0), 5, None))
    for row in rows:
        assert row["patches"] == 6 * 4 * 6 and row["tokens"] == 6 * (6 + 2) + 22 and len(row["text"]) == 5
        assert row["encode"]["seconds"] > 0 < row["generate"]["seconds"]
    assert rows[0]["text"] == rows[1]["text"]
    assert hf_vit_accel.status(model).towers[0].passes == "2 calls in 6 passes"


def test_a_lack_of_memory_is_reported_with_the_step(
    model: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    inputs = long_video.inputs_of(model, None, ARGUMENTS, 2.0)
    with monkeypatch.context() as context, torch.inference_mode():
        context.setattr(type(model), "generate", run_out_of_memory)
        row = long_video.run(model, inputs, 5, None)
    assert row["generate"] == "out of memory" and row["encode"]["seconds"] > 0 and "text" not in row
    hf_vit_accel.patch(model)
    monkeypatch.setattr(tower_module, "encode", run_out_of_memory)
    with torch.inference_mode():
        row = long_video.run(model, inputs, 5, None)
    assert row["encode"] == "out of memory" and "generate" not in row and "text" not in row


def test_half_as_many_frames_are_tried_until_all_fits(
    model: transformers.PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    encode = tower_module.encode

    def encode_at_most_300_rows(route: object, pixels_TP: torch.Tensor, *others: object, **options: object) -> object:
        if len(pixels_TP) > 300:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return encode(route, pixels_TP, *others, **options)

    monkeypatch.setattr(tower_module, "encode", encode_at_most_300_rows)
    monkeypatch.setattr(long_video, "build", lambda *_, **__: model)
    monkeypatch.setattr(long_video, "mistake_in", lambda _: None)  # a full-size model would need a CUDA device
    options = {"random": "qwen3-vl-8b", "seconds": 6, "height": 32, "width": 32, "tokens": 3}
    options["json"] = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["x", *(f"--{name}={value}" for name, value in options.items())])
    long_video.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == printed
    assert [(row["way"], row["fps"], row["patches"], "text" in row) for row in printed] == [
        ("stock", 2.0, 384, True),
        ("patched", 2.0, 384, False),
        ("patched", 1.0, 192, True),
    ]


def test_a_shape_that_does_not_exist_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["long_video.py", "--random", "qwen3-vl-2b"])
    with pytest.raises(SystemExit) as stopped:
        long_video.main()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and "qwen3-vl-2b" in last_line
    assert all(name in last_line for name in ("--random", *long_video.TEXT))


RANDOM = "--random=qwen3-vl-8b"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=./nope"], "cannot load ./nope: "),
        (
            [f"--model={CAPTIONERS / 'qwen3_vl'}"],
            "--model needs a decoder (pip install av) and the torchvision",
        ),
        ([RANDOM, "--video=nope.mp4"], "nope.mp4 is not there: name a video file"),
        ([RANDOM, f"--video={EXAMPLES}"], f"{EXAMPLES} is a folder: name a video file"),
        ([RANDOM, f"--video={__file__}"], "--random has no processor for --video: name a checkpoint with --model"),
        ([RANDOM, "--json=/nope/x.json"], "cannot write /nope/x.json: there is no folder /nope"),
        ([RANDOM, "--height=100"], "expected --height and --width to be multiples of 32, got 100 and 320"),
        ([RANDOM, "--width=0"], "expected --height and --width to be multiples of 32, got 192 and 0"),
        (["--random=qwen2.5-vl-7b"], "multiples of 28, got 192 and 320"),
        ([RANDOM], "--random builds a full-size model, which needs a CUDA device"),
        ([RANDOM, "--seconds=-2"], "expected at least 4 frames, got --seconds -2 at --fps 2"),
        ([RANDOM, "--seconds=-2", "--fps=-2"], "expected at least 4 frames, got --seconds -2 at --fps -2"),
    ],
)
def test_mistakes_end_in_one_line_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(long_video, "is_torchvision_available", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(long_video, "build", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(sys, "argv", ["long_video.py", *options])
    with pytest.raises(SystemExit) as stopped:
        long_video.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_video_ends_in_one_line_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stand-in for the decoder fails as decoders do: without torchvision no video can be read."""
    video = tmp_path / "clip.mp4"
    video.write_bytes(b"no video")

    def fail(file: BinaryIO, suffix: str, _: object) -> None:
        assert (file.read(), suffix) == (b"no video", ".mp4")
        raise EOFError

    processor = SimpleNamespace(video_processor=SimpleNamespace())
    monkeypatch.setattr(long_video, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(long_video, "read_frames", fail)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda _: processor)
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", lambda *_: pytest.fail("loaded"))
    options = [f"--model={CAPTIONERS / 'qwen3_vl'}", f"--video={video}"]
    monkeypatch.setattr(sys, "argv", ["long_video.py", *options])
    with pytest.raises(SystemExit) as stopped:
        long_video.main()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and last_line.endswith(f"cannot read {video}: EOFError")


def test_tensor_parallelism_names_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", RANDOM])
    with pytest.raises(SystemExit) as stopped:
        tensor_parallel.main()
    assert stopped.value.code == 2 and "torchrun --nproc-per-node 2" in capsys.readouterr().err.splitlines()[-1]


QWEN3 = CAPTIONERS / "qwen3_vl"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--random=nope"], "--random nope is neither a folder nor one of qwen2.5-vl-7b, qwen3-vl-8b"),
        (["--model=./nope"], "cannot load ./nope: "),
        ([f"--random={EXAMPLES}"], f"{EXAMPLES} holds no checkpoint: "),
        ([f"--model={QWEN3}"], "2 ranks cannot share num_attention_heads = 5 and num_key_value_heads = 5 evenly"),
        ([RANDOM, "--sizes=nope"], "unknown size 'nope': choose one of "),
        ([RANDOM, "--rounds=0"], "expected --rounds and --tokens to be at least 1, got 0 and 16"),
        ([RANDOM, "--json=/nope/x.json"], "cannot write /nope/x.json: there is no folder /nope"),
    ],
)
def test_mistakes_in_tensor_parallelism_are_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str, rank: int
) -> None:
    for name, value in (("LOCAL_RANK", rank), ("RANK", rank), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "init_process_group", lambda *_: pytest.fail("the ranks met"))
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *options])
    with pytest.raises(SystemExit) as stopped:
        tensor_parallel.main()
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert not lines if rank else message in lines[-1]


def test_the_processor_gets_the_generated_frames_unchanged(model: transformers.PreTrainedModel) -> None:
    """A stand-in records the arguments: without torchvision there is no processor for videos."""
    arguments: dict[str, Any] = {}

    class Processor:
        def apply_chat_template(self, messages: list[dict[str, Any]], **_: object) -> str:
            assert messages[0]["content"][0] == {"type": "video"}
            return messages[0]["content"][1]["text"]

        def __call__(self, **kwargs: object) -> transformers.BatchFeature:
            arguments.update(kwargs)
            return transformers.BatchFeature({"input_ids": torch.zeros(1, 3)})

    assert long_video.inputs_of(model, Processor(), ARGUMENTS, 2.0).keys() == {"input_ids"}
    [frames] = arguments["videos"]
    [metadata] = arguments["video_metadata"]
    assert frames.shape == (12, 16, 24, 3) and frames.dtype.name == "uint8"
    assert all((frames[n] != frames[n + 1]).any() for n in range(11))
    assert (
        metadata.fps == 2.0 and list(metadata.frames_indices) == list(range(12)) and not arguments["do_sample_frames"]
    )
    assert arguments["text"] == ["Which one?"]
    assert arguments["videos_kwargs"]["size"]["longest_edge"] >= 12 * 16 * 24
