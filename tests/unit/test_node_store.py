"""Nodes that were added at run time survive restarts, and files that nobody can read do not stop the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.domain import NodeSpec, Price, Role
from app.routing import node_store
from app.routing.node_store import MAX_NODES, NodeStore, StoredNode, StoreFull

KEY = "sk-d41d8cd98f00b204"
A = StoredNode(NodeSpec("http://a:1", name="a:1"))
B = StoredNode(NodeSpec("http://b:2", name="b:2"))
FULL = StoredNode(
    NodeSpec(
        url="https://gpu-box:8000/prefix",
        kind="vllm",
        name="big",
        models=("m1", "m2"),
        api_key=KEY,
        weight=2,
        speed=1.5,
        max_concurrency=4,
        vram_gb=24,
        num_ctx=8192,
        preload=("m1",),
        role=Role.DECODE,
        price=Price(150_000, 600_000, 75_000),
        retries=2,
        health_check=False,
        tls_verify=False,
    ),
    latencies=(0.5, 1.25),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "nodes.json"


def written(path: Path, document: object) -> NodeStore:
    """A store whose file holds this."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return NodeStore(path)


def kept_aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.corrupt-*"))


# To and fro


def test_nodes_come_back_as_they_were(path: Path) -> None:
    NodeStore(path).save([A, FULL, B])
    store = NodeStore(path)

    assert store.load() == [A, FULL, B]
    assert store.warnings == []


def test_a_store_without_a_file_is_empty(path: Path) -> None:
    store = NodeStore(path)

    assert store.load() == []
    assert store.warnings == []
    assert not path.parent.exists()


def test_saving_replaces_what_was_there(path: Path) -> None:
    store = NodeStore(path)
    store.save([A, B])
    store.save([])

    assert NodeStore(path).load() == []


def test_only_the_owner_may_read_the_file(path: Path) -> None:
    """It may hold keys. A copy that others may read is replaced, not written into."""
    store = written(path, {})
    path.chmod(0o644)
    store.save([FULL])

    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_are_kept_only_where_they_were_given(path: Path) -> None:
    store = NodeStore(path)
    store.save([A])
    assert "api_key" not in path.read_text()

    store.save([FULL])
    assert KEY in path.read_text()


def test_only_the_last_latencies_are_kept(path: Path) -> None:
    store = NodeStore(path)
    store.save([StoredNode(A.spec, tuple(float(n) for n in range(40)))])

    assert store.load()[0].latencies == tuple(float(n) for n in range(25, 40))


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere.json")
    NodeStore(path).save([A])

    assert path.is_symlink()
    assert NodeStore(tmp_path / "elsewhere.json").load() == [A]


def test_names_of_declared_nodes_are_not_taken_from_them(path: Path) -> None:
    """LOCAL_NODES may have changed since."""
    store = NodeStore(path)
    store.save([A, FULL])

    assert [node.spec.name for node in store.load(taken=["a:1", "big"])] == ["a:1#2", "gpu-box:8000"]


@pytest.mark.parametrize("name", ["a" * 70, "kücheneck"])
def test_a_host_with_a_name_that_nobody_could_give_comes_back(path: Path, name: str) -> None:
    store = NodeStore(path)
    store.save(
        [StoredNode(NodeSpec(f"http://{name}", name=name)), StoredNode(NodeSpec(f"http://{name}/x", name=f"{name}#2"))]
    )

    assert [node.spec.name for node in store.load()] == [name, f"{name}#2"]


def test_too_much_is_refused_and_the_file_stays(path: Path) -> None:
    store = NodeStore(path)
    store.save([A])
    many = [StoredNode(NodeSpec(f"http://n{number}")) for number in range(MAX_NODES + 1)]

    with pytest.raises(StoreFull):
        store.save(many)
    with pytest.raises(StoreFull):
        store.save([StoredNode(NodeSpec("http://a", models=("m" * 5_000_000,)))])
    assert store.load() == [A]


# Broken off


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_a_write_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    store = NodeStore(path)
    store.save([A])
    monkeypatch.setattr(os, step, fail)

    with pytest.raises(type(error)):
        store.save([A, B])
    assert store.load() == [A]
    assert os.listdir(path.parent) == [path.name]


_KILLED = """
import os, sys
from pathlib import Path
from app.domain import NodeSpec
from app.routing.node_store import NodeStore, StoredNode
setattr(os, sys.argv[2], lambda *_: os._exit(9))
NodeStore(Path(sys.argv[1])).save([StoredNode(NodeSpec("http://new:1"))])
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_process_killed_while_it_writes_leaves_the_old_file(path: Path, step: str) -> None:
    store = NodeStore(path)
    store.save([A])

    assert subprocess.run([sys.executable, "-c", _KILLED, str(path), step], check=False).returncode == 9
    assert store.load() == [A]
    (leftover,) = (found for found in path.parent.iterdir() if found != path)
    os.utime(leftover, (0, 0))
    assert store.load() == [A]
    assert not leftover.exists()


def test_what_another_process_is_writing_stays(path: Path) -> None:
    store = written(path, {})
    busy = path.parent / f".{path.name}.x1.tmp"
    busy.touch()
    store.load()

    assert busy.exists()


def test_a_folder_that_is_not_synced_is_told_of_although_the_file_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(node_store, "_sync_folder", fail)

    with pytest.raises(OSError, match="Input/output"):
        NodeStore(path).save([A])
    assert NodeStore(path).load() == [A]


# Files of others


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"version": 1, "nodes": [{"url": "http://a', "is not valid JSON"),
        ("[" * 9999, "is not valid JSON: too deep"),
        ("[]", "is not a list of nodes"),
        ("null", "is not a list of nodes"),
        ('{"version": 2, "nodes": []}', "is not a list of nodes of this version"),
        ('{"name": "package", "scripts": {}}', "nor LMDeploy's proxy_config.json"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b" " * (4 * 2**20 + 1), "is longer than"),
        ("1" * 5000, "digits"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_kept_aside(path: Path, content: str | bytes, said: str) -> None:
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir()
    path.write_bytes(data)
    store = NodeStore(path)

    assert store.load() == []
    (warning,) = store.warnings
    assert said in warning
    assert str(path) in warning
    assert warning.isprintable()
    (aside,) = kept_aside(path)
    assert aside.read_bytes() == data
    store.save([A])
    assert store.load() == [A]
    assert store.warnings == []


def test_nothing_that_was_kept_aside_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101T000000Z")
    for content in ("one", "two", "three"):
        written(path, content).load()

    assert sorted(aside.read_text() for aside in kept_aside(path)) == ["one", "three", "two"]


def test_a_file_that_cannot_be_read_is_not_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault may pass, and then the nodes are wanted back."""

    def unreadable(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    store = written(path, '{"http://a:1": {}}')
    with monkeypatch.context() as patch:
        patch.setattr(node_store, "_read", unreadable)
        assert store.load() == []
    assert "cannot be read: Permission denied" in store.warnings[0]
    assert kept_aside(path) == []

    store.save([B])

    assert [aside.read_text() for aside in kept_aside(path)] == ['{"http://a:1": {}}']
    assert store.load() == [B]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_let_be(path: Path, make: Any) -> None:
    path.parent.mkdir()
    make(path)
    store = NodeStore(path)

    assert store.load() == []
    assert "cannot be read: not a file" in store.warnings[0]
    with pytest.raises(OSError, match="not a file"):
        store.save([A])
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (5, "node 1: is not an object"),
        ({"name": "x"}, "node 1: has no url"),
        ({"url": "http://x", "wieght": 1}, "node 1: unknown key 'wieght'"),
        ({"url": "http://x", "weight": 0}, "node 1: weight: 0 is not a number above 0"),
        ({"url": f"http://u:{KEY}@x"}, "holds a user name or password"),
        ({"url": "http://x", "api_key": f"{KEY} {KEY}"}, "api_key: the key is not printable"),
    ],
)
def test_a_bad_node_costs_only_itself(path: Path, entry: object, said: str) -> None:
    store = written(path, {"version": 1, "nodes": [entry, {"url": "http://a:1"}]})

    assert store.load() == [A]
    (warning,) = store.warnings
    assert said in warning
    assert warning.endswith("the node is left out")
    assert KEY not in warning


def test_a_file_edited_by_hand_gives_each_url_and_name_once(path: Path) -> None:
    nodes = [
        {"url": "http://a:1", "name": "x"},
        {"url": "http://b:2", "name": "x"},
        {"url": "HTTP://A:1/", "name": "y"},
    ]
    store = written(path, {"version": 1, "nodes": nodes})

    assert [(node.spec.url, node.spec.name) for node in store.load()] == [("http://a:1", "y"), ("http://b:2", "x")]


def test_a_file_with_too_many_nodes_gives_the_first(path: Path) -> None:
    nodes = [{"url": f"http://n{number}"} for number in range(MAX_NODES + 5)]
    store = written(path, {"version": 1, "nodes": nodes})

    assert len(store.load()) == MAX_NODES
    assert "those after the first 1000 are left out" in store.warnings[0]


@pytest.mark.parametrize("latencies", [None, "fast", [True, "1", None, -1, float("nan"), float("inf"), 10**400, 2]])
def test_odd_latencies_cost_no_node(path: Path, latencies: object) -> None:
    store = written(path, {"version": 1, "nodes": [{"url": "http://a:1", "latencies": latencies}]})

    assert store.load()[0].spec == A.spec
    assert set(store.load()[0].latencies) <= {1.0, 2.0}


# LMDeploy's file


@pytest.mark.parametrize("as_text", [True, False], ids=["text", "object"])
def test_lmdeploys_file_is_understood(path: Path, as_text: bool) -> None:
    status: dict[str, Any] = {
        "role": 2,
        "models": ["m1", "l1"],
        "unfinished": 7,
        "latency": [9.0] * 100 + [0.5],
        "speed": 10,
    }
    store = written(path, {"http://10.0.0.5:23333": json.dumps(status) if as_text else status})

    (node,) = store.load()

    assert store.warnings == []
    assert node.spec == NodeSpec(
        "http://10.0.0.5:23333", name="10.0.0.5:23333", models=("m1", "l1"), speed=10, role=Role.PREFILL
    )
    assert node.latencies == (*[9.0] * 14, 0.5)


@pytest.mark.parametrize(
    ("role", "meant"),
    [(1, Role.HYBRID), (2, Role.PREFILL), (3, Role.DECODE), ("Decode", Role.DECODE), ("2", Role.PREFILL)],
)
def test_lmdeploys_roles_are_numbers_or_names(path: Path, role: object, meant: Role) -> None:
    assert written(path, {"http://a:1": {"role": role}}).load()[0].spec.role is meant


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"models": None}, "http://x: models: None is not a list"),
        ({"models": "m"}, "http://x: models: 'm' is not a list"),
        ({"models": [1]}, "http://x: models: 1 is not text"),
        ({"role": 4}, "http://x: role: 4 is not 1 (hybrid), 2 (prefill) or 3 (decode)"),
        ({"role": True}, "http://x: role: True is not"),
        ('{"role": ', "http://x: is not valid JSON"),
        ("[]", "http://x: its status is not an object"),
        (None, "http://x: its status is not an object"),
    ],
)
def test_a_bad_node_of_lmdeploys_costs_only_itself(path: Path, status: object, said: str) -> None:
    """There, a node that had refused to list its models stopped every later start."""
    store = written(path, {"http://x/": status, "http://a:1/": {}})

    assert store.load() == [A]
    assert [said in warning for warning in store.warnings] == [True]


@pytest.mark.parametrize("speed", [0, -1, "fast"])
def test_a_speed_that_is_none_does_not_cost_the_node(path: Path, speed: object) -> None:
    store = written(path, {"http://a:1": {"speed": speed}})

    assert store.load() == [A]
    assert "http://a:1: speed: " in store.warnings[0]


@pytest.mark.parametrize("content", ["", " \n", "{}"])
def test_an_empty_file_of_lmdeploys_has_no_nodes(path: Path, content: str) -> None:
    store = written(path, content)

    assert store.load() == []
    assert store.warnings == []
