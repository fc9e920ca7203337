"""Rows through a socket and out of shared memory, native and portable: the same, and each with the
other."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tiering.testing.rowspace import RowSpace, holds
from tiering_kernels import copies
from tiering_kernels.rowstream import (
    LEAD,
    TAIL,
    NativeStream,
    PortableStream,
    RowStream,
    StreamEnded,
    row_stream,
)

ROWS = 5
SIZES = [1, 4095, 256 << 10, (1 << 20) + 1]
STREAMS = [NativeStream, PortableStream]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    given_up_after(30.0, ours, theirs)
    yield ours, theirs
    ours.close()
    theirs.close()


def given_up_after(quiet_seconds: float, *pair: socket.socket) -> None:
    deadline = struct.pack("ll", int(quiet_seconds), int(quiet_seconds % 1 * 1e6))
    for each in pair:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            each.setsockopt(socket.SOL_SOCKET, option, deadline)


def buffers(row_bytes: int, count: int = ROWS) -> list[memoryview]:
    return [memoryview(bytearray(row_bytes)) for _ in range(count)]


def sending(
    stream: RowStream,
    over: socket.socket,
    space: RowSpace,
    slots: list[int],
    wanted: list[int],
) -> threading.Thread:
    def send() -> None:
        stream.send(over, space.rows, space.generations, slots, wanted)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_native_code_is_what_is_used_where_it_was_built() -> None:
    assert isinstance(row_stream(), NativeStream)


@pytest.mark.parametrize("row_bytes", SIZES)
@pytest.mark.parametrize("sender", STREAMS)
@pytest.mark.parametrize("receiver", STREAMS)
def test_what_one_sends_the_other_receives(
    row_bytes: int,
    sender: type[RowStream],
    receiver: type[RowStream],
    pair: tuple[socket.socket, socket.socket],
) -> None:
    space = RowSpace(ROWS, row_bytes)
    slots, wanted = [4, 0, 2, 9, 1], [1, 1, 7, 1, 1]
    into = buffers(row_bytes)
    thread = sending(sender(), pair[0], space, slots, wanted)
    assert receiver().receive(pair[1], into) == [True, True, False, False, True]
    thread.join()
    for number in (0, 1, 4):
        assert holds(space.reference(slots[number]), into[number])
    space.close()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (LEAD.pack(1) + bytes(100) + TAIL.pack(1, 0, 0), "a row came damaged"),
        (LEAD.pack(1) + bytes(100) + TAIL.pack(5, 0, 0), "a row came damaged"),
        (LEAD.pack(2), "an answer that means nothing"),
        (LEAD.pack(1) + bytes(99), "the other side has closed"),
        (b"", "the other side has closed"),
    ],
)
def test_what_was_not_sent_so_is_no_row(
    stream: type[RowStream],
    answer: bytes,
    why: str,
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(LEAD.pack(0) + answer)
    pair[0].close()
    with pytest.raises(StreamEnded, match=why) as caught:
        stream().receive(pair[1], buffers(100))
    assert caught.value.came == [False]


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_silence_ends_it_and_so_does_another_thread(
    stream: type[RowStream], pair: tuple[socket.socket, socket.socket]
) -> None:
    given_up_after(0.3, *pair)
    with pytest.raises(StreamEnded, match="nothing moved for too long"):
        stream().receive(pair[1], buffers(100))
    space = RowSpace(1, 64 << 20)
    with pytest.raises(StreamEnded, match="nothing moved for too long"):
        stream().send(pair[0], space.rows, space.generations, [0], [1])
    given_up_after(30.0, *pair)
    told: list[str] = []

    def receive() -> None:
        try:
            stream().receive(pair[0], buffers(100))
        except StreamEnded as error:
            told.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    pair[0].shutdown(socket.SHUT_RDWR)
    thread.join()
    assert told == ["the other side has closed the connection"]
    with pytest.raises(StreamEnded, match="the connection broke: Broken pipe"):
        stream().send(pair[0], space.rows, space.generations, [0], [1])
    space.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_a_row_that_trickles_in_comes_whole(
    stream: type[RowStream], pair: tuple[socket.socket, socket.socket]
) -> None:
    space = RowSpace(1, 400)
    ours, theirs = socket.socketpair()
    stream().send(ours, space.rows, space.generations, [0], [1])
    sent = theirs.recv(1000)
    given_up_after(2.0, *pair)

    def trickle() -> None:
        for at in range(0, len(sent), 60):
            pair[0].sendall(sent[at : at + 60])
            time.sleep(0.4)  # a fifth of the deadline, which all of them together exceed

    thread = threading.Thread(target=trickle)
    thread.start()
    (into,) = buffers(400, 1)
    assert stream().receive(pair[1], [into]) == [True]
    assert holds(space.reference(0), into)
    thread.join()
    for each in (ours, theirs):
        each.close()
    space.close()


@pytest.mark.parametrize("stream", STREAMS)
def test_what_reads_from_the_socket_later_is_woken_by_a_byte(
    stream: type[RowStream], pair: tuple[socket.socket, socket.socket]
) -> None:
    given_up_after(0.3, *pair)
    pair[0].sendall(LEAD.pack(1))
    with pytest.raises(StreamEnded, match="nothing moved for too long"):
        stream().receive(pair[1], buffers(1 << 20))
    assert not select.select([pair[1]], [], [], 0)[0]
    pair[0].sendall(b"x")
    assert select.select([pair[1]], [], [], 10)[0]


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_a_slot_that_is_given_away_while_it_is_sent_is_told(
    stream: type[RowStream], pair: tuple[socket.socket, socket.socket]
) -> None:
    space = RowSpace(1, 64 << 20)  # more than a connection holds
    thread = sending(stream(), pair[0], space, [0], [1])
    (into,) = buffers(64 << 20, 1)
    pair[1].recv_into(into[:1], flags=socket.MSG_PEEK)
    space.generations[0] = 2
    assert stream().receive(pair[1], [into]) == [False]
    thread.join()
    space.close()


@pytest.fixture(params=["native", "portable"])
def copy_rows_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        monkeypatch.setattr(copies, "_copier", lambda: copies.portable_copy)
    else:
        assert copies._copier() is not copies.portable_copy


@pytest.mark.usefixtures("copy_rows_by")
@pytest.mark.parametrize("row_bytes", SIZES)
def test_copies_are_right_or_said_not_to_be(row_bytes: int) -> None:
    space = RowSpace(ROWS, row_bytes)
    rows = space.rows.view()
    rows.flags.writeable = False
    slots, wanted = [4, 0, 2, 9, -1], [1, 1, 7, 1, 1]
    into = buffers(row_bytes)
    found = copies.copy_rows(rows, space.generations, slots, wanted, into)
    assert found == [True, True, False, False, False]
    assert holds(space.reference(4), into[0])
    assert holds(space.reference(0), into[1])
    assert not np.frombuffer(into[2], np.uint8).any()
    assert copies.copy_rows(rows, space.generations, [], [], []) == []
    space.close()


def test_copies_into_other_buffers_are_refused() -> None:
    space = RowSpace(1, 100)
    for wrong in ([memoryview(bytes(100))], buffers(99, 1)):
        with pytest.raises(ValueError, match="writable and of 100"):
            copies.copy_rows(space.rows, space.generations, [0], [1], wrong)
    with pytest.raises(ValueError, match="1 slots, 2 generations"):
        copies.copy_rows(space.rows, space.generations, [0], [1, 1], buffers(100, 1))
    space.close()
