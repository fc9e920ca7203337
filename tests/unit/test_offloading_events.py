"""What vLLM's OffloadingConnector is told of: every residency once, under vLLM's own names."""

from __future__ import annotations

from typing import Any

import pytest

from offloading_scene import Scene, chain
from tiering.events import HOST, ChunksRemoved, ChunksStored
from tiering.residency.plan import Cascade

pytestmark = pytest.mark.vllm


class Heard:
    """Whatever was told, as vLLM's tracker would have it: by medium, what is there."""

    def __init__(self, keeps_descriptions: bool = False) -> None:
        # Here, since nobody but the tests of this file needs vLLM for it.
        from vllm.v1.kv_offload.base import Locality, Medium

        from tiering_connectors.vllm.offloading.events import OffloadedEvents, Place

        places = {
            HOST: Place(Medium.CPU),
            0: Place(Medium.STORAGE, Locality.LOCAL),
            1: Place(Medium.STORAGE, Locality.LOCAL),
        }
        self.events = OffloadedEvents(places, keeps_descriptions=keeps_descriptions)
        self.there: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}

    def take(self) -> list[Any]:
        told = self.events.take()
        for event in told:
            there = self.there[event.medium.value]
            if event.removed:
                assert there.issuperset(event.keys)
                there.difference_update(event.keys)
            else:
                assert there.isdisjoint(event.keys)
                there.update(event.keys)
        return told


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_what_is_stored_and_evicted_is_told_of(heard: Heard) -> None:
    scene = Scene(slots=4, tiers=2, events=heard.events)
    heard.events.bind(scene.half.name_of)
    for name in "ab":
        request = scene.request(name, keys := chain(name, 3))
        scene.store(request, keys)
        assert scene.half.writes_end
        assert scene.submitted(Cascade)
        for _ in range(3):  # not all slots may be pinned for writes at once
            scene.portal.finish_all()
            scene.half.end_step(())
        assert not scene.half.writes_end
        assert heard.events.has_news
        (first, *_) = heard.take()
        assert first.locality is None
        assert not heard.events.has_news
    # The second prompt took the tail of the first one's place.
    assert heard.there["CPU"] == {*chain("a", 1), *chain("b", 3)}
    assert heard.there["STORAGE"] == {*chain("a", 3), *chain("b", 3)}
    scene.assert_at_rest()


def test_steps_that_only_wait_for_writes_pause_and_no_others_do(heard: Heard) -> None:
    scene = Scene(slots=4, events=heard.events)
    heard.events.bind(scene.half.name_of)
    request = scene.request("a", keys := chain("a", 3))
    scene.store(request, keys)
    scene.half.end(request)
    assert scene.half.writes_end
    scene.half.end_step(())
    assert scene.pauses == 1
    other = scene.request("b", chain("b", 1))
    scene.half.end_step(())
    assert scene.pauses == 1, "a request would wait"
    stored = scene.offer(other, chain("b", 1))
    scene.half.end(other)
    scene.half.end_step(())
    assert scene.pauses == 1, "copies are waited for"
    scene.fill(stored)
    scene.half.stored(set(stored.keys), other)
    while scene.half.writes_end:
        scene.portal.finish_all()
        scene.half.end_step(())
    pauses = scene.pauses
    scene.half.end_step(())
    assert scene.pauses == pauses, "nothing is written any more"


def test_after_a_reset_new_chunks_have_vllms_names_and_old_ones_are_not_told_of(
    heard: Heard,
) -> None:
    scene = Scene(slots=8, events=heard.events)
    heard.events.bind(scene.half.name_of)
    request = scene.request("a", keys := chain("a", 3))
    scene.store(request, keys)
    scene.half.reset()
    heard.take()
    assert heard.there == {"CPU": set(), "STORAGE": set()}
    scene.portal.finish_all()  # a write of before ends late
    scene.half.end_step(())
    assert heard.take() == []
    request = scene.request("b", keys)
    scene.store(request, keys)
    scene.portal.finish_all()
    scene.half.end_step(())
    heard.take()
    assert heard.there == {"CPU": set(keys), "STORAGE": set(keys)}


def test_two_tiers_of_a_kind_are_told_of_as_one(heard: Heard) -> None:
    a, b = chain("a", 2)
    heard.events.publish([ChunksStored(0, (a, b)), ChunksStored(1, (a,)), ChunksStored(7, (a,))])
    heard.events.publish([ChunksRemoved(0, (a, b, a))])
    heard.take()
    assert heard.there["STORAGE"] == {a}
    heard.events.publish([ChunksRemoved(1, (a,))])
    heard.take()
    assert heard.there["STORAGE"] == set()


@pytest.mark.parametrize("keeps_descriptions", [True, False])
def test_vllm_keeps_descriptions_only_where_it_needs_them(keeps_descriptions: bool) -> None:
    heard = Heard(keeps_descriptions)
    heard.events.publish([ChunksStored(HOST, tuple(chain("a", 1)))])
    (event,) = heard.take()
    assert event.removal_expected is keeps_descriptions
