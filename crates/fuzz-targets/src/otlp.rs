//! A collector's answer to an export, and the header by which a request's caller traces it.

use kvlane_otlp::{SpanId, TraceContext, rejected};

/// An answer never rejects so much that a counter would go back.
pub(crate) fn answer(bytes: &[u8]) {
    assert!(rejected(bytes) <= i64::MAX as u64);
}

/// What is read is a valid position in a trace, and is written as it was read.
pub(crate) fn traceparent(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(context) = text.parse::<TraceContext>() else { return };
    assert!(context.trace != [0; 16] && context.parent != SpanId::NONE);
    let written = context.to_string();
    assert_eq!(written.len(), 55);
    assert_eq!(written.parse(), Ok(context));
    // The flags may have bits that only the caller knows.
    assert_eq!(written[2..53], text[2..53]);
}
