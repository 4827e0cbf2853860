"""Pipelines: Spark jobs that are operated like any other subscription (docs/guides/pipelines.md)."""
