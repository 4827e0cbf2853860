"""The template for Spark Declarative Pipelines: what it declares does what it says, and Spark's own command
runs it where its packages are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml

from sparrow.spark.java import prepare_java
from tests.spark.conftest import Served

pytestmark = pytest.mark.soak
"""Half a minute of Spark: `make test-spark` runs them."""

PROJECT = Path(__file__).resolve().parents[2] / "examples" / "declarative"
PACKAGES = {
    "grpc": "grpcio",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "zstandard": "zstandard",
    "pandas": "pandas",
}
PATIENCE_S = 600.0


def is_there(module: str) -> bool:
    """Whether a module can be imported; one that has no parent cannot."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


MISSING = [package for module, package in PACKAGES.items() if not is_there(module)]


def publish(given: Served, first: int) -> None:
    """Two orders, one of them large."""
    bodies = [{"id": f"o-{first}", "amount": 5}, {"id": f"o-{first + 1}", "country": "de", "amount": 5000}]
    given.client.publish_batch("orders.us", [json.dumps(body).encode() for body in bodies])


def alerts(given: Served) -> list[tuple[str | None, str]]:
    """The keys and ids of what the sink wrote."""
    return [(each.key, json.loads(each.data or b"")["id"]) for each in given.client.read("alerts.large")]


def declared(servers: str, spark: Any) -> tuple[dict[str, Any], list[Any]]:
    """What the template declares, when it is loaded as Spark's command loads it: its outputs and flows."""
    from pyspark.pipelines.graph_element_registry import (
        GraphElementRegistry,
        graph_element_registration_context,
    )

    outputs: dict[str, Any] = {}
    flows: list[Any] = []

    class Registry(GraphElementRegistry):
        def register_output(self, output: Any) -> None:
            outputs[output.name] = output

        def register_flow(self, flow: Any) -> None:
            flows.append(flow)

        def register_auto_cdc_flow(self, flow: Any) -> None:
            raise AssertionError(flow)

        def register_sql(self, sql_text: str, file_path: Path) -> None:
            raise AssertionError(sql_text)

    spec = yaml.safe_load((PROJECT / "spark-pipeline.yml").read_text())
    assert spec["libraries"] == [{"glob": {"include": "transformations/**"}}]
    (name,) = spec["configuration"]
    spark.conf.set(name, servers)
    try:
        with graph_element_registration_context(Registry()):
            for file in sorted((PROJECT / "transformations").glob("*.py")):
                found = importlib.util.spec_from_file_location(file.stem, file)
                assert found is not None
                assert found.loader is not None
                found.loader.exec_module(importlib.util.module_from_spec(found))
    finally:
        spark.conf.unset(name)
    return outputs, flows


def test_the_flows_of_the_template_fill_a_table_and_a_topic_and_go_on(
    spark: Any, served: Served, tmp_path: Path
) -> None:
    """Each is written as Spark writes it: one query a flow, with a checkpoint, until all that is there is
    done."""
    publish(served, 1)
    outputs, flows = declared(served.address, spark)
    assert {(flow.name, flow.target) for flow in flows} == {("orders", "orders"), ("large_orders", "alerts")}
    for turn in range(2):
        for flow in flows:
            query = flow.func().writeStream.option("checkpointLocation", str(tmp_path / flow.name))
            query = query.trigger(availableNow=True).outputMode("append")
            output = outputs[flow.target]
            if flow.target == "orders":
                query.format("parquet").start(str(tmp_path / "table")).awaitTermination()
            else:
                query.format(output.format).options(**output.options).start().awaitTermination()
        orders = spark.read.parquet(str(tmp_path / "table"))
        assert orders.columns == ["id", "country", "amount", "publish_time"]
        assert orders.count() == 2 * (turn + 1)
        assert alerts(served) == [(f"o-{n}", f"o-{n}") for n in (2, 4)[: turn + 1]]
        publish(served, 3)
    lags = {name: report.depth for name, report in served.client.lag().items()}
    waiting, last_batch = 2, 2  # Spark tells a source that a batch is done when it plans the next.
    assert lags == dict.fromkeys(("declarative-orders", "declarative-alerts"), waiting + last_batch)


@pytest.mark.skipif(bool(MISSING), reason=f"spark-pipelines needs {', '.join(MISSING)}")
def test_spark_runs_the_template(served: Served, tmp_path: Path) -> None:
    """As a user does, in a copy of the project with another broker and storage."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    file = project / "spark-pipeline.yml"
    spec = yaml.safe_load(file.read_text())
    spec["storage"] = (tmp_path / "storage").as_uri()
    spec["configuration"]["sparrow.servers"] = f"sparrow://{served.address}"
    file.write_text(yaml.safe_dump(spec))
    publish(served, 1)

    def run(command: str) -> None:
        ran = subprocess.run(
            [Path(pyspark.__file__).parent / "bin" / "spark-pipelines", command],
            cwd=project,
            env={
                **os.environ,
                "JAVA_HOME": str(prepare_java()),
                "SPARK_LOCAL_IP": "127.0.0.1",
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_DRIVER_PYTHON": sys.executable,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    run("dry-run")
    assert "alerts.large" not in [topic.name for topic in served.client.topics()]
    run("run")
    assert alerts(served) == [("o-2", "o-2")]
