"""Tells the container's engine whether Hearth answers: ends with 0 if GET /health says so, else with 1 and a line why.

Reads the same variables as Hearth itself. Standard library only, so that it is quick enough to run every few seconds.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_SECONDS = 3.0
WILDCARDS = {"", "0.0.0.0", "::", "[::]"}  # addresses to listen on, but not to call


def connection(environment: Mapping[str, str]) -> http.client.HTTPConnection:
    """Where Hearth listens according to HOST, PORT and SSL_CERTFILE; nothing is sent yet."""
    host = environment.get("HOST", "")
    host = "127.0.0.1" if host in WILDCARDS else host
    port = int(environment.get("PORT") or "8000")
    if not environment.get("SSL_CERTFILE"):
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    # The certificate names the public host, not this loopback address, and nothing secret is sent.
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)


def main() -> int:
    try:
        hearth = connection(os.environ)
        hearth.request("GET", "/health")
        status = hearth.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"Hearth does not answer: {error}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"Hearth answered /health with {status}", file=sys.stderr)
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main())
