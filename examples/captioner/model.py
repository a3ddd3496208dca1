"""Caption batches of decoded items with a model, and encode each picture once for all its prompts."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    ProcessorMixin,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import is_torchvision_available
from transformers.utils.logging import disable_progress_bar
from transformers.video_utils import VideoMetadata

import hf_vit_accel
from captioner.files import say

_PIXELS = frozenset({"pixel_values", "pixel_values_videos"})
_SMALLEST = 1e-300  # a uniform sample of 0 has no logarithm
Inputs = dict[str, Any]
"""Inputs of the model: tensors by name, and under "arrived" the event that ends their way to the GPU."""


def load_model(model: str, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> PreTrainedModel:
    """Load a model in evaluation mode."""
    disable_progress_bar()
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, revision=revision)
    return loaded.to(device).eval()


def why_not_on_gpu(processor: ProcessorMixin, device: torch.device) -> list[str]:
    """List the reasons why pictures cannot be prepared on the GPU."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"the model is on {device.type}")
    if not is_torchvision_available():
        reasons.append("it needs torchvision (pip install torchvision)")
    elif getattr(processor.image_processor, "backend", "torchvision") != "torchvision":
        reasons.append(f"{type(processor.image_processor).__name__} runs on the CPU only")
    return reasons


@dataclass(frozen=True)
class Clip:
    """A decoded video: its sampled frames and their metadata, as transformers' video processors take them."""

    frames: np.ndarray
    metadata: VideoMetadata


def _cpu() -> torch.device:
    return torch.device("cpu")


@dataclass(frozen=True)
class Absent:
    """Stand in for a model in another process, with what preparing its inputs needs to know."""

    dtype: torch.dtype
    device: torch.device = field(default_factory=_cpu)


@dataclass(frozen=True)
class Caption:
    """The text that the model generated, and its number of tokens."""

    text: str
    tokens: int


class _Sampler(LogitsProcessor):
    """Turn the greedy choice into a sample: add Gumbel noise, drawn for every row by itself.

    The largest of logits + Gumbel noise is distributed as softmax (Gumbel, 1954).
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = []
        for generator in self.generators:
            row = torch.rand(scores.shape[1], generator=generator, device=scores.device, dtype=torch.float64)
            rows.append(row.clamp_min(_SMALLEST))
        noise = torch.stack(rows)
        return scores.double() - torch.log(-torch.log(noise))  # type: ignore[return-value]


@dataclass
class Captioner:
    """A model and its processor, with all settings that decide the captions."""

    model: PreTrainedModel | Absent
    processor: ProcessorMixin
    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy; above, every record samples with a seed of its own
    top_p: float = 1.0
    seed: int = 0
    decode_graphs: bool = False
    pictures_on: torch.device = field(default_factory=_cpu)  # resizes pictures and cuts them into patches
    patching: dict[str, Any] = field(default_factory=dict)  # the arguments of `patch`
    _threads: threading.local = field(default_factory=threading.local, repr=False)
    _has_reported_stock: bool = field(default=False, repr=False)
    _has_freed_graphs: bool = field(default=False, repr=False)

    def encode(self, media: Sequence[Image.Image | Clip], prompts: Sequence[str]) -> Inputs:
        """Make the model's inputs: pictures (or one clip) with a prompt each, and pixels in the model's dtype.

        Pictures are prepared on `pictures_on`, or on the CPU where its memory is full.
        """
        for device in (self.pictures_on, _cpu()):
            with suppress(torch.OutOfMemoryError), self._own_stream():
                inputs = self._process(media, prompts, device)
                for name in _PIXELS & inputs.keys():  # the tower would round them in the same way
                    inputs[name] = inputs[name].to(self.model.dtype)
                return inputs
        raise torch.OutOfMemoryError("no memory for the pixels of a batch")

    def send(self, inputs_by_prompt: Sequence[Inputs]) -> list[Inputs]:
        """Start to copy the inputs of one batch to the GPU, with one copy of the pixels for all prompts.

        The copy runs from pinned memory beside the work there. If memory is full, the inputs stay where they are.
        """
        if not inputs_by_prompt:
            return []
        first = inputs_by_prompt[0]
        pixels = {name: first[name] for name in _PIXELS & first.keys()}
        shared = [dict(inputs) | pixels for inputs in inputs_by_prompt]
        if self.model.device.type != "cuda":
            return shared
        try:
            with self._own_stream() as stream:
                moved_pixels = {name: self._move(value) for name, value in pixels.items()}
                sent = []
                for inputs in shared:
                    texts = {name: self._move(value) for name, value in inputs.items() if name not in pixels}
                    sent.append(moved_pixels | texts)
                sent[0]["arrived"] = stream.record_event()
                return sent
        except torch.OutOfMemoryError:
            return shared

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.is_cuda else value.pin_memory().to(self.model.device, non_blocking=True)

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Run on a stream of this thread on the model's GPU; without a GPU do nothing."""
        if self.model.device.type != "cuda":
            yield None
            return
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self.model.device)
        with torch.cuda.stream(self._threads.stream):
            yield self._threads.stream

    def _process(self, media: Sequence[Image.Image | Clip], prompts: Sequence[str], device: torch.device) -> Inputs:
        clips = [medium for medium in media if isinstance(medium, Clip)]
        kind = "video" if clips else "image"
        texts = []
        for prompt in prompts:
            content = [{"type": kind}, {"type": "text", "text": prompt}]
            message = {"role": "user", "content": content}
            texts.append(self.processor.apply_chat_template([message], add_generation_prompt=True))
        if not clips:
            placement = {} if device.type == "cpu" else {"device": device}
            return self.processor(text=texts, images=list(media), padding=True, return_tensors="pt", **placement)
        return self.processor(
            text=texts,
            videos=[clip.frames for clip in clips],
            video_metadata=[clip.metadata for clip in clips],
            do_sample_frames=False,
            padding=True,
            return_tensors="pt",
        )

    def vision_tokens(self, inputs: Inputs) -> int:
        """Count the merged tokens of all pictures or videos in the model's inputs."""
        patches = sum(int(grid.prod(-1).sum()) for name, grid in inputs.items() if name.endswith("_grid_thw"))
        return patches // self.processor.image_processor.merge_size**2

    def generate(self, inputs_by_prompt: Sequence[Inputs], seeds: Sequence[Sequence[int]]) -> list[list[Caption]]:
        """Generate the captions of one batch.

        The tower runs once if transformers lets `generate` take its outputs. Otherwise it runs once per prompt, unless
        the model is patched with `reuse_for`. If memory runs out, the graphs of decoding are freed for a second try.
        """
        try:
            captions = self._generate_batch(inputs_by_prompt, seeds)
        except torch.OutOfMemoryError:
            if not self.decode_graphs or self._has_freed_graphs:
                raise
            captions = None
        if captions is None:  # outside of the handler, because its traceback keeps the tensors of the first try alive
            self._free_graphs()
            self._has_freed_graphs = True
            captions = self._generate_batch(inputs_by_prompt, seeds)
        self._has_freed_graphs = False
        self._report_stock()
        return captions

    @torch.inference_mode()
    def _generate_batch(
        self, inputs_by_prompt: Sequence[Inputs], seeds: Sequence[Sequence[int]]
    ) -> list[list[Caption]]:
        encoded: Inputs | None = None
        captions: list[list[Caption]] = []
        for inputs, row_seeds in zip(inputs_by_prompt, seeds, strict=True):
            on_device = self._on_device(inputs)
            if len(inputs_by_prompt) > 1 and takes_encoded(self.model):
                encoded = encoded or self._encode(on_device)
                on_device = {name: value for name, value in on_device.items() if name not in _PIXELS}
                on_device["mm_encoder_outputs"] = dict(encoded)
            captions.append(self._generate(on_device, row_seeds))
        return captions

    def _free_graphs(self) -> None:
        hf_vit_accel.unpatch(self.model)
        hf_vit_accel.patch(self.model, **self.patching)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _report_stock(self) -> None:
        """Print once that stock decodes some captions, with the reasons."""
        if not self.decode_graphs or self._has_reported_stock:
            return
        decoding = hf_vit_accel.status(self.model).decoding
        if decoding is not None and " by stock (" in decoding:
            say(f"stock decodes some captions: {decoding}")
            self._has_reported_stock = True

    def _on_device(self, inputs: Inputs) -> Inputs:
        """Return the inputs on the model's device, once their copy has arrived."""
        tensors = {name: value for name, value in inputs.items() if name != "arrived"}
        if "arrived" in inputs:
            stream = torch.cuda.current_stream(self.model.device)
            stream.wait_event(inputs["arrived"])
            for value in tensors.values():
                value.record_stream(stream)  # its memory was allocated on another stream: keep it until this one ends
        # `inputs.to` would move them in place, but after running out of memory the caller needs its inputs.
        return {name: value.to(self.model.device) for name, value in tensors.items()}

    def _encode(self, inputs: Inputs) -> Inputs:
        if "pixel_values" in inputs:
            features = self.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
            return {"image": features}
        features = self.model.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
        )
        return {"video": features}

    def _generate(self, inputs: Inputs, seeds: Sequence[int]) -> list[Caption]:
        samplers = LogitsProcessorList()
        if self.temperature > 0:
            samplers.append(TemperatureLogitsWarper(self.temperature))
            if self.top_p < 1:
                samplers.append(TopPLogitsWarper(self.top_p))
            samplers.append(_Sampler(seeds, self.model.device))
        decoding = {"custom_generate": hf_vit_accel.graphed_decoding} if self.decode_graphs else {}
        tokens = self.model.generate(
            **inputs,
            **decoding,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            logits_processor=samplers,
        )
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        tokenizer = self.processor.tokenizer
        texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        captions = []
        for text, row in zip(texts, new_tokens.cpu(), strict=True):
            captions.append(Caption(text.strip(), int((row != tokenizer.pad_token_id).sum())))
        return captions

    def seed_of(self, key: str, prompt: str) -> int:
        """Return the seed of a record. It does not depend on the batch, process or run that makes the record."""
        digest = hashlib.sha256(f"{self.seed}\0{key}\0{prompt}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def takes_encoded(model: PreTrainedModel) -> bool:
    """Tell whether `generate` takes the outputs of the tower (transformers 5.18 and later)."""
    return "mm_encoder_outputs" in inspect.signature(type(model).forward).parameters


def reuse_for(model: PreTrainedModel, prompts: Sequence[str]) -> hf_vit_accel.ReuseConfig | bool:
    """Return the `reuse` to patch a model with, so that a picture is encoded once for all prompts."""
    return hf_vit_accel.ReuseConfig(across_calls=True) if len(prompts) > 1 and not takes_encoded(model) else False
