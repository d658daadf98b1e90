"""What a key means where its requests and others' wait."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("keys") as table:
        table.add_column(sa.Column("weight", sa.Integer))
        table.add_column(sa.Column("priority", sa.String(8)))
