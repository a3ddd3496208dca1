"""Test that patching keeps the captions of the tiny captioners.

Captions prove something only if they depend on the tower, so tests also caption without pictures or attention.
"""

import copy
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import typer
from support.towers import alike
from tiny import assert_close
from torch import nn
from transformers import PreTrainedModel

import hf_vit_accel
from hf_vit_accel.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "tiny_captioner")]

import parity  # noqa: E402

Change = Callable[[nn.Module], None]
"""Change a tower in place."""


@dataclass(frozen=True)
class Captioner:
    """A stock model in fp32 on the CPU, and 30 scenes for it: five batches of pictures and one of videos."""

    family: str
    model: PreTrainedModel
    batches: list[parity.Batch]

    def patched(self, change: Change = lambda tower: None) -> PreTrainedModel:
        """Return a patched copy, after changing its tower."""
        model = copy.deepcopy(self.model)
        change(model.model.visual)
        return hf_vit_accel.patch(model, strict=True)

    def accuracy(self, model: PreTrainedModel, batches: list[parity.Batch] | None = None) -> float:
        """Return the share of captions that are exactly right."""
        captions = parity.captions(model, self.family, batches or self.batches)
        return parity.score(captions, batches or self.batches) / len(captions)


@pytest.fixture(scope="module", params=parity.FAMILIES)
def captioner(request: pytest.FixtureRequest) -> Captioner:
    family = request.param
    return Captioner(family, parity.load(family, torch.float32), parity.held_out(family, 30, size=5))


def silence(*layers: int) -> Change:
    """Return a change that removes the attention of these layers; without arguments, of all layers."""

    def change(tower: nn.Module) -> None:
        with torch.no_grad():
            for index in layers or range(len(tower.blocks)):
                for parameter in tower.blocks[index].attn.proj.parameters():
                    parameter.zero_()

    return change


def grid_of(batch: parity.Batch) -> tuple[int, int, int]:
    """Return frames, height and width of a batch's scenes, in patches."""
    (grid,) = (value for name, value in batch.inputs.items() if name.endswith("_grid_thw"))
    return tuple(grid[0].tolist())


@pytest.mark.parametrize("captioner", alike("qwen2_5_vl", "qwen3_vl", "qwen2_vl"), indirect=True)
def test_patched_captions_are_those_of_stock(captioner: Captioner) -> None:
    """Tokens are equal, and so are logits up to rounding: they show errors that change no caption."""
    grids = [grid_of(batch) for batch in captioner.batches]
    assert len(set(grids)) >= 4 and [t for t, _, _ in grids] == [1] * 5 + [2]
    patched = captioner.patched()
    captions = []
    for batch in captioner.batches:
        tokens = parity.greedy(patched, batch.inputs)
        assert torch.equal(tokens, parity.greedy(captioner.model, batch.inputs))
        captions += parity.load_tokenizer(captioner.family).batch_decode(tokens, skip_special_tokens=True)
    assert len(captions) == 30 and parity.score(captions, captioner.batches) >= 0.9 * len(captions)
    for batch in captioner.batches[-2:]:
        with torch.no_grad():
            logits = patched(**batch.inputs).logits
            expected = captioner.model(**batch.inputs).logits
        assert_close([logits], [expected], 1e-5)
    assert not parity.unproven(hf_vit_accel.status(patched), {}, len(captioner.batches) + 2)
    assert not hf_vit_accel.status(captioner.model).towers[0].patched


@pytest.mark.matrix  # tests the checkpoint, which seldom changes
@pytest.mark.parametrize("captioner", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"], indirect=True)
def test_captions_need_the_pictures(captioner: Captioner) -> None:
    shuffled = parity.held_out(captioner.family, 30, size=5, shuffled=True)
    assert captioner.accuracy(captioner.patched(), shuffled) < 0.1


@pytest.mark.matrix  # tests the checkpoint, which seldom changes
@pytest.mark.parametrize("captioner", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"], indirect=True)
def test_captions_need_the_towers_attention(captioner: Captioner) -> None:
    """The language model still gets a tenth right from patches alone, and nearly all with attention."""
    patched = captioner.patched(silence())
    assert captioner.accuracy(patched) < 0.2
    assert hf_vit_accel.status(patched).towers[0].calls == len(captioner.batches)


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_checkpoints_are_small_and_load_without_warnings(family: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = parity.HERE / family
    assert (folder / "model.safetensors").stat().st_size <= 8 << 20
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    transformers.utils.logging.warning_once.cache_clear()  # an earlier test may have caused the same warning
    try:
        model, loading = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records and not any(loading.values()), (caplog.text, loading)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.matrix  # `test_patched_captions_are_those_of_stock` compares the default
def test_parity_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(parity, "FAMILIES", ["qwen2_5_vl"])  # the others are compared above
    parity.main(scenes=4, json_path=tmp_path / "sub" / "rows.json")
    table = capsys.readouterr().out
    ways = ["stock", "auto", "auto, nothing fused", *(backend.name for backend in BACKENDS if not backend.needs.cuda)]
    assert table.count("| +0.0 | 0 |") == len(ways) and "0 rows failed" in table
    rows = json.loads((tmp_path / "sub" / "rows.json").read_text())["rows"]
    assert [row["way"] for row in rows[: len(ways)]] == ways and "sdpa" in ways
    assert all(row["calls"] == (row["way"] != "stock") for row in rows)


def test_parity_fails_beyond_half_a_point(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def row(right: int, **fields: object) -> parity.Row:
        return parity.Row(family="", dtype="", way="", scenes=1000, right=right, stock_right=990, **fields)

    assert not row(985).failed and not row(995).failed
    assert row(984).failed and row(996).failed and row(990, problems=("it ran elsewhere",)).failed
    assert not row(985, changed=20).failed
    fp8 = dict(points=parity.FP8_POINTS)
    assert not row(980, changed=10, **fp8).failed and row(979, **fp8).failed and row(990, changed=11, **fp8).failed
    monkeypatch.setattr(parity, "held_out", lambda *_, **__: [])
    monkeypatch.setattr(parity, "compare", lambda *_: [row(990), row(984)])
    with pytest.raises(typer.Exit) as stopped:
        parity.main()
    assert stopped.value.exit_code == 1 and "-0.60 points" in capsys.readouterr().out


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("family", parity.FAMILIES)
def test_captions_on_a_gpu_are_right_in_every_way(family: str) -> None:
    """At most one caption in 300 more or fewer is right, and every way ran as its row says."""
    batches = parity.held_out(family, 300, size=50, device="cuda")
    for dtype in parity.DTYPES["cuda"]:
        rows = list(parity.compare(family, dtype, "cuda", batches))
        assert [row.way for row in rows] == ["stock", *parity.ways("cuda", dtype)]
        assert rows[0].right >= 0.95 * rows[0].scenes
        failed = [(str(row), row.problems) for row in rows if row.failed]
        assert not failed, failed
        assert all(row.calls >= len(batches) for row in rows[1:])
        replayed = {row.way: row.replays for row in rows if "graphs" in row.way}
        assert replayed and min(replayed.values()) > 0, replayed
