"""Qwen3.5, Qwen3.6 (dense and MoE) and Qwen4-Exp.

Differs from Qwen2-VL as Qwen3-VL does, but without deepstack.
"""

from __future__ import annotations

from hf_vit_accel.families import qwen3_vl
from hf_vit_accel.families.base import TINY, Family

FAMILY = Family(
    name="qwen3_5",
    towers=(
        ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"),
        ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"),
        ("transformers.models.qwen4_exp.modeling_qwen4_exp", "Qwen4ExpVisionModel"),
    ),
    geometry=qwen3_vl.geometry,
    tiny=dict(TINY, out_hidden_size=16, num_position_embeddings=36),
)
