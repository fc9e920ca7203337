"""The scheduler's half of TieredOffloadingSpec, in the scenes of `offloading_scene`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from offloading_scene import DEADLINE_SECONDS, Context, Scene, chain, stamp
from tiering.policy.admission import SeenOften
from tiering.residency.answers import Place
from tiering.residency.plan import Cascade, Contains, Keep, Promote
from tiering_connectors.vllm.offloading.half import Stored
from tiering_connectors.vllm.offloading.ledger import Told


def test_what_was_stored_is_a_hit_and_pinned_while_it_is_loaded() -> None:
    scene = Scene(slots=4, tiers=0)
    keys = chain("a", 3)
    request = scene.request("r", keys)
    stored = scene.offer(request, keys)
    assert stored.keys == tuple(keys)
    assert stored.rows.chunks == (3,)
    assert scene.half.look_up(keys[0], request) is Place.FILLING
    scene.fill(stored)
    scene.half.stored(set(keys), request)
    assert scene.scan(request, chain("a", 4)) == 3
    rows = scene.half.load(keys, request)
    assert rows.slots.tolist() == stored.rows.slots.tolist()
    assert scene.core.index.slots.load_pins.sum() == 3
    assert not scene.half.was_promoted(keys[0], request)
    scene.half.loaded(request)
    assert scene.core.index.slots.load_pins.sum() == 0
    scene.assert_at_rest()


@pytest.mark.parametrize("told", [Told.FAILED, Told.NOTHING])
def test_a_chunk_that_one_rank_did_not_fill_is_dropped(told: Told) -> None:
    scene = Scene(slots=4, ranks=2)
    keys = chain("a", 3)
    request = scene.request("r", keys)
    stored = scene.offer(request, keys)
    scene.fill(stored)
    scene.ledger.tell(1, stored.rows.slots[1:2], told)
    scene.half.stored(set(keys), request)
    assert scene.scan(scene.request("s", keys), keys[:1]) == 1
    assert scene.core.index.place(keys[1]) == Place.ABSENT
    assert scene.half.counters()["stores_failed"] == 1
    assert [step.keys for step in scene.submitted(Cascade)] == [(keys[0], keys[2])]
    scene.assert_at_rest()


def test_what_a_rank_said_of_an_earlier_chunk_does_not_count() -> None:
    scene = Scene(slots=1, tiers=0)
    scene.store(scene.request("r", chain("a", 1)), chain("a", 1))
    request = scene.request("s", chain("b", 1))
    stored = scene.offer(request, chain("b", 1))
    assert stored.evicted == tuple(chain("a", 1))
    scene.half.stored(set(stored.keys), request)
    assert scene.scan(request, chain("b", 1)) == 0
    scene.assert_at_rest()


def test_a_store_that_vllm_calls_failed_is_dropped() -> None:
    scene = Scene(slots=2, tiers=0)
    keys = chain("a", 2)
    request = scene.request("r", keys)
    stored = scene.offer(request, keys)
    scene.fill(stored)
    scene.half.stored(set(keys), request, success=False)
    assert scene.scan(request, keys) == 0
    scene.assert_at_rest()


def test_a_tier_is_asked_once_for_all_and_read_in_one_batch() -> None:
    scene = Scene(slots=16)
    keys = chain("a", 8)
    scene.put_in_tier(keys[:6])
    request = scene.request("r", keys)
    assert scene.scan(request, keys) is None
    assert not scene.portal.submitted, "nothing goes out before the step ends"
    scene.half.end_step(())
    assert [step.keys for step in scene.submitted(Contains)] == [tuple(keys)]
    assert scene.scan(request, keys) is None
    scene.half.end_step(())
    assert len(scene.portal.submitted) == 1, "nothing is asked twice"
    scene.portal.finish_all()
    assert scene.scan(request, keys) is None
    scene.half.end_step(())
    assert [step.keys for step in scene.submitted(Promote)] == [tuple(keys[:6])]
    scene.portal.finish_all()
    assert scene.scan(request, keys) == 6
    assert scene.half.was_promoted(keys[0], request)
    scene.load(request, keys[:6])
    counters = scene.half.counters()
    names = ("chunks_asked", "chunks_hit_host", "chunks_hit_tier", "chunks_missed")
    assert [counters[name] for name in names] == [8, 0, 6, 2]
    scene.assert_at_rest()


@pytest.mark.parametrize(("slots", "length", "hits"), [(4, 5, 3), (4, 6, 3), (8, 6, 6), (1, 3, 1)])
def test_a_prefix_longer_than_the_host_tier_is_cut_and_not_tried_for_ever(
    slots: int, length: int, hits: int
) -> None:
    scene = Scene(slots)
    keys = chain("a", length)
    scene.put_in_tier(keys)
    request = scene.request("r", keys)
    assert scene.settle(request, keys) == hits
    assert sum(len(step.keys) for step in scene.submitted(Promote)) == hits
    scene.load(request, keys[:hits])
    scene.assert_at_rest()


def test_what_a_promotion_fails_to_bring_is_a_miss_for_this_request_and_not_tried_again() -> None:
    scene = Scene(slots=8)
    keys = chain("a", 5)
    scene.put_in_tier(keys)
    scene.portal.reads_to_fail = 1
    request = scene.request("r", keys)
    assert scene.settle(request, keys) == 2
    assert len(scene.submitted(Promote)) == 1
    scene.load(request, keys[:2])
    assert scene.settle(request, keys) == 2
    assert scene.settle(scene.request("s", keys), keys) == 5
    scene.assert_at_rest()


@pytest.mark.parametrize("stuck", [Contains, Promote])
def test_a_tier_that_does_not_answer_is_a_miss_at_the_deadline(stuck: type) -> None:
    scene = Scene(slots=8)
    keys = chain("a", 4)
    scene.put_in_tier(keys)
    scene.store(scene.request("q", keys), keys[:1])
    scene.portal.finish_all()
    request = scene.request("r", keys)
    for _ in range(4):
        assert scene.scan(request, keys) is None
        scene.half.end_step(())
        for step in [step for step in scene.portal.steps if not isinstance(step, stuck)]:
            scene.portal.finish(step)
    scene.clock.advance(DEADLINE_SECONDS - 1)
    assert scene.scan(request, keys) is None
    scene.half.end_step(())
    scene.clock.advance(1)
    assert scene.scan(request, keys) == 1
    scene.half.end_step(())
    assert scene.core.index.slots.load_pins.sum() == 0
    assert scene.scan(request, keys) == 1
    scene.load(request, keys[:1])
    scene.assert_at_rest()


def test_promotions_of_a_step_leave_alone_what_was_a_hit_in_it() -> None:
    scene = Scene(slots=4)
    host, disk = chain("a", 3), chain("b", 3)
    scene.store(scene.request("q", host), host)
    scene.portal.finish_all()
    scene.put_in_tier(disk)
    waiting = scene.request("w", disk)
    assert scene.scan(waiting, disk) is None
    scene.half.end_step(())
    scene.portal.finish_all()
    # One step: the request of three hits loads, the other one wants three slots promoted.
    request = scene.request("r", host)
    assert scene.scan(waiting, disk) is None
    assert scene.scan(request, host) == 3
    scene.load(request, host)
    scene.assert_at_rest()


def test_a_store_that_finds_everything_in_use_is_refused_and_may_come_again() -> None:
    scene = Scene(slots=2, tiers=0)
    held = chain("a", 2)
    scene.store(scene.request("q", held), held)
    reader = scene.request("r", held)
    assert scene.scan(reader, held) == 2
    scene.half.load(held, reader)
    request = scene.request("s", chain("b", 2))
    assert scene.half.store(chain("b", 1), request) is None
    assert scene.half.counters()["stores_refused"] == 1
    scene.half.loaded(reader)
    assert scene.store(request, chain("b", 2)).keys == tuple(chain("b", 2))
    assert scene.scan(request, chain("b", 2)) == 2
    scene.assert_at_rest()


def test_a_prompt_longer_than_the_host_tier_keeps_its_head_and_leaves_no_gap() -> None:
    scene = Scene(slots=4, tiers=0)
    keys = chain("a", 10)
    request = scene.request("r", keys)
    assert scene.store(request, keys[:6]).keys == tuple(keys[:4])
    assert scene.offer(request, keys[6:]).keys == ()
    assert scene.half.counters()["stores_cut"] == 2
    assert scene.scan(scene.request("s", keys), keys) == 4
    scene.assert_at_rest()


def test_with_a_tier_below_a_small_host_tier_lets_the_whole_prompt_through() -> None:
    scene = Scene(slots=4)
    keys = chain("a", 10)
    request = scene.request("r", keys)
    for i in range(0, 10, 2):
        assert scene.store(request, keys[i : i + 2]).keys == tuple(keys[i : i + 2])
        scene.portal.finish_all()
    assert set(scene.portal.stored[0]) == set(keys)
    scene.assert_at_rest()


def test_what_a_decoder_will_come_for_is_stored_however_few_have_asked_for_it() -> None:
    scene = Scene(slots=8, tiers=1, peers=[0], admission=SeenOften(2, entries_max=100))
    keys, others = chain("a", 3), chain("b", 3)
    assert scene.store(scene.request("nobody's", others), others).keys == ()
    request = scene.request("r", keys, remote_decoder={"kv_request_id": "7"})
    assert scene.store(request, keys).keys == tuple(keys)
    scene.half.end(request)
    assert [step.keys for step in scene.submitted(Keep)] == [tuple(keys)]


def test_room_is_not_made_by_giving_up_the_head_that_the_device_still_has() -> None:
    scene = Scene(slots=4, tiers=0)
    keys = chain("a", 6)
    scene.store(scene.request("q", keys), keys[:2])
    scene.store(scene.request("other", chain("b", 2)), chain("b", 2))
    # vLLM has the first two on the device, so it never names them.
    request = scene.request("r", keys)
    assert scene.store(request, keys[2:4]).evicted == tuple(reversed(chain("b", 2)))
    assert scene.scan(scene.request("s", keys), keys) == 4
    scene.assert_at_rest()


def test_chunks_go_to_the_tier_head_first_whatever_order_vllm_names_them_in() -> None:
    scene = Scene(slots=8)
    keys = chain("a", 6)
    request = scene.request("r", keys)
    stored = scene.offer(request, keys[3:] + keys[:3])
    assert stored.keys == tuple(keys[3:] + keys[:3]), "rows follow the order of vLLM's blocks"
    scene.fill(stored)
    scene.half.stored(set(keys), request)
    assert [step.keys for step in scene.submitted(Cascade)] == [tuple(keys)]
    scene.assert_at_rest()


def test_what_is_offered_out_of_order_is_given_up_tail_first_all_the_same() -> None:
    scene = Scene(slots=4, tiers=0)
    keys = chain("a", 4)
    request = scene.request("r", keys)
    for part in (keys[2:], keys[:2]):
        scene.store(request, part)
    scene.half.end(request)
    for i, tail in enumerate([keys[3], keys[2], keys[1]]):
        other = chain(f"other {i}", 1)
        assert scene.store(scene.request(f"s{i}", other), other).evicted == (tail,)
    scene.assert_at_rest()


def test_only_what_is_offered_gets_a_row() -> None:
    """The state at the end of a prompt is offered first; those before it never are."""
    scene = Scene(slots=16, groups=(0, 1))
    full, states = chain("a", 4, 0), chain("a", 4, 1)
    request = scene.request("r", full, states)
    assert scene.store(request, states[3:]).keys == (states[3],)
    assert scene.store(request, full[:2]).keys == tuple(full[:2])
    assert scene.store(request, full[2:]).keys == tuple(full[2:])
    assert set(scene.core.index.keys()) == {*full, states[3]}
    scene.portal.finish_all()
    scene.assert_at_rest()


def test_a_request_that_is_over_leaves_its_copies_to_end() -> None:
    scene = Scene(slots=4)
    keys = chain("a", 2)
    scene.store(scene.request("q", keys), keys)
    request = scene.request("r", keys)
    assert scene.scan(request, keys) == 2
    scene.half.load(keys, request)
    stored = scene.offer(request, chain("b", 1))
    scene.half.end(request)
    assert scene.core.index.slots.load_pins.sum() == 2
    scene.half.loaded(request)
    scene.fill(stored)
    scene.half.stored(set(stored.keys), request)
    assert scene.scan(scene.request("s", chain("b", 1)), chain("b", 1)) == 1
    scene.assert_at_rest()


def test_a_request_that_starts_without_a_load_holds_nothing_any_more() -> None:
    scene = Scene(slots=8)
    keys = chain("a", 4)
    scene.put_in_tier(keys)
    request = scene.request("r", keys)
    for _ in range(3):
        scene.scan(request, keys)
        scene.half.end_step(())
        scene.portal.finish_all()
    assert scene.core.index.slots.load_pins.sum() == 4
    scene.half.end_step(["r"])
    assert scene.core.index.slots.load_pins.sum() == 0
    scene.assert_at_rest()


def test_a_reset_reaches_all_tiers_and_frees_rows_only_when_ranks_are_done_with_them() -> None:
    scene = Scene(slots=3, ranks=2)
    old = chain("a", 1)
    scene.store(scene.request("q", old), old)
    scene.portal.finish_all()
    reader = scene.request("r", old)
    assert scene.scan(reader, old) == 1
    loading = scene.half.load(old, reader)
    writer = scene.request("w", chain("b", 2))
    writing = scene.offer(writer, chain("b", 2))
    scene.half.reset()
    assert scene.half.needs_steps
    assert scene.settle(scene.request("s", old), old) == 0
    newcomer = scene.request("n", chain("c", 3))
    assert scene.half.store(chain("c", 3), newcomer) is None, "all rows are still in use"
    # vLLM never says that these have ended; the ranks do, one after the other.
    scene.fill(writing, ranks=[0])
    scene.half.end_step(())
    assert scene.half.store(chain("c", 3), newcomer) is None
    scene.fill(writing, Told.FAILED, ranks=[1])
    scene.ledger.tell_loads(0, loading.number)
    scene.half.end_step(())
    assert scene.half.needs_steps
    assert set(scene.offer(newcomer, chain("c", 2)).rows.slots) == set(writing.rows.slots)
    scene.ledger.tell_loads(1, loading.number)
    scene.half.end_step(())
    assert not scene.half.needs_steps
    assert scene.core.index.slots.free == 1
    assert scene.settle(scene.request("t", chain("b", 2)), chain("b", 2)) == 0


def test_after_a_reset_the_same_prompt_is_stored_and_found_again() -> None:
    scene = Scene(slots=8)
    keys = chain("a", 3)
    request = scene.request("r", keys)
    scene.store(request, keys)
    scene.half.reset()
    assert scene.settle(request, keys) == 0
    stored = scene.store(request, keys)
    assert stored.keys == tuple(keys)
    assert scene.settle(scene.request("s", keys), keys) == 3
    scene.portal.finish_all()
    scene.core.index.clear()
    assert scene.settle(scene.request("t", keys), keys) == 3
    scene.assert_at_rest()


def test_a_request_that_may_not_load_from_a_tier_does_not_ask_it() -> None:
    scene = Scene(slots=8, tiers=2)
    keys = chain("a", 3)
    scene.put_in_tier(keys, tier=0)
    scene.put_in_tier(keys[:2], tier=1)
    assert scene.settle(scene.request("none", keys, tiers=frozenset()), keys) == 0
    assert not scene.submitted(Contains)
    assert scene.settle(scene.request("second", keys, tiers=frozenset([1])), keys) == 2
    assert {step.tier for step in scene.submitted(Contains) + scene.submitted(Promote)} == {1}
    scene.assert_at_rest()


def test_rows_say_how_many_chunks_are_of_which_group() -> None:
    scene = Scene(slots=8, tiers=0, groups=(0, 2, 5))
    full, window = chain("a", 3, 0), chain("a", 3, 5)
    request = scene.request("r", full, window)
    stored = scene.store(request, [*full, *window[1:]])
    assert stored.rows.chunks == (3, 0, 2)
    rows = scene.half.load([*full, window[2]], request)
    assert rows.chunks == (3, 0, 1)
    assert [scene.rows[slot].tobytes() for slot in rows.slots] == [
        stamp(key) for key in [*full, window[2]]
    ]
    scene.half.loaded(request)
    scene.assert_at_rest()


def test_a_cut_leaves_room_for_the_window_at_its_end() -> None:
    """Full attention in group 0, a window of two chunks in group 1, and room for six."""
    scene = Scene(slots=7, groups=(0, 1))
    full, window = chain("a", 10, 0), chain("a", 10, 1)
    scene.put_in_tier(full + window)
    request = scene.request("r", full, window)
    for _ in range(20):
        hits = scene.scan(request, full)
        last = 10 if hits is None else hits
        ending = [scene.half.look_up(key, request) for key in window[last - 2 : last]]
        if hits is not None and all(place is Place.READY for place in ending):
            break
        scene.half.end_step(())
        scene.portal.finish_all()
    else:
        raise AssertionError("no answer")
    assert hits == 4
    scene.load(request, full[:4] + window[2:4])
    scene.assert_at_rest()


class World(Scene):
    """Requests at random over few prompts, with ranks and a tier that act at random times."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint(1, 9), tiers=self.random.randint(0, 2), ranks=2)
        self.prompts = [chain(str(i), self.random.randint(1, 8)) for i in range(4)]
        self.waiting: dict[str, list[bytes]] = {}
        self.computing: dict[str, list[bytes]] = {}
        self.loads: dict[str, tuple[list[bytes], Any]] = {}
        self.stores: list[tuple[Context, Stored]] = []
        self.started = self.loaded = 0

    def act(self) -> None:
        choice = self.random.random
        if choice() < 0.4:
            self.started += 1
            prompt = self.random.choice(self.prompts)
            keys = prompt[: self.random.randint(1, len(prompt))]
            self.request(str(self.started), keys)
            self.waiting[str(self.started)] = keys
        self._end_copies()
        self._schedule()
        for step in list(self.portal.steps):
            if choice() < 0.5:
                failing = [i for i in range(len(step.keys)) if choice() < 0.05]
                self.portal.finish(step, failing)
        self.clock.advance(self.random.choice([0, 0.1, 1, 10]))

    def _schedule(self) -> None:
        """One step of vLLM's: scans and loads, its end, then the stores."""
        started = []
        loading = {key for keys, _ in self.loads.values() for key in keys}
        for name, keys in list(self.waiting.items()):
            hits = self.scan(self.contexts[name], keys)
            if hits is None or loading.intersection(keys[:hits]) or self.random.random() < 0.2:
                continue
            del self.waiting[name]
            if hits:
                self.loaded += hits
                loading.update(keys[:hits])
                self.loads[name] = (keys[:hits], self.half.load(keys[:hits], self.contexts[name]))
            else:
                started.append(name)
            self.computing[name] = keys[hits:]
        self.half.end_step(started)
        for name, keys in list(self.computing.items()):
            if name in self.loads:
                continue
            part = keys[: self.random.randint(0, len(keys))]
            stored = self.half.store(part, self.contexts[name]) if part else None
            if stored is not None:
                self.computing[name] = keys[len(part) :]
                if stored.keys:
                    self.stores.append((self.contexts[name], stored))
            if not self.computing[name] or self.random.random() < 0.1:
                del self.computing[name]
                self.half.end(self.contexts.pop(name))

    def _end_copies(self) -> None:
        for name, (keys, rows) in list(self.loads.items()):
            for key, slot in zip(keys, rows.slots.tolist(), strict=True):
                assert self.rows[slot].tobytes() == stamp(key)
            if self.random.random() < 0.5:
                del self.loads[name]
                self.half.loaded(self.contexts[name])
        for each in list(self.stores):
            if self.random.random() < 0.5:
                self.stores.remove(each)
                context, stored = each
                self.fill(stored)
                if self.random.random() < 0.1:
                    self.ledger.tell(1, stored.rows.slots[:1], Told.FAILED)
                    self.rows[stored.rows.slots[0]] = 0
                self.half.stored(set(stored.keys), context)

    def finish(self) -> None:
        for name in [*self.waiting, *self.computing]:
            if name not in self.loads:
                self.half.end(self.contexts.pop(name))
        self.waiting.clear()
        self.computing.clear()
        while self.loads or self.stores:
            self._end_copies()


@pytest.mark.parametrize("seed", range(20))
def test_hits_are_always_loaded_from_the_right_rows(seed: int) -> None:
    world = World(seed)
    for _ in range(150):
        world.act()
    world.finish()
    world.assert_at_rest()
    assert world.loaded > 0
