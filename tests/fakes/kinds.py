"""The kinds of fake nodes, one class each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, Unpack

from demo.ollama import Model, Ollama
from demo.script import Script, ScriptOptions
from tests.fakes import flavours
from tests.fakes.distserve import DistServe, Ids
from tests.fakes.nixl import Nixl
from tests.fakes.node import FakeNode
from tests.fakes.openai import Flavour, OpenAI, State
from tests.fakes.rooms import Bootstrapped
from tests.fakes.sharing import Role


class Placement(TypedDict, total=False):
    """Where a node listens, and how much it serves."""

    port: int
    slots: int | None
    queue: int | None


class NodeOptions(ScriptOptions, Placement, total=False):
    """What every kind takes: its placement, and the fields of Script."""


class OpenAIOptions(NodeOptions, total=False):
    """What every kind takes that speaks OpenAI's API."""

    api_key: str | None
    state: State


PLACEMENT = frozenset(Placement.__annotations__)


def _placement(options: Mapping[str, Any]) -> Any:
    return {name: value for name, value in options.items() if name in PLACEMENT}


def _script(options: Mapping[str, Any]) -> Script:
    return Script(**{name: value for name, value in options.items() if name not in PLACEMENT})


class FakeOllama(FakeNode[Ollama]):
    """An Ollama: `engine.loaded` and `engine.loads` tell what it did with memory, `load_seconds` a cold start."""

    def __init__(
        self,
        models: Iterable[str | Model] = ("llama3.2:latest",),
        *,
        load_seconds: float = 0.0,
        **options: Unpack[NodeOptions],
    ) -> None:
        super().__init__(Ollama(models, _script(options), load_seconds), **_placement(options))


class FakeOpenAI(FakeNode[OpenAI]):
    """A node of any flavour; with `api_key` it wants `Authorization: Bearer` on /v1."""

    flavour: Flavour = flavours.GENERIC
    engine_type: type[OpenAI] = OpenAI

    def __init__(
        self,
        models: Iterable[str] = ("model",),
        *,
        api_key: str | None = None,
        state: State = State.READY,
        flavour: Flavour | None = None,
        **options: Unpack[NodeOptions],
    ) -> None:
        engine = self.engine_type(flavour or self.flavour, models, _script(options), api_key)
        super().__init__(engine, **_placement(options))
        self.engine.state = state
        self.engine.busy = lambda: self.open
        self.controls, self.details = engine.controls(), engine.details

    async def start(self) -> None:
        await super().start()
        self.engine.port = self.port

    def restart(self) -> None:
        """Ends the process, with all that it holds, and starts another on the same port."""
        self.crash()
        self.engine.restart()
        self.recover()


class FakeVLLM(FakeOpenAI):
    """With a role it has a connector for KV caches: `engine.sessions` are held, for `hold_seconds`."""

    flavour = flavours.VLLM
    engine_type = Nixl
    engine: Nixl

    def __init__(
        self,
        models: Iterable[str] = ("model",),
        *,
        role: str = Role.HYBRID,
        hold_seconds: float = Nixl.hold_seconds,
        **options: Unpack[OpenAIOptions],
    ) -> None:
        super().__init__(models, **options)
        self.engine.role, self.engine.hold_seconds = Role(role), hold_seconds


class FakeTGI(FakeOpenAI):
    flavour = flavours.TGI


class FakeLMDeploy(FakeOpenAI):
    """With a role it shares generations: `engine.sessions` are held, `engine.leaked()` for ever."""

    flavour = flavours.LMDEPLOY
    engine_type = DistServe
    engine: DistServe

    def __init__(
        self,
        models: Iterable[str] = ("model",),
        *,
        role: str = Role.HYBRID,
        ids: str = Ids.SESSION,
        names_session: bool = False,
        tp_size: int = DistServe.tp_size,
        block_size: int = DistServe.block_size,
        **options: Unpack[OpenAIOptions],
    ) -> None:
        super().__init__(models, **options)
        engine = self.engine
        engine.role, engine.ids, engine.names_session = Role(role), Ids(ids), names_session
        engine.tp_size, engine.block_size = tp_size, block_size


class FakeLlamaCpp(FakeOpenAI):
    flavour = flavours.LLAMACPP


class FakeSGLang(FakeOpenAI):
    """With a role it meets others in rooms, of which `engine.met` were kept. Its bootstrap port is the node's own."""

    flavour = flavours.SGLANG
    engine_type = Bootstrapped
    engine: Bootstrapped

    def __init__(
        self,
        models: Iterable[str] = ("model",),
        *,
        role: str = Role.HYBRID,
        room_seconds: float = Bootstrapped.room_seconds,
        **options: Unpack[OpenAIOptions],
    ) -> None:
        super().__init__(models, **options)
        self.engine.role, self.engine.room_seconds = Role(role), room_seconds


class FakeTransformers(FakeOpenAI):
    flavour = flavours.TRANSFORMERS


class FakeLMStudio(FakeOpenAI):
    flavour = flavours.LMSTUDIO


class FakeGeneric(FakeOpenAI):
    flavour = flavours.GENERIC


class FakeCloud(FakeOpenAI):
    """A paid API: it charges for `engine.calls`, `engine.prompt_tokens` and `engine.completion_tokens`."""

    flavour = flavours.CLOUD

    def __init__(
        self,
        models: Iterable[str] = ("gpt-4o-mini",),
        *,
        api_key: str | None = "sk-cloud-key-for-tests-0001",
        **options: Unpack[NodeOptions],
    ) -> None:
        super().__init__(models, api_key=api_key, **options)


KINDS: Mapping[str, Callable[..., FakeOllama | FakeOpenAI]] = {
    "ollama": FakeOllama,
    "vllm": FakeVLLM,
    "tgi": FakeTGI,
    "lmdeploy": FakeLMDeploy,
    "llamacpp": FakeLlamaCpp,
    "sglang": FakeSGLang,
    "transformers": FakeTransformers,
    "lmstudio": FakeLMStudio,
    "generic": FakeGeneric,
    "cloud": FakeCloud,
}
