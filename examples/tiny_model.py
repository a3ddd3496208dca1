"""Builds a tiny Qwen3-VL with random weights, so that the examples run offline, on any machine, in seconds.

The architecture is the real one, only small: 72-wide vision heads, interpolated position embeddings, deepstack, M-RoPE.
The folder has the layout of a checkpoint from the Hub: its processor is written as plain JSON, not with
`save_pretrained`, because the processor classes cannot be built where torchvision is missing.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# One token per word: captions stay readable, and equal captions mean equal tokens.
WORDS = """a an and at above astronaut bright blue cat coffee cup dark Describe describe dog field floor galaxy garden
grass green grey house in image is its lake large light man many moon mountain near of old on one open
orange person photograph picture red river road rocket sky small spoon star street sun table tall the this three tower
tree tripod two under warm water white window with woman yellow . , ? ! : - user assistant system"""
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|> {{ message['role'] }} \
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
# Shared by the image and the video processor; `size` bounds the pixels of a whole picture or clip after resizing.
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64**2, "longest_edge": 512**2},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a word-level tokenizer with Qwen's special tokens and a Qwen-like chat template."""
    vocabulary = {token: index for index, token in enumerate((*WORDS.split(), "<unk>", *SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """Makes the model, in fp32 on the CPU; the same weights for the same seed."""
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        vision_config={
            "depth": 4,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 288,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 2],
            "num_position_embeddings": 2304,
            "initializer_range": 0.1,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 8192,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = token_id("<|endoftext|>")
    model.generation_config.eos_token_id = token_id("<|im_end|>")
    model.generation_config.repetition_penalty = 1.3  # greedy decoding of random weights would soon repeat one word
    return model


def build(path: Path, seed: int = 0) -> Path:
    """Saves the model and the files of its processor under `path`; returns `path`."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(path)
    tokenizer.save_pretrained(path)
    images = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | images, indent=2))
    (path / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR | videos, indent=2))
    return path


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("build/tiny_model"),
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Build the tiny random-weight Qwen3-VL and save it."""
    print(build(output, seed))


if __name__ == "__main__":
    typer.run(main)
