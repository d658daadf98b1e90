"""Which candidates one request still has, and what became of those that it tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from app.domain import Failure, NodeState, Request, Role
from app.errors import NodeFailure, Overloaded, SpendingRefused
from app.routing.forecast import Progress
from app.routing.gate import cloud_refusal
from app.routing.job import Job
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail

_ROUTABLE = (NodeState.HEALTHY, NodeState.UNKNOWN)


class Pairing(Protocol):
    """Who knows which nodes share generations."""

    def serves_alone(self, node: Node) -> bool:
        """Whether a decode node may do a whole generation by itself."""
        ...


class Plan:
    """Which candidates one request still has, and what became of those that it tried."""

    def __init__(
        self,
        request: Request,
        route: Route,
        registry: Registry,
        trail: Trail,
        deadline: float,
        pairing: Pairing | None = None,
    ) -> None:
        self.request = request
        self.route = route
        self.trail = trail
        self.deadline = deadline
        self.failures: list[tuple[Candidate, NodeFailure]] = []
        self.unpaid: SpendingRefused | None = None  # why the last cloud target that was left could not be paid
        self.overloaded: Overloaded | None = None  # local nodes stayed full for as long as a request may wait
        self.committed = False
        self.job: Job | None = None  # made when a policy asks for it
        self.progress: Progress | None = None  # on the node that was chosen while it waited
        self.cloud_refusal = cloud_refusal(request, route)
        self._registry = registry
        self._pairing = pairing
        self._tried: set[Node] = set()

    def tiers(self) -> Iterable[list[Candidate]]:
        """Who may be asked next, tier by tier: the cloud only where the gate lets the request through."""
        if self._pairing is not None:
            yield [each for each in self.open(self._with_role(Role.DECODE)) if self._pairing.serves_alone(each.node)]
        yield self.local()
        if self.cloud_refusal is None:
            for node in self._registry.cloud():
                name = node.cloud_name(self.route.cloud)
                if name is not None and self._open(node):
                    yield [Candidate(node, name)]

    def local(self) -> list[Candidate]:
        if self.route.local is None:
            return []
        serving = self._registry.serving(self.route.local)
        return [each for each in serving if each.node.spec.role is Role.HYBRID and self._open(each.node)]

    def open(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that may still be asked."""
        return [candidate for candidate in candidates if self._open(candidate.node)]

    def like(self, candidates: list[Candidate]) -> list[Candidate]:
        """Who may be asked in the place of these local ones by now: perhaps also one that has come back meanwhile."""
        return self.local() if candidates[0].node.spec.role is Role.HYBRID else self.open(candidates)

    def local_nodes(self) -> list[Node]:
        """Local nodes that serve the model, or may: those that were never reached."""
        if self.route.local is None:
            return []
        return [candidate.node for candidate in self._local()] or self._registry.unlisted() or self._registry.local()

    def has_cloud(self) -> bool:
        return bool(self._registry.cloud())

    def last_resort(self) -> list[Candidate]:
        """Local nodes that are up but under suspicion: still loading, or failing although probes say that they are up.

        Only for when nobody else is left: refusing every request for a while would help nobody.
        """
        return [
            candidate
            for candidate in self._local()
            if candidate.node not in self._tried
            and not candidate.node.draining
            and candidate.node.kind is not None
            and candidate.node.state in (NodeState.LOADING, NodeState.HEALTHY)
        ]

    def pairs(self) -> list[tuple[list[Candidate], list[Candidate]]]:
        """Prefill and decode nodes that may share this request, by kind: nodes of two kinds do not pair."""
        if self._pairing is None:
            return []
        sides = (self.open(self._with_role(Role.PREFILL)), self.open(self._with_role(Role.DECODE)))
        kinds = dict.fromkeys(each.node.known_kind.name for each in sides[0])
        split = [
            tuple([each for each in side if each.node.known_kind.name == kind] for side in sides) for kind in kinds
        ]
        return [(prefill, decode) for prefill, decode in split if prefill and decode]

    def release(self, candidate: Candidate) -> None:
        """Lets a node that did its part, or was not asked after all, be chosen again."""
        self._tried.discard(candidate.node)

    def choose(self, candidate: Candidate) -> None:
        self._tried.add(candidate.node)

    def failed(self, candidate: Candidate, failure: NodeFailure) -> None:
        self.failures.append((candidate, failure))

    def more_candidates(self) -> bool:
        return bool(self.pairs()) or any(any(tier) for tier in self.tiers())

    def may_wait(self) -> bool:
        """Whether it makes sense to try again later: somebody only said that it is busy."""
        return any(failure.failure is Failure.BUSY for _, failure in self.failures)

    def forgive_busy(self) -> bool:
        """Lets nodes that were only busy be asked once more; False when there are none."""
        busy = {candidate.node for candidate, failure in self.failures if failure.failure is Failure.BUSY}
        self._tried -= busy
        return bool(busy)

    def _local(self) -> Iterable[Candidate]:
        """Nodes that do a whole generation by themselves."""
        return self._with_role(Role.HYBRID)

    def _with_role(self, role: Role) -> Iterable[Candidate]:
        if self.route.local is None:
            return ()
        return [each for each in self._registry.serving(self.route.local) if each.node.spec.role is role]

    def _open(self, node: Node) -> bool:
        return (
            node.state in _ROUTABLE
            and not node.draining
            and node.kind is not None
            and node not in self._tried
            and node.breaker.would_admit()
        )
