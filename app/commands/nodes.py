"""`python -m app nodes`: the nodes of the running gateway, and which of them get no new requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from app.commands import terminal
from app.commands.printable import one_line
from app.commands.running import Gateway, OnlyKey, Url, figure, quoted, the_gateway

_HEADERS = ("node", "tier", "kind", "state", "in flight", "models", "in memory", "reason")
_GIB = 2**30
_SHOWN = 3

Name = Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")]

commands = terminal.group("The nodes of the running gateway.")


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "nodes", argv)


@commands.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    url: Url = None,
    key: OnlyKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show every node and its state."""
    context.obj = (url, key)
    if context.invoked_subcommand is not None:
        return
    nodes = the_gateway(url, key).get("/admin/nodes").get("nodes") or []
    if as_json:
        print(json.dumps({"nodes": nodes}, indent=2))
    elif not nodes:
        print("there is no node: set LOCAL_NODES, or add one at run time")
    else:
        terminal.print_table(_HEADERS, map(_cells, nodes))


@commands.command()
def drain(context: typer.Context, name: Name, url: Url = None, key: OnlyKey = None) -> None:
    """Give a node no new requests; those that run may end."""
    told = _chosen(context, url, key).post(f"/admin/nodes/{quoted(name)}/drain")
    running = int(figure(told, "in_flight"))
    still = f"; {running} request{'s' * (running != 1)} still in flight" if running else ""
    print(f"{one_line(told.get('name', name))} gets no new requests{still}")


@commands.command()
def enable(context: typer.Context, name: Name, url: Url = None, key: OnlyKey = None) -> None:
    """Give a node requests again."""
    told = _chosen(context, url, key).post(f"/admin/nodes/{quoted(name)}/enable")
    print(f"{one_line(told.get('name', name))} gets requests again")


def _chosen(context: typer.Context, url: str | None, key: str | None) -> Gateway:
    """Options may stand before the command and after it."""
    outer_url, outer_key = context.obj or (None, None)
    return the_gateway(url or outer_url, key or outer_key)


def _cells(node: Mapping[str, Any]) -> tuple[object, ...]:
    limit = node.get("max_concurrency")
    in_flight = int(figure(node, "in_flight") + figure(node, "others_in_flight"))
    models = node.get("models")
    return (
        node.get("name", ""),
        node.get("tier", ""),
        node.get("kind") or "?",
        state_of(node),
        f"{in_flight}/{limit}" if limit else in_flight,
        "?" if models is None else len(models),
        "; ".join(_in_memory(node)),
        reason_of(node),
    )


def state_of(node: Mapping[str, Any]) -> str:
    """What matters most of it: whether requests may go there."""
    breaker = node.get("breaker") or {}
    if node.get("draining"):
        return "draining"
    if node.get("state") == "healthy" and breaker.get("state") not in (None, "closed"):
        return f"breaker {str(breaker['state']).replace('_', ' ')}"
    return str(node.get("state", "?"))


def reason_of(node: Mapping[str, Any]) -> str:
    breaker = node.get("breaker") or {}
    busy = figure(node, "busy_seconds")
    said = node.get("reason") or breaker.get("reason") or ""
    return str(said) or (f"busy for {busy:.0f} s" if busy else "")


def _in_memory(node: Mapping[str, Any]) -> Iterator[str]:
    loaded = node.get("loaded") or {}
    for name, facts in list(loaded.items())[:_SHOWN]:
        size = figure(facts or {}, "vram_bytes")
        yield f"{name} {size / _GIB:.1f} GiB" if size else name
    if len(loaded) > _SHOWN:
        yield f"and {len(loaded) - _SHOWN} more"
