"""The rules on who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from app.declarations import LOCAL_KINDS
from app.providers import KINDS

ROOT = Path(__file__).parents[2]
APP = ROOT / "app"
MODULES = sorted(APP.rglob("*.py"))

MIGRATIONS = {str(path.relative_to(APP)) for path in (APP / "ledger" / "migrations").rglob("*.py")}
LEDGER = {
    f"ledger/{name}.py"
    for name in ("engines", "tables", "store", "database", "statements", "keys", "usage", "inspection")
}

# A package on the right may be imported by the modules on the left alone.
ALONE = {
    "httptools": {"connection.py"},
    "aiohappyeyeballs": {"upstream.py"},
    "pybreaker": {"routing/breaker.py"},
    "tenacity": {"routing/retry.py"},
    "pydantic_settings": {"settings.py"},
    "prometheus_client": {"telemetry/process.py"},
    "opentelemetry": {"telemetry/traces.py"},
    "structlog": {"telemetry/logs.py"},
    "httpx": {"lean_httpx.py"},
    "uvicorn": {"server.py"},
    "typer": {
        f"commands/{name}.py" for name in ("terminal", "running", "keys", "usage", "explain", "doctor", "nodes", "top")
    },
    "rich": {"commands/terminal.py", "commands/frames.py"},
    "sqlalchemy": LEDGER | MIGRATIONS,
    "alembic": MIGRATIONS,
    "asyncpg": {"ledger/database.py"},
    "genai_prices": {"ledger/prices.py"},
    "redis": {"sharing/link.py"},
}
# What a layer may not know.
FORBIDDEN = {
    "domain.py": {"app.errors", "app.fronts", "app.routing", "app.providers", "app.upstream", "app.settings"},
    "errors.py": {"app.fronts", "app.routing", "app.providers", "app.upstream", "app.settings"},
    "providers": {"app.fronts", "app.routing", "app.upstream", "app.settings", "app.telemetry", "fastapi", "starlette"},
    "routing": {"app.fronts", "app.settings", "app.telemetry", "app.main", "fastapi", "starlette", "httpx"},
    "connection.py": {"app.upstream", "app.fronts", "app.routing", "app.settings", "app.telemetry", "app.providers"},
    "upstream.py": {"app.fronts", "app.routing", "app.settings", "app.telemetry"},
    "telemetry": {"app.fronts", "app.settings", "app.main"},
    "fronts": {"app.settings", "app.main", "app.probes", "app.telemetry"},
}


@cache
def _imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _is(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _broken(path: Path, forbidden: Iterable[str]) -> list[str]:
    """What a module imports although it may not."""
    return [f"{path} imports {name}" for name in _imports(path) if any(_is(name, package) for package in forbidden)]


def test_a_third_party_package_stops_at_its_module() -> None:
    def forbidden(own: str) -> list[str]:
        return [package for package, at in ALONE.items() if own not in at]

    assert not [line for path in MODULES for line in _broken(path, forbidden(str(path.relative_to(APP))))]


def test_imports_point_inward() -> None:
    def forbidden(layer: str) -> set[str]:
        return FORBIDDEN.get(layer, set())

    assert not [line for path in MODULES for line in _broken(path, forbidden(path.relative_to(APP).parts[0]))]


def test_routing_names_no_vendor() -> None:
    vendors = ("ollama", "vllm", "lmdeploy", "sglang", "llamacpp", "openai")
    names = {name for path in (APP / "routing").rglob("*.py") for name in _imports(path)}

    assert not [name for name in names if any(vendor in name.lower() for vendor in vendors)]


def test_every_dependency_has_its_reason() -> None:
    wanted = re.findall(r"^[\w-]+", (ROOT / "requirements.in").read_text(), re.MULTILINE)
    section = (ROOT / "docs" / "decisions.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    told = [name for row in re.findall(r"^\| ([a-z][\w, -]+) \|", section, re.MULTILINE) for name in row.split(", ")]

    assert sorted(told) == sorted([*wanted, "package"])  # with the table's head


def test_the_gateway_starts_without_what_only_others_need() -> None:
    lean = "import app.start, app.main, app.server, app.treasury, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lean], cwd=ROOT, capture_output=True, text=True, check=True)
    unused = ("rich", "pygments", "typer", "alembic", "redis", "genai_prices", "asyncpg", "sqlalchemy.orm")

    assert not [name for name in done.stdout.split() if any(_is(name, package) for package in unused)]


def test_domain_knows_only_the_standard_library() -> None:
    allowed = {"__future__", "collections", "dataclasses", "enum", "typing"}

    assert {name.split(".")[0] for name in _imports(APP / "domain.py")} <= allowed


def test_every_kind_of_node_can_be_named_in_the_settings() -> None:
    assert set(LOCAL_KINDS) == {name for name, kind in KINDS.items() if not kind.cloud}


@pytest.mark.parametrize("path", sorted((APP / "doctor").glob("judge_*.py")), ids=lambda path: path.name)
def test_the_doctor_judges_what_others_have_gathered(path: Path) -> None:
    gathering = {"asyncio", "httpx", "socket", "os", "app.settings"} | {
        f"app.doctor.{name}" for name in ("calls", "places", "stores", "machine", "checkup")
    }

    assert not gathering & _imports(path)
