"""Where on a node a path lies, given the URL that the operator wrote."""

from __future__ import annotations

from urllib.parse import urlsplit

_V1 = "/v1"


def join(base: str, path: str) -> str:
    """The URL of `path` on the node at `base`.

    People write a node's URL with and without `/v1`, and some providers have another prefix in its place
    (`/v4`, `/v1beta/openai`): an OpenAI path (one that begins with `/v1/`) goes right below such a prefix.
    Other paths (`/api/chat`, `/health`) lie beside `/v1`, not below it.
    """
    base = base.rstrip("/")
    if base.endswith(_V1):
        return base.removesuffix(_V1) + path
    if base.endswith("/api") and path.startswith("/api/"):
        return base.removesuffix("/api") + path
    if path.startswith(_V1 + "/") and urlsplit(base).path:
        return base + path.removeprefix(_V1)
    return base + path
