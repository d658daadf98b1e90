"""httpx, without its client for the command line, which imports rich and pygments."""

from __future__ import annotations

from app.lean import without

with without("httpx._main"):
    import httpx

__all__ = ["httpx"]
