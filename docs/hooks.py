"""Extend the build of the documentation: MkDocs calls `on_config` and `on_page_markdown`."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

INCLUDED = ("SUPPORT.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Files above `docs` that a page of their name in small letters includes."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the link to the repository, which pyproject.toml names, and its label."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = config.repo_url.rpartition("/")[2]
    return config


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Let links to a file above `docs` lead to the page that includes it, or else to the file in the repository."""
    for name in INCLUDED:
        markdown = markdown.replace(f"](../{name}", f"]({name.lower()}")
    return markdown.replace("](../", f"]({config.repo_url}/blob/main/")
