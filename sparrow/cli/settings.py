"""Where settings come from: reads the file and hands all layers to the model, which judges them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow.cli.target import VARIABLES
from sparrow.model.settings import Effective, parse

CONFIG_BYTES_MAX = 1024 * 1024
"""A file of settings is a page; anything near this size is some other file."""


def load(config: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Effective:
    """The effective settings, or one error that lists everything wrong in any layer."""
    environ = {name: value for name, value in environ.items() if name not in VARIABLES}
    if config is None:
        return parse(None, environ, flags)
    content, problems = _read(config)
    return parse(content, environ, flags, file_name=str(config), earlier_problems=problems)


def _read(path: Path) -> tuple[object, list[str]]:
    """What the file holds, and what keeps it from being read."""
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        return None, [f"file {path}: cannot be read: {error.strerror}; allowed: a YAML file"]
    if len(content) > CONFIG_BYTES_MAX:
        return None, [f"file {path}: is too large; allowed: {CONFIG_BYTES_MAX} bytes"]
    return _parse_yaml(content, path)


def _parse_yaml(content: bytes, path: Path) -> tuple[object, list[str]]:
    # Loaded here because most starts have no file.
    import yaml

    try:
        return yaml.load(content, Loader=_strict_loader()), []
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        return None, [f"file {path}{line}: is not YAML: {error.problem}; allowed: key: value lines"]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return None, [f"file {path}: is not YAML: {error}; allowed: key: value lines in UTF-8"]


def _strict_loader() -> Any:
    """A safe loader that refuses a key given twice, where YAML would keep the last in silence."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} is given twice", problem_mark=key.start_mark
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return StrictLoader
