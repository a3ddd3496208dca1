"""Compare plans of calls, and look for what anybody may change in them."""

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest
import torch


def assert_same(first: Any, again: Any) -> None:
    """Assert that two plans hold the same objects, or equal values."""
    assert type(first) is type(again)
    if first is again:
        return
    if is_dataclass(first):
        for field in fields(first):
            assert_same(getattr(first, field.name), getattr(again, field.name))
    elif isinstance(first, Mapping):
        assert_same([*first.items()], [*again.items()])
    elif isinstance(first, list | tuple):
        for value, other in zip(first, again, strict=True):
            assert_same(value, other)
    elif isinstance(first, torch.Tensor):
        assert first.data_ptr() == again.data_ptr() and torch.equal(first, again)
    else:
        assert first == again


def assert_frozen(plan: Any) -> None:
    """Assert that nothing of a plan can be set, nor of the containers in it."""
    for field in fields(plan):
        with pytest.raises(FrozenInstanceError):
            setattr(plan, field.name, None)
    assert not list(mutable_in(plan, "plan"))


def mutable_in(value: Any, name: str) -> Iterator[str]:
    """Yield the names of containers in a plan, and in the frozen dataclasses that it holds, that anybody may change.

    A route's caches are no fields of it, and are left out: they are filled when they are first needed.
    """
    if isinstance(value, MutableMapping | MutableSequence | MutableSet):
        yield name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from mutable_in(item, f"{name}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from mutable_in(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen:
        for field in fields(value):
            if field.name == "settings":  # of the user, and pickled with the tower
                continue
            yield from mutable_in(getattr(value, field.name), f"{name}.{field.name}")
