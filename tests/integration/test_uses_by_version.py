"""Run every tower in every use under this version of transformers, for the table of versions in SUPPORT.md.

`pytest --matrix` on this file compares them with the record. With RECORD_VERSIONS=1 it writes them there, as
`nox -s versions` does for every version.
"""

import os
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from support import attention_only, versions
from support.attention_only import CLASSES as ATTENTION_ONLY
from support.decoding import both, counts_of
from support.families import CLASSES, tiny_tower
from tiny import TINY, assert_close, randomise

import hf_vit_accel
from hf_vit_accel.decoding import loop, text_models
from hf_vit_accel.families import Family
from hf_vit_accel.tower.code import names_of_forwards
from hf_vit_accel.versions import popped_by


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "module", "name"), CLASSES, ids=[name for _, _, name in CLASSES])
def test_a_tower_in_every_use(family: Family, module: str, name: str, references: list[str]) -> None:
    cells = {}
    for use, measure in versions.USES.items():
        cells[use] = measure(tiny_tower(family, module, name))
    if os.environ.get("RECORD_VERSIONS"):
        versions.write(name, cells)
        return
    recorded = versions.read().get(name, {})
    assert recorded, f"no record of {name}: RECORD_VERSIONS=1 pytest --matrix {__file__}"
    if transformers.__version__ in recorded:
        assert recorded[transformers.__version__] == cells, "stale: run nox -s versions"
    else:
        assert set(cells.values()) <= {"fast", *recorded[max(recorded, key=Version)].values()}


def test_the_three_families_are_fast_in_every_recorded_cell() -> None:
    record = versions.read()
    for name in ("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel"):
        assert {"4.57.6", "5.0.0", "5.9.0", "5.15.1", "5.24.0"} <= record[name].keys()
        assert all(set(cells.values()) == {"fast"} for cells in record[name].values())
    assert all(set(cells.values()) == {"fast"} for cells in record["Qwen3VLVisionModel"].values())


def test_paddleocr_with_other_arguments_stays_stock() -> None:
    """Transformers 5.0 asks for the offsets and names the grid otherwise: that call goes to stock as it is."""
    module = "transformers.models.paddleocr_vl.modeling_paddleocr_vl"
    name = "PaddleOCRVisionTransformer"
    if not versions.takes_other_arguments(module, name):
        pytest.skip("this transformers takes the usual arguments")
    kind = getattr(pytest.importorskip(module), name)
    config = transformers.PaddleOCRVisionConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=40, image_size=10, patch_size=2
    )
    tower = randomise(kind(config).eval())
    grid = [(1, 4, 6)]
    pixels = torch.randn(1, 24, 3, 2, 2)
    offsets = torch.tensor([0, 24], dtype=torch.int32)
    with torch.no_grad():
        expected = tower(pixels, cu_seqlens=offsets, image_grid_thw=grid).last_hidden_state
        hf_vit_accel.patch(tower)
        actual = tower(pixels, cu_seqlens=offsets, image_grid_thw=grid).last_hidden_state
    assert_close([actual], [expected], 0.0)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (0, 1) and "takes other arguments" in status.against_fast[0]


@pytest.mark.parametrize(("module", "name"), [entry[1:] for entry in ATTENTION_ONLY], ids=lambda value: value)
def test_a_tower_that_computes_its_segments_stays_stock(module: str, name: str) -> None:
    """Give no offsets to a tower that computes its own: it would get two values for them."""
    kind = getattr(pytest.importorskip(module), name)
    names = names_of_forwards({type(part) for part in attention_only.make_tower(module, name).modules()})
    if "cu_seqlens" in popped_by(names):
        pytest.skip("this transformers takes segments")
    tower = attention_only.make_tower(module, name)
    assert isinstance(tower, kind)
    arguments = attention_only.inputs(tower)
    with torch.no_grad():
        expected = tower(**arguments).last_hidden_state
        hf_vit_accel.patch(tower)
        actual = tower(**arguments).last_hidden_state
    assert_close([actual], [expected])
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (0, 1)
    assert "computes the segments of this tower by itself" in str(status)


def test_stock_decodes_where_the_loop_of_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old model lacks methods of a newer loop, as `_prefill` in 4.57."""
    monkeypatch.setattr(loop, "transformers", SimpleNamespace(__version__="4.57.6"))
    monkeypatch.setattr(text_models, "_METHODS", (*text_models._METHODS, "_method_of_a_newer_loop"))
    model = TINY["qwen2_5_vl"].build()
    both(model, {"input_ids": torch.tensor([[5, 6]])}, max_new_tokens=4)
    assert counts_of(model).reasons == {"the loop of transformers 4.57.6": 1}
