"""What a command cannot do as it was asked to."""


class OptionError(ValueError):
    """An option that cannot be what it is; ``option`` is its name on the command line."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason.removeprefix(f"{option}: "))  # which arguments' errors begin with
        self.option = option
