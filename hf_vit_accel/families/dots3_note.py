"""dots3.

Differs from Qwen2-VL: norms of the heads of q and k, a norm inside the patch embedding and a final norm. The MLP is a
SwiGLU without biases, or a mixture of experts.
"""

from __future__ import annotations

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import Family, Parts, Tower, qwen_parts


def _parts(tower: Tower) -> Parts:
    embed = tower.patch_embed
    return qwen_parts(tower, patch_embed=embed.proj, embed_norm=embed.norm, final_norm=tower.norm, around=(embed,))


FAMILY = Family(
    name="dots3_note",
    towers=(("transformers.models.dots3_note.modeling_dots3_note", "Dots3NoteVisionModel"),),
    geometry=qwen2_vl.geometry,
    parts=_parts,
    arguments=("pixel_values", "grid_thw"),
    tiny=dict(
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=40,
        moe_intermediate_size=8,
        mlp_layer_types=["dense", "sparse", "dense", "dense"],
        per_layer_config={1: {"num_local_experts": 4, "num_experts_per_tok": 2}},
        adapter_in_dim=32,
        adapter_out_dim=32,
        patch_size=2,
        spatial_merge_size=2,
    ),
)
