"""`tensor_parallel.py`, `long_video.py` and `benchmark/data_parallel.py` of examples/, with tiny models on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.towers import alike
from test_data_parallel import no_group_is_left, on_ranks, proven  # noqa: F401
from tiny import TINY, relative_error, tower_of
from torch.distributed.tensor import DTensor

import hf_vit_accel
from hf_vit_accel.tower import forward as tower_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES)]

import long_video  # noqa: E402
import tensor_parallel  # noqa: E402

CPU = torch.device("cpu")


def _split(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    model = tensor_parallel.load(None, folder, CPU)
    layer = model.model.language_model.layers[0]
    split = [each.weight for each in (layer.self_attn.q_proj, layer.mlp.down_proj)]
    # transformers 5.15 keeps a rank's part in a plain tensor.
    split = [each.to_local() if isinstance(each, DTensor) else each for each in split]
    assert not isinstance(tower_of(model).blocks[0].mlp, DTensor)
    with torch.inference_mode():
        images = tensor_parallel.measure(model, "1x8x8*3+1x4x6", 1, 6, CPU)
        video = tensor_parallel.measure(model, "6x4x4", 1, 6, CPU)
        inputs = tensor_parallel.inputs_for(model, [(1, 8, 8)] * 2)
        found = model(**inputs).logits
    assert images["tokens are those of stock"] and images["tokens are those of patched"]
    assert images["status"] == f"rank {rank} of 2, 4 calls shared" and video["status"].endswith("2 calls shared")
    # And those of one process that holds the whole model.
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    layer = whole.model.language_model.layers[0]
    assert [2 * part.numel() for part in split] == [
        each.weight.numel() for each in (layer.self_attn.q_proj, layer.mlp.down_proj)
    ]
    with torch.inference_mode():
        expected, other = whole(**inputs).logits, whole(**inputs | {"pixel_values": -inputs["pixel_values"]}).logits
    assert relative_error(found, expected) < 1e-5 < 1e-3 < relative_error(other, expected), "pictures matter"


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl"))
def test_tokens_of_a_model_under_tensor_parallelism(on_ranks: Any, family: str, tmp_path: Path) -> None:  # noqa: F811
    """Qwen3-VL's text has no plan of its own in transformers: the example gives it Qwen3's."""
    folder = tmp_path / "model"
    TINY[family].build().config.save_pretrained(folder)
    on_ranks(_split, 2, str(folder))


def _measured(rank: int, path: str) -> None:
    spec: Any = importlib.util.spec_from_file_location("shared", EXAMPLES / "benchmark" / "data_parallel.py")
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.DEVICE = CPU
    benchmark.build_tower = lambda *_: tower_of(TINY["qwen2_5_vl"].build()).requires_grad_(False)
    benchmark.SIZES = {"16 x 512²": [(1, 4, 4)] * 16, "32 pages": [(1, 8, 6)] * 7}
    benchmark.exchanges = lambda rounds: []  # with ways of torch's that gloo does not know
    dist.init_process_group = lambda *_, **__: None  # there is one
    dist.destroy_process_group = lambda: None
    sizes = "--sizes=" + ",".join(benchmark.SIZES)
    sys.argv = ["data_parallel.py", "--models=tiny", sizes, "--rounds=1", "--calls=0", "--no-pays", "--json", path]
    benchmark.main()


def test_the_benchmark_times_every_number_of_ranks_in_one_run(on_ranks: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "found.json"
    on_ranks(_measured, 4, str(path))
    found = json.loads(path.read_text())
    assert [found_of["ranks"] for found_of in found["runs"]] == [2, 4]
    for count, rows in ((found_of["ranks"], found_of["towers"]) for found_of in found["runs"]):
        assert [row["balance"] for row in rows] == pytest.approx([1.0, -(-7 // count) / (7 / count)])
        for row in rows:
            assert row["difference"] < 1e-5 and row["status"] == f"rank 0 of {count}, 2 calls shared"
            assert row["shared_by_alone"] == row["shared_ms"] / row["alone_ms"] and row["balance_measured"] >= 1.0


def settings(**changed: Any) -> Namespace:
    return Namespace(seconds=6.0, height=16, width=24, video=None, prompt="Which one?", **changed)


@pytest.fixture
def model() -> Any:
    return TINY["qwen3_vl"].build()


def test_stock_and_patched_encode_and_generate_alike(model: Any) -> None:
    rows = []
    for patch in (False, True):
        if patch:
            hf_vit_accel.patch(model, max_rows=60, strict=True)
        with torch.inference_mode():
            rows.append(long_video.run(model, long_video.inputs_of(model, None, settings(), 2.0), 5, None))
    for row in rows:
        assert row["patches"] == 6 * 4 * 6 and row["tokens"] == 6 * (6 + 2) + 22 and len(row["text"]) == 5
        assert row["encode"]["seconds"] > 0 < row["generate"]["seconds"]
    assert rows[0]["text"] == rows[1]["text"]
    assert hf_vit_accel.status(model).towers[0].passes == "2 calls in 6 passes"


def test_memory_that_runs_out_is_told_with_the_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    inputs = long_video.inputs_of(model, None, settings(), 2.0)
    with monkeypatch.context() as small, torch.inference_mode():
        small.setattr(type(model), "generate", breaks)
        row = long_video.run(model, inputs, 5, None)
    assert row["generate"] == "out of memory" and row["encode"]["seconds"] > 0 and "text" not in row
    hf_vit_accel.patch(model)
    monkeypatch.setattr(tower_module, "encode", breaks)
    with torch.inference_mode():
        row = long_video.run(model, inputs, 5, None)
    assert row["encode"] == "out of memory" and "generate" not in row and "text" not in row


def test_half_as_many_frames_are_tried_until_all_fits(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    encode = tower_module.encode

    def small(route: Any, pixels_TP: torch.Tensor, *rest: Any) -> Any:
        if len(pixels_TP) > 100:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
        return encode(route, pixels_TP, *rest)

    monkeypatch.setattr(tower_module, "encode", small)
    monkeypatch.setattr(long_video, "build", lambda *_, **__: model)
    options = {"random": "tiny", "seconds": 6, "height": 16, "width": 24, "tokens": 3, "json": tmp_path / "rows.json"}
    monkeypatch.setattr(sys, "argv", ["x", *(f"--{name}={value}" for name, value in options.items())])
    long_video.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == told
    assert [(row["way"], row["fps"], row["patches"], "text" in row) for row in told] == [
        ("stock", 2.0, 144, True),
        ("patched", 2.0, 144, False),
        ("patched", 1.0, 72, True),
    ]


def test_generated_frames_go_through_the_processor_as_they_are(model: Any) -> None:
    """Of a processor, here, only what it is given: without torchvision there is none for videos."""
    given: dict[str, Any] = {}

    class Batch(dict):  # type: ignore[type-arg]
        def to(self, device: Any) -> Any:
            return self

    class Processor:
        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            assert messages[0]["content"][0] == {"type": "video"}
            return messages[0]["content"][1]["text"]

        def __call__(self, **kwargs: Any) -> Any:
            given.update(kwargs)
            return Batch(input_ids=torch.zeros(1, 3))

    assert long_video.inputs_of(model, Processor(), settings(), 2.0).keys() == {"input_ids"}
    (frames,), (metadata,) = given["videos"], given["video_metadata"]
    assert frames.shape == (12, 16, 24, 3) and frames.dtype.name == "uint8"
    assert all((frames[n] != frames[n + 1]).any() for n in range(11))
    assert metadata.fps == 2.0 and list(metadata.frames_indices) == list(range(12)) and not given["do_sample_frames"]
    assert given["text"] == ["Which one?"] and given["videos_kwargs"]["size"]["longest_edge"] >= 12 * 16 * 24
