"""Fixtures that more than one file of unit tests uses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from regions import CAPACITY, PAGE, Child
from tiering.testing.faults import FaultyIo
from tiering.tiers.disk import diskio
from tiering_kernels.chunkio import ENGINES, ChunkIo, Engine
from tiering_kernels.engines import open_engine


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    with ExitStack() as stack:

        def start(directory: Path = tmp_path, **changed: Any) -> Child:
            child = Child(directory, **changed)
            stack.enter_context(child.process)
            stack.callback(child.process.kill)
            return child

        yield start


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for 1.3 regions."""
    directory = tmp_path / "small"
    directory.mkdir()
    size = f"size={CAPACITY * 13 // 10 // PAGE * PAGE}"
    command = ["mount", "-t", "tmpfs", "-o", size, "none", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture(params=ENGINES)
def io(request: pytest.FixtureRequest) -> ChunkIo:
    """Each of the engines that move batches of frames."""
    engine: Engine = request.param
    return open_engine(engine)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool:
    """How `io` is to open files."""
    wanted: bool = request.param
    return wanted


@pytest.fixture
def faulty() -> FaultyIo:
    return FaultyIo(open_engine("portable"))


@pytest.fixture
def one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a probe of a disk would find: it syncs the disk, at each open."""
    found = diskio.Direct(reads=False, writes=True)
    monkeypatch.setattr(diskio, "probe", lambda *args: found)
