//! Bodies of requests, of any bytes: refused, or scanned as JSON; then the bodies for the legs of a pair are JSON too.
use kvlane_router::{
    body::{Scan, edit, marks, scan},
    legs::{self, Api, LegRequest},
};

const APIS: [Api; 4] = [Api::Completions, Api::Chat, Api::Responses, Api::Messages];

fn leg_of(api: Api, found: &Scan<'_>, request: &LegRequest) -> Vec<u8> {
    legs::body(Some(api), found, request, "id").expect("this leg changes the body").to_vec()
}

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(found) = scan(bytes) else { return };
    assert_eq!(edit(&found, &[]).to_vec(), bytes);
    let all = marks(&found, 7);
    assert!(all.windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
    assert!(all.last().is_none_or(|last| last.bytes as usize <= bytes.len()));
    for api in APIS {
        let _ = legs::unsplittable_at(api, &found);
        let prefill = leg_of(api, &found, &LegRequest::prefill());
        let leg = scan(&prefill).expect("the prefill leg is JSON");
        let most = if api == Api::Responses { "max_output_tokens" } else { "max_tokens" };
        assert_eq!(leg.raw(most), Some(&b"1"[..]));
        assert!(leg.raw("stream").is_none());
        let transfer = legs::transfer_params(&leg).expect("it asks for a transfer");
        let text = std::str::from_utf8(transfer).expect("it is text");
        let decode = leg_of(api, &found, &LegRequest::WithTransfer(text.into()));
        assert_eq!(scan(&decode).expect("the decode leg is JSON").raw(legs::TRANSFER), Some(transfer));
    }
}
