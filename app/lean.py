"""Imports packages without those of their parts that a gateway has no use for.

Some packages import whatever is installed: a console client, coloured tracebacks, an object-relational mapper. Together
that is a tenth of Hearth's memory, and half a second of its start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def without(*names: str) -> Iterator[None]:
    """What is imported meanwhile finds these modules not installed, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # this is how Python is told so
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def submodules_only(package: str) -> None:
    """Lets modules of the package be imported without all that the package itself imports, unless it has been."""
    spec = None if package in sys.modules else find_spec(package)
    if spec is not None:
        sys.modules[package] = module_from_spec(spec)  # known, and not run
