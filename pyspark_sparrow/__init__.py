"""Makes ``format("sparrow")`` known to Spark with no registration.

Spark imports every top-level module named ``pyspark_*`` when it first looks for a data source, in every
application, so nothing is imported here beyond the class itself.
"""

from sparrow.spark.source import SparrowDataSource as DefaultSource

__all__ = ["DefaultSource"]
