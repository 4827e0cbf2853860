"""Declarations in files: YAML with one or several pipelines, or Python with decorated functions.

    pipelines/revenue.yaml        one mapping, or several separated by ``---``
    pipelines/fraud.py            functions with @sparrow.pipeline

A pipeline without a name has that of its file. Functions and files that a declaration names by a relative
path are looked for beside it. Nothing of Spark is imported here, unless a Python file does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sparrow.model.errors import InvalidPipeline
from sparrow.model.pipeline import Pipeline, parse_pipeline

SUFFIXES = (".yaml", ".yml", ".py")


def read(place: Path) -> list[Pipeline]:
    """The pipelines of a file, or of all files of a directory, by name."""
    if place.is_dir():
        files = sorted(each for each in place.iterdir() if each.suffix in SUFFIXES)
        found = [pipeline for each in files for pipeline in _read_file(each)]
    else:
        found = list(_read_file(place))
    names = [pipeline.name for pipeline in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidPipeline(f"name {name!r} is declared twice in {place}", key="name")
    return found


def _read_file(path: Path) -> Iterator[Pipeline]:
    if not path.is_file():
        raise InvalidPipeline(f"there is no file {path}", hint="Give a .yaml or .py file, or a directory.")
    try:
        if path.suffix == ".py":
            yield from _of_module(path)
        elif path.suffix in SUFFIXES:
            yield from _of_yaml(path)
        else:
            raise InvalidPipeline("a declaration is a .yaml or a .py file")
    except InvalidPipeline as error:
        raise InvalidPipeline(f"{path}: {error.message}", hint=error.hint, **error.details) from error


def _of_yaml(path: Path) -> Iterator[Pipeline]:
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text()) if each is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidPipeline(f"is not YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise InvalidPipeline("declares nothing")
    for each in documents:
        yield parse_pipeline(_beside(each, path), name=path.stem if len(documents) == 1 else None)


def _beside(document: Any, path: Path) -> Any:
    """A function in a file of a relative path lies beside the declaration."""
    place = document.get("function") if isinstance(document, dict) else None
    if isinstance(place, str) and place.rpartition(":")[0].endswith(".py"):
        file, _, name = place.rpartition(":")
        return {**document, "function": f"{(path.parent / file).resolve()}:{name}"}
    return document


def _of_module(path: Path) -> Iterator[Pipeline]:
    from sparrow.spark.pipelines.plan import load_file

    try:
        module = load_file(path)
    except Exception as error:
        raise InvalidPipeline(f"cannot be loaded: {type(error).__name__}: {error}") from error
    found = [each for each in vars(module).values() if isinstance(_declared(each), Pipeline)]
    if not found:
        raise InvalidPipeline("declares nothing: no function has @sparrow.pipeline")
    for function in found:
        place = f"{path.resolve()}:{function.__name__}"
        yield msgspec.structs.replace(_declared(function), function=place)


def _declared(value: Any) -> Any:
    return getattr(value, "__pipeline__", None) if callable(value) else None
