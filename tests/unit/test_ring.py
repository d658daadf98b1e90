"""What is remembered of requests, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from app.domain import AttemptRecord, Caller, Failure, Operation, Outcome, Request, Usage
from app.errors import AllAttemptsFailed, HearthError, NodeFailure
from app.routing.ended import Ended
from app.routing.trail import Trail
from app.telemetry.ring import Ring


class _Fields(dict[str, Any]):
    """Can be referred to weakly."""


def _told(
    ring: Ring, request_id: str, trail: Trail | None = None, error: HearthError | NodeFailure | None = None
) -> None:
    request = Request(request_id, Operation.CHAT, "m", b"{}", {}, caller=Caller("k1", "ann"))
    outcome = Outcome.OK if error is None else Outcome.FAILED
    ring(Ended(request, request_id, Operation.CHAT, trail or Trail(), outcome, error, 0.1))


def test_only_the_latest_are_kept() -> None:
    ring = Ring("p", has_cloud=True, size=3)
    for number in range(5):
        _told(ring, str(number))

    assert [record.id for record in ring.latest(10)] == ["4", "3", "2"]
    assert [record.id for record in ring.latest(1)] == ["4"]
    assert ring.latest(0) == []
    assert ring.get("1") is None
    assert len(ring) == 3


def test_a_feed_asks_for_what_is_new() -> None:
    ring = Ring("p", has_cloud=True, size=3)
    assert ring.since(0) == []
    for number in range(5):
        _told(ring, str(number))

    assert [record.seq for record in ring.since(3)] == [4, 5]
    assert [record.seq for record in ring.since(0)] == [3, 4, 5]
    assert ring.since(5) == ring.since(99) == []
    assert ring.seq == 5


def test_of_one_id_the_newest_is_found() -> None:
    ring = Ring("p", has_cloud=True)
    for _ in range(2):
        _told(ring, "same")

    found = ring.get("same")

    assert found is not None
    assert found.seq == 2


def test_neither_body_nor_error_is_kept_alive() -> None:
    """An exception's traceback holds every frame, and those the body."""
    ring, fields = Ring("p", has_cloud=True), _Fields()
    request = Request("1", Operation.CHAT, "m", b"{}", fields)
    try:
        raise HearthError("no", code="nope")
    except HearthError as error:
        ring(Ended(request, "1", Operation.CHAT, Trail(), Outcome.FAILED, error, 0.1))
    kept = weakref.ref(fields)

    del request, fields
    gc.collect()

    assert kept() is None
    assert ring.latest(1)[0].code == "nope"


def test_a_record_tells_all_of_a_request() -> None:
    ring = Ring("round_robin", has_cloud=True)
    trail = Trail(route="r", node="c0", tier=1, model="big", fallback=Failure.CONNECT, candidates=2, cost=1500)
    trail.attempts += [
        AttemptRecord("n0", 0, Outcome.FAILED, Failure.CONNECT, "refused", 1.0),
        AttemptRecord("c0", 1, Outcome.OK, None, "", 2.0),
    ]
    trail.usage, trail.queued_seconds, trail.first_content = Usage(3, 4, 1), 0.5, trail.started + 0.25
    _told(ring, "1", trail)

    document = ring.latest(1)[0].document()

    assert document["key"] == {"id": "k1", "name": "ann"}
    assert (document["node"], document["tier"], document["model"]) == ("c0", "cloud", "big")
    assert document["why"] == "round_robin over 2"
    assert document["fallback"] == "connect_error"
    assert [attempt["failure"] for attempt in document["attempts"]] == ["connect_error", None]
    assert document["cloud"] == {"asked": True, "refusal": None, "unpaid": None, "why": "connect error"}
    assert (document["tokens_in"], document["tokens_out"], document["tokens_cached"]) == (3, 4, 1)
    assert (document["queued_ms"], document["first_content_ms"]) == (500, 250)
    assert document["cost_usd"] == 0.0015
    assert document["status"] == 200


def test_what_only_the_client_may_read_is_not_remembered() -> None:
    ring = Ring("p", has_cloud=True)
    _told(ring, "1", error=AllAttemptsFailed("the node said tulip", logged="the node failed", status=502, code="x"))
    _told(ring, "2", error=NodeFailure(Failure.SERVER_ERROR, "tulip", status=500))

    documents = [record.document() for record in ring.since(0)]

    assert [document["error"] for document in documents] == ["the node failed", "it answered 500"]
    assert [document["status"] for document in documents] == [502, 200]


def test_why_the_cloud_was_not_asked() -> None:
    ring, without = Ring("p", has_cloud=True), Ring("p", has_cloud=False)
    refused, unpaid, served = Trail(route="r"), Trail(route="r"), Trail(route="r", node="n0")
    refused.cloud_refusal = "the request is local only"
    unpaid.unpaid = "budget_exceeded", "the cloud budget of this gateway is spent: $1"
    for trail in (refused, unpaid, served):
        _told(ring, "1", trail)
    _told(without, "1", served)

    whys = [record.cloud()["why"] for record in (*ring.since(0), *without.since(0))]

    assert whys == [
        "the request is local only",
        "the cloud budget of this gateway is spent: $1",
        "a local node served it",
        "no cloud target is configured; set CLOUD_API_KEY",
    ]
