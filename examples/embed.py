"""Embed document pages with ColQwen2, and find the pages that answer a query.

    python examples/embed.py pages --index index --model vidore/colqwen2-v1.0-hf
    python examples/embed.py --index index --model vidore/colqwen2-v1.0-hf --query "How did revenue develop in 2023?"

Every batch becomes a safetensors file with the embeddings (tokens, dim) of its pages. Pages that are in the index are
not embedded again, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoProcessor, BatchFeature, ColQwen2ForRetrieval, PreTrainedModel, ProcessorMixin

import hf_vit_accel

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


@torch.inference_mode()
def embed(model: PreTrainedModel, inputs: BatchFeature) -> list[torch.Tensor]:
    """Return the embeddings (tokens, dim) of every row, without its padding."""
    inputs = inputs.to(model.device)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    embeddings = model(**inputs).embeddings
    masks = inputs["attention_mask"].bool()
    return [row[mask] for row, mask in zip(embeddings, masks, strict=True)]


def embed_pages(model: PreTrainedModel, processor: ProcessorMixin, folder: Path, index: Path, batch_size: int) -> None:
    """Add the pages of a folder to the index."""
    index.mkdir(parents=True, exist_ok=True)
    done = {name for name, _ in read(index)}
    names = [
        path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES
    ]
    missing = [name for name in names if name not in done]
    print(f"{len(names)} pages, {len(missing)} of them to embed")
    for start in range(0, len(missing), batch_size):
        pages = {}
        for name in missing[start : start + batch_size]:
            try:
                pages[name] = ImageOps.exif_transpose(Image.open(folder / name)).convert("RGB")
            except Exception as error:  # Pillow's decoders raise errors of any class
                print(f"left out: {name}: {error}")
        if not pages:
            continue
        inputs = processor.process_images(list(pages.values()), device=model.device)
        embeddings = embed(model, inputs)
        tensors = {name: row.cpu().contiguous() for name, row in zip(pages, embeddings, strict=True)}
        file = index / f"{len(list(index.glob('*.safetensors'))):06d}.safetensors"
        save_file(tensors, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)  # a file of the index is always complete


def read(index: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and embeddings of all pages."""
    for path in sorted(index.glob("*.safetensors")):
        with safe_open(path, "pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                yield name, file.get_tensor(name)


def search(model: PreTrainedModel, processor: ProcessorMixin, index: Path, query: str) -> list[tuple[float, str]]:
    """Score all pages, the best one first: sum the largest similarity of every query token to a page's tokens."""
    (tokens,) = embed(model, processor.process_queries([query]))
    scores = []
    for name, page in read(index, model.device):
        similarities = tokens.float() @ page.float().t()
        scores.append((float(similarities.amax(1).sum()), name))
    return sorted(scores, reverse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Embed pages, or answer a query with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="?", help="folder of pictures")
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--index", type=Path, default=Path("index"))
    parser.add_argument("--query", help="print the best pages for this text")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args(arguments)
    if options.pages is None and options.query is None:
        parser.error("name a folder of pages to embed, or a --query")
    folder = options.index if options.pages is None else options.pages
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    kind = AutoConfig.from_pretrained(options.model).model_type
    if kind != "colqwen2":
        parser.error(f"{options.model} is a {kind}, and this script runs ColQwen2")

    processor = AutoProcessor.from_pretrained(options.model)
    model = ColQwen2ForRetrieval.from_pretrained(options.model, dtype="auto")
    model = hf_vit_accel.patch(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())

    if options.pages is not None:
        embed_pages(model, processor, options.pages, options.index, options.batch_size)
        print(hf_vit_accel.status(model))
    if options.query is not None:
        for score, name in search(model, processor, options.index, options.query)[: options.top]:
            print(f"{score:8.3f}  {name}")


if __name__ == "__main__":
    main()
