"""What operators may write, and what they are told when it is wrong."""

from __future__ import annotations

import json
import os
import re
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app import networks
from app import setting_values as values
from app.declarations import ApiKey
from app.domain import Budget, NodeSpec, Period, Price, Priority, QueueRules, Rate, Role
from app.routing.route_spec import RouteSpec
from app.settings import Settings, SettingsError, load_settings

EXAMPLE = Path(__file__).parents[2] / ".env.example"
KEY = "sk-d41d8cd98f00b204"
HEART_BEAT = "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the machine's variables nor a `.env` in its working directory reach a test."""
    for name in list(os.environ):
        if name.lower() in Settings.model_fields or name in ("AIOHTTP_TIMEOUT", HEART_BEAT):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal(*argv: str) -> str:
    """What the operator is told; always one line."""
    with pytest.raises(SettingsError) as caught:
        load_settings(argv)
    assert "\n" not in caught.value.message
    return caught.value.message


def nodes(value: object) -> tuple[NodeSpec, ...]:
    return load_settings(["--local-nodes", value if isinstance(value, str) else json.dumps(value)]).local_node_specs()


# Where settings come from


def test_nothing_set_gives_a_local_ollama_and_no_cloud() -> None:
    settings = load_settings()

    assert settings.local_node_specs() == (NodeSpec("http://localhost:11434", name="localhost:11434"),)
    assert settings.cloud_specs() == ()
    assert settings.routes_config() == ()
    assert settings.warnings == []


def test_flags_win_over_environment_over_dotenv_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hearth.yaml").write_text("port: 1\nhost: 127.0.0.1\nmax_attempts: 1\nidle_timeout: 1\n")
    (tmp_path / ".env").write_text("CONFIG_FILE=hearth.yaml\nPORT=2\nMAX_ATTEMPTS=2\nIDLE_TIMEOUT=2\n")
    monkeypatch.setenv("PORT", "3")
    monkeypatch.setenv("MAX_ATTEMPTS", "3")

    settings = load_settings(["--port", "4"])

    assert (settings.port, settings.max_attempts, settings.idle_timeout, settings.host) == (4, 3, 2, "127.0.0.1")


def test_flags_take_both_forms() -> None:
    settings = load_settings(["--lb-strategy=weighted", "--port", "9000"])

    assert (settings.lb_strategy, settings.port) == ("weighted", 9000)


def test_every_setting_has_a_flag() -> None:
    for name in Settings.model_fields:
        load_settings([f"--{name.replace('_', '-')}="])


def test_unknown_flags_are_refused_with_the_close_name() -> None:
    assert refusal("--prot", "1") == "'--prot' is not a flag; did you mean '--port'?"
    assert "not a flag" in refusal("serve")
    assert refusal("--port") == "--port needs a value"
    assert refusal("--port", "--host") == "--port needs a value"


def test_unknown_arguments_of_the_class_are_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean 'port'"):
        Settings(prot=1)


def test_an_empty_value_is_the_default_and_hides_lower_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CLOUD_API_KEY= python -m app` must turn the cloud off, whatever `.env` says."""
    (tmp_path / ".env").write_text(f"CLOUD_API_KEY={KEY}\n")
    assert load_settings().cloud_specs()
    monkeypatch.setenv("CLOUD_API_KEY", "")
    monkeypatch.setenv("PORT", " ")

    assert load_settings().cloud_specs() == ()
    assert load_settings().port == 8000


def test_zero_is_a_value_and_not_the_default() -> None:
    settings = load_settings(["--breaker-fail-max", "0", "--port", "0"])

    assert (settings.breaker_fail_max, settings.port) == (0, 0)


def test_quotes_that_a_tool_left_on_are_taken_off() -> None:
    """`docker run --env-file` passes quotes on."""
    assert load_settings(["--lb-strategy", '"random"']).lb_strategy == "random"
    assert len(nodes("'[\"http://a:1\"]'")) == 1


def test_yaml_takes_native_values_in_any_spelling(tmp_path: Path) -> None:
    (tmp_path / "hearth.yaml").write_text(
        """
        LOCAL-NODES:
          - http://a:1
          - {url: http://b:2, weight: 2.5, models: [m1, m2]}
        model_map: {gpt-4o: {local: llama3.2, cloud: false}}
        api_keys: [one-key, two-key]
        request_timeout: 10m
        PORT: 9000
        cloud_model:
        """
    )
    settings = load_settings(["--config-file", "hearth.yaml"])

    assert [node.weight for node in settings.local_node_specs()] == [1, 2.5]
    assert settings.routes_config() == (RouteSpec("gpt-4o", local="llama3.2", cloud_off=True),)
    assert len(settings.api_keys) == 2
    assert (settings.request_timeout, settings.port, settings.cloud_model) == (600, 9000, None)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("lb_stratgy: random", "did you mean 'lb_strategy'"),
        ("a: 1\nb: 2", "a in hearth.yaml is not a setting (and 1 more)"),
        ("port: 1\nPORT: 2", "twice"),
        ("- port", "is not a list of `name: value`"),
        ("port: [", "is not valid YAML at line"),
        ("config_file: other.yaml", "cannot name another file"),
        ("port: 70000", "PORT: 70000 is not a whole number from 0 to 65535"),
        ("api_keys: [12345678]", "API_KEYS: key 1: the key is not text; put it in quotes"),
    ],
)
def test_faults_in_the_file_are_refused(tmp_path: Path, document: str, said: str) -> None:
    (tmp_path / "hearth.yaml").write_text(document)

    assert said in refusal("--config-file", "hearth.yaml")


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "nowhere.yaml' cannot be read: No such file" in refusal("--config-file", "nowhere.yaml")
    assert "not valid YAML" in refusal("--config-file", "binary.yaml")

    (tmp_path / ".env").write_bytes(b"PORT=\xff")
    assert refusal() == ".env cannot be read: it is not UTF-8 text"


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "hearth.yaml").write_text("# later\n")

    assert load_settings(["--config-file", "hearth.yaml"]).port == 8000


def test_misspelt_names_in_dotenv_are_warned_of_and_others_let_be(tmp_path: Path) -> None:
    """Other programs' variables may stand in the same file."""
    (tmp_path / ".env").write_text("LOCAL_NODE=http://a:1\nPOSTGRES_PASSWORD=x\n")

    assert load_settings().warnings == [".env: LOCAL_NODE is not a setting; did you mean 'LOCAL_NODES'?"]


def test_a_dotenv_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Windows editors write one."""
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfPORT=9000\n")

    assert load_settings().port == 9000


def test_unknown_environment_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_NODE", "http://a:1")

    assert load_settings().warnings == []


# Faults and secrets


def test_several_faults_are_one_line() -> None:
    assert refusal("--port", "x", "--max-attempts", "0", "--log-level", "loud").endswith("(and 2 more)")


@pytest.mark.parametrize(
    "argv",
    [
        ["--local-nodes", f'[{{"url": "http://a:1", "api_key": "{KEY}", "weight": 0}}]'],
        ["--local-nodes", f'[{{"url": "http://a:1", "api_key": "{KEY}"'],
        ["--local-nodes", f'{{"url": "http://a:1", "api_key": ["{KEY}"]}}'],
        ["--local-nodes", f"http://user:{KEY}@a:1"],
        ["--local-nodes", f"http://user:{KEY}@a:x"],
        ["--local-nodes", f"ftp://{KEY}@a"],
        ["--local-nodes", f"http://a:1/?key={KEY}"],
        ["--cloud-endpoint", f"http://a:1/#{KEY}"],
        ["--cloud-api-key", f"{KEY} {KEY}"],
        ["--cloud-api-key", f"{KEY}é"],
        ["--api-keys", f'["{KEY} "x]'],
        ["--api-keys", f'["{KEY}", 1]'],
        ["--api-keys", f'[{{"{KEY}": 2}}]'],
        ["--api-keys", f'[{{"key": "{KEY}", "weight": 0}}]'],
        ["--cloud-providers", f'[{{"endpoint": "https://a", "api_key": "{KEY}", "api_key_env": "{KEY}"}}]'],
        ["--cloud-providers", f'[{{"endpoint": "https://a", "api_key": "{KEY}", "modell": 1}}]'],
        ["--database-url", f"user:{KEY}"],
        ["--database-url", f"mysql://user:{KEY}@db/x"],
        ["--redis-url", f"http://:{KEY}@r"],
        ["--database-url", "off", "--cloud-api-key", KEY, "--cloud-budget-usd", "5"],
        ["--redis-url", f"redis://:{KEY}@r", "--workers", "0"],
    ],
)
def test_no_message_shows_a_secret(argv: list[str]) -> None:
    assert KEY not in refusal(*argv)


def test_settings_do_not_show_secrets() -> None:
    provider = {"endpoint": "https://a", "api_key": KEY}
    node = {"url": "http://a:1", "api_key": KEY}
    settings = Settings(
        local_nodes=[node],
        cloud_api_key=KEY,
        cloud_providers=[provider],
        api_keys=[KEY],
        admin_keys=KEY,
        database_url=f"postgresql://u:{KEY}@db/x",
        redis_url=f"redis://:{KEY}@r",
        _env_file=None,
    )

    assert KEY not in f"{settings!r} {settings!s} {settings.cloud_specs()!r} {settings.local_node_specs()!r}"
    assert KEY not in settings.model_dump_json()


# Single values


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--port", "65536", "PORT: '65536' is not a whole number from 0 to 65535"),
        ("--port", "-1", "PORT: '-1' is"),
        ("--port", "1.5", "PORT: '1.5' is"),
        ("--workers", "0", "WORKERS: '0' is not a whole number of at least 1"),
        (
            "--workers",
            "2",
            "WORKERS: 2 workers would not share in-flight counts, breakers, limits and budgets, as REDIS_",
        ),
        ("--max-attempts", "0", "MAX_ATTEMPTS: '0' is not a whole number of at least 1; 1 tries once and never again"),
        ("--breaker-fail-max", "-1", "BREAKER_FAIL_MAX: '-1' is not a whole number of at least 0"),
        ("--request-timeout", "0", "REQUEST_TIMEOUT: '0' is not a time above 0; write seconds (90) or"),
        ("--idle-timeout", "soon", "IDLE_TIMEOUT: 'soon' is not a time"),
        ("--idle-timeout", "inf", "IDLE_TIMEOUT: 'inf' is not a time"),
        ("--health-check-interval", "-5s", "HEALTH_CHECK_INTERVAL: '-5s' is not a time"),
        ("--max-body-mb", "0", "MAX_BODY_MB: '0' is not a number above 0"),
        ("--cloud-budget-usd", "-1", "CLOUD_BUDGET_USD: '-1' is not a number of at least 0"),
        ("--cloud-budget-usd", "2e9", "CLOUD_BUDGET_USD: '2e9' is more dollars than 1000000000"),
        ("--cloud-max-tokens", "0", "CLOUD_MAX_TOKENS: '0' is not a whole number of at least 1"),
        ("--budget-warn-at", "0.5,80", "BUDGET_WARN_AT: '80' is not a share such as 0.8"),
        ("--budget-warn-at", "0", "BUDGET_WARN_AT: '0' is not a number above 0"),
        ("--requests-per-minute", "0", "REQUESTS_PER_MINUTE: '0' is not a whole number of at least 1; leave it out"),
        ("--tokens-per-minute", "many", "TOKENS_PER_MINUTE: 'many' is not a whole number"),
        ("--sharing-failure", "open", "SHARING_FAILURE: 'open' is not one of closed, local"),
        (
            "--database-url",
            "data/hearth.db",
            "DATABASE_URL: is not a URL such as sqlite:///data/hearth.db or postgresql:",
        ),
        ("--cloud-budget-period", "year", "CLOUD_BUDGET_PERIOD: 'year' is not one of month, week, day"),
        ("--lb-strategy", "least_connection", "min_observed_latency; did you mean 'least_connections'?"),
        ("--log-level", "loud", "LOG_LEVEL: 'loud' is not one of DEBUG, INFO, WARNING, ERROR"),
        ("--log-format", "xml", "LOG_FORMAT: 'xml' is not one of auto, json, console"),
        ("--host", "http://0.0.0.0", "HOST: 'http://0.0.0.0' is not an address to listen on"),
        ("--host", "0.0.0.0:8000", "without a port"),
        ("--cors-origins", "chat.example.org", "CORS_ORIGINS: 'chat.example.org' is not an origin"),
        ("--cors-origins", "https://*.example.org", "is not an origin"),
        ("--api-keys", "good-key,changeme", "API_KEYS: key 2: the key is a placeholder"),
        ("--api-keys", "your-api-key", "placeholder"),
        ("--cloud-api-key", "sk-...", "CLOUD_API_KEY: the key is a placeholder"),
        ("--ssl-certfile", "nowhere.pem", "SSL_CERTFILE: 'nowhere.pem' is no file that exists"),
        ("--cloud-endpoint", "api.openai.com", "such as http://api.openai.com"),
        ("--redis-url", "localhost", "REDIS_URL: is not a URL such as redis://localhost:6379"),
        ("--nodes-open=maybe", None, "NODES_OPEN: 'maybe' is not true or false"),
        ("--ssl=maybe", None, "--ssl: 'maybe' is not true or false"),
        ("--nodes-networks", "10.0.0.0/8,lan", "NODES_NETWORKS: 'lan' is not a network such as 10.0.0.0/8"),
        ("--nodes-networks", "10.1.2.3/8", "within a network; write 10.0.0.0/8, or the address alone"),
        ("--nodes-networks", "169.254.0.0/16", "'169.254.0.0/16' is never allowed"),
        ("--nodes-file", ".", "NODES_FILE: '.' is a folder; name a file in it"),
        ("--serving-strategy", "Serve", "SERVING_STRATEGY: 'Serve' is not one of Hybrid, DistServe"),
        ("--migration-protocol", "UDP", "MIGRATION_PROTOCOL: 'UDP' is not one of RDMA, NVLINK, TCP"),
        ("--link-type", "ethernet", "LINK_TYPE: 'ethernet' is not one of RoCE, IB"),
        (
            "--otel-exporter-otlp-endpoint",
            "localhost:4318",
            "OTEL_EXPORTER_OTLP_ENDPOINT: 'localhost:4318' is not an http",
        ),
        (
            "--otel-exporter-otlp-headers",
            "x-api-key",
            "OTEL_EXPORTER_OTLP_HEADERS: is not a list such as x-api-key=KEY",
        ),
        ("--otel-exporter-otlp-headers", "x-api-key=,a=b", "OTEL_EXPORTER_OTLP_HEADERS: is not a list"),
        ("--otel-traces-sampler", "sometimes", "OTEL_TRACES_SAMPLER: 'sometimes' is not one of parentbased_always_on"),
        ("--otel-traces-sampler-arg", "25", "OTEL_TRACES_SAMPLER_ARG: '25' is not a share"),
    ],
)
def test_bad_values_are_refused(flag: str, value: str | None, said: str) -> None:
    assert said in (refusal(flag) if value is None else refusal(flag, value))


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        (".5", 0.5),
        ("10m", 600),
        ("30s", 30),
        ("500ms", 0.5),
        ("2 H", 7200),
        (90, 90),
        (0.1, 0.1),
    ],
)
def test_times_have_units(written: object, seconds: float) -> None:
    assert values.seconds(written) == seconds


@given(st.text())
@example("1" * 400)
@example("9" * 5000)
def test_any_text_is_a_time_or_a_complaint_on_one_line(written: str) -> None:
    complaint = ""
    try:
        assert values.seconds(written) > 0
    except ValueError as error:
        complaint = str(error)

    assert complaint.isprintable()


@pytest.mark.parametrize("written", ["true", "TRUE", "1", "yes", "On", True, 1])
def test_yes_has_many_forms(written: object) -> None:
    assert values.flag(written) is True


@pytest.mark.parametrize("written", ["false", "False", "0", "no", "OFF", False, 0])
def test_no_has_many_forms(written: object) -> None:
    assert values.flag(written) is False


@pytest.mark.parametrize("written", ["", "maybe", 2, None, []])
def test_neither_yes_nor_no_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="true or false"):
        values.flag(written)


@pytest.mark.parametrize("written", [True, False, None, [], {}, "nan", "inf", float("nan"), 10**400])
def test_what_is_no_number_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        values.number(written)


def test_choices_are_taken_in_any_spelling() -> None:
    settings = load_settings(["--lb-strategy", "Round-Robin", "--log-level", "warn", "--log-format", "JSON"])

    assert (settings.lb_strategy, settings.log_level, settings.log_format) == ("round_robin", "WARNING", "json")


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        ([], "local"),
        (["--continuation", "ALL"], "all"),
        (["--continuation", "off"], "off"),
        (["--config-file", "off.yaml"], "off"),
    ],
)
def test_who_goes_on_with_a_stream(tmp_path: Path, argv: list[str], where: str) -> None:
    """YAML reads `off` as false."""
    (tmp_path / "off.yaml").write_text("continuation: off\n")

    assert load_settings(argv).continuation == where
    assert refusal("--continuation", "cloud") == "CONTINUATION: 'cloud' is not one of off, local, all"


@pytest.mark.parametrize(("written", "prefix"), [("Partial", "partial"), ("off", "off"), (False, "off"), (None, None)])
def test_a_node_may_be_told_how_it_goes_on(written: object, prefix: str | None) -> None:
    assert nodes([{"url": "http://a:1", "prefix": written}])[0].prefix == prefix


def test_keys_come_with_commas_or_as_json_each_once() -> None:
    settings = load_settings(["--api-keys", "a1, b2,,a1,", "--admin-keys", '["c3", ""]'])

    assert [key.secret for key in settings.api_keys] == ["a1", "b2"]
    assert [key.get_secret_value() for key in settings.admin_keys] == ["c3"]


def test_a_key_may_say_what_it_means_where_its_requests_wait() -> None:
    written = '["plain", {"key": "heavy", "weight": 3, "priority": "Low"}, {"key": "plain", "weight": 2}]'

    assert load_settings(["--api-keys", written]).api_keys == (
        ApiKey("plain", weight=2),
        ApiKey("heavy", weight=3, priority=Priority.LOW),
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('[{"weight": 2}]', "API_KEYS: key 1: has no key"),
        ('[{"key": "a", "weight": 0}]', "API_KEYS: key 1: weight: 0 is not a whole number from 1 to 1000"),
        ('["b", {"key": "a", "priority": "top"}]', "API_KEYS: key 2: priority: 'top' is not one of high, normal, low"),
        ('[{"key": "a", "wieght": 2}]', "API_KEYS: key 1: has something else than key, weight, priority"),
    ],
)
def test_faults_in_what_a_key_says_are_refused(written: str, said: str) -> None:
    assert said in refusal("--api-keys", written)


@pytest.mark.parametrize(("written", "seconds"), [("0", 0), ("off", 0), ("15", 15), ("500ms", 0.5), ("1m", 60)])
def test_streams_are_kept_alive_after_a_time_or_never(written: str, seconds: float) -> None:
    assert load_settings(["--keep-alive-after", written]).keep_alive_after == seconds


def test_a_time_below_zero_is_no_never() -> None:
    assert "KEEP_ALIVE_AFTER: '-1' is not a time above 0" in refusal("--keep-alive-after", "-1")


def test_requests_wait_as_long_as_for_a_first_token_unless_told_otherwise() -> None:
    assert load_settings(["--first-token-timeout", "7"]).queue_seconds() == 7
    assert load_settings(["--first-token-timeout", "7", "--queue-timeout", "3"]).queue_seconds() == 3


def test_a_name_says_how_its_requests_wait() -> None:
    written = '{"a": {"queue_size": 5, "queue_timeout": "30s", "priority": "high", "keep_alive_after": 0}, "b": "c"}'
    own, plain = load_settings(["--model-map", written]).routes_config()

    assert own.queue == QueueRules(5, 30.0, Priority.HIGH, 0.0)
    assert plain.queue == QueueRules()


def test_origins_are_compared_as_browsers_send_them() -> None:
    written = "https://Chat.Example.org/,http://localhost:3000,app://obsidian.md,null,*"

    assert load_settings(["--cors-origins", written]).cors_origins == (
        "https://chat.example.org",
        "http://localhost:3000",
        "app://obsidian.md",
        "null",
        "*",
    )


def test_an_ipv6_host_may_have_brackets() -> None:
    assert load_settings(["--host", "[::1]"]).host == "::1"
    assert load_settings(["--host", "::"]).host == "::"


def test_tls_needs_certificate_and_key(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    (tmp_path / "key.pem").write_text("x")

    assert refusal("--ssl-certfile", "cert.pem").startswith("SSL_KEYFILE: not set")
    assert refusal("--ssl-keyfile", "key.pem").startswith("SSL_CERTFILE: not set")
    settings = load_settings(["--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem"])
    assert (settings.ssl_certfile, settings.ssl_keyfile) == (Path("cert.pem"), Path("key.pem"))


# Nodes that are added at run time


def test_nodes_may_join_from_the_own_networks_only() -> None:
    assert load_settings().nodes_networks == networks.DEFAULT
    assert load_settings(["--nodes-networks", "192.168.7.0/24, 2001:db8::7"]).nodes_networks == (
        IPv4Network("192.168.7.0/24"),
        IPv6Network("2001:db8::7/128"),
    )
    assert load_settings(["--nodes-networks", "[]"]).nodes_networks == ()


@pytest.mark.parametrize("off", [["--nodes-file", "Off"], ["--disable-cache-status"], ["--config-file", "off.yaml"]])
def test_added_nodes_are_kept_unless_that_is_off(tmp_path: Path, off: list[str]) -> None:
    """YAML reads `off` as false."""
    (tmp_path / "off.yaml").write_text("nodes_file: off\n")

    assert load_settings().nodes_path() == Path("data/nodes.json")
    assert load_settings(["--nodes-file", "~/nodes.json"]).nodes_path() == Path.home() / "nodes.json"
    assert load_settings(off).nodes_path() is None


def test_letting_everybody_add_nodes_is_warned_of() -> None:
    argv = ["--nodes-open", "--api-keys", "k1"]

    assert "may add nodes" in load_settings([*argv, "--host", "0.0.0.0"]).warnings[0]
    assert load_settings(argv).warnings == []


# What `lmdeploy serve proxy` takes


def test_switches_need_no_value_but_may_have_one() -> None:
    settings = load_settings(["--dummy-prefill", "--nodes-open", "no", "--disable-gdr=false", "--disable-cache-status"])

    assert (settings.dummy_prefill, settings.nodes_open, settings.disable_gdr) == (True, False, False)
    assert settings.disable_cache_status


def test_lmdeploys_flags_set_what_they_mean_here() -> None:
    argv = "--server-name 0.0.0.0 --server-port 9000 --routing-strategy random --serving-strategy distserve"
    settings = load_settings([*argv.split(), "--migration-protocol", "nvlink", "--link-type", "ib", "--api-keys", "k1"])

    assert (settings.host, settings.port, settings.lb_strategy) == ("0.0.0.0", 9000, "random")
    assert (settings.serving_strategy, settings.migration_protocol, settings.link_type) == ("DistServe", "NVLINK", "IB")


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (["--api-keys"], 0),
        (["--api-keys", "--disable-gdr"], 0),
        (["--api-keys", "k1", "--disable-gdr"], 1),
        (["--api-keys", "k1", "k2", "", "k3", "--port", "1"], 3),
        (["--api-keys", "k1,k2", "k3"], 3),
        (["--api-keys=k1", "k2"], 2),
        (["--api-keys", '["k1", "k2"]'], 2),
    ],
)
def test_several_keys_stand_after_one_flag(argv: list[str], count: int) -> None:
    assert len(load_settings(argv).api_keys) == count


@pytest.mark.parametrize(
    ("written", "level"), [("CRITICAL", "ERROR"), ("FATAL", "ERROR"), ("WARN", "WARNING"), ("NOTSET", "DEBUG")]
)
def test_pythons_other_log_levels_have_a_neighbour_here(written: str, level: str) -> None:
    assert load_settings(["--log-level", written]).log_level == level


def test_the_ssl_flag_demands_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pem").write_text("x")
    assert refusal("--ssl") == "--ssl: SSL_CERTFILE and SSL_KEYFILE are not set; TLS needs both"
    assert load_settings(["--ssl", "no"]).ssl_certfile is None
    monkeypatch.setenv("SSL_CERTFILE", "pem")
    monkeypatch.setenv("SSL_KEYFILE", "pem")

    assert load_settings(["--ssl"]).ssl_certfile == Path("pem")


@pytest.mark.parametrize("in_file", [True, False], ids=["dotenv", "environment"])
def test_lmdeploys_variables_count_where_ours_are_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    variables = {HEART_BEAT: "90", "AIOHTTP_TIMEOUT": "700", "UVICORN_LOG_LEVEL": "debug"}
    if in_file:
        (tmp_path / ".env").write_text("\n".join(f"{name}={value}" for name, value in variables.items()))
    else:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    (tmp_path / "hearth.yaml").write_text("request_timeout: 900")

    settings = load_settings()
    ours = load_settings(["--health-check-interval", "7", "--config-file", "hearth.yaml"])

    assert (settings.health_check_interval, settings.request_timeout, settings.warnings) == (90, 700, [])
    assert (ours.health_check_interval, ours.request_timeout) == (7, 900)


def test_lmdeploys_variables_are_checked_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOHTTP_TIMEOUT", "0")  # there: no limit
    monkeypatch.setenv(HEART_BEAT, "often")

    assert refusal().startswith(f"{HEART_BEAT}: 'often' is not a time")
    assert load_settings(["--health-check-interval", "5"]).request_timeout == 1800


# Local nodes


@pytest.mark.parametrize(
    "written", ["http://a:1,http://b:2", "http://a:1 , http://b:2,", '["http://a:1", "http://b:2"]']
)
def test_nodes_come_with_commas_or_as_json(written: str) -> None:
    assert [(node.name, node.url) for node in nodes(written)] == [("a:1", "http://a:1"), ("b:2", "http://b:2")]


def test_nodes_may_be_given_to_the_class() -> None:
    settings = Settings(local_nodes="http://a:1,http://b:2", _env_file=None)

    assert [node.name for node in settings.local_node_specs()] == ["a:1", "b:2"]


@pytest.mark.parametrize("written", ["[]", " [ ] "])
def test_no_nodes_at_all_are_allowed(written: str) -> None:
    assert nodes(written) == ()


def test_a_node_has_all_its_properties() -> None:
    written = {
        "url": "HTTPS://GPU-Box:8000/prefix/",
        "kind": "vLLM",
        "name": "big",
        "models": ["m1", "m2"],
        "api_key": KEY,
        "weight": 2,
        "speed": "1.5",
        "max_concurrency": 4,
        "vram_gb": 24,
        "num_ctx": 8192,
        "preload": "m1,m2",
        "role": "decode",
        "price": {"input": 0.1, "output": "0.4", "cached_input": 0.05},
        "retries": 2,
        "health_check": "no",
        "tls_verify": False,
    }

    assert nodes([written]) == (
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
            preload=("m1", "m2"),
            role=Role.DECODE,
            price=Price(100_000, 400_000, 50_000),
            retries=2,
            health_check=False,
            tls_verify=False,
        ),
    )


@pytest.mark.parametrize(
    ("written", "price"),
    [
        (0.1, Price(100_000, 100_000)),
        (0, Price(0, 0)),
        ("3", Price(3_000_000, 3_000_000)),
        ({"input": 0.035, "output": 0.14}, Price(35_000, 140_000)),
        ({"input": 1.1, "output": 4.4, "cached_input": 0}, Price(1_100_000, 4_400_000, 0)),
        ({"input": 1e-7, "output": 0.0000011}, Price(1, 2)),
    ],
)
def test_prices_are_dollars_per_million_tokens(written: object, price: Price) -> None:
    """What is too little for a whole micro-dollar is not taken for nothing."""
    assert nodes([{"url": "http://a:1", "price": written}])[0].price == price


def test_a_node_may_have_certificates_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")

    assert nodes([{"url": "https://a", "ca_file": "ca.pem"}])[0].ca_file == "ca.pem"


def test_a_certificate_that_nobody_checks_is_warned_of() -> None:
    node = {"url": "https://a", "name": "box", "api_key": KEY, "tls_verify": False}

    assert "box's certificate is not checked" in load_settings(["--local-nodes", json.dumps([node])]).warnings[0]


def test_a_property_with_null_is_absent() -> None:
    assert nodes([{"url": "http://a:1", "kind": None, "max_concurrency": None}]) == nodes("http://a:1")


@pytest.mark.parametrize(
    ("written", "kind"),
    [("llama.cpp", "llamacpp"), ("llama-cpp", "llamacpp"), ("LM-Studio", "lmstudio"), ("lm_studio", "lmstudio"),
     ("openai", "generic"), ("OpenAI-compatible", "generic"), ("Ollama", "ollama"), ("TGI", "tgi")],
)  # fmt: skip
def test_kinds_have_many_spellings(written: str, kind: str) -> None:
    assert nodes([{"url": "http://a:1", "kind": written}])[0].kind == kind


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://[::1]:11434/", "http://[::1]:11434"),
        ("http://[FE80::1]", "http://[fe80::1]"),
        ("http://Box///", "http://box"),
        ("https://box/V1/", "https://box/V1"),
        ("http://my_container:80", "http://my_container:80"),
    ],
)
def test_urls_have_one_form(written: str, url: str) -> None:
    assert nodes(written)[0].url == url


def test_names_are_unique() -> None:
    assert [node.name for node in nodes("http://a:1,http://a:1/x,http://b")] == ["a:1", "a:1#2", "b"]
    assert [node.name for node in nodes(["http://a:1", {"url": "http://b:1", "name": "a:1"}])] == ["a:1#2", "a:1"]


def test_the_same_url_twice_is_a_warning() -> None:
    settings = load_settings(["--local-nodes", "http://a:1,http://A:1/"])

    assert settings.warnings == ["LOCAL_NODES lists http://a:1 more than once; it counts as that many nodes"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("localhost:11434", "such as http://localhost:11434"),
        ("gpu-box", "such as http://gpu-box"),
        ("ftp://a", "node 1: 'ftp://a' is not an http:// or https:// URL"),
        ("http://", "host or port is wrong"),
        ("http://:8000", "host or port is wrong"),
        ("http://a:99999", "host or port is wrong"),
        ("http://a:0", "host or port is wrong"),
        ("http://[::1", "host or port is wrong"),
        ("http://u:p@a", "'...@a' holds a user name or password"),
        ("http://a/?x=1", "must end before the ? or #"),
        ([5], "node 1: 5 is neither a URL nor an object with a url"),
        ([{"name": "x"}], "node 1: has no url"),
        (["http://a", {"url": "http://b", "wieght": 1}], "node 2: unknown key 'wieght'; did you mean 'weight'?"),
        ([{"url": "http://b", "zzz": 1}], "unknown key 'zzz'; the keys are url, kind,"),
        ([{"url": "http://b", "kind": "gpt"}], "node 1: kind: 'gpt' is not one of ollama, vllm"),
        ([{"url": "http://b", "kind": "cloud"}], "kind: 'cloud' is not one of"),
        ([{"url": "http://b", "weight": 0}], "weight: 0 is not a number above 0"),
        ([{"url": "http://b", "weight": True}], "weight: True is not a number above 0"),
        (
            [{"url": "http://b", "max_concurrency": 0}],
            "max_concurrency: 0 is not a whole number of at least 1; leave it",
        ),
        ([{"url": "http://b", "num_ctx": 2.5}], "num_ctx: 2.5 is not a whole number of at least 1"),
        ([{"url": "http://b", "role": "boss"}], "role: 'boss' is not one of hybrid, prefill, decode"),
        ([{"url": "http://b", "name": "a\nb"}], "is not text on one line"),
        ([{"url": "http://b", "price": -1}], "node 1: price: -1 is not a number of at least 0"),
        ([{"url": "http://b", "price": {"input": 1}}], "node 1: price: has no output, in dollars per million tokens"),
        (
            [{"url": "http://b", "price": {"in": 1}}],
            "price: unknown key 'in'; the keys are input, output, cached_input",
        ),
        (
            [{"url": "http://b", "price": {"input": 1, "output": 2, "cached_input": 1.5}}],
            "price: cached_input is more than input",
        ),
        ([{"url": "http://b", "retries": -1}], "retries: -1 is not a whole number of at least 0"),
        ([{"url": "http://b", "health_check": "maybe"}], "health_check: 'maybe' is not true or false"),
        ([{"url": "http://b", "ca_file": "no.pem"}], "ca_file: 'no.pem' is no file that exists"),
        ([{"url": "http://b", "budget_usd": 1}], "unknown key 'budget_usd'"),
        ([{"url": "http://b", "name": "n"}, {"url": "http://c", "name": "n"}], "the name 'n' is used twice"),
        ('[{"url": "http://a", "url": "http://b"}]', "the key 'url' is given twice"),
        ("[" * 5000, "is not valid JSON: too deep"),
    ],
)
def test_bad_nodes_are_refused(written: object, said: str) -> None:
    message = refusal("--local-nodes", written if isinstance(written, str) else json.dumps(written))

    assert message.startswith("LOCAL_NODES: ")
    assert said in message


@given(st.text(max_size=40))
def test_any_text_as_url_is_a_url_or_a_complaint_on_one_line(written: str) -> None:
    for candidate in (written, f"http://{written}"):
        complaint = ""
        try:
            url = values.web_url(candidate)
            assert values.web_url(url) == url
        except ValueError as error:
            complaint = str(error)

        assert complaint.isprintable()


# The cloud


def test_no_key_means_no_cloud() -> None:
    settings = load_settings(["--cloud-endpoint", "https://api.example.com/v1", "--cloud-model", "m"])

    assert settings.cloud_specs() == ()
    assert settings.warnings == ["the cloud endpoint is not used: CLOUD_API_KEY is not set"]


def test_a_key_makes_the_endpoint_tier_1() -> None:
    settings = load_settings(["--cloud-api-key", KEY, "--cloud-model", "gpt-5-mini"])

    assert settings.cloud_specs() == (
        NodeSpec(
            url="https://api.openai.com/v1",
            kind="cloud",
            name="api.openai.com",
            api_key=KEY,
            tier=1,
            default_model="gpt-5-mini",
        ),
    )


def test_providers_follow_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their keys may stand in the environment or in `.env`."""
    monkeypatch.setenv("FIRST_KEY", "key-1")
    (tmp_path / ".env").write_text("Second_Key=key-2\n")
    providers = [
        {"endpoint": "https://one.example/v1/", "api_key_env": "FIRST_KEY", "model": "m1", "models": ["m*"]},
        {"endpoint": "https://two.example/v1", "api_key_env": "Second_Key", "name": "two"},
        {"endpoint": "https://one.example/v1", "api_key": "key-3"},
    ]
    settings = load_settings(["--cloud-api-key", KEY, "--cloud-providers", json.dumps(providers)])

    assert [(node.tier, node.name, node.api_key) for node in settings.cloud_specs()] == [
        (1, "api.openai.com", KEY),
        (2, "one.example", "key-1"),
        (3, "two", "key-2"),
        (4, "one.example#2", "key-3"),
    ]
    assert settings.cloud_specs()[1].models == ("m*",)
    assert settings.cloud_specs()[1].default_model == "m1"


def test_providers_work_without_the_first_endpoint() -> None:
    settings = load_settings(["--cloud-providers", '[{"endpoint": "https://a/v1", "api_key": "k"}]'])

    assert [node.tier for node in settings.cloud_specs()] == [1]
    assert settings.warnings == []


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ({"endpoint": "https://a/v1"}, "has no api_key and no api_key_env; a cloud target needs a key"),
        ({"endpoint": "http://127.0.0.1:1"}, "a cloud target needs a key"),
        ({"endpoint": "https://a", "api_key": "k", "api_key_env": "K"}, "both api_key and api_key_env"),
        ({"endpoint": "https://a", "api_key_env": "NOWHERE"}, "the variable NOWHERE is not set"),
        ({"api_key": "k"}, "has no endpoint"),
        ({"url": "https://a", "api_key": "k"}, "unknown key 'url'; the keys are name, endpoint,"),
        ("https://a", "is not an object with endpoint"),
        ({"endpoint": "https://a", "api_key": "k", "budget_usd": -1}, "budget_usd: -1 is not a number of at least 0"),
        ({"endpoint": "https://a", "api_key": "k", "budget_period": "day"}, "a budget_period and no budget_usd"),
        (
            {"endpoint": "https://a", "api_key": "k", "budget_usd": 1, "budget_period": "year"},
            "budget_period: 'year' is not one of month, week, day",
        ),
        ({"endpoint": "https://a", "api_key": "k", "requests_per_minute": 0}, "requests_per_minute: 0 is not a whole"),
        ({"endpoint": "https://a", "api_key": "k", "prices": {}}, "unknown key 'prices'; did you mean 'price'?"),
    ],
)
def test_bad_providers_are_refused(provider: object, said: str) -> None:
    message = refusal("--cloud-providers", json.dumps([provider]))

    assert message.startswith("CLOUD_PROVIDERS: provider 1: ")
    assert said in message


def test_a_cloud_target_may_not_take_a_local_nodes_name() -> None:
    provider = '[{"endpoint": "https://a/v1", "api_key": "k", "name": "localhost:11434"}]'

    assert refusal("--cloud-providers", provider).startswith(
        "CLOUD_PROVIDERS: the name 'localhost:11434' is used twice"
    )


def test_a_provider_has_limits_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    provider = {
        "endpoint": "https://a/v1",
        "api_key": "k",
        "price": {"input": 2, "output": 8},
        "budget_usd": 2.5,
        "budget_period": "Day",
        "requests_per_minute": 500,
        "tokens_per_minute": "200000",
        "health_check": False,
        "ca_file": "ca.pem",
    }
    bare = {"endpoint": "https://b/v1", "api_key": "k", "budget_usd": 0, "tls_verify": False}
    limited, other = load_settings(["--cloud-providers", json.dumps([provider, bare])]).cloud_specs()

    assert limited.price == Price(2_000_000, 8_000_000)
    assert limited.budget == Budget(2_500_000, Period.DAY)
    assert limited.rate == Rate(500, 200_000)
    assert (limited.health_check, limited.ca_file, limited.tls_verify) == (False, "ca.pem", True)
    assert (other.budget, other.rate, other.tls_verify) == (Budget(0, Period.MONTH), None, False)


def test_certificates_of_ones_own_need_checking(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    trust = {"ca_file": "ca.pem", "tls_verify": False}
    said = "1: ca_file is not read while tls_verify is false; remove one of them"

    assert said in refusal("--local-nodes", json.dumps([{"url": "https://a", **trust}]))
    assert said in refusal("--cloud-providers", json.dumps([{"endpoint": "https://a", "api_key": "k", **trust}]))


# Money and limits


@pytest.mark.parametrize(("written", "limit"), [("20", 20_000_000), ("0", 0), ("0.1", 100_000), ("1e9", 10**15)])
def test_a_budget_is_kept_in_micro_dollars(written: str, limit: int) -> None:
    settings = load_settings(["--cloud-api-key", KEY, "--cloud-budget-usd", written, "--cloud-budget-period", "Week"])

    assert settings.cloud_budget() == Budget(limit, Period.WEEK)
    assert load_settings().cloud_budget() is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--cloud-budget-usd", "0", "--cloud-api-key", KEY], "CLOUD_BUDGET_USD"),
        (
            ["--cloud-providers", '[{"endpoint": "https://a", "api_key": "k", "name": "x", "budget_usd": 1}]'],
            "budget_usd of the cloud x",
        ),
        (["--model-map", '{"m*": {"budget_usd": 1}}', "--cloud-api-key", KEY], "budget_usd of the model m*"),
    ],
)
def test_a_budget_needs_a_ledger(argv: list[str], named: str) -> None:
    """It would begin anew with every restart."""
    assert load_settings(argv).database()
    assert refusal("--database-url", "off", *argv).startswith(
        f"DATABASE_URL: off forgets at every restart what was spent, so that {named} would not hold"
    )


def test_a_budget_without_a_cloud_needs_nothing() -> None:
    argv = ["--database-url", "off", "--cloud-budget-usd", "1", "--model-map", '{"m": {"budget_usd": 1}}']

    assert load_settings(argv).cloud_specs() == ()


def test_warnings_of_budgets_come_in_order() -> None:
    assert load_settings().budget_warn_at == (0.5, 0.8, 0.95)
    assert load_settings(["--budget-warn-at", "0.9, 0.25,1,0.9"]).budget_warn_at == (0.25, 0.9, 1)
    assert load_settings(["--budget-warn-at", "[]"]).budget_warn_at == ()


def test_prices_of_the_cloud_keep_their_order() -> None:
    written = {"gpt-5-mini": {"input": 0.25, "output": 2, "cached_input": 0.025}, "gpt-*": 3, "*": "0"}

    assert load_settings(["--cloud-prices", json.dumps(written)]).cloud_prices == (
        ("gpt-5-mini", Price(250_000, 2_000_000, 25_000)),
        ("gpt-*", Price(3_000_000, 3_000_000)),
        ("*", Price(0, 0)),
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[]", "is not an object such as"),
        ("3", "is not an object such as"),
        ({"a": "dear"}, "'a': 'dear' is not a number of at least 0"),
        ({"a": {"input": 1}}, "'a': has no output"),
        ({"": 1}, "'': '' is not text"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
    ],
)
def test_bad_prices_are_refused(written: object, said: str) -> None:
    message = refusal("--cloud-prices", written if isinstance(written, str) else json.dumps(written))

    assert message.startswith("CLOUD_PRICES: ")
    assert said in message


def test_limits_of_the_keys_are_absent_or_given() -> None:
    assert load_settings().default_rate() is None
    assert load_settings(["--requests-per-minute", "60"]).default_rate() == Rate(60, None)
    assert load_settings(["--tokens-per-minute", "1000"]).default_rate() == Rate(None, 1000)


# Stores


@pytest.mark.parametrize(
    "url", ["sqlite:///x.db", "sqlite+aiosqlite:////abs/x.db", "postgres://u:p@db/x", "PostgreSQL://db/x"]
)
def test_the_ledger_is_in_sqlite_or_postgresql(url: str) -> None:
    assert load_settings().database() == "sqlite:///data/hearth.db"
    assert load_settings(["--database-url", url]).database() == url


def test_the_ledger_may_be_off(tmp_path: Path) -> None:
    """YAML reads `off` as false."""
    (tmp_path / "off.yaml").write_text("database_url: off\n")

    assert load_settings(["--database-url", "Off"]).database() is None
    assert load_settings(["--config-file", "off.yaml"]).database() is None


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("redis://:p@r:6379/1", "redis://:p@r:6379/1"),
        ("rediss://r", "rediss://r"),
        ("valkey://r", "redis://r"),
        ("valkeys://r", "rediss://r"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_valkey_is_redis(written: str, url: str) -> None:
    assert load_settings().redis() is None
    assert load_settings(["--redis-url", written]).redis() == url


def test_workers_share_through_redis() -> None:
    assert "REDIS_URL is not set" in refusal("--workers", "2")
    assert load_settings(["--workers", "4", "--redis-url", "redis://r"]).workers == 4


# Routes


def test_routes_keep_their_order() -> None:
    written = {
        "gpt-4o": "llama3.2",
        "gpt-*": {"local": "qwen3:8b", "cloud": "gpt-5-mini", "num_ctx": 8192},
        "private": {"local": "m", "local_only": "yes"},
        "no-cloud": {"local": "m", "cloud": False},
        "null-cloud": {"cloud": None},
        "cloud-only": {"cloud": "gpt-5"},
        "bounded": {"cloud": "gpt-5", "budget_usd": 3, "budget_period": "week"},
    }

    assert load_settings(["--model-map", json.dumps(written)]).routes_config() == (
        RouteSpec("gpt-4o", local="llama3.2"),
        RouteSpec("gpt-*", local="qwen3:8b", cloud="gpt-5-mini", num_ctx=8192),
        RouteSpec("private", local="m", local_only=True),
        RouteSpec("no-cloud", local="m", cloud_off=True),
        RouteSpec("null-cloud", cloud_off=True),
        RouteSpec("cloud-only", cloud="gpt-5"),
        RouteSpec("bounded", cloud="gpt-5", budget=Budget(3_000_000, Period.WEEK)),
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[]", "is not an object such as"),
        ("llama3", "is not valid JSON"),
        ({"a": 1}, "'a': 1 is neither a model's name nor an object with local, cloud,"),
        ({"a": ""}, "'a': '' is not text on one line"),
        ({"": "b"}, "'': '' is not text"),
        ({"a": {"locl": "b"}}, "'a': unknown key 'locl'; did you mean 'local'?"),
        ({"a": {"cloud": True}}, "'a': cloud: True is neither a model's name nor false"),
        ({"a": {"local_only": "maybe"}}, "'a': local_only: 'maybe' is not true or false"),
        ({"a": {"budget_usd": "much"}}, "'a': budget_usd: 'much' is not a number of at least 0"),
        ({"a": {"budget_period": "day"}}, "'a': has a budget_period and no budget_usd"),
        ({"a": {"num_ctx": 0}}, "'a': num_ctx: 0 is not a whole number of at least 1"),
        ({"a": {"local_only": True, "cloud": "b"}}, "'a': local_only excludes a cloud model"),
        ({"a*": "b*"}, "'a*': 'b*' holds a *, which only the requested name may hold"),
        ('{"a": "b", "a": "c"}', "the key 'a' is given twice"),
    ],
)
def test_bad_routes_are_refused(written: object, said: str) -> None:
    message = refusal("--model-map", written if isinstance(written, str) else json.dumps(written))

    assert message.startswith("MODEL_MAP: ")
    assert said in message


# Doubts


def test_limits_that_never_apply_are_warned_of() -> None:
    settings = load_settings(["--request-timeout", "60", "--idle-timeout", "60"])

    assert settings.warnings == ["FIRST_TOKEN_TIMEOUT is longer than REQUEST_TIMEOUT, which ends the request first"]


def test_a_cloud_key_over_plain_http_is_warned_of() -> None:
    argv = ["--cloud-api-key", KEY, "--cloud-endpoint"]

    assert "plain http" in load_settings([*argv, "http://api.example.com/v1"]).warnings[0]
    assert load_settings([*argv, "http://127.0.0.1:9/v1"]).warnings == []


def test_an_open_door_is_warned_of() -> None:
    assert "API_KEYS is not set" in load_settings(["--host", "0.0.0.0"]).warnings[0]
    assert load_settings(["--host", "0.0.0.0", "--api-keys", "k1"]).warnings == []


# The example file


def _example_lines() -> list[str]:
    return re.findall(r"^#?([A-Z_]+=.*)$", EXAMPLE.read_text(), re.MULTILINE)


def test_the_example_holds_every_setting_once_and_nothing_else() -> None:
    names = [line.partition("=")[0].lower() for line in _example_lines()]

    assert sorted(names) == sorted(Settings.model_fields)


def test_the_example_loads_as_shipped() -> None:
    assert load_settings(env_file=EXAMPLE) == load_settings()
    assert load_settings(env_file=EXAMPLE).warnings == []


def test_the_example_shows_the_defaults(tmp_path: Path) -> None:
    everything = tmp_path / "all.env"
    everything.write_text("\n".join(_example_lines()))

    assert load_settings(env_file=everything) == load_settings()


def test_the_examples_in_the_example_load() -> None:
    node, route, provider, prices = re.findall(r"^#   ([\[{].*)$", EXAMPLE.read_text(), re.MULTILINE)

    assert nodes(node)
    assert load_settings(["--model-map", route]).routes_config()
    assert len(json.loads(provider)) == 1
    assert load_settings(["--cloud-prices", prices]).cloud_prices


def test_traces_are_set_by_opentelemetrys_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-api-key={KEY},x-team=a")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")

    settings = load_settings()

    assert settings.otel_exporter_otlp_endpoint == "http://collector:4318"
    assert settings.otel_exporter_otlp_headers is not None
    assert settings.otel_exporter_otlp_headers.get_secret_value() == f"x-api-key={KEY},x-team=a"
    assert (settings.otel_service_name, settings.otel_traces_sampler_arg, settings.trace_prompts) == (
        "hearth",
        0.1,
        False,
    )
    assert KEY not in repr(settings)


def test_no_traces_are_made_unless_somebody_takes_them() -> None:
    assert load_settings().otel_exporter_otlp_endpoint is None


def test_the_port_of_grpc_is_warned_of() -> None:
    (warning,) = load_settings(["--otel-exporter-otlp-endpoint", "http://collector:4317"]).warnings

    assert warning == "OTEL_EXPORTER_OTLP_ENDPOINT names gRPC's port; traces go over HTTP, mostly to port 4318"
