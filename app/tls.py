"""Whose certificates are believed when Hearth speaks to a node over TLS, and what to do about one that is not."""

from __future__ import annotations

import asyncio
import ssl

from app.domain import NodeSpec

OUT_OF_DATE = (9, 10)  # OpenSSL's numbers for what was wrong with a certificate
OTHER_NAME = (62, 64)
_SELF_SIGNED = (18, 19)
_UNKNOWN_ISSUER = (20, 21)
_OWN_AUTHORITY = "put its authority's certificate into a file, and name that in the node's ca_file or in SSL_CERT_FILE"

_NO_TLS = "it does not speak TLS there; should its url begin with http:// instead of https://, or its port be another?"


class UnusableCaFile(Exception):
    """The certificates that the operator wants to be trusted cannot be read. The message is for people."""


class Trust:
    """One context for each way in which nodes are trusted, made when the first node needs it.

    Without a `ca_file` it is the system's certificates that are trusted, or those that SSL_CERT_FILE and SSL_CERT_DIR
    name. Open connections keep the context that they began with.
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[bool, str | None], ssl.SSLContext] = {}
        self._making = asyncio.Lock()

    async def context(self, spec: NodeSpec) -> ssl.SSLContext:
        """Raises `UnusableCaFile`."""
        key = (spec.tls_verify, spec.ca_file)
        if key not in self._contexts:
            async with self._making:
                if key not in self._contexts:
                    # Loading certificates takes some 20 ms, in which no stream would go on.
                    self._contexts[key] = await asyncio.to_thread(_context, *key)
        return self._contexts[key]


def nothing_trusted() -> ssl.SSLContext:
    """For clients of nodes without TLS: it costs nothing to make, and lets no certificate pass."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def trouble(error: BaseException) -> str | None:
    """What was wrong with TLS, and which setting helps; None for an error of another kind."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _not_accepted(error)
    return _NO_TLS if isinstance(error, ssl.SSLError) else None


def _not_accepted(error: ssl.SSLCertVerificationError) -> str:
    return f"its TLS certificate was not accepted: {error.verify_message.rstrip('.')}; {_remedy(error.verify_code)}"


def _remedy(code: int) -> str:
    if code in _SELF_SIGNED or code in _UNKNOWN_ISSUER:
        return _OWN_AUTHORITY
    if code in OUT_OF_DATE:
        return "renew it, or check this machine's clock"
    if code in OTHER_NAME:
        return "use a name that it holds in the node's url"
    return "see the node's ca_file and tls_verify"


def _context(verify: bool, ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise UnusableCaFile(f"its ca_file {ca_file} holds no certificates in PEM form") from error
    except OSError as error:
        why = (error.strerror or "no such file").lower()
        raise UnusableCaFile(f"its ca_file {ca_file} cannot be read: {why}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
