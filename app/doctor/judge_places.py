"""What there is to say of a node or a cloud target by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from app.doctor.facts import PlaceFacts, Trouble, Unpriced
from app.doctor.findings import Code, Finding, good, warning, wrong
from app.domain import NodeState
from app.providers import KINDS

_LOOPBACKS = ("localhost", "127.0.0.1", "::1")
_OLLAMA = "ollama"
_OLLAMAS_PORT = 11434
_ANYTHING = "generic"
_CLOCK_SECONDS = 5.0
_CA_REMEDY = "put its authority's certificate into a file, and name that in the node's ca_file or in SSL_CERT_FILE"
_SHOWN = 5


def judge_node(facts: PlaceFacts) -> list[Finding]:
    """A local node."""
    if not facts.spec.health_check:
        return [good(Code.NODE_SKIPPED, facts.about, "not looked at, as its health_check is off")]
    if facts.trouble is not None:
        return [_no_answer(facts, facts.trouble)]
    found = [*_wrong_server(facts)] or [*_unfit(facts)]
    if any(finding.level == "wrong" for finding in found):
        return found
    return [good(Code.NODE, facts.about, _summary(facts)), *found]


def judge_cloud(facts: PlaceFacts, wanted: Sequence[str]) -> list[Finding]:
    """A cloud target; `wanted` are the models that MODEL_MAP asks the cloud for."""
    spec, about = facts.spec, facts.about
    if facts.trouble is not None:
        return [_no_answer(facts, facts.trouble)]
    if facts.key_refused:
        return [wrong(Code.KEY_REFUSED, about, "it refuses the key", "set the right CLOUD_API_KEY (or api_key)")]
    if facts.v1_lists:
        remedy = f"set the endpoint to {spec.url}/v1"
        return [wrong(Code.CLOUD_ENDPOINT, about, f"{spec.url} lacks /v1 at its end", remedy)]
    if facts.redirect:
        return [_redirected(facts)]
    if facts.models is None:
        return [_listless_cloud(facts)]
    return [good(Code.CLOUD, about, f"reached, lists {_count(facts.models, 'model')}"), *_cloud_models(facts, wanted)]


def judge_prices(unpriced: Sequence[Unpriced]) -> list[Finding]:
    """Models that a budget covers and that have no price."""
    return [
        wrong(
            Code.PRICE_UNKNOWN,
            f"cloud {cloud}",
            f"nobody knows what '{model}' costs, and there is a budget to keep: requests for it are refused",
            f'set its price: CLOUD_PRICES={{"{model}": {{"input": ..., "output": ...}}}}',
        )
        for cloud, model in unpriced
    ]


def judge_clocks(places: Sequence[PlaceFacts]) -> list[Finding]:
    """When all others disagree with this machine in the same way, it is this machine."""
    known = [(facts.about, facts.clock_ahead_seconds) for facts in places if facts.clock_ahead_seconds is not None]
    off = [(about, ahead) for about, ahead in known if abs(ahead) > _CLOCK_SECONDS]
    if len(off) >= 2 and len(off) == len(known):
        aheads = [ahead for _, ahead in off]
        if max(aheads) - min(aheads) <= _CLOCK_SECONDS:
            message = f"this machine's clock is {_off_by(-aheads[0])}, as {len(off)} others say"
            return [warning(Code.CLOCK, "this machine", message, "turn on time synchronisation (NTP) here")]
    return [
        warning(
            Code.CLOCK, about, f"its clock is {_off_by(ahead)}", "turn on time synchronisation (NTP) there, or here"
        )
        for about, ahead in off
    ]


# -- no answer


def _no_answer(facts: PlaceFacts, trouble: Trouble) -> Finding:
    spec, about = facts.spec, facts.about
    host = urlsplit(spec.url).hostname or ""
    because = f": {facts.detail}" if facts.detail else ""
    match trouble:
        case Trouble.REFUSED:
            return wrong(Code.REFUSED, about, f"{spec.url} refuses connections", _refused_remedy(facts))
        case Trouble.UNRESOLVED:
            message = f"the name '{host}' cannot be resolved{because}"
            return wrong(Code.UNRESOLVED, about, message, _unresolved_remedy(facts, host))
        case Trouble.NO_CONNECTION if facts.other_scheme:
            return _no_answer(facts, Trouble.TLS_NONE)
        case Trouble.NO_CONNECTION:
            remedy = "check that the machine is on, its address, and firewalls on the way"
            return wrong(Code.NO_CONNECTION, about, f"no connection to {spec.url}{because}", remedy)
        case Trouble.SLOW:
            remedy = "see what the server is doing; a firewall or a proxy on the way may also hold requests back"
            return wrong(Code.SLOW, about, f"{spec.url} takes connections and does not answer in time", remedy)
        case Trouble.NO_HTTP if facts.other_scheme:
            return _tls_wanted(facts)
        case Trouble.NO_HTTP:
            message = f"what listens at {spec.url} does not speak HTTP{because}"
            return wrong(Code.NO_HTTP, about, message, _port_remedy(facts))
        case Trouble.TLS_NONE:
            remedy = f"begin its url with http:// in place of https://: {_other_scheme(spec.url)}"
            other = remedy if facts.other_scheme else "check its port; does the server speak TLS at all?"
            return wrong(Code.TLS_NONE, about, f"{spec.url} does not speak TLS", other)
        case Trouble.TLS_UNTRUSTED:
            return wrong(Code.TLS_UNTRUSTED, about, f"its TLS certificate is not trusted{because}", _CA_REMEDY)
        case Trouble.TLS_OUT_OF_DATE:
            message = f"its TLS certificate is out of date{because}"
            return wrong(Code.TLS_OUT_OF_DATE, about, message, "renew it, or check this machine's clock")
        case Trouble.TLS_OTHER_NAME:
            message = f"its TLS certificate is for another name than '{host}'{because}"
            return wrong(Code.TLS_OTHER_NAME, about, message, "use a name that the certificate holds in the url")
        case Trouble.CA_FILE:
            remedy = "name a readable file of certificates in PEM form in its ca_file"
            return wrong(Code.CA_FILE, about, facts.detail, remedy)


def _refused_remedy(facts: PlaceFacts) -> str:
    parts = urlsplit(facts.spec.url)
    if facts.elsewhere:
        return _elsewhere(facts)
    ollama = facts.spec.kind == _OLLAMA or parts.port == _OLLAMAS_PORT
    bound = "; let Ollama listen on all addresses there: OLLAMA_HOST=0.0.0.0" if ollama else ""
    if facts.in_container and parts.hostname in _LOOPBACKS:
        return f"inside a container localhost is the container itself: use host.docker.internal{bound}"
    if parts.hostname in _LOOPBACKS:
        return f"start {'Ollama (ollama serve)' if ollama else 'the server'}, or correct the port in its url"
    if ollama:
        return "start Ollama there; if it runs, it listens on 127.0.0.1 alone: set OLLAMA_HOST=0.0.0.0 for it"
    return "start the server there, let it listen on 0.0.0.0 and not on 127.0.0.1 alone, and check the port"


def _unresolved_remedy(facts: PlaceFacts, host: str) -> str:
    if host == "host.docker.internal":
        return "on Linux, start the container with --add-host=host.docker.internal:host-gateway"
    if facts.spec.tier:
        return "check this machine's way to the internet and its name server (DNS), and the endpoint's spelling"
    return (
        "check the spelling, or write its IP address; in a container, names of the same Docker network alone are known"
    )


def _port_remedy(facts: PlaceFacts) -> str:
    return _elsewhere(facts) if facts.elsewhere else "correct the port in its url; another program has this one"


def _elsewhere(facts: PlaceFacts) -> str:
    places = " or ".join(f"{place.url} ({place.title} answers there)" for place in facts.elsewhere[:3])
    return f"set its url to {places}"


def _tls_wanted(facts: PlaceFacts) -> Finding:
    url = _other_scheme(facts.spec.url)
    return wrong(
        Code.TLS_WANTED,
        facts.about,
        f"{facts.spec.url} speaks TLS, and is asked without",
        f"begin its url with https://: {url}",
    )


def _other_scheme(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{'http' if scheme == 'https' else 'https'}://{rest}"


# -- an answer, but from whom?


def _wrong_server(facts: PlaceFacts) -> Iterator[Finding]:
    spec, about = facts.spec, facts.about
    if facts.hearth is not None:
        message = f"{spec.url} is a Hearth ({facts.hearth}) and no engine; requests might go round in a circle"
        remedy = _elsewhere(facts) if facts.elsewhere else "set its url to an engine, or set Hearth's PORT to another"
        yield wrong(Code.IS_HEARTH, about, message, remedy)
    elif facts.answered is None and facts.key_refused:
        yield _key_refused(facts)
    elif facts.redirect:
        yield _redirected(facts)
    elif facts.answered is None and facts.other_scheme:
        yield _tls_wanted(facts)
    elif facts.answered is None and (spec.kind is None or not _fine(facts)):
        message = f"{spec.url} answers, but as no kind of node that Hearth knows"
        yield wrong(Code.UNKNOWN_KIND, about, message, _unknown_remedy(facts))
    elif spec.kind is not None and facts.answered not in (None, spec.kind):
        yield from _other_kind(facts, spec.kind, facts.answered or "")


def _fine(facts: PlaceFacts) -> bool:
    return facts.health is not None and facts.health.state is not NodeState.DOWN


def _unknown_remedy(facts: PlaceFacts) -> str:
    if facts.elsewhere:
        return _elsewhere(facts)
    return "correct the port in its url; if this is the engine, set its kind, and its models if it lists none"


def _other_kind(facts: PlaceFacts, said: str, answered: str) -> Iterator[Finding]:
    """All that speaks OpenAI's API may be spoken to as such, so that this is a choice, if not the best."""
    titles = KINDS[said].title, KINDS[answered].title
    message = f"its kind is set to {said} ({titles[0]}), and it answers as {answered} ({titles[1]})"
    remedy = f"set its kind to {answered}, or leave the kind out"
    if said == _OLLAMA or (answered == _OLLAMA and said != _ANYTHING):
        yield wrong(Code.OTHER_KIND, facts.about, message, remedy)
    elif answered == _OLLAMA or _ANYTHING not in (said, answered):
        yield warning(Code.OTHER_KIND, facts.about, message, remedy)


def _redirected(facts: PlaceFacts) -> Finding:
    message = f"{facts.spec.url} redirects to {facts.redirect}, which Hearth does not follow"
    return wrong(Code.REDIRECTED, facts.about, message, f"set its url to {facts.redirect}")


def _key_refused(facts: PlaceFacts) -> Finding:
    if facts.spec.api_key:
        return wrong(Code.KEY_REFUSED, facts.about, "it refuses the key", "set the node's api_key to the right one")
    return wrong(Code.KEY_REFUSED, facts.about, "it wants a key, and none is set", "set the node's api_key")


# -- the right server


def _unfit(facts: PlaceFacts) -> Iterator[Finding]:
    health, spec, about = facts.health, facts.spec, facts.about
    if facts.key_refused:
        yield _key_refused(facts)
    elif health is not None and health.state is NodeState.DOWN:
        yield wrong(Code.UNHEALTHY, about, health.reason, "look into the engine's own log")
    elif health is not None and health.state is not NodeState.HEALTHY:
        yield warning(Code.NOT_READY, about, health.reason, "wait until it is ready, or wake it")
    elif not spec.models and facts.models is None:
        message = f"its list of models cannot be had (status {facts.models_status})"
        yield wrong(Code.NO_MODELS, about, message, "name its models in the node's models")
    elif not spec.models and not facts.models:
        yield wrong(Code.NO_MODELS, about, "it has no model", _first_model(facts))


def _first_model(facts: PlaceFacts) -> str:
    if facts.answered == _OLLAMA:
        return "fetch one there: ollama pull NAME (models that run in Ollama's cloud do not count)"
    return "load a model there"


def _summary(facts: PlaceFacts) -> str:
    kind = KINDS.get(facts.answered or facts.spec.kind or "")
    words = [f"{kind.title if kind else 'it'} answers at {facts.spec.url}"]
    if facts.models is not None:
        words.append(_count(facts.models, "model"))
    if facts.loaded:
        names = ", ".join(model.name for model in facts.loaded[:_SHOWN])
        words.append(f"in memory: {names}{', ...' if len(facts.loaded) > _SHOWN else ''}")
    return "; ".join(words)


# -- the cloud


def _listless_cloud(facts: PlaceFacts) -> Finding:
    status = facts.models_status or 0
    if status == 200 or status in (404, 405):
        remedy = "check CLOUD_ENDPOINT; not every cloud has such a list, so that this one may still work"
        return warning(Code.CLOUD_ENDPOINT, facts.about, f"no list of models at {facts.spec.url} ({status})", remedy)
    remedy = "try again later; see the provider's status page"
    return warning(Code.CLOUD_STATUS, facts.about, f"its list of models answered {status}", remedy)


def _cloud_models(facts: PlaceFacts, wanted: Sequence[str]) -> Iterator[Finding]:
    listed = {_bare(model.name) for model in facts.models or ()}
    default = facts.spec.default_model
    if default and _bare(default) not in listed:
        remedy = "set CLOUD_MODEL (or the provider's model) to a name that it lists"
        yield wrong(Code.CLOUD_MODEL, facts.about, f"its default model '{default}' is not in its list", remedy)
    for name in wanted:
        if _bare(name) not in listed:
            remedy = "correct the name in MODEL_MAP"
            yield warning(Code.CLOUD_MODEL, facts.about, f"MODEL_MAP's '{name}' is not in its list", remedy)


def _bare(name: str) -> str:
    """Google lists its models below `models/`."""
    return name.lower().removeprefix("models/")


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _off_by(ahead: float) -> str:
    return f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
