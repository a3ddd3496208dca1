"""Run transformers' common model tests on our tiny models, where its suites of these families are missing.

Source distributions hold the common tests (`tests/test_modeling_common.py`), but no suites of single models. `compare`
copies this file into the unpacked distribution.
"""

from __future__ import annotations

import unittest

import torch
import transformers
from tiny import TINY, chat_inputs
from transformers import PretrainedConfig

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin

BATCH = 2
GRID = [(1, 4, 6)]


class Tester:
    """Provide the attributes and methods that the common tests use."""

    def __init__(self, parent: unittest.TestCase, family: str) -> None:
        self.parent = parent
        self.tiny = TINY[family]
        self.batch_size = BATCH
        self.is_training = True
        text = self.tiny.text
        self.num_hidden_layers = text["num_hidden_layers"]
        self.hidden_size = text["hidden_size"]
        vision = self.tiny.build().config.vision_config
        self.vision_config = {
            "num_hidden_layers": vision.depth,
            "hidden_size": getattr(vision, "embed_dim", vision.hidden_size),
            "num_attention_heads": vision.num_heads,
        }
        self.num_attention_heads = text["num_attention_heads"]
        self.vocab_size = text["vocab_size"]
        self.seq_length = self.prepare_config_and_inputs_for_common()[1]["input_ids"].shape[1]

    def get_config(self) -> PretrainedConfig:
        """Return the config of the tiny model."""
        config: PretrainedConfig = self.tiny.build().config
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        """Return the config, and inputs of two prompts with one image each."""
        model = self.tiny.build()
        prompts = [chat_inputs(model, GRID, seed) for seed in range(BATCH)]
        return model.config, {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}


class Common(ModelTesterMixin, GenerationTesterMixin):
    """Set the flags of composite vision-language models."""

    family: str
    _is_composite = True
    test_resize_embeddings = True
    model_split_percents = [0.7, 0.8, 0.9]  # noqa: RUF012

    def setUp(self) -> None:
        """Create the tester."""
        self.model_tester = Tester(self, self.family)  # type: ignore[arg-type]


def _suite(family: str) -> type[unittest.TestCase]:
    """Make the class of a family's tests."""
    model = getattr(transformers, TINY[family].model)
    base = getattr(transformers, TINY[family].model.replace("ForConditionalGeneration", "Model"))
    members = {"family": family, "all_model_classes": (base, model), "__module__": __name__}
    return type(f"Test_{family}", (Common, unittest.TestCase), members)


Test_qwen2_vl = _suite("qwen2_vl")
Test_qwen2_5_vl = _suite("qwen2_5_vl")
Test_qwen3_vl = _suite("qwen3_vl")
