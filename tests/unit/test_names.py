"""Which names mean the same model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.names import Source, canonical, close_names, display, matches, parse, split_source

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "wire" / "vectors" / "ollama_names.json").read_text()
)
LIBRARY = "registry.ollama.ai/library"

ollama_like = st.text(alphabet="aB1_-.:/ ", max_size=30).flatmap(
    lambda name: st.sampled_from(["", ":cloud", "-cloud", ":local", ":latest"]).map(lambda ending: name + ending)
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["input"][:30] or "empty")
def test_names_are_read_as_ollama_reads_them(vector: dict[str, Any]) -> None:
    name = parse(vector["input"])

    assert (name is not None) == vector["valid"]
    if name is not None:
        assert (name.full, name.display, name.source) == (vector["full"], vector["display"], vector["source"])
    if vector["error"] is None:
        assert split_source(vector["input"]) == (vector["base"], vector["source"])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama3.2", f"{LIBRARY}/llama3.2:latest"),
        (" LLaMA3.2:Latest ", f"{LIBRARY}/llama3.2:latest"),
        ("library/llama3.2", f"{LIBRARY}/llama3.2:latest"),
        ("Registry.Ollama.AI/Library/llama3.2", f"{LIBRARY}/llama3.2:latest"),
        ("qwen3:8b:local", f"{LIBRARY}/qwen3:8b"),
        ("hf.co/bartowski/X-GGUF:Q4_K_M", "hf.co/bartowski/x-gguf:q4_k_m"),
        ("localhost:5000/ns/m", "localhost:5000/ns/m:latest"),
        ("gpt-oss:120b:cloud", f"{LIBRARY}/gpt-oss:120b-cloud"),
        ("GPT-OSS:120b-Cloud", f"{LIBRARY}/gpt-oss:120b-cloud"),
        ("gpt-oss:cloud", f"{LIBRARY}/gpt-oss:latest-cloud"),
        ("a:cloud:local", None),
        ("a:1-cloud:cloud", None),
        ("host:5000/m", None),
        ("/m", None),
        ("m/", None),
        (":tag", None),
        ("mödel", None),
    ],
)
def test_the_key_is_equal_for_names_that_mean_the_same(name: str, key: str | None) -> None:
    assert canonical(name) == key


def test_a_cloud_name_is_never_taken_for_the_local_model() -> None:
    """A node that only has the stub of a cloud model would send the request out of the house."""
    assert canonical("gpt-oss:120b") != canonical("gpt-oss:120b-cloud")


@given(ollama_like)
def test_the_shown_name_means_the_same(name: str) -> None:
    shown = display(name)
    split = split_source(name)
    if shown is not None and split is not None and split[1] is not Source.CLOUD:
        assert canonical(shown) == canonical(name)


@given(st.text())
def test_any_text_is_a_name_or_none(name: str) -> None:
    key = canonical(name)

    assert key is None or re.fullmatch(r"[a-z0-9_.:-]+/[a-z0-9_-]+/[a-z0-9_.-]+:[a-z0-9_.-]+", key)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("gpt-4o", "GPT-4o"),
        ("*", ""),
        ("*", "anything/at:all"),
        ("gpt-*", "gpt-"),
        ("*-mini", "gpt-5-mini"),
        ("a*b*c", "a-b-b-c"),
        ("*b*", "abc"),
        ("a**c", "abc"),
        ("x.y*", "x.yz"),
    ],
)
def test_patterns_match(pattern: str, name: str) -> None:
    assert matches(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("gpt-4o", "gpt-4o-mini"),
        ("gpt-*", "gpt"),
        ("a*a", "a"),
        ("a*b*c", "acb"),
        ("*b*b*", "abc"),
        ("x.y", "xzy"),
        ("a?", "ab"),
        ("[a]", "a"),
    ],
)
def test_patterns_do_not_match(pattern: str, name: str) -> None:
    """Only `*` is special."""
    assert not matches(pattern, name)


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_wildcards_agree_with_a_regular_expression(pattern: str, name: str) -> None:
    expected = re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), name) is not None

    assert matches(pattern, name) == expected


def test_close_names_are_offered_best_first() -> None:
    known = {"llama3.2:3b", "llama3.1:70b-instruct-q4_K_M", "qwen3:8b", "mistral:7b", "gpt-4o"}

    assert close_names("gpt4o", known) == ["gpt-4o"]
    assert close_names("Qwen3:8B", known) == ["qwen3:8b"]
    assert close_names("llama3.1", known) == ["llama3.1:70b-instruct-q4_K_M", "llama3.2:3b"]
    assert close_names("something else", known) == []


def test_at_most_three_names_are_offered() -> None:
    assert close_names("m", [f"m:{size}b" for size in range(9)]) == ["m:0b", "m:1b", "m:2b"]


def test_nothing_is_close_to_nothing() -> None:
    assert close_names(" ", ["a"]) == []
    assert close_names("a", []) == []
