"""The benchmark behind ``spectrain bench``: operations, rivals, clocks, reports."""
