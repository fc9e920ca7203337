"""Which loop an engine under vLLM is opened with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from process_scene import fs, make_region
from tiering.config import ConnectorConfig, parse
from tiering.portal import ThreadPortal
from tiering.process.portal import ProcessPortal
from tiering.testing.examples import example_namespace
from tiering.tiers.host import Region
from tiering_connectors.vllm.opening import Opened, close


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    with make_region(tmp_path) as region:
        yield region


@pytest.mark.parametrize(
    ("loop", "has_tier", "kind"),
    [
        ("auto", True, ThreadPortal),
        ("thread", True, ThreadPortal),
        ("process", True, ProcessPortal),
        ("process", False, ThreadPortal),
        ("auto", False, ThreadPortal),
    ],
)
def test_the_loop_is_where_the_settings_say(
    region: Region, tmp_path: Path, loop: str, has_tier: bool, kind: type
) -> None:
    tiers = [fs(tmp_path / "kv")] if has_tier else []
    given: dict[str, Any] = {"cpu_bytes_to_use": 1, "secondary_tiers": tiers, "loop": loop}
    opened = Opened.over(
        region, region.geometry.rows, example_namespace(), parse(ConnectorConfig, given)
    )
    try:
        assert type(opened.portal) is kind
        assert opened.counters() == {"portal_restarts": 0}
        names = [f"fs:{tmp_path / 'kv'}"] if has_tier else []
        assert [tier.name for tier in opened.tiers] == names
        told = (names or ["no other tier"])[0]
        told += " (in a process of their own)" if kind is ProcessPortal else ""
        assert opened.describe_tiers() == told
    finally:
        close(opened.portal, None)
