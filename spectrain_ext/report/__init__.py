"""What a comparison of methods leaves behind: numbers, a table and a picture."""

from spectrain_ext.report.merging import merge_traces
from spectrain_ext.report.method_timeline import draw_method_timelines, simulate_method
from spectrain_ext.report.metric import ACCURACY, PERPLEXITY, Metric
from spectrain_ext.report.picture import draw_losses
from spectrain_ext.report.results import MethodResult, Run, summarize, write_results
from spectrain_ext.report.store import RunStore
from spectrain_ext.report.table import comparison_table
from spectrain_ext.report.timeline import draw_timeline, require_matplotlib, write_trace

__all__ = [
    "ACCURACY",
    "PERPLEXITY",
    "MethodResult",
    "Metric",
    "Run",
    "RunStore",
    "comparison_table",
    "draw_losses",
    "draw_method_timelines",
    "draw_timeline",
    "merge_traces",
    "require_matplotlib",
    "simulate_method",
    "summarize",
    "write_results",
    "write_trace",
]
