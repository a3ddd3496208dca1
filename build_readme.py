"""Make the relative links of the README absolute when Hatch builds the package.

A package index shows the README without the repository, so relative links would lead nowhere.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    """Replace the relative links of a Markdown text by links to the repository's tag of a version."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{kind}/v{version}/{match['target']})"

    return LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """Set `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
