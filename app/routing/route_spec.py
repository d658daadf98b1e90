"""One entry of MODEL_MAP as the operator wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain import Budget


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """What a requested model name means. `pattern` is that name; `*` in it stands for any characters."""

    pattern: str
    local: str | None = None
    cloud: str | None = None
    local_only: bool = False
    num_ctx: int | None = None
    spill_after_ms: float | None = (
        None  # to the cloud when the first token would be later than that; None = as set for all
    )
    cloud_off: bool = False  # the operator wrote `"cloud": false`
    budget: Budget | None = None  # for its cloud requests
