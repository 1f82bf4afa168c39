//! Bodies against serde_json: which are accepted, the values of members, and the bytes after edits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kvlane_router::body::{BodyChange, BodyError, DEPTH_MAX, MARK_BYTES, edit, marks, scan};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const NAMES: [&str; 7] = ["model", "stream", "messages", "max_tokens", "n", "q\"uote", "é"];

fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1_000_000i32..1_000_000).prop_map(|eighths| json!(f64::from(eighths) / 8.0)),
        ".{0,12}".prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(".{0,4}", inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn object() -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::btree_map(prop::sample::select(&NAMES[..]), value(), 0..NAMES.len())
        .prop_map(|members| members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

fn written(object: &Map<String, Value>, is_pretty: bool) -> Vec<u8> {
    if is_pretty { serde_json::to_vec_pretty(object) } else { serde_json::to_vec(object) }.unwrap()
}

fn refused(body: &str) -> BodyError {
    scan(body.as_bytes()).unwrap_err()
}

proptest! {
    #[test]
    fn members_hold_what_a_parser_finds(object in object(), is_pretty in any::<bool>()) {
        let body = written(&object, is_pretty);
        let found = scan(&body).unwrap();
        prop_assert_eq!(found.all().count(), object.len());
        for (name, value) in &object {
            let raw = found.raw(name).unwrap();
            prop_assert_eq!(&serde_json::from_slice::<Value>(raw).unwrap(), value);
            let string = found.string(name);
            prop_assert_eq!(string.as_deref(), value.as_str());
            prop_assert_eq!(found.is_true(name), value == &Value::Bool(true));
        }
        let messages: Vec<Value> = found
            .messages_of_chat()
            .iter()
            .map(|range| serde_json::from_slice(&body[range.clone()]).unwrap())
            .collect();
        let expected = object.get("messages").and_then(Value::as_array).cloned().unwrap_or_default();
        prop_assert_eq!(messages, expected);
    }

    #[test]
    fn an_edit_changes_what_it_names_and_no_other_byte(
        object in object(), is_pretty in any::<bool>(), added in value(), set in 0..NAMES.len() - 1, step in 1..NAMES.len() - 1,
    ) {
        let plain: Vec<&str> = NAMES.into_iter().filter(|name| !name.contains('"')).collect();
        let (set, removed) = (plain[set], plain[(set + step) % plain.len()]);
        let body = written(&object, is_pretty);
        let found = scan(&body).unwrap();
        let added_text = added.to_string();
        let edited = edit(&found, &[BodyChange::Set(set, &added_text), BodyChange::Remove(removed)]).to_vec();
        let mut expected = object.clone();
        expected.insert(set.into(), added);
        expected.remove(removed);
        prop_assert_eq!(serde_json::from_slice::<Map<String, Value>>(&edited).unwrap(), expected);
        let again = scan(&edited).unwrap();
        for (name, member) in found.all().filter(|(name, _)| *name != set && *name != removed) {
            let now = again.member(name).unwrap();
            prop_assert_eq!(&body[member.key.start..member.value.end], &edited[now.key.start..now.value.end]);
        }
        prop_assert_eq!(edit(&found, &[]).to_vec(), body, "nothing is changed without a change");
    }

    #[test]
    fn what_a_parser_refuses_is_refused(object in object(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut body = written(&object, false);
        let at = at.index(body.len());
        if cut { body.truncate(at) } else { body[at] = byte }
        let parsed = serde_json::from_slice::<Value>(&body);
        match scan(&body) {
            Ok(_) => match parsed {
                Ok(value) => prop_assert!(value.is_object()),
                // Numbers beyond a double and lone surrogates are JSON by its grammar.
                Err(error) => prop_assert!(error.to_string().contains("out of range") || error.to_string().contains("surrogate") || error.to_string().contains("escape"), "{error}"),
            },
            Err(BodyError::Twice { .. }) => prop_assert!(parsed.is_ok()),
            Err(BodyError::NotAnObject) => prop_assert!(parsed.is_ok_and(|value| !value.is_object())),
            Err(_) => prop_assert!(parsed.is_err()),
        }
    }

    #[test]
    fn any_bytes_are_taken_or_refused_as_a_parser_would(body in "[\\[\\]{}:,\"\\\\ntrufalse0-9eE.+ -]{0,24}") {
        if scan(body.as_bytes()).is_ok() {
            prop_assert!(serde_json::from_str::<Value>(&body).map_or_else(|error| error.to_string().contains("out of range"), |value| value.is_object()));
        } else if let Ok(value) = serde_json::from_str::<Value>(&body) {
            let is_twice = matches!(scan(body.as_bytes()), Err(BodyError::Twice { .. }));
            prop_assert!(!value.is_object() || is_twice);
        }
    }
}

#[test]
fn a_refusal_says_where() {
    assert_eq!(refused("{\"a\": tru}"), BodyError::NotJson { at: 6, expected: "true, false or null" });
    assert_eq!(refused("{\"a\" 1}"), BodyError::NotJson { at: 5, expected: "`:`" });
    assert_eq!(refused("{\"a\": 1} x"), BodyError::NotJson { at: 9, expected: "the end of the body" });
    assert_eq!(refused("{\"a\": 1,}"), BodyError::NotJson { at: 8, expected: "a string" });
    assert_eq!(refused(""), BodyError::NotJson { at: 0, expected: "a value" });
    assert_eq!(refused("[1]"), BodyError::NotAnObject);
    assert_eq!(refused("{\"a\": 1, \"\\u0061\": 2}"), BodyError::Twice { key: "a".into(), at: 9 });
    assert_eq!(scan(b"{\"a\": \"\xff\"}").unwrap_err(), BodyError::NotUtf8 { at: 7 });
    assert_eq!(
        refused("{\"a\": 1, \"a\": 2}").to_string(),
        "the body has \"a\" twice, the second time at byte 9"
    );
}

#[test]
fn space_around_commas_stays_and_commas_go_with_what_is_removed() {
    let body = b" { \"a\" : 1 ,  \"b\":2 , \"c\":3 } ";
    let found = scan(body).unwrap();
    let edited = |changes: &[BodyChange<'_>]| String::from_utf8(edit(&found, changes).to_vec()).unwrap();
    assert_eq!(edited(&[]).as_bytes(), body);
    assert_eq!(edited(&[BodyChange::Remove("a")]), " { \"b\":2 , \"c\":3 } ");
    assert_eq!(edited(&[BodyChange::Remove("c")]), " { \"a\" : 1 ,  \"b\":2 } ");
    assert_eq!(
        edited(&[BodyChange::Set("a", "[7]"), BodyChange::Set("d", "4")]),
        " { \"a\" : [7] ,  \"b\":2 , \"c\":3, \"d\": 4 } "
    );
    let all = [
        BodyChange::Remove("a"),
        BodyChange::Remove("b"),
        BodyChange::Remove("c"),
        BodyChange::Set("d", "4"),
    ];
    assert_eq!(edited(&all), " {\"d\": 4 } ");
}

#[test]
fn depth_is_bounded_and_costs_no_stack() {
    let nested = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
    assert!(scan(nested(DEPTH_MAX - 1).as_bytes()).is_ok());
    assert_eq!(refused(&nested(DEPTH_MAX)), BodyError::TooDeep { at: 5 + DEPTH_MAX - 1, most: DEPTH_MAX });
    assert_eq!(refused(&"[".repeat(1 << 20)), BodyError::TooDeep { at: DEPTH_MAX, most: DEPTH_MAX });
}

fn chat(messages: &[&str]) -> Vec<u8> {
    let messages: Vec<Value> =
        messages.iter().map(|text| json!({ "role": "user", "content": text })).collect();
    json!({ "model": "m", "messages": messages }).to_string().into_bytes()
}

#[test]
fn prompts_that_begin_alike_have_their_first_marks_in_common() {
    let long = "x".repeat(3 * MARK_BYTES);
    let (one, two) = (chat(&[&long, "a"]), chat(&[&long, "b", "c"]));
    let (first, second) = (marks(&scan(&one).unwrap(), 1), marks(&scan(&two).unwrap(), 1));
    let same = first.iter().zip(&second).take_while(|(one, two)| one == two).count();
    assert_eq!((same, first.len(), second.len()), (4, 5, 6));
    let other = marks(&scan(&one).unwrap(), 2);
    assert!(
        first.iter().zip(&other).all(|(one, other)| one.hash != other.hash),
        "another model's are others"
    );
}

/// Agents send long instructions with every request; only their input was known.
#[test]
fn what_stands_before_an_agents_messages_is_the_beginning_of_its_prompt() {
    let long = "x".repeat(3 * MARK_BYTES);
    let input = |text: &str| json!([{"role": "user", "content": text}]);
    let bodies = [
        |before: &str, input: Value| json!({"input": input, "instructions": before}),
        |before: &str, input: Value| json!({"messages": input, "system": before}),
    ];
    for body in bodies {
        let marks_of = |before: &str, text: &str| {
            let body = body(before, input(text)).to_string().into_bytes();
            marks(&scan(&body).unwrap(), 0)
        };
        let (first, second) = (marks_of(&long, "a"), marks_of(&long, "b"));
        let same = first.iter().zip(&second).take_while(|(one, two)| one == two).count();
        assert_eq!((same, first.len(), second.len()), (3, 4, 4));
        let other = marks_of("y", "a");
        assert!(
            first.iter().all(|one| other.iter().all(|two| one != two)),
            "the input alone is no beginning"
        );
    }
}

#[test]
fn a_prompt_is_text_or_tokens() {
    let marks_of = |prompt: Value| {
        let body = json!({ "prompt": prompt }).to_string().into_bytes();
        marks(&scan(&body).unwrap(), 0)
    };
    let text = "y".repeat(2 * MARK_BYTES);
    let longer = marks_of(json!(format!("{text}and more")));
    assert_eq!(marks_of(json!(text))[..], longer[..2]);
    assert_eq!(longer[1].bytes as usize, 2 * MARK_BYTES);
    let tokens: Vec<u32> = (1000..1200).collect();
    let (few, many) = (marks_of(json!(&tokens[..150])), marks_of(json!(tokens)));
    assert_eq!(few[..2], many[..2]);
    assert!(marks_of(Value::Null).len() <= 1);
}
