"""What the build of the documentation adds to MkDocs (`on_config`) and to mkdocstrings (`Arguments`)."""

import re
import tomllib
from pathlib import Path
from typing import Any

import griffe


def on_config(config: Any) -> Any:
    """Sets the link to the repository, from the one place that names it."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    return config


class Arguments(griffe.Extension):
    """Gives every argument of a docstring a paragraph: ours begin a line with `name: `."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring in place."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^((?:[a-z_]+, )*[a-z_]+): ", r"\n**\1**: ", text)
