"""The operators that are measured, and the fewest bytes each can move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spectrain_ext.operators import functions as st
from spectrain_ext.operators.numbers import Adam, Sgd
from spectrain_ext.operators.plan import Plan

from .workloads import Streams, Workload, dtype_of

Call = Callable[[], object]
LR, MOMENTUM, STEPS, EPS = 0.05, 0.9, (3.0, 1.0), 1e-8
ADAM_LR, BETAS, DECAY, STEP = 1e-4, (0.9, 0.999), 0.01, 100
#: Implementations that are this package's own; the others are rivals.
OURS = ("operator", "Plan")


@dataclass(frozen=True)
class Operation:
    """An operator: which streams it has to read and write (letters of `Streams`)."""

    name: str
    reads: str
    writes: str
    predictions: int = 0

    @property
    def letters(self) -> str:
        """The streams it works on."""
        return "".join(sorted(set(self.reads + self.writes)))

    def bytes_moved(self, work: Workload) -> int:
        """The fewest bytes: every input read once, every output written once."""
        return work.elements * self.bytes_per_element(work)

    def bytes_per_element(self, work: Workload) -> int:
        """The same for one weight."""
        return sum(dtype_of(work, letter).itemsize for letter in self.reads + self.writes)


PREDICT_ = Operation("predict_", "wv", "w", 1)
PREDICT = Operation("predict", "wv", "o", 1)
STASH = Operation("stash", "w", "k")
SWAP = Operation("swap_", "wk", "wk")
STASH_PREDICT = Operation("stash_predict_", "wv", "wk", 1)
SGD = Operation("SGD step", "wvg", "wv")
SGD_1 = Operation("SGD step + 1 prediction", "wvg", "wvo", 1)
SGD_2 = Operation("SGD step + 2 predictions", "wvg", "wvop", 2)
ADAMW = Operation("AdamW step", "wvug", "wvu")
ADAMW_1 = Operation("AdamW step + 1 prediction", "wvug", "wvuo", 1)
ADAMW_2 = Operation("AdamW step + 2 predictions", "wvug", "wvuop", 2)
#: A step that writes the forward's prediction into the working buffer, then, for the backward,
#: another prediction into the same buffer.
STAGE = Operation("pipeline stage, one minibatch", "wvgwv", "wvoo", 2)

OPERATIONS = [
    PREDICT_,
    PREDICT,
    STASH,
    SWAP,
    STASH_PREDICT,
    SGD,
    SGD_1,
    SGD_2,
    ADAMW,
    ADAMW_1,
    ADAMW_2,
    STAGE,
]


def applies(operation: Operation, work: Workload) -> bool:
    """Whether an operation is worth a row: in-place forms tell the same in `mixed` as in `fp32`."""
    return work.precision.name != "mixed" or operation not in (
        PREDICT_,
        STASH,
        SWAP,
        STASH_PREDICT,
    )


def sgd_numbers() -> Sgd:
    """What the SGD step is given at every call."""
    return Sgd(LR, MOMENTUM, 0.0, 0.0, False, False, False, False)


def adam_numbers() -> Adam:
    """What the AdamW step is given at every call."""
    return Adam(ADAM_LR, BETAS, EPS, DECAY, STEP, True)


def plan_of(operation: Operation, s: Streams) -> Plan:
    """A plan with the lists that the operation needs."""
    adam = "u" in operation.letters
    letters = operation.letters
    return Plan(
        s["w"],
        momentum_buffers=s["v"] if "v" in letters and not adam else None,
        exp_avgs=s["v"] if adam else None,
        exp_avg_sqs=s["u"] if adam else None,
        grads=s["g"] if "g" in letters else None,
        stashed=s["k"] if "k" in letters else None,
        outs=[s[letter] for letter in "op" if letter in letters],
    )


def ours(operation: Operation, s: Streams) -> dict[str, Call]:
    """The module-level operator and the plan, on the tensors of `s`."""
    plan = plan_of(operation, s)
    w, count = s["w"], operation.predictions
    pairs = [(steps, s[o]) for steps, o in zip(STEPS[:count], "op", strict=False)]
    calls: tuple[Call | None, Call]
    if operation is PREDICT_:
        v = s["v"]
        calls = (
            lambda: st.predict_(w, v, lr=LR, steps=STEPS[0]),
            lambda: plan.predict_(lr=LR, steps=STEPS[0]),
        )
    elif operation is PREDICT:
        v, o = s["v"], s["o"]
        calls = (
            lambda: st.predict(w, v, lr=LR, steps=STEPS[0], out=o),
            lambda: plan.predict(lr=LR, steps=STEPS[0]),
        )
    elif operation is STASH:
        k = s["k"]
        calls = lambda: st.stash(w, k), plan.stash
    elif operation is SWAP:
        k = s["k"]
        calls = lambda: st.swap_(w, k), plan.swap_
    elif operation is STASH_PREDICT:
        v, k = s["v"], s["k"]
        calls = (
            lambda: st.stash_predict_(w, k, v, lr=LR, steps=STEPS[0]),
            lambda: plan.stash_predict_(lr=LR, steps=STEPS[0]),
        )
    elif operation is STAGE:
        calls = None, lambda: _stage(plan)
    elif "u" in operation.letters:
        v, u, g = s["v"], s["u"], s["g"]
        calls = (
            lambda: st.adam_step_(
                w,
                g,
                v,
                u,
                lr=ADAM_LR,
                step=STEP,
                betas=BETAS,
                eps=EPS,
                weight_decay=DECAY,
                decoupled_weight_decay=True,
                predict=pairs,
            ),
            lambda: plan.adam_step_([adam_numbers()], predict=STEPS[:count]),
        )
    else:
        v, g = s["v"], s["g"]
        calls = (
            lambda: st.sgd_step_(w, g, v, lr=LR, momentum=MOMENTUM, predict=pairs),
            lambda: plan.sgd_step_(lr=LR, momentum=MOMENTUM, predict=STEPS[:count]),
        )
    operator, planned = calls
    return {**({} if operator is None else {"operator": operator}), "Plan": planned}


def _stage(plan: Plan) -> None:
    plan.sgd_step_(lr=LR, momentum=MOMENTUM, predict=STEPS[:1])
    plan.predict(lr=LR, steps=STEPS[1])
