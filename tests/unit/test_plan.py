"""Everything that crosses the portal is plain data: it survives being sent to another process."""

from __future__ import annotations

import pickle
import typing

import msgspec
import pytest

from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Found,
    Hide,
    Keep,
    News,
    Outcome,
    Promote,
    Release,
    Removed,
    Show,
    Step,
    Survey,
    Touch,
    Verdict,
    failed,
)

KEYS = (b"\x00" * 36, b"\xff" * 36)
STEPS: list[Step] = [
    Contains(1, 0, KEYS, 30.0),
    Promote(2, 1, KEYS, (3, 4), 0.5),
    Cascade(3, 0, KEYS, (5, 6)),
    Drop(4, 1, KEYS),
    Touch(5, 0, KEYS),
    Survey(6, 1),
    Show(7, 1, KEYS, (3, 4), (9, 2**64 - 1)),
    Hide(8, 1, KEYS),
    Keep(9, 1, KEYS, "r"),
    Release(10, 1, b"p"),
]
NEWS: list[News] = [
    Outcome(1, tuple(Verdict)),
    Outcome(2, (Verdict.LATE, Verdict.LATE), final=False),
    Outcome(3, ()),
    Found(1, KEYS),
    Removed(0, KEYS),
]


def test_no_kind_was_forgotten_here() -> None:
    assert {type(step) for step in STEPS} == set(typing.get_args(Step))
    assert {type(news) for news in NEWS} == set(typing.get_args(News))


@pytest.mark.parametrize("step", STEPS)
def test_steps_survive_serialisation(step: Step) -> None:
    wire = msgspec.msgpack.encode(step)
    assert msgspec.msgpack.decode(wire, type=Step) == step
    assert pickle.loads(pickle.dumps(step)) == step


@pytest.mark.parametrize("news", NEWS)
def test_news_survives_serialisation(news: News) -> None:
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(news), type=News)
    assert back == news
    if isinstance(back, Outcome):
        assert all(isinstance(verdict, Verdict) for verdict in back.verdicts)
    assert pickle.loads(pickle.dumps(news)) == news


@pytest.mark.parametrize("step", STEPS)
def test_every_step_can_fail(step: Step) -> None:
    outcome = failed(step)
    assert outcome.id == step.id
    assert set(outcome.verdicts) <= {Verdict.FAILED}
    assert bool(outcome.verdicts) is not isinstance(step, Touch | Show | Hide | Release)


def test_they_cannot_be_changed_on_the_way() -> None:
    with pytest.raises(AttributeError):
        STEPS[0].tier = 2
