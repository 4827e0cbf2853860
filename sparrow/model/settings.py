"""Everything an operator can tune, as one typed value.

``Settings`` is parsed from three layers, later ones winning: a mapping (from a YAML file), the
environment, and flags. Parsing is pure: whoever reads the file or the environment passes it in.

Invariants. Every value of every layer is checked, also one that a later layer overrides, because a
wrong line is wrong whoever wins. All problems are reported in one ``InvalidSettings``, each with
its source, its key, what is wrong and what is allowed. Unknown keys are refused, so a misspelt
setting cannot be ignored in silence.

The declaration of a setting is its only description: type, bounds, default and sentence stand in
one place, and the documentation, ``sparrow config show`` and the error texts are drawn from it.
Names carry units: ``_bytes``, ``_s``, ``_per_s``. Sizes are plain numbers.

An environment name is ``SPARROW_`` and the key in capitals, section and key joined by two
underscores: ``SPARROW_JOURNAL__FILE_BYTES``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from sparrow.model.access import AccessSettings
from sparrow.model.errors import InvalidArgument, InvalidSettings
from sparrow.model.limits import PARTITIONS_MAX, REQUEST_BYTES_MAX
from sparrow.model.monitoring import MonitoringSettings
from sparrow.model.pipeline import PipelineSettings
from sparrow.model.push import NETWORKS_FORM, PORTS_FORM, PushSettings, parse_networks, parse_ports
from sparrow.model.stage import StagingSettings

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_S = 86400.0

ENVIRONMENT_PREFIX = "SPARROW_"

# A cluster scheduler that runs a service named "sparrow" sets these for every process in it; they
# are addresses of that service, not settings, and must not keep a broker from starting.
_SERVICE_LINK = re.compile(r"SPARROW_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)\Z")

_ADDRESS = {"form": "address"}
_OPTIONAL_ADDRESS = {"form": "address or none"}
_SECRET = {"form": "secret"}
_LISTS: Mapping[str, Any] = {"networks": parse_networks, "ports": parse_ports}
NONE = "none"
"""Stands for an address that nobody listens on."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker writes about itself."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The lowest level that is written."),
    ] = "info"
    format: Annotated[
        Literal["json", "console"],
        Meta(description="JSON lines for machines, or coloured lines for people."),
    ] = "json"


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How topics come into being."""

    auto_create: Annotated[
        bool, Meta(description="Whether publishing to a topic that does not exist creates it.")
    ] = True
    auto_create_per_s: Annotated[
        float, Meta(ge=0.001, le=1e6, description="How many topics may be created so in a second.")
    ] = 100.0
    count_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many topics the broker holds at most.")
    ] = 10_000
    partitions_default: Annotated[
        int,
        Meta(ge=1, le=PARTITIONS_MAX, description="Partitions of a topic created without a count."),
    ] = 1


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The shared write-ahead log."""

    file_bytes: Annotated[
        int, Meta(ge=1 * MIB, le=4 * GIB, description="Size at which a journal file is rotated.")
    ] = 128 * MIB
    group_bytes_max: Annotated[
        int, Meta(ge=64 * KIB, le=1 * GIB, description="Bytes gathered for one sync at most.")
    ] = 8 * MIB
    pending_bytes_max: Annotated[
        int,
        Meta(
            ge=REQUEST_BYTES_MAX,
            le=16 * GIB,
            description="Bytes that may wait to be written before publishers are refused.",
        ),
    ] = 64 * MIB
    rotate_after_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=30 * DAY_S,
            description="Age at which a journal file is rotated, however small.",
        ),
    ] = 900.0
    sync_interval_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=3600.0,
            description="Longest time that bytes of topics without durable receipts stay unsynced.",
        ),
    ] = 1.0
    unsealed_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * MIB,
            le=1024 * GIB,
            description="Bytes of finished files above which publishers wait for the sealing to catch up.",
        ),
    ] = 8 * GIB
    on_damage: Annotated[
        Literal["skip", "halt"],
        Meta(description="Whether recovery skips and reports a damaged batch, or refuses to start."),
    ] = "skip"


class LakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sealed Parquet segments."""

    compression: Annotated[
        Literal["none", "lz4", "zstd", "snappy"],
        Meta(description="How sealed segments are compressed."),
    ] = "zstd"
    row_group_bytes: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=1 * GIB,
            description="Size of a row group: the least that a lagging consumer reads at once.",
        ),
    ] = 4 * MIB


class MaintenanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Work that the broker does by itself."""

    retention_interval_s: Annotated[
        float,
        Meta(ge=0.1, le=DAY_S, description="Time between two looks for segments that may go."),
    ] = 60.0


class DedupeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is remembered to recognise a repeated publish."""

    keys_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000_000, description="Idempotency keys held for one topic at most."),
    ] = 1_000_000
    producer_requests_max: Annotated[
        int, Meta(ge=1, le=65_536, description="Latest requests held for one producer and stream.")
    ] = 256


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Connections of the binary protocol."""

    connections_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="How many connections are served at once.")
    ] = 10_000
    connection_bytes_max: Annotated[
        int,
        Meta(
            ge=1 * MIB,
            le=4 * GIB,
            description="Bytes of unanswered commands above which a connection is not read from.",
        ),
    ] = 64 * MIB
    total_bytes_max: Annotated[
        int,
        Meta(ge=16 * MIB, le=1024 * GIB, description="Bytes held for all connections together."),
    ] = 512 * MIB
    heartbeat_s: Annotated[
        float,
        Meta(ge=0.1, le=3600.0, description="How often a client has to say something; thrice that is dead."),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(ge=0.0, le=3600.0, description="How long commands under way may take when the broker stops."),
    ] = 3.0
    tls_certificate: Annotated[
        str, Meta(description="A PEM file with the certificate chain; with it every listener uses TLS.")
    ] = ""
    tls_key: Annotated[str, Meta(description="A PEM file with the key, unless the certificate's has it.")] = (
        ""
    )
    tls_client_ca: Annotated[
        str, Meta(description="A PEM file of authorities; with it clients need a certificate of one of them.")
    ] = ""
    tokens: Annotated[
        str,
        Meta(
            extra=_SECRET,
            description="Tokens that allow everything, as name:secret, separated by commas, beside those "
            "that `sparrow token` makes; without any, none is wanted.",
        ),
    ] = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one broker. The defaults start a durable broker on this machine only."""

    data: Annotated[
        str, Meta(min_length=1, description="The data directory; created when it does not exist.")
    ] = "./data"
    tcp: Annotated[
        str,
        Meta(extra=_OPTIONAL_ADDRESS, description="Address of the binary protocol; port 0 picks a free one."),
    ] = "127.0.0.1:9092"
    http: Annotated[
        str, Meta(extra=_ADDRESS, description="Address of the HTTP API; port 0 picks a free one.")
    ] = "127.0.0.1:8080"
    grpc: Annotated[
        str, Meta(extra=_ADDRESS, description="Address of the gRPC API; port 0 picks a free one.")
    ] = "127.0.0.1:8085"
    log: LogSettings = LogSettings()
    topics: TopicSettings = TopicSettings()
    journal: JournalSettings = JournalSettings()
    lake: LakeSettings = LakeSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    dedupe: DedupeSettings = DedupeSettings()
    staging: StagingSettings = StagingSettings()
    server: ServerSettings = ServerSettings()
    access: AccessSettings = AccessSettings()
    push: PushSettings = PushSettings()
    pipelines: PipelineSettings = PipelineSettings()


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Setting(NamedTuple):
    """One setting as the documentation prints it."""

    path: str
    type: str
    default: Any
    doc: str


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and for each key path the source that its value came from."""

    settings: Settings
    sources: dict[str, str]


class _Given(NamedTuple):
    """One value of one layer, before it is checked."""

    path: str
    value: Any
    source: str
    is_text: bool
    """Text from an environment or a command line may be read as a number or a boolean."""


def parse(
    file: object = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    file_name: str = "file",
    earlier_problems: Sequence[str] = (),
) -> Effective:
    """The settings that the layers give together: flags over environment over file over defaults.

    ``file`` is the mapping that the file holds. ``flags`` go by key path (``log.level``); ``None``
    means that a flag was not given. ``earlier_problems`` are those met while the file was read;
    they are reported together with the ones found here.
    """
    problems = list(earlier_problems)
    given = [
        *_from_file(file, f"file {file_name}", problems),
        *_from_environment(environ or {}, problems),
        *_from_flags(flags or {}, problems),
    ]
    values, sources, refused = _check_values(given, problems)
    settings = _build(values)
    problems += _broken_relations(settings, refused)
    if problems:
        raise _invalid(problems)
    return Effective(settings=settings, sources={path: sources.get(path, "default") for path in _FIELDS})


def describe() -> Iterator[Setting]:
    """Every setting in the order of its declaration."""
    defaults = flatten(Settings())
    for path, annotation in _FIELDS.items():
        yield Setting(path, _allowed(annotation), defaults[path], _meta(annotation).description or "")


def flatten(settings: Settings) -> dict[str, Any]:
    """The values by key path."""
    values: dict[str, Any] = {}
    for path in _FIELDS:
        owner: Any = settings
        for name in path.split("."):
            owner = getattr(owner, name)
        values[path] = owner
    return values


def masked(settings: Settings) -> dict[str, Any]:
    """The values by key path, with what is secret and set left out of sight."""
    return {path: "***" if value and is_secret(path) else value for path, value in flatten(settings).items()}


def environment_name(path: str) -> str:
    """``journal.file_bytes`` as ``SPARROW_JOURNAL__FILE_BYTES``."""
    return ENVIRONMENT_PREFIX + path.replace(".", "__").upper()


def flag_name(path: str) -> str:
    """``log.level`` as ``--log-level``."""
    return "--" + path.replace(".", "-").replace("_", "-")


def parse_address(text: str) -> Address:
    """Host and port of ``host:port``; a host with colons stands in brackets: ``[::1]:8080``."""
    match = re.match(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/@]+)):(\d{1,5})\Z", text)
    if match is None or int(match[3]) > 65535:
        raise _invalid([f"{text!r} is not an address; allowed: {_ADDRESS_FORM}"])
    return Address(match[1] or match[2], int(match[3]))


def parse_tokens(text: str) -> dict[str, str]:
    """Secrets and the names of the tokens that they are of."""
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, colon, secret = entry.partition(":")
        if not (name and colon and secret) or secret in found:
            raise _invalid([f"server.tokens: the entry of {name[:40]!r}; allowed: {_TOKEN_FORM}"])
        found[secret] = name
    return found


def is_secret(path: str) -> bool:
    """Whether a setting must not be shown."""
    return bool(_meta(_FIELDS[path]).extra == _SECRET)


# The layers. Each yields what it gives and notes what it may not give.


def _from_file(file: object, source: str, problems: list[str]) -> Iterator[_Given]:
    if file is None:
        return
    if not isinstance(file, Mapping):
        problems.append(
            f"{source}: holds {_kind(file)}; allowed: a mapping of settings, as in `data: ./data`"
        )
        return
    for key, value in file.items():
        if key in _SECTIONS:
            yield from _from_section(str(key), value, source, problems)
        elif key in Settings.__struct_fields__:
            yield _Given(str(key), value, source, is_text=False)
        else:
            problems.append(
                f"{source}: {key}: unknown key; {_suggestion(str(key), Settings.__struct_fields__)}"
            )


def _from_section(section: str, value: object, source: str, problems: list[str]) -> Iterator[_Given]:
    # A section whose lines are all commented out reads as nothing, and means just that.
    if value is None:
        return
    if not isinstance(value, Mapping):
        problems.append(f"{source}: {section}: is {_kind(value)}; allowed: a mapping of settings")
        return
    known = [path for path in _FIELDS if path.startswith(f"{section}.")]
    for key, inner in value.items():
        path = f"{section}.{key}"
        if path in known:
            yield _Given(path, inner, source, is_text=False)
        else:
            problems.append(f"{source}: {path}: unknown key; {_suggestion(path, known)}")


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Iterator[_Given]:
    known = {environment_name(path): path for path in _FIELDS}
    for name in sorted(environ):
        if not name.upper().startswith(ENVIRONMENT_PREFIX) or _SERVICE_LINK.match(name):
            continue
        if name in known:
            yield _Given(known[name], environ[name], f"environment {name}", is_text=True)
        else:
            problems.append(f"environment: {name}: unknown name; {_suggestion(name, list(known))}")


def _from_flags(flags: Mapping[str, Any], problems: list[str]) -> Iterator[_Given]:
    for path, value in flags.items():
        if value is None:
            continue
        if path in _FIELDS:
            yield _Given(path, value, f"flag {flag_name(path)}", is_text=True)
        else:
            problems.append(f"flag: {path}: unknown setting; {_suggestion(path, list(_FIELDS))}")


# Checking.


def _check_values(
    given: Sequence[_Given], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str], set[str]]:
    """The last value of each path with its source, and the paths that some layer got wrong."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    refused: set[str] = set()
    for item in given:
        try:
            value = _convert(item)
        except (msgspec.ValidationError, InvalidArgument):
            allowed = _allowed(_FIELDS[item.path])
            shown = "wrong" if is_secret(item.path) else repr(item.value)
            problems.append(f"{item.source}: {item.path}: is {shown}; allowed: {allowed}")
            refused.add(item.path)
        else:
            values[item.path], sources[item.path] = value, item.source
    return values, sources, refused


def _convert(item: _Given) -> Any:
    annotation = _FIELDS[item.path]
    value = msgspec.convert(item.value, annotation, strict=not item.is_text)
    form = _meta(annotation).extra
    if form == _ADDRESS or (form == _OPTIONAL_ADDRESS and value != NONE):
        parse_address(value)
    if form == _SECRET:
        parse_tokens(value)
    if form is not None and form["form"] in _LISTS:
        _LISTS[form["form"]](value)
    return value


def _build(values: Mapping[str, Any]) -> Settings:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return msgspec.convert(nested, Settings)


_AT_LEAST = (
    ("journal.pending_bytes_max", "journal.group_bytes_max"),
    ("server.total_bytes_max", "server.connection_bytes_max"),
    ("push.breaker_wait_max_s", "push.breaker_wait_s"),
)
_AT_MOST = (("journal.sync_interval_s", "journal.rotate_after_s"),)


def _broken_relations(settings: Settings, refused: set[str]) -> list[str]:
    """Problems between settings that are each fine; those with a refused part are not judged."""
    values, server = flatten(settings), settings.server
    broken = [(*pair, "at least") for pair in _AT_LEAST if values[pair[0]] < values[pair[1]]]
    broken += [(*pair, "at most") for pair in _AT_MOST if values[pair[0]] > values[pair[1]]]
    found: list[tuple[set[str], str]] = [
        (
            {path, other},
            f"settings: {path}: is {values[path]}; allowed: {bound} {other}, which is {values[other]}",
        )
        for path, other, bound in broken
    ]
    for name in ("tls_key", "tls_client_ca"):
        if getattr(server, name) and not server.tls_certificate:
            what = f"settings: server.{name}: is given without server.tls_certificate; allowed: both"
            found.append(({f"server.{name}", "server.tls_certificate"}, what))
    found += _shared_addresses(settings)
    return [problem for paths, problem in found if not paths & refused]


def _shared_addresses(settings: Settings) -> Iterator[tuple[set[str], str]]:
    given = {name: getattr(settings, name) for name in ("tcp", "http", "grpc")}
    addresses = {name: parse_address(text) for name, text in given.items() if text != NONE}
    names = list(addresses)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if _overlap(addresses[first], addresses[second]):
                yield (
                    {first, second},
                    f"settings: {second}: is {addresses[second]}, which {first} has taken; "
                    f"allowed: another port, or 0 for a free one",
                )


def _overlap(first: Address, second: Address) -> bool:
    if first.port != second.port or first.port == 0:
        return False
    return first.host == second.host or bool({first.host, second.host} & {"0.0.0.0", "::"})


# Words for people.


def _invalid(problems: Sequence[str]) -> InvalidSettings:
    count = "a setting is wrong" if len(problems) == 1 else f"{len(problems)} settings are wrong"
    lines = "".join(f"\n  {problem}" for problem in problems)
    hint = "Correct every line listed; `sparrow config table` lists all settings."
    return InvalidSettings(f"{count}:{lines}", hint=hint, problems=list(problems))


def _suggestion(name: str, known: Sequence[str]) -> str:
    folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.75)
    return f"did you mean {folded[near[0]]}?" if near else f"allowed: {', '.join(known)}"


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return f"the value {value!r}"


_TOKEN_FORM = "name:secret,name:secret …"
_ADDRESS_FORM = "host:port, as in 127.0.0.1:8080 or [::1]:8080, port 0 to 65535"


def _allowed(annotation: Any) -> str:
    kind, meta = get_args(annotation)[0], _meta(annotation)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return f"a {'whole ' if kind is int else ''}number from {meta.ge} to {meta.le}"
    forms = {"address": _ADDRESS_FORM, "address or none": f"{_ADDRESS_FORM}, or none", "secret": _TOKEN_FORM}
    forms |= {"networks": NETWORKS_FORM, "ports": PORTS_FORM}
    plain = "text that is not empty" if meta.min_length else "text"
    return forms.get((meta.extra or {}).get("form", ""), plain)


# The declarations above, by key path.


def _meta(annotation: Any) -> Meta:
    (meta,) = annotation.__metadata__
    assert isinstance(meta, Meta)
    return meta


def _fields_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, annotation in get_type_hints(struct, include_extras=True).items():
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            yield from _fields_of(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


_FIELDS: dict[str, Any] = dict(_fields_of(Settings))
_SECTIONS = {path.partition(".")[0] for path in _FIELDS if "." in path}
