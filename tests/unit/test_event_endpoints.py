"""What a publisher is told and cannot use is one sentence, with the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from event_streams import LOOPBACK, cleared, wait_until
from tiering.errors import ClosedError, ConfigError
from tiering.events.publisher import ZmqPublisher

BAD_ENDPOINTS = {
    "": "is no endpoint that is known here",
    "http://127.0.0.1:5557": "is no endpoint that is known here",
    "127.0.0.1:5557": "is no endpoint that is known here",
    "tcp://127.0.0.1": "is not tcp://HOST:PORT",
    "tcp://127.0.0.1:abc": "is not tcp://HOST:PORT",
    "tcp://127.0.0.1:99999": "has a port above 65535",
    "tcp://[::1:5557": "is not tcp://HOST:PORT",
}


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS, ids=repr)
def test_a_bad_endpoint_is_one_sentence_with_the_key(endpoint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ZmqPublisher(endpoint)
    assert str(raised.value).startswith(f"endpoint = {endpoint!r}: {BAD_ENDPOINTS[endpoint]}; ")
    with pytest.raises(ConfigError, match=r"^replay_endpoint = "):
        ZmqPublisher(LOOPBACK, replay_endpoint=endpoint)


UNUSABLE = {
    "tcp://192.0.2.1:5557": "is no address of this host",
    "ipc:///nowhere/at/all": "is in a directory that does not exist",
    f"ipc:///tmp/{'a' * 200}": "has a path that is too long for a socket",
    "tcp://no-such-interface:5557": "is no address of this host",
}


@pytest.mark.parametrize("endpoint", UNUSABLE)
def test_what_cannot_be_bound_is_one_sentence_with_the_way_out(endpoint: str) -> None:
    publisher = ZmqPublisher(endpoint, is_bound=True)
    with pytest.raises(ConfigError) as raised:
        publisher.open()
    assert str(raised.value).startswith(f"endpoint = {endpoint!r}: {UNUSABLE[endpoint]}; ")


def test_a_rank_may_not_lift_the_port_too_high() -> None:
    with pytest.raises(ConfigError, match=r"tcp://\*:65536.*above 65535"):
        ZmqPublisher("tcp://*:65535", data_parallel_rank=1)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
def test_what_is_taken_is_refused_and_nothing_is_left_open(scheme: str, tmp_path: Path) -> None:
    place = {"tcp": LOOPBACK, "ipc": f"ipc://{tmp_path}/pub", "inproc": "inproc://taken"}[scheme]
    with ZmqPublisher(place) as first:
        for endpoint, replay in ((first.endpoint, None), (LOOPBACK, first.endpoint)):
            second = ZmqPublisher(endpoint, replay_endpoint=replay, is_bound=True)
            with pytest.raises(ConfigError, match="is taken; stop what listens there") as raised:
                second.open()
            key = "replay_endpoint" if replay else "endpoint"
            assert raised.value.path == key
            with pytest.raises(ClosedError):
                second.publish([])
        first.publish([cleared()])
        wait_until(lambda: first.stats().batches == 1)
    with ZmqPublisher(first.endpoint, is_bound=True) as again:
        assert again.endpoint == first.endpoint


@pytest.mark.parametrize("key", ["batch_blocks_max", "queue_blocks_max", "buffer_bytes_max"])
def test_bounds_below_1_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = 0: is not a number from 1 on; write"):
        ZmqPublisher(LOOPBACK, **{key: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_linger_that_has_no_end_is_refused(value: float) -> None:
    """To ZeroMQ -1 is for ever."""
    with pytest.raises(ConfigError, match=f"^linger_seconds = {value!r}: "):
        ZmqPublisher(LOOPBACK, linger_seconds=value)


def test_a_batch_that_no_queue_could_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_blocks_max = 9: .* queue_blocks_max = 8"):
        ZmqPublisher(LOOPBACK, batch_blocks_max=9, queue_blocks_max=8)
