"""Engines that have chunks of one another, simulated: seeds find nothing, planted bugs are found.

A seed that fails is in the message: `python -m tiering.testing.peersimulation --seed N` replays it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tiering.peers import auth, session
from tiering.peers.auth import Seals
from tiering.peers.rounds import Asked, Round
from tiering.peers.session import Event, Session
from tiering.residency.holds import Holds
from tiering.residency.peers import PeerBook
from tiering.testing import peersimulation
from tiering.testing.peerfaults import STEPS, Fault
from tiering.testing.peersimulation import Failure, run
from tiering.testing.simrows import SimLink, SimTransport
from tiering.tiers.peers.links import Links
from tiering.tiers.peers.serving import Serving
from tiering.tiers.peers.showcase import Showcase

SEEDS, SEEDS_AT_A_TIME = 200, 50
"""A thousand are `python -m tiering.testing.peersimulation --seed 0 --seeds 1000`: four minutes."""
EACH = [range(at, at + SEEDS_AT_A_TIME) for at in range(0, SEEDS, SEEDS_AT_A_TIME)]
strikes: Counter[tuple[str, str]] = Counter()


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        strikes.update(run(seed).strikes)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What engines log of a hundred runs is nobody's to read."""
    caplog.set_level(logging.CRITICAL, "tiering")


def test_a_few_seeds_find_nothing() -> None:
    for seed in range(12):
        report = run(seed)
        assert report.counts["ask"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seeds", EACH, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_seeds_find_nothing(seeds: range) -> None:
    run_seeds(seeds)


@pytest.mark.slow
def test_everything_has_struck_at_every_step() -> None:
    """After the seeds before, whatever they were of."""
    if sum(strikes.values()) == 0:
        run_seeds(EACH[0])
    assert {fault for fault, _ in strikes} == {fault.value for fault in Fault}
    assert {step for _, step in strikes} >= set(STEPS)


def test_one_seed_is_one_run() -> None:
    first, again, other = run(7), run(7), run(8)
    assert first == again
    assert first.digest != other.digest


def test_the_command_tells_the_seed_and_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert peersimulation.main(["--seed", "3", "--operations", "20"]) == 0
    report = run(3, 20)
    told = capsys.readouterr().out
    assert told.startswith(f"seed 3: {report.digest[:16]}, ")
    assert len(told.splitlines()) == 1 + len(report.strikes)


# Planted bugs: each takes one mechanism away.


def rows_are_right_whatever_their_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimLink, "_has", lambda self, of: True)


def generations_are_told_of_another_time(patch: pytest.MonkeyPatch) -> None:
    """A slot is shown with the generation that it is going to have."""
    show = Showcase.show

    def later(self: Showcase, keys: Any, slots: Any, generations: Sequence[int]) -> None:
        show(self, keys, slots, [each + 1 for each in generations])

    patch.setattr(Showcase, "show", later)


def what_goes_is_not_hidden(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Showcase, "hide", lambda self, keys: None)


def what_was_kept_stays_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerBook, "settle", lambda self, outcome: self._kept.pop(outcome.id))


def what_nobody_fetches_is_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    keep = Showcase.keep

    async def patient(self: Showcase, kv_request_id: str, keys: Any, seconds: float) -> set[bytes]:
        return await keep(self, kv_request_id, keys, 1e6)

    patch.setattr(Showcase, "keep", patient)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    tick = Session.tick

    def patient(self: Session, now: float) -> list[Event]:
        self._heard_at = now
        return tick(self, now)

    patch.setattr(Session, "tick", patient)


def greetings_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    tick = Session.tick

    def patient(self: Session, now: float) -> list[Event]:
        self._began_at = now
        return tick(self, now)

    patch.setattr(Session, "tick", patient)


def answers_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Asked, "overdue", lambda self, now: [])


def any_answer_will_do(patch: pytest.MonkeyPatch) -> None:
    """As if rounds had no numbers: what comes is taken for what was asked last."""

    def answered(self: Asked, message: Any) -> Round | None:
        fitting = [of for of, each in self._open.items() if each.keys == len(message.hits)]
        if not fitting:
            return None
        del self._open[fitting[-1]]
        return fitting[-1]

    patch.setattr(Asked, "answered", answered)


def visits_outlive_their_guests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Serving, "over", lambda self, guest, reason: None)


def links_outlive_their_sessions(patch: pytest.MonkeyPatch) -> None:
    async def lazy(self: Links) -> None:
        del self

    patch.setattr(Links, "tidy", lazy)


def tokens_outlive_their_sessions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimTransport, "dismiss", lambda self, session: None)


def a_fetch_is_not_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "done", lambda self, of, success, now: None)


def seals_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seals, "opens", lambda self, payload, seal: True)
    patch.setattr(auth, "greeting_opens", lambda key, payload, seal: True)


def strangers_are_no_strangers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "refusal", lambda dialling, dialled: None)


def whoever_waits_is_answered_though_gone(patch: pytest.MonkeyPatch) -> None:
    def has_come(self: Serving, keys: Sequence[bytes]) -> None:
        for guest, visit in list(self._visits.items()):
            for of in list(visit.waiting):
                self._answer_if_complete(guest, visit, of)

    patch.setattr(Serving, "_has_come", has_come)


def pins_are_of_no_use(patch: pytest.MonkeyPatch) -> None:
    """What is kept is not pinned, and slots of it are given away: no wrong byte, but misses."""
    patch.setattr(Holds, "pin", lambda self, slots: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (rows_are_right_whatever_their_generation, "wrong bytes"),
        (generations_are_told_of_another_time, "shown is not what is there|wrong bytes"),
        (what_goes_is_not_hidden, "what is shown is not what is there"),
        (what_was_kept_stays_pinned, "holds of|pins"),
        (what_nobody_fetches_is_kept_for_ever, "is out for"),
        (silence_is_not_noticed, "left over|is out for|does not work"),
        (greetings_are_waited_for, "is out for|left over"),
        (answers_are_waited_for, "is out for|left over"),
        (any_answer_will_do, "wrong bytes|unhandled errors|left over|is not open"),
        (visits_outlive_their_guests, "visits of"),
        (links_outlive_their_sessions, "links to"),
        (tokens_outlive_their_sessions, "tokens for"),
        (a_fetch_is_not_ended, "kept though it was fetched"),
        (seals_are_not_looked_at, "stranger"),
        (strangers_are_no_strangers, "stranger"),
        (whoever_waits_is_answered_though_gone, "KeyError"),
        (pins_are_of_no_use, "pin was given back|IllegalTransition"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    bug(monkeypatch)
    with pytest.raises(Failure, match=says):
        run_seeds(range(300))
