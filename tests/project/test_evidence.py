"""Tests the documents' claims against the committed runs."""

import re
from pathlib import Path
from typing import Any

import bench_cost
import pytest
from report import RESULTS, __main__, documents, quality, speed, tables


def test_the_committed_documents_say_what_the_committed_runs_say() -> None:
    assert __main__.main(["--check"]) == 0


@pytest.fixture(name="rows")
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TABLES", {"rows": lambda _: "a\nb"})


@pytest.mark.usefixtures("rows")
def test_only_what_is_between_marks_changes() -> None:
    """A comment on its own line ends with the line; a table needs an empty line before it."""
    new = documents.written("above\n\n<!--f rows-->\nold\n<!--/f-->\n\nbelow\n", RESULTS)
    assert new == "above\n\n<!--f rows-->\n\na\nb\n\n<!--/f-->\n\nbelow\n"
    assert documents.written(new, RESULTS) == new


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!--/f-->\n<!--f rows-->\n1.5", "lines of their own"),
        ("takes <!--f rows-->1.5<!--/f--> of", "lines of their own"),
        ("<!--f nothing-->\n1.5\n<!--/f-->", "one of rows, got 'nothing'"),
        ("a <!--set-->1.5\n<!--/set--> of", "beginning of a line"),
    ],
)
def test_a_wrong_mark_is_an_error(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        documents.written(text, RESULTS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it takes 1.5 times as long, 8.91x, 3 %", ["1.5 times", "8.91x", "3 %"]),
        ("1,024 bytes in 5 s, at 100 Gb/s", ["1,024 bytes", "5 s", "100 Gb/s"]),
        ("about .3 of it, 2x as fast, -1.2 % of 1.5e-3", [".3", "2x", "1.2 %", "1.5e-3"]),
        ("in `1.5` it, [1](a-1.5.md), torch 2.13, Python 3.10, 12 stages, M = 16", []),
        ("<!--f a-->\n1.5 times\n<!--/f-->\nand <!--set-->64 KB<!--/set-->", []),
        ("    takes 1.5 s\n\n```python\nx = 1.5\n```\n", []),
        ("https://arxiv.org/abs/1809.02839, arXiv 2505.01099", []),
    ],
)
def test_what_a_hand_has_typed_is_found(text: str, found: list[str]) -> None:
    assert [what for _, what in documents.naked(text)] == found


def test_every_table_is_used() -> None:
    text = "".join(path.read_text() for path in documents.pages())
    assert set(re.findall(r"<!--f ([^>]+?)-->", text)) == set(tables.TABLES)


def test_every_result_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a table, or shown as a picture."""
    opened: set[Path] = set()
    read_text = Path.read_text

    def noted(self: Path, *given: Any, **more: Any) -> str:
        opened.add(self.resolve())
        return read_text(self, *given, **more)

    monkeypatch.setattr(Path, "read_text", noted)
    for make in (*tables.TABLES.values(), quality.known_to_planner):
        make(RESULTS)
    shown = {
        (page.parent / target).resolve()
        for page in documents.pages()
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    }
    kept = {path for folder in RESULTS.iterdir() if folder.is_dir() for path in folder.rglob("*.*")}
    assert kept - opened - shown == set()


def test_a_picture_is_there_is_shown_and_is_described(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("![ ](a.png) and ![b](b.png)")
    (tmp_path / "c.png").touch()
    assert documents.wrong_pictures([page], tmp_path) == [
        "a.png: no description in page.md",
        "a.png: not drawn",
        "b.png: not drawn",
        "c.png: on no page",
    ]


def test_every_folder_of_results_has_a_row_and_every_row_a_folder() -> None:
    rows = re.findall(r"^\| `([^`]+)`", (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in RESULTS.iterdir() if path.is_dir())


def test_what_a_stage_costs_from_the_command_to_the_document(tmp_path: Path) -> None:
    path = tmp_path / speed.COST
    sizes = ["--width", "32", "--batches", "2", "3", "--minibatches", "1", "--rounds", "1"]
    assert bench_cost.main([*sizes, "--json", str(path)]) == 0
    memory = speed.memory(tmp_path)
    assert "| `pipedream` | 1 | 4, 3, 2, 1 | 0.0, 0.1, 0.1, 0.1 | " in memory
    time = speed.update(tmp_path)
    # Pipedream's update copies a version that is still needed; spectrain's writes the forward's
    # prediction, and one stage's backward takes another pass.
    assert "| SGD | `pipedream` | 1 | 1.4, 1.4, 1.4, 1.0 | " in time
    assert "| SGD | `spectrain` | 1 | 1.2, 1.2, 1.8, 1.2 | " in time
    assert "| AdamW | `spectrain` | 1 | 1.1, 1.1, 1.7, 1.1 | " in time and "`sync`" not in time
    plain = memory.splitlines()[2]
    assert plain.startswith("| `sync` | 1 | 1, 1, 1, 1 |") and plain.endswith("| 0% | 0% |")
