"""Tests that every program in examples/ runs as its first lines say, at a tiny size."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.ranks import run_script

from studies.__main__ import main as studies

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {
    "accelerate_loader.py": "--epochs 1",
    "cnn_batchnorm.py": "--epochs 1 --width 4",
    "finetune.py": "--epochs 1 --context 16 --every 20",
    "gpt2.py": "--steps 4 --layers 2 --width 16 --context 16 --stages 2",
    "lightning_manual.py": "--epochs 1",
    "own_method.py": "--epochs 1",
    "own_optimizer.py": "--epochs 1",
    "own_workload.py": "--epochs 1 --stages 2 --seeds 1 --microbatches 1 -m vanilla",
    "resnet18.py": "--steps 3 --width 4 --blocks 1",
    "several_optimizers.py": "--epochs 1",
    "subspace.py": "--steps 3 --width 16 --rank 4 --stages 2",
    "torchrun.py": "--epochs 1",
}
STUDIED = "own_workload.py"


def _started(name: str) -> list[str]:
    """How an example's docstring starts it."""
    text = (EXAMPLES / name).read_text()
    return re.findall(rf"^(.*) examples/{re.escape(name)}", text, re.M)


def test_there_is_a_size_for_every_example() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TINY)
    unsaid = [name for name in TINY if not _started(name) and name != STUDIED]
    assert not unsaid, "the docstring says how an example is started"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "started"),
    [(name, how) for name in TINY for how in _started(name)],
)
def test_an_example_runs(name: str, started: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name).read_text()
    needs = set(re.findall(r"^(?:import|from) (accelerate|lightning|transformers)\b", text, re.M))
    if missing := [need for need in needs if find_spec(need) is None]:
        pytest.skip(f"needs {missing}: pip install 'spectrain_ext[examples]'")
    ranks = re.fullmatch(r"python|torchrun --nproc-per-node (\d)", started)
    assert ranks is not None, started
    printed = run_script(EXAMPLES / name, int(ranks[1] or 1), *TINY[name].split(), folder=tmp_path)
    assert re.search(r"\d\.\d", printed), printed[-2000:]


def test_an_example_is_studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    text = (EXAMPLES / STUDIED).read_text()
    for command in ("study", "train"):
        said = f"python -m studies {command} --workload examples.own_workload:digits_mlp --stages"
        assert f"\n    {said} " in text
    asked = ["--workload", "examples.own_workload:digits_mlp", *TINY[STUDIED].split()]
    done = CliRunner().invoke(studies, ["study", *asked, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "gap %" in done.output and (tmp_path / "frontier.json").exists()
