"""The gateways that are measured: Hearth in front of two kinds of node, and its peers if they are installed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from subprocess import run

from benchmarks.node import MODEL
from benchmarks.processes import PROJECT


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a gateway on a port, in front of nodes. It is started in a folder of its own."""

    command: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What is measured. `launch` gets a folder, a port and the nodes' URLs; None: the client asks a node itself."""

    name: str
    version: str | None = None
    launch: Callable[[Path, int, Sequence[str]], Launch] | None = None
    ready_path: str = "/health"
    ready_seconds: float = 30.0
    ours: bool = False
    share: float = 1.0  # of each case's requests: a slow one needs fewer for a figure that is as good


def hearth(kind: str) -> Callable[[Path, int, Sequence[str]], Launch]:
    """Hearth as it comes; nothing is switched off for the benchmark."""

    def launch(folder: Path, port: int, nodes: Sequence[str]) -> Launch:
        variables = {
            "LOCAL_NODES": json.dumps([{"url": url, "kind": kind} for url in nodes]),
            "HOST": "127.0.0.1",
            "PORT": str(port),
            "PYTHONPATH": str(PROJECT),  # its folder is another one, so that no .env of the checkout is read
        }
        return Launch([sys.executable, "-m", "app", "serve"], variables)

    return launch


def nginx(folder: Path, port: int, nodes: Sequence[str]) -> Launch:
    """One worker that spreads requests and keeps connections open; nothing that knows what a chat is."""
    members = " ".join(f"server {url.removeprefix('http://')};" for url in nodes)
    configuration = f"""
        daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;
        events {{ worker_connections 4096; }}
        http {{
            access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
            upstream nodes {{ least_conn; {members} keepalive 256; }}
            server {{
                listen 127.0.0.1:{port} backlog=4096;
                location / {{
                    proxy_pass http://nodes; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_buffering off;
                }}
            }}
        }}
    """
    path = folder / "nginx.conf"
    path.write_text(configuration)
    return Launch([str(find("nginx")), "-p", str(folder), "-c", str(path), "-e", f"{folder}/nginx-error.log"])


def litellm(provider: str, suffix: str) -> Callable[[Path, int, Sequence[str]], Launch]:
    """LiteLLM's proxy with its router, without a database or callbacks."""

    def launch(folder: Path, port: int, nodes: Sequence[str]) -> Launch:
        def deployment(url: str) -> dict[str, object]:
            parameters = {"model": f"{provider}/{MODEL}", "api_base": url + suffix, "api_key": "none"}
            return {"model_name": MODEL, "litellm_params": parameters}

        configuration = {
            "model_list": [deployment(url) for url in nodes],
            "router_settings": {"routing_strategy": "least-busy", "num_retries": 1},
        }
        path = folder / "litellm.yaml"
        path.write_text(json.dumps(configuration))  # JSON is YAML
        variables = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the internet for prices
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        command = [str(find("litellm")), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        return Launch(command, variables)

    return launch


def find(program: str) -> Path | None:
    """On the PATH, or in a virtual environment of its own below build/."""
    for place in (shutil.which(program), PROJECT / "build" / program / "bin" / program, Path("/usr/sbin") / program):
        if place and Path(place).exists():
            return Path(place)
    return None


def nginx_version(program: Path) -> str:
    """From `nginx version: nginx/1.22.1`, which it prints as an error."""
    return run([program, "-v"], capture_output=True, text=True, check=True).stderr.strip().rpartition("/")[2]


def litellm_version(program: Path) -> str:
    """That of the environment that the command belongs to."""
    folders = [str(folder) for folder in program.resolve().parents[1].glob("lib/python*/site-packages")]
    return next((found.version for found in metadata.distributions(name="litellm", path=folders)), "")


def installed() -> list[Gateway]:
    """All that can be measured on this machine; the node alone comes first, as the floor."""
    gateways = [
        Gateway("direct"),
        Gateway("hearth-openai", launch=hearth("vllm"), ours=True),
        Gateway("hearth-ollama", launch=hearth("ollama"), ours=True),
    ]
    if program := find("nginx"):
        gateways.append(Gateway("nginx", nginx_version(program), nginx))
    if program := find("litellm"):
        version = litellm_version(program)
        for name, provider, suffix in (("openai", "openai", "/v1"), ("ollama", "ollama_chat", "")):
            gateways.append(
                Gateway(f"litellm-{name}", version, litellm(provider, suffix), "/health/liveliness", 120.0, share=0.1)
            )
    return gateways
