"""Which candidates one request still has, and what became of those that it tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from app.domain import Failure, NodeState, Request, Role, Usage
from app.errors import NodeFailure, Overloaded, RequestRefused, SpendingRefused
from app.providers.base import Answer
from app.routing.forecast import Progress
from app.routing.gate import cloud_refusal
from app.routing.job import Job
from app.routing.obstacles import Obstacle, obstacles, usable
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from app.routing.windows import SHORT_BODY_BYTES, least_tokens, window


class Pairing(Protocol):
    """Who knows which nodes share generations."""

    def serves_alone(self, node: Node) -> bool:
        """Whether a decode node may do a whole generation by itself."""
        ...


class Rest(Protocol):
    """The rest of an answer that another node began."""

    def request(self) -> Request:
        """What is asked for, in the words that all kinds share."""
        ...

    def request_for(self, node: Node) -> Request:
        """What this very node is asked. Raises `NodeFailure` when it cannot be."""
        ...

    def answer(self, answer: Answer) -> Answer:
        """The node's answer, joined to what the client has."""
        ...

    def total(self, usage: Usage) -> Usage:
        """What all parts took, from what the last one did."""
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
        self.too_long: RequestRefused | None = None  # what the first node said for whose context the prompt is too long
        self.committed = False
        self.rest: Rest | None = None  # what is asked for when a node died after the commit
        self.merges: bool | None = None  # whether the answer is a part of the client's last message, once asked
        self.job: Job | None = None  # made when a policy asks for it
        self.spill_seconds: float | None = None  # the cloud is asked when the first token would be later than that
        self.progress: Progress | None = None  # on the node that was chosen while it waited
        self.cloud_refusal = trail.cloud_refusal = cloud_refusal(request, route)
        self._registry = registry
        self._pairing = pairing
        self._tried: set[Node] = set()
        self._again: Candidate | None = None  # the one that failed last, if it is to be asked once more
        self._more_than: int | None = None  # tokens that are known not to be enough
        self._least: int | None = None  # tokens that the prompt has at least, once counted

    def tiers(self) -> Iterable[list[Candidate]]:
        """Who may be asked next, tier by tier: the cloud only where the gate lets the request through.

        Those whose context is surely too small for the prompt come last of all. One that is to be asked again comes
        first; the cloud's turn is where it is anyhow.
        """
        again = self._again
        if again is not None and not again.node.cloud and not again.node.full and self._open(again.node):
            yield [again]
        if self._fits_everywhere:
            yield from self._tiers()
            return
        late = []
        for tier in self._tiers():
            fitting = self._fitting(tier)
            yield fitting
            late.append([each for each in tier if each not in fitting])
        if self._more_than is None:
            yield from map(self.open, late)

    def _tiers(self) -> Iterable[list[Candidate]]:
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
        whole = Role.HYBRID
        return self.open([each for each in self._registry.serving(self.route.local) if each.node.spec.role is whole])

    def open(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that may still be asked."""
        tried = self._tried  # not by `_open`: this is done for every node and every attempt
        return [each for each in candidates if usable(each.node) and each.node not in tried]

    def like(self, candidates: list[Candidate]) -> list[Candidate]:
        """Who may be asked in the place of these local ones by now: perhaps also one that has come back meanwhile."""
        if candidates[0].node.spec.role is not Role.HYBRID:
            return self.open(candidates)
        if self._fits_everywhere or not self._fits(candidates[0]):
            return self.local()
        return self._fitting(self.local())

    def obstacles(self, node: Node) -> list[Obstacle]:
        """Why the node cannot be asked (any more); empty exactly when it can."""
        tried = [Obstacle("tried", "it was tried")] if node in self._tried else []
        return [*obstacles(node), *tried]

    def candidate(self, node: Node) -> Candidate | None:
        """The node with its own name for the model; None when it cannot serve it, whatever its state."""
        if node.cloud:
            name = node.cloud_name(self.route.cloud)
            return None if name is None else Candidate(node, name)
        serving = () if self.route.local is None else self._registry.serving(self.route.local)
        return next((each for each in serving if each.node is node), None)

    def has_role(self, node: Node) -> bool:
        """Whether the node would do the whole of the generation, and not a part of it."""
        if node.spec.role is Role.DECODE and self._pairing is not None:
            return self._pairing.serves_alone(node)
        return node.cloud or node.spec.role is Role.HYBRID

    def comes_late(self, candidate: Candidate) -> bool:
        """Whether its context is surely too small, so that it is asked last of all."""
        return not self._fits_everywhere and not self._fits(candidate)

    def local_nodes(self) -> list[Node]:
        """Local nodes that serve the model, or may: those that were never reached."""
        if self.route.local is None:
            return []
        return [candidate.node for candidate in self._local()] or self._registry.unlisted() or self._registry.local()

    def has_cloud(self) -> bool:
        return bool(self._registry.cloud())

    def cloud_nodes(self) -> list[Node]:
        return self._registry.cloud()

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
            and (self._more_than is None or self._fits(candidate))
        ]

    def pairs(self) -> list[tuple[list[Candidate], list[Candidate]]]:
        """Prefill and decode nodes that may share this request, by kind: nodes of two kinds do not pair."""
        if self._pairing is None or self._more_than is not None:
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
        self._again = candidate if self._deserves_another(candidate.node, failure) else None
        if self._again is not None:
            self._tried.discard(candidate.node)

    def go_on(self, rest: Rest, candidate: Candidate, failure: NodeFailure, unable: Iterable[Node]) -> None:
        """Plans the rest of an answer that the candidate did not end, without those that cannot go on with it."""
        self.failed(candidate, failure)
        self._again = self._least = None
        self._tried.add(candidate.node)
        self._tried.update(unable)
        self.rest, self.request = rest, rest.request()
        self.committed = False
        self.job = self.progress = self.unpaid = self.overloaded = None
        self.trail.part_ended()

    def ask_otherwise(self, first: Candidate | None = None) -> None:
        """Plans what is now the rest, in other words than before. `first` is asked in those words before all others."""
        assert self.rest is not None
        self.request = self.rest.request()
        self._least = self.job = self.overloaded = None
        self._again = first
        if first is not None:
            self._tried.discard(first.node)

    def refused(self, candidate: Candidate, refusal: RequestRefused) -> NodeFailure:
        """Takes note that the prompt is too long for the candidate: only a larger context can help from now on.

        Returns what this is for the loop of attempts. The client gets the refusal itself when nobody can help.
        """
        room = window(candidate, self.route.num_ctx)
        # Where the node's context is not known, only one that holds the prompt for sure is worth another attempt.
        self._more_than = max(self._more_than or 0, room or len(self.request.body) // 2)
        self.too_long = self.too_long or refusal
        failure = NodeFailure(Failure.CONTEXT_TOO_SMALL, refusal.message, status=refusal.status, counts=False)
        self.failed(candidate, failure)
        return failure

    def more_candidates(self) -> bool:
        return bool(self.pairs()) or any(any(tier) for tier in self.tiers())

    def asks_again(self) -> bool:
        """Whether the node that failed last is asked once more."""
        return self._again is not None and self._open(self._again.node)

    def repeats(self, candidate: Candidate) -> bool:
        """Whether the candidate has just failed, and is asked once more."""
        return self._again is not None and self._again.node is candidate.node

    def may_wait(self) -> bool:
        """Whether it makes sense to try again later: somebody only said that it is busy."""
        return any(
            failure.failure is Failure.BUSY and (self._more_than is None or self._fits(candidate))
            for candidate, failure in self.failures
        )

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

    def _deserves_another(self, node: Node, failure: NodeFailure) -> bool:
        """Whether the node has not heard the request, and may be asked as often as its `retries` say."""
        if not node.spec.retries or node.spec.role is not Role.HYBRID or not _unheard(failure):
            return False
        return sum(each.node is node and _unheard(why) for each, why in self.failures) <= node.spec.retries

    def _fitting(self, candidates: list[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if self._fits(candidate)]

    def _fits(self, candidate: Candidate) -> bool:
        """Whether the prompt may fit into the candidate's context, as far as that is known."""
        room = window(candidate, self.route.num_ctx)
        if self._more_than is not None:
            return room is not None and room > self._more_than
        if room is None or len(self.request.body) <= room:
            return True
        if self._least is None:
            self._least = least_tokens(self.request)
        return self._least <= room

    @property
    def _fits_everywhere(self) -> bool:
        return self._more_than is None and len(self.request.body) < SHORT_BODY_BYTES

    def _open(self, node: Node) -> bool:
        return node not in self._tried and usable(node)


def _unheard(failure: NodeFailure) -> bool:
    """Whether the node surely did not begin the request, or hung up on it before it answered."""
    return not failure.sent or failure.failure is Failure.DISCONNECTED
