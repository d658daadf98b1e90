"""The rate limits of callers: decided here, shared in the background."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from app.domain import Rate
from app.errors import RateLimited
from app.fronts.asgi import Lines
from app.sharing.limits import Limits, duration
from tests.system.harness import until
from tests.unit.meters import linked


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Verdict(NamedTuple):
    """What a caller hears of one request."""

    headers: Mapping[bytes, bytes]
    error: RateLimited | None = None

    @property
    def allowed(self) -> bool:
        return self.error is None

    @property
    def why(self) -> str:
        """What it may have no more of."""
        assert self.error is not None
        return self.error.message.split(" a minute")[0].split()[-1]

    @property
    def retry_after_seconds(self) -> float:
        return (None if self.error is None else self.error.retry_after_seconds) or 0.0

    def remaining(self, what: bytes) -> int:
        return int(self.headers[b"x-ratelimit-remaining-" + what])

    def reset(self, what: bytes) -> str:
        return self.headers[b"x-ratelimit-reset-" + what].decode()


def take(limits: Limits, caller_id: str, rate: Rate, tokens: int) -> Verdict:
    try:
        return Verdict(dict(Lines(limits.take(caller_id, rate, tokens))))
    except RateLimited as error:
        return Verdict(dict(Lines(error.header_lines)), error)


@pytest.mark.parametrize("limit", [1, 3, 7, 600])
def test_a_minutes_requests_go_at_once_and_the_next_when_there_is_room(limit: int) -> None:
    clock, rate = _Clock(), Rate(requests_per_minute=limit)
    limits = Limits(clock=clock)
    burst = [take(limits, "a", rate, 0).allowed for _ in range(limit)]

    refused = take(limits, "a", rate, 0)

    assert all(burst)
    assert not refused.allowed
    assert refused.why == "requests"
    assert refused.retry_after_seconds == pytest.approx(60 / limit)
    clock.now += refused.retry_after_seconds
    assert take(limits, "a", rate, 0).allowed
    assert not take(limits, "a", rate, 0).allowed


def test_a_caller_without_limits_is_always_allowed_and_has_no_headers() -> None:
    verdict = take(Limits(), "a", Rate(), 10**9)

    assert verdict.allowed
    assert verdict.headers == {}


def test_callers_do_not_share() -> None:
    limits = Limits(clock=_Clock())
    take(limits, "a", Rate(1), 0)

    assert take(limits, "b", Rate(1), 0).allowed


def test_tokens_are_corrected_when_a_request_is_settled() -> None:
    clock, rate = _Clock(), Rate(tokens_per_minute=100)
    limits = Limits(clock=clock)
    take(limits, "a", rate, 90)
    refused = take(limits, "a", rate, 20)

    limits.settle("a", rate, -40)

    assert refused.why == "tokens"
    assert refused.retry_after_seconds == pytest.approx(6)
    assert take(limits, "a", rate, 50).allowed
    limits.settle("a", rate, 25)
    assert take(limits, "a", rate, 100).retry_after_seconds == pytest.approx(75)


def test_what_tokens_refuse_takes_no_request() -> None:
    limits, rate = Limits(clock=_Clock()), Rate(2, 100)
    take(limits, "a", rate, 100)

    refused = take(limits, "a", rate, 1)

    assert (refused.why, refused.remaining(b"requests"), refused.remaining(b"tokens")) == ("tokens", 1, 0)


def test_a_request_larger_than_its_limit_goes_when_nothing_else_does() -> None:
    limits, rate = Limits(clock=_Clock()), Rate(tokens_per_minute=100)

    assert take(limits, "a", rate, 250).allowed
    assert take(limits, "a", rate, 1).retry_after_seconds == pytest.approx(90.6)


def test_limits_of_nothing_let_nothing_through() -> None:
    limits = Limits(clock=_Clock())

    assert not take(limits, "a", Rate(0, None), 1).allowed
    assert not take(limits, "a", Rate(None, 0), 1).allowed


def test_a_refusal_tells_what_is_used_up_and_how_the_caller_stands() -> None:
    limits, rate = Limits(clock=_Clock()), Rate(3, 1000)
    limits.take("a", rate, 1000)

    with pytest.raises(RateLimited) as refused:
        limits.take("a", rate, 100)

    assert refused.value.message == "this API key may use 1000 tokens a minute; try again in 6.0 s"
    headers = dict(Lines(refused.value.header_lines))
    assert headers[b"x-ratelimit-remaining-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"
    assert headers[b"x-ratelimit-reset-tokens"] == b"1m0s"


@pytest.mark.parametrize(("changed", "remaining"), [(Rate(20, 1000), 9), (Rate(5, 1000), 1), (Rate(10, 1000), 4)])
def test_a_key_whose_limits_are_changed_has_used_the_same_share_of_them(changed: Rate, remaining: int) -> None:
    limits = Limits(clock=_Clock())
    for _ in range(5):
        limits.take("a", Rate(10, 1000), 0)

    assert take(limits, "a", changed, 0).remaining(b"requests") == remaining


def test_headers_are_openais() -> None:
    headers = dict(Lines(Limits(clock=_Clock()).take("a", Rate(3, 1000), 100)))

    assert headers == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"20s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"900",
        b"x-ratelimit-reset-tokens": b"6s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_callers_that_are_remembered_are_bounded() -> None:
    limits = Limits(clock=_Clock())
    for n in range(20_000):
        take(limits, str(n), Rate(1), 0)

    assert len(limits._callers) == 10_000


def test_what_was_published_is_not_published_again() -> None:
    clock, rate = _Clock(), Rate(10, 1000)
    link: Any = object()
    here, there = Limits(link, clock), Limits(link, clock)
    for tokens in (10, 20):
        take(here, "a", rate, tokens)
        message = here.publication()
        assert message is not None
        there.merge(message)
        here.merge(message)

    assert here.publication() is None
    verdicts = [take(limits, "a", rate, 0) for limits in (here, there)]
    assert [(verdict.remaining(b"requests"), verdict.remaining(b"tokens")) for verdict in verdicts] == [
        (7, 970),
        (7, 970),
    ]


def test_more_tokens_than_were_counted_are_charged_from_now_on() -> None:
    clock, rate = _Clock(), Rate(tokens_per_minute=100)
    limits = Limits(clock=clock)
    take(limits, "a", rate, 10)
    clock.now += 600

    limits.settle("a", rate, 50)

    assert take(limits, "a", rate, 0).remaining(b"tokens") == 50


async def test_replicas_pay_back_what_they_let_through_together(valkey_url: str) -> None:
    clock, rate = _Clock(), Rate(10, 1000)
    async with linked(valkey_url) as one, linked(valkey_url) as two:
        async with Limits(one, clock) as here, Limits(two, clock) as there:
            both = [take(limits, "a", rate, 50).allowed for limits in (here, there) for _ in range(10)]
            here.settle("a", rate, -250)

            def together() -> bool:
                standings = [take(limits, "a", rate, 0) for limits in (here, there)]
                return all((each.reset(b"requests"), each.reset(b"tokens")) == ("2m0s", "45s") for each in standings)

            await until(together, "both know of both")
            assert all(both)
            clock.now += 60
            assert not take(here, "a", rate, 0).allowed
            clock.now += 7
            assert take(there, "a", rate, 0).allowed


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"from":"x","taken":[["a",10,null,1,0,"more"]]}',
        b'{"from":"x","taken":[["a",10,0,"1",0]]}',
    ],
)
async def test_a_message_that_nobody_understands_ends_no_sharing(message: bytes, valkey_url: str) -> None:
    clock, rate, said = _Clock(), Rate(tokens_per_minute=1000), list[str]()
    async with linked(valkey_url) as one, linked(valkey_url, said) as two:
        async with Limits(one, clock) as here, Limits(two, clock) as there:

            async def told() -> bool:
                await one.publish("hearth:limits", message)
                return bool(said)

            await until(told, "it is told")
            take(here, "b", rate, 100)

            await until(lambda: take(there, "b", rate, 0).reset(b"tokens") != "0s", "they still share")
            assert len(said) == 1


async def test_a_replica_alone_goes_on_with_the_limit_for_itself(valkey_url: str) -> None:
    async with linked(valkey_url) as link, Limits(link, _Clock()) as limits:
        link.up = False

        assert [take(limits, "a", Rate(1), 0).allowed for _ in range(2)] == [True, False]


def test_taking_costs_microseconds() -> None:
    limits, rate = Limits(), Rate(10**9, 10**12)
    begin = time.process_time()
    for _ in range(20_000):
        limits.take("a", rate, 100)

    assert (time.process_time() - begin) / 20_000 < 20e-6
