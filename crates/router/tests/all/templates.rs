//! Chat templates in the ways of three families of models, with the prompts that Hugging Face's `apply_chat_template` makes
//! of them after vLLM has prepared the messages.
#![allow(clippy::unwrap_used, reason = "tests")]

use kvlane_router::{
    body::scan,
    knowledge::{NotText, Template, messages, tools},
};
use minijinja::Value;
use serde_json::json;

fn template(text: &str) -> Template {
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "special": true}});
    Template::new(text, None, &config).unwrap()
}

/// As a request's body has it.
fn render(template: &Template, body: &str, add: bool, more: &[(&str, Value)]) -> Result<String, String> {
    let scan = scan(body.as_bytes()).unwrap();
    let messages = messages(scan.raw("messages").unwrap(), template.wants_parts()).unwrap();
    let tools = scan.raw("tools").and_then(|raw| tools(raw).unwrap());
    let more = more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    template.render(messages, tools, add, more).map_err(|error| format!("{error:#}"))
}

const WEATHER: &str = r#""tools": [{"type": "function", "function": {"description": "Says <when> it rains", "name": "rain",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}}}]"#;

#[test]
fn headers_before_each_message() {
    let headers = template(include_str!("../templates/headers.jinja"));
    assert!(!headers.wants_parts());
    let body = r#"{"messages": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hé\n"},
        {"role": "assistant", "content": "Yes?"}, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "role": "user"}]}"#;
    let expected = "<s><|start|>system<|body|>\n\nBe brief.<|stop|><|start|>user<|body|>\n\nHé<|stop|>\
        <|start|>assistant<|body|>\n\nYes?<|stop|><|start|>user<|body|>\n\na\nb<|stop|>";
    assert_eq!(render(&headers, body, false, &[]).unwrap(), expected);
    let asked = format!("{expected}<|start|>assistant<|body|>\n\n");
    assert_eq!(render(&headers, body, true, &[]).unwrap(), asked);
}

#[test]
fn tools_come_in_the_order_and_with_the_members_that_vllm_gives_them() {
    let headers = template(include_str!("../templates/headers.jinja"));
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "Rain?"}}, {{"role": "assistant", "content": null, "tool_calls": [{{"id": "1",
        "type": "function", "function": {{"name": "rain", "arguments": "{{\"town\": \"Bern\", \"days\": 2}}"}}}}]}},
        {{"role": "tool", "tool_call_id": "1", "content": "No & never"}}], {WEATHER}}}"#
    );
    let expected = r#"<s><|start|>system<|body|>

You can call these functions:

{
    "type": "function",
    "function": {
        "name": "rain",
        "description": "Says <when> it rains",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {
                    "type": "string"
                },
                "days": {
                    "type": "integer"
                }
            }
        }
    }
}

<|stop|><|start|>user<|body|>

Rain?<|stop|><|start|>assistant<|body|>

{"name": "rain", "parameters": {"town": "Bern", "days": 2}}<|stop|><|start|>ipython<|body|>

No & never<|stop|>"#;
    assert_eq!(render(&headers, &body, false, &[]).unwrap(), expected);
    let two =
        body.replace(r#"[{"id""#, r#"[{"id": "0", "function": {"name": "rain", "arguments": ""}}, {"id""#);
    assert!(render(&headers, &two, false, &[]).unwrap_err().contains("One call at a time, please."));
}

#[test]
fn thoughts_of_earlier_turns_are_left_out() {
    let thinking = template(include_str!("../templates/thinking.jinja"));
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "One?"}}, {{"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."}},
        {{"role": "user", "content": "And?"}}, {{"role": "assistant", "content": "<think>\nso\n</think>\n\nAsk.",
        "tool_calls": [{{"id": "1", "type": "function", "function": {{"name": "rain", "arguments": "{{\"a\": [1.5, true, null]}}"}}}}]}},
        {{"role": "tool", "tool_call_id": "1", "content": "x"}}, {{"role": "tool", "tool_call_id": "2", "content": "y"}}], {WEATHER}}}"#
    );
    let expected = "<|in|>system\n# Tools\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"rain\", \"description\": \"Says \
        <when> it rains\", \"parameters\": {\"type\": \"object\", \"properties\": {\"town\": {\"type\": \"string\"}, \"days\": {\"type\": \
        \"integer\"}}}}}\n</tools><|out|>\n<|in|>user\nOne?<|out|>\n<|in|>assistant\nTwo.<|out|>\n<|in|>user\nAnd?<|out|>\n\
        <|in|>assistant\n<think>\nso\n</think>\n\nAsk.\n<call>\n{\"name\": \"rain\", \"arguments\": {\"a\": [1.5, true, null]}}\n</call>\
        <|out|>\n<|in|>user\n<result>\nx\n</result>\n<result>\ny\n</result><|out|>\n<|in|>assistant\n<think>\n\n</think>\n\n";
    let silent = [("enable_thinking", Value::from(false))];
    assert_eq!(render(&thinking, &body, true, &silent).unwrap(), expected);
    let aloud = expected.strip_suffix("<think>\n\n</think>\n\n").unwrap();
    assert_eq!(render(&thinking, &body, true, &[]).unwrap(), aloud);
}

#[test]
fn parts_are_given_to_templates_that_walk_over_them() {
    let brackets = template(include_str!("../templates/brackets.jinja"));
    assert!(brackets.wants_parts());
    let body = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]}"#;
    assert_eq!(render(&brackets, body, true, &[]).unwrap(), "<s>[ASK] a[/ASK] b</s>[ASK] cd[/ASK]");
    let twice = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}"#;
    assert!(render(&brackets, twice, true, &[]).unwrap_err().contains("Roles must take turns"));
}

#[test]
fn what_is_no_text_is_not_guessed() {
    for wrong in [
        r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]"#,
        r#"[{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]"#,
        r#"[{"content": "nobody"}]"#,
        r#"[{"role": "user", "content": 7}]"#,
        r#"["text"]"#,
        r#"{"role": "user"}"#,
        "7",
    ] {
        assert_eq!(messages(wrong.as_bytes(), false).unwrap_err(), NotText, "{wrong}");
    }
}

/// A template of a stranger must not keep the router busy.
#[test]
fn work_without_an_end_is_given_up() {
    let endless = template(
        "{% for a in range(10000) %}{% for b in range(10000) %}{% set c = 1 %}{% endfor %}{% endfor %}",
    );
    assert!(render(&endless, r#"{"messages": []}"#, true, &[]).unwrap_err().contains("fuel"));
}
