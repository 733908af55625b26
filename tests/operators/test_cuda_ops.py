"""Tests operators on a GPU: streams, threads, allocations, over 2^31 elements.

That they have the CPU's bits is tested in test_calls.py; graphs are in test_cuda_rates.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import ops_reference as ref
from torch import Tensor

import spectrain_ext as st

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("flat", [True, False])
def test_more_than_two_to_the_31_elements(flat: bool) -> None:
    """A 32-bit index would wrap around: every element is compared."""
    n = 2**31 + 4099
    need = 3 * n * 2 + 2**30
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")
    w = torch.ones(n, dtype=torch.bfloat16, device="cuda")
    v = torch.full((n,), 2.0, dtype=torch.bfloat16, device="cuda")
    kept = torch.full((n,), torch.nan, dtype=torch.bfloat16, device="cuda")
    lists = ([w], [kept], [v]) if flat else tuple([*t.chunk(7)] for t in (w, kept, v))
    st.stash_predict_(*lists, lr=0.5, steps=3.0)
    assert bool((w == -2.0).all()) and bool((kept == 1.0).all())
    st.restore_(lists[0], lists[1])
    assert bool((w == 1.0).all())
    torch.cuda.empty_cache()


class TestStreams:
    """The caller's current stream, unless another one is given."""

    @staticmethod
    def _late_fill(stream: torch.cuda.Stream, t: Tensor, value: float) -> None:
        """Set t to value long after the call returns; another stream would not see it."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            t.fill_(value)

    @pytest.mark.parametrize("how", ["current", "named", "plan current", "plan named"])
    def test_work_is_ordered_after_what_is_on_that_stream(self, how: str) -> None:
        w = torch.zeros(100_000, device="cuda")
        v = torch.zeros(100_000, device="cuda")
        plan = st.Plan(w, momentum_buffers=v)
        plan.predict_(lr=1.0, steps=1.0)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        self._late_fill(side, v, 2.0)
        if how == "current":
            with torch.cuda.stream(side):
                st.predict_(w, v, lr=1.0, steps=1.0)
        elif how == "named":
            st.predict_(w, v, lr=1.0, steps=1.0, stream=side)
        elif how == "plan current":
            with torch.cuda.stream(side):
                plan.predict_(lr=1.0, steps=1.0)
        else:
            plan.predict_(lr=1.0, steps=1.0, stream=side)
        assert not side.query(), "an operator waited for the GPU"
        side.synchronize()
        assert bool((w == -2.0).all())

    def test_something_that_is_no_stream(self) -> None:
        w = torch.zeros(10, device="cuda")
        with pytest.raises(TypeError, match="stream"):
            st.restore_(w, torch.ones(10, device="cuda"), stream="side")  # type: ignore[arg-type]
        assert int(w.count_nonzero()) == 0

    def test_every_python_thread_has_its_own_current_stream(self) -> None:
        w = torch.zeros(1000, device="cuda")
        v = torch.zeros(1000, device="cuda")
        plan = st.Plan(w, momentum_buffers=v)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        self._late_fill(side, v, 1.0)

        def work() -> None:
            with torch.cuda.stream(side):
                plan.predict_(lr=1.0, steps=1.0)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        side.synchronize()
        assert bool((w == -1.0).all())

    def test_two_threads_with_their_own_plans_and_streams(self) -> None:
        """The same bits as one after the other."""

        def run(seed: int, stream: torch.cuda.Stream) -> list[Tensor]:
            gen = torch.Generator().manual_seed(seed)
            sizes = (70_000, 3, 257)
            w, g, v, out = ([torch.randn(n, generator=gen).cuda() for n in sizes] for _ in range(4))
            torch.cuda.synchronize()
            plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
            with torch.cuda.stream(stream):
                for step in range(100):
                    plan.sgd_step_(lr=0.01, momentum=0.9, first_step=step == 0, predict=[2.0])
            stream.synchronize()
            return [t.cpu() for t in (*w, *v, *out)]

        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        expected = [run(k, streams[k]) for k in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            got = list(pool.map(run, (0, 1), streams))
        for k in (0, 1):
            ref.assert_lists(got[k], expected[k], f"thread {k}", exact=True)

    def test_operators_do_not_synchronize(self) -> None:
        w, g, v, u, out = ([torch.randn(1000, device="cuda") for _ in range(50)] for _ in range(5))
        plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, stashed=out)
        names = ("grad_scale", "clip_factor", "found_inf")
        gate = {name: torch.ones((), device="cuda") for name in names}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(2.0, out)])
            plan.sgd_step_(lr=0.1, momentum=0.9)
            plan.swap_()
            plan.adam_step_(lr=0.1, step=3, zero_grad=True, **gate)
            plan.refresh(g)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestBadInput:
    """Errors that only occur on a GPU."""

    def test_host_and_device_in_one_call(self) -> None:
        w = [torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")]
        v = [torch.ones(4, device="cuda"), torch.ones(4)]
        with pytest.raises(ValueError, match=r"momentum_buffers\[1\].*(cpu|cuda)"):
            st.predict_(w, v, lr=1.0, steps=1.0)
        assert int(w[0].count_nonzero()) == 0

    def test_two_gpus_in_one_call(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        w = [torch.zeros(4, device="cuda:0"), torch.zeros(4, device="cuda:1")]
        v = [torch.ones_like(t) for t in w]
        with pytest.raises(ValueError, match=r"params\[1\].*cuda:"):
            st.predict_(w, v, lr=1.0, steps=1.0)
        assert all(int(t.count_nonzero()) == 0 for t in w)

    def test_another_device_than_the_current_one(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        w, v = torch.zeros(4, device="cuda:1"), torch.ones(4, device="cuda:1")
        assert torch.cuda.current_device() == 0
        st.predict_(w, v, lr=1.0, steps=1.0)
        assert torch.cuda.current_device() == 0 and w.tolist() == [-1.0] * 4


def test_nothing_is_allocated_where_outputs_are_given() -> None:
    w, v, g, out = ([torch.randn(100, device="cuda") for _ in range(20)] for _ in range(4))
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(1.0, out)])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    st.predict(w, v, lr=0.1, steps=1.0, out=out)
    st.stash(w, out)
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(1.0, out)])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
