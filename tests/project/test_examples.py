"""Every program in examples/ runs, as its first lines say, at a tiny size."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {
    "accelerate_loader.py": "--epochs 1",
    "cnn_batchnorm.py": "--epochs 1 --width 4",
    "gpt2.py": "--steps 4 --layers 2 --width 16 --context 16 --stages 2",
    "lightning_manual.py": "--epochs 1",
    "llama.py": "--steps 4 --layers 2 --width 16 --context 16",
    "own_method.py": "--epochs 1",
    "own_optimizer.py": "--epochs 1",
    "own_workload.py": "--epochs 1 --stages 2 --seeds 1 --microbatches 1 -m vanilla",
    "resnet18.py": "--steps 3 --width 4",
    "torchrun.py": "--epochs 1",
}


def test_there_is_a_size_for_every_example() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TINY)


@pytest.mark.processes
@pytest.mark.parametrize("name", TINY)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name).read_text()
    needs = set(re.findall(r"^(?:import|from) (accelerate|lightning|transformers)\b", text, re.M))
    if missing := [need for need in needs if find_spec(need) is None]:
        pytest.skip(f"needs {missing}: pip install 'spectrain_ext[examples]'")
    studied = re.search(
        rf"^ *python (-m studies \w+ --workload examples\.{name[:-3]}:\w+)", text, re.M
    )
    if studied is not None:
        _check_studied(studied[1], TINY[name], tmp_path)
        return
    said = re.search(rf"^(.*) examples/{re.escape(name)}", text, re.M)
    assert said is not None, "its docstring says how it is started"
    program, *options = shlex.split(said.group(1))
    launcher = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
    ran = subprocess.run(
        [sys.executable, *launcher, *options, str(EXAMPLES / name), *TINY[name].split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert re.search(r"\d\.\d", ran.stdout), ran.stdout[-2000:]


def _check_studied(command: str, tiny: str, folder: Path) -> None:
    """From the repository's root, where the package's sources are not what is imported."""
    ran = subprocess.run(
        [sys.executable, *command.split(), *tiny.split(), "--out", str(folder)],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "gap %" in ran.stdout and (folder / "frontier.json").exists()
