"""Extend the build of the documentation: MkDocs calls `on_config`."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the link to the repository, which pyproject.toml names, and its label."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = config.repo_url.rpartition("/")[2]
    return config
