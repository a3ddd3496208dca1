"""dots.ocr and dots.mocr. Their checkpoints bring the tower as remote code.

`patch(model, like={"DotsVisionTransformer": "dots_ocr"})` serves it.
Differs from Qwen2-VL: RMSNorm, a SwiGLU without biases, a norm inside the patch embedding and one before the merger.
A convolution embeds patches of a single frame.
"""

from __future__ import annotations

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import Family, Parts, Tower, qwen_parts
from hf_vit_accel.layout import Geometry


def _geometry(tower: Tower) -> Geometry:
    frames = tower.patch_embed.patchifier.temporal_patch_size
    if frames != 1:  # the convolution would read the first frame of a patch only
        raise ValueError(f"a patch has {frames} frames, where 1 is known")
    return qwen2_vl.geometry(tower)


def _parts(tower: Tower) -> Parts:
    embed = tower.patch_embed.patchifier
    final_norm = getattr(tower, "post_trunk_norm", None)
    around = tower.patch_embed, embed
    return qwen_parts(
        tower,
        patch_embed=embed.proj,
        projection=embed.proj,
        embed_norm=embed.norm,
        final_norm=final_norm,
        around=around,
    )


FAMILY = Family(
    name="dots_ocr",
    towers=(),
    geometry=_geometry,
    parts=_parts,
    # Without it, the tower casts pixels to bf16, whatever the dtype of its weights.
    options_of_proof={"bf16": False},
)
