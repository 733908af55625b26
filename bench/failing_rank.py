"""python failing_rank.py PLAN SCRIPT ARGUMENTS: runs a rank that reports its events and fails.

PLAN is a JSON file of ``bench_failures.py``: the socket for reports, and a fault for every start of
the ranks. SCRIPT is any script that trains with a ``CheckpointManager``.
"""

# ruff: noqa: E402 - the time of imports is measured
import time

BEGUN = time.monotonic()

import json
import os
import runpy
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

TORCH = time.monotonic()

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointManager
from spectrain_ext.distributed.board import Board

PACKAGE = time.monotonic()

RANK, START = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Teller:
    """Sends events of this rank to the measuring process."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(path)

    def __call__(self, event: str, moment: float | None = None, **more: Any) -> None:
        moment = time.monotonic() if moment is None else moment
        said = {"event": event, "time": moment, "rank": RANK, "start": START, **more}
        self._socket.send(json.dumps({"pid": os.getpid(), **said}).encode())


class Failing:
    """Triggers the fault of this start, if it belongs to this rank."""

    def __init__(self, plan: dict[str, Any], tell: Teller) -> None:
        faults = plan["faults"]
        self._fault = next(iter(faults[START:]), None)
        if self._fault is not None and self._fault["rank"] != RANK:
            self._fault = None
        self._filler, self._tell = plan["filler"], tell
        self.next = 0  # the next forward's minibatch
        self.microbatches, self._forwards = 1, 0

    def on_forward(self, module: torch.nn.Module, _: object) -> None:
        fault = self._fault
        if not module.training or not torch.is_grad_enabled():
            return
        self._forwards += 1
        if self._forwards % self.microbatches != 1 % self.microbatches:
            return
        here, self.next = self.next, self.next + 1
        if fault is None or here != fault["minibatch"] or fault["kind"] == "full":
            return
        if fault["kind"] == "exception":
            self._made()
            raise ArithmeticError("planned")
        threading.Timer(fault["delay"], self._send).start()

    def _send(self) -> None:
        assert self._fault is not None
        number = signal.SIGKILL if self._fault["kind"] == "kill" else signal.SIGSTOP
        self._made()
        os.kill(os.getpid(), number)

    def before_save(self) -> None:
        if self._fault is None or self._fault["kind"] != "full":
            return
        if self.next <= self._fault["minibatch"]:
            return
        self._made()
        if self._filler is None:  # no small disk that could be filled
            import resource

            resource.setrlimit(
                resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )
            return
        with suppress(OSError), open(self._filler, "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def _made(self) -> None:
        self._tell("fault", minibatch=self.next)


def told_of(tell: Teller, failing: Failing) -> None:
    """Report calls and returns of the package's functions."""
    join_ranks, build, restore = (
        st.join_ranks,
        st.DistributedPipeline.__init__,
        CheckpointManager.restore,
    )
    run, save, learn = CheckpointManager.run, CheckpointManager.save, Board._accept_cause

    def joined(**given: Any) -> tuple[int, int]:
        tell("script")
        found = join_ranks(**given)
        tell("group")
        return found

    def built(self: Any, stage: torch.nn.Module, *given: Any, **more: Any) -> None:
        tell("data")
        stage.register_forward_pre_hook(failing.on_forward)
        build(self, stage, *given, **more)
        failing.microbatches = self.places[0].microbatches
        tell("pipeline")

    def restored(self: Any) -> Any:
        found = restore(self)
        failing.next = self.minibatches
        tell("restored", minibatches=self.minibatches)
        return found

    def ran(self: Any, *given: Any, **more: Any) -> Any:
        for result in run(self, *given, **more):
            tell("minibatch", minibatch=result.index)
            yield result

    def saved(self: Any, *given: Any) -> Any:
        failing.before_save()
        return save(self, *given)

    def learnt(self: Any, cause: Any) -> Any:
        if self.cause is None:
            tell("heard", cause=str(cause))
        return learn(self, cause)

    st.join_ranks = joined
    st.DistributedPipeline.__init__ = built  # type: ignore[method-assign, assignment]
    CheckpointManager.restore = restored  # type: ignore[method-assign]
    CheckpointManager.run, CheckpointManager.save = ran, saved  # type: ignore[method-assign, assignment]
    Board._accept_cause = learnt  # type: ignore[method-assign]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    if plan["filler"] is not None:
        Path(plan["filler"]).unlink(missing_ok=True)
    tell = Teller(plan["socket"])
    for event, moment in (("begun", BEGUN), ("torch", TORCH), ("package", PACKAGE)):
        tell(event, moment)
    told_of(tell, Failing(plan, tell))
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
