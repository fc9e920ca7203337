"""The engines of `inproc` and `offloading_inproc`, whose workers copy as they would on a CUDA
device: that of vLLM's CPU backend with an emulated one in the place of its memory.

Its pages are the CPU backend's tensors, by their addresses. Everything from the choice of a copier
to the bytes is as on a GPU, but for the driver. `EmulatedEngine` is the test's half; run as a
program, this file is the other one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from inproc import Calls, EngineProcess, main
from offloading_inproc import OffloadingCalls
from tiering.testing.fakecuda import COMPUTE, FakeCuda

FAILED = ("tiering_loads_failed", "tiering_stores_failed")


class EmulatedEngine(EngineProcess):
    PROGRAM = __file__


class EmulatedCalls(Calls):
    """`call("die")` breaks the device for good at the next copy; `call("device")` tells of it."""

    fake: FakeCuda

    def start(self, **options: Any) -> None:
        connector = options.get("connector") or {}
        if connector.get("kv_connector") == "OffloadingConnector":
            self.__class__ = EmulatedOffloadingCalls
        self.fake = FakeCuda(free_running=True)
        _emulate(self.fake)
        super().start(**options)

    def die(self) -> None:
        self.fake.fail("copy", code=700, sticky=True)

    def device(self) -> dict[str, Any]:
        failed = {
            name: int(metric.value)
            for metric in self._llm.get_metrics()
            if (name := metric.name.rpartition(":")[2]) in FAILED
        }
        return {
            "failed": failed,
            "copies": self.fake.calls["copy"],
            "pinned_bytes": sum(self.fake.pinned.values()),
            "violations": self.fake.violations,
        }


class EmulatedOffloadingCalls(EmulatedCalls, OffloadingCalls):
    """For vLLM's own connector."""


def _emulate(fake: FakeCuda) -> None:
    """In both doors: what is for a CUDA device, over `fake`."""
    from tiering_connectors.vllm import connector, devices
    from tiering_connectors.vllm.offloading import spec

    stream = SimpleNamespace(cuda_stream=COMPUTE)
    cuda = SimpleNamespace(
        current_device=lambda: 0, device_count=lambda: 0, current_stream=lambda: stream
    )

    class Emulated(devices.GpuDevice):
        def open_copier(self, groups: Sequence[Any], region: Any, *rest: Any) -> Any:
            fake.own(region.rows_view())
            for run in (run for group in groups for run in group.pages):
                size = run.end - run.address
                fake.own(np.frombuffer((ctypes.c_uint8 * size).from_address(run.address), np.uint8))
            return super().open_copier(groups, region, *rest)

    def emulated(kind: str) -> Any:
        assert kind == "cpu"
        return Emulated(lambda ordinal: fake, has_kernel=False, cuda=cuda)

    for module in (connector, spec):
        assert hasattr(module, "device_for")
        setattr(module, "device_for", emulated)  # noqa: B010


if __name__ == "__main__":
    sys.exit(main(EmulatedCalls()))  # type: ignore[func-returns-value]
