//! A span that has ended, and its form on the wire.

use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, KeyValue, any_value},
    trace::v1::{Span, Status, span, status::StatusCode},
};

use crate::trace_context::{SpanId, TraceContext};

/// Longest text of an attribute. Clients choose models' names.
const TEXT_BYTES_MAX: usize = 256;
/// Flags of a span: the caller sampled it, and it is known whether its parent is of another process.
const FLAG_SAMPLED: u32 = 1;

/// Which side of a call a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Serves a request of another process.
    Server,
    /// Waits for another process.
    Client,
    /// Work within a process.
    Internal,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A text, cut after 256 bytes.
    Text(String),
    /// A count, or an amount of bytes.
    Number(u64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

/// A span that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSpan {
    /// Its trace and its parent.
    pub context: TraceContext,
    /// Identifies it within the trace.
    pub id: SpanId,
    /// Such as "kvlane.lookup".
    pub name: &'static str,
    /// Which side of a call it is.
    pub kind: Kind,
    /// Start of the work that it stands for.
    pub began: SystemTime,
    /// End of that work.
    pub ended: SystemTime,
    /// Names and values.
    pub attributes: Vec<(&'static str, Value)>,
    /// Why it failed, if it did.
    pub error: Option<&'static str>,
}

impl NewSpan {
    pub(crate) fn into_proto(self) -> Span {
        let kind = match self.kind {
            Kind::Server => span::SpanKind::Server,
            Kind::Client => span::SpanKind::Client,
            Kind::Internal => span::SpanKind::Internal,
        };
        let status = self.error.map(|why| Status { message: why.to_owned(), code: StatusCode::Error.into() });
        Span {
            trace_id: self.context.trace.to_vec(),
            span_id: self.id.0.to_vec(),
            parent_span_id: match self.context.parent {
                SpanId::NONE => Vec::new(),
                SpanId(parent) => parent.to_vec(),
            },
            flags: FLAG_SAMPLED,
            name: self.name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: nanos(self.began),
            end_time_unix_nano: nanos(self.ended).max(nanos(self.began)),
            attributes: self.attributes.into_iter().map(|(name, value)| attribute(name, value)).collect(),
            status,
            ..Default::default()
        }
    }
}

pub(crate) fn nanos(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn attribute(name: &str, value: Value) -> KeyValue {
    let value = match value {
        Value::Text(mut text) => {
            let end = (0..=TEXT_BYTES_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            if text.len() > TEXT_BYTES_MAX {
                text.truncate(end);
            }
            any_value::Value::StringValue(text)
        }
        Value::Number(number) => any_value::Value::IntValue(i64::try_from(number).unwrap_or(i64::MAX)),
    };
    KeyValue { key: name.to_owned(), value: Some(AnyValue { value: Some(value) }), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = format!("{}é", "x".repeat(TEXT_BYTES_MAX - 1));
        let cut = attribute("model", Value::Text(text));
        let Some(any_value::Value::StringValue(cut)) = cut.value.and_then(|value| value.value) else {
            panic!("a text");
        };
        assert_eq!(cut.len(), TEXT_BYTES_MAX - 1);
    }
}
