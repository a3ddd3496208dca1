"""Models built on the families' towers: page retrievers, embedding models, other composites.

`tests/stacks` runs the models of colpali-engine and sentence-transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny import FAMILIES, IMAGE, TINY, assert_close, chat_inputs, left_padded, randomise
from torch import nn
from transformers import AutoModel

import hf_vit_accel

AUTO = "flash_vit_auto"


def config_of(family: str) -> Any:
    return TINY[family].build().config


def col_qwen2(family: str, **kwargs: object) -> Any:
    config = transformers.ColQwen2Config(vlm_config=config_of(family).to_dict(), embedding_dim=16)
    return randomise(transformers.ColQwen2ForRetrieval._from_config(config, **kwargs).eval())


def embedder(family: str, **kwargs: object) -> Any:
    """Build the plain model, whose last state is the embedding: Qwen3-VL-Embedding and -Reranker, GME, DSE."""
    return randomise(AutoModel.from_config(config_of(family), **kwargs).eval())


def embed(model: nn.Module, family: str) -> torch.Tensor:
    """Embed two pages of different sizes. Prompts are padded; pixels are padded per page, or packed."""
    inputs = left_padded(TINY[family].build())
    is_col_qwen = type(model).__name__ == "ColQwen2ForRetrieval"
    if is_col_qwen:
        inputs.pop("mm_token_type_ids", None)
        pages = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(1).tolist())
        inputs["pixel_values"] = nn.utils.rnn.pad_sequence(pages, batch_first=True)
    with torch.no_grad():
        output = model(**inputs)
    return output.embeddings if is_col_qwen else output.last_hidden_state[:, -1]


MAKERS = {"ColQwen2ForRetrieval": col_qwen2, "AutoModel": embedder}


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=[pytest.mark.matrix] * (row != column))
        for row, kind in enumerate(MAKERS)
        for column, family in enumerate(FAMILIES)
    ],
)
def test_embeddings_of_pages_equal_stock(kind: str, family: str) -> None:
    make = MAKERS[kind]
    model = make(family)
    expected = embed(model, family)
    hf_vit_accel.patch(model, strict=True)
    assert_close([embed(model, family)], [expected])
    [status] = hf_vit_accel.status(model).towers
    assert (status.calls, status.stock_calls, status.family) == (1, 0, family)
    hf_vit_accel.unpatch(model)
    assert_close([embed(model, family)], [expected], 0.0)
    by_name = make(family, attn_implementation=AUTO)
    assert_close([embed(by_name, family)], [expected])
    assert hf_vit_accel.status(by_name).towers[0].calls == 1
    assert by_name.config.get_text_config()._attn_implementation == "sdpa"


def test_cosmos3_omni_holds_qwen3_vls_tower() -> None:
    if not hasattr(transformers, "Cosmos3OmniConfig"):
        pytest.skip("this transformers has no Cosmos3-Omni")
    tiny = TINY["qwen3_vl"]
    tokens = dict(image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
    config = transformers.Cosmos3OmniConfig(vision_config=tiny.vision, text_config=tiny.text, **tokens)
    stock = randomise(transformers.Cosmos3OmniForConditionalGeneration._from_config(config).eval())
    inputs = chat_inputs(tiny.build(), [(1, 4, 6), (1, 8, 8)])
    with torch.no_grad():
        expected = stock(**inputs).logits
        named = transformers.Cosmos3OmniForConditionalGeneration._from_config(config, attn_implementation=AUTO).eval()
        named.load_state_dict(stock.state_dict())
        for model in (hf_vit_accel.patch(stock, strict=True), named):
            assert_close([model(**inputs).logits], [expected])
            assert [tower.calls for tower in hf_vit_accel.status(model).towers] == [1]
