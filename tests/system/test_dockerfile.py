"""The image without an engine to build it: linted, and its own steps carried out in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
IMAGE_PATHS = re.compile(r"(?<![\w./-])/(?=(?:opt/hearth|app|build)\b)")


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    name: str
    value: str


def stages() -> list[list[Step]]:
    """The Dockerfile's stages; each begins with its FROM."""
    lines = [line for line in (PROJECT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found: list[list[Step]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, value = line.partition(" ")
        if name == "FROM":
            found.append([])
        if name:
            found[-1].append(Step(name, value.strip()))
    return found


def last(steps: list[Step], name: str) -> str:
    return [step.value for step in steps if step.name == name][-1]


@dataclass
class Folder:
    """An empty folder that plays the image: what the Dockerfile puts under / goes below `root`."""

    root: Path
    workdir: Path = field(init=False)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workdir = self.root
        self.variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}

    def inside(self, text: str) -> str:
        return IMAGE_PATHS.sub(f"{self.root}/", text)

    def carry_out(self, step: Step) -> None:
        if step.name == "WORKDIR":
            self.workdir = Path(self.inside(step.value))
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY" and not step.value.startswith("--from="):  # both stages share this folder
            self.copy(*step.value.split())
        elif step.name == "RUN":
            self.run(self.inside(step.value))
        elif step.name == "ENV":
            for name, value in (pair.split("=", 1) for pair in step.value.split()):
                self.variables[name] = self.inside(value).replace("$PATH", self.variables["PATH"])

    def copy(self, source: str, target: str) -> None:
        """COPY of one file or one folder, with the exceptions of .dockerignore that matter here."""
        place = self.workdir / target
        if (PROJECT / source).is_dir():
            shutil.copytree(PROJECT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / source, place)

    def run(self, command: str) -> None:
        # How to reach the package index is the machine's business, so its settings and cache are kept.
        index = {key: os.environ[key] for key in os.environ if key == "HOME" or key.startswith("PIP_")}
        done = subprocess.run(
            ["sh", "-ec", command],
            check=False,
            cwd=self.workdir,
            env=index | self.variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    @contextmanager
    def started(self, command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """The command of a CMD, as the only process, and never left behind."""
        log = self.root / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                json.loads(command), cwd=self.workdir, env=self.variables | variables, stdout=output, stderr=output
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def check(self, command: str, **variables: str) -> int:
        """What a HEALTHCHECK's command ends with."""
        return subprocess.run(
            json.loads(command), check=False, cwd=self.workdir, env=self.variables | variables, capture_output=True
        ).returncode


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_dockerfile_passes_the_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, PROJECT / "Dockerfile"], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_image_runs_as_a_user_with_a_fixed_id_that_is_not_root() -> None:
    user, _, group = last(stages()[-1], "USER").partition(":")

    assert int(user) >= 10000
    assert int(group) >= 10000


def test_image_gets_signals_itself_and_listens_on_the_published_port() -> None:
    final = stages()[-1]

    assert json.loads(last(final, "CMD")) == ["python", "-m", "app", "serve"]  # a shell form would swallow SIGTERM
    assert last(final, "EXPOSE") == "8000"
    assert "HOST=0.0.0.0" in last(final, "ENV").split()


def test_everything_that_is_copied_is_sent_to_the_builder_and_nothing_else() -> None:
    rules = [line for line in (PROJECT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    sources = {step.value.split()[0].rstrip("/") for stage in stages() for step in stage if step.name == "COPY"}

    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule[0] == "!"} == {s for s in sources if not s.startswith("--from")}


def test_example_settings_mean_the_same_to_docker() -> None:
    """`docker run --env-file` takes every value literally: it removes no quotes and no comment after a value."""
    example = (PROJECT / ".env.example").read_text()
    values = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, flags=re.MULTILINE))

    assert len(values) > 20
    assert [name for name, value in values.items() if re.search(r"^['\"]|\s#|\s$", value)] == []


@pytest.mark.timeout(180)  # installs the runtime requirements
def test_steps_of_the_dockerfile_make_a_gateway_that_starts_and_stops(tmp_path: Path) -> None:
    builder, final = stages()
    image = Folder(tmp_path)
    for step in builder:
        # Without pip's cache this would take minutes; what is installed is the same.
        if step.name != "ENV":
            image.carry_out(step)
    for step in final:
        if step.name != "RUN":  # makes the user, which needs root and would change this machine
            image.carry_out(step)
    settings = {"HOST": "127.0.0.1", "PORT": str(free_port()), "LOCAL_NODES": "[]"}
    health = last(final, "HEALTHCHECK").partition("CMD ")[2]
    assert image.check(health, **settings) == 1

    with image.started(last(final, "CMD"), **settings) as hearth:
        deadline = time.monotonic() + 20
        while image.check(health, **settings) and time.monotonic() < deadline and hearth.poll() is None:
            time.sleep(0.1)
        assert image.check(health, **settings) == 0, (tmp_path / "output.txt").read_text()
        hearth.send_signal(signal.SIGTERM)
        ended = hearth.wait(timeout=5)

    assert ended in (0, -signal.SIGTERM)
