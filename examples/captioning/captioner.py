"""A model with its processor: batches of decoded items to captions, each picture encoded once for all its prompts."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import (
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    ProcessorMixin,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import is_torchvision_available

__all__ = ["Caption", "Captioner", "Clip", "fill", "halve_on_oom", "load_processor", "named"]


def load_processor(model_id: str) -> ProcessorMixin:
    """Loads the processor of a model, padding on the left as generation needs it, with or without torchvision.

    Without torchvision transformers has no video processors, and cannot build a processor that contains one; so the
    same class is then loaded without that part. Its image processor is the Pillow one.
    """
    if is_torchvision_available():
        processor = AutoProcessor.from_pretrained(model_id)
    else:

        class WithoutVideo(PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(model_id))]):  # type: ignore[misc]
            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in super().get_attributes() if name != "video_processor"]

        processor = WithoutVideo.from_pretrained(model_id)
    processor.tokenizer.padding_side = "left"
    return processor


_FIELD = re.compile(r"\{(\w+)\}")


def named(prompts: Iterable[str]) -> set[str]:
    """The fields that prompts name."""
    return {name for prompt in prompts for name in _FIELD.findall(prompt)}


def fill(prompt: str, fields: Mapping[str, Any]) -> str:
    """A prompt with `{field}` replaced; braces around anything but a word stay. ValueError for a field not there."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ValueError(f"the prompt names {{{match[1]}}}; there are {', '.join(sorted(fields))}")
        return str(fields[match[1]])

    return _FIELD.sub(value, prompt)


@dataclass(frozen=True)
class Clip:
    """A decoded video: its sampled frames and their metadata, as transformers' video processors take them."""

    frames: Any
    metadata: Any


@dataclass(frozen=True)
class Caption:
    """What the model wrote, and how many tokens."""

    text: str
    tokens: int


class _Sampler(LogitsProcessor):
    """Turns the greedy choice into a sample: adds Gumbel noise, each row its own, whatever stands in the batch with it.

    The largest of logits + Gumbel noise is distributed as softmax (Gumbel, 1954).
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise = torch.stack(
            [
                torch.rand(scores.shape[1], generator=g, device=scores.device, dtype=torch.float64)
                for g in self.generators
            ]
        )
        return scores.double() - torch.log(-torch.log(noise.clamp_min(1e-300)))  # type: ignore[return-value]


@dataclass
class Captioner:
    """A model and its processor, with everything that decides what the captions are.

    temperature 0 is greedy; above, every record samples with a seed of its own, made of `seed`, its key and its prompt.
    """

    model: PreTrainedModel
    processor: ProcessorMixin
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def encode(self, seen: Sequence[Image.Image | Clip], prompts: Sequence[str]) -> Any:
        """The model's inputs on the CPU: each picture (or the one clip) with its prompt.

        Raises ValueError for what the processor refuses, as aspect ratios above 200.
        """
        kind = "video" if isinstance(seen[0], Clip) else "image"
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": prompt}]}],
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        if kind == "image":
            return self.processor(text=texts, images=list(seen), padding=True, return_tensors="pt")
        return self.processor(
            text=texts,
            videos=[clip.frames for clip in seen],  # type: ignore[union-attr]
            video_metadata=[clip.metadata for clip in seen],  # type: ignore[union-attr]
            do_sample_frames=False,
            padding=True,
            return_tensors="pt",
        )

    def vision_tokens(self, inputs: Mapping[str, Any]) -> int:
        """The merged tokens of all pictures or videos in a model's inputs."""
        patches = sum(int(grid.prod(-1).sum()) for name, grid in inputs.items() if name.endswith("_grid_thw"))
        return patches // self.processor.image_processor.merge_size**2

    @torch.inference_mode()
    def generate(self, inputs: Sequence[Any], seeds: Sequence[Sequence[int]]) -> list[list[Caption]]:
        """Captions of one batch: per prompt its inputs (of the same pictures) and a seed for every row.

        The tower runs once if transformers lets `generate` take its outputs (5.18 and later), else once per prompt.
        """
        encoded: Mapping[str, Any] | None = None
        found = []
        for each, seeds_of_rows in zip(inputs, seeds, strict=True):
            # Not `each.to`, which moves in place: after running out of memory the caller still holds `inputs`.
            each = {name: value.to(self.model.device) for name, value in each.items()}
            if len(inputs) > 1 and self._takes_encoded():
                encoded = encoded or self._encode(each)
                each = {name: value for name, value in each.items() if not name.startswith("pixel_values")}
                each["mm_encoder_outputs"] = dict(encoded)
            found.append(self._generate(each, seeds_of_rows))
        return found

    def _takes_encoded(self) -> bool:
        return "mm_encoder_outputs" in inspect.signature(type(self.model).forward).parameters

    def _encode(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if "pixel_values" in inputs:
            encode, pixels, grid = self.model.get_image_features, "pixel_values", "image_grid_thw"
            return {"image": encode(inputs[pixels], inputs[grid], return_dict=True)}
        encode, pixels, grid = self.model.get_video_features, "pixel_values_videos", "video_grid_thw"
        return {"video": encode(inputs[pixels], inputs[grid], return_dict=True)}

    def _generate(self, inputs: Mapping[str, Any], seeds: Sequence[int]) -> list[Caption]:
        samplers = LogitsProcessorList()
        if self.temperature > 0:
            samplers.append(TemperatureLogitsWarper(self.temperature))
            if self.top_p < 1:
                samplers.append(TopPLogitsWarper(self.top_p))
            samplers.append(_Sampler(seeds, self.model.device))
        tokens = self.model.generate(
            **inputs, max_new_tokens=self.max_new_tokens, do_sample=False, logits_processor=samplers
        )
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        tokenizer = self.processor.tokenizer
        texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        pad = tokenizer.pad_token_id
        return [
            Caption(text.strip(), int((row != pad).sum())) for text, row in zip(texts, new_tokens.cpu(), strict=True)
        ]

    def seed_of(self, key: str, prompt: str) -> int:
        """The seed of a record: the same in whatever batch, process or run it is made."""
        digest = hashlib.sha256(f"{self.seed}\0{key}\0{prompt}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def halve_on_oom(run: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
    """`run(rows)`, or in halves where the memory does not hold all; one row alone that is too large gives its error.

    Only torch's own out-of-memory error counts: a CUDNN_STATUS_NOT_SUPPORTED is no smaller for half a batch.
    """
    try:
        return run(rows)
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            return [error.with_traceback(None)]
    # Outside of the handler, whose traceback keeps the failed batch's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(rows) // 2
    return [*halve_on_oom(run, rows[:middle]), *halve_on_oom(run, rows[middle:])]
