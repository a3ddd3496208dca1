"""Encode decoded items for a model, and generate their captions."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
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
from captioner.batches import Bounds, Inputs, joined

PIXELS = frozenset({"pixel_values", "pixel_values_videos"})
_SHARE_OF_MEMORY = 0.7  # for caches, pixels and features of batches; the rest is for forwards and graphs
_SHARE_OF_PIXELS = 0.35  # for pixels and features, where `graphed_decoding` plans the cache
_TAKES_FEATURES = Version(transformers.__version__) >= Version("5.4")  # as `graphed_decoding`
_SMALLEST = 1e-300  # a uniform sample of 0 has no logarithm


def load_model(model: str, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> PreTrainedModel:
    disable_progress_bar()
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, revision=revision)
    return loaded.to(device).eval()


@dataclass(frozen=True)
class Clip:
    """A decoded video: its sampled frames and their metadata, as transformers' video processors take them."""

    frames: np.ndarray
    metadata: VideoMetadata


Medium = Image.Image | torch.Tensor | Clip  # a picture, its bytes (H, W, 3), or a clip


def _channels_first(medium: Medium, device: torch.device) -> Medium:
    """Move the bytes of a picture to a device, as (3, H, W). A GPU turns them in no time."""
    return medium.to(device).permute(2, 0, 1).contiguous() if isinstance(medium, torch.Tensor) else medium


@dataclass(frozen=True)
class Caption:
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

    model: PreTrainedModel
    processor: ProcessorMixin
    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy; above, every record samples with a seed of its own
    top_p: float = 1.0
    seed: int = 0
    patching: dict[str, Any] | None = field(default_factory=dict)  # arguments of `patch`; None for a stock model
    _may_hold_graphs: bool = field(default=False, repr=False)
    _encodes_ahead: bool = field(default=False, repr=False)  # by our forward, which takes the grid on the CPU

    def __post_init__(self) -> None:
        if self.patching is not None:
            hf_vit_accel.patch(self.model, **self.patching)
            self._encodes_ahead = _TAKES_FEATURES and not hf_vit_accel.status(self.model).towers[0].attention_only

    @property
    def prepares_on_gpu(self) -> bool:
        """Tell whether pictures are resized and cut into patches on the GPU, which takes torchvision's processors."""
        has_torchvision = getattr(self.processor.image_processor, "backend", "torchvision") == "torchvision"
        return self.model.device.type == "cuda" and is_torchvision_available() and has_torchvision

    def bounds(self, items: int | None = None) -> Bounds:
        """Return the bounds of batches: what the GPU's free memory holds, and at most as many items as the user says.

        Stock prefills and decodes all rows at once, padded to the longest. Ours wait for room, unless they are sampled.
        """
        if self.patching is None or self.model.device.type != "cuda":
            return Bounds(items=items or 64, tokens=16384, new_tokens=self.max_new_tokens)
        free, _ = torch.cuda.mem_get_info(self.model.device)
        free += torch.cuda.memory_reserved(self.model.device) - torch.cuda.memory_allocated(self.model.device)
        waits = self.temperature == 0 and _TAKES_FEATURES and 8 < self.max_new_tokens <= 1024
        text = self.model.config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        keys_and_values = 2 * text.num_hidden_layers * text.num_key_value_heads * width
        return Bounds(
            items=items or (1024 if waits else 256),
            tokens=sys.maxsize,
            nbytes=(_SHARE_OF_PIXELS if waits else _SHARE_OF_MEMORY) * free,
            slot_bytes=0 if waits else keys_and_values * self.model.dtype.itemsize,
            token_bytes=self._vision_token_bytes(),
            new_tokens=self.max_new_tokens,
        )

    def _vision_token_bytes(self) -> int:
        """Return the bytes of pixels and features of one vision token.

        A batch has its pixels in the model's dtype, and so has the next one. Features are kept, and joined from parts.
        """
        images = self.processor.image_processor
        values = 3 * images.temporal_patch_size * (images.patch_size * images.merge_size) ** 2
        features = 1 + len(getattr(self.model.config.vision_config, "deepstack_visual_indexes", None) or ())
        hidden = self.model.config.get_text_config().hidden_size
        return 2 * (values + features * hidden) * self.model.dtype.itemsize

    def encode(self, media: Sequence[Medium], prompts: Sequence[str]) -> Inputs:
        """Make the model's inputs: pictures (or one clip) with a prompt each, and pixels in the model's dtype.

        Pictures are prepared on the CPU where the GPU's memory is full.
        """
        cpu = torch.device("cpu")
        for device in (self.model.device if self.prepares_on_gpu else cpu, cpu):
            with suppress(torch.OutOfMemoryError), self._own_stream():
                inputs = self._process(media, prompts, device)
                for name in PIXELS & inputs.keys():  # the tower would round them in the same way
                    inputs[name] = inputs[name].to(self.model.dtype)
                return inputs
        raise torch.OutOfMemoryError("no memory for the pixels of a batch")

    def send(self, parts_by_prompt: Sequence[Sequence[Inputs]]) -> list[Inputs]:
        """Join the parts of one batch and copy them to the GPU, with one copy of the pixels for all prompts.

        The copy runs from pinned memory beside the work there. If memory is full, the inputs stay where they are.
        """
        with self._own_stream():
            shared = [joined(parts, self.processor.tokenizer.pad_token_id) for parts in parts_by_prompt]
        pixels = {name: shared[0][name] for name in PIXELS & shared[0].keys()}
        shared = [inputs | pixels for inputs in shared]
        if self._side_stream is None:
            return shared
        with suppress(torch.OutOfMemoryError), self._own_stream():
            moved = {id(value): self._move(value) for inputs in shared for value in inputs.values()}
            shared = [{name: moved[id(value)] for name, value in inputs.items()} for inputs in shared]
        self._side_stream.synchronize()  # the model reads them on another stream, also where memory ran out
        return shared

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.is_cuda else value.pin_memory().to(self.model.device, non_blocking=True)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream | None:
        """The stream on which batches are prepared beside the model's work; None without a GPU."""
        return torch.cuda.Stream(self.model.device) if self.model.device.type == "cuda" else None

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream)

    def _process(self, media: Sequence[Medium], prompts: Sequence[str], device: torch.device) -> Inputs:
        clips = [medium for medium in media if isinstance(medium, Clip)]
        kind = "video" if clips else "image"
        text_by_prompt = {}
        for prompt in set(prompts):
            content = [{"type": kind}, {"type": "text", "text": prompt}]
            message = {"role": "user", "content": content}
            text_by_prompt[prompt] = self.processor.apply_chat_template([message], add_generation_prompt=True)
        texts = [text_by_prompt[prompt] for prompt in prompts]
        if not clips:
            options: dict[str, Any] = {"return_tensors": "pt"}
            if device.type != "cpu":
                options["device"] = device
            pictures = [_channels_first(medium, device) for medium in media]
            # Until transformers 5.3 processors compare tokens of all rows at once, which have to be of one length.
            padding = not hasattr(self.processor, "create_mm_token_type_ids")
            inputs = self.processor(text=texts, images=pictures, padding=padding, images_kwargs=options)
            return self._padded(inputs)
        return self.processor(
            text=texts,
            videos=[clip.frames for clip in clips],
            video_metadata=[clip.metadata for clip in clips],
            do_sample_frames=False,
            padding=True,
            return_tensors="pt",
        )

    def _padded(self, inputs: Inputs) -> Inputs:
        """Turn the processor's lists of tokens into tensors, ten times as fast as transformers does."""
        padded = dict(inputs)
        for name, rows in inputs.items():
            if not isinstance(rows, torch.Tensor):
                padding = self.processor.tokenizer.pad_token_id if name == "input_ids" else 0
                tokens = [torch.from_numpy(np.array(row)) for row in rows]
                padded[name] = pad_sequence(tokens, batch_first=True, padding_value=padding, padding_side="left")
        return padded

    def vision_tokens(self, inputs: Inputs) -> int:
        patches = sum(int(grid.prod(-1).sum()) for name, grid in inputs.items() if name.endswith("_grid_thw"))
        return patches // self.processor.image_processor.merge_size**2

    @torch.inference_mode()
    def features_of(self, inputs: Inputs) -> Any:
        """Encode the pictures of a part before its batch is complete; None where `generate` has to do it."""
        if not self._encodes_ahead or "pixel_values" not in inputs:
            return None
        if self._side_stream is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self._side_stream)
        with suppress(torch.OutOfMemoryError):
            encode = self.model.base_model.get_image_features  # as `generate` calls it: not every model has its own
            taken = {name: inputs[name] for name in signature(encode).parameters if name in inputs}
            output = encode(**taken | {"pixel_values": self._received(inputs["pixel_values"])}, return_dict=True)
            return output if isinstance(output.pooler_output, list | tuple) else None  # of every picture
        return None

    @torch.inference_mode()
    def join_features(self, parts: list[Any]) -> Any:
        """Join the features of the parts of a batch, and drop those of the parts; None unless all parts have some."""
        if not parts or any(part is None for part in parts):
            return None
        fields: dict[str, Any] = {"pooler_output": [picture for part in parts for picture in part.pooler_output]}
        with suppress(torch.OutOfMemoryError):
            if parts[0].get("deepstack_features") is not None:
                layers = zip(*(part.deepstack_features for part in parts), strict=True)
                is_whole = isinstance(parts[0].deepstack_features[0], torch.Tensor)  # newer ones are split by picture
                fields["deepstack_features"] = [torch.cat(layer) if is_whole else [*chain(*layer)] for layer in layers]
            kind = type(parts[0])
            parts.clear()
            return kind(**fields)
        return None

    def _received(self, value: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the GPU. The stream that made it may not use its memory before this one is done with it."""
        value = value.to(self.model.device)
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(self.model.device))
        return value

    @torch.inference_mode()
    def generate(self, inputs: Inputs, seeds: Sequence[int]) -> list[Caption]:
        """Generate the captions of one batch and prompt. `features` among its inputs stand for pixels."""
        features = inputs.pop("features", None)
        # `inputs.to` would move them in place, but after running out of memory the caller needs its inputs.
        inputs = {name: self._received(value) for name, value in inputs.items()}
        samplers = LogitsProcessorList()
        if self.temperature > 0:
            samplers.append(TemperatureLogitsWarper(self.temperature))
            if self.top_p < 1:
                samplers.append(TopPLogitsWarper(self.top_p))
            samplers.append(_Sampler(seeds, self.model.device))
        decoding = {} if self.patching is None else {"custom_generate": self._decode()}
        if features is not None and "mm_encoder_outputs" in signature(type(self.model).forward).parameters:
            inputs["mm_encoder_outputs"] = {"image": features}  # instead of pixels
            del inputs["pixel_values"]
        elif features is not None:
            decoding["custom_generate"] = partial(decoding["custom_generate"], features={"image": features})
        config = copy.deepcopy(self.model.generation_config)  # without one, `generate` builds a model's config
        config.update(max_new_tokens=self.max_new_tokens, do_sample=False)
        tokens = self.model.generate(**inputs, **decoding, generation_config=config, logits_processor=samplers)
        self._may_hold_graphs = self.patching is not None
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        tokenizer = self.processor.tokenizer
        texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        lengths = (new_tokens != tokenizer.pad_token_id).sum(1).tolist()
        return [Caption(text.strip(), length) for text, length in zip(texts, lengths, strict=True)]

    @staticmethod
    def _decode() -> Callable[..., Any]:
        """Return how to generate. The worker halves batches itself; later ones are smaller, too.

        The step of a batch is kept, since the next batch often has its size.
        """
        most = int(_SHARE_OF_MEMORY * torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None
        return partial(hf_vit_accel.graphed_decoding, halve=False, max_graphs=2, max_bytes=most)

    def free_graphs(self) -> bool:
        """Free the memory that graphs and features hold. Return whether there may have been any since the last time."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.patching is None or not self._may_hold_graphs:
            return False
        hf_vit_accel.unpatch(self.model)
        hf_vit_accel.patch(self.model, **self.patching)
        self._may_hold_graphs = False
        return True

    def seed_of(self, key: str, prompt: str) -> int:
        """Return the seed of a record. It does not depend on the batch, process or run that makes the record."""
        digest = hashlib.sha256(f"{self.seed}\0{key}\0{prompt}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") >> 1
