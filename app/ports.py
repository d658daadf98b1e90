"""The port: whether it is free, sockets that listen on it, and where this machine reaches it."""

from __future__ import annotations

import errno
import socket

DRAIN_SECONDS = 30  # how long running requests may take once the port is given up
BACKLOG = 2048

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class PortTaken(Exception):
    """Somebody else listens there."""


def check_port(host: str, port: int) -> None:
    """Looks before the server does, whose own words name neither setting. Raises `PortTaken`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(host, port) from error


def listen(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Listening sockets on every address of the host; `shared` ones leave room for others. Raises `PortTaken`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if port == 0 and sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            # The protocol must be named, or asyncio leaves Nagle's algorithm on, which costs 40 ms a request.
            opened = socket.socket(family, kind, protocol)
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind(address)
            opened.listen(BACKLOG)
    except BaseException as error:
        close(sockets)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise _taken(host, port) from error
        raise
    return sockets


def own_url(host: str, port: int, *, tls: bool) -> str:
    """Where this machine reaches what listens on `host`, which may stand for every address."""
    host = _ANYWHERE.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def close(sockets: list[socket.socket]) -> None:
    for opened in sockets:
        opened.close()


def _taken(host: str, port: int) -> PortTaken:
    return PortTaken(f"PORT: {port} on {host} is in use; set another, or stop what uses it")
