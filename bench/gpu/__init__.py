"""What gpu_suite.py is made of: its plan, its steps, the parts that measure, the report."""

import root  # noqa: F401  # finds studies
