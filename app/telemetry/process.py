"""The process itself: its memory, processor time, files and garbage. The only module that knows prometheus-client."""

from __future__ import annotations

import gc
import platform
import threading
from collections.abc import Callable, Iterator

from prometheus_client import ProcessCollector

from app import __version__
from app.telemetry.tallies import Family, Followed, Gauge, Labels, Merge

_GAUGES = {
    "hearth_process_resident_memory_bytes": ("Memory that the process holds.", Merge.SUM),
    "hearth_process_virtual_memory_bytes": ("Addresses that the process has asked for.", Merge.SUM),
    "hearth_process_open_fds": ("Files and sockets that the process has open.", Merge.SUM),
    "hearth_process_max_fds": ("How many files and sockets one process may have open.", Merge.MIN),
    "hearth_process_start_time_seconds": ("When the process began, in seconds since 1970.", Merge.MIN),
}
_CPU = "hearth_process_cpu_seconds_total"


class Process:
    """What the kernel and Python say of this process. Nothing of the kernel's where there is no /proc."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(namespace="hearth", registry=None)
        self._read: dict[str, float] = {}
        self._build = (__version__, f"{platform.python_implementation()} {platform.python_version()}")
        self.families: tuple[Family, ...] = (
            Followed(_CPU, "Processor time that the process took.", source=self._fresh(_CPU)),
            *(Gauge(name, text, source=self._last(name), merge=merge) for name, (text, merge) in _GAUGES.items()),
            Gauge("hearth_process_threads", "Python threads.", source=lambda: [((), threading.active_count())]),
            Followed(
                "hearth_gc_collections_total",
                "Garbage collections.",
                "generation",
                source=lambda: [((str(age),), each["collections"]) for age, each in enumerate(gc.get_stats())],
            ),
            Gauge(
                "hearth_build_info",
                "1; the labels say what runs.",
                *("version", "python"),
                source=lambda: [(self._build, 1)],
                merge=Merge.OWN,
            ),
        )

    def _fresh(self, name: str) -> Callable[[], Iterator[tuple[Labels, float]]]:
        def read() -> Iterator[tuple[Labels, float]]:
            self._read = {
                sample.name: sample.value for metric in self._collector.collect() for sample in metric.samples
            }
            return self._last(name)()

        return read

    def _last(self, name: str) -> Callable[[], Iterator[tuple[Labels, float]]]:
        def read() -> Iterator[tuple[Labels, float]]:
            if name in self._read:
                yield (), self._read[name]

        return read
