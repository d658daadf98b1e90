"""Reads PromQL as far as our boards and alerts use it: what a query asks for, and whether it is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"[^\"]*\")|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<name>[a-zA-Z_:][\w:]*)|(?P<operator>=~|!~|!=|==|<=|>=|[-+*/<>={}(),]))"
)
_AGGREGATIONS = frozenset({"sum", "min", "max", "avg", "count"})
_OVER_RANGES = frozenset({"rate", "increase"})
_FUNCTIONS = _OVER_RANGES | {"histogram_quantile"}
_BINARY = frozenset({"+", "-", "*", "/", "<", ">", "==", "!=", "<=", ">="})
_MATCH = frozenset({"=", "!=", "=~", "!~"})


class Selector(NamedTuple):
    """A metric, and the values that its labels must have, where these are given exactly or as `$job`."""

    metric: str
    matchers: dict[str, str]


class Query(NamedTuple):
    """What it asks for; `grouped` are the labels of its groupings."""

    selectors: list[Selector]
    grouped: set[str]


def read_query(text: str) -> Query:
    """Raises ValueError for what is no query."""
    reader = _Reader(text)
    reader.expression()
    if reader.kind:
        raise ValueError(f"{text!r}: {reader.value!r} was not expected")
    return Query(reader.selectors, reader.grouped - {"le"})


class _Reader:
    def __init__(self, text: str) -> None:
        self.selectors: list[Selector] = []
        self.grouped: set[str] = set()
        self.kind: str | None = ""
        self.value = ""
        self._text, self._at = text.rstrip(), 0
        self._next()

    def expression(self) -> None:
        self._operand()
        while self.value in _BINARY and self.kind == "operator":
            self._next()
            self._operand()

    def _operand(self) -> None:
        if self.kind == "number":
            self._next()
        elif self.value == "(":
            self._within("(", self.expression, ")")
        elif self.value in _AGGREGATIONS:
            self._next()
            if self.value == "by":
                self._next()
                self._within("(", self._labels, ")")
            self._within("(", self.expression, ")")
        elif self.value in _FUNCTIONS:
            self._call()
        elif self.kind == "name":
            self._selector()
        else:
            raise self._wrong()

    def _call(self) -> None:
        function = self.value
        self._next()
        if function in _OVER_RANGES:
            self._within("(", lambda: self._selector(over_range=True), ")")
        else:
            self._within("(", lambda: self._listed(self.expression), ")")

    def _selector(self, *, over_range: bool = False) -> None:
        selector = Selector(self._take("name"), {})
        if self.value == "(":
            raise self._wrong()
        if self.value == "{":
            self._within("{", lambda: self._listed(lambda: self._matcher(selector)), "}")
        if over_range:
            self._take("range")
        self.selectors.append(selector)

    def _matcher(self, selector: Selector) -> None:
        label, operator, value = self._take("name"), self._take("operator"), self._take("string")
        if operator not in _MATCH:
            raise self._wrong()
        if operator != "=" and value != '"$job"':
            raise ValueError(f"{label}{operator}{value} cannot be checked")
        selector.matchers[label] = value.strip('"')

    def _labels(self) -> None:
        self._listed(lambda: self.grouped.add(self._take("name")))

    def _listed(self, item: Callable[[], object]) -> None:
        item()
        while self.value == ",":
            self._next()
            item()

    def _within(self, opening: str, what: Callable[[], object], closing: str) -> None:
        self._expect(opening)
        what()
        self._expect(closing)

    def _expect(self, operator: str) -> None:
        if self.value != operator or self.kind != "operator":
            raise self._wrong()
        self._next()

    def _take(self, kind: str) -> str:
        if self.kind != kind:
            raise self._wrong()
        value = self.value
        self._next()
        return value

    def _next(self) -> None:
        if self._at == len(self._text):
            self.kind, self.value = None, ""
            return
        match = _TOKEN.match(self._text, self._at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{self._text[self._at :]!r} is no PromQL")
        self.kind, self.value, self._at = match.lastgroup, match[match.lastgroup], match.end()

    def _wrong(self) -> ValueError:
        return ValueError(f"{self._text!r}: {self.value or 'its end'!r} was not expected")
