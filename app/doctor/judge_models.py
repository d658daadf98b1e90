"""What there is to say of the models: where they are, and whether they are the same everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.doctor.facts import PlaceFacts
from app.doctor.findings import Code, Finding, good, warning, wrong
from app.domain import LoadedModel, ModelInfo
from app.providers import KINDS
from app.routing.names import canonical, close_names
from app.routing.route_spec import RouteSpec

_SMALL_CONTEXT = 4096  # what Ollama gives where nobody says more, on many machines
_GIB = 2**30
_VRAM_SLACK = 1.05
_SHOWN = 5


def judge_models(nodes: Sequence[PlaceFacts], routes: Sequence[RouteSpec], *, has_cloud: bool) -> list[Finding]:
    """Of the local nodes that answer and list their models."""
    seen = [_Node(facts) for facts in nodes if facts.models is not None or facts.spec.models]
    if not seen:
        return []
    all_seen = len(seen) == len(nodes)
    mapped = [(route, name) for route in routes if (name := _local_name(route))]
    found: list[Finding] = []
    for route, name in mapped:
        found += _route(route, name, seen, all_seen, has_cloud)
    found += _context_changes(mapped)
    for node in seen:
        found += [*_declared(node), *_lacks(node, seen, [name for _, name in mapped])]
        found += _memory(node, _route_contexts(mapped))
    for name, holders in _shared(seen).items():
        found += [*_differs(name, holders), *_contexts(name, holders, _route_contexts(mapped))]
    return found


@dataclass(frozen=True, slots=True)
class _Node:
    """A node and what it serves."""

    facts: PlaceFacts

    @property
    def about(self) -> str:
        return self.facts.about

    @property
    def name(self) -> str:
        return self.facts.spec.name or self.facts.spec.url

    @property
    def tagged(self) -> bool:
        kind = KINDS.get(self.facts.answered or self.facts.spec.kind or "")
        return kind is not None and kind.names_have_tags

    @property
    def takes_num_ctx(self) -> bool:
        kind = KINDS.get(self.facts.answered or self.facts.spec.kind or "")
        return kind is not None and kind.takes_num_ctx

    @property
    def models(self) -> list[ModelInfo]:
        """What Hearth may ask it for: the operator's list limits the node's own."""
        if self.facts.spec.models:
            return [self.listed(name) or ModelInfo(name) for name in self.facts.spec.models]
        return list(self.facts.models or ())

    def key(self, name: str) -> str:
        return _key(name) if self.tagged else name.lower()

    def serves(self, name: str) -> bool:
        return any(self.key(model.name) == self.key(name) for model in self.models)

    def listed(self, name: str) -> ModelInfo | None:
        return next((model for model in self.facts.models or () if self.key(model.name) == self.key(name)), None)

    def loaded(self, name: str) -> LoadedModel | None:
        return next((model for model in self.facts.loaded or () if self.key(model.name) == self.key(name)), None)

    def near(self, name: str) -> str | None:
        """A model that may be the one that was meant: only its tag or the account before it differ."""
        stem = _stem(name)
        return next((model.name for model in self.models if _stem(model.name) == stem), None)


def _key(name: str) -> str:
    """The same for all names of one model, should Ollama serve it."""
    return canonical(name) or name.lower()


def _stem(name: str) -> str:
    return name.lower().rpartition("/")[2].partition(":")[0]


def _local_name(route: RouteSpec) -> str | None:
    name = route.local_for(route.pattern)
    return None if name is None or "*" in name else name


# -- MODEL_MAP


def _route(route: RouteSpec, name: str, nodes: Sequence[_Node], all_seen: bool, has_cloud: bool) -> Iterator[Finding]:
    lacking = [node for node in nodes if not node.serves(name)]
    about = f"model {route.pattern}"
    if not lacking:
        where = "every node" if len(nodes) > 1 else nodes[0].name
        yield good(Code.MODEL, about, f"'{name}' is on {where}")
    elif len(lacking) < len(nodes):
        for node in lacking:
            yield _lacking_there(about, name, node)
    else:
        yield _nowhere(route, name, nodes, all_seen, has_cloud)


def _nowhere(route: RouteSpec, name: str, nodes: Sequence[_Node], all_seen: bool, has_cloud: bool) -> Finding:
    about = f"model {route.pattern}"
    near = [(node.name, found) for node in nodes if (found := node.near(name))]
    if near:
        message = f"no node has '{name}'; {', '.join(f'{node} has {found!r}' for node, found in near[:_SHOWN])}"
        remedy = f"write {near[0][1]!r} into MODEL_MAP if it is meant, or {_fetch(name, nodes[0])}"
        return wrong(Code.MODEL_NAMED_DIFFERENTLY, about, message, remedy)
    message = f"no node {'' if all_seen else 'that answers '}has '{name}'"
    close = close_names(name, (model.name for node in nodes for model in node.models))
    hint = f"; did you mean {close[0]!r}?" if close else ""
    remedy = f"{_fetch(name, nodes[0])}, or correct MODEL_MAP{hint}"
    cloud = has_cloud and route.may_leave
    if cloud or not all_seen:
        elsewhere = "; its requests go to the cloud" if cloud else ""
        return warning(Code.MODEL_MISSING, about, message + elsewhere, remedy)
    return wrong(Code.MODEL_MISSING, about, message, remedy)


def _lacking_there(about: str, name: str, node: _Node) -> Finding:
    near = node.near(name)
    if near:
        message = f"{node.name} has '{near}', and not '{name}', which others have"
        remedy = f"{_fetch(name, node)}, so that it can take over"
        return warning(Code.MODEL_NAMED_DIFFERENTLY, about, message, remedy)
    message = f"{node.name} lacks '{name}', which others have, so that it cannot take over"
    return warning(Code.MODEL_MISSING_THERE, about, message, _fetch(name, node))


def _fetch(name: str, node: _Node) -> str:
    return f"fetch it on {node.name}: ollama pull {name}" if node.tagged else f"load it on {node.name}"


def _context_changes(mapped: Sequence[tuple[RouteSpec, str]]) -> Iterator[Finding]:
    sizes: dict[str, set[int]] = defaultdict(set)
    for route, name in mapped:
        if route.num_ctx:
            sizes[_key(name)].add(route.num_ctx)
    for route, name in mapped:
        several = sizes.pop(_key(name), set())
        if len(several) > 1:
            message = f"MODEL_MAP asks for '{name}' with num_ctx {_numbers(several)}: Ollama reloads it at each change"
            yield warning(Code.CONTEXT_CHANGES, f"model {route.pattern}", message, "give it one num_ctx everywhere")


def _route_contexts(mapped: Sequence[tuple[RouteSpec, str]]) -> dict[str, int]:
    return {_key(name): route.num_ctx for route, name in mapped if route.num_ctx}


# -- node by node


def _declared(node: _Node) -> Iterator[Finding]:
    """What the operator says that it serves."""
    if node.facts.models is None:
        return
    for name in node.facts.spec.models:
        if node.listed(name) is None:
            message = f"its models say '{name}', which it does not list"
            remedy = f"{_fetch(name, node)}, or take it out of the node's models"
            yield wrong(Code.MODEL_DECLARED_ONLY, node.about, message, remedy)


def _lacks(node: _Node, nodes: Sequence[_Node], mapped: Sequence[str]) -> Iterator[Finding]:
    """What its siblings of the same kind have. What MODEL_MAP names is judged there; the operator's list is meant."""
    if node.facts.spec.models or not node.facts.models:
        return
    siblings = [other for other in nodes if other is not node and other.tagged == node.tagged and node.tagged]
    skipped = {node.key(name) for name in mapped}
    names = {node.key(model.name): model.name for other in siblings for model in other.models}
    missing = [name for key, name in names.items() if key not in skipped and not node.serves(name)]
    if missing:
        shown = ", ".join(sorted(missing)[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        remedy = f"where it should take over: ollama pull NAME on {node.name}; else leave it"
        yield warning(Code.MODEL_MISSING_THERE, node.about, f"it lacks what other nodes have: {shown}", remedy)


def _memory(node: _Node, route_contexts: dict[str, int]) -> Iterator[Finding]:
    spec, loaded = node.facts.spec, node.facts.loaded or ()
    used = sum(model.vram_bytes or 0 for model in loaded)
    if spec.vram_gb and used > spec.vram_gb * _GIB * _VRAM_SLACK:
        message = f"vram_gb says {spec.vram_gb:g}, and its models take {used / _GIB:.1f} GiB now"
        yield warning(Code.VRAM_HINT, node.about, message, "set vram_gb to what its GPUs have")
    for model in loaded:
        if model.vram_bytes == 0:
            remedy = "give it a GPU (in Docker: --gpus all), a smaller model, or a low weight"
            yield warning(Code.ON_CPU, node.about, f"'{model.name}' runs on the CPU alone", remedy)
        if node.takes_num_ctx:
            yield from _context(node, model, route_contexts.get(node.key(model.name)) or spec.num_ctx)


def _context(node: _Node, model: LoadedModel, wanted: int | None) -> Iterator[Finding]:
    size = model.context_length
    if size is None:
        return
    if wanted is None and size <= _SMALL_CONTEXT:
        message = f"'{model.name}' has room for {size} tokens only, as num_ctx is not set: longer prompts do not fit"
        remedy = "set num_ctx of the node or in MODEL_MAP, such as 16384; it takes memory"
        yield warning(Code.CONTEXT_SMALL, node.about, message, remedy)
    elif wanted is not None and size != wanted:
        message = f"'{model.name}' is in memory with a context of {size}, and Hearth asks for {wanted}: a reload"
        remedy = "let other programs that use this node ask for the same num_ctx, or go through Hearth"
        yield warning(Code.CONTEXT_CHANGES, node.about, message, remedy)


# -- the same model on several nodes


def _shared(nodes: Sequence[_Node]) -> dict[str, list[tuple[_Node, ModelInfo]]]:
    """Models that two nodes or more have, each with its holders."""
    holders: dict[str, list[tuple[_Node, ModelInfo]]] = defaultdict(list)
    for node in nodes:
        for model in node.models:
            holders[node.key(model.name)].append((node, model))
    return {each[0][1].name: each for each in holders.values() if len(each) > 1}


def _differs(name: str, holders: Sequence[tuple[_Node, ModelInfo]]) -> Iterator[Finding]:
    digests = {node.name: model.digest for node, model in holders if model.digest}
    if len(set(digests.values())) > 1:
        shown = ", ".join(f"{node}: {digest.removeprefix('sha256:')[:12]}" for node, digest in digests.items())
        message = f"it is not the same on all nodes (another version or quantisation): {shown}"
        remedy = f"fetch it anew on each: ollama pull {name}"
        yield warning(Code.MODEL_DIFFERS, f"model {name}", message, remedy)


def _contexts(
    name: str, holders: Sequence[tuple[_Node, ModelInfo]], route_contexts: dict[str, int]
) -> Iterator[Finding]:
    """Where a route says how large the context is, that holds on all nodes that take it from a request."""
    sizes = {node.name: size for node, model in holders if (size := _size(node, model, route_contexts))}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{node}: {size}" for node, size in sizes.items())
        message = f"its context is not equally large on all nodes ({shown}), so that some prompts fit on one alone"
        remedy = "set one num_ctx in MODEL_MAP or on all nodes (other engines: the same --max-model-len)"
        yield warning(Code.CONTEXT_DIFFERS, f"model {name}", message, remedy)


def _size(node: _Node, model: ModelInfo, route_contexts: dict[str, int]) -> int | None:
    loaded = node.loaded(model.name)
    if node.takes_num_ctx:
        in_memory = loaded.context_length if loaded else None
        return route_contexts.get(node.key(model.name)) or node.facts.spec.num_ctx or in_memory
    return (loaded.context_length if loaded else None) or model.context_length


def _numbers(values: set[int]) -> str:
    return " and ".join(str(value) for value in sorted(values))
