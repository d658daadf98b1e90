"""LMDeploy engines that share generations, as its api_server and its engine's connections do."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from demo.engine import Edit, unchanged
from demo.httpd import Answer, Received, json_answer
from tests.fakes.openai import CHAT, OpenAI, Refusal, State, decoded, prompt_tokens
from tests.fakes.sharing import Control, Remembered, Role, begun_with, one_token, peer, peer_refusal, with_members

DEAD = "the engine loop has ended"
FIRST_SESSION, FIRST_BLOCK, FIRST_TOKEN = 17, 412, 19384
CONFIG_KEYS = ("tp_size", "ep_size", "dp_size", "pp_size", "dp_rank", "block_size", "num_cpu_blocks", "num_gpu_blocks")


class Ids(StrEnum):
    """What an answer has as its `id`, which changed with the versions."""

    SESSION = "session"  # the engine's session, such as "17"
    ASKED = "asked"  # the request's session_id, "-1" by default
    RANDOM = "random"  # "chatcmpl-…" for chats, as ASKED for completions


@dataclass(slots=True)
class Session:
    """A finished prefill that is kept until it is fetched or freed."""

    id: int
    blocks: list[int]
    token: int
    text: str  # of the token
    fetched: bool = False


@dataclass(slots=True)
class Link:
    """What an engine knows of another."""

    own_id: str  # by which the other knows this one
    incarnation: str | None = None  # of the other, once connected


class DistServe(OpenAI):
    """An LMDeploy engine. `sessions` are those held now; `initialized`, `connected` and `freed` count calls.

    A wrong list of blocks ends its loop, as InternLM/lmdeploy#4965 has it: from then on it answers nothing but errors,
    until it is restarted. A migration over a link that is not there, or no more, fails alone.
    """

    role = Role.HYBRID
    ids = Ids.SESSION
    names_session = False  # answers carry cache_session_id
    info_in_string = True  # engine_info is JSON in a JSON string
    tp_size = 1
    block_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.initialized = self.connected = self.dropped = 0
        self.freed: list[int] = []
        self.links: dict[str, Link] = {}
        self.sessions: dict[int, Session] = {}
        self._numbers = itertools.count(FIRST_SESSION)
        self._blocks = itertools.count(FIRST_BLOCK)
        self.restart()

    @property
    def dead(self) -> bool:
        return self.state is State.UNHEALTHY

    def restart(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.links.clear()
        self.sessions.clear()
        if self.dead:
            self.state = State.READY

    def leaked(self) -> list[int]:
        """Sessions that are held although their cache was fetched: whoever fetched it could not name them."""
        return [session.id for session in self.sessions.values() if session.fetched]

    def controls(self) -> Mapping[str, Control]:
        return {"fetch": self._fetched}

    def details(self) -> dict[str, Any]:
        held = {"sessions": len(self.sessions), "leaked": len(self.leaked()), "freed": self.freed}
        return {**held, "initialized": self.initialized, "connected": self.connected, "dropped": self.dropped}

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        try:
            if request.path.startswith("/distserve/"):
                return self._distserve(request)
            if not self.infers(request):
                return await super().answer(request, edit)
            return await self._generated(request, edit)
        except Refusal as refusal:
            return self.error(refusal.status, refusal.message)

    # -- links

    def _distserve(self, request: Received) -> Answer:
        if request.method == "GET" and request.path == "/distserve/engine_info":
            return self.json(json.dumps(self.info()) if self.info_in_string else self.info())
        handlers: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "/distserve/p2p_initialize": self._initialize,
            "/distserve/p2p_connect": self._connect,
            "/distserve/p2p_drop_connect": self._drop,
            "/distserve/free_cache": self._free,
        }
        handle = handlers.get(request.path)
        if handle is None or request.method != "POST":
            return self.flavour.unknown(request)
        try:
            return self.json(handle(dict(request.json)))
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(422, f"not valid: {error!r}") from error

    def info(self) -> dict[str, Any]:
        sizes = {"tp_size": self.tp_size, "ep_size": 1, "dp_size": 1, "pp_size": None, "dp_rank": 0}
        return {**sizes, "block_size": self.block_size, "num_cpu_blocks": 0, "num_gpu_blocks": 1000}

    def _initialize(self, body: dict[str, Any]) -> Any:
        own, remote = body["local_engine_config"], body["remote_engine_config"]
        if own != self.info() or set(remote) != set(CONFIG_KEYS):
            raise ValueError("engine_config")
        if body["protocol"] not in (1, 2, 3) or body["rdma_config"]["link_type"] not in (1, 2):
            raise ValueError("protocol")
        if (body["rank"], body["tcp_config"], body["nvlink_config"]) != (None, None, None):
            raise ValueError("rank")
        self.initialized += 1
        self.links[body["remote_engine_id"]] = Link(body["local_engine_id"])
        transfer = {"protocol": body["protocol"], "endpoint_info": json.dumps({"incarnation": self.incarnation})}
        address = {"zmq_address": f"tcp://127.0.0.1:{40000 + self.initialized}"}
        return {"status": 1, "engine_endpoint_info": address, "kvtransfer_endpoint_info": [transfer] * self.tp_size}

    def _connect(self, body: dict[str, Any]) -> Any:
        link = self.links.get(body["remote_engine_id"])
        if link is None:
            raise Refusal(500, f"KeyError: {body['remote_engine_id']!r}")
        _ = body["remote_engine_endpoint_info"]["zmq_address"]
        link.incarnation = json.loads(body["remote_kvtransfer_endpoint_info"][0]["endpoint_info"])["incarnation"]
        self.connected += 1
        return {"status": 1}

    def _drop(self, body: dict[str, Any]) -> Any:
        _ = body["engine_id"]
        self.links.pop(body["remote_engine_id"], None)
        self.dropped += 1
        return {"success": True}

    def _free(self, body: dict[str, Any]) -> Any:
        _ = body["remote_engine_id"]
        number = body["remote_session_id"]
        if type(number) is not int:
            raise ValueError("remote_session_id")
        self.freed.append(number)
        self.sessions.pop(number, None)
        return {"status": "SUCCESS"}

    # -- generations

    async def _generated(self, request: Received, edit: Edit) -> Answer:
        if self.dead:
            raise Refusal(500, DEAD)
        self._check_key(request)
        body = decoded(request)
        migration = body.get("migration_request")
        if migration and not migration.get("is_dummy_prefill"):
            edit = begun_with(await self._migrate(migration, prompt_tokens(request.path, body)), edit)
        said = Remembered(one_token(edit) if self.role is Role.PREFILL else edit)
        answer = await super().answer(request, said)
        if said.reply is None or body.get("stream") or not body.get("with_cache"):
            return answer
        if not said.reply.deltas:
            raise Refusal(500, "list index out of range")  # of a model that stops at once
        session = self._session(said)
        if body.get("preserve_cache"):
            self.sessions[session.id] = session
        return with_members(answer, self._cache_members(request, body, session))

    def _session(self, said: Remembered) -> Session:
        assert said.reply is not None
        number = next(self._numbers)
        blocks = [next(self._blocks) for _ in range(self._block_count(said.reply.prompt_tokens))]
        return Session(number, blocks, FIRST_TOKEN + number, said.first)

    def _block_count(self, tokens: int) -> int:
        return max(1, -(-tokens // self.block_size))

    def _cache_members(self, request: Received, body: Mapping[str, Any], session: Session) -> dict[str, Any]:
        members: dict[str, Any] = {"cache_block_ids": session.blocks, "remote_token_ids": [session.token]}
        if self.ids is Ids.SESSION:
            members["id"] = str(session.id)
        elif self.ids is Ids.ASKED or request.path != CHAT:
            members["id"] = str(body.get("session_id", -1))
        if self.names_session:
            members["cache_session_id"] = session.id
        return members

    async def _migrate(self, migration: Mapping[str, Any], tokens: int) -> str:
        """Fetches the cache and lets the other engine free it. Returns the text of the first token."""
        other, blocks = migration["remote_engine_id"], migration["remote_block_ids"]
        if len(blocks) != self._block_count(tokens):
            self.state = State.UNHEALTHY
            raise Refusal(500, DEAD)
        link = self.links.get(other)
        if link is None or link.incarnation is None:
            raise Refusal(500, f"no connection to {other}")
        wanted = {
            "peer": link.own_id,
            "incarnation": link.incarnation,
            "blocks": blocks,
            "session": migration["remote_session_id"],
            "token": migration["remote_token_id"],
        }
        text: str = (await peer(other, "fetch", wanted))["text"]
        return text

    async def _fetched(self, request: Received) -> Answer:
        """Another engine reads the blocks, and then has the session freed that it was told of."""
        wanted = request.json
        link = self.links.get(wanted["peer"])
        if link is None or link.incarnation is None or wanted["incarnation"] != self.incarnation:
            return peer_refusal("the remote memory is not registered (any more)")
        session = next((held for held in self.sessions.values() if held.blocks == wanted["blocks"]), None)
        if session is None or session.token != wanted["token"]:
            return peer_refusal("these blocks hold something else")
        session.fetched = True
        self.sessions.pop(wanted["session"], None)
        return json_answer({"text": session.text})
