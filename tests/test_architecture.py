"""The rules that the tree promises, checked over the syntax tree of every file.

Each rule is a function from source to a list of complaints. The first half of this file holds the
rules, the second holds the promises: the tree has no complaints, and each rule can find one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from sparrow.model.errors import registry

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sparrow"
LINES_MAX = 600

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "model": frozenset(),
    "kernel": frozenset({"model"}),
    "store": frozenset({"model", "kernel"}),
    "wire": frozenset({"model", "kernel"}),
    # For receivers of webhooks: no more than the errors.
    "webhooks": frozenset({"model"}),
    "broker": frozenset({"model", "kernel", "store", "wire", "webhooks"}),
    "client": frozenset({"model", "kernel", "store", "wire"}),
    "server": frozenset({"model", "kernel", "store", "wire", "broker", "client"}),
    "spark": frozenset({"model", "kernel", "store", "wire", "broker", "client"}),
    "cli": frozenset({"model", "kernel", "store", "wire", "broker", "client", "server", "spark"}),
    "__main__": frozenset({"cli"}),
    "testing": frozenset({"model", "kernel", "store", "wire", "broker", "client", "server", "spark"}),
    # The package's own face gathers the public names.
    "": frozenset({"model", "kernel", "store", "wire", "broker", "client"}),
}

IMPURE_MODULES = frozenset(
    [
        "asyncio",
        "time",
        "random",
        "uuid",
        "os",
        "io",
        "socket",
        "threading",
        "secrets",
        "multiprocessing",
        "subprocess",
        "pathlib",
        "shutil",
        "tempfile",
        "concurrent",
        "select",
        "selectors",
        "ssl",
        "signal",
        "logging",
        "structlog",
        "importlib",
    ]
)
IMPURE_BUILTINS = frozenset({"open", "hash", "id", "input", "print", "eval", "exec", "__import__"})

CLOCKS = frozenset(
    [
        "time",
        "time_ns",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "thread_time_ns",
        "clock_gettime",
        "clock_gettime_ns",
        "localtime",
        "gmtime",
        "ctime",
    ]
)
CLOCK_OWNER = "sparrow.broker.clock"

FILE_CALLS = frozenset(
    [
        "open",
        "fdopen",
        "creat",
        "remove",
        "unlink",
        "rename",
        "replace",
        "mkdir",
        "makedirs",
        "rmdir",
        "removedirs",
        "truncate",
        "listdir",
        "scandir",
        "walk",
        "link",
        "symlink",
    ]
)
FILE_MODULES = frozenset({"os", "io", "gzip", "bz2", "lzma", "mmap", "codecs"})
FILE_ONLY_MODULES = frozenset({"shutil", "tempfile", "fileinput", "glob", "mmap"})
PATH_METHODS = frozenset({"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "touch"})

VAGUE_NAMES = frozenset(
    ["util", "utils", "helper", "helpers", "common", "base", "manager", "managers", "misc"]
)

CODES_OF_OTHER_NAMES = {"PreconditionFailed": "FAILED_PRECONDITION"}


class Module(NamedTuple):
    """A file of the package, by its dotted name."""

    name: str
    source: str
    is_package: bool = False

    @property
    def layer(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


class ErrorFacts(NamedTuple):
    """What is promised of an error class."""

    name: str
    code: str
    status: int
    hint: str


# The rules: each yields its complaints.


def imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """Every dotted name imported anywhere in the file: in functions and under conditions too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def layer_breaks(module: Module) -> Iterator[str]:
    """Imports that do not point down."""
    for line, name in imports_of(module):
        parts = name.split(".")
        if parts[0] != "sparrow":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""
        if target == module.layer and target:
            continue
        if target == "" or target not in MAY_IMPORT[module.layer]:
            yield f"{module.name}:{line} imports {name}"


def cycles(modules: Iterable[Module]) -> Iterator[str]:
    """Modules that reach themselves through their imports, one complaint a cycle."""
    by_name = {module.name: module for module in modules}
    graph = {name: sorted(_targets(module, set(by_name))) for name, module in by_name.items()}
    for component in _strong_components(graph):
        if len(component) > 1 or component[0] in graph[component[0]]:
            yield " <-> ".join(sorted(component))


def _targets(module: Module, known: set[str]) -> set[str]:
    """The modules that the file names: the module itself when a name inside it is imported."""
    found: set[str] = set()
    for _, name in imports_of(module):
        owner = name if name in known else name.rpartition(".")[0]
        if owner in known and not (owner == module.name and owner != name):
            found.add(owner)
    return found


def _strong_components(graph: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Tarjan's algorithm: each set of modules that reach one another."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                yield from visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            yield component

    for name in graph:
        if name not in index:
            yield from visit(name)


def impurities(module: Module) -> Iterator[str]:
    """What a kernel may not touch: the world, and whatever differs between processes."""
    for line, name in imports_of(module):
        if name.split(".")[0] in IMPURE_MODULES:
            yield f"{module.name}:{line} imports {name}"
    tree = module.tree
    impure = IMPURE_BUILTINS - _names_bound_in(tree)
    excused = _hashes_for_lookup(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in impure and node not in excused:
            yield f"{module.name}:{node.lineno} uses {node.id}"
    yield from _calendar_clocks(module)


def _hashes_for_lookup(tree: ast.Module) -> set[ast.AST]:
    """A ``__hash__`` serves dictionaries of this process only, and can be written in no other way."""
    methods = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__hash__"]
    inside = [node for method in methods for node in ast.walk(method)]
    return {node for node in inside if isinstance(node, ast.Name) and node.id == "hash"}


def _names_bound_in(tree: ast.Module) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def clock_reads(module: Module) -> Iterator[str]:
    """Reads of a clock outside the one module that may."""
    if module.name == CLOCK_OWNER:
        return
    for line, name in imports_of(module):
        if name.startswith("time.") and name.removeprefix("time.") in CLOCKS:
            yield f"{module.name}:{line} imports {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and _is_clock(node.value):
            yield f"{module.name}:{node.lineno} reads {ast.unparse(node)}"
    yield from _calendar_clocks(module)


def _is_clock(owner: ast.expr) -> bool:
    text = ast.unparse(owner)
    return text == "time" or "loop" in text.rpartition(".")[2]


def _calendar_clocks(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("now", "utcnow", "today"):
            continue
        if ast.unparse(node.value).rpartition(".")[2] in ("datetime", "date"):
            yield f"{module.name}:{node.lineno} reads {ast.unparse(node)}"


def file_uses(module: Module) -> Iterator[str]:
    """Opening, reading, writing, moving or listing files."""
    for line, name in imports_of(module):
        top, _, rest = name.partition(".")
        if top in FILE_ONLY_MODULES or (top in FILE_MODULES and rest in FILE_CALLS):
            yield f"{module.name}:{line} imports {name}"
    own = _names_bound_in(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id == "open" and "open" not in own:
            yield f"{module.name}:{node.lineno} uses open"
        elif isinstance(node, ast.Attribute) and _touches_files(node):
            yield f"{module.name}:{node.lineno} uses {ast.unparse(node)}"


def _touches_files(node: ast.Attribute) -> bool:
    owner = ast.unparse(node.value)
    if node.attr in PATH_METHODS or (node.attr in FILE_CALLS and owner in FILE_MODULES):
        return True
    if owner.startswith(("Path(", "pathlib.Path(")):
        return node.attr in FILE_CALLS | {"iterdir", "stat"}
    # A path by its name; replace is left out, because key paths are text and have it too.
    return owner.rpartition(".")[2].endswith("path") and node.attr in FILE_CALLS - {"replace"}


def vague_names(module: Module) -> Iterator[str]:
    """Module names that say nothing."""
    for part in module.name.split("."):
        if VAGUE_NAMES & set(part.split("_")):
            yield f"{module.name} has no noun"


def error_breaks(errors: Iterable[ErrorFacts]) -> Iterator[str]:
    """Codes that clash or do not match the class, missing hints, statuses out of range."""
    seen: dict[str, str] = {}
    for error in errors:
        if error.code in seen:
            yield f"{error.name} and {seen[error.code]} share the code {error.code}"
        seen[error.code] = error.name
        if error.code != CODES_OF_OTHER_NAMES.get(error.name, _code_of(error.name)):
            yield f"{error.name} has the code {error.code}"
        if not error.hint.strip():
            yield f"{error.name} has no hint"
        if not 400 <= error.status <= 599:
            yield f"{error.name} has the status {error.status}"


def _code_of(name: str) -> str:
    words = re.findall(r"[A-Z][a-z0-9]+|[A-Z]+(?![a-z])", name)
    return "_".join(words).upper()


def overlong(module: Module) -> Iterator[str]:
    """Files too long to be read in one go."""
    lines = module.source.count("\n")
    if lines > LINES_MAX:
        yield f"{module.name} has {lines} lines; {LINES_MAX} are allowed"


# The promises.


def _read_package() -> list[Module]:
    return [_module(path) for path in sorted(PACKAGE.rglob("*.py"))]


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, path.read_text(encoding="utf-8"), is_package)


MODULES = _read_package()

Rule = Callable[[Module], Iterator[str]]


def _complaints(rule: Rule, layers: Iterable[str] | None = None) -> list[str]:
    chosen = [module for module in MODULES if layers is None or module.layer in layers]
    return [complaint for module in chosen for complaint in rule(module)]


def test_the_package_is_found() -> None:
    assert {"sparrow.model.errors", "sparrow.cli.main"} <= {module.name for module in MODULES}


def test_every_folder_is_a_known_layer() -> None:
    assert {module.layer for module in MODULES} <= set(MAY_IMPORT)


def test_imports_point_down_the_layers() -> None:
    assert _complaints(layer_breaks) == []


def test_modules_do_not_import_in_circles() -> None:
    assert list(cycles(MODULES)) == []


def test_the_kernel_is_pure() -> None:
    assert _complaints(impurities, {"kernel"}) == []


def test_only_the_clock_module_reads_a_clock() -> None:
    assert _complaints(clock_reads, {"model", "kernel", "broker", "server"}) == []


def test_only_the_store_opens_files_of_the_data_directory() -> None:
    layers = {"model", "kernel", "broker", "client", "server"}
    assert _complaints(file_uses, layers) == []


def test_every_module_is_named_after_a_noun() -> None:
    assert _complaints(vague_names) == []


def test_error_codes_are_unique_and_named_after_their_class_with_hint_and_status() -> None:
    errors = [kind for kind in registry().values() if kind.__module__.startswith("sparrow.")]
    facts = [ErrorFacts(kind.__name__, kind.code, kind.status, kind.default_hint) for kind in errors]
    assert list(error_breaks(facts)) == []


def test_no_file_is_too_long_to_read() -> None:
    assert _complaints(overlong) == []


# The rules can fail.


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sparrow.model.topic", "from sparrow.kernel.cursor import Cursor"),
        ("sparrow.kernel.cursor", "import sparrow.store.journal"),
        ("sparrow.store.journal", "from sparrow import wire"),
        ("sparrow.store.journal", "def f():\n    from sparrow.broker import clock"),
        ("sparrow.model.topic", "if TYPE_CHECKING:\n    from sparrow.store import ports"),
        ("sparrow.kernel.cursor", "from ..broker import clock"),
        ("sparrow.client.pull", "from sparrow.broker.broker import Broker"),
        ("sparrow.server.http", "from sparrow.cli import main"),
        ("sparrow.broker.broker", "import sparrow"),
        ("sparrow.cli.up", "from sparrow.testing import clock"),
        ("sparrow", "from sparrow.testing import clock"),
        ("sparrow.testing.broker", "from sparrow.cli import up"),
    ],
)
def test_an_import_that_points_up_is_found(name: str, source: str) -> None:
    assert list(layer_breaks(Module(name, source)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sparrow.kernel.cursor", "from sparrow.model import errors"),
        ("sparrow.cli.up", "def f():\n    from sparrow.server.http import build"),
        ("sparrow.broker.broker", "from . import clock"),
        ("sparrow.testing.broker", "from sparrow.server.http import build"),
        ("sparrow.model.topic", "import msgspec"),
    ],
)
def test_an_import_that_points_down_is_allowed(name: str, source: str) -> None:
    assert list(layer_breaks(Module(name, source))) == []


def test_a_circle_of_imports_is_found_also_inside_functions() -> None:
    circle = [
        Module("sparrow.model.a", "from sparrow.model.b import B"),
        Module("sparrow.model.b", "def f():\n    from sparrow.model import c"),
        Module("sparrow.model.c", "if TYPE_CHECKING:\n    import sparrow.model.a"),
        Module("sparrow.model.d", "from sparrow.model import a"),
    ]
    assert list(cycles(circle)) == ["sparrow.model.a <-> sparrow.model.b <-> sparrow.model.c"]


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "from time import monotonic",
        "import os.path",
        "from random import random",
        "from uuid import uuid4",
        "import threading",
        "def f():\n    import secrets",
        "import socket",
        "import io",
        "open('x')",
        "hash('x')",
        "sorted(things, key=id)",
        "class A:\n    def __hash__(self):\n        return id(self)",
        "datetime.now(UTC)",
        "datetime.datetime.utcnow()",
        "date.today()",
    ],
)
def test_an_impure_kernel_is_found(source: str) -> None:
    assert list(impurities(Module("sparrow.kernel.cursor", source)))


@pytest.mark.parametrize(
    "source",
    [
        "def topic(id: int) -> int:\n    return id + 1",
        "from datetime import timedelta\ntimedelta(seconds=1)",
        "def expire(now_us):\n    return now_us > deadline_us",
        "topic.id",
        "class A:\n    def __hash__(self):\n        return hash(self.text)",
    ],
)
def test_a_pure_kernel_is_left_alone(source: str) -> None:
    assert list(impurities(Module("sparrow.kernel.cursor", source))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "time.monotonic_ns()",
        "start = time.perf_counter",
        "from time import time",
        "datetime.now()",
        "loop.time()",
        "asyncio.get_running_loop().time()",
        "self._loop.time()",
    ],
)
def test_a_clock_read_elsewhere_is_found(source: str) -> None:
    assert list(clock_reads(Module("sparrow.broker.ingress", source)))


def test_the_clock_module_may_read_the_clock() -> None:
    assert list(clock_reads(Module(CLOCK_OWNER, "import time\ntime.time()"))) == []
    assert list(clock_reads(Module("sparrow.broker.ingress", "self.clock.now_us()"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "opener = open",
        "os.open('x', 0)",
        "from os import open as raw",
        "io.open('x')",
        "Path('x').read_text()",
        "path.write_bytes(b'')",
        "Path('x').open()",
        "self.path.open('rb')",
        "os.rename('a', 'b')",
        "import shutil",
        "import tempfile",
    ],
)
def test_a_file_opened_outside_the_store_is_found(source: str) -> None:
    assert list(file_uses(Module("sparrow.broker.ingress", source)))


def test_opening_a_broker_or_a_store_is_not_opening_a_file() -> None:
    source = "store = await LocalStore.open(settings)\nbroker = Broker.open(settings)\nos.environ"
    assert list(file_uses(Module("sparrow.broker.broker", source))) == []


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "base", "manager", "topic_utils"])
def test_a_vague_module_name_is_found(name: str) -> None:
    assert list(vague_names(Module(f"sparrow.model.{name}", "")))


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (ErrorFacts("TopicGone", "TOPIC_NOT_FOUND", 404, "x"), "has the code"),
        (ErrorFacts("TopicGone", "TOPIC_GONE", 404, " "), "has no hint"),
        (ErrorFacts("TopicGone", "TOPIC_GONE", 200, "x"), "has the status"),
    ],
)
def test_an_error_that_breaks_its_promise_is_found(error: ErrorFacts, complaint: str) -> None:
    (found,) = error_breaks([error])
    assert complaint in found


def test_a_code_used_twice_is_found() -> None:
    twice = [ErrorFacts("TopicGone", "TOPIC_GONE", 404, "x")] * 2
    assert list(error_breaks(twice)) == ["TopicGone and TopicGone share the code TOPIC_GONE"]


def test_a_file_that_is_too_long_is_found() -> None:
    assert list(overlong(Module("sparrow.model.topic", "x = 1\n" * (LINES_MAX + 1))))
    assert list(overlong(Module("sparrow.model.topic", "x = 1\n" * LINES_MAX))) == []
