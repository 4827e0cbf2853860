"""Tools for the data directory of a stopped broker: inspection, verification, rebuilding."""
