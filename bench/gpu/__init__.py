"""The parts of gpu_suite.py: plan, steps, measurements, report."""

import root  # noqa: F401  # finds studies
