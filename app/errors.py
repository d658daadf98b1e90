"""Every exception of ours, in one tree.

`HearthError` is what a client is told: its status, type and code are data, and the fronts render it in their
dialect. `NodeFailure` is why one attempt failed; clients see it only inside the `HearthError` that ends a request.
"""

from __future__ import annotations

from app.domain import Failure


class HearthError(Exception):
    """An error for the client. `message` says what to do; it holds no keys.

    `logged` is what the log may say: a node's own words may repeat the request, and go to its client alone.
    """

    status = 500
    type = "api_error"
    code: str | None = None
    blames_nodes = False  # the request was fine, whatever the status

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.logged = message
        self.param = param
        self.code = code or self.code
        self.retry_after_seconds: float | None = None
        self.source = "gateway"  # or "node": who found the fault


class InvalidRequest(HearthError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(HearthError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(HearthError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class ModelNotFound(HearthError):
    status = 404
    type = "not_found_error"
    code = "model_not_found"


class NotFound(HearthError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowed(HearthError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLarge(HearthError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(HearthError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RequestRefused(HearthError):
    """A node answered that the request is wrong. Neither retried nor counted against the node."""

    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type or self.type
        self.logged = ""
        self.source = "node"

    @property
    def too_long(self) -> bool:
        """The prompt does not fit into the model's context on that node."""
        return self.code == "context_length_exceeded"


class Unavailable(HearthError):
    """Nothing can serve the request now."""

    blames_nodes = True
    status = 503
    type = "server_error"
    code = "no_node_available"

    def __init__(self, message: str, *, code: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDown(Unavailable):
    """Hearth takes no more requests."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("Hearth is shutting down; try again shortly", retry_after_seconds=1)


class Overloaded(Unavailable):
    """Every node that could serve is at its limit. `reason` is a metric's label."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    reason = "timeout"


class RateLimited(HearthError):
    """The caller's key asked for more than it may in a minute."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: float, header_lines: bytes = b"") -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.header_lines = header_lines


class SpendingRefused(HearthError):
    """The cloud may not be asked, as it could not be paid. Local nodes are never refused for it."""

    status = 429
    type = "insufficient_quota"
    code = "budget_exceeded"

    def __init__(
        self, message: str, *, code: str | None = None, status: int = 429, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class LedgerUnavailable(HearthError):
    """The ledger's database cannot be opened, read or written. The message shows no password."""

    status = 503
    type = "server_error"
    code = "ledger_unavailable"


class LedgerRefused(LedgerUnavailable):
    """The ledger's database works, and does not take these values. To try again is of no use."""


class AllAttemptsFailed(HearthError):
    """Every attempt failed before content. The message lists them; the status is the last cause's."""

    blames_nodes = True
    status = 502
    type = "server_error"

    def __init__(
        self, message: str, *, logged: str, status: int, code: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.logged = logged
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.source = "node"


# These failures are told in the node's own words.
_TOLD_BY_NODES = (
    Failure.BUSY,
    Failure.SERVER_ERROR,
    Failure.MODEL_MISSING,
    Failure.CONTEXT_TOO_SMALL,
    Failure.ERROR_EVENT,
)


class NodeFailure(Exception):
    """A node failed one attempt.

    `message` may be the node's own words, which may repeat the request: it is for that request's client alone.
    `summary` is for the log and for everybody else.

    `status` is the node's HTTP status where there was one. `counts` says whether the breaker hears of it: a busy
    node and a missing model are no breakage. `sent` is False when the request surely never reached the node.
    """

    def __init__(
        self,
        failure: Failure,
        message: str,
        *,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        counts: bool = True,
        sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.counts = counts and failure not in (Failure.BUSY, Failure.MODEL_MISSING)
        self.sent = sent

    @property
    def summary(self) -> str:
        if self.failure not in _TOLD_BY_NODES:
            return self.message
        return "it reported an error" if self.status is None else f"it answered {self.status}"
