"""Tests random programs in float64 against plain torch or the definition.

``helpers.random_programs`` defines the program of a seed; a failure prints it.
"""

from __future__ import annotations

import pytest
import torch
from helpers.random_modules import OwnRandom
from helpers.random_programs import Program, covering_seeds, drawn
from helpers.random_settings import definition_of
from oracle.definition import Oracle, cut
from torch import nn

# A stage whose input needs no gradient.
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def close(found, expected, what):
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )


def drawing(program, pipe, salt=0):
    """Provide the program's stages with the pipeline's random state."""
    states = [random.states()[0].clone() for random in pipe.random]
    return [OwnRandom(s, state) for s, state in zip(program.stages(salt), states, strict=True)]


def compare_weights(pipe, stages):
    for mine, theirs in zip(pipe.children(), stages, strict=True):
        found = mine.state_dict()
        expected = theirs.stage.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            close(found[name], tensor, name)


class Plain:
    """The uncut model in an ordinary loop."""

    def __init__(self, program, pipe):
        self.program, self.stages = program, drawing(program, pipe)
        self.model = nn.Sequential(*self.stages)
        self.microbatches = pipe.places[0].microbatches if program.by_microbatch else 1
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = program.optimizer.theirs(self.params)
        make = program.optimizer.make_scheduler
        self.scheduler = None if make is None else make(self.optimizer)

    def train(self, batch):
        total = 0.0
        self.optimizer.zero_grad()
        for value, target, share in self.cut(batch, self.microbatches):
            loss = share * self.program.loss_fn(self.model(value), target)
            loss.backward()
            total = total + loss.detach()
        self.clip()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def cut(self, batch, microbatches):
        batch = tuple(batch) if isinstance(batch, list) else batch
        return cut(batch, microbatches, self.program.options.get("split_dim", 0))

    def clip(self):
        most = self.program.options.get("clip_norm")
        if most is None:
            return
        if self.program.options.get("clip_scope") != "stage":
            nn.utils.clip_grad_norm_(self.params, most)
            return
        known = set()
        for stage in self.stages:
            own = [p for p in stage.parameters() if p.requires_grad and p not in known]
            known.update(own)
            nn.utils.clip_grad_norm_(own, most)

    def evaluate(self, batches):
        self.model.eval()
        total, samples = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                size = sum(1 for _ in self.cut(batch, 1000))
                ((value, target, _),) = self.cut(batch, 1)
                total += size * float(self.program.loss_fn(self.model(value), target))
                samples += size
        self.model.train()
        return total / samples


@pytest.mark.parametrize("against", ["torch", "definition"])
def test_every_feature_and_pair_is_drawn(against):
    assert drawn(against)[1] == set()


@pytest.mark.parametrize("seed", covering_seeds("torch"))
def test_the_uncut_model_in_a_loop(seed):
    program = Program(seed, "torch")
    print(program)
    pipe = program.pipeline()
    plain = Plain(program, pipe)
    sizes, held_out = program.sizes, program.batches(program.sizes[:2], salt=1)
    data = program.batches(sizes)
    for part in (data[:3], data[3:]):
        found = [result.loss for result in pipe.run(part)]
        for loss, batch in zip(found, part, strict=True):
            close(loss, plain.train(batch), "loss")
        compare_weights(pipe, plain.stages)
        close(pipe.evaluate(held_out)["loss"], plain.evaluate(held_out), "evaluation")
    compare_state(pipe, plain)


def compare_state(pipe, plain):
    """Compare the state of both optimizers, and their groups after a scheduler."""
    theirs = dict(plain.model.named_parameters())
    groups = {p: group for group in plain.optimizer.param_groups for p in group["params"]}
    names = {p: name for name, p in nn.Sequential(*pipe.children()).named_parameters()}
    for optimizer in pipe.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                index, _, rest = names[p].partition(".")
                q = theirs[f"{index}.stage.{rest}"]
                close(float(group["lr"]), float(groups[q]["lr"]), "lr")
                expected = plain.optimizer.state.get(q, {})
                found = optimizer.state.get(p, {})
                for key, value in expected.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        close(found[key], value, f"{names[p]}: {key}")


@pytest.mark.parametrize("seed", covering_seeds("definition", without=("block", "halves of")))
def test_the_definition(seed):
    program = Program(seed, "definition")
    print(program)
    pipe = program.pipeline()
    stages, optimizer = drawing(program, pipe), program.optimizer
    method = definition_of(program.method, optimizer.has_momentum)
    rest = {"scheduler": optimizer.make_scheduler, **program.options}
    oracle = Oracle(stages, optimizer.theirs, program.loss_fn, method, **rest)
    data = program.batches(program.sizes)
    for part in (data[:4], data[4:]):
        found = [result.loss for result in pipe.run(part)]
        expected = oracle.run([tuple(b) if isinstance(b, list) else b for b in part])
        for loss, theirs in zip(found, expected, strict=True):
            close(loss, theirs, "loss")
        compare_weights(pipe, oracle.stages)
