"""Printable: text that files or their names brought along, for a terminal."""


def printable(text: str) -> str:
    """Return the text, with backslashes in place of what would steer a terminal."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
