//! Bodies of requests, of any bytes: refused, or walked over as JSON, and what the legs of a pair get of them is JSON too.
#![no_main]

use kvlane_router::{
    body::{edit, marks, scan},
    legs::{self, Api, Ask},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(found) = scan(bytes) else { return };
    assert_eq!(edit(&found, &[]), bytes);
    let all = marks(&found, 7);
    assert!(all.windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
    assert!(all.last().is_none_or(|last| last.bytes as usize <= bytes.len()));
    for api in [Api::Completions, Api::Chat, Api::Responses, Api::Messages] {
        let _ = legs::stays_at(api, &found);
        let body =
            |ask| legs::body(Some(api), &found, &ask, "id").expect("a leg of a pair has a body of its own");
        let prefill = body(Ask::prefill());
        let leg = scan(&prefill).expect("the prefill leg is JSON");
        let most = if api == Api::Responses { "max_output_tokens" } else { "max_tokens" };
        assert_eq!(leg.raw(most), Some(&b"1"[..]));
        assert!(leg.raw("stream").is_none());
        let transfer = legs::handed_over(&leg).expect("it asks for a transfer");
        let decode = body(Ask::GoOn(String::from_utf8(transfer.to_vec()).expect("it is text")));
        assert_eq!(scan(&decode).expect("the decode leg is JSON").raw(legs::TRANSFER), Some(transfer));
    }
});
