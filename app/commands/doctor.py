"""`python -m app doctor`: looks at the settings, the nodes, the cloud and this machine, and says what to mend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from app import __version__
from app.commands import terminal
from app.commands.terminal import Refused

if TYPE_CHECKING:
    from app.doctor.findings import Finding

commands = terminal.group("What is wrong with this installation, and how to mend it.")


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "doctor", argv)


@commands.callback(invoke_without_command=True)
def examine(as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a list.")] = False) -> int:
    """Examine settings, nodes, cloud, ledger and machine: no inference, no cost, ten seconds at most.

    The exit status is 0 when nothing is wrong, and 1 else.
    """
    from app.doctor.findings import Level, document

    findings = _findings()
    if as_json:
        print(json.dumps(document(findings, __version__), indent=2))
    else:
        from app.commands.frames import print_findings

        print_findings(findings)
    return int(any(finding.level is Level.WRONG for finding in findings))


def _findings() -> list[Finding]:
    try:
        settings = terminal.settings()
    except Refused as refused:
        from app.doctor.findings import Code, wrong

        remedy = "correct it; .env.example explains every setting. Nothing else is looked at before"
        return [wrong(Code.SETTINGS_WRONG, "settings", refused.message, remedy)]
    from app.doctor.checkup import examine as examine_all

    return asyncio.run(examine_all(settings))
