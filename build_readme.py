"""Hatch runs this when it builds: the README of the metadata, its relative links made absolute.

A package index shows the README without the repository around it, where a relative link leads nowhere.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    """Markdown with the links to files of this repository as links to its tag of that version."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({repository}/{kind}/v{version}/{found['target']})"

    return LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml therefore declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
