"""Tests random programs: observing, saving and resuming change no bit.

``helpers.random_programs`` defines the program of a seed; a failure prints it.
"""

from __future__ import annotations

import pytest
import torch
from helpers.checkpoint_cases import same, state_of
from helpers.random_programs import Program, seeds

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save

# A stage whose input needs no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Script:
    """Segments of a program's training, with events between them."""

    def __init__(self, program):
        self.program = program
        pick, chance, draw = program.pick, program.chance, program.draw
        self.segments = []  # (how, its batch sizes, the result at which it is left)
        for _ in range(pick(2, 2, 3)):
            sizes = [pick(*program.sizes) for _ in range(pick(1, 2, 3, 5))]
            how = pick("run", "run", "fit", "leave")
            self.segments.append((how, sizes, draw.randrange(len(sizes))))
        between = ["evaluate", "call", "weights", "rollback", "resume", "resume"]
        if not program.has_masters:  # it gives up their digits
            between.append("release")
        if not program.foreign or program.dtype == torch.float32 or program.has_masters:
            between.append("optimizers")  # torch's own would cast scalars to other dtypes
        within = ["state_dict", "optimizers", "trace", "keep", "metrics", "nothing"]
        self.between = [
            [pick(*between) for _ in range(pick(0, 1, 2, 3))] for _ in self.segments[:-1]
        ]
        self.within = [pick(*within) for _ in self.segments]
        if chance(0.9) and not any("resume" in row for row in self.between):
            draw.choice(self.between).append("resume")

    def __str__(self):
        return f"{self.segments} with {self.within}, and {self.between} between them"

    def train(self, path=None):
        """Return all losses and the final state; a ``path`` enables interruptions."""
        program, losses = self.program, []
        torch.manual_seed(1)
        pipe = program.pipeline()
        for n in range(len(self.segments)):
            losses.append(self.segment(pipe, n, path))
            if path is not None and n < len(self.between):
                for k, what in enumerate(self.between[n]):
                    pipe = self.interrupt(pipe, what, path / f"{n}.{k}")
        return losses, state_of(pipe)

    def segment(self, pipe, n, path):
        """Return the losses of a segment; observers write below ``path``."""
        how, sizes, last = self.segments[n]
        data = self.program.batches(sizes, salt=n)
        within = "nothing" if path is None else self.within[n]
        found, more = [], {}
        if within == "trace":
            more["trace"] = st.Trace()
        elif within == "keep":
            more["keep"] = lambda output, target: self.program.loss_fn(output, target) * 2
        elif within == "metrics":
            more["trace"] = st.Metrics(pipe, path / f"metrics {n}", every=2)

        def look(result):
            found.append(result.loss)
            if within == "state_dict":
                pipe.state_dict()
            elif within == "optimizers":
                for optimizer in pipe.optimizers:
                    optimizer.state_dict()

        if how == "fit":
            found.append(torch.tensor(pipe.fit(data, epochs=2, callbacks=[look], **more)))
        else:
            run = pipe.run(data, **more)
            for result in run:
                look(result)
                if how == "leave" and result.index == last:
                    break
            run.close()
        if within == "metrics":
            more["trace"].close()
        return found

    def interrupt(self, pipe, what, path):
        program = self.program
        extra = program.batches(program.sizes[:3], salt=77)
        if what == "evaluate":
            pipe.evaluate(extra)
        elif what == "call":
            (batch, *_) = extra
            pipe.eval()
            with torch.no_grad():
                pipe(batch if isinstance(batch, dict) else batch[0])
            pipe.train()
        elif what == "weights":
            pipe.load_state_dict({key: t.clone() for key, t in pipe.state_dict().items()})
        elif what == "optimizers":
            for optimizer in pipe.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        elif what == "release":
            pipe.release()
        else:
            save(path, pipe)
            if what == "rollback":
                for _ in pipe.run(extra):
                    pass
            else:
                torch.manual_seed(2)
                pipe = program.pipeline(salt=5)
            assert load(path, pipe).random
        return pipe


@pytest.mark.parametrize("seed", seeds(10))
def test_to_the_bit(seed, tmp_path):
    program = Program(seed, "itself")
    script = Script(program)
    print(program, script, sep="\n")
    expected = script.train()
    found = script.train(tmp_path)
    same(found, expected)
