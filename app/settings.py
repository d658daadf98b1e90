"""Every setting, its default, and where it comes from. The only module that knows pydantic-settings.

What is set wins in this order: flags, environment, `.env`, the YAML file that CONFIG_FILE names, default. An empty
value means the default, so that it also hides what a lower place says. Two variables of LMDeploy come last of all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app import declarations, networks, setting_flags
from app import setting_values as values
from app.declarations import ApiKey, CloudProvider
from app.domain import Budget, NodeSpec, Period, Price, Rate
from app.networks import Network
from app.routing.route_spec import RouteSpec

T = TypeVar("T")

STRATEGIES = (
    "shortest_expected_delay",
    "round_robin",
    "least_connections",
    "weighted",
    "random",
    "min_expected_latency",
    "min_observed_latency",
)
CONTINUATIONS = ("off", "local", "all")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMATS = ("auto", "json", "console")
BUDGET_PERIODS = tuple(period.value for period in Period)
SHARING_FAILURES = ("closed", "local")
SERVING_STRATEGIES = ("Hybrid", "DistServe")
MIGRATION_PROTOCOLS = ("RDMA", "NVLINK", "TCP")
LINK_TYPES = ("RoCE", "IB")
TRACE_SAMPLERS = tuple(
    f"{parent}{kind}" for parent in ("parentbased_", "") for kind in ("always_on", "always_off", "traceidratio")
)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OPENAI = "https://api.openai.com/v1"
_GRPC_PORT = 4317  # of receivers of traces
_HIDDEN = Field(exclude=True)  # holds keys, which must not get into a dump
_LOG_LEVEL_ALIASES = {"warn": "warning", "critical": "error", "fatal": "error", "notset": "debug"}
_LMDEPLOY_VARIABLES = {
    "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION": "health_check_interval",
    "AIOHTTP_TIMEOUT": "request_timeout",
}
_IGNORED_VARIABLES = ("UVICORN_LOG_LEVEL",)
_OFF = "off"
_DATABASE = re.compile(r"(sqlite|postgres(ql)?)(\+[a-z0-9]+)?://.+", re.IGNORECASE)
_REDIS = re.compile(r"(rediss?|valkeys?|unix)://.+", re.IGNORECASE)


class SettingsError(Exception):
    """A setting is wrong. `message` is one line that names it, and shows no secret."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def _plain(value: object) -> object:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _secret(value: object) -> SecretStr:
    return SecretStr(values.secret(_plain(value)))


def _secrets(value: object) -> tuple[SecretStr, ...]:
    if isinstance(value, (list, tuple)):
        value = [_plain(entry) for entry in value]
    return tuple(SecretStr(key) for key in values.secrets(value))


def _api_keys(value: object) -> tuple[ApiKey, ...]:
    return declarations.api_keys([*map(_plain, value)] if isinstance(value, (list, tuple)) else value)


def _database(value: object) -> SecretStr:
    """The ledger's URL, which may hold a password, or off."""
    if _is_off(_plain(value)):
        return SecretStr(_OFF)
    return _store(value, _DATABASE, "sqlite:///data/hearth.db or postgresql://hearth@localhost/hearth, nor off")


def _redis(value: object) -> SecretStr:
    """The URL of what replicas share, which may hold a password. Valkey is asked as Redis is."""
    url = _store(value, _REDIS, "redis://localhost:6379").get_secret_value()
    return SecretStr(re.sub(r"^valkey", "redis", url, flags=re.IGNORECASE))


def _store(value: object, allowed: re.Pattern[str], examples: str) -> SecretStr:
    plain = _plain(value)
    stripped = plain.strip() if isinstance(plain, str) else ""
    if not allowed.fullmatch(stripped) or not stripped.isprintable():
        raise ValueError(f"is not a URL such as {examples}")  # not shown: it may hold a password
    return SecretStr(stripped)


def _trace_headers(value: object) -> SecretStr:
    """What the receiver of traces wants to see, as OpenTelemetry writes it."""
    plain = _plain(value)
    pairs = [pair.partition("=") for pair in str(plain).split(",") if pair.strip()]
    if not all(name.strip() and "=" in equals and content.strip() for name, equals, content in pairs):
        raise ValueError("is not a list such as x-api-key=KEY,x-team=models")  # not shown: it may hold a key
    return SecretStr(str(plain).strip())


def _is_off(value: object) -> bool:
    """YAML reads off as false."""
    return value is False or (isinstance(value, str) and value.strip().lower() == _OFF)


def _continuation(value: object) -> str:
    return _OFF if _is_off(value) else values.choice(value, CONTINUATIONS)


def _nodes_file(value: object) -> Path | None:
    """Where to write; it need not exist. None when off."""
    if _is_off(value):
        return None
    path = value if isinstance(value, Path) else Path(values.text(value)).expanduser()
    if os.path.isdir(path):
        raise ValueError(f"{values.shown(str(path))} is a folder; name a file in it")
    return path


def _list_of(read: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    return lambda value: tuple(read(entry) for entry in values.entries(value))


Seconds = Annotated[float, BeforeValidator(values.seconds)]
Count = Annotated[int, BeforeValidator(partial(values.whole, at_least=0))]
Flag = Annotated[bool, BeforeValidator(values.flag)]
Text = Annotated[str, BeforeValidator(values.text)]
Url = Annotated[str, BeforeValidator(values.web_url)]
File = Annotated[Path, BeforeValidator(values.file)]
Secret = Annotated[SecretStr, BeforeValidator(_secret)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_secrets)]


def _one_of(allowed: Sequence[str], aliases: Mapping[str, str] | None = None) -> BeforeValidator:
    return BeforeValidator(partial(values.choice, allowed=allowed, aliases=aliases))


def _whole(at_least: int, at_most: int | None = None, hint: str = "") -> BeforeValidator:
    return BeforeValidator(partial(values.whole, at_least=at_least, at_most=at_most, hint=hint))


class Settings(BaseSettings):
    """Hearth's settings, checked. `.env.example` explains each; the environment has them in capitals."""

    model_config = SettingsConfigDict(
        frozen=True, validate_default=False, extra="ignore", hide_input_in_errors=True, env_file_encoding="utf-8-sig"
    )

    local_nodes: Annotated[tuple[NodeSpec, ...], NoDecode, _HIDDEN, BeforeValidator(declarations.local_nodes)] = (
        NodeSpec(url="http://localhost:11434", name="localhost:11434"),
    )
    model_map: Annotated[tuple[RouteSpec, ...], NoDecode, BeforeValidator(declarations.model_map)] = ()
    lb_strategy: Annotated[str, _one_of(STRATEGIES)] = "shortest_expected_delay"
    preload: Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.texts)] = ()

    cloud_endpoint: Url = _OPENAI
    cloud_api_key: Secret | None = None
    cloud_model: Text | None = None
    cloud_providers: Annotated[
        tuple[CloudProvider, ...], NoDecode, _HIDDEN, BeforeValidator(declarations.cloud_providers)
    ] = ()
    cloud_budget_usd: Annotated[float, BeforeValidator(values.dollars)] | None = None
    cloud_budget_period: Annotated[str, _one_of(BUDGET_PERIODS)] = "month"
    budget_warn_at: Annotated[tuple[float, ...], NoDecode, BeforeValidator(values.shares)] = (0.5, 0.8, 0.95)
    cloud_prices: Annotated[tuple[tuple[str, Price], ...], NoDecode, BeforeValidator(declarations.prices)] = ()
    cloud_max_tokens: Annotated[int, _whole(1)] = 8192

    request_timeout: Seconds = 1800.0
    connect_timeout: Seconds = 3.0
    first_token_timeout: Seconds = 600.0
    spill_after_ms: Annotated[float, BeforeValidator(values.positive)] | None = None
    queue_size: Annotated[int, _whole(1)] = 1000
    queue_timeout: Seconds | None = None
    keep_alive_after: Annotated[float, BeforeValidator(values.seconds_or_never)] = 0.0
    idle_timeout: Seconds = 300.0
    max_attempts: Annotated[int, _whole(1, hint="1 tries once and never again")] = 4

    continuation: Annotated[str, BeforeValidator(_continuation)] = "local"

    health_check_interval: Seconds = 5.0
    health_check_timeout: Seconds = 3.0
    breaker_fail_max: Count = 3
    breaker_reset_timeout: Seconds = 15.0

    nodes_open: Flag = False
    nodes_networks: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_list_of(networks.network))] = (
        networks.DEFAULT
    )
    nodes_peer_address: Flag = True
    nodes_file: Annotated[Path | None, BeforeValidator(_nodes_file)] = Path("data/nodes.json")
    disable_cache_status: Flag = False

    serving_strategy: Annotated[str, _one_of(SERVING_STRATEGIES)] = "Hybrid"
    migration_protocol: Annotated[str, _one_of(MIGRATION_PROTOCOLS)] = "RDMA"
    link_type: Annotated[str, _one_of(LINK_TYPES)] = "RoCE"
    disable_gdr: Flag = False
    dummy_prefill: Flag = False

    api_keys: Annotated[tuple[ApiKey, ...], NoDecode, _HIDDEN, BeforeValidator(_api_keys)] = ()
    admin_keys: Secrets = ()
    requests_per_minute: Annotated[int, _whole(1, hint="leave it out for any number")] | None = None
    tokens_per_minute: Annotated[int, _whole(1, hint="leave it out for any number")] | None = None
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_list_of(values.origin))] = ()
    max_body_mb: Annotated[float, BeforeValidator(values.positive)] = 64.0

    host: Annotated[str, BeforeValidator(values.host)] = "127.0.0.1"
    port: Annotated[int, _whole(0, 65535)] = 8000
    workers: Annotated[int, _whole(1)] = 1
    ssl_certfile: File | None = None
    ssl_keyfile: File | None = None

    log_level: Annotated[str, _one_of(LOG_LEVELS, _LOG_LEVEL_ALIASES)] = "INFO"
    log_format: Annotated[str, _one_of(LOG_FORMATS)] = "auto"

    otel_exporter_otlp_endpoint: Url | None = None
    otel_exporter_otlp_headers: Annotated[SecretStr, BeforeValidator(_trace_headers)] | None = None
    otel_service_name: Text = "hearth"
    otel_traces_sampler: Annotated[str, _one_of(TRACE_SAMPLERS)] = "parentbased_always_on"
    otel_traces_sampler_arg: Annotated[float, BeforeValidator(values.share)] = 1.0
    trace_prompts: Flag = False

    database_url: Annotated[SecretStr, BeforeValidator(_database)] = SecretStr("sqlite:///data/hearth.db")
    redis_url: Annotated[SecretStr, BeforeValidator(_redis)] | None = None
    sharing_failure: Annotated[str, _one_of(SHARING_FAILURES)] = "closed"
    config_file: File | None = None

    _cloud: tuple[NodeSpec, ...] = PrivateAttr(())
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What is allowed but probably not meant, a line each."""
        return list(self._warnings)

    def local_node_specs(self) -> tuple[NodeSpec, ...]:
        """The local nodes in the order in which they were given."""
        return self.local_nodes

    def cloud_specs(self) -> tuple[NodeSpec, ...]:
        """The cloud targets, which all have a key, in the order in which they are tried: tier 1, 2, ..."""
        return self._cloud

    def routes_config(self) -> tuple[RouteSpec, ...]:
        """The entries of MODEL_MAP in their order."""
        return self.model_map

    def nodes_path(self) -> Path | None:
        """Where nodes that are added at run time are kept; None when they are not."""
        return None if self.disable_cache_status else self.nodes_file

    def queue_seconds(self) -> float:
        """The longest that a request waits for a free node."""
        return self.queue_timeout or self.first_token_timeout

    def cloud_budget(self) -> Budget | None:
        """What all of the cloud may cost in one period."""
        if self.cloud_budget_usd is None:
            return None
        return Budget(values.micro_dollars(self.cloud_budget_usd), Period(self.cloud_budget_period))

    def default_rate(self) -> Rate | None:
        """What each key of API_KEYS may ask for in a minute."""
        rate = Rate(self.requests_per_minute, self.tokens_per_minute)
        return rate if any(rate) else None

    def database(self) -> str | None:
        """The ledger's URL in plain text; None when there is no ledger."""
        url = self.database_url.get_secret_value()
        return None if url == _OFF else url

    def redis(self) -> str | None:
        """The URL of what replicas share, in plain text; None when there is but this process."""
        return None if self.redis_url is None else self.redis_url.get_secret_value()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        if isinstance(init_settings, InitSettingsSource):
            _refuse_unknown(init_settings.init_kwargs, "the call")
        return init_settings, env_settings, dotenv_settings, _YamlFile(settings_cls), _LmdeployVariables(settings_cls)

    @model_validator(mode="wrap")
    @classmethod
    def _assemble(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        given = {key: value for key, value in ((key, _tidy(value)) for key, value in data.items()) if value is not None}
        settings = handler({key: value for key, value in given.items() if key in cls.model_fields})
        settings._cloud = settings._cloud_targets(lambda name: _variable(name, given))
        settings._refuse_contradictions()
        # What is left over can only come from `.env`, where other programs' variables may stand too.
        settings._warnings = [*_misspelt(given), *settings._doubts()]
        return settings

    def _cloud_targets(self, lookup: Callable[[str], str | None]) -> tuple[NodeSpec, ...]:
        first = None
        if self.cloud_api_key is not None:
            key = self.cloud_api_key.get_secret_value()
            first = CloudProvider(self.cloud_endpoint, api_key=key, model=self.cloud_model)
        try:
            return declarations.cloud_nodes(first, self.cloud_providers, lookup, self.local_nodes)
        except ValueError as error:
            raise ValueError(f"CLOUD_PROVIDERS: {error}") from None

    def _refuse_contradictions(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing, given = ("SSL_KEYFILE", "SSL_CERTFILE") if self.ssl_certfile else ("SSL_CERTFILE", "SSL_KEYFILE")
            raise ValueError(f"{missing}: not set, although {given} is; TLS needs both")
        if self.workers > 1 and self.redis_url is None:
            raise ValueError(
                f"WORKERS: {self.workers} workers would not share in-flight counts, breakers, limits and budgets, as "
                "REDIS_URL is not set; set it, or run one worker"
            )
        budget = next(self._budgets(), None) if self._cloud else None
        if budget is not None and self.database() is None:
            raise ValueError(
                f"DATABASE_URL: off forgets at every restart what was spent, so that {budget} would not hold; set a "
                "database, or unset the budget"
            )

    def _budgets(self) -> Iterator[str]:
        """How each budget is called that the cloud is held to."""
        if self.cloud_budget_usd is not None:
            yield "CLOUD_BUDGET_USD"
        yield from (f"budget_usd of the cloud {node.name}" for node in self._cloud if node.budget)
        yield from (f"budget_usd of the model {route.pattern}" for route in self.model_map if route.budget)

    def _doubts(self) -> Iterator[str]:
        for name in ("first_token_timeout", "idle_timeout"):
            if getattr(self, name) > self.request_timeout:
                yield f"{name.upper()} is longer than REQUEST_TIMEOUT, which ends the request first"
        if self.cloud_api_key is None and (self.cloud_model is not None or self.cloud_endpoint != _OPENAI):
            yield "the cloud endpoint is not used: CLOUD_API_KEY is not set"
        for node in self._cloud:
            if node.url.startswith("http://") and urlsplit(node.url).hostname not in _LOOPBACK:
                yield f"{node.name} is asked over plain http, so that its key can be read on the way; use https"
        for node in (*self.local_nodes, *self._cloud):
            if not node.tls_verify and node.api_key:
                yield f"{node.name}'s certificate is not checked (tls_verify): whoever poses as it gets its key"
        if urlsplit(self.otel_exporter_otlp_endpoint or "").port == _GRPC_PORT:
            yield "OTEL_EXPORTER_OTLP_ENDPOINT names gRPC's port; traces go over HTTP, mostly to port 4318"
        urls = [node.url for node in self.local_nodes]
        for url in dict.fromkeys(url for url in urls if urls.count(url) > 1):
            yield f"LOCAL_NODES lists {url} more than once; it counts as that many nodes"
        if self.host not in _LOOPBACK and not self.api_keys:
            yield f"HOST is {self.host} and API_KEYS is not set: whoever reaches this address may use it"
        if self.host not in _LOOPBACK and self.nodes_open:
            yield f"HOST is {self.host} and NODES_OPEN is on: whoever reaches this address may add nodes"


def load_settings(argv: Sequence[str] = (), *, env_file: str | Path | None = ".env") -> Settings:
    """Reads all settings. `argv` are flags: each setting's name with dashes. Raises `SettingsError`."""
    flags = _flags(argv)
    tls = _demands_tls(flags)
    try:
        settings = Settings(_env_file=env_file, **flags)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None
    except OSError as error:
        raise SettingsError(f"{env_file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{env_file} cannot be read: it is not UTF-8 text") from None
    if tls and settings.ssl_certfile is None:
        raise SettingsError("--ssl: SSL_CERTFILE and SSL_KEYFILE are not set; TLS needs both")
    return settings


class _YamlFile(PydanticBaseSettingsSource):
    """The file that CONFIG_FILE names, wherever that is set."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        path = _tidy(self.current_state.get("config_file"))
        return {} if path is None else _read_yaml(Path(str(path)).expanduser())


class _LmdeployVariables(PydanticBaseSettingsSource):
    """What LMDeploy's variables say where Hearth's own say nothing. A 0, which lifts the limit there, sets nothing."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {}
        for variable, name in _LMDEPLOY_VARIABLES.items():
            value = _tidy(_variable(variable, self.current_state))
            if value not in (None, "0") and name not in self.current_state:
                try:
                    found[name] = values.seconds(value)
                except ValueError as error:
                    raise SettingsError(f"{variable}: {error}") from None
        return found


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # 20 ms that only those pay who use a file

    try:
        document = yaml.safe_load(path.read_text("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"CONFIG_FILE: {values.shown(str(path))} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        raise SettingsError(f"CONFIG_FILE: {values.shown(str(path))} is not valid YAML{place}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"CONFIG_FILE: {values.shown(str(path))} is not a list of `name: value`")
    return _named_settings(document, path)


def _named_settings(document: dict[Any, Any], path: Path) -> dict[str, Any]:
    found = {str(key).lower().replace("-", "_"): value for key, value in document.items()}
    _refuse_unknown(found, str(path))
    if len(found) < len(document):
        raise SettingsError(f"CONFIG_FILE: {values.shown(str(path))} names a setting twice")
    if "config_file" in found:
        raise SettingsError(f"CONFIG_FILE: {values.shown(str(path))} cannot name another file")
    return found


def _refuse_unknown(names: Mapping[str, object], place: str) -> None:
    unknown = [name for name in names if name not in Settings.model_fields]
    if unknown:
        hint = values.did_you_mean(unknown[0], Settings.model_fields)
        raise SettingsError(f"{unknown[0]} in {place} is not a setting{hint}{_and_more(len(unknown))}")


def _flags(argv: Sequence[str]) -> dict[str, Any]:
    switches = {name for name, field in Settings.model_fields.items() if field.annotation is bool}
    try:
        return {**setting_flags.read(argv, Settings.model_fields, switches=switches, lists=("api_keys", "admin_keys"))}
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _demands_tls(flags: dict[str, Any]) -> bool:
    """Takes out `--ssl`, which is no setting: a certificate turns TLS on."""
    written = _tidy(flags.pop(setting_flags.SSL, None))
    try:
        return written is not None and values.flag(written)
    except ValueError as error:
        raise SettingsError(f"--ssl: {error}") from None


def _tidy(value: object) -> object:
    """None for an empty value. Some tools that read `.env` files leave the quotes on."""
    if not isinstance(value, str):
        return value
    stripped = value.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        stripped = stripped[1:-1].strip()
    return stripped or None


def _variable(name: str, given: Mapping[str, object]) -> str | None:
    """A variable of the environment or of `.env`."""
    value = os.environ.get(name) or given.get(name.lower())
    return value if isinstance(value, str) else None


def _misspelt(given: Mapping[str, object]) -> Iterator[str]:
    known = [field.upper() for field in Settings.model_fields]
    for name in map(str.upper, given):
        if name not in (*known, *_LMDEPLOY_VARIABLES, *_IGNORED_VARIABLES):
            hint = values.did_you_mean(name, known)
            if hint:
                yield f".env: {name} is not a setting{hint}"


def _one_line(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False)
    first = faults[0]
    cause = first.get("ctx", {}).get("error", first["msg"])
    name = f"{str(first['loc'][0]).upper()}: " if first["loc"] else ""
    return f"{name}{cause}{_and_more(len(faults))}"


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
