"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("operation", sa.String(16), nullable=False),
        sa.Column("route", sa.String(512), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("node", sa.String(128), nullable=False),
        sa.Column("tier", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("fallback", sa.String(64), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("tokens_in", sa.BigInteger, nullable=False),
        sa.Column("tokens_out", sa.BigInteger, nullable=False),
        sa.Column("tokens_cached", sa.BigInteger, nullable=False),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("cost", sa.BigInteger, nullable=False),
        sa.Column("saved", sa.BigInteger, nullable=False),
        sa.Column("queued_ms", sa.Integer, nullable=False),
        sa.Column("first_content_ms", sa.Integer),
        sa.Column("ms", sa.Integer, nullable=False),
    )
    op.create_index("requests_at", "requests", ["at"])
    op.create_table(
        "spend",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("request", sa.String(32), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("route", sa.String(512), nullable=False),
        sa.Column("node", sa.String(128), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("reserved", sa.BigInteger, nullable=False),
        sa.Column("cost", sa.BigInteger),
        sa.Column("tokens_in", sa.BigInteger, nullable=False),
        sa.Column("tokens_out", sa.BigInteger, nullable=False),
        sa.Column("tokens_cached", sa.BigInteger, nullable=False),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("settled_at", sa.BigInteger),
    )
    op.create_index("spend_at", "spend", ["at"])
    op.create_index("spend_state", "spend", ["state"])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("routes", sa.JSON, nullable=False),
        sa.Column("local_only", sa.Boolean, nullable=False),
        sa.Column("budget_limit", sa.BigInteger),
        sa.Column("budget_period", sa.String(8)),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("tokens_per_minute", sa.Integer),
    )
