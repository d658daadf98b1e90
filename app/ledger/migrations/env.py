"""What Alembic runs. It works on the connection, and in the transaction, of whoever asks for the migration."""

from __future__ import annotations

from alembic import context

from app.ledger.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
