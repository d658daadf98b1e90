"""What a decision of `shortest_expected_delay` costs in CPU time, and what telling it of the outcome does.

Run: python -m benchmarks.decision
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import orjson

from app.domain import LoadedModel, ModelInfo, NodeSpec, NodeState, Operation, Outcome, Request, Usage
from app.providers import KINDS
from app.routing.breaker import Breaker
from app.routing.forecast import Forecast
from app.routing.job import Job
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.registry import Candidate, Node

_CONVERSATIONS = 20
_REQUESTS = 4000
# Nodes, messages, characters of each, and nodes that do not hold the model.
_CASES = ((20, 1, 100, 0), (20, 6, 1000, 0), (20, 30, 1000, 0), (2, 1, 100, 0), (1, 1, 100, 0), (20, 6, 1000, 16))


def _node(index: int, *, loads: bool = False, holds: bool = True) -> Node:
    """`loads`: it loads models when they are asked for, and says what it `holds`."""
    spec = NodeSpec(f"http://n{index}", name=f"n{index}", max_concurrency=8)
    made = Node(spec, Breaker(3, 15.0), KINDS["ollama" if loads else "vllm"])
    made.state = NodeState.HEALTHY
    made.list_models([ModelInfo("m", size_bytes=5 * 10**9)])
    if loads:
        made.loaded = {"m": LoadedModel("m")} if holds else {}
    return made


def _requests(messages: int, characters: int) -> list[Request]:
    rng = random.Random(1)
    bodies = [
        orjson.dumps([{"role": "user", "content": "".join(rng.choices("abcdef", k=characters))}] * messages)
        for _ in range(_CONVERSATIONS)
    ]
    # Decoded anew each time, as texts remember their hash.
    fields = [{"messages": orjson.loads(bodies[n % _CONVERSATIONS]), "max_tokens": 100} for n in range(_REQUESTS)]
    return [Request("r", Operation.CHAT, "m", b"", each, stream=True) for each in fields]


def microseconds(nodes: int, messages: int, characters: int, cold: int = 0) -> tuple[float, float]:
    """CPU time per request of the decision, with what is read from the request; and of that with all that follows.

    `cold` of the nodes do not hold the model, but would load it.
    """
    made = [_node(index, loads=cold > 0, holds=index >= cold) for index in range(nodes)]
    candidates = [Candidate(node, "m") for node in made]
    forecast = Forecast()

    def start_load(candidate: Candidate, job: Job) -> None:
        forecast.load_begins(candidate)

    policy = ShortestExpectedDelay(forecast, start_load=start_load)

    def decide(request: Request) -> tuple[Job, Candidate]:
        job = Job(request)
        return job, policy.rank(list(candidates), job)[0]

    def whole(request: Request) -> None:
        job, chosen = decide(request)
        progress = policy.placed(chosen, job)
        assert progress is not None
        progress.began()
        progress.ended(Outcome.OK, Usage(500, 100), None)

    return _timed(whole, messages, characters), _timed(decide, messages, characters)


def _timed(work: Callable[[Request], object], messages: int, characters: int) -> float:
    best = float("inf")
    for _ in range(5):
        requests = _requests(messages, characters)
        began = time.process_time()
        for request in requests:
            work(request)
        best = min(best, time.process_time() - began)
    return best / _REQUESTS * 1e6


def main() -> None:
    for nodes, messages, characters, cold in _CASES:
        whole, decision = microseconds(nodes, messages, characters, cold)
        print(
            f"{nodes:3} nodes ({cold:2} cold), {messages:2} messages of {characters:4} characters: "
            f"decision {decision:5.1f} µs, with all that follows {whole:5.1f} µs"
        )


if __name__ == "__main__":
    main()
