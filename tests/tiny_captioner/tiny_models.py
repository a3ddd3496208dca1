"""Build and save the tiny captioners: their tokenizer, their configs and the files of a checkpoint.

The architectures are the real ones, but small. They have vision heads 80, 80 and 72 wide, windows and full layers,
deepstack, interpolated positions and M-RoPE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_vit_accel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scenes import WORDS

PROMPT_WORDS = (
    *("user", "assistant", "system", "describe", "this", "picture", "video"),
    *(".", ",", "?", "!", ":", "-", "<", ">", "seconds", "1"),
)
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|> {{ message['role'] }} \
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
MEAN = 0.5
STD = 0.5

Config = dict[str, Any]
"""The arguments of a config."""
_TEXT: Config = dict(
    hidden_size=160,
    intermediate_size=416,
    num_hidden_layers=4,
    num_attention_heads=5,
    num_key_value_heads=5,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
FAMILIES: dict[str, tuple[str, Config, Config]] = {
    "qwen2_vl": (
        "Qwen2VL",
        dict(depth=4, embed_dim=160, hidden_size=160, num_heads=2, mlp_ratio=2, patch_size=14),
        dict(_TEXT, rope_parameters=_MROPE),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(
            depth=4,
            hidden_size=160,
            num_heads=2,
            intermediate_size=212,
            out_hidden_size=160,
            patch_size=14,
            window_size=112,
            fullatt_block_indexes=[1, 3],
        ),
        dict(_TEXT, rope_parameters=_MROPE),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        dict(
            depth=4,
            hidden_size=144,
            num_heads=2,
            intermediate_size=288,
            out_hidden_size=160,
            patch_size=16,
            num_position_embeddings=256,
            deepstack_visual_indexes=[1],
        ),
        dict(_TEXT, intermediate_size=320, head_dim=32, rope_parameters=_MROPE | {"mrope_interleaved": True}),
    ),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for every word of the captions, Qwen's special tokens and a similar template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = dict.fromkeys([*WORDS, *PROMPT_WORDS, "<unk>", *SPECIAL_TOKENS])
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Build an untrained model in fp32."""
    prefix, vision, text = FAMILIES[family]
    token = tokenizer.convert_tokens_to_ids
    end = token("<|endoftext|>")
    # Qwen's checkpoints use the same tokens. The default ids belong to a vocabulary of 150,000 tokens.
    ids = {"bos_token_id": end, "eos_token_id": token("<|im_end|>"), "pad_token_id": end}
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=vision,
        text_config=text | ids | {"vocab_size": len(tokenizer)},
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, family: str, path: Path) -> None:
    """Save a checkpoint in bf16 with the files of tokenizer and processor, like those on the Hub."""
    prefix, vision, _ = FAMILIES[family]
    hf_vit_accel.unpatch(model).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    # transformers writes this default from 5.17 on, and earlier versions warn of it.
    config["vision_config"].pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    unit = 2 * vision["patch_size"]
    shared = {
        "processor_class": f"{prefix}Processor",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "size": {"shortest_edge": (4 * unit) ** 2, "longest_edge": (16 * unit) ** 2},
    }
    video = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": video}),
    ):
        (path / name).write_text(json.dumps(shared | kind, indent=2) + "\n")
