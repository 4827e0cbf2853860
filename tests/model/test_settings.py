"""Settings: precedence, complete reports of what is wrong, and documentation of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.cli.config import markdown
from sparrow.cli.settings import load
from sparrow.model.errors import InvalidSettings
from sparrow.model.settings import (
    Address,
    Settings,
    describe,
    environment_name,
    flatten,
    parse,
    parse_address,
)

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "configuration.md"


def problems_of(**layers: object) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        parse(**layers)  # type: ignore[arg-type]
    problems = caught.value.details["problems"]
    assert all(problem in caught.value.message for problem in problems)
    return list(problems)


# Precedence.


def test_without_layers_every_setting_has_its_default_and_says_so() -> None:
    effective = parse()
    assert effective.settings == Settings()
    assert set(effective.sources.values()) == {"default"}


def test_flags_win_over_the_environment_which_wins_over_the_file() -> None:
    effective = parse(
        {"data": "file", "http": "127.0.0.1:1", "log": {"level": "error", "format": "console"}},
        {"SPARROW_HTTP": "127.0.0.1:2", "SPARROW_LOG__LEVEL": "warning"},
        {"log.level": "debug"},
        file_name="s.yaml",
    )
    assert effective.settings.data == "file"
    assert effective.settings.http == "127.0.0.1:2"
    assert effective.settings.log.level == "debug"
    assert effective.settings.log.format == "console"
    assert effective.sources["data"] == "file s.yaml"
    assert effective.sources["http"] == "environment SPARROW_HTTP"
    assert effective.sources["log.level"] == "flag --log-level"
    assert effective.sources["tcp"] == "default"


def test_a_flag_that_was_not_given_leaves_the_value_alone() -> None:
    assert parse(None, {"SPARROW_DATA": "/d"}, {"data": None}).settings.data == "/d"


def test_an_empty_section_of_the_file_changes_nothing() -> None:
    assert parse({"log": None}).settings == Settings()


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("SPARROW_JOURNAL__FILE_BYTES", "134217728", "journal.file_bytes", 134217728),
        ("SPARROW_TOPICS__AUTO_CREATE", "false", "topics.auto_create", False),
        ("SPARROW_TOPICS__AUTO_CREATE_PER_S", "2.5", "topics.auto_create_per_s", 2.5),
        ("SPARROW_LAKE__COMPRESSION", "lz4", "lake.compression", "lz4"),
    ],
)
def test_text_of_the_environment_becomes_the_type_of_the_setting(
    name: str, text: str, path: str, value: object
) -> None:
    assert flatten(parse(None, {name: text}).settings)[path] == value


def test_every_default_passes_its_own_checks() -> None:
    defaults = flatten(Settings())
    assert parse(None, None, defaults).settings == Settings()


def test_every_setting_can_be_set_by_its_environment_name() -> None:
    environ = {environment_name(path): str(value) for path, value in flatten(Settings()).items()}
    effective = parse(None, environ)
    assert effective.settings == Settings()
    assert all(source.startswith("environment ") for source in effective.sources.values())


# Refusals.


def test_all_errors_of_all_layers_are_reported_at_once() -> None:
    found = problems_of(
        file={"journal": {"file_bytes": 1}, "tcp": 5, "colour": "red"},
        environ={"SPARROW_LOG__LEVEL": "loud", "SPARROW_NONSENSE": "1"},
        flags={"http": "nowhere"},
    )
    assert len(found) == 6


def test_a_wrong_value_names_its_source_its_key_the_value_and_what_is_allowed() -> None:
    (problem,) = problems_of(file={"journal": {"file_bytes": 12}}, file_name="s.yaml")
    assert problem == (
        "file s.yaml: journal.file_bytes: is 12; allowed: a whole number from 1048576 to 4294967296"
    )


def test_a_wrong_value_is_reported_even_when_a_later_layer_overrides_it() -> None:
    (problem,) = problems_of(file={"log": {"level": "loud"}}, flags={"log.level": "info"})
    assert "loud" in problem


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"file": {"journal": {"file_byte": 1}}}, "did you mean journal.file_bytes?"),
        ({"file": {"journl": {}}}, "did you mean journal?"),
        ({"environ": {"SPARROW_JOURNAL_FILE_BYTES": "1"}}, "did you mean SPARROW_JOURNAL__FILE_BYTES?"),
        ({"environ": {"sparrow_data": "x"}}, "did you mean SPARROW_DATA?"),
        ({"flags": {"log.levl": "info"}}, "did you mean log.level?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    layers: dict[str, object], expected: str
) -> None:
    (problem,) = problems_of(**layers)
    assert expected in problem


def test_an_unknown_key_without_a_near_one_lists_what_is_allowed() -> None:
    (problem,) = problems_of(file={"zzz": 1})
    assert "allowed: data, tcp, http" in problem


@pytest.mark.parametrize("name", ["HOME", "SPARROWHAWK", "XSPARROW_DATA"])
def test_names_of_other_programs_are_left_alone(name: str) -> None:
    assert parse(None, {name: "x"}).settings == Settings()


@pytest.mark.parametrize(
    "name",
    [
        "SPARROW_SERVICE_HOST",
        "SPARROW_SERVICE_PORT",
        "SPARROW_SERVICE_PORT_HTTP",
        "SPARROW_PORT",
        "SPARROW_PORT_8080_TCP_ADDR",
    ],
)
def test_service_links_of_a_cluster_scheduler_do_not_keep_a_broker_from_starting(name: str) -> None:
    assert parse(None, {name: "tcp://10.0.0.1:8080"}).settings == Settings()


@pytest.mark.parametrize("content", [[], "text", 7, ["data"]])
def test_a_file_that_is_not_a_mapping_is_refused(content: object) -> None:
    (problem,) = problems_of(file=content)
    assert "a mapping of settings" in problem


@pytest.mark.parametrize("value", [3, "x", ["level"]])
def test_a_section_that_is_not_a_mapping_is_refused(value: object) -> None:
    (problem,) = problems_of(file={"log": value})
    assert "log: is" in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data", ""),
        ("data", None),
        ("topics.auto_create", "perhaps"),
        ("topics.partitions_default", 0),
        ("topics.partitions_default", 1025),
        ("topics.count_max", 1.5),
        ("journal.rotate_after_s", float("nan")),
        ("journal.sync_interval_s", float("inf")),
        ("journal.on_damage", "panic"),
        ("lake.compression", "brotli"),
        ("dedupe.keys_max", True),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused(path: str, value: object) -> None:
    section, _, key = path.rpartition(".")
    (problem,) = problems_of(file={section: {key: value}} if section else {key: value})
    assert f"{path}: is" in problem


def test_a_dotted_key_is_not_a_second_way_to_write_a_section() -> None:
    (problem,) = problems_of(file={"log.level": "debug"})
    assert "unknown key" in problem


# Relations.


def test_less_may_not_wait_than_one_group_holds() -> None:
    sizes = {"group_bytes_max": 32 * 1024**2, "pending_bytes_max": 16 * 1024**2}
    (problem,) = problems_of(file={"journal": sizes})
    assert "at least journal.group_bytes_max, which is 33554432" in problem


def test_syncs_may_not_be_rarer_than_rotations() -> None:
    (problem,) = problems_of(file={"journal": {"rotate_after_s": 1.0, "sync_interval_s": 2.0}})
    assert "at most journal.rotate_after_s" in problem


@pytest.mark.parametrize("http", ["127.0.0.1:9092", "0.0.0.0:9092"])
def test_two_listeners_may_not_share_an_address(http: str) -> None:
    (problem,) = problems_of(flags={"http": http})
    assert problem.startswith(f"settings: http: is {http}, which tcp has taken")


def test_listeners_may_all_ask_for_a_free_port() -> None:
    free = "127.0.0.1:0"
    assert parse(None, None, {"tcp": free, "http": free, "grpc": free}).settings.tcp == free


def test_a_relation_is_not_judged_when_one_of_its_sides_is_wrong() -> None:
    (problem,) = problems_of(file={"journal": {"group_bytes_max": 10**9, "pending_bytes_max": "x"}})
    assert "pending_bytes_max: is 'x'" in problem


# Addresses.


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("localhost:65535", Address("localhost", 65535)),
        ("[::1]:8080", Address("::1", 8080)),
        ("my-host.example:80", Address("my-host.example", 80)),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:65536", "::1:80", "http://host:80", "host:80 ", "host:-1"]
)
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidSettings):
        parse_address(text)


# The file.


def write(folder: Path, text: str) -> Path:
    path = folder / "sparrow.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_yaml_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "data: /d\njournal:\n  on_damage: halt\n")
    effective = load(path, {}, {})
    assert effective.settings.journal.on_damage == "halt"
    assert effective.sources["data"] == f"file {path}"


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing yet\n"), {}, {}).settings == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: /d\nlog: [unclosed\n", "line 3"),
        ("data: /d\ndata: /e\n", "line 2: is not YAML: the key data is given twice"),
        ("data: /d\nhttp: !!python/object:os.system x\n", "line 2"),
        ("- a list\n", "a mapping of settings"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidSettings, match=expected):
        load(write(tmp_path, text), {}, {})


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparrow.yaml"
    path.write_bytes(b"\x80\x81data")
    with pytest.raises(InvalidSettings, match="is not YAML"):
        load(path, {}, {})


def test_a_missing_file_is_reported_together_with_all_other_problems(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load(tmp_path / "none.yaml", {"SPARROW_NONSENSE": "1"}, {"http": "x"})
    assert len(caught.value.details["problems"]) == 3
    assert "No such file" in caught.value.message


# Documentation.


def test_every_setting_has_a_sentence_of_documentation() -> None:
    for setting in describe():
        assert setting.doc.endswith("."), setting.path
        assert setting.doc[0].isupper(), setting.path
        assert setting.type, setting.path


def test_settings_are_described_in_the_order_of_their_declaration() -> None:
    assert [setting.path for setting in describe()] == list(flatten(Settings()))


def test_the_guide_holds_the_present_table_of_settings() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    table = "\n".join(markdown())
    assert table in guide, "run `sparrow config table` and put its output into the guide"
