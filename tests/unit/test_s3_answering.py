"""Answers taken apart, however their bytes are cut: heads, lengths, chunks, and what is no HTTP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.tiers.obj import dialect
from tiering.tiers.obj.answering import Answering, NoHttpError
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import LengthError, StoreError, ThrottledError

BODY = bytes(range(256)) * 5


def told(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


def chunked(body: bytes, sizes: list[int]) -> bytes:
    found, at = b"", 0
    for size in [*sizes, len(body)]:
        if part := body[at : at + size]:
            found += f"{len(part):X};name=value\r\n".encode() + part + b"\r\n"
        at += size
    return found + b"0\r\nExpires: never\r\n\r\n"


def feed(answering: Answering, data: bytes, cuts: list[int], *, is_all: bool = False) -> None:
    """What a socket does that has so many bytes each time, and then ends if that `is_all`."""
    left = list(cuts)
    while data:
        room = answering.room()
        assert len(room) > 0
        count = min(len(room), len(data), left.pop(0) if left else len(data))
        room[:count], data = data[:count], data[count:]
        answering.came(count)
    if is_all:
        answering.ended()


FRAMES = st.sampled_from(["length", "chunks", "end"])
CUTS = st.lists(st.integers(1, 400), max_size=40)


@given(
    CUTS, st.lists(st.integers(1, 500), max_size=8), st.sampled_from(["length", "chunks", "end"])
)
def test_a_body_is_the_same_however_it_comes(cuts: list[int], sizes: list[int], by: str) -> None:
    answer = {
        "length": told(f"Content-Length: {len(BODY)}", 'ETag: "a"', body=BODY),
        "chunks": told("Transfer-Encoding: chunked", 'ETag: "a"', body=chunked(BODY, sizes)),
        "end": told('ETag: "a"', body=BODY),
    }[by]
    for is_kept in (True, False):
        found = [bytearray(100), bytearray(0), bytearray(len(BODY) - 100)]
        answering = Answering(None if is_kept else [memoryview(each) for each in found])
        feed(answering, b"HTTP/1.1 100 Continue\r\n\r\n" + answer, cuts)
        assert answering.is_whole == (by != "end")
        answering.ended()
        assert answering.is_whole
        assert answering.keeps_alive == (by != "end")
        whole = answering.whole
        assert (whole.status, whole.headers["etag"]) == (200, '"a"')
        assert (whole.body if is_kept else b"".join(found)) == BODY


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (told(f"Content-Length: {len(BODY) + 1}"), "1281 bytes long, not 1280"),
        (told(f"Content-Length: {len(BODY)}", body=BODY[:7]), "ended after 7 of 1280"),
        (told("Transfer-Encoding: chunked", body=chunked(BODY + b"x", [])), "1281 bytes, not 1280"),
        (told("Transfer-Encoding: chunked", body=chunked(BODY[1:], [])), "1279 bytes, not 1280"),
        (told("Transfer-Encoding: chunked", body=b"500\r\n"), "ended after 0 of 1280"),
        (told(body=BODY[1:]), "1279 bytes, not 1280"),
        (told("Content-Length: 0"), "0 bytes long, not 1280"),
    ],
)
def test_an_object_of_another_length_is_one(answer: bytes, wrong: str) -> None:
    answering = Answering([memoryview(bytearray(len(BODY)))])
    with pytest.raises(LengthError, match=wrong):
        feed(answering, answer, [], is_all=True)
    assert not answering.is_whole


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (b"220 ready\r\n\r\n", "does not answer as HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46\r\n\r\n", "does not answer as HTTP"),
        (b"HTTP/1.1 99 X\r\n\r\n", "does not answer as HTTP"),
        (told("Content-Length: -1"), "length that is no number"),
        (told("Content-Length: " + "1" * 5000), "length that is no number"),
        (told("Content-Length: 1", "content-length: 2"), "two lengths"),
        (told("no colon"), "header that is none"),
        (told(" folded: x"), "header that is none"),
        (told("X: " + "x" * (64 << 10)), "head of more than 65536 bytes"),
        (told("Transfer-Encoding: chunked", body=b"-1\r\n"), "size is no number"),
        (told("Transfer-Encoding: chunked", body=b"\r\n"), "size is no number"),
        (told("Transfer-Encoding: chunked", body=b"1\r\nab\r\n"), "longer than it says"),
        (told("Transfer-Encoding: chunked", body=b"1" * 70_000), "without an end"),
        (told("Content-Length: 5", body=b"abc"), "within an answer"),
        (told("Content-Length: 5")[:-1], "ended the connection"),
        (b"", "ended the connection"),
    ],
)
def test_what_is_no_answer_says_so(answer: bytes, wrong: str) -> None:
    answering = Answering(None)
    with pytest.raises(NoHttpError, match=wrong):
        feed(answering, answer, [], is_all=True)


def test_an_error_is_kept_beside_buffers_that_stay_as_they_are() -> None:
    found = bytearray(4)
    answering = Answering([memoryview(found)])
    answer = told("Content-Length: 3", body=b"why").replace(b"200 OK", b"503 Slow Down")
    feed(answering, answer, [])
    assert (answering.whole.status, answering.whole.body, found) == (503, b"why", bytearray(4))


def test_what_is_kept_has_a_limit() -> None:
    answering = Answering(None)
    with pytest.raises(StoreError, match="longer than 8388608 bytes"):
        feed(answering, told(body=bytes((8 << 20) + 1)), [])


@pytest.mark.parametrize(
    ("answer", "keeps"),
    [
        (told("Content-Length: 0"), True),
        (told("Content-Length: 0", "Connection: Close"), False),
        (told("Content-Length: 0").replace(b"1.1", b"1.0"), False),
        (told("Content-Length: 0", "Connection: keep-alive").replace(b"1.1", b"1.0"), True),
        (told("Content-Length: 0", body=b"more"), False),
        (told("Transfer-Encoding: chunked", body=b"0\r\n\r\nmore"), False),
        (told().replace(b"200 OK", b"204 No Content"), True),
    ],
)
def test_a_connection_is_kept_where_nothing_is_left_on_it(answer: bytes, keeps: bool) -> None:
    answering = Answering(None)
    feed(answering, answer, [])
    assert answering.is_whole
    assert answering.keeps_alive == keeps


@pytest.mark.parametrize("encoding", ["Shift_JIS", "gb2312", "no-such-one"])
def test_a_page_in_an_encoding_that_the_parser_does_not_know_is_an_error_without_a_code(
    encoding: str,
) -> None:
    """As a gateway in between sends one."""
    page = f'<?xml version="1.0" encoding="{encoding}"?><html>Forbidden</html>'.encode()
    answer = Answer(403, {}, page)
    assert not answer.is_stale
    assert str(dialect.refusal("GET a", answer)).startswith("GET a: 403;")
    with pytest.raises(StoreError, match="no listing"):
        dialect.listing(page)


@pytest.mark.parametrize(
    "until",
    ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 +99999", "1" * 5000],
)
def test_a_time_to_wait_that_no_clock_has_is_none(until: str) -> None:
    headers = {"retry-after": until, "date": "Mon, 01 Jan 2024 00:00:00 GMT"}
    error = dialect.refusal("GET a", Answer(503, headers))
    assert isinstance(error, ThrottledError)
    assert error.retry_after_seconds is None


def test_a_clock_that_is_wrong_is_no_matter_of_rights() -> None:
    page = b"<Error><Code>RequestTimeTooSkewed</Code><Message>no</Message></Error>"
    told = str(dialect.refusal("GET a", Answer(403, {}, page)))
    assert "clock" in told
    assert "policy" not in told


def a_listing(is_cut: str, token: str) -> bytes:
    entry = (
        "<Contents><Key>a+b</Key><Size>1</Size>"
        "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
    )
    about = f"<IsTruncated>{is_cut}</IsTruncated>{token}"
    return f"<ListBucketResult>{about}{entry}</ListBucketResult>".encode()


def test_a_listing_that_is_cut_has_to_tell_how_it_goes_on() -> None:
    """As version 1 of LIST does not, which an old store speaks whatever it is asked for."""
    for token in ("", "<NextContinuationToken/>", "<NextMarker>b</NextMarker>"):
        assert dialect.listing(a_listing("false", token)).token is None
        with pytest.raises(StoreError, match="does not tell how it goes on"):
            dialect.listing(a_listing("true", token))
    page = a_listing("true", "<NextContinuationToken>t</NextContinuationToken>")
    assert dialect.listing(page).token == "t"
    assert [listed.name for listed in dialect.listing(page).objects] == ["a+b"]
