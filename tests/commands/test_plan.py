"""Tests the output, files and errors of ``spectrain plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli_programs import called, spectrain, text_of
from helpers.layers import layers_of

import spectrain_ext as st
from spectrain_ext.tools.planning import METHODS, write_layers
from studies.examples import residual_mlp


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    seconds, about = (0.01, 0.02, 0.015, 0.005), {"device": "some cpu"}
    write_layers(
        path, layers_of(seconds, saved=2000, samples=(1, 8), byte_seconds=1e-10, about=about)
    )
    return path


def run(*arguments, **environment):
    return called(spectrain, "plan", *arguments, env=environment or None)


def planned(*arguments):
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    return found.output


def table_of(output):
    lines = output.partition("\n- ")[0].splitlines()
    rule = next(k for k, line in enumerate(lines) if line.startswith("──"))
    return lines[rule + 1 :]


FOUR = ("--devices", 4, "--batch", 32)
FEW = ("--method", "auto,1f1b")


def test_it_prints_a_table_and_writes_what_it_found(profile, tmp_path):
    out = tmp_path / "plan.json"
    said = planned(
        *("--profile", profile, *FOUR, *FEW, "--replicas", 2),
        *("--speed", 10, "--link", 1e6, "--out", out),
    )
    document = json.loads(out.read_text())
    assert document["devices"] == 4
    for line in (
        "ASSUMED: devices compute 10 times as fast",
        "layer times are measured (device some cpu)",
        "st.DistributedPipeline(stage, optimizer, loss_fn, method=",
        *("simulated", "counted", "measured"),
        f"first: cut before {', '.join(map(repr, document['split_points']))}: ",
        document["candidates"][0]["code"],
    ):
        assert line in said
    said = planned("--profile", profile, *FOUR, *FEW, "--link", "wan200")
    assert "link wan200: 0.025 GB/s into a device, 5e+04 us" in said


def test_the_table_fits_and_no_cell_is_cut(profile: Path) -> None:
    asked = ("--profile", profile, *FOUR, "--link", 1e6)
    said = run(*asked, COLUMNS="80").output
    assert {line.split()[0] for line in table_of(said)} == set(METHODS)
    tiny = run(*asked, COLUMNS="30").output
    for output, width in ((said, 80), (tiny, 30)):
        assert max(map(len, output.partition("\n- ")[0].splitlines())) <= width
        assert "…" not in output


def test_a_method_that_is_known_to_fail_is_last_and_said_to(profile):
    asked = (*FOUR, "--link", 1e6, "--replicas", 1, "--method", "vanilla,auto,1f1b,pipedream")
    said = planned("--profile", profile, *asked)
    rows = [line.split() for line in table_of(said)]
    assert rows[0][0] == "auto" and rows[-1][0] == "vanilla"
    assert "unreached" in rows[-1] and any("unmeasured" in row for row in rows)
    assert "- vanilla did not reach that loss on text, N = " in said


def test_what_calls_limit_is_said(profile: Path) -> None:
    asked = ("--profile", profile, *FOUR, *FEW, "--replicas", 1)
    assert "CALLS" not in planned(*asked)
    said = planned(*asked, "--host", 0.05)
    assert "- a CPU issues an instruction in 5e+04 us: given" in said
    assert "LIMITED BY CALLS: 1f1b, M = " in said
    said = planned(*asked, "--host", 0.0004)
    assert "one process for all devices needs" in said
    assert "-1.0 is not in the range x>=0" in run(*asked, "--host", -1).output


def test_devices_of_different_kinds(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ("--profile", profile, *FOUR, *FEW, "--out", path)
    kinds = ("--speed", "1,1,.5,.5", "--memory", "24G,24G,80e9,80G")
    said = planned(*asked, *kinds, "--link", "nvlink,100gbe,nvlink")
    assert "ASSUMED: devices compute 1, 0.5 times as fast as that, every layer alike" in said
    document = json.loads(path.read_text())
    assert document["speeds"] == [1, 1, 0.5, 0.5]
    assert document["memory"] == [24e9, 24e9, 80e9, 80e9]
    assert [link["name"] for link in document["link"]] == ["nvlink", "100gbe", "nvlink"]
    planned(*asked, "--memory", "24G", "--link", "nvlink")
    assert json.loads(path.read_text())["memory"] == [24e9] * 4


def test_a_model_of_the_studies_is_measured_and_kept_and_its_plan_applies(tmp_path):
    path, layers = tmp_path / "my.json", tmp_path / "layers.json"
    asked = ("--devices", 2, "--batch", 8, "--replicas", 1, *FEW, "--out", path)
    said = planned("--model", "studies.examples:residual_mlp", "--save-profile", layers, *asked)
    assert sorted(tmp_path.iterdir()) == [layers, path]
    assert f"plan={str(path)!r}" in said
    parts = st.partition(residual_mlp()[0], plan=path)
    assert len(parts) == 2 and parts.settings["method"] in said
    assert planned("--profile", layers, *asked) == said


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)\n"
        "def wrong():\n    return 3\n"
        "def text():\n    return 'ab', 'cd'\n"
        "def fails():\n    return {}['a']\n"
        "class Own(nn.Linear):\n    def forward(self, x):\n        return x.no_such\n"
        "def broken():\n    return Own(4, 4), torch.randn(8, 4)\n"
    )
    planned("--model", "planned_model:make", "--devices", 2, "--batch", 8, *FEW)
    returns = "'--model': expected a function that returns (model, example input)"
    for name, code, why in (
        ("wrong", 2, (returns, "cannot unpack")),
        ("text", 2, (returns, "got a str as the model")),
        ("fails", 2, (returns, "called, failed: KeyError: 'a' (planned_model.py, line 10)")),
        ("broken", 1, ("measured, failed: ValueError: example_input: Own fails", ", line 1")),
    ):
        wrong = run("--model", f"planned_model:{name}", "--devices", 2)
        assert wrong.exit_code == code
        assert all(each in wrong.output for each in why)


SNN = ("--devices", 2, "--model", "studies.examples:snn")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", 2), "expected --model, to be measured, or the --profile of one"),
        (("--devices", 0, "--model", "gpt"), "'--devices'"),
        ((*SNN, "--devices", 10**9, "--memory", "24G"), "'--devices'"),
        (("--devices", 2, "--model", "x"), "'--model': expected module:function, got 'x'"),
        ((*SNN, "--link", "isa"), "'--link': expected pcie3"),
        ((*SNN, "--method", "no"), "'--method': method: there is no"),
        ((*SNN, "--device", "tpu7"), "'--device'"),
        ((*SNN, "--speed", 0), "'--speed'"),
        ((*SNN, "--speed", "1,2,3"), "--speed has 3 numbers, and --devices 2 needs 2"),
        ((*SNN, "--memory", "1G,2G,3G"), "--memory has 3 numbers, and --devices 2 needs 2"),
        ((*SNN, "--link", "pcie3,pcie4"), "--link has 2 numbers, and --devices 2 needs 1"),
        *(
            ((*SNN, option, number), f"'{option}': expected positive numbers")
            for option in ("--speed", "--memory")
            for number in ("1,0", "1,", "1GB", "nan", "G")
        ),
    ],
)
def test_an_error_names_the_option(arguments, said):
    found = run(*arguments)
    assert found.exit_code == 2
    assert said in text_of(found)


def test_what_does_not_fit_is_an_error(profile):
    for asked, said in (
        (("--devices", 2, "--memory", 10, "--batch", 8), "more than 10 bytes a device"),
        (("--devices", 16, "--batch", 7), "7 samples cannot be dealt out to 16 devices"),
    ):
        found = run("--profile", profile, *asked)
        assert found.exit_code == 1
        assert said in found.output


def test_control_characters_of_a_files_name_are_escaped(tmp_path):
    path = tmp_path / "a\x1b[31m.json"
    path.write_text("{}")
    found = run("--profile", path, "--devices", 2)
    assert found.exit_code == 1
    assert "\x1b" not in found.output and r"a\x1b[31m.json" in found.output
