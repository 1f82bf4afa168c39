//! The bodies and request ids of prefill and decode legs.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashSet;

use kvlane_router::{
    body::scan,
    ids::{ID_LENGTH_MAX, Ids},
    legs::{
        Api, LegRequest, Reserved, Unsplittable, body, reserved, transfer_params, unsplittable,
        unsplittable_at,
    },
    schedule::Leg,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn leg_of(api: Api, request: &Value, leg: &LegRequest) -> Value {
    let request = request.to_string().into_bytes();
    serde_json::from_slice(&body(Some(api), &scan(&request).unwrap(), leg, "id").unwrap().to_vec()).unwrap()
}

fn prefill_of(request: &Value) -> Value {
    leg_of(Api::Chat, request, &LegRequest::prefill())
}

/// A prefill leg of one of the interfaces that agents speak, without its transfer, which has to ask for a hand-off.
fn agents_prefill(api: Api, request: &Value) -> Value {
    let mut found = leg_of(api, request, &LegRequest::prefill());
    let transfer = found.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
    assert_eq!(transfer["do_remote_decode"], true);
    found
}

#[test]
fn a_response_is_prefilled_as_one_token_that_no_engine_stores() {
    let request = json!({
        "model": "m", "instructions": "be brief", "input": [{"role": "user", "content": "hello"}],
        "max_output_tokens": 500, "stream": true, "include": ["message.output_text.logprobs"],
        "top_logprobs": 3, "store": true, "tools": [{"type": "function", "name": "f"}], "temperature": 0.5,
    });
    let expected = json!({
        "model": "m", "instructions": "be brief", "input": [{"role": "user", "content": "hello"}],
        "max_output_tokens": 1, "store": false, "tools": [{"type": "function", "name": "f"}], "temperature": 0.5,
        "request_id": "resp_id",
    });
    assert_eq!(agents_prefill(Api::Responses, &request), expected);
    let decode = leg_of(Api::Responses, &request, &LegRequest::WithTransfer(r#"{"tokens": 3}"#.into()));
    let mut expected = request;
    expected["kv_transfer_params"] = json!({"tokens": 3});
    expected["request_id"] = json!("resp_id");
    assert_eq!(decode, expected);
}

#[test]
fn a_message_is_prefilled_as_one_token_whatever_it_may_think() {
    let request = |thinking: Value| {
        json!({
            "model": "m", "system": "be brief", "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5000, "stream": true, "thinking": thinking,
        })
    };
    let rest = json!({
        "model": "m", "system": "be brief", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1,
    });
    // vLLM refuses a budget that is not below `max_tokens`.
    let budget = json!({"type": "enabled", "budget_tokens": 2048});
    assert_eq!(agents_prefill(Api::Messages, &request(budget)), rest);
    // Disabled thinking does change the prompt.
    let mut disabled = rest;
    disabled["thinking"] = json!({"type": "disabled"});
    assert_eq!(agents_prefill(Api::Messages, &request(json!({"type": "disabled"}))), disabled);
}

#[test]
fn a_response_that_one_engine_stores_or_works_at_alone_stays_there() {
    let cases = [
        (json!({"input": "p", "store": true, "background": false, "tools": null}), None),
        (
            json!({"input": "p", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}),
            None,
        ),
        (json!({"input": "p", "previous_response_id": "resp_1"}), Some(Unsplittable::StoredAnswer)),
        (json!({"input": "p", "background": true}), Some(Unsplittable::Background)),
        (json!({"input": "p", "tools": [{"type": "web_search_preview"}]}), Some(Unsplittable::EngineTools)),
        (
            json!({"input": "p", "tools": [{"type": "mcp", "server_label": "x"}]}),
            Some(Unsplittable::EngineTools),
        ),
        (json!({"input": "p", "tools": "x"}), Some(Unsplittable::EngineTools)),
        (
            json!({"input": "p", "tools": [{"type": "function", "name": "x".repeat(1 << 20)}]}),
            Some(Unsplittable::EngineTools),
        ),
    ];
    for (request, expected) in cases {
        let text = request.to_string().into_bytes();
        assert_eq!(unsplittable_at(Api::Responses, &scan(&text).unwrap()), expected, "{request}");
        assert_eq!(unsplittable_at(Api::Messages, &scan(&text).unwrap()), None, "{request}");
    }
}

/// Complaints 20 and 37: stream_options, min_tokens or max_completion_tokens that are left on the prefill leg make vLLM refuse it,
/// and the prompt is silently computed twice.
#[test]
fn the_prefill_leg_asks_for_one_token_and_nothing_of_the_answer() {
    let found = prefill_of(&json!({
        "model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5, "seed": 7,
        "stream": true, "stream_options": {"include_usage": true}, "max_completion_tokens": 500, "min_tokens": 20, "n": 2,
        "logprobs": true, "top_logprobs": 3,
    }));
    let mut transfer = found.clone();
    let transfer = transfer.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
    assert_eq!(
        (&transfer["do_remote_decode"], &transfer["do_remote_prefill"]),
        (&json!(true), &json!(false))
    );
    let mut rest = found;
    rest.as_object_mut().unwrap().remove("kv_transfer_params");
    assert_eq!(
        rest,
        json!({
            "model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5, "seed": 7,
            "max_completion_tokens": 1, "max_tokens": 1,
        })
    );
    let found = prefill_of(&json!({"model": "m", "prompt": "p", "max_tokens": 9}));
    assert_eq!(found["max_tokens"], 1);
    assert!(found.get("max_completion_tokens").is_none(), "completions do not know it");
}

#[test]
fn the_decode_leg_is_the_request_with_what_the_prefill_node_answered() {
    let answer =
        br#"{"id": "x", "choices": [], "kv_transfer_params": {"remote_block_ids": [[1, 2]], "tp": 1.0}}"#;
    let answer = scan(answer).unwrap();
    let transfer = std::str::from_utf8(transfer_params(&answer).unwrap()).unwrap();
    let request = br#"{"prompt":"p",  "stream":true}"#;
    let asks = LegRequest::WithTransfer(transfer.into());
    let leg = body(Some(Api::Completions), &scan(request).unwrap(), &asks, "id").unwrap().to_vec();
    let expected =
        r#"{"prompt":"p",  "stream":true, "kv_transfer_params": {"remote_block_ids": [[1, 2]], "tp": 1.0}}"#;
    assert_eq!(String::from_utf8(leg).unwrap(), expected, "byte for byte");
    for nothing in ["{}", r#"{"kv_transfer_params": null}"#, r#"{"kv_transfer_params": "x"}"#] {
        assert_eq!(transfer_params(&scan(nothing.as_bytes()).unwrap()), None);
    }
}

#[test]
fn what_cannot_be_split_stays() {
    let cases = [
        (json!({"prompt": "p"}), None),
        (json!({"prompt": [1, 2, 3]}), None),
        (json!({"prompt": []}), None),
        (json!({"prompt": "p", "prompt_logprobs": null, "logprobs": 3}), None),
        (json!({"prompt": "p", "echo": true}), None),
        (json!({"prompt": "p", "prompt_logprobs": 0}), Some(Unsplittable::PromptLogprobs)),
        (json!({"prompt": "p", "echo": true, "logprobs": 1}), Some(Unsplittable::PromptLogprobs)),
        (json!({"prompt": ["p", "q"]}), Some(Unsplittable::ManyPrompts)),
        (json!({"prompt": [[1], [2]]}), Some(Unsplittable::ManyPrompts)),
        (json!({"prompt_embeds": "AAAA"}), Some(Unsplittable::Embeddings)),
        (json!({"messages": [], "use_beam_search": true}), Some(Unsplittable::BeamSearch)),
    ];
    for (body, expected) in cases {
        let text = body.to_string().into_bytes();
        assert_eq!(unsplittable(&scan(&text).unwrap()), expected, "{body}");
    }
    assert_eq!(unsplittable(&scan(b"{\"prompt\": [ \n [1]]}").unwrap()), Some(Unsplittable::ManyPrompts));
}

#[test]
fn pairs_of_p2p_nccl_find_each_other_by_the_id() {
    let id =
        Ids::new(0xabc).next_id().p2p_nccl("10.0.0.1:21001", "10.0.0.2:22001", 0, 0xfe_u128.to_ne_bytes());
    let pair = "___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_000000000000000000000000000000fe";
    assert_eq!(id, format!("kvlane-000000000abc-1-w0{pair}"));
}

proptest! {
    #[test]
    fn ids_are_short_and_never_the_same(run in any::<u64>(), attempts in prop::collection::vec(0u32..2000, 1..20)) {
        let mut ids = Ids::new(run);
        let mut seen = HashSet::new();
        for attempt in attempts {
            let id = ids.next_id();
            for leg in [Leg::Whole, Leg::Prefill, Leg::Decode] {
                let of_leg = id.of_leg(leg, attempt);
                prop_assert!(of_leg.len() <= ID_LENGTH_MAX && of_leg.starts_with(&id.name()));
                prop_assert!(of_leg.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'));
                prop_assert!(seen.insert(of_leg));
            }
        }
    }
}

#[test]
fn the_id_of_a_response_is_the_routers_also_where_its_client_names_one() {
    let run = Ids::new(u64::MAX).next_id().of_leg(Leg::Whole, 3);
    for request in
        [r#"{"input": "hello"}"#, r#"{"request_id": "___prefill_addr_10.0.0.1:1___", "input": "hello"}"#]
    {
        let scanned = scan(request.as_bytes()).unwrap();
        let named = body(Some(Api::Responses), &scanned, &LegRequest::Whole, &run).unwrap().to_vec();
        let named: Value = serde_json::from_slice(&named).unwrap();
        let id = format!("resp_{run}");
        assert!(id.len() <= ID_LENGTH_MAX);
        assert_eq!(named, json!({"input": "hello", "request_id": id}));
    }
}

/// vLLM merges vllm_xargs with kv_transfer_params, so a client's own could name hosts and blocks there.
#[test]
fn what_only_the_router_may_set_is_found_under_any_spelling_and_nothing_else() {
    let found = |body: &str| reserved(&scan(body.as_bytes()).unwrap());
    let name = |name: &str| Some(Reserved::Transfer(name.into()));
    assert_eq!(found(r#"{"ec_transfer_params": {}}"#), name("ec_transfer_params"));
    for inside in [
        r#"{"kv_transfer_params": 1}"#,
        r#"{"a": {"b": [{}, "}"]}, "a": 1, "kv_transfer_params": null}"#,
        r#" { "\ud800": 1 , "\u006b\u0076_transfer_params" : "x" }"#,
    ] {
        let body = format!(r#"{{"\u0076llm_xargs": {inside}}}"#);
        assert_eq!(found(&body), name("vllm_xargs.kv_transfer_params"), "{body}");
    }
    for body in [
        r#"{"kv_transfer_params": null, "ec_transfer_params": null}"#,
        r#"{"vllm_xargs": {"a": {"kv_transfer_params": 1}, "b": "ec_transfer_params"}}"#,
        r#"{"vllm_xargs": "kv_transfer_params"}"#,
        r#"{"vllm_xargs": {}, "other": {"kv_transfer_params": 1}}"#,
    ] {
        assert_eq!(found(body), None, "{body}");
    }
    let long = format!(r#"{{"vllm_xargs": ["{}"]}}"#, "x".repeat(1 << 20));
    assert_eq!(found(&long), Some(Reserved::TooLong));
}
