//! Decodes batches that msgspec and rmpv have written, whole and damaged.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use kvlane_kv_events::{
    Batch, BlockRemoved, BlockStored, DecodeError, Event, ExternalHash, ExtraKey, Limits, Wrong, decode_batch,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rmpv::Value;

/// What msgspec makes of vLLM's classes before 0.26: arrays, with the class's name first.
const ARRAYS: &str = "93cb3ff8000000000000939aab426c6f636b53746f72656492c4200001020304050607\
    08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcfffffffffffffffffc0940102cd012cce0001117002c0a34750\
    55c092c091a473616c740094ac426c6f636b52656d6f7665649105a3435055c091b0416c6c426c6f636b73436c656172656403";
/// The same from 0.26 on: maps. What has its default is left away.
const MAPS: &str = "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573\
    92c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcfffffffffffffffffb1706172656e\
    745f626c6f636b5f68617368c0a9746f6b656e5f696473940102cd012cce00011170aa626c6f636b5f73697a6502a76c6f72\
    615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c091a473616c74a967726f\
    75705f6964780083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da343\
    505581a474797065b0416c6c426c6f636b73436c656172656403";

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn encode(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

fn decode(value: &Value) -> Result<Batch, DecodeError> {
    decode_batch(&encode(value), &Limits::default())
}

#[test]
fn both_ways_in_which_vllm_writes_a_batch_say_the_same() {
    let long: Vec<u8> = (0..32).collect();
    let stored = BlockStored {
        hashes: vec![ExternalHash::Long(long.try_into().unwrap()), ExternalHash::Number(u64::MAX)],
        parent: None,
        tokens: vec![1, 2, 300, 70_000],
        block_size: 2,
        lora_id: None,
        medium: Some("GPU".to_owned()),
        lora_name: None,
        extra_keys: vec![vec![], vec![ExtraKey::Text("salt".into())]],
        group: Some(0),
        kind: None,
        window: None,
    };
    let removed =
        BlockRemoved { hashes: vec![ExternalHash::Number(5)], medium: Some("CPU".to_owned()), group: None };
    let events = vec![Event::Stored(stored), Event::Removed(removed), Event::Cleared];
    let expected = Batch { time: 1.5, events, unknown: 0, data_parallel_rank: Some(3) };
    assert_eq!(decode_batch(&unhex(ARRAYS), &Limits::default()), Ok(expected.clone()));
    assert_eq!(decode_batch(&unhex(MAPS), &Limits::default()), Ok(expected));
}

/// None of a first block, a salt and something else of a second one.
fn extra_keys() -> Vec<Vec<ExtraKey>> {
    vec![vec![], vec![ExtraKey::Text("salt".into()), ExtraKey::Other]]
}

/// An event's fields in vLLM's order, and how many of them have no default.
fn fields(event: &Event) -> (&'static str, Vec<(&'static str, Value)>, usize) {
    let hash = |hash: &ExternalHash| match hash {
        ExternalHash::Number(number) => Value::from(*number),
        ExternalHash::Short(bytes) => Value::from(&bytes[..]),
        ExternalHash::Long(bytes) => Value::from(&bytes[..]),
    };
    let hashes = |hashes: &[ExternalHash]| Value::Array(hashes.iter().map(hash).collect());
    let or_nil = |value: Option<Value>| value.unwrap_or(Value::Nil);
    let text = |text: &Option<String>| or_nil(text.clone().map(Value::from));
    let group = |group: Option<u32>| or_nil(group.map(Value::from));
    match event {
        Event::Stored(stored) => {
            let tokens = Value::Array(stored.tokens.iter().map(|&token| token.into()).collect());
            let keys = Value::Array(vec![Value::Nil, Value::Array(vec!["salt".into(), 7.into()])]);
            let fields = vec![
                ("block_hashes", hashes(&stored.hashes)),
                ("parent_block_hash", or_nil(stored.parent.as_ref().map(hash))),
                ("token_ids", tokens),
                ("block_size", stored.block_size.into()),
                ("lora_id", or_nil(stored.lora_id.map(Value::from))),
                ("medium", text(&stored.medium)),
                ("lora_name", text(&stored.lora_name)),
                ("extra_keys", if stored.extra_keys.is_empty() { Value::Nil } else { keys }),
                ("group_idx", group(stored.group)),
                ("kv_cache_spec_kind", text(&stored.kind)),
                ("kv_cache_spec_sliding_window", group(stored.window)),
            ];
            ("BlockStored", fields, 4)
        }
        Event::Removed(removed) => {
            let fields = vec![
                ("block_hashes", hashes(&removed.hashes)),
                ("medium", text(&removed.medium)),
                ("group_idx", group(removed.group)),
            ];
            ("BlockRemoved", fields, 1)
        }
        Event::Cleared => ("AllBlocksCleared", Vec::new(), 0),
    }
}

/// How a sender writes an event.
#[derive(Debug, Clone)]
enum Style {
    /// All fields, then so many that are not known.
    Array { surplus: usize },
    /// Without the last fields that say nothing.
    ShortArray,
    /// The fields from a turn on, those that say nothing left away, with one that is not known.
    Map { turn: usize },
}

fn written(event: &Event, style: &Style) -> Value {
    let (class, mut fields, needed) = fields(event);
    let unknown = Value::Array(vec![Value::Map(vec![(1.into(), Value::Array(Vec::new()))]), true.into()]);
    match style {
        Style::Array { surplus } => {
            let values = fields.into_iter().map(|(_, value)| value);
            let surplus = std::iter::repeat_n(unknown, *surplus);
            Value::Array(std::iter::once(class.into()).chain(values).chain(surplus).collect())
        }
        Style::ShortArray => {
            while fields.len() > needed && fields.last().is_some_and(|(_, value)| value.is_nil()) {
                fields.pop();
            }
            let values = fields.into_iter().map(|(_, value)| value);
            Value::Array(std::iter::once(class.into()).chain(values).collect())
        }
        Style::Map { turn } => {
            fields.retain(|(_, value)| !value.is_nil());
            fields.extend([("type", class.into()), ("session_id", unknown)]);
            let turn = turn % fields.len();
            fields.rotate_left(turn);
            Value::Map(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
        }
    }
}

fn a_hash() -> impl Strategy<Value = ExternalHash> {
    prop_oneof![
        any::<u64>().prop_map(ExternalHash::Number),
        any::<[u8; 16]>().prop_map(ExternalHash::Short),
        any::<[u8; 32]>().prop_map(ExternalHash::Long),
    ]
}

fn an_event() -> impl Strategy<Value = Event> {
    let text = || option::of("[a-zäß]{0,40}");
    let stored = (
        (vec(a_hash(), 0..20), option::of(a_hash()), vec(any::<u32>(), 0..70), any::<u32>()),
        (option::of(any::<i64>()), text(), text(), any::<bool>(), option::of(any::<u32>())),
        (text(), option::of(any::<u32>())),
    );
    let stored = stored.prop_map(|((hashes, parent, tokens, block_size), optional, (kind, window))| {
        let (lora_id, medium, lora_name, has_extra_keys, group) = optional;
        let extra_keys = if has_extra_keys { extra_keys() } else { Vec::new() };
        Event::Stored(BlockStored {
            hashes,
            parent,
            tokens,
            block_size,
            lora_id,
            medium,
            lora_name,
            extra_keys,
            group,
            kind,
            window,
        })
    });
    let removed = (vec(a_hash(), 0..20), text(), option::of(any::<u32>()));
    let removed =
        removed.prop_map(|(hashes, medium, group)| Event::Removed(BlockRemoved { hashes, medium, group }));
    prop_oneof![stored, removed, Just(Event::Cleared)]
}

fn a_style() -> impl Strategy<Value = Style> {
    prop_oneof![
        (0usize..3).prop_map(|surplus| Style::Array { surplus }),
        Just(Style::ShortArray),
        (0usize..12).prop_map(|turn| Style::Map { turn }),
    ]
}

proptest! {
    #[test]
    fn what_was_written_is_read(
        events in vec((an_event(), a_style()), 0..20),
        time in any::<f64>().prop_filter("equal to itself", |time| !time.is_nan()),
        data_parallel_rank in option::of(any::<u32>()),
        unknown in 0usize..3,
    ) {
        let mut written: Vec<Value> = events.iter().map(|(event, style)| written(event, style)).collect();
        written.extend(std::iter::repeat_n(Value::Array(vec!["BlockMoved".into(), Value::Nil]), unknown));
        let rank = data_parallel_rank.map_or(Value::Nil, Value::from);
        let batch = Value::Array(vec![time.into(), Value::Array(written), rank]);
        let events = events.into_iter().map(|(event, _)| event).collect();
        prop_assert_eq!(decode(&batch), Ok(Batch { time, events, unknown, data_parallel_rank }));
    }

    #[test]
    fn a_changed_or_missing_byte_is_an_error_or_another_batch(
        maps: bool,
        at in any::<proptest::sample::Index>(),
        to: u8,
        ends_there: bool,
    ) {
        let mut bytes = unhex(if maps { MAPS } else { ARRAYS });
        let at = at.index(bytes.len());
        bytes[at] = to;
        if ends_there {
            bytes.truncate(at);
            prop_assert!(decode_batch(&bytes, &Limits::default()).is_err());
        } else if let Err(error) = decode_batch(&bytes, &Limits::default()) {
            prop_assert!(error.offset <= bytes.len());
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read(noise in vec(any::<u8>(), 0..300)) {
        if let Err(error) = decode_batch(&noise, &Limits::default()) {
            prop_assert!(error.offset <= noise.len());
        }
    }
}

fn batch_of(event: Value) -> Value {
    Value::Array(vec![1.into(), Value::Array(vec![event])])
}

#[test]
fn limits_are_told_with_what_breached_them() {
    let limits = Limits { batch_bytes: 300, events: 1, hashes: 2, tokens: 3, depth: 2 };
    let wrong = |value: &Value| decode_batch(&encode(value), &limits).unwrap_err().wrong;
    let too_many = |what, count, most| Wrong::TooMany { what, count, most };
    let numbers = |count: u8| Value::Array((0..count).map(Value::from).collect());
    let removed = |count| batch_of(Value::Array(vec!["BlockRemoved".into(), numbers(count)]));
    assert!(decode_batch(&encode(&removed(2)), &limits).is_ok());
    assert_eq!(wrong(&removed(3)), too_many("hashes of blocks", 3, 2));
    let stored =
        batch_of(Value::Array(vec!["BlockStored".into(), numbers(0), Value::Nil, numbers(4), 1.into()]));
    assert_eq!(wrong(&stored), too_many("tokens", 4, 3));
    let cleared = Value::Array(vec!["AllBlocksCleared".into()]);
    assert_eq!(
        wrong(&Value::Array(vec![1.into(), Value::Array(vec![cleared.clone(), cleared])])),
        too_many("events", 2, 1)
    );
    let nested = (0..3).fold(Value::Nil, |inner, _| Value::Array(vec![inner]));
    let unknown = batch_of(Value::Array(vec!["Other".into(), nested]));
    assert_eq!(wrong(&unknown), too_many("values within each other", 3, 2));
    assert_eq!(decode_batch(&[0; 301], &limits).unwrap_err().wrong, too_many("bytes", 301, 300));
}

#[test]
fn what_is_only_announced_takes_no_room() {
    // An array of 2^32 - 1 hashes, of which none comes.
    let mut bytes = encode(&batch_of(Value::Array(vec!["BlockRemoved".into(), Value::Nil])));
    bytes.pop();
    bytes.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    let unlimited = Limits { hashes: usize::MAX, ..Limits::default() };
    let found = decode_batch(&bytes, &unlimited);
    assert_eq!(found, Err(DecodeError { offset: bytes.len() - 5, wrong: Wrong::Truncated }));
    // Values within values, without end.
    let deep = [&[0x93, 0x01, 0x91, 0x92, 0xa1, b'x'][..], &[0x91; 100_000]].concat();
    assert!(matches!(decode_batch(&deep, &Limits::default()).unwrap_err().wrong, Wrong::TooMany { .. }));
}

#[test]
fn other_shapes_are_refused_where_they_are() {
    let wrong = |value: Value| decode(&value).map_err(|error| (error.offset, error.wrong)).unwrap_err();
    let missing = |field| Wrong::Missing { field };
    assert_eq!(wrong(Value::Array(vec![1.into()])), (0, missing("events")));
    assert_eq!(wrong(batch_of(Value::Array(Vec::new()))), (3, missing("type")));
    assert_eq!(wrong(batch_of(Value::Map(Vec::new()))), (3, missing("type")));
    let stored = Value::Array(vec!["BlockStored".into(), Value::Array(Vec::new())]);
    assert_eq!(wrong(batch_of(stored)), (3, missing("token_ids")));
    let short_hash =
        Value::Array(vec!["BlockRemoved".into(), Value::Array(vec![Value::from(&[1u8; 15][..])])]);
    assert_eq!(wrong(batch_of(short_hash)), (18, Wrong::HashLength { bytes: 15 }));
    let negative = Value::Array(vec!["BlockRemoved".into(), Value::Array(vec![Value::from(-1)])]);
    let expected = Wrong::Type { expected: "a block's hash", marker: 0xff };
    assert_eq!(wrong(batch_of(negative)), (18, expected));
    let mut bytes = unhex(ARRAYS);
    bytes.push(0);
    let surplus = DecodeError { offset: bytes.len() - 1, wrong: Wrong::Surplus { bytes: 1 } };
    assert_eq!(decode_batch(&bytes, &Limits::default()), Err(surplus));
}
