"""One entry of MODEL_MAP as the operator wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain import NO_RULES, Budget, QueueRules


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
    queue: QueueRules = NO_RULES

    def local_for(self, asked: str) -> str | None:
        """The model that local nodes are asked for when a client asks for `asked`; None = no local node is asked."""
        return self.local if self.local is not None or self.cloud is not None else asked

    @property
    def may_leave(self) -> bool:
        """Whether the operator lets its requests go to the cloud."""
        return not self.local_only and not self.cloud_off
