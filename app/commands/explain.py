"""`python -m app explain`: who would serve a request and why, asked of the gateway that runs. Nothing is sent to a
node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands import terminal
from app.commands.printable import one_line
from app.commands.running import AdminKey, Url, the_gateway
from app.commands.terminal import Refused

_WORD = "word"  # with the blank after it about a token
_PROMPT_TOKENS_MAX = 1_000_000
_SECONDS = 10.0  # the cloud's budgets may be on another machine
_HEADERS = ("turn", "node", "tier", "state", "model", "score", "why")

commands = terminal.group("Who would serve a request, and why not the others. Nothing is sent to any node.")


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "explain", argv)


@commands.callback(invoke_without_command=True)
def show(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model that is asked for.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=_PROMPT_TOKENS_MAX, metavar="N", help="How long the prompt is, about.")
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="The request's body, in place of both.")] = None,
    key: Annotated[str | None, typer.Option(metavar="ID", help="Who asks: the id or name of a key.")] = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="As with X-Hearth-Local-Only: true.")] = False,
    url: Url = None,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show the route, every node with the reason why it is asked or not, and what the cloud may be asked for."""
    body = _body(model, prompt_tokens, file)
    document = the_gateway(url, admin_key, seconds=_SECONDS).post(
        "/admin/explain",
        params=None if key is None else {"key": key},
        body=body,
        headers={"x-hearth-local-only": "true"} if local_only else None,
    )
    if as_json:
        print(json.dumps(document, indent=2))
        return
    _print(_head(document))
    if document["nodes"]:
        print()
        terminal.print_table(_HEADERS, map(_cells, sorted(document["nodes"], key=_turn)))
        print()
    _print(_foot(document))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(one_line(line))


def _body(model: str | None, prompt_tokens: int | None, file: Path | None) -> bytes:
    if file is not None:
        if model is not None or prompt_tokens is not None:
            raise Refused("--file has the whole request: leave out --model and --prompt-tokens")
        try:
            return file.read_bytes()
        except OSError as error:
            raise Refused(f"--file: {file} cannot be read: {error.strerror}") from error
    if model is None:
        raise Refused("give --model NAME, or --file with the body of a request")
    content = " ".join([_WORD] * (prompt_tokens or 1))
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    route, policy = document["route"], document["policy"]
    if route is None:
        return
    flags = [
        *(["local only"] if route["local_only"] else []),
        *(["no cloud"] if not route["cloud_allowed"] else []),
        *([f"num_ctx {route['num_ctx']}"] if route["num_ctx"] else []),
    ]
    local, cloud = route["local"] or "nothing", route["cloud"] or "each target's own model"
    told = f" ({', '.join(flags)})" if flags else ""
    yield f"{document['asked']}: the route {route['name']}{told}; local nodes serve {local}, the cloud {cloud}."
    lots = f"; {policy['lots']}" if policy["lots"] else ""
    yield f"Ordered by {policy['name']}{lots}. At most {document['max_attempts']} are tried."


def _turn(node: Mapping[str, Any]) -> tuple[bool, int]:
    return node["position"] is None, node["position"] or 0


def _cells(node: Mapping[str, Any]) -> tuple[str, ...]:
    score = (node["terms"] or {}).get("score")
    return (
        str(node["position"] or "-"),
        node["name"],
        node["tier"],
        node["state"],
        node["model"] or "-",
        "-" if score is None else f"{score:g}",
        "; ".join(map(_why, (*node["dropped"], *node["remarks"]))) or "ready",
    )


def _why(reason: Mapping[str, Any]) -> str:
    seconds = reason["seconds"]
    return reason["message"] if seconds is None else f"{reason['message']} (for {seconds:g} s)"


def _foot(document: Mapping[str, Any]) -> Iterator[str]:
    for step in document["order"]:
        if step["waits_seconds_at_most"] is not None:
            yield f"All are full: it would wait for a place for {step['waits_seconds_at_most']:g} s at most."
    if document["queue"] is not None and document["queue"]["waits"]:
        yield _queue(document["queue"])
    for pair in document["pairs"]:
        yield f"Pairs come first: {', '.join(pair['prefill'])} with {', '.join(pair['decode'])}."
    cloud = document["cloud"]
    if cloud is not None:
        yield f"The cloud: {'yes, ' if cloud['allowed'] else 'no, '}{cloud['why']}."
        for target in cloud["targets"]:
            yield from _budgets(target)
    if document["error"] is not None:
        error = document["error"]
        yield f"Nobody would be asked; the client is told {error['status']} {error['code']}: {error['message']}"


def _queue(queue: Mapping[str, Any]) -> str:
    ahead = f"{queue['ahead']} ahead of it of {queue['waiting']} that wait, in the class {queue['priority']}"
    expected = queue["expected_seconds"]
    how_long = "nobody knows yet for how long" if expected is None else f"for about {expected:g} s"
    refusal = f"; it would be refused at once ({queue['refusal']})" if queue["refusal"] else ""
    return f"In the queue: {ahead}; {how_long}{refusal}."


def _budgets(target: Mapping[str, Any]) -> Iterator[str]:
    most = target["price_at_most_usd"]
    if most is not None:
        yield f"  {target['node']}: costs ${most:.6f} at most"
    for each in target["budgets"]:
        spent = f"${each['spent_usd']:g} of ${each['limit_usd']:g} is spent or reserved"
        yield f"  {target['node']}: budget of {each['scope']} for a {each['period']}: {spent}"
