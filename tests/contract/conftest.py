"""Which tests of contracts are slow, whatever they test: a contract knows nothing of our marks."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = {
    "test_it_behaves_as_a_dict_does",
    "test_a_slot_that_is_given_away_meanwhile_is_never_taken_for_its_old_chunk",
    # They start peers as processes.
    "test_a_peer_that_is_killed_costs_its_rows_and_no_wrong_byte",
    "test_a_peer_that_is_stopped_is_given_up",
    "test_a_stopped_peer_cannot_be_linked_to",
    "test_many_small_rows_come_whole",
    "test_nothing_is_left_behind",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = item.path.is_relative_to(Path(__file__).parent)
        if is_here and isinstance(item, pytest.Function) and item.originalname in SLOW:
            item.add_marker(pytest.mark.slow)
