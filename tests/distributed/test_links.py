"""Groups of neighbours: their first uses, which block hosts, close no circle of waiting ranks.

torch connects a pair of ranks at its first message of a group, and by NCCL both hosts wait there
for one another. Here nothing is sent: what each rank would do is written down, and played.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spectrain_ext.distributed import links as links_module
from spectrain_ext.distributed.links import Traffic
from spectrain_ext.method import find_method, places_of
from spectrain_ext.schedule import Kind, Replicas, bounded, find_generator

CPU = torch.device("cpu")
SHAPES = [
    *itertools.product(range(1, 4), range(1, 5)),
    *itertools.product(range(1, 4), range(1, 5), range(1, 3)),
]
# How a group is connected: for messages between the two, or for what all its members do.
MESSAGE, SUM = "message", "sum"


class Group:
    """In place of a process group; ``number``: all ranks make them in one order."""

    def __init__(self, number, ranks, backend):
        self.number, self.ranks, self.backend = number, ranks, backend


class Default:
    """In place of ``dist.group``, with a default group that ``device_id`` has been given."""

    def __init__(self, device_id=None):
        self.WORLD = SimpleNamespace(bound_device_id=device_id)


def unwatched(rank):
    """In place of a board."""
    return SimpleNamespace(
        rank=rank, timeout=1.0, doing=lambda *_: None, blocked=lambda *_: nullcontext()
    )


@pytest.fixture
def opened(monkeypatch):
    """Returns a function that opens the links of all ranks: per rank the links, and the uses.

    A use: what is done, and the group that it is done in.
    """

    def open_all(counts, bodies="nccl"):
        replicas = Replicas(counts)
        all_ranks = list(range(replicas.ranks))
        monkeypatch.setattr(dist, "ProcessGroup", Group)
        monkeypatch.setattr(dist, "group", Default())
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: all_ranks)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(all_ranks))
        found = []
        for rank in all_ranks:
            made, uses = itertools.count(), []

            def new_group(ranks, made=made, rank=rank, backend="", **_):
                group = Group(next(made), tuple(ranks), backend)
                return group if rank in ranks else object()

            def use(what, uses=uses):
                return lambda *given, group: uses.append((what, group, *given[1:]))

            monkeypatch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
            monkeypatch.setattr(dist, "new_group", new_group)
            for what in ("send", "recv", "all_reduce"):
                monkeypatch.setattr(dist, what, use(what))
            links = links_module.open_links(None, CPU, unwatched(rank), False, replicas, bodies)
            found.append((links, uses))
        return found

    return open_all


@pytest.mark.parametrize("bodies", ["gloo", "nccl"])
def test_a_group_is_first_used_as_it_will_be(opened, bodies):
    for counts in [(2,), (1, 1), (2, 3), (2, 1, 4)]:
        all_opened = opened(counts, bodies)
        last = Replicas(counts).indices_of(len(counts) - 1)
        from_rank_0 = {other for other in last if other}
        firsts = all_opened[0][0].edges
        assert {e.at for e in firsts if e.what is Traffic.TARGETS} == from_rank_0
        assert {e.at for e in firsts if e.what is Traffic.INPUTS} == set(range(1, counts[0]))
        for rank, (links, uses) in enumerate(all_opened):
            expected = []
            for link in links.edges:
                assert (link.host is link.device) == (bodies == "gloo")
                use = ("send", link.receiver) if link.sender == rank else ("recv", link.sender)
                for group in {link.host, link.device}:
                    assert set(group.ranks) == {link.sender, link.receiver}
                    expected.append((use[0], group, use[1]))
            if links.circle is not None:
                for group in {links.circle.host, links.circle.device}:
                    expected.append(("all_reduce", group))
            assert Counter(uses) == Counter(expected)
            order = [group.number for _, group, *_ in uses]
            assert order == sorted(order)


def trains(counts, links, rank, minibatches=2):
    """What a rank's host does in training: ("post" | "take" | "meet", group)."""
    replicas = Replicas(counts)
    k, c = replicas.stage_and_replica(rank)
    microbatches = math.lcm(*counts)
    of = {(link.what, link.at, link.sender == rank): link.device for link in links.edges}
    places = places_of(find_method("vanilla"), len(counts), microbatches, None, replicas)
    for kind, _, j in bounded(find_generator("1f1b-async")(places[k]), k, minibatches):
        if kind is Kind.UPDATE:
            if links.circle is not None:
                yield "meet", (SUM, links.circle.device)
            continue
        j = c + j * counts[k]
        forward = kind is Kind.FORWARD
        what = Traffic.ACTIVATIONS if forward else Traffic.GRADIENTS
        before, after = (k - 1, k + 1) if forward else (k + 1, k - 1)
        if 0 <= before < len(counts):
            group = of[what, replicas.runs(before, j), False]
            yield "take", group  # its header, by gloo
            yield "meet", (MESSAGE, group)
        if 0 <= after < len(counts):
            group = of[what, replicas.runs(after, j), True]
            yield "post", group
            yield "meet", (MESSAGE, group)


def stuck(ranks):
    """Play what all ranks do; what each one that does not come to its end waits for."""
    heads = [next(steps, None) for steps in ranks]
    met = [set() for _ in ranks]
    posted = Counter()

    def number(step):
        what, of = step
        return (of[0], of[1].number) if what == "meet" else of.number

    def can(rank):
        what, of = heads[rank]
        if what == "take":
            return posted[of.number] > 0
        if what == "post" or number(heads[rank]) in met[rank]:
            return True
        there = [heads[r] for r in of[1].ranks]
        return all(h and h[0] == "meet" and number(h) == number(heads[rank]) for h in there)

    progress = True
    while progress:
        progress = False
        for rank in range(len(heads)):
            while heads[rank] is not None and can(rank):
                progress = True
                what, of = heads[rank]
                together = [rank]
                if what == "meet" and number(heads[rank]) not in met[rank]:
                    together = list(of[1].ranks)
                elif what != "meet":
                    posted[of.number] += 1 if what == "post" else -1
                for r in together:
                    if what == "meet":
                        met[r].add(number((what, of)))
                    heads[r] = next(ranks[r], None)
    return {rank: head for rank, head in enumerate(heads) if head is not None}


def test_first_uses_do_not_wait_in_a_circle(opened):
    circles = []
    for counts in SHAPES:
        found = opened(counts)
        opening = [
            [("meet", (SUM if use[0] == "all_reduce" else MESSAGE, use[1])) for use in uses]
            for _, uses in found
        ]
        training = [list(trains(counts, links, rank)) for rank, (links, _) in enumerate(found)]
        waiting = stuck([itertools.chain(*each) for each in zip(opening, training, strict=True)])
        assert not waiting, counts
        for sums in (True, False):  # groups used by sums, which connect no pair, or not at all
            before = [
                [("meet", (SUM, group)) for _, (_, group) in steps] if sums else []
                for steps in opening
            ]
            if stuck([itertools.chain(*each) for each in zip(before, training, strict=True)]):
                circles.append((counts, sums))
    assert ((2, 3), True) in circles
    assert ((2, 3), False) in circles
    assert all(len(set(counts)) > 1 for counts, _ in circles)


def test_the_groups_stand_by_themselves(monkeypatch):
    """A default group with a device would be split, and by those who are no members as well."""
    seen = []

    def new_group(*_, device_id, backend, **given):
        seen.append((backend, device_id, dist.group.WORLD.bound_device_id))
        raise ArithmeticError("planned")

    default = Default(torch.device("cuda", 0))
    monkeypatch.setattr(dist, "group", default)
    monkeypatch.setattr(dist, "new_group", new_group)
    for backend in ("gloo", "nccl"):
        with pytest.raises(ArithmeticError):
            opener = links_module._Opener([0], unwatched(0), backend, CPU)
            opener.group("all", [0], backend, CPU, links_module._sum)
    assert seen == [("gloo", None, None), ("nccl", CPU, None)]
    assert default.WORLD.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["a 0", "a 1", "b 0"], "nccl"),
        (["a 0", "a 0", "b 0"], "gloo"),
        (["a 0", "", "b 0"], "gloo"),
        (["", "", ""], "gloo"),
    ],
    ids=["own", "shared", "without", "cpu"],
)
def test_nccl_is_for_ranks_with_a_gpu_each(gpus, expected, monkeypatch):
    for gpu in gpus:
        monkeypatch.setattr(links_module, "_gpu", lambda _, gpu=gpu: gpu)
        board = SimpleNamespace(gathered=lambda where, mine: gpus if mine in gpus else None)
        assert links_module.backend_of_bodies(board, CPU) == expected
