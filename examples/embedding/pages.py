"""Read pages in threads: decode them, and make the inputs of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from media.batches import Task
from media.items import Item, checksum, holds_bytes, open_item, stamp
from media.pictures import read_image
from media.processors import reduced
from PIL import Image
from transformers import BatchFeature, ProcessorMixin

__all__ = ["Batch", "Page", "Reader"]


@dataclass(frozen=True)
class Page:
    """A page that was read.

    Args:
        item: the place of its bytes
        image: the decoded picture
        checksum: CRC-32 of its bytes
        stamp: equal as long as the bytes are, without reading them; None where there is none
    """

    item: Item
    image: Image.Image
    checksum: str
    stamp: str | None


@dataclass
class Batch:
    """Pages that were read.

    Args:
        pages: the pages, in the order of the inputs
        inputs: the model's inputs for all pages; None where there are no pages
        errors: a line for every page that could not be read
    """

    pages: list[Page] = field(default_factory=list)
    inputs: BatchFeature | None = None
    errors: list[str] = field(default_factory=list)


class Reader:
    """Read batches of pages in threads, two batches ahead.

    Args:
        processor: the model's processor
        pool: the threads that decode
    """

    def __init__(self, processor: ProcessorMixin, pool: ThreadPoolExecutor) -> None:
        self.processor = processor
        self.pool = pool

    def ahead(self, batches: Iterable[Sequence[Task]]) -> Iterator[Batch]:
        """Yield the batches in their order, while the next two are read."""
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(2) as batch_pool:
            for tasks in batches:
                waiting.append(batch_pool.submit(self.read, tasks))
                if len(waiting) > 2:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def read(self, tasks: Sequence[Task]) -> Batch:
        """Read the pages of a batch."""
        batch = Batch()
        for page in self.pool.map(self._decode, tasks):
            if isinstance(page, str):
                batch.errors.append(page)
            else:
                batch.pages.append(page)
        try:
            batch.inputs = self._process(batch.pages)
        except Exception:  # one refused page fails the batch: try every page alone
            refusals = {id(page): self._refusal(page) for page in batch.pages}
            batch.errors += [refusal for refusal in refusals.values() if refusal]
            batch.pages = [page for page in batch.pages if not refusals[id(page)]]
            batch.inputs = self._process(batch.pages)
        return batch

    def _decode(self, task: Task) -> Page | str:
        """Decode one page; return the error as a line of text."""
        try:
            before = stamp(task.item)  # if the file is replaced from now on, the next run reads it again
            with open_item(task.item) as file:
                crc = checksum(file)
                image, _ = read_image(file, resize=reduced(self.processor))
            return Page(task.item, image, crc, before if holds_bytes(task.item) else None)
        except Exception as error:  # Pillow's decoders raise anything for damaged files
            return f"{task.item.key}: {error}"

    def _process(self, pages: Sequence[Page]) -> BatchFeature | None:
        return self.processor.process_images([page.image for page in pages]) if pages else None

    def _refusal(self, page: Page) -> str | None:
        """Return the processor's reason against a page."""
        try:
            self.processor.process_images([page.image])
        except Exception as error:  # processors raise anything for shapes that they refuse
            return f"{page.item.key}: {error}"
        return None
