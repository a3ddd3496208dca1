"""Captions a folder of images with a Qwen-VL model whose vision tower is accelerated by hf_vit_accel.

    python examples/batch_caption.py --model Qwen/Qwen3-VL-8B-Instruct --images photos --output captions.jsonl
    accelerate launch --num_processes 4 examples/batch_caption.py --model ... --images ... --output ...

Writes one JSON line per image file, sorted by path: `path` (relative to the folder), `status` ("ok" or "error"),
`width` and `height` of the upright image, `caption`, `error`. An unreadable image costs its own line, never the run.
With several processes each takes every n-th image and writes a part file beside the output, and the main process joins
the parts in order; so the processes need a common file system.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm
from transformers import (
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.utils import is_torchvision_available
from transformers.utils.logging import disable_progress_bar

import hf_vit_accel

PROMPT = "Describe this image."
# Pillow's own limit: beyond it, it warns of a decompression bomb; beyond twice as many pixels, it refuses to open.
MAX_PIXELS = 89_478_485
# HEIC is here although Pillow needs a plugin for it: an error line is better than a picture passed over in silence.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)


@dataclass(frozen=True)
class Record:
    """One line of the output; `caption` is None for an error, `error` for a caption."""

    path: str
    status: Literal["ok", "error"]
    width: int | None = None
    height: int | None = None
    caption: str | None = None
    error: str | None = None


def find_images(folder: Path) -> list[str]:
    """Lists the image files below `folder`, by suffix, as sorted paths relative to it."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def read_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decodes an image, turned upright by its EXIF orientation, as RGB.

    Raises ValueError for a file that is empty, not an image or above `max_pixels`, and whatever Pillow's decoders raise
    for damaged data.
    """
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    with path.open("rb") as file:  # given a name, Pillow 13 scrambles uncompressed TIFFs whose orientation swaps sides
        try:
            image = Image.open(file)
        except UnidentifiedImageError:
            raise ValueError("not an image in a format that Pillow reads here") from None
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width} x {image.height} pixels, the limit is {max_pixels}")
        return to_rgb(ImageOps.exif_transpose(image))


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to RGB, with 16-bit greys scaled to 8 bits and transparency laid on white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined white")
    if image.mode.startswith("I"):  # 16-bit grey ("I" is how Pillow opens a 16-bit PGM); `convert` would clip at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


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


def describe(error: Exception) -> str:
    """Gives the reason that stands in a record."""
    return f"{type(error).__name__}: {error}"


@dataclass
class Captioner:
    """A model and its processor, with everything that decides what the captions are."""

    model: PreTrainedModel
    processor: ProcessorMixin
    prompt: str = PROMPT
    batch_size: int = 8
    max_new_tokens: int = 64
    max_pixels: int = MAX_PIXELS

    def encode(self, images: Sequence[Image.Image]) -> Any:
        """Makes the model's inputs for one batch, on the model's device: each image with the prompt."""
        content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self.processor(text=[text] * len(images), images=list(images), padding=True, return_tensors="pt")
        return inputs.to(self.model.device)

    @torch.inference_mode()
    def caption(self, images: Sequence[Image.Image]) -> list[str]:
        """Captions one batch of images by greedy decoding."""
        inputs = self.encode(images)
        tokens = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(new_tokens, skip_special_tokens=True)]

    def records(self, folder: Path, files: Sequence[str]) -> Iterator[Record]:
        """Captions image files, batch by batch, and yields their records in order."""
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(files), self.batch_size):
                batch = files[start : start + self.batch_size]
                images = list(pool.map(lambda name: self._read(folder / name), batch))
                captions = iter(self._try_caption([image for image in images if isinstance(image, Image.Image)]))
                for name, image in zip(batch, images, strict=True):
                    if isinstance(image, Exception):
                        yield Record(name, "error", error=describe(image))
                        continue
                    caption = next(captions)
                    if isinstance(caption, Exception):
                        yield Record(name, "error", image.width, image.height, error=describe(caption))
                    else:
                        yield Record(name, "ok", image.width, image.height, caption)

    def _read(self, path: Path) -> Image.Image | Exception:
        try:
            return read_image(path, self.max_pixels)
        except Exception as error:  # decoders raise nearly anything on damaged files
            return error

    def _try_caption(self, images: Sequence[Image.Image]) -> Sequence[str | Exception]:
        """Captions a batch or, if that fails, each image alone, so that one bad image costs only itself.

        A processor refuses, for example, aspect ratios above 200; the batch may also be too large for the memory.
        """
        if not images:
            return []
        try:
            return self.caption(images)
        except (ValueError, torch.OutOfMemoryError) as error:
            if len(images) == 1:
                return [error.with_traceback(None)]
        # Outside of the handler, whose traceback keeps the failed batch's tensors alive.
        return [result for image in images for result in self._try_caption([image])]


def write_records(records: Iterator[Record], path: Path) -> None:
    """Writes records as JSON lines, each as soon as it is there."""
    # A file name that is no valid UTF-8 holds lone surrogates; backslashreplace turns them into JSON's own escapes.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            print(json.dumps(asdict(record), ensure_ascii=False), file=file, flush=True)


def merge_parts(parts: Sequence[Path], output: Path) -> None:
    """Joins part files, whose lines are every n-th of the whole, in the order of the whole, and removes them."""
    with ExitStack() as stack:
        lines = [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
        merged = stack.enter_context(output.open("w", encoding="utf-8"))
        for row in zip_longest(*lines, fillvalue=""):
            merged.writelines(row)
    for part in parts:
        part.unlink()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or its name on the Hub.")],
    images: Annotated[Path, typer.Option(help="Folder, searched with its subfolders.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="JSON lines, one per image; overwritten.", dir_okay=False)],
    prompt: Annotated[str, typer.Option(help="What to ask about each image.")] = PROMPT,
    batch_size: Annotated[int, typer.Option(help="Images per batch and process.", min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest caption, in tokens.", min=1)] = 64,
    max_pixels: Annotated[int, typer.Option(help="Larger images are errors.", min=1, max=2 * MAX_PIXELS)] = MAX_PIXELS,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="auto: as in the checkpoint.")
    ] = "auto",
    attention: Annotated[str, typer.Option(help="Attention backend of the vision tower.")] = "auto",
    no_patch: Annotated[bool, typer.Option("--no-patch", help="Run the stock vision tower.")] = False,
) -> None:
    """Caption a folder of images. Exits with 1 if no image could be captioned, with 2 for bad arguments."""
    # The default limit of 10 to 30 minutes at a barrier would end a run whose processes have unequal work.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))])
    if not accelerator.is_main_process:
        disable_progress_bar()
    files: list[str] = broadcast_object_list([find_images(images)])[0]  # one list for all, should the folder change
    if not files:
        if accelerator.is_main_process:
            typer.echo(f"No images in {images}: no file there ends in {', '.join(IMAGE_SUFFIXES)}", err=True)
        raise typer.Exit(2)

    vlm = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).to(accelerator.device).eval()
    if not no_patch:
        try:
            hf_vit_accel.patch(vlm, attention=attention)
        except (ValueError, hf_vit_accel.BackendUnavailableError) as error:
            raise typer.BadParameter(str(error), param_hint="--attention") from None
    captioner = Captioner(vlm, load_processor(model), prompt, batch_size, max_new_tokens, max_pixels)

    output.parent.mkdir(parents=True, exist_ok=True)
    parts = [output.with_name(f"{output.name}.part{rank}") for rank in range(accelerator.num_processes)]
    mine = files[accelerator.process_index :: accelerator.num_processes]
    progress = tqdm(
        captioner.records(images, mine), total=len(mine), unit="image", disable=not accelerator.is_main_process
    )
    write_records(progress, parts[accelerator.process_index])
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if not accelerator.is_main_process:
        return

    merge_parts(parts, output)
    captioned = sum(json.loads(line)["status"] == "ok" for line in output.open(encoding="utf-8"))
    print(f"{captioned} of {len(files)} images captioned: {output}")
    if not no_patch:
        print(hf_vit_accel.status(vlm))
    if not captioned:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
