"""Keeps the nodes that were added at run time in a file, so that they survive a restart.

LMDeploy's servers register once, when they start: a gateway that forgot them would not hear of them again. The file
holds a node's API key if it was given one, and is therefore readable by its owner only.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from app import proxy_config
from app.declarations import local_node, named
from app.domain import NodeSpec, Price
from app.routing.registry import LATENCIES
from app.setting_values import from_json, web_url

MAX_NODES = 1000

_VERSION = 1
_MAX_BYTES = 4 * 2**20
_MAX_SECONDS = 1e9
_LEFTOVER_SECONDS = 60.0
_KEPT = (
    *("url", "kind", "name", "models", "api_key", "weight", "speed", "max_concurrency", "vram_gb", "num_ctx", "role"),
    *("preload", "retries", "health_check", "tls_verify", "ca_file", "prefix"),
)
_DEFAULTS = {field.name: field.default for field in fields(NodeSpec)}


class StoreFull(Exception):
    """More than a file may hold: nothing was written."""


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node as it is kept: its description, and how many seconds its last answers took."""

    spec: NodeSpec
    latencies: tuple[float, ...] = ()


class NodeStore:
    """One file of nodes. Reads and writes block: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []  # what `load` met, a line each
        self._lock = Lock()
        self._unread = False

    def load(self, taken: Iterable[str] = ()) -> list[StoredNode]:
        """The nodes as last saved, or those of LMDeploy's file; each URL once, and no name twice nor one of `taken`.

        Never fails: what cannot be understood is kept aside under another name, and `warnings` say so.
        """
        self.warnings = []
        self._unread = False
        try:
            _sweep(self._target())
            return _with_names(self._nodes(_read(self._target())), taken)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._unread = True
            self._warn(f"cannot be read: {error.strerror}; nodes that were added earlier are missing")
        except ValueError as error:
            self._set_aside(str(error))
        return []

    def save(self, nodes: Iterable[StoredNode]) -> None:
        """Replaces the file, which holds either all of the old or all of the new at any moment.

        Raises OSError, or `StoreFull` when there are too many; the old file stays then. Calls must not overlap, or
        the older list may win.
        """
        data = _encoded(list(nodes))
        with self._lock:
            target = self._target()
            if target.exists() and not target.is_file():
                raise OSError(errno.EINVAL, "not a file", str(self.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._unread:
                self._set_aside("could not be read")
                self._unread = False
            _replace(target, data)

    def _target(self) -> Path:
        """The file itself where the path is a link, which must stay one."""
        return Path(os.path.realpath(self.path))

    def _nodes(self, text: str) -> list[StoredNode]:
        found: dict[str, StoredNode] = {}
        # LMDeploy takes an empty file for one without nodes.
        for where, read in self._readers(from_json(text) if text.strip() else {}):
            try:
                node = read()
            except ValueError as error:
                self._warn(f"{where}: {error}; the node is left out")
            else:
                found[node.spec.url] = node
        if len(found) > MAX_NODES:
            self._warn(f"holds {len(found)} nodes; those after the first {MAX_NODES} are left out")
        return list(found.values())[:MAX_NODES]

    def _readers(self, document: object) -> list[tuple[str, Callable[[], StoredNode]]]:
        """Where each node stands, and how to read it. Raises ValueError for a document that holds no nodes."""
        if not isinstance(document, Mapping):
            raise ValueError("is not a list of nodes")
        nodes = document.get("nodes")
        if isinstance(nodes, list) and document.get("version") == _VERSION:
            return [(f"node {place}", partial(read_node, entry)) for place, entry in enumerate(nodes, 1)]
        if proxy_config.recognised(document):
            places = ((_place(place, url), url) for place, url in enumerate(document, 1))
            return [(where, partial(self._foreign, where, url, document[url])) for where, url in places]
        raise ValueError("is not a list of nodes of this version of Hearth, nor LMDeploy's proxy_config.json")

    def _foreign(self, where: str, url: str, status: object) -> StoredNode:
        return read_node(proxy_config.node_entry(url, status, lambda note: self._warn(f"{where}: {note}")))

    def _set_aside(self, why: str) -> None:
        target = self._target()
        aside = _free(f"{target}.corrupt-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        try:
            os.rename(target, aside)
        except OSError as error:
            self._warn(f"{why}, and cannot be renamed: {error.strerror}; nodes that were added earlier are missing")
        else:
            self._warn(f"{why}; it is kept as {aside}, and nodes that were added earlier are missing")

    def _warn(self, message: str) -> None:
        self.warnings.append(f"NODES_FILE: {self.path} {message}")


def _read(path: Path) -> str:
    """Raises OSError, and ValueError for what is too long or no text."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a file")
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"is longer than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def read_node(entry: object) -> StoredNode:
    """Reads a node under the rules of LOCAL_NODES."""
    if not isinstance(entry, Mapping):
        raise ValueError("is not an object")
    latencies = entry.get("latencies")
    spec = local_node({key: value for key, value in entry.items() if key != "latencies"})
    return StoredNode(spec, _latencies(latencies))


def _latencies(value: object) -> tuple[float, ...]:
    """The last few numbers that are times. They are of use, but not worth losing a node for."""
    numbers = value if isinstance(value, list) else []
    times = [float(each) for each in numbers if isinstance(each, (int, float)) and 0 <= each < _MAX_SECONDS]
    return tuple(times[-LATENCIES:])


def _with_names(nodes: list[StoredNode], taken: Iterable[str]) -> list[StoredNode]:
    """The first keeps a name that was given twice; the others, and those that are `taken`, get one as if nameless."""
    declared = frozenset(taken)
    used = set(declared)
    specs = []
    for node in nodes:
        specs.append(replace(node.spec, name="") if node.spec.name in used else node.spec)
        used.add(node.spec.name)
    return [replace(node, spec=spec) for node, spec in zip(nodes, named(specs, declared), strict=True)]


def _place(place: int, url: str) -> str:
    """How a warning names the node: by its URL, unless that is none and may hold anything."""
    try:
        return web_url(url)
    except ValueError:
        return f"node {place}"


def _encoded(nodes: list[StoredNode]) -> bytes:
    document = {"version": _VERSION, "nodes": [node_entry(node) for node in nodes]}
    data = json.dumps(document, indent=1).encode() + b"\n"
    if len(nodes) > MAX_NODES or len(data) > _MAX_BYTES:
        raise StoreFull(f"{len(nodes)} nodes of {len(data)} bytes; at most {MAX_NODES} of {_MAX_BYTES} can be kept")
    return data


def node_entry(node: StoredNode) -> dict[str, Any]:
    """What differs from the defaults, so that a default that changes holds for old nodes too."""
    given = {name: getattr(node.spec, name) for name in _KEPT}
    if node.spec.name.partition("#")[0] == urlsplit(node.spec.url).netloc:
        del given["name"]  # it was not given, and another may be free next time
    entry = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    if node.spec.price is not None:
        entry["price"] = _price_entry(node.spec.price)
    if node.latencies:
        entry["latencies"] = [round(seconds, 6) for seconds in node.latencies[-LATENCIES:]]
    return entry


def _price_entry(price: Price) -> dict[str, float]:
    """In dollars per million tokens, as operators write it."""
    return {name: amount / 1_000_000 for name, amount in price._asdict().items() if amount is not None}


def _replace(target: Path, data: bytes) -> None:
    """Writes beside the file, and takes its place only when all of it is on the disk."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)  # mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the new name last too. Windows cannot, and need not."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(target: Path) -> None:
    """Removes what a process left that was killed while it wrote, but not what another one may be writing now."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()


def _free(path: str) -> str:
    name, number = path, 1
    while os.path.lexists(name):
        number += 1
        name = f"{path}-{number}"
    return name
