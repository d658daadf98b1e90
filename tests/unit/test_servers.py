"""The servers that other tests rely on."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from tests.servers import Postgres, Valkey, sql
from tests.system.harness import until


def _alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_valkey_url_is_an_empty_valkey(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        size = client.dbsize()
        client.set("left", "behind")

    assert size == 0


def test_valkey_comes_back_on_its_port(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.set("name", "value")
    valkey.kill()
    with pytest.raises(redis.ConnectionError), redis.Redis.from_url(valkey.url) as client:
        client.ping()
    valkey.start()

    with redis.Redis.from_url(valkey.url) as client:
        assert client.get("name") is None


def test_postgres_comes_back_with_its_data(postgres: Postgres) -> None:
    sql(postgres.url, "CREATE TABLE kept AS SELECT 7 AS n")
    postgres.kill()
    postgres.start()
    postgres.stop()
    postgres.start()

    assert sql(postgres.url, "SELECT n FROM kept") == "7"


def test_databases_of_postgres_are_empty(postgres_url: str) -> None:
    assert sql(postgres_url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == "0"


@pytest.mark.parametrize("kind", ["Valkey", "Postgres"])
async def test_servers_end_with_whoever_started_them(kind: str) -> None:
    """Also by kill -9, and their folders go with them."""
    code = f"from tests.servers import *; s = {kind}(); s.start(); print(s.pid, s.folder, flush=True); input()"
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=PIPE, stdout=PIPE)
    assert owner.stdout is not None
    pid, folder = (await owner.stdout.readline()).decode().split()
    owner.kill()
    await owner.communicate()

    await until(lambda: not _alive(int(pid)) and not Path(folder).exists(), "the server is gone")
