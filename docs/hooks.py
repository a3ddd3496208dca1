"""Extends the build of the documentation: MkDocs calls `on_config`."""

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Sets the link to the repository, from the one place that names it."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    return config
