"""Pinning the host tier: in pieces, all or nothing, and unpinned whatever fails."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tiering.device.pinned import pin
from tiering.testing.clocks import ManualClock
from tiering.testing.fakecuda import FakeCuda

ROW = 4096


@pytest.fixture
def rows() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.zeros((10, ROW), np.uint8)


def test_memory_is_pinned_in_pieces_of_whole_rows(rows: np.ndarray) -> None:  # type: ignore[type-arg]
    fake = FakeCuda()
    pinned = pin(fake, rows, piece_bytes=4 * ROW + 100)
    assert pinned.is_pinned
    assert pinned.rows_per_piece == 4
    start = rows.ctypes.data
    assert fake.pinned == {
        start: 4 * ROW,
        start + 4 * ROW: 4 * ROW,
        start + 8 * ROW: 2 * ROW,
    }
    pinned.close()
    pinned.close()
    assert fake.pinned == {}
    assert fake.calls["unregister"] == 3


def test_a_row_larger_than_a_piece_is_a_piece(rows: np.ndarray) -> None:  # type: ignore[type-arg]
    fake = FakeCuda()
    assert pin(fake, rows, piece_bytes=100).rows_per_piece == 1
    assert len(fake.pinned) == 10


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_cannot_be_pinned_whole_is_not_pinned_and_said_once(
    rows: np.ndarray,  # type: ignore[type-arg]
    at: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeCuda()
    fake.fail("register", at=at, code=2)
    pinned = pin(fake, rows, piece_bytes=4 * ROW)
    assert not pinned.is_pinned
    assert fake.pinned == {}
    (warning,) = caplog.records
    assert "register failed" in warning.getMessage()
    assert "ulimit -l" in warning.getMessage()
    pinned.close()


def test_unpinning_goes_on_after_a_failure(
    rows: np.ndarray,  # type: ignore[type-arg]
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeCuda()
    pinned = pin(fake, rows, piece_bytes=4 * ROW)
    fake.fail("unregister", at=1)
    pinned.close()
    assert len(fake.pinned) == 1
    (warning,) = caplog.records
    assert "1 of 3 pieces" in warning.getMessage()


def test_large_memory_tells_how_far_it_is(
    rows: np.ndarray,  # type: ignore[type-arg]
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()

    class Slow(FakeCuda):
        def register(self, address: int, size_bytes: int) -> None:
            clock.advance(6)
            super().register(address, size_bytes)

    pin(Slow(), rows, piece_bytes=2 * ROW, clock=clock)
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if " of " in line]) == 2
    assert told[-1].endswith("in 30.0 s")
