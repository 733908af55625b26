"""Map the name of every table in a document to a function of the committed runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from table import table

from . import nanogpt, quality, races, speed, wires


def headline(results: Path) -> str:
    """The README's answers, measured and simulated: throughput, the loss, and time to a loss."""
    torch = speed.over_torch(results)
    times = [r.to_loss(0.75) for r in races.defaults(results)]
    gaps = quality.late_by_one(results)
    lowest, highest = (
        f"{abs(100 * gap):.1f} % {'below' if gap < 0 else 'above'}"
        for gap in (min(gaps), max(gaps))
    )
    throughput = f"{min(torch):.2f} to {max(torch):.2f} times the throughput"
    loss = f"test loss between {lowest} and {highest}"
    sooner, over_wires = (
        f"{min(each):.2f} to {max(each):.2f} times as long to a loss"
        for each in (times, wires.to_loss(results, "auto"))
    )
    late, paci = nanogpt.at_the_end(results, "auto", "vanilla")
    small = f"test loss {late} %; without prediction (PACI) {paci} %".replace("**", "")
    measured = [
        ["`1f1b` over slow links, same messages", "2 and 4 processes on a CPU", over_wires],
        ["torch's 1F1B with as many microbatches", "2 to 4 processes on a CPU", throughput],
        ["synchronous training, 6 stages", "nanoGPT's small setting, each at its best rate", small],
        ["synchronous training, 4 to 32 stages", "small transformer on a CPU", loss],
    ]
    simulated = [["`1f1b`, 4 to 32 stages", "measured updates times simulated seconds", sooner]]
    return "\n\n".join(
        table(f"{kind}, against|on|`auto`", lines)
        for kind, lines in (("measured", measured), ("simulated", simulated))
    )


TABLES: dict[str, Callable[[Path], str]] = {
    "accuracy": quality.accuracies,
    "accuracy.gaps": quality.gaps,
    "accuracy.published": quality.published,
    "calls": speed.calls,
    "cost.memory": speed.memory,
    "cost.update": speed.update,
    "errors": quality.errors,
    "frontier": quality.summary,
    "frontier.deep": quality.deep,
    "frontier.deep.curve": quality.deep_over_training,
    "frontier.digits": quality.digits,
    "frontier.even": races.even,
    "frontier.feedback": quality.feedback,
    "frontier.text": quality.text,
    "gpu.host": speed.gpu_host,
    "gpu.layers": speed.gpu_layers,
    "gpu.peak": speed.gpu_peak,
    "gpu.steps": speed.gpu_steps,
    "gpu.training": speed.gpu_training,
    "headline": headline,
    "nanogpt": nanogpt.losses,
    "lion": nanogpt.lion,
    "moments": nanogpt.moments,
    "moments.operators": partial(speed.operators, run=f"{nanogpt.MOMENTS}/bench.json"),
    "nanogpt.clipping": nanogpt.clipping,
    "nanogpt.gaps": nanogpt.over_training,
    "nanogpt.gaps.constant": partial(nanogpt.over_training, name="constant"),
    "nanogpt.rates": nanogpt.rates,
    "nanogpt.variants": nanogpt.variants,
    "operators": speed.operators,
    "operators.gpu": partial(speed.operators, run=speed.ON_GPU),
    "operators.gpu.targets": partial(speed.operator_targets, run=speed.ON_GPU),
    "operators.small": speed.small,
    "operators.targets": speed.operator_targets,
    "planner": speed.planner,
    "processes": speed.processes,
    "restarts": speed.restarts,
    "slow-links": speed.slow_links,
    "slow-links.measured": wires.measured,
    "train": quality.trained,
}
