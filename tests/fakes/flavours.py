"""How the engines that speak OpenAI's API differ. From their sources, their documents, and answers of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from demo.httpd import Answer, Received, json_answer, text_answer
from demo.script import Reply
from tests.fakes import prefill
from tests.fakes.openai import Flavour, OpenAI, State, event

UVICORN = {"server": "uvicorn"}


def _wrapped(types: Mapping[int, str]) -> Callable[[int, str], Any]:
    """OpenAI's shape, with the engine's own names of types and the status as code."""

    def body(status: int, message: str) -> Any:
        return {"error": {"message": message, "type": types.get(status, types[500]), "param": None, "code": status}}

    return body


def _flat(types: Mapping[int, str]) -> Callable[[int, str], Any]:
    """The shape of LMDeploy and SGLang: the fields without a wrapper."""

    def body(status: int, message: str) -> Any:
        kind = types.get(status, types[500])
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}

    return body


def _fastapi_unknown(request: Received) -> Answer:
    return json_answer({"detail": "Not Found"}, 404, UVICORN)


# vLLM

VLLM_TYPES = {
    400: "BadRequestError",
    401: "Unauthorized",
    404: "NotFoundError",
    408: "RequestTimeout",
    422: "BadRequestError",
    429: "TooManyRequests",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_vllm_error = _wrapped(VLLM_TYPES)


def _healthy(engine: OpenAI) -> Answer:
    return engine.empty(200 if engine.state in (State.READY, State.SLEEPING) else 503)


def _vllm_metrics(engine: OpenAI) -> Answer:
    labels = f'{{engine="0",model_name="{engine.models[0]}"}}'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{labels} {float(engine.busy())}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{labels} 0.0",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
    ]
    return text_answer("\n".join(lines) + "\n")


VLLM = Flavour(
    name="vllm",
    owned_by=lambda name: "vllm",
    card=lambda name: {"root": name, "parent": None, "max_model_len": 4096, "permission": []},
    gets={
        "/health": _healthy,
        "/ping": _healthy,
        "/version": lambda engine: engine.json({"version": "0.32.0"}),
        "/load": lambda engine: engine.json({"server_load": engine.busy()}),
        "/is_sleeping": lambda engine: engine.json({"is_sleeping": engine.state is State.SLEEPING}),
        "/metrics": _vllm_metrics,
    },
    error=_vllm_error,
    error_event=lambda message: event(_vllm_error(500, message)),
    unknown=_fastapi_unknown,
    missing="The model `{}` does not exist.",
    reasoning_key="reasoning",
    echoes_request_id=True,
    prefill=prefill.when_flagged,
)


# Text Generation Inference

TGI_TYPES = {400: "validation", 404: "not_found", 422: "validation", 429: "overloaded", 503: "healthcheck"}


def _tgi_error(status: int, message: str) -> Any:
    return {"error": message, "error_type": TGI_TYPES.get(status, "generation")}


def _tgi_health(engine: OpenAI) -> Answer:
    if engine.state is State.READY:
        return engine.empty()
    return engine.json({"error": "unhealthy", "error_type": "healthcheck"}, 503)


def _tgi_info(engine: OpenAI) -> Answer:
    return engine.json(
        {
            "model_id": engine.models[0],
            "model_sha": "0" * 40,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": 128,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": 4095,
            "max_total_tokens": 4096,
            "validation_workers": 2,
            "max_client_batch_size": 4,
            "router": "text-generation-router",
            "version": "3.3.6",
            "sha": "0" * 40,
            "docker_label": "sha-0000000",
        }
    )


TGI = Flavour(
    name="tgi",
    owned_by=lambda name: name,
    gets={
        "/": _tgi_info,
        "/info": _tgi_info,
        "/health": _tgi_health,
        "/ping": _tgi_health,
        "/metrics": lambda engine: text_answer(
            f"# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size {engine.busy()}\n"
        ),
    },
    headers={},
    error=_tgi_error,
    error_event=lambda message: event(_tgi_error(500, f"Request failed during generation: {message}")),
    unknown=lambda request: Answer(status=404),
    opening=None,
    role_in_every_delta=True,
    usage_null=True,
    done_after_error=True,
    embeds=False,
    busy_status=429,
)


# LMDeploy

LMDEPLOY_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    422: "invalid_request_error",
    500: "server_error",
}
_lmdeploy_error = _flat(LMDEPLOY_TYPES)
LMDEPLOY_STATES = {State.READY: "healthy", State.SLEEPING: "sleeping"}


def _lmdeploy_health(engine: OpenAI) -> Answer:
    state = LMDEPLOY_STATES.get(engine.state)
    return engine.json({"status": state or "unhealthy"}, 200 if state else 503)


def _lmdeploy_card(name: str) -> dict[str, Any]:
    permission = {"id": "modelperm-0", "object": "model_permission", "created": 1_767_323_045, "organization": "*"}
    return {"root": name, "parent": None, "permission": [permission]}


LMDEPLOY = Flavour(
    name="lmdeploy",
    owned_by=lambda name: "lmdeploy",
    card=_lmdeploy_card,
    gets={
        "/health": _lmdeploy_health,
        "/is_sleeping": lambda engine: engine.json({"is_sleeping": engine.state is State.SLEEPING}),
    },
    error=_lmdeploy_error,
    error_event=lambda message: event({"error": _lmdeploy_error(500, message)}),
    unknown=_fastapi_unknown,
    missing="The model '{}' does not exist.",
    embeds=False,
    prefill=prefill.by_itself,
)


# llama.cpp

LLAMACPP_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
LLAMACPP_SLOTS = 4
LLAMACPP_CONTEXT = 2048


def _llamacpp_error(status: int, message: str) -> Any:
    return {"error": {"code": status, "message": message, "type": LLAMACPP_TYPES.get(status, "server_error")}}


def _llamacpp_health(engine: OpenAI) -> Answer:
    return engine.error(503, "Loading model") if engine.state is State.LOADING else engine.json({"status": "ok"})


def _while_loaded(answer: Callable[[OpenAI], Any]) -> Callable[[OpenAI], Answer]:
    def guarded(engine: OpenAI) -> Answer:
        return engine.error(503, "Loading model") if engine.state is State.LOADING else engine.json(answer(engine))

    return guarded


def _llamacpp_props(engine: OpenAI) -> Any:
    return {
        "default_generation_settings": {"params": {"seed": 4294967295, "temperature": 0.8}, "n_ctx": LLAMACPP_CONTEXT},
        "total_slots": LLAMACPP_SLOTS,
        "model_alias": engine.models[0],
        "model_path": f"/models/{engine.models[0]}.gguf",
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "chat_template": "{{ messages }}",
        "build_info": "b0-unknown",
        "is_sleeping": engine.state is State.SLEEPING,
    }


def _llamacpp_slots(engine: OpenAI) -> Any:
    busy = engine.busy()
    return [
        {"id": slot, "n_ctx": LLAMACPP_CONTEXT, "speculative": False, "is_processing": slot < busy}
        for slot in range(LLAMACPP_SLOTS)
    ]


def _llamacpp_metrics(engine: OpenAI) -> Answer:
    processing = min(engine.busy(), LLAMACPP_SLOTS)
    deferred = engine.busy() - processing
    return text_answer(
        "# TYPE llamacpp:requests_processing gauge\n"
        f"llamacpp:requests_processing {processing}\n"
        "# TYPE llamacpp:requests_deferred gauge\n"
        f"llamacpp:requests_deferred {deferred}\n"
    )


def _llamacpp_timings(reply: Reply) -> dict[str, Any]:
    spent = reply.seconds * 1000 + 1
    return {
        "timings": {
            "cache_n": 0,
            "prompt_n": reply.prompt_tokens,
            "prompt_ms": 1.0,
            "predicted_n": reply.completion_tokens,
            "predicted_ms": spent,
            "predicted_per_second": reply.completion_tokens * 1000 / spent,
        }
    }


def _llamacpp_card(name: str) -> dict[str, Any]:
    meta = {"vocab_type": 1, "n_vocab": 262144, "n_ctx": LLAMACPP_CONTEXT, "n_ctx_train": 32768, "n_embd": 640}
    return {"aliases": [name], "tags": [], "meta": {**meta, "n_params": 268_098_176, "size": 246_587_904}}


LLAMACPP = Flavour(
    name="llamacpp",
    owned_by=lambda name: "llamacpp",
    card=_llamacpp_card,
    gets={
        "/health": _llamacpp_health,
        "/props": _while_loaded(_llamacpp_props),
        "/slots": _while_loaded(_llamacpp_slots),
        "/metrics": _llamacpp_metrics,
    },
    headers={"server": "llama.cpp", "keep-alive": "timeout=5, max=100"},
    error=_llamacpp_error,
    error_event=lambda message: event(_llamacpp_error(500, message)),
    unknown=lambda request: json_answer(_llamacpp_error(404, "File Not Found"), 404, {"server": "llama.cpp"}),
    opening={"role": "assistant", "content": None},
    head_first=False,
    done_after_error=False,
    ending=_llamacpp_timings,
    prefill=prefill.llamacpp,
)


# SGLang

_sglang_error = _flat(
    {400: "BadRequestError", 404: "NotFoundError", 422: "BadRequestError", 500: "InternalServerError"}
)


def _sglang_model(engine: OpenAI) -> Answer:
    name = engine.models[0]
    return engine.json({"model_path": name, "tokenizer_path": name, "is_generation": True, "weight_version": "default"})


def _sglang_server(engine: OpenAI) -> Answer:
    name = engine.models[0]
    running = {"model_path": name, "served_model_name": name, "tp_size": 1, "dp_size": 1, "version": "0.5.9"}
    return engine.json({**running, "max_running_requests": 64, "disaggregation_mode": "null"})


SGLANG = Flavour(
    name="sglang",
    owned_by=lambda name: "sglang",
    card=lambda name: {"root": name, "parent": None, "max_model_len": 4096},
    gets={
        "/health": _healthy,
        "/model_info": _sglang_model,
        "/get_model_info": _sglang_model,
        "/server_info": _sglang_server,
        "/get_server_info": _sglang_server,
    },
    error=_sglang_error,
    error_event=lambda message: event({"error": _sglang_error(500, message)}),
    unknown=_fastapi_unknown,
    prefill=prefill.after_the_prompt,
)


# Transformers serve

# `transformers serve` refuses with 422 the fields of OpenAI's API that it does not honour; later versions ignore them.
TRANSFORMERS_REFUSES = frozenset(
    {"audio", "function_call", "functions", "logprobs", "max_completion_tokens", "metadata", "modalities", "n"}
    | {"parallel_tool_calls", "prediction", "presence_penalty", "reasoning_effort", "response_format", "service_tier"}
    | {"store", "stream_options", "tool_choice", "top_logprobs", "user", "web_search_options"}
)

TRANSFORMERS = Flavour(
    name="transformers",
    owned_by=lambda name: name.partition("/")[0],
    gets={"/health": lambda engine: engine.json({"status": "ok"})},
    error=lambda status, message: {"detail": message},
    error_event=lambda message: event({"error": message}),
    unknown=_fastapi_unknown,
    missing="the server is pinned to another model than '{}'",
    missing_status=400,
    opening={"role": "assistant"},
    done=False,
    usage_with_finish=True,
    embeds=False,
    refused_fields=TRANSFORMERS_REFUSES,
)


# LM Studio

LMSTUDIO_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 500: "internal_error"}


def _lmstudio_models(engine: OpenAI) -> Answer:
    return engine.json(
        {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "type": "llm",
                    "publisher": "practice",
                    "arch": "llama",
                    "compatibility_type": "gguf",
                    "quantization": "Q4_K_M",
                    "state": "loaded" if place == 0 else "not-loaded",
                    "max_context_length": 4096,
                }
                for place, name in enumerate(engine.models)
            ],
        }
    )


LMSTUDIO = Flavour(
    name="lmstudio",
    owned_by=lambda name: "organization_owner",
    gets={"/api/v0/models": _lmstudio_models},
    headers={"x-powered-by": "Express"},
    error=_wrapped(LMSTUDIO_TYPES),
    error_event=lambda message: event({"error": {"message": message}}, "error"),
    # LM Studio says 200 on paths that it does not have: a status alone proves nothing there.
    unknown=lambda request: json_answer(
        {"error": f"Unexpected endpoint or method. ({request.method} {request.path})"}, 200, {"x-powered-by": "Express"}
    ),
    missing="Model '{}' not found.",
    opening=None,
    role_in_every_delta=True,
    done_after_error=False,
    base64=False,
)


# Anything OpenAI-compatible, and the cloud

OPENAI_CODES = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
    500: ("server_error", None),
    503: ("server_error", "server_overloaded"),
    529: ("overloaded_error", None),
}


def _openai_error(status: int, message: str) -> Any:
    kind, code = OPENAI_CODES.get(status, OPENAI_CODES[500])
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _openai_unknown(request: Received) -> Answer:
    return json_answer(_openai_error(400, f"Invalid URL ({request.method} {request.path})"), 404)


GENERIC = Flavour(
    name="generic",
    owned_by=lambda name: "someone",
    headers={},
    error=_openai_error,
    error_event=lambda message: event(_openai_error(500, message)),
    unknown=_openai_unknown,
    missing="The model `{}` does not exist.",
)

CLOUD = Flavour(
    name="cloud",
    owned_by=lambda name: "system",
    headers={
        "x-request-id": "req_0123456789abcdef",
        "openai-processing-ms": "12",
        "x-ratelimit-remaining-requests": "99",
    },
    error=_openai_error,
    error_event=lambda message: event(_openai_error(500, message)),
    unknown=_openai_unknown,
    missing="The model `{}` does not exist or you do not have access to it.",
    usage_null=True,
    done_after_error=False,
    busy_status=429,
    prefill=prefill.when_marked,
)
