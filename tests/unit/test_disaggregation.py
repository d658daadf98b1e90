"""Generations that two nodes share: what is sent to which of them, and what their answers mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain import Failure, Operation, Request
from app.errors import InvalidRequest, NodeFailure, RequestRefused
from app.providers import KINDS
from app.providers.base import Call
from app.providers.disaggregation import disaggregations
from app.providers.disaggregation.base import (
    Disaggregation,
    Handoff,
    LinkRefused,
    LinkType,
    Migration,
    MigrationProtocol,
    NodeRequest,
    PrefillBroken,
    PrefillNode,
    Side,
)
from app.providers.disaggregation.sglang import SGLangPairs

P, D = "http://10.0.0.1:23333", "http://10.0.0.2:23333"
NODE = PrefillNode(P, bootstrap_port=8998)
USER = [{"role": "user", "content": "hi"}]
GIANT = 123456789012345678901234567890
TABLE = disaggregations(Migration())
LMDEPLOY, VLLM, SGLANG = TABLE["lmdeploy"], TABLE["vllm"], TABLE["sglang"]
KINDS_THAT_SHARE = sorted(TABLE)
ONE_AFTER_THE_OTHER = [LMDEPLOY, VLLM]
CHAT, COMPLETION = Operation.CHAT, Operation.COMPLETION
PREFILLED = {"id": "17", "cache_block_ids": [412, 413, 414], "remote_token_ids": [19383, 19384]}
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "e", "of_a_later_version": GIANT}


def call(operation: Operation = CHAT, *, body: bytes | None = None, stream: bool = False, **fields: Any) -> Call:
    given = {"messages": USER} if operation is CHAT else {"prompt": "hi"}
    if stream:
        fields["stream"] = True
    text = body or orjson.dumps({"model": "m", **given, **fields})
    return Call(Request("r1", operation, "m", text, orjson.loads(text), stream=stream), "m")


def document(body: bytes | None) -> Any:
    assert body is not None
    return json.loads(body)


def prefill(pairs: Disaggregation, asked: Call) -> Any:
    return document(pairs.prefill(asked, NODE).outgoing.body)


def parse(pairs: Disaggregation, reply: Any, asked: Call | None = None) -> Handoff:
    return pairs.parse_prefill(asked or call(), NODE, orjson.dumps(reply))


def handoff_of(pairs: Disaggregation) -> Handoff:
    """A handoff of a generation that goes well."""
    made = pairs.prefill(call(), NODE).handoff
    return made or pairs.parse_prefill(call(), NODE, json.dumps({**PREFILLED, "kv_transfer_params": PARAMS}).encode())


# -- what holds for every kind


def test_pairs_are_of_kinds_that_there_are() -> None:
    assert set(TABLE) <= set(KINDS)
    assert {kind for kind, pairs in TABLE.items() if pairs.concurrent} == {"sglang"}
    assert {kind for kind, pairs in TABLE.items() if pairs.plain_decode_allowed} == {"lmdeploy", "vllm"}


@pytest.mark.parametrize("kind", KINDS_THAT_SHARE)
@pytest.mark.parametrize("stream", [True, False])
def test_without_a_handoff_the_decode_request_is_an_ordinary_one(kind: str, stream: bool) -> None:
    asked = call(stream=stream, max_tokens=5)

    assert TABLE[kind].decode(asked, None) == KINDS[kind].translate(asked)
    assert TABLE[kind].decode(asked, Handoff(P, finished=True)) == KINDS[kind].translate(asked)


@pytest.mark.parametrize("pairs", TABLE.values(), ids=TABLE)
def test_a_client_cannot_speak_for_a_node(pairs: Disaggregation) -> None:
    private: dict[str, Any] = {
        "migration_request": 1,
        "kv_transfer_params": 1,
        "bootstrap_room": 1,
        "bootstrap_host": "evil",
    }

    asked, honest = call(with_cache=1, preserve_cache=1, **private), call()

    handoff = handoff_of(pairs)
    assert document(pairs.decode(asked, handoff).body) == document(pairs.decode(honest, handoff).body)
    assert document(pairs.decode(asked, None).body) == document(honest.request.body)


@pytest.mark.parametrize("pairs", TABLE.values(), ids=TABLE)
def test_fields_that_nobody_knows_and_integers_of_any_size_reach_both_nodes(pairs: Disaggregation) -> None:
    body = b'{"model":"m","messages":[],"seed":%d,"new":{"x":1.50}}' % GIANT
    asked = call(body=body)

    for sent in (pairs.prefill(asked, NODE).outgoing, pairs.decode(asked, handoff_of(pairs))):
        assert document(sent.body) | {"seed": GIANT, "new": {"x": 1.5}} == document(sent.body)


@pytest.mark.parametrize("pairs", TABLE.values(), ids=TABLE)
def test_what_decode_adds_leaves_the_rest_byte_for_byte(pairs: Disaggregation) -> None:
    body = b'{"model":"m", "messages":[ ],"top_p":1.50}'

    assert pairs.decode(call(body=body), handoff_of(pairs)).body.endswith(body[1:])


@pytest.mark.parametrize("pairs", TABLE.values(), ids=TABLE)
def test_the_request_itself_is_never_changed(pairs: Disaggregation) -> None:
    asked = call(stream=True, max_tokens=9, stream_options={"include_usage": False}, min_tokens=2)
    before = orjson.dumps(asked.request.fields)

    pairs.prefill(asked, NODE)
    pairs.decode(asked, handoff_of(pairs))

    assert orjson.dumps(asked.request.fields) == before


@pytest.mark.parametrize("pairs", ONE_AFTER_THE_OTHER)
def test_body_too_deep_to_be_rewritten_is_refused(pairs: Disaggregation) -> None:
    body = b'{"model":"m","messages":' + b"[" * 1020 + b"]" * 1020 + b"}"

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        pairs.prefill(call(body=body), NODE)


@pytest.mark.parametrize("pairs", ONE_AFTER_THE_OTHER)
@pytest.mark.parametrize("reply", [b"", b"<html>", b"[]", b"7", b'"text"', b"null", b"[" * 2000])
def test_prefill_answer_that_is_no_object_is_malformed(pairs: Disaggregation, reply: bytes) -> None:
    with pytest.raises(NodeFailure) as failed:
        pairs.parse_prefill(call(), NODE, reply)

    assert failed.value.failure is Failure.MALFORMED


@pytest.mark.parametrize("pairs", ONE_AFTER_THE_OTHER)
def test_error_under_status_200_is_one_from_prefill_too(pairs: Disaggregation) -> None:
    with pytest.raises(RequestRefused, match="too long"):
        parse(pairs, {"error": {"message": "prompt is too long", "type": "invalid_request_error"}})
    with pytest.raises(NodeFailure, match="out of memory") as failed:
        parse(pairs, {"object": "error", "message": "out of memory", "code": 500})
    assert failed.value.failure is Failure.ERROR_EVENT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["id", "cache_session_id", "cache_block_ids", "remote_token_ids", "kv_transfer_params", "choices", "error"]
REPLIES = JSON | st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(st.integers(), max_size=3))


@settings(deadline=None)
@given(REPLIES)
@pytest.mark.parametrize("pairs", ONE_AFTER_THE_OTHER)
def test_any_prefill_answer_is_either_of_use_or_a_failure(pairs: Disaggregation, reply: Any) -> None:
    try:
        handoff = pairs.parse_prefill(call(), NODE, json.dumps(reply).encode())
    except (NodeFailure, RequestRefused):
        return

    sent = document(pairs.decode(call(), handoff).body)
    assert sent.keys() - {"migration_request", "kv_transfer_params"} == {"model", "messages"}
    pairs.abandon(handoff)


# -- LMDeploy: the link

CONFIG = {"tp_size": 1, "ep_size": 1, "dp_size": 1, "pp_size": None, "dp_rank": 0, "block_size": 64}
CONFIG |= {"num_cpu_blocks": 0, "num_gpu_blocks": 1000}
CONFIG_P, CONFIG_D = CONFIG, {**CONFIG, "num_gpu_blocks": 500}


def endpoint(port: int, **changes: Any) -> dict[str, Any]:
    transfer = [{"protocol": 2, "endpoint_info": f'{{"opaque":{port}}}'}]
    zmq = {"zmq_address": f"tcp://10.0.0.1:{port}"}
    return {"status": 1, "engine_endpoint_info": zmq, "kvtransfer_endpoint_info": transfer, **changes}


REPLIES_OF_A_LINK: list[list[Any]] = [
    [json.dumps(CONFIG_P), json.dumps(CONFIG_D)],
    [endpoint(41234), endpoint(41235)],
    [{"status": 1}, {"status": 1}],
]


def link(replies: Sequence[Sequence[Any]], pairs: Disaggregation = LMDEPLOY) -> list[Sequence[NodeRequest]]:
    """Plays the nodes; returns the batches of requests. Bytes are answered as they are, all else as JSON."""
    steps = pairs.link_steps(P, D)
    assert steps is not None
    batches = [next(steps)]
    for answers in replies:
        texts = [answer if isinstance(answer, bytes) else json.dumps(answer).encode() for answer in answers]
        try:
            batches.append(steps.send(texts))
        except StopIteration:
            return batches
    raise AssertionError("the handshake wants more")


def test_link_takes_three_rounds_each_with_both_nodes_at_once() -> None:
    batches = link(REPLIES_OF_A_LINK)

    assert [[(asked.side, asked.method, asked.path) for asked in batch] for batch in batches] == [
        [(side, "GET", "/distserve/engine_info") for side in Side],
        [(side, "POST", "/distserve/p2p_initialize") for side in Side],
        [(side, "POST", "/distserve/p2p_connect") for side in Side],
    ]
    assert [asked.body for asked in batches[0]] == [None, None]


def test_initialize_gives_each_engine_the_other() -> None:
    prefill_request, decode_request = link(REPLIES_OF_A_LINK)[1]

    assert document(prefill_request.body) == {
        "local_engine_id": P,
        "local_engine_config": CONFIG_P,
        "remote_engine_id": D,
        "remote_engine_config": CONFIG_D,
        "protocol": 2,
        "rank": None,
        "tcp_config": None,
        "rdma_config": {"with_gdr": True, "link_type": 2},
        "nvlink_config": None,
    }
    assert document(decode_request.body) == {
        **document(prefill_request.body),
        "local_engine_id": D,
        "local_engine_config": CONFIG_D,
        "remote_engine_id": P,
        "remote_engine_config": CONFIG_P,
    }


def test_connect_carries_what_each_engine_said_of_itself_to_the_other() -> None:
    prefill_request, decode_request = link(REPLIES_OF_A_LINK)[2]

    assert document(prefill_request.body) == {
        "protocol": 2,
        "remote_engine_id": D,
        "remote_engine_endpoint_info": {"zmq_address": "tcp://10.0.0.1:41235"},
        "remote_kvtransfer_endpoint_info": [{"protocol": 2, "endpoint_info": '{"opaque":41235}'}],
    }
    assert document(decode_request.body) == {
        "protocol": 2,
        "remote_engine_id": P,
        "remote_engine_endpoint_info": {"zmq_address": "tcp://10.0.0.1:41234"},
        "remote_kvtransfer_endpoint_info": [{"protocol": 2, "endpoint_info": '{"opaque":41234}'}],
    }


def test_settings_go_into_every_message() -> None:
    migration = Migration(MigrationProtocol.NVLINK, LinkType.IB, with_gdr=False)
    pairs = disaggregations(migration)["lmdeploy"]

    _, initialize, connect = link(REPLIES_OF_A_LINK, pairs)

    assert document(initialize[0].body)["protocol"] == document(connect[1].body)["protocol"] == 3
    assert document(initialize[0].body)["rdma_config"] == {"with_gdr": False, "link_type": 1}
    assert b'"protocol":3' in parse(pairs, PREFILLED).member


def test_engine_info_may_be_an_object() -> None:
    assert link([[CONFIG_P, CONFIG_D], *REPLIES_OF_A_LINK[1:]]) == link(REPLIES_OF_A_LINK)


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([[{**CONFIG, "tp_size": 2}, CONFIG]], "tp_size is 2 on the one and 1 on the other"),
        ([[CONFIG, {**CONFIG, "block_size": 128}]], "block_size is 64 on the one and 128 on the other"),
        ([[CONFIG, {"tp_size": 1}]], "block_size is 64 on one and None"),
        ([[b"<html>", CONFIG]], "the prefill node answered /distserve/engine_info with something that is not JSON"),
        ([[CONFIG, "no JSON"]], "the decode node answered /distserve/engine_info with something that is not JSON"),
        ([[CONFIG, "7"]], "JSON that is no object"),
        ([[CONFIG, CONFIG], [endpoint(1), endpoint(2, status=2)]], "the decode node reported at /distserve/p2p_init"),
        ([[CONFIG, CONFIG], [endpoint(1, engine_endpoint_info=None), endpoint(2)]], "the prefill node did not say"),
        ([[CONFIG, CONFIG], [endpoint(1), endpoint(2, kvtransfer_endpoint_info=[])]], "the decode node did not say"),
        ([*REPLIES_OF_A_LINK[:2], [{"status": 2}, {"status": 1}]], "the prefill node reported at /distserve/p2p_conn"),
        ([*REPLIES_OF_A_LINK[:2], [{"status": 1}, []]], "the decode node answered /distserve/p2p_connect"),
    ],
)
def test_link_that_cannot_be_is_refused_and_both_nodes_are_named(replies: Any, why: str) -> None:
    with pytest.raises(LinkRefused) as refused:
        link(replies)

    assert P in refused.value.summary
    assert D in refused.value.summary
    assert why in refused.value.summary
    assert not refused.value.counts


def test_others_need_no_link() -> None:
    for pairs in (VLLM, SGLANG):
        assert pairs.link_steps(P, D) is None
        assert pairs.drop_steps(P, D, [1]) == ()


def test_dropping_a_link_frees_what_is_held_before_the_engines_part() -> None:
    frees, drops = LMDEPLOY.drop_steps(P, D, [17, 18])

    assert [(asked.side, asked.path, document(asked.body)) for asked in frees] == [
        (Side.PREFILL, "/distserve/free_cache", {"remote_engine_id": P, "remote_session_id": number})
        for number in (17, 18)
    ]
    assert [(asked.side, asked.path, document(asked.body)) for asked in drops] == [
        (Side.PREFILL, "/distserve/p2p_drop_connect", {"engine_id": P, "remote_engine_id": D}),
        (Side.DECODE, "/distserve/p2p_drop_connect", {"engine_id": D, "remote_engine_id": P}),
    ]
    assert LMDEPLOY.drop_steps(P, D, []) == [drops]


# -- LMDeploy: generations


def test_lmdeploy_chat_prefill_is_one_token_and_keeps_its_cache() -> None:
    asked = call(stream=True, max_tokens=50, max_completion_tokens=60, stream_options={"x": 1}, session_id=4, new="x")

    assert prefill(LMDEPLOY, asked) == {
        "model": "m",
        "messages": USER,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "stream_options": {"x": 1},
        "session_id": 4,
        "new": "x",
        "with_cache": True,
        "preserve_cache": True,
    }
    assert LMDEPLOY.prefill(asked, NODE).outgoing.path == "/v1/chat/completions"
    assert LMDEPLOY.prefill(asked, NODE).handoff is None


def test_lmdeploy_completion_prefill_has_the_old_limit_alone() -> None:
    outgoing = LMDEPLOY.prefill(call(COMPLETION, max_tokens=50), NODE).outgoing

    assert outgoing.path == "/v1/completions"
    assert document(outgoing.body) == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
        "with_cache": True,
        "preserve_cache": True,
    }


def test_lmdeploy_decode_is_the_clients_request_and_where_the_cache_is() -> None:
    asked = call(max_tokens=50)

    assert document(LMDEPLOY.decode(asked, parse(LMDEPLOY, PREFILLED)).body) == {
        **document(asked.request.body),
        "migration_request": {
            "protocol": 2,
            "remote_engine_id": P,
            "remote_session_id": 17,
            "remote_token_id": 19384,
            "remote_block_ids": [412, 413, 414],
            "is_dummy_prefill": False,
        },
    }


@pytest.mark.parametrize(
    ("names", "session"),
    [
        ({"id": "17"}, 17),
        ({"id": "0017"}, 17),
        ({"id": "-1", "cache_session_id": 17}, 17),
        ({"id": "chatcmpl-1", "cache_session_id": 17}, 17),
        ({"id": "9", "cache_session_id": 17}, 17),
        ({"id": "9", "cache_session_id": None}, 9),
        ({"id": "9", "cache_session_id": "17"}, 9),
        ({"id": "9", "cache_session_id": True}, 9),
        ({"id": "chatcmpl-17"}, None),
        ({"id": "-1"}, None),
        ({"id": ""}, None),
        ({"id": "١٧"}, None),
        ({"id": "9" * 40}, None),
        ({"id": None}, None),
        ({"id": "x", "cache_session_id": -1}, None),
    ],
)
def test_lmdeploy_session_is_known_by_its_own_key_or_an_id_of_digits(
    names: dict[str, Any], session: int | None
) -> None:
    handoff = parse(LMDEPLOY, {**PREFILLED, **names})

    migration = document(LMDEPLOY.decode(call(), handoff).body)["migration_request"]
    assert handoff.session == session
    assert handoff.leaks is (session is None)
    assert migration["remote_session_id"] == (-1 if session is None else session)
    assert migration["remote_block_ids"] == PREFILLED["cache_block_ids"]


@pytest.mark.parametrize("field", ["cache_block_ids", "remote_token_ids"])
@pytest.mark.parametrize("value", [None, [], {}, "412", 412, ["412"], [412, None], [True], [1.5], [-1], [2**70]])
def test_lmdeploy_prefill_without_a_cache_never_reaches_decode_and_is_freed(field: str, value: Any) -> None:
    with pytest.raises(PrefillBroken, match=field) as failed:
        LMDEPLOY.parse_prefill(call(), NODE, json.dumps({**PREFILLED, field: value}).encode())

    free = failed.value.abandon
    assert free is not None
    assert document(free.body) == {"remote_engine_id": P, "remote_session_id": 17}


def test_lmdeploy_prefill_of_unknown_session_without_a_cache_cannot_be_freed() -> None:
    with pytest.raises(PrefillBroken) as failed:
        parse(LMDEPLOY, {"id": "chatcmpl-x", "remote_token_ids": [1]})

    assert failed.value.abandon is None


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, "stop"), ({"max_tokens": 1}, "length"), ({"max_tokens": 9, "max_completion_tokens": 1}, "length")],
)
def test_lmdeploy_generation_that_ends_with_its_first_token_is_freed_and_not_migrated(
    limits: dict[str, Any], reason: str
) -> None:
    asked = call(**limits)

    handoff = parse(LMDEPLOY, {**PREFILLED, "choices": [{"finish_reason": reason}]}, asked)

    free = LMDEPLOY.abandon(handoff)
    assert handoff.finished
    assert free == NodeRequest(
        Side.PREFILL, "POST", "/distserve/free_cache", b'{"remote_engine_id":"%b","remote_session_id":17}' % P.encode()
    )
    assert "migration_request" not in document(LMDEPLOY.decode(asked, handoff).body)


def test_lmdeploy_cache_of_unknown_session_cannot_be_freed() -> None:
    assert LMDEPLOY.abandon(parse(LMDEPLOY, {**PREFILLED, "id": "chatcmpl-x"})) is None


def test_lmdeploy_dummy_prefill_skips_the_prefill_and_has_nothing_to_free() -> None:
    pairs = disaggregations(Migration(dummy_prefill=True))["lmdeploy"]

    handoff = pairs.skipped

    assert handoff is not None
    assert document(pairs.decode(call(), handoff).body)["migration_request"] == {
        "protocol": 2,
        "remote_engine_id": "dummy:dummy",
        "remote_session_id": 0,
        "remote_token_id": 0,
        "remote_block_ids": [],
        "is_dummy_prefill": True,
    }
    assert pairs.abandon(handoff) is None
    assert not handoff.leaks
    assert LMDEPLOY.skipped is None


def test_lmdeploy_refuses_what_would_mix_several_caches() -> None:
    with pytest.raises(InvalidRequest, match=r"^n > 1 is not supported with the DistServe serving strategy\.$"):
        LMDEPLOY.refuse(call(n=2))
    with pytest.raises(InvalidRequest, match="more than one prompt"):
        LMDEPLOY.refuse(call(COMPLETION, prompt=["a", "b"]))


@pytest.mark.parametrize(
    "asked",
    [
        call(n=1),
        call(n=None),
        call(n="2"),
        call(COMPLETION, prompt=["a"]),
        call(COMPLETION, prompt=[1, 2, 3]),
        call(COMPLETION, prompt=[[1, 2]]),
        call(COMPLETION, prompt=[]),
    ],
)
def test_one_prompt_in_any_form_is_not_refused(asked: Call) -> None:
    for pairs in TABLE.values():
        pairs.refuse(asked)
        assert pairs.splits(asked)


def test_a_single_token_gains_nothing_from_two_lmdeploy_nodes() -> None:
    assert not LMDEPLOY.splits(call(max_tokens=1))
    assert not LMDEPLOY.splits(call(max_tokens=5, max_completion_tokens=1))
    assert LMDEPLOY.splits(call(max_tokens=1, max_completion_tokens=5))
    assert VLLM.splits(call(max_tokens=1))


# -- vLLM


def test_vllm_prefill_keeps_its_blocks_for_another() -> None:
    asked = call(
        stream=True, max_tokens=50, stream_options={"include_usage": True}, min_tokens=9, min_completion_tokens=9, new=1
    )

    assert prefill(VLLM, asked) == {
        "model": "m",
        "messages": USER,
        "stream": False,
        "max_tokens": 1,
        "new": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_vllm_prefill_has_the_new_limit_only_where_the_client_had_it() -> None:
    assert prefill(VLLM, call(max_completion_tokens=50))["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in prefill(VLLM, call(max_completion_tokens=None))
    assert prefill(VLLM, call(COMPLETION))["max_tokens"] == 1


def test_vllm_params_are_carried_over_whole_and_the_clients_own_minimum_is_back() -> None:
    asked = call(stream=True, max_tokens=50, min_tokens=9)
    reply = json.dumps({"id": "x", "choices": [{"finish_reason": "length"}], "kv_transfer_params": PARAMS})

    handoff = VLLM.parse_prefill(asked, NODE, reply.encode())

    sent = document(VLLM.decode(asked, handoff).body)
    assert sent == {
        **document(asked.request.body),
        "stream_options": {"include_usage": True},
        "kv_transfer_params": PARAMS,
    }
    assert not handoff.finished
    assert VLLM.abandon(handoff) is None


@pytest.mark.parametrize("reply", [{"kv_transfer_params": None}, {"id": "x"}])
def test_vllm_prefill_that_kept_nothing_leaves_an_ordinary_request(reply: Any) -> None:
    handoff = parse(VLLM, reply)

    assert handoff.finished
    assert "kv_transfer_params" not in document(VLLM.decode(call(), handoff).body)


@pytest.mark.parametrize("params", [[], "text", 7, True])
def test_vllm_params_of_a_wrong_form_are_malformed(params: Any) -> None:
    with pytest.raises(PrefillBroken, match="kv_transfer_params"):
        parse(VLLM, {"kv_transfer_params": params})


@pytest.mark.parametrize(
    "asked",
    [
        call(n=2),
        call(COMPLETION, prompt=["a", "b"]),
        call(use_beam_search=True),
        Call(Request("r", Operation.EMBEDDING, "m", b'{"model":"m","input":"x"}', {"model": "m", "input": "x"}), "m"),
    ],
)
def test_vllm_serves_on_one_node_what_would_be_several_requests_in_its_engine(asked: Call) -> None:
    VLLM.refuse(asked)

    assert not VLLM.splits(asked)


# -- SGLang


def rooms_from(*numbers: int) -> Callable[[], int]:
    return iter(numbers).__next__


def test_sglang_sends_both_nodes_the_same_request_to_the_same_room() -> None:
    asked = call(stream=True, max_tokens=50)
    pairs: Disaggregation = SGLangPairs(rooms_from(6148914691236517205))

    outgoing, handoff = pairs.prefill(asked, NODE)

    assert handoff is not None
    assert pairs.decode(asked, handoff) == outgoing
    assert document(outgoing.body) == {
        **document(asked.request.body),
        "stream_options": {"include_usage": True},
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 6148914691236517205,
    }
    assert pairs.abandon(handoff) is None


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://[fd00::1]:30000", "[fd00::1]"), ("http://gpu-1:30000", "gpu-1"), ("http://10.0.0.1", "10.0.0.1")],
)
def test_sglang_bootstrap_host_is_the_prefill_nodes(url: str, host: str) -> None:
    outgoing, _ = SGLANG.prefill(call(), PrefillNode(url))

    sent = document(outgoing.body)
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == (host, None)


@pytest.mark.parametrize("asked", [call(n=3), call(COMPLETION, prompt=["a", "b", "c"]), call(COMPLETION, n=3)])
def test_sglang_batch_has_a_room_for_each(asked: Call) -> None:
    outgoing, _ = SGLangPairs(rooms_from(7, 8, 9, 10)).prefill(asked, NODE)

    sent = document(outgoing.body)
    assert sent["bootstrap_host"] == ["10.0.0.1"] * 3
    assert sent["bootstrap_port"] == [8998] * 3
    assert len(set(sent["bootstrap_room"])) == 3


def test_sglang_rooms_are_new_for_every_try_and_fit_the_engine() -> None:
    rooms = {document(SGLANG.prefill(call(), NODE).outgoing.body)["bootstrap_room"] for _ in range(50)}

    assert len(rooms) == 50
    assert all(0 <= room < 2**63 for room in rooms)


def test_sglang_refuses_several_answers_to_several_prompts() -> None:
    with pytest.raises(InvalidRequest, match="several prompts"):
        SGLANG.refuse(call(COMPLETION, prompt=["a", "b"], n=2))
