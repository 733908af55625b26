"""SaveGuard: parameters that hold predicted weights refuse to be saved or copied."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.compiler import is_compiling

_SAVES = nn.Module._save_to_state_dict.__code__
_NAMES = ("detach", "__deepcopy__", "__reduce_ex__")


class SaveGuard:
    """Has ``state_dict``, ``torch.save``, pickle and deepcopy of any module raise RuntimeError.

    That module may be any that holds the parameters: a stage, the uncut model, a wrapper of it.
    Torch's hooks belong to modules, so the parameters themselves raise, by attributes that shadow
    their class's: ``detach`` where ``nn.Module._save_to_state_dict`` is what calls it, and what
    ``copy`` and ``pickle`` ask an object for. Compiled code does not look at these.

    Args:
        why: the error's message, with the remedy.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._lifted = False

    def put(self, params: Iterable[Tensor]) -> None:
        """Guard these parameters, until ``take`` is called."""
        self._lifted = False
        for p in params:
            own = (partial(self._detach, p), self._copy, self._copy)
            vars(p).update(zip(_NAMES, own, strict=True))

    def take(self, params: Iterable[Tensor]) -> None:
        """Let them be saved again; may be repeated, or done without a ``put``."""
        for p in params:
            for name in _NAMES:
                vars(p).pop(name, None)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, a ``state_dict`` is made by somebody who puts the true weights into it."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def _detach(self, p: Tensor) -> Tensor:
        if not is_compiling() and not self._lifted and sys._getframe(1).f_code is _SAVES:
            raise RuntimeError(f"state_dict: {self._why}")
        return Tensor.detach(p)

    def _copy(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"copying or pickling a module: {self._why}")
