"""Asks the gateway that runs. Its admin routes may want a key, and this machine's settings most likely have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer

from app.commands import terminal
from app.commands.terminal import Refused

ADDRESS = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Where the gateway is.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        "--admin-key",
        metavar="KEY",
        envvar="HEARTH_ADMIN_KEY",
        help="One of its ADMIN_KEYS; without it those of this machine's settings are tried.",
    ),
]

_TIMEOUT_SECONDS = 10.0


def ask(
    url: str,
    method: str,
    path: str,
    *,
    admin_key: str | None = None,
    params: Mapping[str, str] | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The JSON that the gateway answers. Raises `Refused` with what to mend."""

    def asked(key: str | None) -> httpx.Response:
        shown = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        if body is not None:
            shown["content-type"] = "application/json"
        return client.request(method, path, params=params, content=body, headers=shown)

    try:
        # A proxy of the environment is for the world outside.
        with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            answer = asked(admin_key)
            if answer.status_code == httpx.codes.UNAUTHORIZED and admin_key is None:
                known = terminal.settings().admin_keys
                answer = asked(known[0].get_secret_value()) if known else answer
            return _read(answer, url)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise Refused(f"--url: {url} is no address of a gateway, such as {ADDRESS}") from error
    except httpx.HTTPError as error:
        said = str(error) or type(error).__name__
        raise Refused(f"no gateway answers at {url} ({said}); start one with `python -m app serve`") from error


def _read(answer: httpx.Response, url: str) -> Any:
    try:
        document = answer.json()
    except ValueError as error:
        raise Refused(f"what answers at {url} is no Hearth: it sent {answer.status_code}, and no JSON") from error
    if answer.is_success:
        return document
    told = document.get("error") if isinstance(document, dict) else None
    message = told.get("message") if isinstance(told, dict) else f"it answered {answer.status_code}"
    hint = "; give --admin-key" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    raise Refused(f"the gateway at {url} refused: {message}{hint}")
