"""The host tier's region in one process: its bytes, its end, and what cannot be used."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regions import CAPACITY, LAYOUT, NAME, PAGE, free_bytes, open_here
from tiering.errors import ClosedError, ConfigError, RegionError
from tiering.layout import RowLayout
from tiering.tiers import hostfile
from tiering.tiers.host import SHARED_MEMORY, Geometry, Region, region_name, sweep

# What is in it


@given(
    share_bytes=st.integers(1, 1 << 20),
    ranks=st.integers(1, 200),
    capacity_bytes=st.integers(0, 1 << 28),
)
def test_never_more_bytes_than_asked_for(share_bytes: int, ranks: int, capacity_bytes: int) -> None:
    layout = RowLayout(share_bytes, ranks)
    try:
        geometry = Geometry.within(capacity_bytes, layout, layout.ranks)
    except ConfigError as error:
        need = int(re.findall(r"together, (\d+) bytes", str(error))[0])
        assert capacity_bytes < need == Geometry.within(need, layout, layout.ranks).total_bytes
    else:
        assert geometry.total_bytes <= capacity_bytes < geometry.total_bytes + layout.row_bytes
        assert geometry.record_offset(ranks - 1) + 64 <= geometry.header_bytes
        assert geometry.header_bytes % PAGE == geometry.row_bytes % PAGE == 0


def test_the_file_takes_what_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with open_here(tmp_path, capacity_bytes=CAPACITY + 100) as region:
        status = region.path.stat()
        assert status.st_size == region.geometry.total_bytes == CAPACITY
        assert status.st_blocks * 512 == CAPACITY
        assert status.st_mode & 0o777 == 0o600
        open_here(tmp_path, capacity_bytes=CAPACITY + 100).close()
    assert [record.getMessage() for record in caplog.records] == [
        "host tier: 3000 bytes per rank, 16384 in total, 3 rows of 4096 bytes, "
        "100 bytes unused of 16484"
    ]


def test_too_small_for_one_chunk_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_here(tmp_path, capacity_bytes=2 * PAGE - 1)
    assert str(caught.value) == (
        "cpu_bytes_to_use = 8191: is less than one chunk of all 4 ranks together, 8192 bytes; "
        "write 8192 or more, or make chunks smaller with blocks_per_chunk"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_join_whatever_the_others_have_built(tmp_path: Path) -> None:
    """As the scheduler does, which cannot know how large the largest of the ranks' shares is; and
    ranks may be more than shares, where several hold the same bytes."""
    with pytest.raises(RegionError, match="no worker has built"):
        Region.join(NAME, tmp_path, deadline_seconds=0.02)
    layout = RowLayout(share_bytes=2000, ranks=2)
    with (
        Region.open(NAME, layout, CAPACITY, tmp_path, ranks=4) as region,
        Region.join(NAME, tmp_path) as joined,
    ):
        assert joined.geometry == region.geometry
        assert (joined.geometry.ranks, joined.geometry.shares) == (4, 2)
        for rank in range(4):
            assert joined.announced()[rank] is None
            region.announce(rank, bytes([rank]) * 32)
        assert joined.wait_announced(1.0)[3] == bytes([3]) * 32
        region.share(1)[0] = 7
        assert (joined.share(1)[0] == 7).all()
        with pytest.raises(IndexError, match="share 2"):
            joined.share(2)
        assert sweep(tmp_path) == []
        joined._mapped()[8] += 1
        with pytest.raises(RegionError, match="another version"):
            Region.join(NAME, tmp_path, deadline_seconds=0.02)


def test_rows_and_shares_are_the_same_bytes(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        assert not region.rows_view().any()
        for rank in range(4):
            region.share(rank)[2] = rank + 1
        row = region.row(2)
        assert not row.readonly
        assert row.tobytes() == b"".join(bytes([n]) * 1000 for n in (1, 2, 3, 4)) + bytes(96)
        row[:2] = b"ab"
        assert region.share(0)[2, :3].tobytes() == b"ab\x01"
        assert region.share(1).shape == (3, 1000)
        assert region.rows_view().shape == (3, PAGE)
        assert region.rows_view().ctypes.data % PAGE == 0
        assert not region.rows_view()[:2].any()
        on_disk = np.fromfile(region.path, np.uint8)[PAGE:]
        np.testing.assert_array_equal(on_disk, region.rows_view().ravel())


@pytest.mark.parametrize("index", [-1, 4])
def test_out_of_bounds(tmp_path: Path, index: int) -> None:
    with open_here(tmp_path, capacity_bytes=CAPACITY + PAGE) as region:
        assert region.geometry.rows == region.geometry.ranks == 4
        with pytest.raises(IndexError):
            region.row(index)
        with pytest.raises(IndexError):
            region.share(index)
        with pytest.raises(IndexError):
            region.announce(index, bytes(32))


def test_announcing(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region.announce(2, b"2" * 32)
        assert region.announced() == [None, None, b"2" * 32, None]
        with pytest.raises(RegionError, match=r"rank 2 of .* is announced twice"):
            region.announce(2, b"2" * 32)
        with pytest.raises(ValueError, match="32 bytes, not 31"):
            region.announce(1, b"1" * 31)
        with pytest.raises(RegionError, match="no worker of rank 0, 1, 3 attached to"):
            region.wait_announced(0.02)
        # A record of which not all has arrived yet is none.
        region.announce(0, b"0" * 32)
        memory = region._mapped()
        memory[region.geometry.record_offset(0) + 39] ^= 1
        assert region.announced()[0] is None


def test_many_ranks_take_more_header_pages(tmp_path: Path) -> None:
    layout = RowLayout(share_bytes=10, ranks=200)
    with open_here(tmp_path, layout=layout, capacity_bytes=6 * PAGE) as region:
        for rank in range(200):
            region.announce(rank, bytes([rank]) * 32)
        assert not region.rows_view().any()
        assert region.wait_announced(0) == [bytes([rank]) * 32 for rank in range(200)]


# Its life in one process


def test_closing(tmp_path: Path) -> None:
    region = open_here(tmp_path)
    assert repr(region) == f"<Region {region.path}: 3 rows of 4096 bytes, 0/4 ranks>"
    region.unlink()
    region.unlink()
    assert list(tmp_path.iterdir()) == []
    assert repr(region).endswith("0/4 ranks, unlinked>")
    region.row(0)[:] = b"x" * PAGE
    region.close()
    region.close()
    assert repr(region) == f"<Region {region.path} closed>"
    for use in (region.rows_view, region.announced, lambda: region.row(0), lambda: region.share(0)):
        with pytest.raises(ClosedError):
            use()


def test_a_view_outlives_close_and_keeps_the_region_alive(tmp_path: Path) -> None:
    region = open_here(tmp_path)
    view = region.row(1)
    region.close()
    assert sweep(tmp_path) == []
    view[:] = b"y" * PAGE
    assert view.tobytes() == b"y" * PAGE
    del view
    assert sweep(tmp_path) == [NAME]


def test_who_is_handed_its_descriptor_has_the_same_region_and_its_lock(tmp_path: Path) -> None:
    first = open_here(tmp_path)
    first.rows_view()[:] = 3
    with Region.adopt(first.descriptor(), first.path) as second:
        assert second.geometry == first.geometry
        second.row(1)[:] = bytes([7]) * PAGE
        assert (first.row(0)[0], first.row(1)[0], first.row(2)[0]) == (3, 7, 3)
        first.close()
        with pytest.raises(ClosedError):
            first.descriptor()
        assert sweep(tmp_path) == [], "it lives on"
        assert second.row(1)[0] == 7
    assert sweep(tmp_path) == [NAME]


@pytest.mark.parametrize("content", [b"", b"KVTIER", bytes(2 * PAGE)])
def test_what_is_no_region_is_not_adopted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    descriptor = os.open(tmp_path / "other", os.O_RDWR)
    with pytest.raises(RegionError, match="another version of kv-tiering"):
        Region.adopt(descriptor, tmp_path / "other")
    os.close(descriptor)  # It is still the caller's.


def test_unlink_removes_no_other_region_of_that_name(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region.unlink()
        with open_here(tmp_path) as other:
            region.unlink()
            assert other.path.exists()


def test_in_shared_memory() -> None:
    name = region_name(f"test_in_shared_memory {uuid.uuid4()}")
    try:
        with Region.open(name, LAYOUT, CAPACITY) as region:
            assert region.path == SHARED_MEMORY / name
            region.unlink()
            assert not region.path.exists()
            region.row(2)[:] = b"z" * PAGE
            assert region.share(3)[2].tobytes() == b"z" * 1000
    finally:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_names() -> None:
    assert re.fullmatch(rf"kvtier-{os.geteuid()}-[0-9a-f]{{16}}\.region", region_name("a/../*"))
    assert region_name("a") != region_name("b")
    with pytest.raises(ValueError, match="not a name made by region_name"):
        Region.open("anything", LAYOUT, CAPACITY)


# What cannot be used


def test_too_little_space_is_said_before_any_is_taken(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_bytes(small)
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(RegionError) as caught:
        open_here(small, capacity_bytes=1 << 20)
    assert str(caught.value) == (
        f"the host tier needs {1 << 20} bytes in {small}, which has {free} free: lower "
        f"cpu_bytes_to_use, or enlarge {small} (in a container: docker's --shm-size, or "
        f"--ipc=host)"
    )
    assert list(small.iterdir()) == []
    assert free_bytes(small) == free


def test_space_that_vanishes_meanwhile(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's ENOSPC, where the space looked enough at first."""
    free, elsewhere = free_bytes(small), os.statvfs("/")
    real, answers = os.statvfs, [elsewhere]
    monkeypatch.setattr(os, "statvfs", lambda path: answers.pop() if answers else real(path))
    monkeypatch.setattr(hostfile, "_BUILD_STEP_BYTES", PAGE)
    with pytest.raises(RegionError, match=f"needs 1048576 bytes in .*, which has {free} free"):
        open_here(small, capacity_bytes=1 << 20)
    assert answers == []
    assert list(small.iterdir()) == []
    assert free_bytes(small) == free


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match=r"No such file or directory.*needs a directory"):
        open_here(tmp_path / "nowhere")


def test_a_trap_laid_by_another_is_not_stepped_into(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(RegionError, match="cannot be used"):
        open_here(tmp_path)
    assert target.read_bytes() == b"precious"
    assert (tmp_path / NAME).is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    os.chown(tmp_path / NAME, os.geteuid() + 1, -1)
    assert sweep(tmp_path) == []
    with pytest.raises(RegionError, match="not this user's file"):
        open_here(tmp_path)
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": RowLayout(share_bytes=1001, ranks=4)},
        {"layout": RowLayout(share_bytes=2000, ranks=2)},
        {"layout": RowLayout(share_bytes=2000, ranks=4), "capacity_bytes": 7 * PAGE},
        {"capacity_bytes": CAPACITY + PAGE},
    ],
)
def test_another_geometry_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with open_here(tmp_path) as region:
        with pytest.raises(RegionError, match=r"was made with .* 4, 4096, 3, 1000, 4\), this"):
            open_here(tmp_path, **changed)
        assert sweep(tmp_path) == []
        assert not region.rows_view().any()


def test_another_version_or_size_is_refused(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region._mapped()[8] += 1
        with pytest.raises(RegionError, match=r"\(4, 4, 4096, 3, 1000, 4\), this process .* \(3,"):
            open_here(tmp_path)
        region._mapped()[8] -= 1
        os.truncate(region.path, 2 * PAGE)
        with pytest.raises(RegionError, match="has 8192 bytes instead of 16384"):
            open_here(tmp_path)
