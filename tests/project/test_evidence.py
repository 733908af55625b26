"""What the documents claim is what the committed runs say."""

from pathlib import Path

import pytest
from report import DOCS, RESULTS, __main__, documents, operators, page
from report.documents import BEGIN, END

from spectrain_ext.benchmark.report import Report, Row


def run() -> Report:
    rows = [
        Row("predict_", "2^24", "fp32", name, kind, 100, us, 0.1 * us, us, 9, 1.0)
        for name, kind, us in (("Plan", "ours", 2.0), ("a", "rival", 3.0))
    ]
    about = dict.fromkeys(
        ("cpu", "cores", "threads", "instruction_set", "python", "torch", "spectrain_ext", "date"),
        "1",
    )
    return Report(about, {}, rows)


class TestGenerated:
    def test_only_what_is_between_the_markers_changes(self) -> None:
        text = f"above\n{BEGIN}\nstale rows\n{END}\nbelow\n"
        generated = operators.written(run(), "folder")
        new = documents.replaced(text, generated)
        assert new.startswith("above\n") and new.endswith("\nbelow\n") and "stale rows" not in new
        assert documents.replaced(new, generated) == new
        assert "| predict_ | 2^24 | fp32 | 2 | 10% |" in new

    @pytest.mark.parametrize("text", ["text", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
    def test_without_markers_nothing_is_written(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected one"):
            documents.replaced(text, "new")

    def test_the_committed_documents_say_what_the_committed_runs_measured(self) -> None:
        assert __main__.main(["--check"]) == 0


class TestPage:
    def test_every_section_begins_with_a_heading(self) -> None:
        for module in page.evidence():
            assert module.section(RESULTS).lstrip().startswith("## "), module.__name__

    def test_a_picture_is_there_is_linked_and_is_described(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not page.pictures_wrong(RESULTS, DOCS)
        monkeypatch.setattr(page, "text", lambda results: "![ ](results-a.png) ![b](results-b.png)")
        (tmp_path / "results-c.png").touch()
        assert page.pictures_wrong(RESULTS, tmp_path) == [
            "results-a.png: no description",
            "results-a.png: not drawn",
            "results-b.png: not drawn",
            "results-c.png: not linked",
        ]
