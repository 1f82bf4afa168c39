//! Bodies of requests, of any bytes: refused, or walked over as JSON, and what the legs of a pair get of them is JSON too.
#![no_main]

use kvlane_router::{
    body::{edit, marks, scan},
    legs,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(found) = scan(bytes) else { return };
    assert_eq!(edit(&found, &[]).to_vec(), bytes);
    let all = marks(&found, 7);
    assert!(all.windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
    assert!(all.last().is_none_or(|last| last.bytes as usize <= bytes.len()));
    let _ = legs::stays(&found);
    let prefill = legs::prefill(&found).to_vec();
    let leg = scan(&prefill).expect("the prefill leg is JSON");
    assert_eq!(leg.raw("max_tokens"), Some(&b"1"[..]));
    assert!(["stream", "stream_options", "min_tokens", "n"].iter().all(|name| leg.raw(name).is_none()));
    let transfer = legs::handed_over(&leg).expect("it asks for a transfer");
    let decode = legs::decode(&found, std::str::from_utf8(transfer).expect("it is text")).to_vec();
    assert_eq!(scan(&decode).expect("the decode leg is JSON").raw(legs::TRANSFER), Some(transfer));
});
