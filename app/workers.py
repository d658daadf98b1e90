"""Several worker processes on one port: a parent that starts and replaces them, and what runs in each.

Each worker has a listening socket of its own, and the kernel deals connections out among them (SO_REUSEPORT). Of 200
that came at once, four workers on one shared socket took between 0 and 194; with a socket each, between 47 and 55. The
parent holds all sockets too, so that a worker's connections wait for the next one when it is killed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from app.ports import DRAIN_SECONDS, close, listen
from app.telemetry.slates import Slates, open_slates

if TYPE_CHECKING:
    from app.settings import Settings
    from app.telemetry.logs import Logger

# What parent and worker say to each other, a byte each. The end of the channel means that the other is gone.
_READY = b"r"
_CLOSING = b"c"  # takes no more connections
_DRAIN = b"d"
_STOP = b"s"

_PAUSE_SECONDS = 1.0  # before a worker is started again that never came to serve; doubles
_PAUSE_SECONDS_MAX = 15.0
_KILL_SECONDS = 5.0  # a worker that was told to stop at once is killed after that
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PIPE_BYTES = 4096  # up to that many, the kernel keeps one process's write together

Start = Callable[[int, list[socket.socket], socket.socket], "subprocess.Popen[bytes]"]


class Worker:
    """A worker process as its parent sees it."""

    def __init__(self, index: int, listeners: list[socket.socket], start: Start) -> None:
        self.index = index
        self.ready = False
        self.closing = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start(index, listeners, theirs)
        ours.setblocking(False)
        self.channel = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self) -> None:
        """Takes what it has said."""
        with suppress(BlockingIOError, ConnectionError):
            said = self.channel.recv(64)
            self.ready = self.ready or _READY in said
            self.closing = self.closing or _CLOSING in said

    def status(self) -> int | None:
        """Its exit status once it has ended; negative for the signal that ended it."""
        return self._process.poll()

    def drain(self) -> None:
        self._tell(_DRAIN)

    def stop(self) -> None:
        self._tell(_STOP)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        self.channel.close()

    def _tell(self, word: bytes) -> None:
        with suppress(OSError):  # it may have ended
            self.channel.send(word)


class Slot:
    """A worker's place: its sockets stay when it goes."""

    def __init__(self, index: int, listeners: list[socket.socket]) -> None:
        self.index = index
        self.listeners = listeners
        self.worker: Worker | None = None
        self.pause_seconds = 0.0
        self.start_at = 0.0  # monotonic seconds


class Supervisor:
    """Keeps a worker in every slot until it is told to end. `run` returns the exit status."""

    def __init__(self, slots: Sequence[Slot], start: Start, log: Logger) -> None:
        self._slots = slots
        self._start = start
        self._log = log
        self._leaving: list[Worker] = []  # they take no more connections, and end what they have
        self._served = False
        self._signals = 0
        self._status = 0
        self._kill_at: float | None = None

    def run(self) -> int:
        with _wakened_by_signals() as wake:
            try:
                while self._turn():
                    select.select([wake, *(worker.channel for worker in self._workers())], [], [], 0.2)
                    for _ in _asked_to_end(wake):
                        self._signalled()
            finally:
                for worker in self._workers():
                    worker.kill()
                    worker.close()
        return self._status

    def _turn(self) -> bool:
        """Looks after everything once; False when all is over."""
        for worker in self._workers():
            worker.listen()
        self._bury()
        if not self._ending:
            self._served = self._served or all(slot.worker and slot.worker.ready for slot in self._slots)
            self._fill()
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            for worker in self._workers():
                worker.kill()
        return not self._ending or bool(self._workers())

    @property
    def _ending(self) -> bool:
        return self._signals > 0

    def _workers(self) -> list[Worker]:
        return [*(slot.worker for slot in self._slots if slot.worker is not None), *self._leaving]

    def _fill(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.worker is not None and slot.worker.closing:  # somebody ended this worker alone
                self._leaving.append(slot.worker)
                slot.worker = None
            if slot.worker is None and now >= slot.start_at:
                slot.worker = Worker(slot.index, slot.listeners, self._start)

    def _bury(self) -> None:
        for worker in [worker for worker in self._leaving if worker.status() is not None]:
            self._leaving.remove(worker)
            worker.close()
        for slot in self._slots:
            if slot.worker is not None and slot.worker.status() is not None:
                self._ended(slot, slot.worker)

    def _ended(self, slot: Slot, worker: Worker) -> None:
        slot.worker = None
        worker.close()
        if self._ending:
            self._status = self._status or int(worker.status() != 0 and self._signals == 1)
            return
        if not worker.ready and not self._served:
            # The others would meet the same. It has said itself what is wrong.
            self._status = 1
            self._end(stop=True)
            return
        wait = _PAUSE_SECONDS if slot.pause_seconds == 0.0 else min(slot.pause_seconds * 2, _PAUSE_SECONDS_MAX)
        slot.pause_seconds = 0.0 if worker.ready else wait
        slot.start_at = time.monotonic() + slot.pause_seconds
        self._log.error("a worker ended and is replaced", worker=worker.pid, status=worker.status())

    def _signalled(self) -> None:
        if self._ending:
            self._end(stop=True)
        else:
            self._log.info(
                "Hearth ends when running requests have. A second signal stops at once", seconds=DRAIN_SECONDS
            )
            self._end(stop=False)

    def _end(self, *, stop: bool) -> None:
        self._signals += 1
        for slot in self._slots:
            close(slot.listeners)  # or connections would wait for nobody
        for worker in self._workers():
            if stop:
                worker.stop()
            else:
                worker.drain()
        self._kill_at = time.monotonic() + _KILL_SECONDS + (0.0 if stop else DRAIN_SECONDS)


def supervise(settings: Settings, flags: Sequence[str], log: Logger) -> int:
    """Runs the workers until a signal comes; `flags` are those of `serve`. Raises `PortTaken`."""
    slots = [Slot(index, listeners) for index, listeners in enumerate(_listeners(settings))]
    slates = open_slates()
    places = Places()

    def start(index: int, listeners: list[socket.socket], channel: socket.socket) -> subprocess.Popen[bytes]:
        place = places.free()
        handles = [slates, channel.fileno(), *(listener.fileno() for listener in listeners)]
        words = [str(index), str(place), ",".join(map(str, handles)), *flags]
        # A group of its own: the terminal's Ctrl-C goes to the parent, which passes it on.
        process = subprocess.Popen(
            [sys.executable, "-m", "app.workers", *words],
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
            start_new_session=True,
        )
        places.take(place, process)
        return process

    try:
        return Supervisor(slots, start, log).run()
    finally:
        os.close(slates)


class Places:
    """Which place for its metrics each worker has: one that nobody has any more, if there is one."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []

    def free(self) -> int:
        ended = (place for place, holder in enumerate(self._holders) if holder.poll() is not None)
        return next(ended, len(self._holders))

    def take(self, place: int, holder: subprocess.Popen[bytes]) -> None:
        self._holders[place : place + 1] = [holder]


def _listeners(settings: Settings) -> Iterator[list[socket.socket]]:
    """The sockets of each worker."""
    if sys.platform != "linux":  # other kernels share a port, but do not deal out its connections
        yield from [listen(settings.host, settings.port, shared=False)] * settings.workers
        return
    port = settings.port
    for _ in range(settings.workers):
        sockets = listen(settings.host, port, shared=True)
        port = sockets[0].getsockname()[1]  # where any would do, all take the first one's
        yield sockets


@contextmanager
def _wakened_by_signals() -> Iterator[socket.socket]:
    """Gives a socket that wakes whoever waits on it, and on which every signal's number comes.

    A handler would act in the middle of anything: a worker that is being started is in no slot yet, and would not hear
    that it is to end.
    """
    wake, write = socket.socketpair()
    wake.setblocking(False)
    write.setblocking(False)
    # First where they are written to, or one that comes in between would be lost.
    written_to = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in (*_SIGNALS, signal.SIGCHLD)}
    try:
        yield wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(written_to)
        wake.close()
        write.close()


def _asked_to_end(wake: socket.socket) -> list[int]:
    """The signals that have come and ask for the end."""
    with suppress(BlockingIOError):
        return [number for number in wake.recv(1024) if number in _SIGNALS]
    return []


# -- in the worker


class Channel:
    """A worker's end of the channel to its parent."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def ready(self) -> None:
        self._tell(_READY)

    def closing(self) -> None:
        self._tell(_CLOSING)

    def obey(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Listens in a thread. Without its parent nobody would end the worker, which then ends by itself."""

        def listen() -> None:
            while word := self._read():
                if word == _DRAIN:
                    drain()
                elif word == _STOP:
                    stop()
            drain()

        threading.Thread(target=listen, name="parent", daemon=True).start()

    def _read(self) -> bytes:
        with suppress(OSError):
            return self._channel.recv(1)
        return b""

    def _tell(self, word: bytes) -> None:
        with suppress(OSError):  # the parent is gone, which `obey` notices
            self._channel.send(word)


class WholeLines:
    """Writes to a stream that several processes write to, so that none cuts another's lines in two."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._handle = stream.fileno()
        self._name = name

    def write(self, data: bytes) -> int:
        part = b""
        for line in data.splitlines(keepends=True):
            named = self._named(line)
            if part and len(part) + len(named) > _PIPE_BYTES:
                self._write(part)
                part = b""
            part += named
        self._write(part)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def _named(self, line: bytes) -> bytes:
        if line.startswith(b'{"'):
            return b'{"worker":"%b",' % self._name.encode() + line[1:]
        return b"[%b] " % self._name.encode() + line

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._handle, data) :]


def main(argv: Sequence[str]) -> int:
    """Runs one worker: its index and place, its handles (metrics, channel, sockets), and the flags of `serve`."""
    from app.settings import SettingsError, load_settings
    from app.start import serve_worker

    index, place, given, *flags = argv
    slates, *handles = map(int, given.split(","))
    channel, *listeners = (socket.socket(fileno=handle) for handle in handles)
    try:
        settings = load_settings(flags)
    except SettingsError as error:
        print(f"hearth: {error.message}", file=sys.stderr)
        return 2
    return serve_worker(settings, int(index), Slates(slates, int(place)), Channel(channel), listeners)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
