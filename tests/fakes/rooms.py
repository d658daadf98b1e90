"""SGLang engines that share generations by meeting in bootstrap rooms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from demo.engine import Edit, unchanged
from demo.httpd import Answer, Received, json_answer
from tests.fakes.openai import OpenAI, Refusal, decoded
from tests.fakes.sharing import Control, Remembered, Role, begun_with, one_token, peer, peer_refusal, with_members

SERVER_INFO = ("/server_info", "/get_server_info")

Rooms = tuple[int, ...]


class Room:
    """Where one prefill waits for the engine that decodes."""

    def __init__(self) -> None:
        self.first = asyncio.get_running_loop().create_future()  # the text of the first token
        self.left = asyncio.Event()  # the other engine has it


class Bootstrapped(OpenAI):
    """An SGLang engine. With role prefill it is also the bootstrap server, on the node's own port.

    `sessions` are the rooms in which it waits now, `met` counts those that were met in, and `missed` those in which
    nobody came in time.
    """

    role = Role.HYBRID
    room_seconds = 2.0  # so long either side waits for the other

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.met = self.missed = 0
        self.sessions: dict[Rooms, Room] = {}
        self._arrived = asyncio.Condition()

    def restart(self) -> None:
        self.sessions.clear()

    def leaked(self) -> list[Rooms]:
        """None ever: nobody waits for long."""
        return []

    def controls(self) -> Mapping[str, Control]:
        return {"join": self._joined}

    def details(self) -> dict[str, Any]:
        return {"sessions": len(self.sessions), "met": self.met, "missed": self.missed}

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        if self.role is not Role.HYBRID and request.path in SERVER_INFO:
            members = {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": self.port}
            return with_members(await super().answer(request, edit), members)
        if self.role is Role.HYBRID or not self.infers(request):
            return await super().answer(request, edit)
        try:
            body = decoded(request)
            rooms = _rooms(body.get("bootstrap_room"))
            if self.role is Role.PREFILL:
                return await self._prefilled(rooms, request, edit)
            first = await self._join(rooms, body)
        except Refusal as refusal:
            return self.error(refusal.status, refusal.message)
        return await super().answer(request, begun_with(first, edit))

    async def _prefilled(self, rooms: Rooms, request: Received, edit: Edit) -> Answer:
        if rooms in self.sessions:
            raise Refusal(500, f"room {rooms} is taken")
        said = Remembered(one_token(edit))
        answer = await super().answer(request, said)
        if said.reply is None:
            return answer
        room = self.sessions[rooms] = Room()
        room.first.set_result(said.first)
        try:
            await self._announce()
            async with asyncio.timeout(self.room_seconds):
                await room.left.wait()
        except TimeoutError as error:
            self.missed += 1
            raise Refusal(500, f"nobody came to room {rooms} in time") from error
        finally:
            self.sessions.pop(rooms, None)
        self.met += 1
        return answer

    async def _announce(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    async def _join(self, rooms: Rooms, body: Mapping[str, Any]) -> str:
        hosts, ports = body.get("bootstrap_host"), body.get("bootstrap_port")
        host = hosts[0] if isinstance(hosts, list) else hosts
        port = ports[0] if isinstance(ports, list) else ports
        if not host or port is None:
            raise Refusal(500, f"no bootstrap server at {host}:{port}")
        try:
            text: str = (await peer(f"http://{host}:{port}", "join", list(rooms)))["text"]
        except Refusal:
            self.missed += 1
            raise
        self.met += 1
        return text

    async def _joined(self, request: Received) -> Answer:
        """The other engine may come first, and then waits as well."""
        rooms = tuple(request.json)
        try:
            async with asyncio.timeout(self.room_seconds), self._arrived:
                await self._arrived.wait_for(lambda: rooms in self.sessions)
        except TimeoutError:
            return peer_refusal(f"nobody came to room {rooms} in time")
        room = self.sessions[rooms]
        room.left.set()
        return json_answer({"text": await room.first})


def _rooms(value: Any) -> Rooms:
    rooms = value if isinstance(value, list) else [value]
    if not rooms or not all(type(room) is int and 0 <= room < 2**63 for room in rooms):
        raise Refusal(400, "Disaggregated request received without bootstrap room id")
    return tuple(rooms)
