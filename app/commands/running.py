"""The running gateway as the commands see it: where it is, which key it wants, and what it answers.

`http.client` and not an HTTP library: a command must start at once.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import typer

from app.commands import terminal
from app.commands.terminal import Refused
from app.ports import own_url

KEY_VARIABLE = "HEARTH_ADMIN_KEY"

_SECONDS = 5.0
_ANSWER_BYTES = 64 * 2**20
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")
_EVENT = b"data: "

_KEY_HELP = f"One of its ADMIN_KEYS; {KEY_VARIABLE} or those of the settings else."

Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Where the gateway is; HOST and PORT of the settings else.")
]
AdminKey = Annotated[str | None, typer.Option("--admin-key", metavar="KEY", help=_KEY_HELP)]
# For commands in which no other key can be meant.
OnlyKey = Annotated[str | None, typer.Option("--admin-key", "--key", metavar="KEY", help=_KEY_HELP)]


class Unreachable(Refused):
    """There is no gateway at the address now."""


class Gateway:
    """One gateway. Every method raises `Refused` with one line that says what to do."""

    def __init__(
        self, url: str, key: str | None = None, certificate: str | None = None, *, seconds: float = _SECONDS
    ) -> None:
        """`certificate` is the one file that the gateway's own must be in; None = what the system trusts.

        `seconds` bound each wait for it.
        """
        self.url = url.rstrip("/")
        self._seconds = seconds
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            self._host, self._port = parts.hostname or "", parts.port
            # Names that nobody can look up, and those that cannot stand in a request.
            self._host.encode("idna")
            http.client.HTTPConnection(self._host, self._port)
        except (ValueError, http.client.InvalidURL):
            raise Refused(f"{url} is not a URL such as http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise Refused(f"{url} is not a URL such as http://127.0.0.1:8000")
        self._tls = _trusting(certificate) if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Any:
        return self._document("GET", path)

    def post(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """`body` is JSON."""
        sent = dict(headers or {})
        if body is not None:
            sent["content-type"] = "application/json"
        return self._document("POST", f"{path}?{urlencode(params)}" if params else path, body, sent)

    def events(self) -> Iterator[dict[str, Any]]:
        """Snapshots as they come, until the gateway ends the stream."""
        with closing(self._connection()) as connection:
            answer = self._answer(connection, "GET", "/admin/events")
            try:
                while line := answer.readline():
                    if line.startswith(_EVENT):
                        yield json.loads(line[len(_EVENT) :])
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._unreachable(error) from error

    def _document(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        with closing(self._connection()) as connection:
            answer = self._answer(connection, method, path, body, headers)
            try:
                return json.loads(answer.read(_ANSWER_BYTES))
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
            except ValueError:
                raise self._no_gateway() from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
            # A body that is too large is answered before all of it has gone.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._path + path, body, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if answer.status != http.client.OK:
            raise self._refusal(answer)
        return answer

    def _refusal(self, answer: http.client.HTTPResponse) -> Refused:
        try:
            said = json.loads(answer.read(2**20))["error"]["message"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return self._no_gateway()
        if answer.status == http.client.UNAUTHORIZED:
            why = f"{self.url} wants an admin key: {said}"
            return Refused(f"{why}; give --admin-key, or set {KEY_VARIABLE} or ADMIN_KEYS")
        if answer.status == http.client.SERVICE_UNAVAILABLE:
            return Unreachable(f"{self.url}: {said}")
        return Refused(f"{self.url}: {said}")

    def _unreachable(self, error: Exception) -> Refused:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return Refused(
                f"the certificate of {self.url} is not trusted: {why}; name its authority's in SSL_CERT_FILE"
            )
        if isinstance(error, ssl.SSLError):
            return Refused(f"{self.url} does not speak TLS; begin the url with http://")
        return Unreachable(f"no gateway answers at {self.url}: start it with `python -m app serve`, or give --url")

    def _no_gateway(self) -> Refused:
        return Refused(f"what answers at {self.url} is no Hearth; give --url, or set PORT")


def quoted(name: str) -> str:
    """A node's name as a part of a path."""
    return quote(name, safe="")


def the_gateway(url: str | None, key: str | None, *, seconds: float = _SECONDS) -> Gateway:
    """What `--url` and `--admin-key` mean, and what the environment and the settings say where they are absent.

    The settings' own keys go to this machine alone. Settings are read only when they are needed: that takes a while.
    """
    key = key or os.environ.get(KEY_VARIABLE) or None
    if url is not None and (key is not None or not _is_loopback(url)):
        return Gateway(url, key, seconds=seconds)
    settings = terminal.settings()
    if key is None and settings.admin_keys:
        key = settings.admin_keys[0].get_secret_value()
    if url is not None:
        return Gateway(url, key, seconds=seconds)
    certificate = str(settings.ssl_certfile) if settings.ssl_certfile else None
    return Gateway(
        own_url(settings.host, settings.port, tls=certificate is not None), key, certificate, seconds=seconds
    )


def figure(values: Mapping[str, Any], name: str) -> float:
    """A number of a gateway that may be older or newer than this command; 0 where there is none."""
    value = values.get(name)
    return value if isinstance(value, (int, float)) else 0


def _is_loopback(url: str) -> bool:
    try:
        return urlsplit(url if "://" in url else f"http://{url}").hostname in _LOOPBACKS
    except ValueError:
        return False


def _trusting(certificate: str | None) -> ssl.SSLContext:
    if certificate is None:
        return ssl.create_default_context()
    # Exactly this certificate is believed, under whatever name, and no authority.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError):
        raise Refused(f"SSL_CERTFILE: {certificate} cannot be read") from None
    return context
