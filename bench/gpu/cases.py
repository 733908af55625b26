"""Stores a part's results in one JSON file after every case, so that a kill loses none."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Exit status of a part whose process can no longer use the device.
POISONED = 77


class Cases:
    """Runs cases by name and stores their results.

    A failing case is recorded, and the next one runs. If a case loses the device or the process,
    the part restarts after that case and does not repeat finished ones. If a case takes longer than
    `limit_s` seconds, its process prints its stack and ends, with the same effect.
    """

    def __init__(
        self,
        path: Path,
        until: float,
        alive: Callable[[], None] = lambda: None,
        limit_s: float = 0.0,  # 0: no limit
    ) -> None:
        self._path, self.until, self._alive, self._limit_s = path, until, alive, limit_s
        self.data: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.data = json.loads(path.read_text())
        for found in self.data.values():
            if found["status"] == "running":
                found["status"] = "died"

    @property
    def left_s(self) -> float:
        """Seconds in which further cases may start."""
        return self.until - time.time()

    def run(self, name: str, measure: Callable[[], Any], reserve_s: float = 0.0) -> Any:
        """Return the result of `measure`, from now or an earlier process; None if there is none.

        A case with less than `reserve_s` seconds left does not start.
        """
        known = self.data.get(name)
        if known is not None and known["status"] != "no time left":
            return known.get("result")
        if self.left_s <= reserve_s:
            self.put(name, "no time left")
            return None
        print(name, flush=True)
        self.put(name, "running")
        start = time.time()
        try:
            with self._limited():
                result = measure()
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            self.put(name, "failed", seconds=time.time() - start, error=text[:2000])
            del error
            try:
                self._alive()
            except Exception as lost:
                raise SystemExit(POISONED) from lost
            return None
        self.put(name, "ok", seconds=time.time() - start, result=result)
        return result

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest case so far, which the next one needs to start."""
        return max((case.get("seconds", 0.0) for case in self.data.values()), default=0.0)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        if not self._limit_s:
            yield
            return
        # The default action of the signal ends the process wherever it hangs.
        faulthandler.dump_traceback_later(max(0.1, self._limit_s - 1))
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()

    def put(self, name: str, status: str, **more: Any) -> None:
        """Record a case and write all of them."""
        if "seconds" in more:
            more["seconds"] = round(more["seconds"], 3)
        self.data[name] = {"status": status, **more}
        write(self._path, json.dumps(self.data, indent=1))


def write(path: Path, text: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(new, path)
