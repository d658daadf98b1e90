"""vLLM engines that share generations through its NixlConnector."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demo.engine import Edit, unchanged
from demo.httpd import Answer, Received, json_answer
from demo.script import LENGTH
from tests.fakes.openai import OpenAI, Refusal, decoded
from tests.fakes.sharing import Control, Remembered, Role, peer, peer_refusal, with_members

BLOCK_TOKENS = 16


@dataclass(slots=True)
class Kept:
    """Blocks that wait for a decode engine, until then."""

    blocks: list[int]
    until: float


class Nixl(OpenAI):
    """A vLLM engine; with a role other than hybrid it has the connector. `sessions` are the requests held for now."""

    role = Role.HYBRID
    hold_seconds = 480.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fetched = 0  # caches that other engines got from this one
        self._kept: dict[str, Kept] = {}
        self._blocks = itertools.count(1)
        self.restart()

    def restart(self) -> None:
        self.engine_id = str(uuid.uuid4())
        self._kept.clear()

    @property
    def sessions(self) -> Mapping[str, Kept]:
        now = time.monotonic()
        return {name: kept for name, kept in self._kept.items() if kept.until > now}

    def leaked(self) -> list[str]:
        """None ever: what nobody fetches is freed in time."""
        return []

    def controls(self) -> Mapping[str, Control]:
        return {"fetch": self._fetched}

    def details(self) -> dict[str, Any]:
        return {"sessions": len(self.sessions), "fetched": self.fetched}

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        if self.role is Role.HYBRID or not self.infers(request):
            return await super().answer(request, edit)
        try:
            params = decoded(request).get("kv_transfer_params") or {}
            if params.get("do_remote_prefill"):
                await self._fetch(params)
        except Refusal as refusal:
            return self.error(refusal.status, refusal.message)
        said = Remembered(edit)
        answer = await super().answer(request, said)
        if said.reply is None or answer.stream:
            return answer
        # Of a model that said all there is nothing to go on from.
        keeps = params.get("do_remote_decode") and said.reply.finish == LENGTH
        return with_members(answer, {"kv_transfer_params": self._keep(said.reply.prompt_tokens) if keeps else None})

    def _keep(self, tokens: int) -> dict[str, Any]:
        name = f"cmpl-{uuid.uuid4().hex}"
        blocks = [next(self._blocks) for _ in range(max(1, -(-tokens // BLOCK_TOKENS)))]
        self._kept[name] = Kept(blocks, time.monotonic() + self.hold_seconds)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,  # a side channel of its own on a real one
            "tp_size": 1,
        }

    async def _fetch(self, params: Mapping[str, Any]) -> None:
        try:
            url = f"http://{params['remote_host']}:{params['remote_port']}"
            names = ("remote_engine_id", "remote_request_id", "remote_block_ids", "tp_size")
            wanted = {name: params[name] for name in names}
        except KeyError as error:
            raise Refusal(500, f"kv_transfer_params without {error}") from error
        await peer(url, "fetch", wanted)

    async def _fetched(self, request: Received) -> Answer:
        wanted = request.json
        kept = self.sessions.get(wanted["remote_request_id"])
        if wanted["remote_engine_id"] != self.engine_id or kept is None or kept.blocks != wanted["remote_block_ids"]:
            return peer_refusal("no such blocks are held")
        del self._kept[wanted["remote_request_id"]]
        self.fetched += 1
        return json_answer({})
