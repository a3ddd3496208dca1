"""Make the relative links of the README absolute when Hatch builds the package.

A package index shows the README without the repository, so relative links would lead nowhere.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\]\((?![a-z]+:|#)(?P<target>[^)]+)\)")
PICTURES = (".png", ".svg")
HOME = "../../"
"""How a relative link leaves the files of the repository, for example to its workflows."""


def absolute(text: str, repository: str, version: str) -> str:
    """Replace the relative links of a Markdown text by links to the repository's tag of a version."""

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        if target.startswith(HOME):
            return f"]({repository}/{target.removeprefix(HOME)})"
        kind = "raw" if target.endswith(PICTURES) else "blob"
        return f"]({repository}/{kind}/v{version}/{target})"

    return LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """Set `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
