"""What is kept of a request on its way."""

from __future__ import annotations

import pytest

from app.routing.trail import Trail

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize(
    ("first", "events"),
    [
        (EVENT, 1),
        (EVENT * 3, 3),
        (EVENT.replace(b": {", b":{") * 2, 2),  # as TGI writes them
        (EVENT.replace(b":[", b": [") * 2, 2),
        (EVENT + b"data: [DONE]\n\n", 1),
        (b": data\n\n" + EVENT, 1),
        (EVENT.replace(b'"a"', b'"data: \\"choices\\" "'), 1),
    ],
)
def test_events_are_counted_however_they_are_written(first: bytes, events: int) -> None:
    trail = Trail()

    assert trail.began(first, 1.0, stream=True) == events
    assert trail.events == events


def test_a_document_has_no_events() -> None:
    trail = Trail()

    assert trail.began(EVENT, 1.0, stream=False) == 0
    assert (trail.events, trail.document_bytes) == (0, len(EVENT))
