"""SQLAlchemy's connections for asyncio. The package that they are in imports the ORM too, 6 MiB, which nobody needs."""

from __future__ import annotations

from app.lean import submodules_only

submodules_only("sqlalchemy.ext.asyncio")

from sqlalchemy.ext.asyncio.engine import AsyncConnection, AsyncEngine, create_async_engine  # noqa: E402

__all__ = ["AsyncConnection", "AsyncEngine", "create_async_engine"]
