"""Imports shared modules once in the server of ranks, so that each rank starts in 0.1 s.

It must not start any thread: ranks are forks.
"""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# At the end, as in conftest.py: the package's sources are next to studies/.
sys.path.append(str(Path(__file__).resolve().parents[2]))

for name in (
    *("torch.distributed", "torch._dynamo", "torch.profiler", "spectrain_ext"),
    *("sklearn.datasets", "sklearn.model_selection", "matplotlib.pyplot"),
    *("helpers.checkpoint_programs", "helpers.rank_cases"),
    *("helpers.replica_programs", "helpers.value_programs"),
):
    with suppress(ImportError):  # an optional package
        import_module(name)
