"""``spectrain bench``: the operators against torch and against a plain copy, on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from rivals import report as reporting
from rivals import targets
from rivals.engine import Settings, measure
from rivals.operations import OPERATIONS
from rivals.report import Report, host_table, markdown, summary
from rivals.workloads import MODELS, PRECISIONS, Workload, model, synthetic

from spectrain_ext.cli.options import POSITIVE, printable
from spectrain_ext.extras import require_matplotlib

_QUICK = "quick"
_COUNTS = (1, 10, 300, 3000)
_FILE = click.Path(dir_okay=False, path_type=Path)
_EXPONENTS = (10, 14, 18, 22, 26, 28, 30)


@click.command(short_help="Measure every operator against its rivals.")
@click.option(
    "-k", "only", metavar="TEXT", default="", help="Only operations whose name contains this."
)
@click.option(
    "--suite",
    type=click.Choice([_QUICK, "sizes", "models", "full"]),
    default=_QUICK,
    show_default=True,
    help="What is measured on. quick: a minute. sizes: 2^10 to 2^30 elements in 1 to 3,000 "
    "tensors. models: parameter lists of real models. full: both, in every precision.",
)
@click.option(
    "--elements",
    multiple=True,
    type=click.IntRange(4, 34),
    metavar="E",
    help="Measure on 2^E elements instead of the suite's; may be repeated.",
)
@click.option(
    "--tensors",
    multiple=True,
    type=POSITIVE,
    metavar="N",
    help="Measure on N tensors instead of the suite's; may be repeated.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(list(MODELS)),
    help="Tensors like the parameters of a model; may be repeated.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(list(PRECISIONS)),
    help="Types of weights, state and gradients: fp32; bf16, beside a float32 state; mixed, "
    "float32 weights with bfloat16 gradients. May be repeated.",
)
@click.option(
    "--device", metavar="NAME", default="cpu", show_default=True, help="cpu, or a CUDA device."
)
@click.option("--threads", type=POSITIVE, help="CPU threads.  [default: torch's]")
@click.option(
    "--compile",
    "with_compile",
    is_flag=True,
    help="Measure torch.compile as well, for up to ten tensors; takes seconds for each.",
)
@click.option(
    "--case-seconds",
    type=click.FloatRange(min=0.0),
    default=0.7,
    show_default=True,
    help="Seconds for the samples of one operation on one list of tensors.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="GIB",
    help="Memory that tensors may take.  [default: most of what is free]",
)
@click.option("--seconds", type=click.FloatRange(min=0.0), help="Begin nothing new after so many.")
@click.option(
    "--all", "everything", is_flag=True, help="Print every row, not one for each operation."
)
@click.option("--json", "json_path", type=_FILE, help="Write all that was measured as JSON.")
@click.option("--markdown", "markdown_path", type=_FILE, help="Write all tables as Markdown.")
@click.option("--picture", type=_FILE, help="Draw a PNG or SVG; needs matplotlib.")
@click.option(
    "--compare",
    "baseline",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Compare with an earlier run's --json; the exit status is 1 where it got slower.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0, 1.0),
    default=0.15,
    show_default=True,
    help="How much slower --compare takes for noise.",
)
def bench(
    only: str,
    suite: str,
    elements: tuple[int, ...],
    tensors: tuple[int, ...],
    models: tuple[str, ...],
    precisions: tuple[str, ...],
    device: str,
    threads: int | None,
    with_compile: bool,
    case_seconds: float,
    memory: float | None,
    seconds: float | None,
    everything: bool,
    json_path: Path | None,
    markdown_path: Path | None,
    picture: Path | None,
    baseline: Path | None,
    tolerance: float,
) -> None:
    """Measure every operator against its rivals and against the best plain copy.

    Rivals and copies take turns on the same machine in the same run. "of copy" is the bytes that
    must move over the median time, as a share of the best copy of as many bytes. "times" is how
    many times as long the fastest rival takes.
    """
    operations = [op for op in OPERATIONS if only.lower() in op.name.lower()]
    if not operations:
        raise click.BadParameter(f"no operation's name contains {only!r}", param_hint="-k")
    try:
        before = None if baseline is None else Report.load(baseline)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{baseline}: {error}", param_hint="--compare") from error
    _check_output(picture, device)
    for option, path in (
        ("--json", json_path),
        ("--markdown", markdown_path),
        ("--picture", picture),
    ):
        _check_writable(option, path)
    work = workloads(suite, elements, tensors, models, precisions)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = Settings(
        device=device,
        case_s=case_seconds,
        compile=with_compile,
        memory_bytes=None if memory is None else int(memory * 2**30),
        until=float("inf") if seconds is None else time.monotonic() + seconds,
    )
    report = measure(operations, work, settings, lambda name: click.echo(name, err=True))
    text = tables(report)
    click.echo(text if everything else in_short(report))
    if json_path is not None:
        json_path.write_text(report.to_json())
    if markdown_path is not None:
        markdown_path.write_text(text + "\n")
    if picture is not None and report.rows:
        from rivals.picture import draw

        draw(picture, report)
    if before is not None:
        _compare(before, report, tolerance)


def workloads(
    suite: str,
    elements: tuple[int, ...],
    tensors: tuple[int, ...],
    models: tuple[str, ...],
    precisions: tuple[str, ...],
) -> list[Workload]:
    """What a suite measures on, with what was asked for in its place."""
    names = precisions or (("fp32", "bf16", "mixed") if suite == "full" else ("fp32",))
    found: list[Workload] = []
    for name in names:
        precision = PRECISIONS[name]
        if elements or tensors or (suite in ("sizes", "full") and not models):
            found += synthetic(tensors or _COUNTS, elements or _EXPONENTS, precision)
        elif suite == _QUICK and not models:
            found += synthetic((1,), (24,), precision) + synthetic((300,), (20,), precision)
            found += synthetic((10,), (14,), precision)
        chosen = models or (tuple(MODELS) if suite in ("models", "full") else ())
        found += [model(m, precision) for m in chosen]
    return found


def in_short(report: Report) -> str:
    """One line per operation, with the machine above them, and which figures were not reached."""
    found = targets.verdicts(report)
    missed = [verdict for verdict in found if verdict.met is False]
    met = sum(verdict.met is True for verdict in found)
    said = f"Of {len(found)} figures that are to be reached: {met} reached, {len(missed)} missed, "
    said += f"{len(found) - met - len(missed)} not measured"
    parts = [_machine(report), summary(report), f"{said}{':' if missed else '.'}"]
    if missed:
        lines = [f"- {v.what}: {v.measured}, expected {v.target}" for v in missed]
        parts.append("\n".join(lines))
    left_out = f"{len(report.left_out)} cases were left out. " if report.left_out else ""
    parts.append(
        f"{left_out}One line for each operation, on its largest tensors; --all prints all "
        f"{len(report.rows)} rows, and what calls cost the host."
    )
    return "\n\n".join(parts)


def _machine(report: Report) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in report.environment.items())


def tables(report: Report) -> str:
    """The tables of a report, with the machine above them."""
    parts = [_machine(report), markdown(report, copies=True), host_table(report.host_us)]
    if report.left_out:
        parts.append("Left out:\n\n" + "\n".join(f"- {line}" for line in report.left_out))
    parts.append(targets.markdown(targets.verdicts(report)))
    return "\n\n".join(parts)


def _check_output(picture: Path | None, device: str) -> None:
    """Find out before the measurement, not after it."""
    if device != "cpu" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device", param_hint="--device")
    if picture is None:
        return
    if picture.suffix not in (".png", ".svg"):
        raise click.BadParameter("expected a .png or an .svg", param_hint="--picture")
    try:
        require_matplotlib()
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error


def _check_writable(option: str, path: Path | None) -> None:
    """Find out whether a file can be written, without a trace."""
    if path is None:
        return
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from error
    if not there:
        path.unlink()


def _compare(before: Report, after: Report, tolerance: float) -> None:
    changes = reporting.compare(before, after)
    if not changes:
        raise click.ClickException("the two runs have no row in common: nothing was compared")
    click.echo()
    for line in reporting.differences(before, after):
        click.echo(f"differs: {printable(line)}", err=True)
    click.echo(printable(reporting.changes_table(changes, tolerance)))
    slower = sum(change.regressed(tolerance) for change in changes)
    click.echo(f"\n{slower} of {len(changes)} slower by more than {tolerance:.0%}")
    if slower:
        raise SystemExit(1)
