"""The furthest boundary of several groups, against trying every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mini_groups as mini
from tiering.residency.answers import Place
from tiering_connectors.vllm.groups import Group, Kind, blocks_per_chunk_for
from tiering_connectors.vllm.spans import (
    AFTER_A_LOSS,
    AT_HAND,
    OBTAINABLE,
    TOO_LATE,
    WAITING,
    Sight,
    boundary,
)


@dataclass(frozen=True)
class Scene:
    groups: tuple[Group, ...]
    sights: tuple[Sight, ...]
    local: int
    limit: int

    @property
    def align(self) -> int:
        return mini.align_of(self.groups)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    groups = []
    for index in range(draw(st.integers(1, 4))):
        kind, size = draw(st.sampled_from(Kind)), draw(st.sampled_from([1, 2, 4]))
        span = draw(st.integers(1, 12))
        chunk = blocks_per_chunk_for(kind, size, span, draw(st.integers(1, 3)))
        # Draft models have no recurrent layers, and none with chunks of attention.
        is_draft = kind in (Kind.FULL, Kind.WINDOW) and draw(st.booleans())
        groups.append(Group(index, kind, size, chunk, span, is_draft))
    align = mini.align_of(groups)
    local = draw(st.integers(0, 5)) * align
    limit = local + draw(st.integers(0, 40))
    places = st.sampled_from([*Place, Place.READY, Place.READY, Place.READY])
    # As many chunks are in sight as the request's tokens have made full.
    tokens = limit + draw(st.integers(1, 9))
    sights = []
    for group in groups:
        first = local // group.tokens_per_chunk
        end = min(tokens // group.tokens_per_chunk, -(-(limit + 4) // group.tokens_per_chunk))
        some = draw(st.lists(places, min_size=end - first, max_size=end - first))
        sights.append(Sight(group, first, bytes(some)))
    return Scene(tuple(groups), tuple(sights), local, limit)


def tokens_read(group: Group, at: int) -> range:
    """Tokens that a request at `at` still reads; of a draft's, one block more must be known."""
    spare = group.tokens_per_block if group.is_draft else 0
    match group.kind:
        case Kind.FULL:
            return range(0, at + spare)
        case Kind.WINDOW:
            return range(max(0, at - group.span + 1), at + spare)
        case Kind.LOCAL:
            return range(at - at % group.span, at)
        case Kind.STATE:
            return range(at - group.tokens_per_block, at)


def stands(scene: Scene, at: int, counting: bytes) -> bool:
    for sight in scene.sights:
        size = sight.group.tokens_per_chunk
        for chunk in {t // size for t in tokens_read(sight.group, at) if t >= scene.local}:
            seen = chunk - sight.first
            if seen >= len(sight.places) or not counting[sight.places[seen]]:
                return False
    return True


def furthest(scene: Scene, counting: bytes) -> int:
    last = scene.limit - scene.limit % scene.align
    boundaries = range(last, scene.local, -scene.align)
    return next((at for at in boundaries if stands(scene, at, counting)), scene.local)


def seen(group: Group, places: str, first: int = 0) -> Sight:
    """`places`: x for a chunk that is there, anything else for one that is not."""
    return Sight(
        group, first, bytes(Place.READY if place == "x" else Place.ABSENT for place in places)
    )


TABLES = {"at hand": AT_HAND, "obtainable": OBTAINABLE, "hoped for": WAITING.hoped}
DRAFT_WINDOW = replace(mini.window(6, is_draft=True), index=0)
BEHIND_ITS_WINDOW = Scene((DRAFT_WINDOW,), (seen(DRAFT_WINDOW, "..xxx"),), 0, 16)
WIDE = replace(mini.full(8), index=1)
OF_TWO_SIZES = Scene(
    (replace(mini.full(is_draft=True), index=0), WIDE),
    (seen(mini.full(is_draft=True), "xxx"), seen(WIDE, "xx")),
    0,
    16,
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(scene=scenes(), counting=st.sampled_from(sorted(TABLES)))
@example(BEHIND_ITS_WINDOW, "at hand")
@example(OF_TWO_SIZES, "at hand")
def test_no_boundary_is_further_and_every_chunk_of_it_is_there(scene: Scene, counting: str) -> None:
    table = TABLES[counting]
    found = boundary(scene.sights, scene.local, scene.limit, scene.align, table)
    assert found == furthest(scene, table)
    for sight in scene.sights:
        needed = sight.of(sight.group.chunks(scene.local, found))
        assert all(table[place] for place in needed)
        assert len(needed) == len(sight.group.chunks(scene.local, found))


def test_a_window_behind_a_gap_is_enough_and_all_history_is_not() -> None:
    window, full = mini.window(9), mini.full()
    assert boundary([seen(window, "x..xx")], 0, 20, 4, AT_HAND) == 20
    assert boundary([seen(full, "x..xx")], 0, 20, 4, AT_HAND) == 4
    assert boundary([seen(window, "x..xx"), seen(full, "x..xx")], 0, 20, 4, AT_HAND) == 4
    assert boundary([seen(window, "x.xx."), seen(full, "xxxxx")], 0, 20, 4, AT_HAND) == 16


def test_a_state_in_the_middle_and_the_last_before_the_limit() -> None:
    state, full = mini.state(), mini.full()
    assert boundary([seen(full, "xxxxx"), seen(state, ".x.x.")], 0, 20, 4, AT_HAND) == 16
    assert boundary([seen(full, "xxx.x"), seen(state, ".x.x.")], 0, 20, 4, AT_HAND) == 8
    assert boundary([seen(full, "xxxxx"), seen(state, ".....")], 0, 20, 4, AT_HAND) == 0


def test_where_a_local_span_begins_nothing_of_it_is_missed() -> None:
    local, full = mini.local(8), mini.full()
    assert boundary([seen(full, "xxxxx"), seen(local, ".....")], 0, 20, 4, AT_HAND) == 16
    assert boundary([seen(full, "xxx"), seen(local, "..x")], 0, 12, 4, AT_HAND) == 12


def test_what_the_device_has_needs_no_chunk() -> None:
    window = mini.window(9)
    assert boundary([seen(window, ".xx", first=2)], 12, 20, 4, AT_HAND) == 20
    assert boundary([seen(window, "", first=3)], 12, 20, 4, AT_HAND) == 12
    assert boundary([], 12, 20, 4, AT_HAND) == 20


@pytest.mark.parametrize(
    ("counting", "known", "hoped"),
    [
        (WAITING, {Place.READY, Place.FILLING, Place.KNOWN}, {Place.UNKNOWN}),
        (AFTER_A_LOSS, {Place.READY, Place.KNOWN}, {Place.UNKNOWN}),
        (TOO_LATE, {Place.READY}, set()),
    ],
)
def test_what_counts_when(counting: object, known: set[Place], hoped: set[Place]) -> None:
    def counts(table: Sequence[int]) -> set[Place]:
        return {place for place in Place if table[place]}

    assert counts(counting.known) == known  # type: ignore[attr-defined]
    assert counts(counting.hoped) == known | hoped  # type: ignore[attr-defined]
