"""What is measured, summed up and noticed on the way to vLLM's statistics, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from tiering.events.announcer import COUNTERS as EVENT_COUNTERS
from tiering.policy.lru import LruPolicy
from tiering.residency.core import COUNTERS, Residency
from tiering.testing.clocks import ManualClock
from tiering_connectors.vllm.meter import (
    METER_COUNTERS,
    METER_SAMPLES,
    PORTAL_COUNTERS,
    SAMPLES_MAX,
    TransferMeter,
    host_now,
)
from tiering_connectors.vllm.nohits import (
    CHUNKS_ASKED_MIN,
    CHUNKS_STORED_MIN,
    SECONDS_MIN,
    NeverHits,
    Seen,
)
from tiering_connectors.vllm.offload_names import ENGINE_SOURCES, TIER_SOURCES
from tiering_connectors.vllm.summary import summary

SLOTS = 8


def test_the_meter_gives_each_number_once() -> None:
    meter = TransferMeter()
    assert meter.is_empty
    meter.loaded(100, 0.5)
    meter.loaded(50, 0.25)
    meter.stored(10, 1.0)
    meter.load_failed()
    meter.store_failed()
    meter.looked_up(0.001)
    meter.answered(2.0)
    meter.reserved(7)
    assert not meter.is_empty
    taken = meter.take()
    assert taken == {
        "load_bytes": 150,
        "load_seconds": 0.75,
        "loads_failed": 1,
        "store_bytes": 10,
        "store_seconds": 1.0,
        "stores_failed": 1,
        "load_size": [100, 50],
        "store_size": [10],
        "lookup_seconds": [0.001],
        "answer_seconds": [2.0],
        "reserved_chunks": [7],
    }
    assert taken.keys() == {*METER_COUNTERS, *METER_SAMPLES}
    assert json.loads(json.dumps(taken)) == taken
    assert meter.is_empty
    assert meter.take() == {}


def test_samples_that_nobody_takes_are_bounded() -> None:
    meter = TransferMeter()
    for _ in range(SAMPLES_MAX + 5):
        meter.loaded(1, 0.0)
    taken = meter.take()
    assert taken["load_bytes"] == SAMPLES_MAX + 5
    assert taken["load_size"] == [1] * SAMPLES_MAX


def test_every_slot_of_the_host_tier_is_in_one_of_four_states() -> None:
    core = Residency(SLOTS, 1, LruPolicy(SLOTS), ManualClock(), 10.0)
    keys = [bytes([i]) * 36 for i in range(SLOTS)]
    core.open("a")
    core.filled(core.reserve("a", keys[:4], 0).slots)
    core.reserve("a", keys[:6], 4)
    core.hold_ready("a", keys[:1])
    core.take_steps()

    def now(name: str) -> int:
        return host_now(core)[f"0:host|now_{name}"]

    def parts() -> list[int]:
        states = ("slots_free", "slots_evictable", "slots_pinned", "slots_filling")
        return [now(state) for state in states]

    assert (now("slots"), now("slots_pinned_by_loads")) == (SLOTS, 1)
    # Those that are written to the tier are pinned, too, as far as writes may pin.
    assert parts() == [2, 0, 4, 2]
    assert (now("slots_used"), now("slots_pinned_by_writes")) == (6, 4)
    assert now("writes_under_way") == 4
    core.drop(keys[:1])
    assert sum(parts()) == SLOTS, "what is gone and still read is pinned"

    alone = Residency(SLOTS, 0, LruPolicy(SLOTS), ManualClock(), 10.0)
    alone.open("a")
    alone.filled(alone.reserve("a", keys[:4], 0).slots)
    told = host_now(alone)
    assert (told["0:host|now_slots_evictable"], told["0:host|now_slots_used"]) == (4, 0)


def test_the_log_line_is_short_and_says_what_matters() -> None:
    everything = {
        **dict.fromkeys(COUNTERS, 3),
        "load_bytes": 3_000_000_000,
        "load_seconds": 1.5,
        "load_size": [1.0] * 9,
        "0:host|now_slots_used": 5,
        **{f"1:fs:/a|{name}": 7 for name in TIER_SOURCES},
        "1:fs:/a|now_loads_out": 1,
    }
    told = summary(everything)
    assert len(told) <= 14
    assert (told["loaded"], told["load_MB/s"], told["host_slots_in_use"]) == (3, 2000, 5)
    assert (told["lost"], told["tiers_out"]) == (12, 1)
    assert summary({}) == {"loaded": 0, "stored": 0}


def test_what_the_log_line_and_vllms_names_are_fed_from_is_counted_somewhere() -> None:
    counted = {*COUNTERS, *METER_COUNTERS, *METER_SAMPLES}
    assert ENGINE_SOURCES.keys() <= counted
    told = summary({**dict.fromkeys(COUNTERS, 1), "loads_failed": 1})
    assert told == {
        "loaded": 1,
        "stored": 1,
        "asked": 1,
        "missed": 1,
        "from_tiers": 1,
        "to_tiers": 1,
        "refused": 2,
        "lost": 5,
        "unwritten": 4,
    }


MUCH = Seen(stored=CHUNKS_STORED_MIN, asked=CHUNKS_ASKED_MIN, found=0)


def test_a_cache_that_stores_and_never_hits_is_told_of_once() -> None:
    never = NeverHits()
    assert never.look(MUCH, 0.0) is None, "it may still come"
    assert never.look(MUCH, SECONDS_MIN - 1) is None
    told = never.look(MUCH, SECONDS_MIN)
    assert told is not None
    assert "none was found" in told
    assert "PYTHONHASHSEED" not in told
    assert never.look(MUCH, 10 * SECONDS_MIN) is None


def test_what_others_stored_before_points_at_their_hashes() -> None:
    never, seen = NeverHits(), Seen(0, CHUNKS_ASKED_MIN, 0, at_start=CHUNKS_STORED_MIN)
    assert never.look(seen, 0.0) is None
    told = never.look(seen, SECONDS_MIN)
    assert told is not None
    assert "PYTHONHASHSEED" in told


def test_one_hit_or_too_little_to_judge_by_keeps_it_silent() -> None:
    never = NeverHits()
    never.look(MUCH, 0.0)
    assert never.look(Seen(MUCH.stored, MUCH.asked, found=1), 1.0) is None
    assert never.look(MUCH, 2 * SECONDS_MIN) is None
    for seen in (Seen(MUCH.stored - 1, MUCH.asked, 0), Seen(MUCH.stored, MUCH.asked - 1, 0)):
        few = NeverHits()
        assert few.look(seen, 0.0) is None
        assert few.look(seen, 2 * SECONDS_MIN) is None


def test_it_reads_counters_that_the_core_has() -> None:
    counters = dict.fromkeys(COUNTERS, 0)
    names = ("chunks_stored", "chunks_asked", "chunks_hit_host", "chunks_hit_tier", "chunks_loaded")
    assert set(names) <= counters.keys()
    assert Seen.of({**counters, "chunks_hit_tier": 2, "chunks_stored": 5}, 7) == Seen(5, 0, 2, 7)


def test_the_docs_name_every_counter() -> None:
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    missing = [
        name
        for name in (*COUNTERS, *EVENT_COUNTERS, *METER_COUNTERS, *PORTAL_COUNTERS)
        if f"`{name}`" not in text
    ]
    assert missing == []
