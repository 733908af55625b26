"""What an operator does when torch.compile traces it: it becomes its torch.ops.spectrain form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def traceable(function: Function) -> Function:
    """Let torch.compile put an operator into its graph; the eager call stays as direct as it is.

    `spectrain_ext.library` has a function of the same name, which takes the same arguments.
    """
    name = function.__name__

    @wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from . import library  # which stands on the eager operators

            return getattr(library, name)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, operator)
