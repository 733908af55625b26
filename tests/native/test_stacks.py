"""Tests how the stacks of other threads are read, which only a thread that watches does."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading

import pytest

from spectrain_ext import _C

pytestmark = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no thread may look into another one"
)


def test_stacks_are_those_of_the_threads():
    inside, end = threading.Event(), threading.Event()

    def wait_inside():
        inside.set()
        end.wait()

    thread = threading.Thread(target=wait_inside)
    thread.start()
    inside.wait()
    line, found = sys._getframe().f_lineno, _C.stacks()
    end.set()
    thread.join()
    assert found[threading.get_ident()][0] == (__file__, line, sys._getframe().f_code.co_name)
    functions = [function for _, _, function in found[thread.ident]]
    assert functions.index("wait_inside") < functions.index("run") < functions.index("_bootstrap")


class Finalized:
    def __init__(self, ended):
        self.itself, self.ended = self, ended

    def __del__(self):
        self.ended.append(True)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_finalizer_runs_while_stacks_are_read(enabled):
    """It could let the thread go on whose frames are followed."""
    ended = []

    def deep(calls):
        if calls:
            return deep(calls - 1)
        gc.collect()
        Finalized(ended)
        assert len(_C.stacks()[threading.get_ident()]) > 100
        return len(ended)

    threshold = gc.get_threshold()
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(50)
    try:
        assert deep(100) == 0
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
    gc.collect()
    assert ended == [True]
