"""Qwen2.5-VL, Qwen2.5-Omni, EXAONE 4.5.

Differs from Qwen2-VL: RMSNorm, a SwiGLU MLP, and most layers attend per window of 112 x 112 pixels. Rows are reordered
window by window, and the merger's output back. Omni has three Linears for q, k and v. EXAONE has fewer heads of k
and v.
"""

from __future__ import annotations

from hf_vit_accel.families.base import Family, Tower
from hf_vit_accel.layout import Geometry


def _geometry(tower: Tower) -> Geometry:
    merge = tower.spatial_merge_size
    return Geometry(merge=merge, window=tower.window_size // merge // tower.patch_size)


FAMILY = Family(
    name="qwen2_5_vl",
    towers=(
        ("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
        ("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "Qwen2_5OmniVisionEncoder"),
        ("transformers.models.exaone4_5.modeling_exaone4_5", "Exaone4_5_VisionModel"),
    ),
    geometry=_geometry,
    windows=True,
    tiny=dict(
        depth=4,
        hidden_size=64,
        num_heads=4,
        num_key_value_heads=2,
        intermediate_size=44,
        out_hidden_size=16,
        patch_size=2,
        spatial_merge_size=2,
        window_size=16,
        fullatt_block_indexes=[1, 3],
    ),
)
