"""Whoever reads docs/lmdeploy.md may rely on its table of flags and variables."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from app.settings import STRATEGIES, Settings, SettingsError, load_settings

PAGE = (Path(__file__).parents[2] / "docs" / "lmdeploy.md").read_text()
SECTION = PAGE.partition("## Flags and variables")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)`)? ?\|", SECTION, re.MULTILINE)
# Every flag and variable that LMDeploy's proxy has.
OF_LMDEPLOY = {
    "--server-name",
    "--server-port",
    "--serving-strategy",
    "--routing-strategy",
    "--dummy-prefill",
    "--disable-cache-status",
    "--migration-protocol",
    "--link-type",
    "--disable-gdr",
    "--api-keys",
    "--ssl",
    "--log-level",
    "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION",
    "AIOHTTP_TIMEOUT",
    "SSL_KEYFILE",
    "SSL_CERTFILE",
    "UVICORN_LOG_LEVEL",
}


@pytest.fixture(autouse=True)
def _only_what_the_row_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.lower() in Settings.model_fields or name in OF_LMDEPLOY:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for pem in ("cert.pem", "key.pem"):
        (tmp_path / pem).touch()


def loaded(monkeypatch: pytest.MonkeyPatch, written: str) -> Settings:
    """The settings with these flags, or with this variable. Certificate and key come in pairs."""
    with monkeypatch.context() as environment:
        for name, pem in (("SSL_CERTFILE", "cert.pem"), ("SSL_KEYFILE", "key.pem")):
            environment.setenv(name, pem)
        if written.startswith("--"):
            return load_settings(shlex.split(written))
        name, _, value = written.partition("=")
        if name:
            environment.setenv(name, value)
        return load_settings()


def test_the_table_is_complete() -> None:
    assert {re.split("[ =]", row[0])[0] for row in ROWS} >= OF_LMDEPLOY


@pytest.mark.parametrize(("there", "here"), ROWS)
def test_each_flag_and_variable_does_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch, there: str, here: str
) -> None:
    assert loaded(monkeypatch, there).model_dump() == loaded(monkeypatch, here).model_dump()
    assert loaded(monkeypatch, there).api_keys == loaded(monkeypatch, here).api_keys


def test_flags_can_be_given_all_at_once() -> None:
    flags = [row[0] for row in ROWS if row[0].startswith("--") and row[0] != "--ssl"]

    settings = load_settings(shlex.split(" ".join(flags)))

    assert settings.dummy_prefill
    assert settings.port == 8000
    assert len(settings.api_keys) == 2


def test_the_ssl_flag_names_both_variables() -> None:
    with pytest.raises(SettingsError, match="SSL_CERTFILE and SSL_KEYFILE"):
        load_settings(["--ssl"])


def test_every_strategy_is_told_of() -> None:
    assert [strategy for strategy in STRATEGIES if f"`{strategy}`" not in PAGE] == []


def test_the_first_example_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.search(r"```sh\n(.*?)\nlmdeploy", PAGE, re.DOTALL)
    assert command
    words = shlex.split(command[1].replace("$KEY", "k1").replace("\\\n", " "))
    for word in words[: words.index("python")]:
        monkeypatch.setenv(*word.split("=", 1))

    settings = load_settings(words[words.index("serve") + 1 :])

    assert (settings.local_nodes, settings.nodes_open, settings.host) == ((), True, "0.0.0.0")
