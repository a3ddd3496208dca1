"""Fill the fields of prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["fill", "named"]

_FIELD = re.compile(r"\{(\w+)\}")


def named(prompts: Iterable[str]) -> set[str]:
    """Return the names of the fields in prompts."""
    return {name for prompt in prompts for name in _FIELD.findall(prompt)}


def fill(prompt: str, fields: Mapping[str, object]) -> str:
    """Replace every `{field}` of a prompt by its value. Braces around anything but a word stay.

    Raises:
        ValueError: A field has no value.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ValueError(f"the prompt names {{{match[1]}}}; there are {', '.join(sorted(fields))}")
        return str(fields[match[1]])

    return _FIELD.sub(value_of, prompt)
