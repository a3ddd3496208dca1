"""Extend MkDocs (`on_config`) and mkdocstrings (`Arguments`) for the build of the documentation."""

import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the link to the repository, which pyproject.toml names."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    return config


class Arguments(griffe.Extension):
    """Give every argument of a docstring that begins a line with `name: ` a paragraph of its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring in place."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^((?:[a-z_]+, )*[a-z_]+): ", r"\n**\1**: ", text)
