"""Fake nodes on real sockets, faithful when well and broken on request."""

from demo.httpd import Received
from demo.ollama import Model
from demo.script import Delta, Script, ToolCall
from tests.fakes.behaviour import Behaviour, Fault, On, Stage, stage
from tests.fakes.distserve import Ids
from tests.fakes.kinds import (
    KINDS,
    FakeCloud,
    FakeGeneric,
    FakeLlamaCpp,
    FakeLMDeploy,
    FakeLMStudio,
    FakeOllama,
    FakeOpenAI,
    FakeSGLang,
    FakeTGI,
    FakeTransformers,
    FakeVLLM,
)
from tests.fakes.node import FakeNode
from tests.fakes.openai import State
from tests.fakes.process import NodeProcess
from tests.fakes.sharing import Role

__all__ = [
    "KINDS",
    "Behaviour",
    "Delta",
    "FakeCloud",
    "FakeGeneric",
    "FakeLMDeploy",
    "FakeLMStudio",
    "FakeLlamaCpp",
    "FakeNode",
    "FakeOllama",
    "FakeOpenAI",
    "FakeSGLang",
    "FakeTGI",
    "FakeTransformers",
    "FakeVLLM",
    "Fault",
    "Ids",
    "Model",
    "NodeProcess",
    "On",
    "Received",
    "Role",
    "Script",
    "Stage",
    "State",
    "ToolCall",
    "stage",
]
