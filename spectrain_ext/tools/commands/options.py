"""Parses and completes option values, imports your own methods, and prints plain text."""

import importlib
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from spectrain_ext.method import Method, find_method, methods

# Larger numbers overflow, or take all memory.
POSITIVE = click.IntRange(1, 1_000_000_000)
_LARGEST = 100_000
MANY = click.IntRange(1, _LARGEST)
FEW = click.IntRange(1, 1000)
# Files are named after methods.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def names(
    context: click.Context, parameter: click.Parameter, value: str | Sequence[str] | None
) -> list[str]:
    """Split the comma-separated names of a repeatable option; an omitted one has none."""
    texts = [value] if isinstance(value, str) else value or ()
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def parsed_window(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Parse a named window, a positive number, or one per stage with commas."""
    if value is None or value in ("classic", "wide"):
        return value
    try:
        numbers = tuple(int(number) for number in value.split(","))
        if min(numbers) < 1 or max(numbers) > _LARGEST:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"expected 'classic', 'wide', a number from 1 to {_LARGEST}, or one per stage with "
            f"commas, got {value!r}"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def amounts(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> float | tuple[float, ...] | None:
    """Parse a positive number or several with commas, for example 24e9, 80G or .5."""
    if value is None:
        return None
    try:
        parts = [part.strip() for part in value.split(",")]
        numbers = tuple(
            float(part[:-1]) * _UNITS[part[-1]] if part[-1:] in _UNITS else float(part)
            for part in parts
        )
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"expected positive numbers with commas, such as .5, 24e9 or 24G, got {value!r}"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def plain_console(**more: Any) -> Console:
    """Return a console that prints brackets and colons as they are, also in tables."""
    return Console(markup=False, emoji=False, highlight=False, **more)


def plain_table(title: str, *headings: str, gap: int = 0) -> Table:
    """Return a narrow table without a frame, ``gap`` more columns between cells than one."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    table = Table(title=title, title_justify="left", padding=(0, gap, 0, 0), **look)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def printable(text: str) -> str:
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def completes(
    words: Callable[[], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a shell completion of comma-separated words."""

    def complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
        before, comma, start = typed.rpartition(",")
        return [f"{before}{comma}{word}" for word in words() if word.startswith(start)]

    return complete


# Methods named as module:NAME, from the working directory or PYTHONPATH.


def is_imported(name: str) -> bool:
    return ":" in name


@lru_cache  # calls a function that makes a method once
def method_of(name: str) -> Method:
    """Return a method by its name, or ``module:NAME``: a Method, or a function that makes one."""
    if not is_imported(name):
        return find_method(name)
    method = imported(name)
    where = f"{name!r}"
    if callable(method) and not isinstance(method, Method):
        where = f"{name!r}, called,"
        method = result_of(where, method)
    if not isinstance(method, Method):
        raise ValueError(
            f"{where} is of type {type(method).__name__}, expected a spectrain_ext.Method, or a "
            "function without arguments that gives one"
        )
    if method.name in methods():
        raise ValueError(
            f"{where} has the name {method.name!r}, which is a method of spectrain_ext; give it "
            "another: dataclasses.replace(method, name=...)"
        )
    if not isinstance(method.name, str) or not _NAME.fullmatch(method.name):
        raise ValueError(
            f"{where} has the name {method.name!r}, which is to be the name of files: expected "
            "letters, digits, '_', '-', '+' and '.'"
        )
    return method


def imported(name: str) -> Any:
    """Return what ``module:NAME`` names; a ValueError says why it cannot."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # first, as for ``python -m``
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        raise ValueError(
            f"there is no module {module!r} in {here} or on PYTHONPATH"
            if missing
            else f"module {module!r} cannot be imported: {_described(error)}"
        ) from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        raise ValueError(f"module {module!r} has no {attribute!r}") from error


def result_of(what: str, function: Callable[[], Any]) -> Any:
    """Call a function that runs your own code; a ValueError says where it failed."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{what} failed: {_described(error)}") from error


def _described(error: Exception, files: Sequence[str | None] = ()) -> str:
    """Describe an error with its last line in ``files``, or else in the working directory."""
    lines = traceback.extract_tb((error.__cause__ or error).__traceback__)
    own = [at for at in lines if at.filename in files]
    own = own or [at for at in lines if at.filename.startswith(os.getcwd())]
    last = (own or lines)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


@contextmanager
def own_failures(*names: str) -> Iterator[None]:
    """Turn errors from the code of your own methods into a ValueError with the line."""
    modules = [name.partition(":")[0] for name in names if is_imported(name)]
    try:
        yield
    except Exception as error:
        files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
        if any(at.filename in files for at in traceback.extract_tb(error.__traceback__)):
            raise ValueError(_described(error, files)) from error
        if modules and isinstance(error, TypeError):
            raise ValueError(str(error)) from error
        raise
