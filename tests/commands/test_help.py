"""Help and completion: every option describes itself, and its values complete."""

from __future__ import annotations

import re
import subprocess
import sys

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


BLOCKED = """
import sys
sys.modules["click"] = sys.modules["rich"] = None  # importing them raises ImportError
import torch
from torch import nn
import spectrain_ext as st
from spectrain_ext.tools.commands import main

pipe = st.Pipeline([nn.Linear(2, 1)], lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss)
batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
assert len(pipe.fit(batches)) == 1
try:
    pipe.fit(batches, progress=True)
except ModuleNotFoundError as error:
    assert pipe.minibatches == 2
    print(error)
main()
"""


@pytest.mark.processes
def test_without_click_and_rich_training_works_and_the_rest_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    remedy = "which is not installed: pip install 'spectrain_ext[commands]'"
    assert done.stdout == f"progress=True needs rich, {remedy}\n", done.stderr
    assert (done.returncode, done.stderr) == (1, f"spectrain: spectrain needs click, {remedy}\n")
