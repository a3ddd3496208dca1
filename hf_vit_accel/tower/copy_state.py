"""Notice changes of a copy that its proof depends on, beside modules and code: of buffers, tensors and configs.

Parameters are left out. The proof draws them anew, so they may change.
"""

from __future__ import annotations

from collections.abc import Iterator

import transformers
from torch import Tensor, nn

from hf_vit_accel.ops.base import copied

TensorStamp = tuple[Tensor, int, int]
"""A tensor, the version of its values, and where they are stored."""


class CopyState:
    """The buffers of a copy, its tensors that are plain attributes, and the fields of its configs, as they were proven.

    A write through `tensor.data` goes unseen, as it does for autograd.

    Args:
        tower: The copy.

    Raises:
        ValueError: A tensor was made in inference mode, where torch counts no versions.
    """

    def __init__(self, tower: nn.Module) -> None:
        attributes = [vars(module) for module in tower.modules()]
        self._buffers = [values["_buffers"] for values in attributes]
        self._tensor_slots = [
            (values, name) for values in attributes for name in values if isinstance(values[name], Tensor)
        ]
        self._configs = list(_configs_of(attributes))
        self._stamps = list(self._stamps_now())
        self._fields = copied([vars(config) for config in self._configs])

    def _tensors_now(self) -> Iterator[Tensor]:
        for buffers in self._buffers:
            if buffers:
                yield from (buffer for buffer in buffers.values() if buffer is not None)
        for attributes, name in self._tensor_slots:
            tensor = attributes.get(name)
            if isinstance(tensor, Tensor):
                yield tensor

    def _stamps_now(self) -> Iterator[TensorStamp]:
        for tensor in self._tensors_now():
            if tensor.is_inference():
                raise ValueError("a buffer was made in inference mode, where torch does not count its changes")
            yield tensor, tensor._version, tensor.data_ptr()

    def reason_changed(self) -> str | None:
        """Return what changed; None if nothing did."""
        if [vars(config) for config in self._configs] != self._fields:
            return "a field of a config changed"
        stamps = list(self._stamps_now())
        is_same = len(stamps) == len(self._stamps)
        for stamp, former in zip(stamps, self._stamps):  # noqa: B905
            is_same = is_same and stamp[0] is former[0] and stamp[1:] == former[1:]
        return None if is_same else "a buffer changed"


def _configs_of(attributes: list[dict[str, object]]) -> Iterator[transformers.PretrainedConfig]:
    """Yield every config in the attributes of modules, and the configs inside it; none twice."""
    pending: list[object] = [value for values in attributes for value in values.values()]
    seen: set[int] = set()
    while pending:
        config = pending.pop()
        if isinstance(config, transformers.PretrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config
            pending += vars(config).values()
