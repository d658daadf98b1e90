"""What an operator should know when the gateway starts."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

from app import __version__
from app.settings import Settings
from app.telemetry.logs import Logger


def announce(settings: Settings, log: Logger) -> None:
    """One line on what starts, and one for each thing that is likely a mistake."""
    scheme = "https" if settings.ssl_certfile else "http"
    log.info(
        "Hearth starts",
        version=__version__,
        url=f"{scheme}://{settings.host}:{settings.port}",
        nodes=[node.name for node in settings.local_node_specs()],
        cloud=[node.name for node in settings.cloud_specs()],
        strategy=settings.lb_strategy,
    )
    for warning in (*settings.warnings, *_warnings(settings)):
        log.warning(warning)


def _warnings(settings: Settings) -> list[str]:
    found = []
    if _in_container() and (local := [node.name for node in settings.local_node_specs() if _is_here(node.url)]):
        found.append(
            f"{', '.join(local)}: inside a container, localhost is the container itself; "
            "use host.docker.internal or the host's address"
        )
    return found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_here(url: str) -> bool:
    return _is_loopback(urlsplit(url).hostname or "")


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or "container" in os.environ
