"""The kinds of fake nodes, one class each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, Unpack

from demo.ollama import Model, Ollama
from demo.script import Script, ScriptOptions
from tests.fakes import flavours
from tests.fakes.node import FakeNode
from tests.fakes.openai import Flavour, OpenAI, State


class Placement(TypedDict, total=False):
    """Where a node listens, and how much it serves."""

    port: int
    slots: int | None
    queue: int | None


class NodeOptions(ScriptOptions, Placement, total=False):
    """What every kind takes: its placement, and the fields of Script."""


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

    def __init__(
        self,
        models: Iterable[str] = ("model",),
        *,
        api_key: str | None = None,
        state: State = State.READY,
        flavour: Flavour | None = None,
        **options: Unpack[NodeOptions],
    ) -> None:
        super().__init__(OpenAI(flavour or self.flavour, models, _script(options), api_key), **_placement(options))
        self.engine.state = state
        self.engine.busy = lambda: self.open


class FakeVLLM(FakeOpenAI):
    flavour = flavours.VLLM


class FakeTGI(FakeOpenAI):
    flavour = flavours.TGI


class FakeLMDeploy(FakeOpenAI):
    flavour = flavours.LMDEPLOY


class FakeLlamaCpp(FakeOpenAI):
    flavour = flavours.LLAMACPP


class FakeSGLang(FakeOpenAI):
    flavour = flavours.SGLANG


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
