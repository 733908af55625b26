"""Raises in subinterpreters, where ``import torch`` would block forever without a message."""

from importlib import import_module

for _name in ("_interpreters", "_xxsubinterpreters"):  # Python 3.13, and earlier
    try:
        _interpreters = import_module(_name)
    except ImportError:
        continue
    if _interpreters.get_current() != _interpreters.get_main():
        raise ImportError("spectrain_ext: torch cannot be used in a subinterpreter")
    break
