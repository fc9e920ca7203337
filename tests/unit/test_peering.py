"""Requests with roles, in a mini vLLM: what is kept for another engine, and what comes from one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mini_blocks import Request
from mini_groups import BLOCK
from mini_vllm import MiniVllm
from tiering.peers.addresses import Address
from tiering.policy.admission import SeenOften
from tiering.residency.plan import Contains, Keep, Promote, Release
from tiering.tiers.peers.source import PeerSource

DISK, PEERS = 0, 1
TOKENS = 4 * BLOCK + 1
PEER = {"kv_request_id": "7", "remote_host": "127.0.0.1", "remote_port": 5710}
DECODER = {"kv_request_id": "7"}


def engine(**options: Any) -> MiniVllm:
    options = {"tiers": 2, "peers": [PEERS], "is_listened_to": False, **options}
    return MiniVllm(**options)


def add(vllm: MiniVllm, name: str, tokens: int = TOKENS, **roles: Any) -> Request:
    return vllm.add(name, range(tokens), **roles)


def compute(vllm: MiniVllm) -> None:
    """Until the request has ended, while no copy does."""
    for _ in range(20):
        vllm.step()
        vllm.portal.finish_all()
    assert vllm.finished


def kept(vllm: MiniVllm) -> list[Keep]:
    return [step for step in vllm.portal.submitted if isinstance(step, Keep)]


def asked(vllm: MiniVllm) -> list[Contains | Promote]:
    steps = (step for step in vllm.portal.submitted if isinstance(step, Contains | Promote))
    return [step for step in steps if step.peer]


def test_what_a_prefiller_computes_is_kept_once_its_copies_have_ended() -> None:
    vllm = engine()
    add(vllm, "prefill", remote_decoder=DECODER)
    compute(vllm)
    assert not kept(vllm)
    for copier in vllm.copiers:
        copier.run_all("gather")
    vllm.step()
    (keep,) = kept(vllm)
    assert (keep.kv_request_id, len(keep.keys), keep.tier) == ("7", 4, PEERS)
    assert vllm.core.budget.held == 4
    vllm.run()


def test_what_was_there_before_is_kept_too() -> None:
    vllm = engine()
    add(vllm, "first")
    vllm.run()
    add(vllm, "prefill", remote_decoder=DECODER)
    vllm.run()
    assert [len(keep.keys) for keep in kept(vllm)] == [4]


def test_what_a_decoder_will_come_for_is_stored_however_few_have_asked_for_it() -> None:
    vllm = engine(admission=SeenOften(2, entries_max=100))
    add(vllm, "nobody's")
    vllm.run()
    assert vllm.core.counters["chunks_stored"] == 0
    vllm.add("prefill", range(1000, 1000 + TOKENS), remote_decoder=DECODER)
    vllm.run()
    assert [len(keep.keys) for keep in kept(vllm)] == [4]


def test_an_abort_tells_the_decoder_that_there_is_no_more() -> None:
    vllm = engine(token_budget=2 * BLOCK)
    request = add(vllm, "prefill", remote_decoder=DECODER)
    for _ in range(2):  # The disk is asked, and half of it is computed.
        vllm.step()
        vllm.release()
    vllm.abort(request)
    vllm.step()
    assert [len(keep.keys) for keep in kept(vllm)] == [2]
    vllm.run()


def test_so_does_the_end_of_a_request_that_never_began() -> None:
    vllm = engine()
    vllm.abort(add(vllm, "prefill", remote_decoder=DECODER))
    assert [(keep.kv_request_id, keep.keys) for keep in kept(vllm)] == [("7", ())]
    vllm.run()


def test_a_reset_leaves_the_decoder_nothing() -> None:
    vllm = engine()
    add(vllm, "prefill", remote_decoder=DECODER)
    compute(vllm)
    vllm.reset()
    vllm.run()
    assert [keep.keys for keep in kept(vllm)] == [()]


def stored_by_another(vllm: MiniVllm, chunks: int) -> None:
    """The peer has the first `chunks` of the prompt: what another engine has computed."""
    other = MiniVllm(tiers=1, is_listened_to=False)
    other.add("it", range(TOKENS))
    other.run()
    keys = list(other.portal.stored[0])[:chunks]
    vllm.portal.stored[PEERS] = {key: other.portal.stored[0][key] for key in keys}


@pytest.mark.parametrize("chunks", [4, 2, 0])
def test_a_source_is_asked_and_the_rest_is_computed(chunks: int) -> None:
    vllm = engine()
    stored_by_another(vllm, chunks)
    add(vllm, "r", remote_kv_source=PEER)
    vllm.run()
    assert vllm.loaded_tokens["r"] == chunks * BLOCK
    question = asked(vllm)[0]
    assert isinstance(question, Contains)
    assert PeerSource.unpacked(question.peer) == PeerSource("127.0.0.1", 5710, "7")
    assert PeerSource.unpacked(question.peer).address == Address("127.0.0.1", 5710)


@pytest.mark.parametrize("chunks", [4, 2, 0])
def test_a_prefiller_is_not_asked_and_what_it_has_not_is_computed(chunks: int) -> None:
    vllm = engine()
    stored_by_another(vllm, chunks)
    add(vllm, "r", remote_prefiller=PEER)
    vllm.run()
    assert vllm.loaded_tokens["r"] == chunks * BLOCK
    assert isinstance(asked(vllm)[0], Promote)
    assert PeerSource.unpacked(asked(vllm)[0].peer).is_prefiller


@pytest.mark.parametrize("chunks", [4, 2, 0])
def test_a_prefiller_is_told_once_that_nothing_more_is_wanted(chunks: int) -> None:
    vllm = engine()
    stored_by_another(vllm, chunks)
    vllm.add("r", range(TOKENS), outputs=4, remote_prefiller=PEER)

    def told() -> list[Release]:
        return [step for step in vllm.portal.submitted if isinstance(step, Release)]

    for _ in range(20):
        if told():
            break
        vllm.step()
        vllm.release()
    assert not vllm.finished, "it waits for that no longer than for its load"
    (release,) = told()
    assert PeerSource.unpacked(release.peer).kv_request_id == "7"
    vllm.run()
    assert len(told()) == 1


def test_a_source_keeps_nothing_and_is_not_told() -> None:
    vllm = engine()
    stored_by_another(vllm, 2)
    add(vllm, "r", remote_kv_source=PEER)
    vllm.run()
    assert not [step for step in vllm.portal.submitted if isinstance(step, Release)]


def test_others_do_not_ask_the_peer() -> None:
    vllm = engine()
    stored_by_another(vllm, 4)
    add(vllm, "r")
    vllm.run()
    assert not asked(vllm)
    assert "r" not in vllm.loaded_tokens


def test_a_prefiller_with_a_source_keeps_what_it_had_from_there() -> None:
    vllm = engine()
    stored_by_another(vllm, 3)
    add(vllm, "r", remote_kv_source=PEER, remote_decoder={"kv_request_id": "8"})
    vllm.run()
    assert vllm.loaded_tokens["r"] == 3 * BLOCK
    assert [(keep.kv_request_id, len(keep.keys)) for keep in kept(vllm)] == [("8", 4)]


@pytest.mark.parametrize(
    ("roles", "options", "told"),
    [
        ({"remote_prefiller": PEER, "remote_decoder": DECODER}, {}, "contradict one another"),
        ({"remote_kv_source": {}}, {}, "must be text"),
        ({"remote_kv_source": PEER}, {"peers": []}, "there is no tier of type p2p"),
    ],
)
def test_roles_that_cannot_be_meant_are_ignored_with_a_warning(
    roles: dict[str, Any],
    options: dict[str, Any],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vllm = engine(**options)
    with caplog.at_level(logging.WARNING, "tiering"):
        for name in "abc":
            add(vllm, name, **roles)
        vllm.run()
    assert len(vllm.finished) == 3
    assert not kept(vllm)
    assert not asked(vllm)
    lines = [record.getMessage() for record in caplog.records if told in record.getMessage()]
    assert len(lines) == 2, "the first and the second, not each"


def test_what_is_no_object_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A client of vLLM's can send it; a scheduler that fell over it would take the server along."""
    vllm = engine()
    with caplog.at_level(logging.WARNING, "tiering"):
        add(vllm, "r").kv_transfer_params = "text"  # type: ignore[assignment]
        vllm.run()
    assert len(vllm.finished) == 1
    (line,) = caplog.messages
    assert line.startswith("kv_transfer_params = 'text': must be an object; ignored")
