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


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to a file above `docs`, which work in the repository, lead to the page that includes it."""
    for name in INCLUDED:
        markdown = markdown.replace(f"](../{name}", f"]({name.lower()}")
    return markdown
