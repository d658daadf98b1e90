"""What an operator should know when the gateway starts."""

from __future__ import annotations

from app import __version__
from app.settings import Settings
from app.telemetry.logs import Logger


def announce(settings: Settings, log: Logger) -> None:
    """One line on what starts, and one for each thing that is likely a mistake."""
    scheme = "https" if settings.ssl_certfile else "http"
    log.info(
        "Hearth starts",
        version=__version__,
        url=f"{scheme}://{settings.host}:{settings.port}",
        nodes=[node.name for node in settings.local_node_specs()],
        cloud=[node.name for node in settings.cloud_specs()],
        strategy=settings.lb_strategy,
    )
    for warning in settings.warnings:
        log.warning(warning)
