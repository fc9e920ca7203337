"""The shared key, and what is sealed with it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from peer_frames import KEY, OTHER_KEY
from tiering.errors import ConfigError
from tiering.peers.addresses import Address, address, advertised
from tiering.peers.auth import (
    SEAL_BYTES,
    Seals,
    SharedKey,
    greeting_opens,
    greeting_seal,
    proof,
    require_bindable,
    seals_of,
)
from tiering.peers.names import is_loopback

SECRET = bytes(range(100, 140))


def key_file(tmp_path: Path, secret: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_bytes(secret)
    path.chmod(mode)
    return path


def pair(key: SharedKey = KEY) -> tuple[Seals, Seals]:
    return seals_of(key, "dialling", b"one", b"two"), seals_of(key, "dialled", b"one", b"two")


# The key


def test_a_key_is_read_without_its_line_end(tmp_path: Path) -> None:
    plain = SharedKey.read("auth", key_file(tmp_path, SECRET))
    ended = SharedKey.read("auth", key_file(tmp_path, SECRET + b"\r\n"))
    assert plain.derive("x") == ended.derive("x") == SharedKey(SECRET).derive("x")
    assert plain.auth == "hmac-sha256"
    assert SharedKey().auth == "none"


@pytest.mark.parametrize(
    ("secret", "mode", "reason"),
    [
        (SECRET, 0o604, "can be read or changed by others (mode 604); chmod 600"),
        (SECRET, 0o620, "can be read or changed by others (mode 620); chmod 600"),
        (SECRET[:31], 0o600, "has 31 bytes, not 32 to 4096; make one with"),
        (b"", 0o600, "has 0 bytes"),
        (SECRET * 200, 0o600, "has 4097 bytes"),
        (b"ab" * 32, 0o600, "repeats itself and can be guessed"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(
    secret: bytes, mode: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        SharedKey.read("secondary_tiers.0.auth", key_file(tmp_path, secret, mode))
    assert reason in str(caught.value)
    assert str(caught.value).startswith("secondary_tiers.0.auth = ")


def test_a_file_that_its_group_may_read_is_taken(tmp_path: Path) -> None:
    SharedKey.read("auth", key_file(tmp_path, SECRET, 0o440))


@pytest.mark.parametrize("name", ["missing", ".", "pipe"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match=r"auth = .*make one with"):
        SharedKey.read("auth", tmp_path / name)


def test_a_key_shows_itself_nowhere() -> None:
    key = SharedKey(SECRET)
    assert repr(key) == "<SharedKey hmac-sha256>"
    with pytest.raises(TypeError, match="not to be written"):
        pickle.dumps(key)
    assert SECRET.hex() not in repr(pair(key))


def test_what_is_derived_depends_on_every_part() -> None:
    derived = {
        KEY.derive("a", b"bc"),
        KEY.derive("a", b"b", b"c"),
        KEY.derive("ab", b"c"),
        KEY.derive("a", b"bc", b""),
        OTHER_KEY.derive("a", b"bc"),
        SharedKey().derive("a", b"bc"),
    }
    assert len(derived) == 6


# Seals


def test_what_one_side_seals_the_other_opens_once() -> None:
    ours, theirs = pair()
    first, second = ours.seal(b"one"), ours.seal(b"two")
    assert len(first) == SEAL_BYTES
    assert theirs.opens(b"one", first)
    assert not theirs.opens(b"one", first)  # played back
    assert theirs.opens(b"two", second)
    assert not theirs.opens(b"one", first)


def test_what_was_lost_on_the_way_does_not_matter() -> None:
    ours, theirs = pair()
    ours.seal(b"lost")
    assert theirs.opens(b"two", ours.seal(b"two"))


def test_what_is_sealed_cannot_be_sent_back() -> None:
    ours, _ = pair()
    assert not ours.opens(b"one", ours.seal(b"one"))


@pytest.mark.parametrize("at", range(SEAL_BYTES))
def test_a_seal_with_another_byte_opens_nothing(at: int) -> None:
    ours, theirs = pair()
    seal = bytearray(ours.seal(b"one"))
    seal[at] ^= 1
    assert not theirs.opens(b"one", bytes(seal))


def test_another_message_key_or_session_opens_nothing() -> None:
    ours, theirs = pair()
    seal = ours.seal(b"one")
    assert not theirs.opens(b"One", seal)
    assert not theirs.opens(b"one", seal[:-1])
    assert not theirs.opens(b"one", b"")
    assert not pair(OTHER_KEY)[1].opens(b"one", seal)
    assert not seals_of(KEY, "dialled", b"one", b"Two").opens(b"one", seal)
    assert not seals_of(KEY, "dialled", b"onetw", b"o").opens(b"one", seal)
    assert theirs.opens(b"one", seal)


def test_a_greeting_says_who_has_the_key() -> None:
    seal = greeting_seal(KEY, b"hello")
    assert greeting_opens(KEY, b"hello", seal)
    assert not greeting_opens(KEY, b"hallo", seal)
    assert not greeting_opens(OTHER_KEY, b"hello", seal)
    assert not greeting_opens(SharedKey(), b"hello", seal)
    assert not greeting_opens(KEY, b"hello", b"")


def test_both_sides_have_one_token_and_no_other_session_has() -> None:
    ours, theirs = pair()
    assert ours.token == theirs.token
    assert ours.token != seals_of(KEY, "dialling", b"one", b"three").token
    assert proof(ours.token, "a", b"b") != proof(ours.token, "a", b"c")


# Addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_bindable("host", host, SharedKey(), allow_unauthenticated=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "no.such.host.invalid"])
def test_what_others_can_reach_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host = .*set auth to .*allow_unauthenticated: true"):
        require_bindable("host", host, SharedKey(), allow_unauthenticated=False)
    require_bindable("host", host, KEY, allow_unauthenticated=False)
    require_bindable("host", host, SharedKey(), allow_unauthenticated=True)


@pytest.mark.parametrize(
    ("host", "port", "rank", "expected"),
    [
        ("127.0.0.1", 5710, 3, "127.0.0.1:5713"),
        ("fd00::7", 5710, 0, "[fd00::7]:5710"),
        ("fe80::1%eth0", 5710, 0, "[fe80::1%eth0]:5710"),
        ("node-7.example", 65531, 4, "node-7.example:65535"),
        ("localhost", 0, 4, "localhost:0"),
    ],
)
def test_a_rank_has_the_port_plus_its_number(
    host: str, port: int, rank: int, expected: str
) -> None:
    made = address("host", host, port, rank)
    assert str(made) == expected
    assert Address.parse("address", expected) == made
    assert made.endpoint == f"tcp://{expected}"


@pytest.mark.parametrize(
    ("host", "port", "rank", "sentence"),
    [
        ("127.0.0.1", 65534, 4, "port = 65534: leaves no port for data-parallel rank 4"),
        ("127.0.0.1", 65536, 0, "port = 65536: is no port"),
        ("127.0.0.1", -1, 0, "port = -1: is no port"),
        ("", 1, 0, "host = '': is no host"),
        ("[::1]", 1, 0, "without brackets"),
        ("a b", 1, 0, "host = 'a b': is no host"),
        ("http://x", 1, 0, "is no host"),
        ("x" * 300, 1, 0, "is no host"),
    ],
)
def test_what_is_no_address_says_so(host: str, port: int, rank: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        address("tiers.0.host", host, port, rank)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("tiers.0.")


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "fd00::7:5710", ":1", "[::1]"])
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="address = "):
        Address.parse("address", text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_cannot_be_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="none that a peer could dial"):
        advertised("host", Address(host, 5710), None)
    assert str(advertised("host", Address(host, 5710), "10.0.0.7")) == "10.0.0.7:5710"
    with pytest.raises(ConfigError, match="none that a peer could dial"):
        advertised("host", Address("10.0.0.7", 1), host)
