"""A part's results: one JSON file, written after every case; a kill leaves what was measured."""

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

#: A part ends with it when the device can no longer be used in its process.
POISONED = 77


class Cases:
    """Runs cases by name and keeps what became of each.

    A case that fails is recorded, and the next one runs. Where the device is lost with it, or the
    process, the part is started again and goes on behind it: what was done is not done again. So it
    is where a case takes longer than `limit_s` seconds: it says where it is, and ends its process.
    """

    def __init__(
        self,
        path: Path,
        until: float,
        alive: Callable[[], None] = lambda: None,
        limit_s: float = 0.0,  # 0: none
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
        """Seconds until no further case is begun."""
        return self.until - time.time()

    def run(self, name: str, measure: Callable[[], Any], reserve_s: float = 0.0) -> Any:
        """What `measure` returned, now or in an earlier process; None where there is nothing.

        With less than `reserve_s` seconds left it is not begun.
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
        """What the slowest case so far took: without as much time the next one is not begun."""
        return max((case.get("seconds", 0.0) for case in self.data.values()), default=0.0)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        if not self._limit_s:
            yield
            return
        # A signal that nobody handles ends the process whatever it hangs in.
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
    """Write a file whole: who reads it meanwhile reads the old one."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(new, path)
