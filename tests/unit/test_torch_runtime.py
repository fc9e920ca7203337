"""A device's driver through torch: what is called with what, and how failures are told.

Torch has no device here, so what stands in for it notes what it is told.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiering.errors import DeviceCallError
from tiering_connectors.vllm.torch_runtime import TorchRuntime


class Torch:
    """As far as it is used. `codes` are what the driver answers; `broken` what torch raises."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        self.broken: Exception | None = None
        self.cuda = SimpleNamespace(
            set_device=lambda device: self._say("set_device", device),
            Stream=self._stream,
            ExternalStream=lambda number, device: self._named(number),
            default_stream=lambda device: self._named("default"),
            Event=self._event,
            stream=self._on,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *given: self._answer("cudaHostRegister", *given),
                cudaHostUnregister=lambda *given: self._answer("cudaHostUnregister", *given),
            ),
        )

    def device(self, kind: str, ordinal: int) -> str:
        return f"{kind}:{ordinal}"

    def from_numpy(self, array: Any) -> Any:
        return array

    def _say(self, *what: Any) -> None:
        if self.broken is not None:
            raise self.broken
        self.said.append(what)

    def _answer(self, call: str, *given: int) -> int:
        self._say(call, *given)
        return self.codes.get(call, 0)

    def _on(self, stream: Any) -> Any:
        self._say("on", stream.name)
        return nullcontext()

    def _named(self, name: Any) -> Any:
        return SimpleNamespace(
            name=name,
            cuda_stream=77,
            synchronize=lambda: self._say("synchronize", name),
            wait_event=lambda event: self._say("wait_event", name, event.name),
        )

    def _stream(self, device: str, priority: int) -> Any:
        self._say("Stream", device, priority)
        return self._named("own")

    def _event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(
            name=f"timed {enable_timing}",
            record=lambda stream: self._say("record", stream.name),
            query=lambda: self._say("query") or True,
            elapsed_time=lambda end: 1500.0,
        )


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def runtime(torch: Torch) -> TorchRuntime:
    def copy(*arrays: Any, is_src_access_order_any: bool) -> None:
        torch._say("copy", *[array.tolist() for array in arrays], is_src_access_order_any)

    return TorchRuntime(3, torch, copy)


def test_streams_events_and_memory(torch: Torch, runtime: TorchRuntime) -> None:
    assert torch.said == [("set_device", "cuda:3")]
    del torch.said[:]
    stream = runtime.create_stream(is_low=True)
    event, timed = runtime.create_event(), runtime.create_event(is_timed=True)
    runtime.record(event, stream)
    runtime.record(event, 0)
    runtime.record(event, 1234)
    runtime.wait_event(stream, timed)
    assert runtime.is_complete(event)
    assert runtime.elapsed_seconds(timed, timed) == 1.5
    runtime.synchronize(stream)
    runtime.register(4096, 8192)
    runtime.unregister(4096)
    assert torch.said == [
        ("Stream", "cuda:3", 0),
        ("record", "own"),
        ("record", "default"),
        ("record", 1234),
        ("wait_event", "own", "timed True"),
        ("query",),
        ("synchronize", "own"),
        ("cudaHostRegister", 4096, 8192, 1),
        ("cudaHostUnregister", 4096),
    ]
    runtime.destroy_event(event)
    runtime.destroy_stream(stream)
    assert runtime._events.keys() == {timed}
    assert runtime._streams == {}


def test_a_batch_is_one_call_of_vllms_on_the_stream(torch: Torch, runtime: TorchRuntime) -> None:
    stream = runtime.create_stream()
    targets, sources, sizes = (np.array(a, np.uint64) for a in ([1, 2], [3, 4], [5, 6]))
    runtime.copy(targets, sources, sizes, stream, is_source_final=True)
    assert torch.said[-2:] == [("on", "own"), ("copy", [3, 4], [1, 2], [5, 6], True)]


def test_torch_calls_nothing_back(runtime: TorchRuntime) -> None:
    assert not runtime.can_signal
    with pytest.raises(DeviceCallError):
        runtime.launch_host_function(1, 2, 3)


@pytest.mark.parametrize(("code", "is_sticky"), [(712, False), (2, False), (700, True)])
def test_codes_of_the_driver(
    torch: Torch, runtime: TorchRuntime, code: int, is_sticky: bool
) -> None:
    torch.codes["cudaHostRegister"] = code
    with pytest.raises(DeviceCallError, match=f"cudaHostRegister failed .*{code}") as told:
        runtime.register(0, 4096)
    assert told.value.is_sticky == is_sticky


def test_what_torch_raises_is_told_in_one_line(torch: Torch, runtime: TorchRuntime) -> None:
    event = runtime.create_event()
    torch.broken = RuntimeError("CUDA error: an illegal memory access\nCompile with ...")
    with pytest.raises(DeviceCallError) as told:
        runtime.is_complete(event)
    assert str(told.value) == "Event.query failed with CUDA error: an illegal memory access (-1)"
    assert told.value.is_sticky
    torch.broken.error_code = 1  # type: ignore[attr-defined]
    with pytest.raises(DeviceCallError) as told:
        runtime.record(event, 0)
    assert not told.value.is_sticky
