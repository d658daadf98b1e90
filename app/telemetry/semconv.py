"""The names of what stands in spans: OpenTelemetry's where it has one, `hearth.*` elsewhere.

`gen_ai.*` is still called development there, so that names may change: they stand here alone.
https://github.com/open-telemetry/semantic-conventions-genai
"""

from __future__ import annotations

from app.domain import Operation

METHOD = "http.request.method"
PATH = "url.path"
STATUS_CODE = "http.response.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_SECONDS = "gen_ai.response.time_to_first_chunk"
INPUT_MESSAGES = "gen_ai.input.messages"

REQUEST_ID = "hearth.request.id"
ROUTE = "hearth.route"
NODE = "hearth.node"
TIER = "hearth.tier"
KEY = "hearth.key.id"
FALLBACK = "hearth.fallback"
CLOUD_REFUSAL = "hearth.cloud_refusal"
OUTCOME = "hearth.outcome"
FAILURE = "hearth.failure"
ATTEMPTS = "hearth.attempts"
ATTEMPT = "hearth.attempt"  # its number, from 1
CANDIDATES = "hearth.candidates"
QUEUE_MS = "hearth.queue_ms"
COST_USD = "hearth.cost_usd"

FIRST_CONTENT = "first content"  # an event

OPERATIONS = {
    Operation.CHAT: "chat",
    Operation.COMPLETION: "text_completion",
    Operation.EMBEDDING: "embeddings",
}
# Numbers of the request that say how it is to be answered, and what they are called in spans.
ASKED_FOR = (
    ("temperature", "gen_ai.request.temperature"),
    ("top_p", "gen_ai.request.top_p"),
    ("max_tokens", "gen_ai.request.max_tokens"),
    ("max_completion_tokens", "gen_ai.request.max_tokens"),
)
# Whom the conventions know by name; any other cloud goes by its host.
PROVIDERS = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.mistral.ai": "mistral_ai",
    "api.groq.com": "groq",
    "api.deepseek.com": "deepseek",
    "api.x.ai": "x_ai",
    "api.cohere.com": "cohere",
    "api.perplexity.ai": "perplexity",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
