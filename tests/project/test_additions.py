"""Adds to a copy of the project what architecture.md's table "Where to add" tells, and no more.

Each addition changes exactly the files that its row names, and works.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.build_tools import ROOT, TOOLS, run

from spectrain_ext import _C

PAGE = ROOT / "docs" / "architecture.md"


class Addition(NamedTuple):
    """A text behind another one that a file has once; behind none, a new file."""

    path: str
    after: str
    text: str


def places(what: str) -> set[str]:
    """Return the files that a row of the table names, and the folders of new files."""
    (row,) = re.findall(rf"^\| {re.escape(what)} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    named = re.findall(r"`([\w./]+(?:/|\.(?:py|cpp|h|md)))`", row)
    return {path if (ROOT / path).exists() else f"spectrain_ext/{path}" for path in named}


def add(folder: Path, additions: Sequence[Addition], what: str) -> None:
    """Make additions to a copy of the project; the row of the table has to name their places."""
    found = set()
    for path, after, text in additions:
        file = folder / path
        found.add(path if after else f"{path.rpartition('/')[0]}/")
        before = file.read_text() if after else ""
        assert before.count(after) == 1 or not after, f"{path} has not one {after!r}"
        file.write_text(before.replace(after, after + text) if after else text)
    assert found == places(what)


def copied(folder: Path) -> Path:
    """Return a copy of the sources and their tests."""
    native = shutil.ignore_patterns("_C.*.so", "__pycache__", ".*")
    for name in ("cmake", "csrc", "docs", "spectrain_ext", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=native)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(folder: Path) -> None:
    """Compile the native module where Python finds it, without CUDA and for float32 alone."""
    instances = folder / "csrc" / "kernels" / "instances.h"
    short, n = re.subn(
        r"TypesList<(?:Same|Types)<(?:float|Half)[^;]*;",
        "TypesList<Same<float>>;",
        instances.read_text(),
    )
    assert n >= 4
    instances.write_text(short)
    options = {"CUDA": "OFF", "PYTHON": "ON", "TESTS": "OFF", "VERSION": "0"}
    given = [f"-DSPECTRAIN_{name}={value}" for name, value in options.items()]
    run("cmake", "-S", folder, "-B", folder / "b", "-G", "Ninja", *given)
    run("cmake", "--build", folder / "b")
    run("cmake", "--install", folder / "b", "--prefix", folder / "spectrain_ext")


def run_tests(folder: Path, *arguments: str) -> str:
    """Return what the tests of a copy print, which use that copy of the package."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PATH": TOOLS, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder / "tests", env=environment, capture_output=True)
    output = done.stdout.decode()
    assert done.returncode == 0, output[-4000:] + done.stderr.decode()[-4000:]
    return output


#: Signum (Bernstein et al., arXiv 1802.04434), which predicts by the sign of its momentum.
SIGNUM = [
    Addition(
        "csrc/rules/signum.h",
        "",
        (Path(__file__).parent / "additions" / "signum.h").read_text(),
    ),
    Addition(
        "csrc/kernels/operations.h", '#include "rules/sgd.h"\n', '#include "rules/signum.h"\n'
    ),
    Addition(
        "csrc/kernels/operations.h",
        "  X(lion_predict, none, PredictTypes, LionPredict<W, S, O>)\n",
        """
#define SPECTRAIN_ROWS_signum(X)                                 \\
  X(signum_step, signum_predict, AllTypes, SignumStep<W, G, S, O>) \\
  X(signum_predict, none, PredictTypes, SignumPredict<W, S, O>)
""",
    ),
    Addition("csrc/kernels/operations.h", "X(copy) X(sgd) X(adam) X(lion)", " X(signum)"),
    Addition(
        "spectrain_ext/operators/numbers.py",
        "        return sign, 0.0, beta2, 1.0 - beta2, beta1, 0.0, 0.0, step\n",
        """

@dataclass(frozen=True, slots=True)
class SignumNumbers(Hyperparameters):
    rule: ClassVar[str] = "signum"

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _make_non_negative(self, ("lr", "momentum"))

    def setting(self) -> Setting:
        mu = self.momentum
        return 1.0, 0.0, mu, 1.0 - mu, 0.0, 0.0, 0.0, Term(1.0, self.lr)
""",
    ),
    Addition(
        "spectrain_ext/operators/laws.py",
        "from .numbers import LionNumbers as LionNumbers\n",
        "from .numbers import SignumNumbers as SignumNumbers\n",
    ),
    Addition(
        "spectrain_ext/operators/laws.py",
        "        return [Term(1.0, self.steps * rate, 0.0, numbers.root(numbers.step))]\n",
        '''
    def signum(self, numbers: SignumNumbers) -> list[Term]:
        """Return the term under Signum: W - s*lr*sign(v)."""
        return [Term(1.0, self.steps * numbers.lr)] if self.steps else []
''',
    ),
    Addition(
        "spectrain_ext/operators/steps.py",
        "AdamNumbers, LionNumbers, SgdNumbers, ",
        "SignumNumbers, ",
    ),
    Addition(
        "spectrain_ext/operators/steps.py",
        '    _step("lion_step_", locals())\n',
        '''

@operator
def signum_step_(
    params: Written,
    grads: Gradients,
    momentum_buffers: Written,
    *,
    lr: float,
    momentum: float = 0.9,
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """Make one step of Signum and write predictions, in one pass over memory.

    Example:
        >>> weights, gradients, momentum = torch.ones(2), torch.ones(2), torch.zeros(2)
        >>> st.signum_step_(weights, gradients, momentum, lr=0.25)
        >>> weights
        tensor([0.7500, 0.7500])
    """
    _step("signum_step_", locals())
''',
    ),
    Addition(
        "spectrain_ext/operators/steps.py",
        "        StepRow(LionNumbers, lion_step_),\n",
        "        StepRow(SignumNumbers, signum_step_),\n",
    ),
    Addition(
        "spectrain_ext/operators/plan.py",
        """
        made = ROWS["lion_step_"].arguments(numbers, self._horizons(predict), False)
        self._native.step(*made, False, options, stream)
""",
        '''
    def signum_step_(
        self,
        *,
        lr: float,
        momentum: float = 0.9,
        predict: Sequence[Horizon | None] = (),
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """Make a step and write predictions; see `spectrain_ext.signum_step_`."""
        numbers = lr, momentum
        made = ROWS["signum_step_"].arguments(numbers, self._horizons(predict), False)
        self._native.step(*made, False, options, stream)
''',
    ),
    Addition(
        "spectrain_ext/operators/__init__.py",
        "steps import adam_step_, lion_step_, sgd_step_",
        ", signum_step_",
    ),
    Addition("spectrain_ext/operators/__init__.py", '    "sgd_step_",\n', '    "signum_step_",\n'),
    Addition("spectrain_ext/__init__.py", "        sgd_step_,\n", "        signum_step_,\n"),
    Addition("spectrain_ext/__init__.py", '    "sgd_step_",\n', '    "signum_step_",\n'),
    Addition(
        "docs/api.md",
        ".. autofunction:: spectrain_ext.lion_predict\n",
        "\n.. autofunction:: spectrain_ext.signum_step_\n",
    ),
    Addition(
        "docs/operators.md",
        "| `lion_step_`, `lion_predict` | Lion |\n",
        "| `signum_step_` | Signum |\n",
    ),
    Addition(
        "tests/helpers/operator_table.py",
        '    Op("lion_predict", st.lion_predict, "params exp_avgs out!", _AHEAD),\n',
        '    Op("signum_step_", st.signum_step_, _SGD, {"lr": 0.1}),\n',
    ),
    Addition(
        "tests/operators/test_signum.py",
        "",
        """\
import pytest
import torch

import spectrain_ext as st


@pytest.mark.parametrize("how", ["eager", "plan", "compiled"])
def test_a_step_and_a_prediction_follow_the_definition(how: str) -> None:
    torch.manual_seed(0)
    w, g, v = ([torch.randn(n) for n in (7, 5003)] for _ in range(3))
    ahead = [torch.empty_like(t) for t in w]
    state = [0.9 * m + (1 - 0.9) * d for m, d in zip(v, g)]
    new = [x - 0.1 * m.sign() for x, m in zip(w, state)]
    if how == "plan":
        plan = st.Plan(w, grads=g, momentum_buffers=v, outs=[ahead])
        plan.signum_step_(lr=0.1, predict=[2])
    else:

        def step(w, g, v, ahead):
            st.signum_step_(w, g, v, lr=0.1, predict=[(2, ahead)])

        if how == "compiled":
            step = torch.compile(step, backend="aot_eager", fullgraph=True)
        step(w, g, v, ahead)
    torch.testing.assert_close(w, new)
    torch.testing.assert_close(v, state)
    torch.testing.assert_close(ahead, [x - 2 * 0.1 * m.sign() for x, m in zip(new, state)])
""",
    ),
]


@pytest.mark.compiler
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_an_update_rule_with_its_own_kernel(tmp_path: Path) -> None:
    """Its operator computes the definition, eagerly, by a plan and compiled."""
    folder = copied(tmp_path)
    add(folder, SIGNUM, "update rule with its own kernel")
    build(folder)
    out = run_tests(folder, "operators/test_signum.py", "operators/test_library.py", "-k", "signum")
    assert re.search(r"^[5-9] passed", out, re.MULTILINE), out


METHOD = [
    Addition(
        "spectrain_ext/method/registry.py",
        '    | Literal["pipemare-t1", "pipemare-t2", "pipemare"]\n',
        '    | Literal["lwp-half"]\n',
    ),
    Addition(
        "spectrain_ext/method/registry.py",
        '    ("interleaved", interleaved),\n',
        """\
    Method(
        "lwp-half",
        "the forward predicts half of the way to its backward's version",
        forward_horizon=lambda place: formulas.delay(place) // 2,
    ),
""",
    ),
    Addition(
        "docs/methods.md",
        "| `msnag` | newest, geometric D | newest | D | master |\n",
        "| `lwp-half` | newest, linear D/2 | newest | D | master |\n",
    ),
    Addition(
        "tests/oracle/methods.py",
        '    "lwp-v": Definition(forward=local),\n',
        '    "lwp-half": Definition(forward=lambda *place: local(*place) // 2),\n',
    ),
]


@pytest.mark.processes
def test_a_method(tmp_path: Path) -> None:
    """It is the definition at all places, and has a row in the manual."""
    folder = copied(tmp_path)
    native = Path(_C.__file__)
    shutil.copyfile(native, folder / "spectrain_ext" / native.name)
    for name in ("bench", "examples", "studies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("20*"))
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copyfile(ROOT / name, folder / name)
    add(folder, METHOD, "method")
    out = run_tests(folder, "method", "project/test_docs.py", "-k", "lwp-half or registry or names")
    assert re.search(r"^[5-9] passed", out, re.MULTILINE), out
    shown = "import spectrain_ext as st; print(st.method.find_method('lwp-half').summary)"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    said = subprocess.check_output([sys.executable, "-c", shown], env=environment, text=True)
    assert said == "the forward predicts half of the way to its backward's version\n"
