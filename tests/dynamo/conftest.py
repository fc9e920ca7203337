"""Where there is no Dynamo, its tests say so. It is asked for by its metadata, never imported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from selection import running_router
from stream import BLOCK, Followed, running_stream


def _dynamo_is_installed() -> bool:
    try:
        version("ai-dynamo-runtime")
    except PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _dynamo_is_installed():
        return
    skip = pytest.mark.skip(
        reason="no ai-dynamo-runtime in this environment; `make test` sets up one with it"
    )
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(skip)


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    """A router, and a stream that it reads."""
    async with running_stream() as stream, running_router(BLOCK) as router:
        await router.follow(1, stream.endpoint, replay=stream.replay)
        await stream.read()
        yield Followed(router, stream)
