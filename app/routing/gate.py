"""May this request leave for the cloud? Every path to a tier above 0 passes here, and nowhere else is it decided."""

from __future__ import annotations

from app.domain import Request
from app.routing.routes import Route


def cloud_refusal(request: Request, route: Route) -> str | None:
    """Why this request must stay local, or None when it may go to the cloud. In doubt it stays."""
    if request.local_only:
        return "the request is local only"
    if route.local_only:
        return f"the route {route.name} is local only"
    if not route.cloud_allowed:
        return f"the route {route.name} has no cloud model"
    return None
