"""Add the shapes of other families' towers to those that the package times by name."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_vit_accel.tools.bench import SHAPES

_OMNI = {key: value for key, value in SHAPES["qwen2.5-vl-7b"][1].items() if key != "out_hidden_size"}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # The defaults of the configs in transformers, whose docstrings name the checkpoint.
    "qwen3.5": ("qwen3_5", {}),  # Qwen3-VL-8B's without deepstack
    "glm-ocr": ("glm_ocr", {}),
    "glm-4.1v-9b": ("glm4v", {}),
    "glm-4.5v": ("glm4v_moe", {}),
    "glm-5.3-flash": ("glm5_next", {}),
    "paddleocr-vl": ("paddleocr_vl", {}),
    "ernie-4.5-vl": ("ernie4_5_vl_moe", {}),
    "dots3-note": ("dots3_note", {}),
    # The defaults of the next two have a width of 3584, which no tower has. Omni's tower is Qwen2.5-VL's
    # (windows of 112, MLPs of 3420, head dim 80). EXAONE's shape is not published: assumed the same, 8 heads of keys.
    "qwen2.5-omni-7b": ("qwen2_5_omni_thinker", _OMNI | dict(out_hidden_size=3584)),
    "exaone-4.5": ("exaone4_5", _OMNI | dict(out_hidden_size=5120)),
}
SHAPES.update({model: shape for model, shape in OTHERS.items() if shape[0] in CONFIG_MAPPING})
