"""Tiny composite models of the families that `tiny.py` lacks: a text model of two layers around the tower's `tiny`."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import transformers
from tiny import randomise

from hf_vit_accel.families import FAMILIES
from support.attention_only import TINY as ATTENTION_ONLY

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WHOLE = _ROPE | {"partial_rotary_factor": 1.0}
_TEXT = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_MLA = dict(num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=4)
_ADAPTER = dict(out_hidden_size=32, projector_hidden_size=32)
_AUDIO = dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, output_dim=32)


@dataclass(frozen=True)
class Composite:
    """How to build one tiny composite."""

    name: str  # of its classes, without what follows
    text: dict[str, Any] = field(default_factory=dict)  # fields of the text config
    fields: dict[str, Any] = field(default_factory=dict)  # other fields of the config
    by_name: bool = True  # a plain name loads it; for one, transformers replaces any that contains "flash"
    model_name: str = ""  # of the model's class, where it is another

    @property
    def model(self) -> str:
        return f"{self.model_name or self.name}ForConditionalGeneration"

    @property
    def config(self) -> str:
        return f"{self.name}Config"

    def build(self) -> tuple[Any, Any]:
        """Return its class and config; skip the test where this transformers lacks the class."""
        kind = getattr(transformers, self.config, None)
        if kind is None or not hasattr(transformers, self.model):
            pytest.skip(f"this transformers has no {self.model}")
        standard = kind()
        text = type(standard.text_config)
        config = kind(
            vision_config=_vision(standard.vision_config),
            text_config=text(**tiny_fields(text) | self.text).to_dict(),
            **copy.deepcopy(self.fields),
        )
        return getattr(transformers, self.model), config

    def make(self, **kwargs: object) -> Any:
        """Build it in eval mode with random weights, which are the same every time."""
        kind, config = self.build()
        return randomise(kind._from_config(config, **kwargs).eval())


def tiny_fields(text: type) -> dict[str, Any]:
    """Return the sizes of a tiny text model that a class of configs knows."""
    known = {name for base in text.__mro__ for name in getattr(base, "__annotations__", ())}
    return {name: value for name, value in _TEXT.items() if name in known}


def _vision(config: Any) -> dict[str, Any]:
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    towers = [(family, name) for family in FAMILIES for module, name in family.towers if module == home]
    family, name = towers[0]
    return dict(copy.deepcopy(ATTENTION_ONLY[name].config if family.attention_only else family.tiny))


_LINEAR = dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    shared_expert_intermediate_size=16,
    rope_parameters=_WHOLE,
)
_MINICPM = dict(insert_layer_id=1, image_token_id=60, video_token_id=61)
_INKLING = dict(
    unpadded_vocab_size=64,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    layer_types=["hybrid_sliding", "hybrid"],
)
_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)

COMPOSITES = {
    "qwen3_5": Composite("Qwen3_5", _LINEAR),
    "qwen3_5_moe": Composite("Qwen3_5Moe", _LINEAR),
    "qwen4_exp": Composite("Qwen4Exp", _LINEAR | _INDEXER),
    "qwen3_omni_moe": Composite(
        "Qwen3OmniMoeThinker",
        dict(rope_parameters=_ROPE),
        dict(
            audio_config=_AUDIO | dict(downsample_hidden_size=8),
            vision_start_token_id=60,
            vision_end_token_id=61,
            audio_start_token_id=62,
        ),
    ),
    "cohere_compass": Composite("CohereCompass", dict(rope_parameters={"full_attention": _ROPE})),
    "hyperclovax_vision_v2": Composite("HyperCLOVAXVisionV2"),
    "glm_ocr": Composite("GlmOcr", dict(rope_parameters=_ROPE)),
    "glm4v": Composite("Glm4v", dict(rope_parameters=_ROPE)),
    "glm4v_moe": Composite("Glm4vMoe", dict(rope_parameters=_WHOLE)),
    "glm46v": Composite("Glm46V", dict(rope_parameters=_WHOLE)),
    "glm5_next": Composite(
        "Glm5Next",
        _MLA
        | dict(
            num_hidden_layers=4, qk_rope_head_dim=0, head_dim=0, q_lora_rank=8, linear_num_heads=4, linear_head_dim=8
        )
        | dict(index_n_heads=2, index_head_dim=8),
    ),
    "paddleocr_vl": Composite("PaddleOCRVL", dict(rope_parameters=_ROPE)),
    "qwen2_5_omni": Composite(
        "Qwen2_5OmniThinker",
        dict(rope_parameters=_ROPE),
        dict(audio_config=_AUDIO, vision_start_token_id=60, vision_end_token_id=61),
    ),
    "exaone4_5": Composite("Exaone4_5_"),
    "ernie4_5_vl_moe": Composite(
        "Ernie4_5_VLMoe",
        dict(
            moe_intermediate_size=[16, 16],
            moe_num_experts=4,
            moe_k=2,
            rope_parameters=_ROPE | {"mrope_section": [1, 1, 2]},
        ),
    ),
    "dots3_note": Composite(
        "Dots3Note",
        _MLA | dict(q_lora_rank=8, use_sliding_window=False, use_dsa=False),
        dict(
            audio_config=dict(
                num_hidden_layers=1,
                hidden_size=32,
                intermediate_size=32,
                num_attention_heads=4,
                downsample_hidden_size=8,
                adapter_input_size=32,
                adapter_out_dim=32,
            )
        ),
    ),
    "hy_v4_vl": Composite(
        "HYV4VL",
        _MLA
        | dict(q_lora_rank=8, qk_rope_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=8)
        | dict(rope_parameters=_ROPE),
    ),
    "lfm3_vl": Composite("Lfm3Vl", dict(layer_types=["conv", "full_attention"]), dict(projector_hidden_size=32)),
    "video_llama_3": Composite("VideoLlama3"),
    "kimi_k25": Composite("Kimi_K25", _MLA | dict(q_lora_rank=None)),
    "glm_image": Composite(
        "GlmImage", dict(rope_parameters=_ROPE), dict(vq_config=dict(embed_dim=8, num_embeddings=8, latent_channels=8))
    ),
    "minimax_m3_vl": Composite("MiniMaxM3VL", model_name="MiniMaxM3Sparse", by_name=False),
    "muse_glimmer": Composite("MuseGlimmer", fields=_ADAPTER),
    "muse_spark": Composite(
        "MuseSpark", fields=_ADAPTER | dict(audio_config=dict(hidden_sizes=[8] * 4, depths=[1] * 4, out_hidden_size=32))
    ),
    "hunyuan_vl": Composite(
        "HunYuanVL",
        dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}),
    ),
    "minicpmv4_6": Composite("MiniCPMV4_6", _LINEAR, _MINICPM),
    "minicpmv4_7": Composite("MiniCPMV4_7", _LINEAR, _MINICPM),
    "minicpm_ocr": Composite("MiniCPMOcr", _LINEAR, _MINICPM),
    "inkling2": Composite("Inkling2", _INKLING),
    "inkling2_loop": Composite("Inkling2Loop", _INKLING),
    "cosmos3_edge": Composite("Cosmos3Edge", dict(rope_parameters=_ROPE)),
}


LINEAR = {"qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr"}
"""Composites whose text models have layers of linear attention."""
