"""Test that patching keeps the captions of the tiny captioners, which depend on the tower as their README shows."""

import copy

import parity
import pytest
import torch
import typer
from support.towers import alike
from tiny import assert_close

import hf_vit_accel


def grid_of(batch: parity.Batch) -> tuple[int, int, int]:
    """Return frames, height and width of a batch's scenes, in patches."""
    (grid,) = (value for name, value in batch.inputs.items() if name.endswith("_grid_thw"))
    return tuple(grid[0].tolist())


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen3_vl", "qwen2_vl"))
def test_patched_captions_are_those_of_stock(family: str) -> None:
    """Tokens are equal, and so are logits up to rounding: they show errors that change no caption."""
    stock = parity.load(family, torch.float32)
    batches = parity.held_out(family, 30, size=5)
    grids = [grid_of(batch) for batch in batches]
    assert len(set(grids)) >= 4 and [t for t, _, _ in grids] == [1] * 5 + [2]
    patched = hf_vit_accel.patch(copy.deepcopy(stock), strict=True)
    captions = []
    for batch in batches:
        tokens = parity.greedy(patched, batch.inputs)
        assert torch.equal(tokens, parity.greedy(stock, batch.inputs))
        captions += parity.load_tokenizer(family).batch_decode(tokens, skip_special_tokens=True)
    assert len(captions) == 30 and parity.score(captions, batches) >= 0.9 * len(captions)
    for batch in batches[-2:]:
        with torch.no_grad():
            logits = patched(**batch.inputs).logits
            expected = stock(**batch.inputs).logits
        assert_close([logits], [expected], 1e-5)
    assert not parity.unproven(hf_vit_accel.status(patched), {}, len(batches) + 2)
    assert not hf_vit_accel.status(stock).towers[0].patched


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
