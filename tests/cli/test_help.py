"""Tests the help of every option, which the documentation repeats."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from spectrain_ext.cli.group import main

OPTIONS = [
    pytest.param(option, id=f"{name} {option.opts[0]}")
    for name, command in main.commands.items()
    for option in command.params
]


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_a_sentence_of_its_own(option: click.Option) -> None:
    assert option.help, "no help"
    said, _, default = option.help.partition("  [default: ")
    assert re.match(r"[A-Z]|cpu", said), said
    assert said.endswith("."), said
    # words that refer to the previous option
    assert not re.match(r"(Of|Its|Likewise|Write them|Also|May be) ", said), said
    assert not default or default.endswith("]"), default
    for inner in ("issue", "target", "ticket"):
        assert inner not in said.lower()


def test_the_list_of_commands_is_not_cut_off() -> None:
    done = CliRunner().invoke(main, ["--help"], terminal_width=80)
    listed = done.output.partition("Commands:")[2]
    assert set(re.findall(r"^  (\w+)", listed, re.MULTILINE)) == set(main.commands)
    assert "..." not in listed


@pytest.mark.parametrize("command", main.commands)
def test_h_is_help(command: str) -> None:
    done = CliRunner().invoke(main, [command, "-h"])
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: main {command} [OPTIONS]")
