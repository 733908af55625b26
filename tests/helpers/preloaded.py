"""What the server of ranks imports once, instead of every rank, which then starts in 0.1 s.

Nothing here may start a thread: ranks are forks.
"""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# At the end, as in conftest.py: studies/ has the package's sources beside it.
sys.path.append(str(Path(__file__).resolve().parents[2]))

for name in (
    *("torch.distributed", "torch._dynamo", "torch.profiler", "spectrain_ext"),
    *("sklearn.datasets", "sklearn.model_selection", "matplotlib.pyplot"),
    *("helpers.checkpoint_programs", "helpers.cli_programs", "helpers.loop_programs"),
    *("helpers.rank_pipelines", "helpers.value_programs"),
):
    with suppress(ImportError):  # a package that not everyone has
        import_module(name)
