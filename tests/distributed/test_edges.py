"""Tests edges between processes: the same bits, no reuse of busy buffers, one failure report."""

from __future__ import annotations

import json
from time import monotonic

import pytest
import torch
from helpers import rank_programs
from helpers.ranks import Ranks, run_ranks

from spectrain_ext.distributed.failures import Cause, Heartbeat, find_culprit
from spectrain_ext.distributed.wire import decode_layout, encode_layout
from spectrain_ext.transport.message import FLAT, FlatMemory, Layout, Message, unflattened

pytestmark = pytest.mark.processes

UNEVEN = [(0, 4), (1, 4), (2, 3), (3, 4), (4, 1), (5, 4), (6, 4)]
GROWING = [(0, 1), (1, 7), (2, 3), (3, 70), (4, 1), (5, 4), (6, 90)]


@pytest.mark.parametrize("messages", [UNEVEN, GROWING], ids=["uneven", "growing"])
def test_messages_arrive_bit_for_bit(messages):
    assert run_ranks(rank_programs.same_bits, 2, messages, messages is GROWING) == [[], []]


def test_layouts_are_announced_anew_where_there_are_too_many():
    assert run_ranks(rank_programs.few_layouts, 2, [*GROWING, *UNEVEN[:3], *GROWING]) == [[], []]


@pytest.mark.parametrize("messages", [UNEVEN, GROWING], ids=["uneven", "growing"])
def test_staged_messages_arrive_bit_for_bit(messages):
    given = (None, messages, messages is GROWING)
    assert run_ranks(rank_programs.checked, 2, *given) == [[], []]


@pytest.mark.parametrize(
    ("stream", "rank", "found"),
    [
        ("sending thread", 0, "reads edge 0 -> 1, slot 0 without waiting for copy stream"),
        (
            "receiving thread",
            1,
            "writes host memory of edge 0 -> 1, slot 0 without waiting for copy",
        ),
        (
            "copy stream",
            1,
            "reads host memory of edge 0 -> 1, slot 0 without waiting for receiving",
        ),
    ],
)
def test_a_wait_that_staging_misses_is_noticed(stream, rank, found):
    given = (stream, UNEVEN, False)
    ends = Ranks(rank_programs.checked, 2, *given).join()
    assert f"OrderingError: {stream}" in ends[rank].error
    assert found in ends[rank].error


def test_an_edge_serves_one_run_after_another():
    seen = run_ranks(rank_programs.two_runs, 2)[1]
    assert seen == [10.0 * run + n for run in range(3) for n in range(5)]


def test_a_larger_message_ends_both_ranks_with_one_reason():
    sender, receiver = Ranks(rank_programs.grows, 2).join()
    assert (sender.code, receiver.code) == (1, 1)
    for error in (sender.error, receiver.error):
        assert "edge 0 -> 1 was opened for float32 [4, 2]" in error
        assert "dynamic_shapes" in error
    assert "RankError: rank 1" in receiver.error
    assert "first cause: rank 0" in receiver.error


def test_a_buffer_given_back_to_a_rank_that_has_gone():
    ends = Ranks(rank_programs.frees_late, 2).join()
    assert [end.code for end in ends] == [-9, 1]
    assert "RankError: rank 1" in ends[1].error
    assert "first cause: rank 0, " in ends[1].error


@pytest.mark.parametrize(
    ("fails", "at"), [(True, "the communicator was aborted"), (False, "not a number")]
)
def test_an_abort_ends_a_wait_for_the_device(fails, at):
    aborted, (report, cause) = run_ranks(rank_programs.cut_off, 2, fails)
    assert aborted
    assert report.startswith("rank 1, "), report
    assert "first cause: rank 0, " in report
    assert "ArithmeticError: planned" in report
    assert cause == at


def test_a_rank_that_gets_on_is_waited_for_beyond_the_deadline():
    assert run_ranks(rank_programs.waits_for_one, 3, 1.0, 3.0, [0.3] * 9) == [True] * 3


def test_a_rank_that_does_not_get_on_is_not():
    began = monotonic()
    ends = Ranks(rank_programs.waits_for_one, 3, 1.0, 2.0, [0.3] * 6 + [None]).join()
    assert [end.code for end in ends] == [1, 1, 1]
    for end in ends[1:]:
        assert "first cause: rank 0, step 6: busy with it for 1." in end.error
    # 1.8 s of steps, the deadline, the grace of the stuck rank, and starting processes
    assert monotonic() - began < 30


FAULTS = ["kill", "stop", "exit", "exception", "hang"]
# Each fault with varying stores and ranks; nightly runs have the other combinations.
TRIALS = [
    pytest.param(
        fault,
        culprit,
        keeper,
        id=f"{fault}-{culprit}-{'store-apart' if keeper else 'store-on-rank-0'}",
        marks=[] if culprit == (n + 1) % 3 and keeper == (n + 1) % 2 else pytest.mark.nightly,
    )
    for n, fault in enumerate(FAULTS)
    for culprit in range(3)
    for keeper in (True, False)
]


@pytest.mark.parametrize(("fault", "culprit", "keeper"), TRIALS)
def test_any_end_of_a_rank_ends_all(fault, culprit, keeper):
    ranks = Ranks(rank_programs.chain, 3, fault, culprit, 2.0, 3.0, keeper=keeper)
    ends = ranks.join()  # a stopped rank continues after the others noticed its silence
    told = "\n".join(f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends))
    for rank, end in enumerate(ends):
        if rank == culprit and fault != "hang":
            expected = {"kill": -9, "stop": 1, "exit": 7, "exception": 1}
            assert end.code == expected[fault], told
        else:
            assert end.code == 1, told
            assert f"first cause: rank {culprit}, " in end.error, told


def test_blame_goes_to_whom_all_others_wait_for():
    now = monotonic()
    waiting = [Heartbeat(b"x", now, doing=f"F {r}", waits=(r - 1, "edge")) for r in range(4)]
    busy = [Heartbeat(b"x", now, doing="F 9", busy=3.0), *waiting[1:]]
    assert find_culprit(busy, 3, 2, 1.0)[0].rank == 0
    silent = [busy[0], Heartbeat(b"x", now - 2.0, doing="B 1"), *busy[2:]]
    cause, _ = find_culprit(silent, 3, 2, 1.0)
    assert cause.rank == 1
    assert "last known in B 1: no sign of life for 2.0 s" in cause.reason
    circle = [Heartbeat(b"x", now, waits=(2, "edge")), *waiting[1:]]
    assert "3 -> 2 -> 1 -> 0 -> 2" in find_culprit(circle, 3, 2, 1.0)[0].reason
    pair = [Heartbeat(b"x", now, waits=(1, "edge 1 -> 0")), waiting[1]]
    assert find_culprit(pair, 1, 0, 1.0)[0].rank == 0
    assert Cause.read(b"", 4) is None


CONSTANTS = [1, True, 1.0, -0.0, float("inf"), "é\ud800", None]


@pytest.mark.parametrize("named", [False, True])
def test_a_layout_survives_the_wire(named):
    tensors = rank_programs.tensors(0)
    form = FLAT
    if named:
        first, *more = ("tensor" for _ in tensors)
        form = ("dict", ("é0", "more"), first, ("list", *more, *map(json.dumps, CONSTANTS)))
    message = Message(tensors, rank_programs.GRADS, form)
    layout = Layout.of(message)
    assert decode_layout(encode_layout(layout)) == layout
    assert layout.message(list(tensors)).form == form
    assert ("['é0'] float32 [4, 7]" in str(layout)) == named
    if named:
        found = unflattened(decode_layout(encode_layout(layout)).form, iter(tensors))["more"]
        assert repr(found[len(more) :]) == repr(CONSTANTS)
    memory = torch.zeros(layout.places()[1], dtype=torch.uint8)
    for to, tensor in zip(layout.views(memory), message.tensors, strict=True):
        assert (to is None) == (tensor is None)
        if to is not None:
            to.copy_(tensor)
            assert torch.equal(to, tensor)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"tensors": [null]}',
        b'{"tensors": [[[2], [1], "load", true]], "form": "tensor"}',
        b'{"tensors": [[[2], [1, 1], "float32", true]], "form": "tensor"}',
        b'{"tensors": [[[2], [64], "float32", true]], "form": "tensor"}',
        b'{"tensors": [[[-2], [1], "float32", true]], "form": "tensor"}',
        b'{"tensors": [null], "form": ["dict", ["a", "b"], "tensor"]}',
        b'{"tensors": [null], "form": ["dict", [3], "tensor"]}',
        b'{"tensors": [null, null], "form": ["dict", ["a", "a"], "tensor", "tensor"]}',
        b'{"tensors": [null], "form": ["dict"]}',
        b'{"tensors": [null], "form": ["set", "tensor"]}',
        b'{"tensors": [null], "form": ["list", "tensor", "tensor"]}',
        b'{"tensors": [null], "form": ["list", []]}',
        b'{"tensors": [null], "form": ["list", "tensor", "[1]"]}',
        b'{"tensors": [null], "form": ["list", "tensor", "print(1)"]}',
        b'{"tensors": [null], "form": ["list", "tensor", 3]}',
        b'{"tensors": [null], "form": [["list"], "tensor"]}',
        b'{"tensors": [null], "form": 3}',
        b'{"tensors": [null], "form": ' + b'["list", ' * 9000 + b'"tensor"' + b"]" * 9000 + b"}",
    ],
    ids=[
        *("cut", "list", "no-form", "no-dtype", "ranks", "beyond", "negative", "names"),
        *("no-names", "twice", "no-members", "kind", "places", "nothing", "a-list", "no-json"),
        *("no-text", "unhashable", "number", "deep"),
    ],
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(ValueError):
        decode_layout(text)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_tensor_of_a_message_is_changed_while_autograd_keeps_another(mode):
    layout = Layout.of(Message((torch.zeros(3), torch.zeros(2)), (True, True)))
    memory = FlatMemory()
    with mode():
        memory.fit(layout.places()[1], torch.device("cpu"))
        first, second = memory.views(layout)
    weight = torch.ones(2, requires_grad=True)
    product = second.fill_(2.0) * weight
    first.fill_(3.0)
    product.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0]


def test_what_a_layout_may_shrink_to():
    def of(*tensors, form=FLAT):
        return Layout.of(Message(tensors, (True,) * len(tensors), form))

    a, b = torch.zeros(4, 5), torch.zeros(4)
    assert of(a, b).shrinks_to(of(a[:3], b[:3]))
    assert of(a).shrinks_to(of(a[:, :2]))
    assert of(a, b).shrinks_to(of(a[:3]))  # fewer microbatches of targets
    assert not of(a, b).shrinks_to(of(b))
    assert not of(a).shrinks_to(of(a, b))
    assert not of(a).shrinks_to(of(a[:3, :3]))
    assert not of(a).shrinks_to(of(a.double()))
    assert not of(a[:3]).shrinks_to(of(a))
    assert not of(a, None).shrinks_to(of(a, b))
    # Values that are not tensors take no room.
    assert of(a, form=("list", "tensor", "3")).shrinks_to(of(a, form=("list", "tensor")))
