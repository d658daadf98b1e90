"""Looks at this machine: CPUs, limits, and the port that Hearth wants."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys

from app.doctor.calls import Caller, NoAnswer
from app.doctor.facts import MachineFacts, PortFacts
from app.doctor.places import hearth_version
from app.doctor.stores import unwritable
from app.domain import NodeSpec
from app.node_clients import Clients
from app.ports import own_url
from app.settings import Settings

TAKEN = "taken"


def look_at_machine(settings: Settings) -> MachineFacts:
    return MachineFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        cpus=_cpus(),
        workers=settings.workers,
        open_files=_open_files(),
        unwritable=unwritable([("NODES_FILE", settings.nodes_path())]),
    )


async def look_at_port(settings: Settings, clients: Clients) -> PortFacts:
    """Whether Hearth could listen there; if not, whether it does already."""
    host, port = settings.host, settings.port
    trouble = None if port == 0 else _trouble(host, port)
    return PortFacts(
        host,
        port,
        trouble,
        await _running(settings, clients) if trouble == TAKEN else None,
        _certificate_trouble(settings),
    )


def _trouble(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return TAKEN if error.errno == errno.EADDRINUSE else (error.strerror or type(error).__name__).lower()
    return None


async def _running(settings: Settings, clients: Clients) -> str | None:
    # Its certificate is for another name than this one, which nobody but this machine uses.
    spec = NodeSpec(own_url(settings.host, settings.port, tls=settings.ssl_certfile is not None), tls_verify=False)
    try:
        return await hearth_version(Caller(clients, spec))
    except NoAnswer:
        return None


def _certificate_trouble(settings: Settings) -> str | None:
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    try:
        # Without a password, where OpenSSL would ask for one on the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return "SSL_KEYFILE is not the key of SSL_CERTFILE"
        return "SSL_CERTFILE and SSL_KEYFILE cannot be used: no PEM, or the key has a password"
    except (OSError, ValueError):
        return "SSL_CERTFILE and SSL_KEYFILE cannot be read"
    return None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
