"""Tests the output, files and errors of ``spectrain plan``."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from helpers.ranks import run_main
from torch import nn

import spectrain_ext as st
from spectrain_ext.cli import links
from spectrain_ext.cli.__main__ import main
from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.planning import METHODS, Layers, write_layers
from studies.examples import blocks_and_batch, residual_mlp
from studies.settings import MODELS

pytest.importorskip("matplotlib")


@pytest.fixture
def profile(tmp_path):
    def some(share):
        seconds = (0.01, 0.02, 0.015, 0.005)
        return Profile(tuple(BlockProfile(share * s, 1000, 4000, 2000) for s in seconds))

    path = tmp_path / "profile.json"
    write_layers(path, Layers((1, 8), (some(0.125), some(1.0)), 1e-10, {"device": "some cpu"}))
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_it_prints_a_table_and_writes_what_it_found(profile, tmp_path):
    out = tmp_path / "out"
    asked = ("--profile", profile, "--devices", 4, "--batch", 32, "--replicas", 2)
    found = run(*asked, "--speed", 10, "--link", 1e6, "--out", out)
    assert found.exit_code == 0, found.output
    assert "ASSUMED: devices compute 10 times as fast" in found.output
    assert "layer times are measured (device some cpu)" in found.output
    assert "st.DistributedPipeline(stage, optimizer, loss_fn, method=" in found.output
    for kind in ("simulated", "counted", "measured"):
        assert kind in found.output
    document = json.loads((out / "plan.json").read_text())
    assert document["devices"] == 4
    assert f"first: cut before {', '.join(map(repr, document['split_points']))}: " in found.output
    assert document["candidates"][0]["code"] in found.output
    assert (out / "timeline.png").exists() and (out / "timeline.svg").exists()


def test_devices_with_one_inbound_wire(profile):
    found = run("--profile", profile, "--devices", 4, "--batch", 32, "--link", "wan200")
    assert found.exit_code == 0, found.output
    assert "link wan200: 0.025 GB/s into a device, 5e+04 us" in found.output


def test_the_table_fits_and_no_cell_is_cut(profile, monkeypatch):
    asked = ("--profile", profile, "--devices", 4, "--batch", 32, "--link", 1e6)
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run(*asked).output  # without a width
    assert "measured at" in whole and "no room for" not in whole
    methods = [line.split()[0] for line in table_of(whole)]
    assert set(methods) == set(METHODS)
    for width, left_out in ((80, "samples/s, loss gap %, measured at"), (60, "GB per device")):
        found = CliRunner().invoke(main, ["plan", *map(str, asked)], env={"COLUMNS": str(width)})
        assert f"- no room for: {left_out}" in found.output
        narrow = table_of(found.output)
        assert max(map(len, narrow)) <= width
        assert "…" not in found.output
        needed = 6
        shown = [line.split()[:needed] for line in narrow]
        assert shown == [line.split()[:needed] for line in table_of(whole)]
    tiny = CliRunner().invoke(main, ["plan", *map(str, asked)], env={"COLUMNS": "30"})
    assert max(map(len, tiny.output.partition("\n- ")[0].splitlines())) <= 30
    letters = [c for line in table_of(tiny.output) for c in line if c.isalnum()]
    cells = [c for line in narrow for c in line if c.isalnum()]
    assert sorted(letters) == sorted(cells)


def table_of(output):
    lines = output.partition("\n- ")[0].splitlines()
    rule = next(k for k, line in enumerate(lines) if line.startswith("──"))
    return lines[rule + 1 :]


def test_a_method_that_is_known_to_fail_is_last_and_said_to(profile):
    asked = ("--devices", 4, "--batch", 32, "--link", 1e6, "--replicas", 1)
    methods = ("--method", "vanilla,auto,1f1b,pipedream")
    found = run("--profile", profile, *asked, *methods).output
    rows = [line.split() for line in table_of(found)]
    assert rows[0][0] == "auto" and rows[-1][0] == "vanilla"
    assert "unreached" in rows[-1] and any("unmeasured" in row for row in rows)
    assert "- vanilla did not reach that loss on text, N = " in found


def test_devices_of_different_kinds(profile, tmp_path):
    path = tmp_path / "plan.json"
    asked = ("--profile", profile, "--devices", 4, "--batch", 32, "--out", path)
    kinds = ("--speeds", "1,1,.5,.5", "--memory", "24G,24G,80e9,80G")
    found = run(*asked, *kinds, "--link", "nvlink,100gbe,nvlink")
    assert found.exit_code == 0, found.output
    for line in (
        "4 devices, 32 samples a minibatch, nvlink, 100gbe",
        "ASSUMED: devices compute 2 x 1, 2 x 0.5 times as fast as that, every layer alike",
        "devices have 2 x 24, 2 x 80 GB",
        "links from device to device: nvlink, 100gbe, nvlink",
        "link 100gbe: 12.5 GB/s a direction",
    ):
        assert line in found.output
    document = json.loads(path.read_text())
    assert document["speeds"] == [1, 1, 0.5, 0.5]
    assert document["memory"] == [24e9, 24e9, 80e9, 80e9]
    assert [link["name"] for link in document["link"]] == ["nvlink", "100gbe", "nvlink"]
    alike = run(*asked, "--memory", "24G", "--link", "nvlink,nvlink,nvlink", "--speeds", "1,1,1,1")
    assert table_of(alike.output) == table_of(
        run(*asked, "--memory", 24e9, "--link", "nvlink", "--speed", 1).output
    )
    assert json.loads(path.read_text())["memory"] == [24e9] * 4


def test_a_plan_alone_applies(tmp_path, monkeypatch):
    monkeypatch.setattr("spectrain_ext.cli.plan.require_matplotlib", None)
    path = tmp_path / "my.json"
    asked = ("--devices", 2, "--batch", 8, "--replicas", 1, "--out", path)
    found = run("--model", "studies.examples:residual_mlp", *asked)
    assert found.exit_code == 0, found.output
    assert list(tmp_path.iterdir()) == [path]
    assert f"plan={str(path)!r}" in found.output
    parts = st.partition(residual_mlp()[0], plan=path)
    assert len(parts) == 2 and parts.settings["method"] in found.output


@pytest.mark.processes
def test_the_link_between_processes_is_measured(profile, tmp_path, monkeypatch):
    monkeypatch.setattr(links, "start_processes", run_main)
    asked = ("--cores", 2, "--batch", 32, "--method", "vanilla", "--out", tmp_path)
    found = run("--profile", profile, "--devices", 2, "--link", "measured", *asked)
    assert found.exit_code == 0, found.output
    link = json.loads((tmp_path / "plan.json").read_text())["link"]
    assert link["name"] == "gloo, measured"
    assert 0 < link["latency"] < 0.1 and link["bandwidth"] > 1e6
    # a byte's cost to a core cannot be zero: copying is limited by memory speed
    assert link["busy"] >= 0 and 1e6 < link["busy_bandwidth"] < 1e12


def test_a_model_of_the_studies_is_measured_and_kept(tmp_path):
    path = tmp_path / "layers.json"
    asked = ("--devices", 2, "--batch", 8, "--method", "auto,1f1b")
    found = run("--model", "studies.examples:residual_mlp", "--save-profile", path, *asked)
    assert found.exit_code == 0, found.output
    again = run("--profile", path, *asked)
    assert again.output == found.output


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
    found = run("--model", "planned_model:make", "--devices", 2, "--batch", 8)
    assert found.exit_code == 0, found.output
    for name, why in (
        ("wrong", "cannot unpack"),
        ("text", "got a str as the model"),
        ("fails", "called, failed: KeyError: 'a' (planned_model.py, line 10)"),
    ):
        wrong = run("--model", f"planned_model:{name}", "--devices", 2)
        assert wrong.exit_code == 2
        assert "'--model': expected a function that returns (model, example input)" in wrong.output
        assert why in wrong.output
    wrong = run("--model", "planned_model:broken", "--devices", 2)
    assert wrong.exit_code == 1
    assert "measured, failed: ValueError: example_input: Own fails" in wrong.output
    assert "(planned_model.py, line 1" in wrong.output


_SNN = ("--model", "studies.examples:snn")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", 2), "expected --model, to be measured, or the --profile of one"),
        (("--devices", 0, "--model", "gpt"), "'--devices'"),
        (("--devices", 10**9, *_SNN, "--memory", "24G"), "'--devices'"),
        (
            ("--devices", 2, "--model", "alexnet"),
            "'--model': expected module:function, got 'alexnet'",
        ),
        (("--devices", 2, "--model", "gpt", "--link", "isa"), "'--link': expected pcie3"),
        (
            ("--devices", 2, "--model", "studies.examples:snn", "--method", "no"),
            "'--method': method: there is no",
        ),
        (("--devices", 2, *_SNN, "--device", "tpu7"), "'--device'"),
        (("--devices", 2, *_SNN, "--device", "xpu"), "'--device'"),
        (("--devices", 2, "--model", "gpt", "--speed", 0), "'--speed'"),
        (("--devices", 2, "--model", "gpt", "--cores", 0), "'--cores'"),
        (
            ("--devices", 2, *_SNN, "--speed", 2, "--speeds", "1,2"),
            "--speed and --speeds contradict each other",
        ),
        (
            ("--devices", 2, *_SNN, "--speeds", "1,2,3"),
            "--speeds has 3 numbers, and --devices 2 needs 2",
        ),
        (
            ("--devices", 4, *_SNN, "--memory", "1G,2G"),
            "--memory has 2 numbers, and --devices 4 needs 4",
        ),
        (
            ("--devices", 2, *_SNN, "--link", "pcie3,pcie4"),
            "--link has 2 numbers, and --devices 2 needs 1",
        ),
        *(
            (("--devices", 2, *_SNN, option, number), f"'{option}': expected positive numbers")
            for option in ("--speeds", "--memory")
            for number in ("1,0", "-1", "1,", "1GB", "nan", "G", "inf,1")
        ),
    ],
)
def test_an_error_names_the_option(arguments, said):
    found = run(*arguments)
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())


def test_what_does_not_fit_is_an_error(profile):
    found = run("--profile", profile, "--devices", 2, "--memory", 10, "--batch", 8)
    assert found.exit_code == 1
    assert "more than 10 bytes a device" in found.output
    found = run("--profile", profile, "--devices", 16, "--batch", 7)
    assert "7 samples cannot be dealt out to 16 devices" in found.output


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_planned(model):
    if model == "inception-v4":
        pytest.importorskip("pytorchcv")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        blocks, batch = blocks_and_batch(model, 2)
        output = nn.Sequential(*blocks)(batch)
    own = {
        "residual-mlp": "ResidualBlock",
        "gpt": "TransformerBlock",
        "lstm": "LSTMBlock",
        "snn": "AlphaDropout",
        "speedrun": "RMSNorm",
    }
    kinds = {type(part).__name__ for block in blocks for part in block.modules()}
    assert own.get(model, "Conv2d") in kinds, kinds
    assert len(output) == 2 and len(blocks) > 4
