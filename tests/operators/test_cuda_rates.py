"""Tests numbers in memory and tables on a GPU, and steps in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ops_calls import GroupPlan, in_memory
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws

pytestmark = pytest.mark.cuda

LONG = 3000  # tensors: more rows than a kernel's parameters hold


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cuda")


def apart(n: int, count: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return `count` lists of n positive tensors that no table can merge."""
    random = torch.Generator().manual_seed(11)
    return [
        [
            torch.rand(5 + i % 7, generator=random).add_(0.1).to("cuda", dtype) for i in range(n)
        ]
        for _ in range(count)
    ]  # fmt: skip


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in some] for some in lists]


def assert_same_bits(a: list[list[Tensor]], b: list[list[Tensor]]) -> None:
    for k, (xs, ys) in enumerate(zip(a, b, strict=True)):
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            assert torch.equal(x, y), f"list {k}, tensor {i}"


class TestOneLaunch:
    def test_a_long_list(self) -> None:
        on_device = apart(LONG, 4)
        on_host = [[t.cpu() for t in some] for some in on_device]
        launches = []
        for w, g, v, out in (on_device, on_host):
            plan = st.Plan(w, grads=g, momentum_buffers=v, outs=[out])
            for _ in range(4):
                plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2])
                launches.append(plan._native.last_launch()[0])
        assert launches[0] > 1  # windows, as for a plan that is used once
        assert launches[2:4] == [1, 1]
        assert_same_bits([[t.cpu() for t in some] for some in on_device], on_host)

    def test_new_gradients_make_a_new_table(self) -> None:
        w, g, v = apart(LONG, 3)
        others = [t.clone() for t in w], [t.clone() for t in v]
        plan = st.Plan(w, grads=g, momentum_buffers=v)
        for factor in (1.0, 2.0, 3.0):
            fresh = [t * factor for t in g]
            plan.refresh(fresh)
            for _ in range(3):
                plan.sgd_step_(lr=0.1, momentum=0.9)
                st.sgd_step_(others[0], fresh, others[1], lr=0.1, momentum=0.9)
        assert_same_bits([w, v], list(others))

    @pytest.mark.parametrize("how", ["plan", "operator", "distance"])
    def test_memory_of_a_call_is_free_for_its_stream(self, how: str) -> None:
        """No call's table is in memory that the current stream released but has yet to write."""
        w, v = apart(LONG, 2)
        expected = st.predict(w, v, lr=0.1, steps=2)
        lr = number(0.1, torch.float64)
        torch.cuda.synchronize()
        for _ in range(4):
            out = [torch.zeros_like(t) for t in w]
            plan = st.Plan(w, momentum_buffers=v, outs=[out])
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            left = [torch.empty(1 << k, dtype=torch.uint8, device="cuda") for k in range(8, 22)]
            torch.cuda._sleep(20_000_000)
            for memory in left:
                memory.fill_(255)
            del left, memory
            if how == "distance":
                each, _ = st.distance(w, [v], stream=side)
                side.synchronize()
                wanted = st.distance([t.cpu() for t in w], [[t.cpu() for t in v]])[0]
                assert torch.equal(each.cpu(), wanted)
                continue
            if how == "plan":
                plan.predict(lr=lr, steps=2, stream=side)
            else:
                out = st.predict(w, v, lr=0.1, steps=2, stream=side)
            side.synchronize()
            assert_same_bits([out], [expected])

    def test_a_plan_on_several_streams(self) -> None:
        w, v, out = apart(LONG, 3)
        plan = st.Plan(w, momentum_buffers=v, outs=[out])
        expected = st.predict(w, v, lr=0.1, steps=2)
        stream = torch.cuda.current_stream()
        for _ in range(4):
            earlier, stream = stream, torch.cuda.Stream()
            stream.wait_stream(earlier)
            plan.predict(lr=number(0.1, torch.float64), steps=2, stream=stream)
            with torch.cuda.stream(stream):
                assert_same_bits([out], [expected])
                for t in out:
                    t.zero_()

    def test_many_groups(self) -> None:
        """More arguments than a long table leaves room for: they are written to the device."""
        w, g, v = apart(LONG, 3)
        others = [[t.clone() for t in some] for some in (w, v)]
        groups = [i % 20 for i in range(LONG)]
        plan = GroupPlan(groups, w, grads=g, momentum_buffers=v)
        numbers = [laws.SgdNumbers(0.01 * k, 0.9) for k in range(20)]
        for _ in range(3):
            plan.step(numbers)
            for k, rule in enumerate(numbers):
                picked = [
                    [some[i] for i in range(k, LONG, 20)] for some in (others[0], g, others[1])
                ]
                st.sgd_step_(*picked, lr=rule.lr, momentum=0.9)  # fmt: skip
        assert_same_bits([w, v], others)


def captured(call: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class TestGraphs:
    @pytest.mark.parametrize("n", [1, 300, LONG])
    @pytest.mark.parametrize("warm", [False, True])
    def test_replays_see_what_the_rate_is_then(self, n: int, warm: bool) -> None:
        w, g, v, kept, out = lists = apart(n, 5)
        lr = number(0.5)
        plan = st.Plan(w, grads=g, momentum_buffers=v, stashed=kept, outs=[out])
        other = copies(lists)

        def expected(rate: float) -> None:
            a, b, c, k, d = other
            st.sgd_step_(a, b, c, lr=rate, momentum=0.5, predict=[(3, d)])
            st.stash_predict_(a, k, c, lr=rate, steps=1)
            st.swap_(a, k)
            st.restore_(a, k)

        def step() -> None:
            plan.sgd_step_(lr=lr, momentum=0.5, predict=[3])
            plan.stash_predict_(lr=lr, steps=1)
            plan.swap_()
            plan.restore_()

        if warm:
            step()
            expected(0.5)
        graph = captured(step)
        for rate in (0.5, 0.25, 0.0):
            lr.fill_(rate)
            graph.replay()
            expected(rate)
            assert_same_bits(lists, other)
        step()  # between replays, with the plan's own table
        expected(0.0)
        graph.replay()
        expected(0.0)
        assert_same_bits(lists, other)

    def test_one_shot_calls(self) -> None:
        w, v, out = apart(LONG, 3)
        lr = number(0.5)
        graph = captured(lambda: st.predict(w, v, lr=lr, steps=2, out=out))
        for rate in (0.5, 0.25):
            lr.fill_(rate)
            graph.replay()
            assert_same_bits([out], [st.predict(w, v, lr=rate, steps=2)])

    def test_every_replay_reads_whether_to_skip(self) -> None:
        w, g, v = lists = apart(3, 3)
        found = number(0.0)
        plan = st.Plan(w, grads=g, momentum_buffers=v)

        def step() -> None:
            plan.sgd_step_(lr=0.1, momentum=0.9, found_inf=found)

        step()  # queries the device's constants once
        graph, other = captured(step), copies(lists)
        for skip in (1.0, 0.0):
            found.fill_(skip)
            graph.replay()
            if not skip:
                st.sgd_step_(*other, lr=0.1, momentum=0.9)
            assert_same_bits(lists, other)

    def test_a_gradient_must_stay_where_a_graph_reads_it(self) -> None:
        w, g, v = apart(3, 3)
        plan = st.Plan(w, grads=g, momentum_buffers=v)
        plan.refresh([t.clone() for t in g])  # before the capture: anywhere
        plan.refresh(g)
        graph = captured(lambda: plan.sgd_step_(lr=0.1, momentum=0.9))
        plan.refresh(list(g))
        with pytest.raises(RuntimeError, match=r"grads\[1\]: .*captured in a CUDA graph"):
            plan.refresh([g[0], g[1].clone(), g[2]])
        other = copies([w, g, v])
        graph.replay()
        st.sgd_step_(*other, lr=0.1, momentum=0.9)
        assert_same_bits([w, g, v], other)
        plan.sgd_step_(lr=0.1, momentum=0.9)
        st.sgd_step_(*other, lr=0.1, momentum=0.9)
        assert_same_bits([w, g, v], other)

    def test_many_other_calls_do_not_drop_what_a_graph_reads(self) -> None:
        w, v, *outs = apart(LONG, 22)
        lr = number(0.5)
        plan = st.Plan(w, momentum_buffers=v, outs=outs)
        plan.predict(lr=lr, steps=2)
        graph = captured(lambda: plan.predict(lr=lr, steps=2))
        for j in range(1, 20):
            plan.predict(lr=lr, steps=2, out=j)
        torch.cuda.empty_cache()
        filler = [torch.full((1 << 16,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
        graph.replay()
        assert len(filler) == 64
        assert_same_bits([outs[0]], [st.predict(w, v, lr=0.5, steps=2)])


def test_numbers_in_memory_of_the_host_are_refused() -> None:
    w, g, v, out = apart(2, 4)
    with pytest.raises(ValueError, match=r"lr: expected an array on cuda:0.* got cpu"):
        st.predict(w, v, lr=in_memory(0.1), steps=2, out=out)
    with pytest.raises(ValueError, match=r"found_inf: expected an array on cuda:\d+.*got cpu"):
        st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, found_inf=torch.tensor(0.0))
