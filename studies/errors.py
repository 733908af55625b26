"""Errors in a command's options."""


class OptionError(ValueError):
    """An option has an invalid value; ``option`` is its name on the command line."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason.removeprefix(f"{option}: "))  # the prefix of argument errors
        self.option = option
