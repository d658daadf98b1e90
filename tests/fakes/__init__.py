"""Fake nodes on real sockets, faithful when well and broken on request."""

from demo.httpd import Received
from demo.ollama import Model
from demo.script import Delta, Script, ToolCall
from tests.fakes.behaviour import Behaviour, Fault, On, Stage, stage
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
    "Model",
    "NodeProcess",
    "On",
    "Received",
    "Script",
    "Stage",
    "State",
    "ToolCall",
    "stage",
]
