"""What a program of ranks does to itself to fail."""

from __future__ import annotations

import os
import signal
import threading


def commit(fault: str) -> None:
    """Commit a fault; one that begins with "/" is a pipe, whose reader notices the hang."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(7)
    if fault == "exception":
        raise ArithmeticError("planned")
    if fault == "hang":
        threading.Event().wait()
    if fault.startswith("/"):
        with open(fault, "w"):
            threading.Event().wait()
