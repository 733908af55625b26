"""Help and completion: every option describes itself, and its values complete."""

from __future__ import annotations

import re

import pytest
from click.shell_completion import BashComplete
from helpers.cli_programs import called, spectrain

from spectrain_ext.method import methods
from spectrain_ext.passes.codecs import NAMES


def test_no_list_is_cut_off_h_is_help_and_every_option_has_its_own_sentence() -> None:
    listed = called(spectrain, "--help", env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert set(re.findall(r"^  (\w+)", listed, re.MULTILINE)) == set(spectrain.commands)
    assert "..." not in listed
    for command in spectrain.commands:
        done = called(spectrain, command, "-h")
        assert done.exit_code == 0
        assert done.output.startswith(f"Usage: main {command} [OPTIONS]")
        for option in spectrain.commands[command].params:
            said, _, default = (option.help or "").partition("  [default: ")
            assert re.match(r"([A-Z]|cpu).*\.$", said, re.DOTALL), (option.opts, said)
            assert not default or default.endswith("]"), default


def completed(command: str, *words: str) -> list[tuple[str, str]]:
    """What a shell offers for the last of the words typed after ``spectrain``, with its type."""
    complete = BashComplete(spectrain, {}, "spectrain", "_SPECTRAIN_COMPLETE")
    found = complete.get_completions([command, *words[:-1]], words[-1])
    return [(item.type, item.value) for item in found]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("timeline --method pipedream", [n for n in methods() if n.startswith("pipedream")]),
        ("timeline -m 1f", ["1f1b"]),
        ("timeline --window ", ["classic", "wide"]),
        ("plan --link pcie3,nv", ["pcie3,nvlink"]),
        ("plan --method gpipe,spectrain-st", ["gpipe,spectrain-stash"]),
        ("plan --method ", list(methods())),
        ("plan --codec ", list(NAMES)),
        ("plan --device c", ["cpu", "cuda:0", "cuda:1"]),
    ],
)
def test_values_complete(words, offered, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert completed(*words.split(" ")) == [("plain", value) for value in offered]
    assert completed("plan", "--profile", "a") == [("file", "a")]
