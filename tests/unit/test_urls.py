"""Where a path lies on a node, however its URL was written."""

from __future__ import annotations

import pytest

from app.providers.urls import join

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("base", "path", "whole"),
    [
        ("http://n:8000", CHAT, "http://n:8000/v1/chat/completions"),
        ("http://n:8000/", CHAT, "http://n:8000/v1/chat/completions"),
        ("http://n:8000/v1", CHAT, "http://n:8000/v1/chat/completions"),
        ("http://n:8000/v1/", CHAT, "http://n:8000/v1/chat/completions"),
        ("https://c/api/paas/v4", CHAT, "https://c/api/paas/v4/chat/completions"),
        ("https://c/v1beta/openai/", CHAT, "https://c/v1beta/openai/chat/completions"),
        ("https://c/openai/v1", CHAT, "https://c/openai/v1/chat/completions"),
        ("https://c/openai/v1", "/v1/models", "https://c/openai/v1/models"),
        ("http://n:8000/v1", "/health", "http://n:8000/health"),
        ("http://n/engine", "/health", "http://n/engine/health"),
        ("http://n:11434/v1", "/api/chat", "http://n:11434/api/chat"),
        ("http://n:11434/api", "/api/chat", "http://n:11434/api/chat"),
        ("http://[::1]:11434", "/api/chat", "http://[::1]:11434/api/chat"),
    ],
)
def test_join(base: str, path: str, whole: str) -> None:
    assert join(base, path) == whole
