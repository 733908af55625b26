"""Compares operators with rivals and plain copies: workloads, operations, measurement in turn."""
