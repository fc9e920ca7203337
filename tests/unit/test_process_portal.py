"""The portal whose loop is in a process of its own: what crosses, and what each end is told.

Over a region, directories and children that are real. How it lives and dies: test_process_life.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest

from process_scene import (
    NEVER,
    Scene,
    fs,
    make_region,
    opened,
    portal_over,
    steered,
    until,
    write_own_tiers,
)
from tiering.config import EngineConfig, parse
from tiering.config.given import as_given
from tiering.errors import ClosedError, ConfigError, TierError, TieringError
from tiering.process.child import Outbox
from tiering.process.messages import Came, Setup, reports, whole_frame
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Found,
    Outcome,
    Promote,
    Removed,
    Survey,
    Touch,
    Verdict,
)
from tiering.testing.examples import CHUNK_BYTES, example_namespace, key_number

pytestmark = pytest.mark.slow

A, B = key_number(1), key_number(2)
HUSH = "correct horse battery staple"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tiers of the user's own are, which the parent's path alone has."""
    write_own_tiers(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_chunks_go_to_a_disk_and_come_back_by_the_byte(tmp_path: Path) -> None:
    with opened(tmp_path, fs(tmp_path / "kv")) as scene:
        scene.fill(0, A)
        scene.portal.submit([Cascade(1, 0, (A,), (0,))])
        assert scene.outcomes(1) == [(Verdict.STORED,)]
        scene.portal.submit(
            [
                Contains(2, 0, (A, B), NEVER),
                Promote(3, 0, (A, B), (4, 5), NEVER),
                Touch(4, 0, (A,)),
            ]
        )
        assert scene.outcomes(2, 3, 4) == [(Verdict.HIT, Verdict.MISS)] * 2 + [()]
        assert scene.holds(4, A)
        assert bytes(scene.region.row(5)) == bytes(CHUNK_BYTES)
        scene.portal.submit([Drop(5, 0, (A, B))])
        assert scene.outcomes(5) == [(Verdict.DELETED, Verdict.MISS)]


def test_every_one_of_many_steps_has_its_outcome(tmp_path: Path) -> None:
    with opened(tmp_path, fs(tmp_path / "kv")) as scene:
        for number in range(500):
            keys = tuple(key_number(number * 40 + at) for at in range(40))
            scene.portal.submit([Contains(number, 0, keys, NEVER)])
            scene.pump()
        assert set(scene.outcomes(*range(500))) == {(Verdict.MISS,) * 40}


async def test_news_crosses_in_its_order_as_one_message_a_turn() -> None:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=theirs)
    outbox = Outbox(writer)
    news = [Outcome(1, (Verdict.HIT,)), Removed(0, (A,)), Outcome(2, ()), Found(0, (B,))]
    for each in news:
        outbox.take(each)
    await asyncio.sleep(0)
    outbox.take(Outcome(3, ()))
    await asyncio.sleep(0)
    with ours:
        assert reports.decode(whole_frame(ours)) == Came(news)
        assert reports.decode(whole_frame(ours)) == Came([Outcome(3, ())])
    writer.close()


def test_a_survey_names_what_is_there_in_parts(tmp_path: Path) -> None:
    keys = [key_number(number) for number in range(8)]
    with opened(tmp_path, fs(tmp_path / "kv")) as scene:
        scene.portal.submit([Cascade(1, 0, tuple(keys), tuple(range(8)))])
        scene.outcomes(1)
        scene.portal.submit([Survey(2, 0)])
        assert scene.outcomes(2) == [()]
        found = [key for news in scene.news if isinstance(news, Found) for key in news.keys]
        assert sorted(found) == sorted(keys)


def test_what_a_tier_evicts_is_told_before_what_took_its_place(tmp_path: Path) -> None:
    room = 8
    tier = fs(tmp_path / "kv", max_bytes=room * (CHUNK_BYTES + 4096), low_watermark=0.5)
    keys = [key_number(number) for number in range(4 * room)]
    with opened(tmp_path, tier) as scene:
        for number, key in enumerate(keys):
            scene.portal.submit([Cascade(number, 0, (key,), (0,))])
            scene.outcomes(number)
        gone = [key for news in scene.news if isinstance(news, Removed) for key in news.keys]
        assert len(gone) >= 2 * room
        scene.portal.submit([Contains(1000, 0, tuple(keys), NEVER)])
        (verdicts,) = scene.outcomes(1000)
        held = {key for key, told in zip(keys, verdicts, strict=True) if told is Verdict.HIT}
        assert held == set(keys) - set(gone)


def test_a_tier_of_the_users_own_is_made_in_the_child_with_its_secret(own: Path) -> None:
    with opened(own, steered(own, password=HUSH)) as scene:
        assert [tier.name for tier in scene.portal.tiers] == ["steered"]
        assert (own / "password").read_text() == HUSH
        scene.fill(0, A)
        scene.portal.submit([Cascade(1, 0, (A,), (0,))])
        assert scene.outcomes(1) == [(Verdict.STORED,)]
        scene.portal.submit([Promote(2, 0, (A,), (1,), NEVER)])
        assert scene.outcomes(2) == [(Verdict.HIT,)]
        assert scene.holds(1, A)
        seen = Path(f"/proc/{scene.pid}/cmdline").read_bytes()
        seen += Path(f"/proc/{scene.pid}/environ").read_bytes()
        assert HUSH.encode() not in seen
        assert HUSH not in repr(scene.portal) + repr(scene.portal._keeper)
        assert HUSH not in repr(scene.portal._setup)


def test_settings_cross_as_they_were_given_and_secrets_with_them(tmp_path: Path) -> None:
    given = {
        "cpu_bytes_to_use": 1 << 20,
        "backpressure": {"alpha": 0.5},
        "secondary_tiers": [
            {"type": "fs", "root_dir": ["/a", "/b"], "backpressure": {}},
            {"type": "Own", "module_path": "m", "api_key": HUSH, "more": {"token": [HUSH]}},
        ],
    }
    config = parse(EngineConfig, given)
    assert as_given(config) == given
    assert parse(EngineConfig, json.dumps(as_given(config))) == config


def test_a_message_with_a_secret_shows_none() -> None:
    setup = Setup(
        config=HUSH.encode(),
        namespace=example_namespace(),
        region_path="",
        replica=0,
        levels=(0, 0),
        engine_pid=1,
    )
    assert HUSH not in repr(setup) + str(setup) + f"{[setup]}"


def test_what_tiers_count_comes_by_itself(tmp_path: Path) -> None:
    with opened(tmp_path, fs(tmp_path / "kv")) as scene:
        (tier,) = scene.portal.tiers
        assert tier.name == f"fs:{tmp_path / 'kv'}"
        assert tier.stats()["stored"] == 0, "known from the start"
        scene.portal.submit([Cascade(1, 0, (A,), (0,)), Cascade(2, 0, (B,), (1,))])
        until(lambda: (scene.pump(), tier.stats()["writes_stored"] == 2)[1])
        until(lambda: (scene.pump(), tier.stats()["now_writes"] == 0)[1])
        assert tier.stats()["written_bytes"] == 2 * CHUNK_BYTES


def test_a_tier_that_cannot_be_opened_ends_the_start_with_its_own_error(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "refuse").touch()
    region = make_region(own)
    portal = portal_over(region, fs(own / "kv"), steered(own, password=HUSH))
    with pytest.raises(TierError, match="not today") as raised:
        portal.start()
    assert (raised.value.tier, raised.value.key) == ("steered", b"\x01")
    assert portal.close(1.0) is True
    with pytest.raises(ClosedError):
        portal.submit([Drop(1, 0, (A,))])
    assert HUSH not in caplog.text
    region.close()


def test_a_setting_that_cannot_be_used_is_a_config_error_with_its_key(own: Path) -> None:
    region = make_region(own)
    portal = portal_over(region, fs(own / "kv", max_bytes=1))
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\].max_bytes = 1: is less than"):
        portal.start()
    region.close()


def test_a_child_that_dies_while_it_opens_ends_the_start(own: Path) -> None:
    region = make_region(own)
    portal = portal_over(region, {"type": "Stillborn", "module_path": "steered_tiers"})
    with pytest.raises(TieringError, match=r"ended before they were open \(exit status 7\)"):
        portal.start()
    assert portal.close(1.0) is True
    region.close()


def test_log_records_of_the_child_are_the_engines(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), opened(own, steered(own)) as scene:
        scene.portal.submit([Cascade(1, 0, (A, B), (0, 1))])
        # Also while nobody drains.
        until(lambda: "writing 2" in caplog.text)
        (record,) = [each for each in caplog.records if each.name == "tiering.own"]
        assert (record.levelname, record.getMessage()) == ("WARNING", "writing 2")


def held_promotion(scene: Scene, own: Path) -> None:
    scene.fill(0, A)
    scene.portal.submit([Cascade(1, 0, (A,), (0,))])
    scene.outcomes(1)
    (own / "hold").touch()
    scene.portal.submit([Promote(2, 0, (A,), (3,), NEVER)])
    until((own / "held").exists)


def test_close_lets_what_is_under_way_end(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        held_promotion(scene, own)
        (own / "hold").unlink()
        assert scene.portal.close(NEVER) is True
        assert scene.portal.drain() == [Outcome(2, (Verdict.HIT,))]
        assert scene.holds(3, A)
        assert scene.portal.close(1.0) is True
        with pytest.raises(ClosedError, match="not running"):
            scene.portal.submit([Drop(3, 0, (A,))])


def test_close_cuts_off_what_does_not_end(
    own: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.process.portal.CLOSE_SECONDS", NEVER)
    with opened(own, steered(own)) as scene:
        held_promotion(scene, own)
        assert scene.portal.close(0.0) is True
        assert scene.portal.drain() == [Outcome(2, (Verdict.FAILED,))]
    assert "1 transfers were cut off" in caplog.text
    assert "killed" not in caplog.text
    assert "started again" not in caplog.text


def test_close_kills_a_child_that_hangs_in_a_tier(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(own, steered(own)) as scene:
        (own / "hang").touch()
        scene.portal.submit([Contains(1, 0, (A,), NEVER)])
        until((own / "hangs").exists)
        assert scene.portal.close(0.0) is True
        assert scene.portal.drain() == [Outcome(1, (Verdict.FAILED,))]
    assert "does not end by itself: it is killed" in caplog.text
