"""What is said of a request that is over."""

from __future__ import annotations

import pytest

from app.domain import Failure, Operation, Outcome
from app.errors import HearthError, InvalidRequest, NodeFailure, Unavailable
from app.routing.ended import Ended
from app.routing.trail import Trail


def _ended(outcome: Outcome, error: HearthError | NodeFailure | None = None, *, began: bool = False) -> Ended:
    trail = Trail()
    trail.first_content = trail.started if began else None
    return Ended(None, "id", Operation.CHAT, trail, outcome, error, 0.1)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (_ended(Outcome.OK, began=True), 200),
        (_ended(Outcome.ABANDONED), None),
        (_ended(Outcome.ABANDONED, began=True), 200),
        (_ended(Outcome.REFUSED, InvalidRequest("no")), 400),
        (_ended(Outcome.FAILED, Unavailable("shutting down"), began=True), 200),
        (_ended(Outcome.FAILED, NodeFailure(Failure.CUT, "cut"), began=True), 200),
    ],
)
def test_the_status_is_what_the_client_got(ended: Ended, status: int | None) -> None:
    assert ended.status == status


def test_a_node_s_own_words_are_for_its_client_alone() -> None:
    ended = _ended(Outcome.FAILED, NodeFailure(Failure.SERVER_ERROR, "you said: SECRET", status=500), began=True)

    assert ended.code == "server_error"
    assert "SECRET" not in ended.said
