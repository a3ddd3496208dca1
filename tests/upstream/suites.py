"""transformers' common model tests on our tiny models, where its own suites of these families are not at hand.

Source distributions hold the common tests (`tests/test_modeling_common.py`), not those of the single models. `compare`
copies this file into the unpacked distribution.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
import transformers
from tiny import TINY, chat_inputs
from transformers import PretrainedConfig

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin

BATCH, GRID = 2, [(1, 4, 6)]


class Tester:
    """What the common tests ask of a model's tester."""

    def __init__(self, parent: unittest.TestCase, family: str) -> None:
        self.parent, self.tiny = parent, TINY[family]
        self.batch_size, self.is_training = BATCH, True
        text = self.tiny.text
        self.num_hidden_layers, self.hidden_size = text["num_hidden_layers"], text["hidden_size"]
        vision = self.tiny.build().config.vision_config
        self.vision_config = {
            "num_hidden_layers": vision.depth,
            "hidden_size": getattr(vision, "embed_dim", vision.hidden_size),
            "num_attention_heads": vision.num_heads,
        }
        self.num_attention_heads, self.vocab_size = text["num_attention_heads"], text["vocab_size"]
        self.seq_length = self.prepare_config_and_inputs_for_common()[1]["input_ids"].shape[1]

    def get_config(self) -> PretrainedConfig:
        """A tiny config."""
        config: PretrainedConfig = self.tiny.build().config
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        """Two prompts of one image each."""
        model = self.tiny.build()
        one, two = (chat_inputs(model, GRID, seed) for seed in range(BATCH))
        return model.config, {name: torch.cat([one[name], two[name]]) for name in one}


class Common(ModelTesterMixin, GenerationTesterMixin):
    """The flags of composite vision-language models."""

    family: str
    _is_composite = True
    test_resize_embeddings = True
    model_split_percents = [0.7, 0.8, 0.9]  # noqa: RUF012

    def setUp(self) -> None:
        self.model_tester = Tester(self, self.family)  # type: ignore[arg-type]


def _suite(family: str) -> Any:
    whole = getattr(transformers, TINY[family].model)
    base = getattr(transformers, TINY[family].model.replace("ForConditionalGeneration", "Model"))
    members = {"family": family, "all_model_classes": (base, whole), "__module__": __name__}
    return type(f"Test_{family}", (Common, unittest.TestCase), members)


Test_qwen2_vl, Test_qwen2_5_vl, Test_qwen3_vl = map(_suite, ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
