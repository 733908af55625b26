"""Runs ``spectrain`` under torchrun with a rank that kills itself once.

The first argument is the rank, the second the forward, counted from 0; the others go to spectrain.
"""

import os
import signal
import sys
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))  # studies, after what is installed

from studies import compare
from studies.__main__ import main


class Killed(nn.Module):
    def __init__(self, module: nn.Module, forward: int) -> None:
        super().__init__()
        self.module = module
        self.left = forward

    def forward(self, value: object) -> object:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.module(value)


if __name__ == "__main__":
    rank, forward = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    build = compare.stages_in

    def build_faulty(*given: object) -> list[nn.Module]:
        stages = build(*given)  # type: ignore[arg-type]
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        # parameters have the same names before and after the restart
        stages[rank] = Killed(stages[rank], -1 if again else forward)
        return stages

    if int(os.environ["RANK"]) == rank:
        compare.stages_in = build_faulty
    main(prog_name="spectrain")
