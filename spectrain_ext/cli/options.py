"""Options: what is typed, as values; and text, as it is, for a terminal."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console

POSITIVE = click.IntRange(min=1)


def names(
    context: click.Context, parameter: click.Parameter, value: str | Sequence[str] | None
) -> list[str]:
    """Names with commas, of an option that may be repeated; none where it was not given."""
    texts = [value] if isinstance(value, str) else value or ()
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def numbers(*words: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A number of at least 1, or one per stage with commas; or one of some words."""

    def convert(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        if value is None or value in words:
            return value
        try:
            found = tuple(int(number) for number in value.split(","))
            if min(found) < 1:
                raise ValueError
        except ValueError:
            listed = [*map(repr, words), "a number of at least 1, or one per stage with commas"]
            raise click.BadParameter(f"expected {', '.join(listed)}, got {value!r}") from None
        return found[0] if len(found) == 1 else found

    return convert


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A finite number that is not negative, or None where none was given."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"expected a finite number of at least 0, got {value}")
    return value


def plain_console(**more: Any) -> Console:
    """A console that prints text as it is, in tables as well: brackets and colons are no markup."""
    return Console(markup=False, emoji=False, highlight=False, **more)


def printable(text: str) -> str:
    """Return the text, with backslashes in place of what would steer a terminal."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
