"""What a comparison of methods leaves behind: numbers, a table and a picture."""

from spectrain_ext.report.picture import draw_losses, require_matplotlib
from spectrain_ext.report.results import MethodResult, Run, summarize, write_results
from spectrain_ext.report.table import comparison_table

__all__ = [
    "MethodResult",
    "Run",
    "comparison_table",
    "draw_losses",
    "require_matplotlib",
    "summarize",
    "write_results",
]
