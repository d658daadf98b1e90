"""How well policies place chat sessions on uneven clusters, in simulated time.

Run: python -m benchmarks.scheduling [--clusters twelve,pair] [--policies shortest_expected_delay,least_connections]
     [--seeds 1,2,3] [--sessions 60] [--load 1.0] [--kill] [--no-hints]

A workload is a number of sessions of several turns; each turn repeats the whole conversation so far, and sessions of
a model share long system prompts. `stretch` is the mean of a request's whole time over the time that it would take
alone on the fastest node, with the model loaded and what was said before cached. `placed` is not a policy that
anybody could have: each model's sessions go to the nodes that someone chose who knew the cluster and the workload.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.routing.forecast import Forecast
from app.routing.job import Job
from app.routing.policies import POLICIES, Policy
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.registry import Candidate
from benchmarks.cluster import Cluster, Machine, run

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "


@dataclass(frozen=True)
class Scene:
    """A cluster, what is asked of it, and where someone who knew both would put each model."""

    machines: tuple[Machine, ...]
    shares: Mapping[str, float]
    rate: float  # sessions a second
    placement: Mapping[str, tuple[int, ...]]
    think: float = 1.0  # how long clients think, against the usual


def _big(*models: str, **more: Any) -> Machine:
    return Machine(5000, 90, 8, models, 80_000, 2, 8, **more)


def _medium(*models: str, **more: Any) -> Machine:
    return Machine(1800, 40, 4, models, 30_000, 1, 11, **more)


def _small(*models: str, **more: Any) -> Machine:
    return Machine(600, 15, 2, models, 12_000, 1, 18, **more)


def scenes() -> dict[str, Scene]:
    five = ("chat", "code", "big", "vision", "tiny")
    equal = Machine(2500, 50, 4, ("chat", "code"), 30_000, 1, 9)
    return {
        "four": Scene(
            (
                Machine(4000, 80, 8, ("chat", "code", "big"), 60_000, 2, 8, honest=False),
                Machine(2000, 45, 4, ("chat", "code"), 30_000, 1, 10, honest=False),
                Machine(2000, 45, 4, ("chat", "code"), 30_000, 1, 10, honest=False),
                Machine(700, 18, 2, ("chat", "code", "big"), 15_000, 1, 15, honest=False),
            ),
            {"chat": 0.7, "code": 0.2, "big": 0.1},
            0.5,
            {"chat": (0,), "big": (0,), "code": (1, 2)},
        ),
        "twelve": Scene(
            (
                *(_big(*five) for _ in range(3)),
                *(_medium("chat", "code", "vision", "tiny") for _ in range(4)),
                *(_medium("chat", "code", "tiny", slots_per_model=True) for _ in range(2)),
                *(_small("chat", "tiny", "big") for _ in range(3)),
            ),
            {"chat": 0.4, "code": 0.25, "big": 0.15, "vision": 0.1, "tiny": 0.1},
            1.6,
            {"chat": (0, 1), "big": (2,), "code": (3, 4, 7), "vision": (5,), "tiny": (6,)},
        ),
        "pair": Scene((equal, equal), {"chat": 0.6, "code": 0.4}, 0.3, {"chat": (0,), "code": (1,)}),
        "twins": Scene(
            (replace(equal, models=("chat",)), replace(equal, models=("chat",))), {"chat": 1.0}, 0.5, {"chat": (0, 1)}
        ),
        "single": Scene((replace(equal, models=("chat",)),), {"chat": 1.0}, 0.3, {"chat": (0,)}),
    }


def random_scene(seed: int) -> Scene:
    """Some cluster; `placement` is a guess: the fastest nodes, by share."""
    rng = random.Random(seed)
    models = tuple("abcde"[: rng.randint(2, 5)])
    machines = []
    for _ in range(rng.randint(3, 9)):
        speed = 10 * 2 ** rng.uniform(0, 3.3)
        own = tuple(model for model in models if rng.random() < 0.7) or (rng.choice(models),)
        machines.append(
            Machine(
                speed * rng.uniform(25, 60),
                speed,
                rng.choice((1, 2, 4, 4, 8)),
                own,
                rng.randint(10, 80) * 1000,
                rng.choice((1, 1, 2, 3)),
                rng.uniform(4, 20),
                rng.uniform(0.03, 0.25),
                rng.random() < 0.5,
            )
        )
    machines[0] = replace(machines[0], models=models)
    weights = [rng.uniform(0.5, 2) for _ in models]
    shares = {model: weight / sum(weights) for model, weight in zip(models, weights, strict=True)}
    capacity = sum(machine.decode_tps * machine.slots**0.7 for machine in machines)
    return Scene(tuple(machines), shares, 0.35 * capacity / 400, {})


def faster(scene: Scene, factor: float) -> Scene:
    """The same with nodes and clients that are faster by a factor; figures in seconds shrink by it."""
    machines = tuple(
        replace(
            machine,
            prefill_tps=machine.prefill_tps * factor,
            decode_tps=machine.decode_tps * factor,
            load_s=machine.load_s / factor,
        )
        for machine in scene.machines
    )
    return replace(scene, machines=machines, rate=scene.rate * factor, think=scene.think / factor)


@dataclass(frozen=True)
class Turn:
    text: str
    tokens: int
    think: float


@dataclass(frozen=True)
class Session:
    at: float
    model: str
    system: str
    turns: tuple[Turn, ...]


def _text(rng: random.Random, tokens: int) -> str:
    return "".join(rng.choices(_LETTERS, k=tokens * 4))


def sessions(scene: Scene, seed: int, count: int, load: float) -> list[Session]:
    rng = random.Random(seed)
    systems = {model: [_text(rng, 1400) for _ in range(3)] for model in scene.shares}
    now, plan = 0.0, []
    for _ in range(count):
        now += rng.expovariate(scene.rate * load)
        model = rng.choices(list(scene.shares), list(scene.shares.values()))[0]
        turns = tuple(
            Turn(
                _text(rng, rng.randint(30, 400)),
                min(600, max(8, int(rng.lognormvariate(4.4, 0.8)))),
                rng.uniform(1, 8) * scene.think,
            )
            for _ in range(rng.randint(1, 6))
        )
        plan.append(Session(now, model, rng.choice(systems[model]), turns))
    return plan


class Placed(Policy):
    """Each model's sessions in turn to the nodes that were chosen for it."""

    schedules = True  # so that it is told the conversation

    def __init__(self, placement: Mapping[str, tuple[int, ...]]) -> None:
        self._placement = placement
        self._seen: dict[int, int] = {}

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        assert job is not None
        places = self._placement[candidates[0].model]
        turn = self._seen.setdefault(job.chain[1], len(self._seen))
        wanted = f"n{places[turn % len(places)]}"
        return [candidate for candidate in candidates if candidate.node.name == wanted]


@dataclass
class Result:
    first: list[float]
    whole: list[float]
    stretch: list[float]
    failed: list[str]
    by_model: dict[str, list[tuple[float, str]]]
    loads: int
    hit: float
    by_node: list[int]

    def row(self) -> str:
        first = sorted(self.first)
        p99 = first[min(len(first) - 1, int(0.99 * len(first)))]
        return (
            f"stretch {statistics.mean(self.stretch):6.2f}  ttft {statistics.mean(first):6.2f} p99 {p99:6.1f}  "
            f"whole {statistics.mean(self.whole):6.2f}  failed {len(self.failed)}  loads {self.loads}  "
            f"hit {self.hit:.2f}  {self.by_node}"
        )


def _ideal(scene: Scene, model: str, fresh: int, tokens: int) -> float:
    best = max((m for m in scene.machines if model in m.models), key=lambda machine: machine.decode_tps)
    return fresh / best.prefill_tps + (tokens - 1) / best.decode_tps


def make(name: str, scene: Scene, clock: Any, seed: int = 1) -> Policy:
    if name == "placed":
        return Placed(scene.placement)
    if name == "shortest_expected_delay":
        return ShortestExpectedDelay(Forecast(clock), random.Random(seed))
    return POLICIES[name]()


def play(
    scene: Scene,
    policy: str,
    *,
    seed: int = 1,
    count: int = 60,
    load: float = 1.0,
    hints: bool = True,
    kill: int | None = None,
    probe_seconds: float = 5.0,
) -> Result:
    """Plays one workload on a cluster. `kill` is the node that dies after a third and comes back after two."""

    async def work() -> Result:
        loop = asyncio.get_running_loop()
        given = [{"max_concurrency": machine.slots} if hints else {} for machine in scene.machines]
        cluster = Cluster(scene.machines, make(policy, scene, loop.time, seed), given, probe_seconds=probe_seconds)
        result = Result([], [], [], [], {}, 0, 0.0, [])
        plan = sessions(scene, seed, count, load)
        tasks = [asyncio.create_task(_session(cluster, scene, each, result)) for each in plan]
        if kill is not None:
            await asyncio.sleep(plan[-1].at / 3)
            cluster.engines[kill].crash()
            await asyncio.sleep(plan[-1].at / 3)
            cluster.engines[kill].down = False
        await asyncio.gather(*tasks)
        result.loads = sum(engine.loads for engine in cluster.engines)
        result.by_node = [engine.requests for engine in cluster.engines]
        prompt = sum(engine.prompt_tokens for engine in cluster.engines)
        result.hit = sum(engine.hit_tokens for engine in cluster.engines) / max(1, prompt)
        await cluster.close()
        return result

    result: Result = run(work)
    return result


async def _session(cluster: Cluster, scene: Scene, session: Session, result: Result) -> None:
    await asyncio.sleep(session.at)
    messages = [{"role": "system", "content": session.system}]
    for turn in session.turns:
        messages.append({"role": "user", "content": turn.text})
        try:
            first, whole, trail = await cluster.ask(session.model, messages, turn.tokens)
            ideal = _ideal(scene, session.model, len(turn.text) // 4, turn.tokens)
            result.first.append(first)
            result.whole.append(whole)
            result.stretch.append(whole / ideal)
            result.by_model.setdefault(session.model, []).append((whole / ideal, trail.node))
        except Exception as error:
            result.failed.append(f"{type(error).__name__}: {error}")
        messages.append({"role": "assistant", "content": "t" * turn.tokens * 4})
        await asyncio.sleep(turn.think)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", default="four,twelve,pair,twins,single")
    parser.add_argument("--policies", default="placed,shortest_expected_delay,least_connections,round_robin")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--probe-seconds", type=float, default=5.0)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--speedup", type=float, default=1.0, help="of the nodes and clients, against Hearth")
    parser.add_argument("--no-hints", action="store_true")
    parser.add_argument("-v", action="store_true")
    args = parser.parse_args(argv)
    known = scenes()
    for name in args.clusters.split(","):
        scene = random_scene(int(name.removeprefix("random"))) if name.startswith("random") else known[name]
        scene = faster(scene, args.speedup)
        for policy in args.policies.split(","):
            if policy == "placed" and not scene.placement:
                continue
            results = [
                play(
                    scene,
                    policy,
                    seed=int(seed),
                    count=args.sessions,
                    load=args.load,
                    hints=not args.no_hints,
                    kill=args.kill,
                    probe_seconds=args.probe_seconds,
                )
                for seed in args.seeds.split(",")
            ]
            if args.v:
                for seed, result in zip(args.seeds.split(","), results, strict=True):
                    print(f"    seed {seed}: {result.row()} {result.failed[:1] or ''}")
            whole = Result(
                [x for r in results for x in r.first],
                [x for r in results for x in r.whole],
                [x for r in results for x in r.stretch],
                [x for r in results for x in r.failed],
                {m: [x for r in results for x in r.by_model.get(m, [])] for m in scene.shares},
                sum(r.loads for r in results) // len(results),
                statistics.mean(r.hit for r in results),
                [sum(column) for column in zip(*(r.by_node for r in results), strict=True)],
            )
            if args.v:
                for model, rows in whole.by_model.items():
                    places = Counter(node for _, node in rows)
                    print(f"    {model:8} stretch {statistics.mean(s for s, _ in rows):6.2f} of {len(rows):4} {places}")
            print(f"{name:8} {policy:24} {whole.row()}", flush=True)


if __name__ == "__main__":
    main()
