"""The page on running it names every counter that there is, every command, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fs_places
import segment_places
from tiering.cli import main
from tiering.testing.clocks import ManualClock
from tiering.tiers.wrappers.guarded import GuardedTier

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def told(column: int) -> set[str]:
    """The counters in a column of the table."""
    table = PAGE.split("| files | segments | counts |")[1].split("\n\n")[0]
    cells = [line.split("|")[column] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


async def test_every_counter_is_explained_and_no_other(tmp_path: Path) -> None:
    async with fs_places.opened(tmp_path / "files") as tier:
        own = set(tier.stats())
    causes = {name for name in told(1) if name.startswith("damaged_")}
    assert told(1) - causes == own
    words = ("checksum", "size", "magic", "version", "key", "namespace")
    assert causes == {f"damaged_{word}" for word in words}
    async with segment_places.opened(tmp_path / "segments") as segments:
        assert told(2) == set(segments.stats())
        guarded = GuardedTier(segments, ManualClock())
        assert all(f"`{name}`" in PAGE for name in guarded.stats())


@pytest.mark.parametrize("name", sorted(set(re.findall(r"tiering (\w+) ", PAGE))))
def test_every_command_that_is_named_exists(name: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0


def test_every_option_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("stat", "verify", "gc", "events"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
    helped = capsys.readouterr().out
    options = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--help"}
    assert options
    assert all(option in helped for option in options)
