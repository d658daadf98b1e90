"""What the ledger keeps. The migrations beside this module must lead to exactly these tables.

Times are milliseconds since 1970 (UTC), money is micro-dollars, both whole numbers. No prompt, no answer and no key is
kept, only a key's digest.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Index, Integer, MetaData, String, Table

metadata = MetaData()

# One row for every request that reached a route, whatever became of it.
requests = Table(
    "requests",
    metadata,
    Column("id", String(32), primary_key=True),  # Hearth's own: a client may send the same x-request-id twice
    Column("request_id", String(128), nullable=False),  # what the client and the log know it by
    Column("at", BigInteger, nullable=False),
    Column("instance", String(32), nullable=False),  # the process that served it
    Column("key", String(64), nullable=False),  # the caller's id; "" when no key was needed
    Column("operation", String(16), nullable=False),
    Column("route", String(512), nullable=False),
    Column("model", String(512), nullable=False),  # the name that the node was asked for; "" when none was
    Column("node", String(128), nullable=False),
    Column("tier", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("code", String(64), nullable=False),  # of the error; "" without one
    Column("fallback", String(64), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("tokens_in", BigInteger, nullable=False),
    Column("tokens_out", BigInteger, nullable=False),
    Column("tokens_cached", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),  # the node counted nothing, so that the tokens are a guess
    Column("cost", BigInteger, nullable=False),  # of all its attempts
    Column("saved", BigInteger, nullable=False),  # what the cloud would have cost, where a local node served it
    Column("queued_ms", Integer, nullable=False),
    Column("first_content_ms", Integer),
    Column("ms", Integer, nullable=False),
    Index("requests_at", "at"),
)

# One row for every attempt that may cost something. It is there, open, before the attempt's request leaves.
spend = Table(
    "spend",
    metadata,
    Column("id", String(40), primary_key=True),  # the request's row and the attempt's number: <id>-<n>
    Column("request", String(32), nullable=False),
    Column("at", BigInteger, nullable=False),  # when it was reserved: decides the period that it belongs to
    Column("instance", String(32), nullable=False),
    Column("key", String(64), nullable=False),
    Column("route", String(512), nullable=False),
    Column("node", String(128), nullable=False),  # the cloud target's name, which is the provider's
    Column("model", String(512), nullable=False),
    Column("state", String(8), nullable=False),  # open, settled, or lost: its process died, it counts as reserved
    Column("reserved", BigInteger, nullable=False),
    Column("cost", BigInteger),  # None while open
    Column("tokens_in", BigInteger, nullable=False, default=0),
    Column("tokens_out", BigInteger, nullable=False, default=0),
    Column("tokens_cached", BigInteger, nullable=False, default=0),
    Column("estimated", Boolean, nullable=False, default=False),
    Column("outcome", String(16), nullable=False, default=""),
    Column("settled_at", BigInteger),
    Index("spend_at", "at"),
    Index("spend_state", "state"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("digest", String(64), nullable=False, unique=True),  # SHA-256 of the key, in hex
    Column("hint", String(16), nullable=False),  # the key's first characters, to tell keys apart
    Column("created_at", BigInteger, nullable=False),
    Column("changed_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("disabled", Boolean, nullable=False, default=False),
    Column("routes", JSON, nullable=False),  # a list of patterns; [] = all
    Column("local_only", Boolean, nullable=False, default=False),
    Column("budget_limit", BigInteger),
    Column("budget_period", String(8)),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("weight", Integer),  # None = 1
    Column("priority", String(8)),  # None = its routes'
)
