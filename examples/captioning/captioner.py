"""A model with its processor: batches of decoded items to captions, each picture encoded once for all its prompts."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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

from hf_vit_accel import ReuseConfig

__all__ = [
    "Absent",
    "Caption",
    "Captioner",
    "Clip",
    "load_model",
    "reuse_for",
    "takes_encoded",
    "why_not_on_gpu",
]


def load_model(model: str, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> Any:
    """The model, ready to caption."""
    disable_progress_bar()
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, revision=revision)
    return loaded.to(device).eval()


def why_not_on_gpu(processor: Any, device: torch.device) -> list[str]:
    """Everything that stands against preparing pictures on the GPU."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"the model is on {device.type}")
    if not is_torchvision_available():
        reasons.append("it needs torchvision (pip install torchvision)")
    elif getattr(processor.image_processor, "backend", "torchvision") != "torchvision":
        reasons.append(f"{type(processor.image_processor).__name__} runs on the CPU only")
    return reasons


_PIXELS = frozenset({"pixel_values", "pixel_values_videos"})


@dataclass(frozen=True)
class Clip:
    """A decoded video: its sampled frames and their metadata, as transformers' video processors take them."""

    frames: Any
    metadata: Any


@dataclass(frozen=True)
class Absent:
    """In the place of a model that is in another process: what making its inputs asks of it."""

    dtype: torch.dtype
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))


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

    model: PreTrainedModel | Absent
    processor: ProcessorMixin
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    pictures_on: torch.device = field(default_factory=partial(torch.device, "cpu"))
    _threads: threading.local = field(default_factory=threading.local, repr=False)

    def encode(self, seen: Sequence[Image.Image | Clip], prompts: Sequence[str]) -> Any:
        """The model's inputs: each picture (or the one clip) with its prompt, pixels in the model's dtype.

        Pictures are prepared on `pictures_on`, or on the CPU where its memory is full.
        Raises ValueError for what the processor refuses, as aspect ratios above 200.
        """
        for device in (self.pictures_on, torch.device("cpu")):
            with suppress(torch.OutOfMemoryError), self._beside():
                inputs = self._process(seen, prompts, device)
                for name in _PIXELS & inputs.keys():  # the tower rounds them the same way, later
                    inputs[name] = inputs[name].to(self.model.dtype)
                return inputs
        raise torch.OutOfMemoryError("no memory for the pixels of a batch")

    def send(self, inputs: Sequence[Any]) -> list[Any]:
        """One batch's inputs for several prompts: of the pixels only one copy, and that on its way to the GPU.

        From pinned memory and beside the work there: nobody waits. Memory that is full leaves them where they are.
        """
        shared = {name: inputs[0][name] for name in _PIXELS & inputs[0].keys()} if inputs else {}
        inputs = [dict(each) | shared for each in inputs]
        if self.model.device.type != "cuda" or not inputs:
            return inputs
        try:
            with self._beside() as stream:
                moved = {name: self._move(value) for name, value in shared.items()}
                sent = [
                    {name: moved[name] if name in moved else self._move(x) for name, x in i.items()} for i in inputs
                ]
                sent[0]["arrived"] = stream.record_event()
                return sent
        except torch.OutOfMemoryError:
            return inputs

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.is_cuda else value.pin_memory().to(self.model.device, non_blocking=True)

    @contextmanager
    def _beside(self) -> Iterator[Any]:
        """A stream of this thread's own, on the model's GPU; elsewhere nothing."""
        if self.model.device.type != "cuda":
            yield None
            return
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self.model.device)
        with torch.cuda.stream(self._threads.stream):
            yield self._threads.stream

    def _process(self, seen: Sequence[Image.Image | Clip], prompts: Sequence[str], device: torch.device) -> Any:
        kind = "video" if isinstance(seen[0], Clip) else "image"
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": prompt}]}],
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        if kind == "image":
            where = {} if device.type == "cpu" else {"device": device}
            return self.processor(text=texts, images=list(seen), padding=True, return_tensors="pt", **where)
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

        The tower runs once if transformers lets `generate` take its outputs; else once per prompt, unless it was
        patched as `reuse_for` has it.
        """
        encoded: Mapping[str, Any] | None = None
        found = []
        for each, seeds_of_rows in zip(inputs, seeds, strict=True):
            each = dict(each)
            if (arrived := each.pop("arrived", None)) is not None:
                stream = torch.cuda.current_stream(self.model.device)
                stream.wait_event(arrived)
                for value in each.values():
                    value.record_stream(stream)  # made on another one: not to be used again before this one is done
            # Not `each.to`, which moves in place: after running out of memory the caller still holds `inputs`.
            each = {name: value.to(self.model.device) for name, value in each.items()}
            if len(inputs) > 1 and takes_encoded(self.model):
                encoded = encoded or self._encode(each)
                each = {name: value for name, value in each.items() if not name.startswith("pixel_values")}
                each["mm_encoder_outputs"] = dict(encoded)
            found.append(self._generate(each, seeds_of_rows))
        return found

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


def takes_encoded(model: Any) -> bool:
    """Whether `generate` takes what the tower made of pictures (transformers 5.18 and later)."""
    return "mm_encoder_outputs" in inspect.signature(type(model).forward).parameters


def reuse_for(model: Any, prompts: Sequence[str]) -> ReuseConfig | bool:
    """What `patch` is told so that a picture is encoded once for several prompts where transformers cannot."""
    return ReuseConfig(across_calls=True) if len(prompts) > 1 and not takes_encoded(model) else False
