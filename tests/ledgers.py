"""A ledger's tables in a database of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.ledger.tables import metadata


class Store:
    def __init__(self, url: str) -> None:
        driver = url.replace("sqlite://", "sqlite+aiosqlite://").replace("postgresql://", "postgresql+asyncpg://")
        self.engine = create_async_engine(driver)

    def connect(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.engine.connect()

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.engine.begin()


@asynccontextmanager
async def ledger(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    async with store.begin() as connection:
        await connection.run_sync(metadata.create_all)
    try:
        yield store
    finally:
        await store.engine.dispose()
