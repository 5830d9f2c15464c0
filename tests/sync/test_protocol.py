"""Datagrams: what is encoded is decoded, and nothing else is taken for a message."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover.sync.arbiter import messages, protocol
from crossover.sync.arbiter.messages import (
    MAX_JOB_BYTES,
    Evicted,
    Grant,
    Hello,
    Message,
    Recall,
    Refused,
    Release,
    Request,
    Welcome,
)
from crossover.sync.arbiter.protocol import VERSION, ProtocolError, VersionError, decode, encode

MESSAGES: list[Message] = [
    Hello(serial=1, rank=3, size=8, priority=-2, weight=0.5, peak_bytes=1 << 33, capacity_bytes=1 << 37, job="näme"),
    Request(serial=2, peak_bytes=12),
    Release(serial=3, epoch=1 << 60, again=1, used_s=0.25),
    messages.Pause(),
    messages.Bye(),
    messages.Status(),
    Welcome(boot=9, others=2, needed_bytes=3, fits=0),
    Refused(reason="no"),
    Grant(serial=2, epoch=5, wanted=1, lease_s=5.0),
    Recall(epoch=5),
    Evicted(epoch=5),
    messages.Report(document="{}"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_is_tried_here() -> None:
    assert {message.kind for message in MESSAGES} == set(messages.Kind)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_in_words(datagram: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(datagram)


@given(st.sampled_from(MESSAGES), st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_a_message_or_refused(message: Message, place: int, change: int) -> None:
    datagram = bytearray(encode(message))
    datagram[place % len(datagram)] ^= change
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(bytes(datagram)), Message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_cut_or_longer_datagram_is_refused(message: Message) -> None:
    datagram = encode(message)
    longer = datagram + b"x" * (type(message).longest + 1)
    for wrong in (datagram[: len(protocol.MAGIC)], longer):
        with pytest.raises(ProtocolError):
            decode(wrong)


def test_another_version_is_told_from_nonsense() -> None:
    datagram = bytearray(encode(Request()))
    struct.pack_into("<H", datagram, 4, VERSION + 1)
    with pytest.raises(VersionError) as caught:
        decode(bytes(datagram))
    assert caught.value.version == VERSION + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": math.nan},
        {"weight": 0.0},
        {"weight": math.inf},
        {"weight": -1.0},
        {"rank": 2, "size": 2},
        {"priority": 1000},
        {"job": " "},
        {"job": "a\nb"},
        {"peak_bytes": 1 << 63},
    ],
    ids=str,
)
def test_a_hello_that_would_spoil_the_arithmetic(changes: dict[str, object]) -> None:
    values: dict[str, object] = {"job": "a", **changes}
    with pytest.raises(ProtocolError):
        decode(encode(Hello(**values)))  # type: ignore[arg-type]


def test_no_time_that_is_no_time() -> None:
    for used in (math.nan, math.inf, -1.0):
        with pytest.raises(ProtocolError):
            decode(encode(Release(used_s=used)))


def test_text_has_a_limit() -> None:
    with pytest.raises(ValueError, match="job"):
        encode(Hello(job="x" * (MAX_JOB_BYTES + 1)))


def test_a_report_that_is_too_long_leaves_the_jobs_out() -> None:
    facts = {"device": "cpu0", "jobs": [{"job": "x" * 60}] * 2000}
    sent = protocol.report(facts)
    assert '"cut": true' in sent.document
    assert decode(encode(sent)) == sent
