"""Packages that only some of this one's features need, each named where it is missing."""

from importlib import import_module
from typing import Any


def require(module: str, what: str, extra: str = "train") -> Any:
    """Return a module that an extra brings.

    Args:
        module: its name.
        what: needs which package; begins the message.
        extra: of this package.

    Raises:
        ModuleNotFoundError: it is missing; the message names the remedy.
    """
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f"pip install 'spectrain_ext[{extra}]'"
        raise ModuleNotFoundError(
            f"{what}, which is not installed: {remedy}", name=error.name
        ) from error


def require_matplotlib() -> None:
    """Find out before there is something to draw."""
    require("matplotlib", "the picture needs matplotlib")


def require_tensorboard() -> Any:
    """Return ``torch.utils.tensorboard``, or find out before there are figures."""
    return require("torch.utils.tensorboard", "the curves need TensorBoard", "tensorboard")
