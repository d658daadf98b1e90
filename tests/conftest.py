"""What every test may ask for."""

from __future__ import annotations

from tests.servers import (
    database_url,
    postgres,
    postgres_server_url,
    postgres_url,
    valkey,
    valkey_server_url,
    valkey_url,
)

__all__ = [
    "database_url",
    "postgres",
    "postgres_server_url",
    "postgres_url",
    "valkey",
    "valkey_server_url",
    "valkey_url",
]
