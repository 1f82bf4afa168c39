//! A prompt's tokens are the tokenizer's own, though it is cut and its pieces come from a cache.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, path::PathBuf};

use kvlane_router::{
    body::scan,
    knowledge::{Reason, Text, Tokenizer, text, token_ids},
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A folder with a tokenizer of letters and a few words, gone at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, given: &Value) -> Self {
        let path = std::env::temp_dir().join(format!("kvlane-tokens-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("tokenizer.json"), given.to_string()).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn tokenizer(pre: &Value, post: &Value) -> Value {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false, "lstrip": false, "rstrip": false,
            "single_word": false})
    };
    let mut words = serde_json::Map::new();
    for (id, word) in
        ["<unk>", "<s>", "<|end|>", "a", "b", "\u{2581}a", "\u{2581}b", "ab", "ba"].iter().enumerate()
    {
        words.insert((*word).to_owned(), id.into());
    }
    json!({"version": "1.0", "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "<|end|>")],
        "pre_tokenizer": pre, "post_processor": post, "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}})
}

fn spaces() -> Value {
    json!({"type": "WhitespaceSplit"})
}

/// The first word of a text is another token than the same word within it.
fn first_differs() -> Value {
    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true})
}

fn adds(after: bool) -> Value {
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let mut single = vec![special("<s>"), text.clone()];
    single.extend(after.then(|| special("<|end|>")));
    let named = |id: &str, number: u32| json!({"id": id, "ids": [number], "tokens": [id]});
    json!({"type": "TemplateProcessing", "single": single, "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": named("<s>", 1), "<|end|>": named("<|end|>", 2)}})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn cutting_and_caching_change_no_token(texts in prop::collection::vec("(a|b|ab| |<s>|<[|]end[|]>|<[|]|\u{e4}){0,12}", 1..8)) {
        let kinds = [
            ("plain", tokenizer(&spaces(), &Value::Null)),
            ("lead", tokenizer(&spaces(), &adds(false))),
            ("both", tokenizer(&spaces(), &adds(true))),
            ("first", tokenizer(&first_differs(), &adds(false))),
        ];
        for (name, given) in kinds {
            let folder = Folder::new(name, &given);
            let library = tokenizers::Tokenizer::from_file(folder.0.join("tokenizer.json")).unwrap();
            let ours = Tokenizer::load(&folder.0).unwrap();
            for text in texts.iter().chain(&texts) {
                for special in [false, true] {
                    let expected = library.encode(text.as_str(), special).unwrap().get_ids().to_vec();
                    prop_assert_eq!(ours.tokens(ours.pieces(text, special)), Some(expected), "{} {:?}", name, text);
                    prop_assert_eq!(ours.pieces(text, special).unknown(), 0);
                }
            }
        }
    }
}

/// A turn of a conversation costs its new messages only.
#[test]
fn what_came_before_is_not_tokenized_again() {
    let folder = Folder::new("turns", &tokenizer(&spaces(), &Value::Null));
    let ours = Tokenizer::load(&folder.0).unwrap();
    let first = "a b<|end|>b a<|end|>";
    ours.tokens(ours.pieces(first, false)).unwrap();
    assert_eq!(ours.pieces(&format!("{first}a a a"), false).unknown(), 5);
    // A control: one that cannot be cut is tokenized as a whole.
    let folder = Folder::new("whole", &tokenizer(&first_differs(), &Value::Null));
    let ours = Tokenizer::load(&folder.0).unwrap();
    ours.tokens(ours.pieces(first, false)).unwrap();
    assert_eq!(ours.pieces(&format!("{first}a a a"), false).unknown(), first.len() + 5);
}

#[test]
fn bodies_say_what_their_prompts_are() {
    let folder = Folder::new("bodies", &tokenizer(&spaces(), &Value::Null));
    let ours = Tokenizer::load(&folder.0).unwrap();
    let of = |body: &str| text(&scan(body.as_bytes()).unwrap(), false, &ours);
    let known = |text: &str, special| Ok(Text { text: text.into(), special });
    assert_eq!(of(r#"{"prompt": "a\u00e4\n"}"#), known("a\u{e4}\n", true));
    assert_eq!(of(r#"{"prompt": ["a"], "add_special_tokens": false, "suffix": null}"#), known("a", false));
    for form in [
        r#"{"prompt": ["a", "b"]}"#,
        r#"{"prompt": "a", "suffix": "b"}"#,
        r#"{"prompt": "a", "truncate_prompt_tokens": 3}"#,
        r#"{"prompt": "\ud800"}"#,
        r#"{"prompt": null}"#,
        "{}",
    ] {
        assert_eq!(of(form), Err(Reason::Form), "{form}");
    }
    let chat = scan(br#"{"messages": []}"#).unwrap();
    assert_eq!(text(&chat, true, &ours), Err(Reason::NoTemplate));
    let ids = |body: &str| token_ids(&scan(body.as_bytes()).unwrap());
    assert_eq!(ids(r#"{"prompt": [1, 2]}"#), Some(vec![1, 2]));
    assert_eq!(ids(r#"{"prompt": [[3]]}"#), Some(vec![3]));
    for none in
        [r#"{"prompt": [[1], [2]]}"#, r#"{"prompt": []}"#, r#"{"prompt": [-1]}"#, r#"{"prompt": "a"}"#]
    {
        assert_eq!(ids(none), None, "{none}");
    }
}

#[test]
fn files_that_are_no_tokenizer_are_named() {
    let folder = Folder::new("wrong", &json!({"version": "1.0"}));
    let error = Tokenizer::load(&folder.0).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: no tokenizer can be read from it"), "{error}");
    fs::write(folder.0.join("tokenizer.json"), tokenizer(&spaces(), &Value::Null).to_string()).unwrap();
    fs::write(folder.0.join("chat_template.jinja"), "{% for %}").unwrap();
    let error = Tokenizer::load(&folder.0).unwrap_err().to_string();
    assert!(error.contains("the chat template cannot be used"), "{error}");
}
