"""Processes that tests start: what they say is heard, and they end with whoever started them."""

from __future__ import annotations

import pytest

from tiering.testing.children import Child

STAYS = """
import asyncio, os
from tiering.testing.children import stay

os.set_blocking(0, False)
asyncio.run(stay(port=5, address="here"))
assert os.read(0, 1) == b"", "it is wanted still"
"""


def test_one_that_does_not_start_is_told() -> None:
    with pytest.raises(RuntimeError, match="has not started"):
        Child("-c", "print('not yet')")


def test_what_a_library_says_before_is_passed_over() -> None:
    with Child("-c", "print('hello'); print('{\"port\": 5}')") as child:
        assert child.told == {"port": 5}


@pytest.mark.slow
def test_it_stays_until_nobody_wants_it_any_more() -> None:
    with Child("-c", STAYS) as child:
        assert child.told == {"port": 5, "address": "here"}
        assert child.process.poll() is None
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(60) == 0
