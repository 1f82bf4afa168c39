//! A batch of events: `[time, [events], data-parallel rank]`.

use crate::event::Event;
use crate::fields::{Fields, order};
use crate::reader::Reader;
use crate::{DecodeError, Limits, Wrong};

/// The content of one message of an engine's publisher.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// When the engine made it, in seconds of Unix time, by the engine's clock. Not checked: may be any number, NaN too.
    pub time: f64,
    /// The events, in the order in which they happened.
    pub events: Vec<Event>,
    /// Number of events of unknown classes. They are not in `events`.
    pub unknown: usize,
    /// The engine's rank among data-parallel ones.
    pub data_parallel_rank: Option<u32>,
}

/// Decodes the payload of a message that vLLM's event publisher sent.
///
/// An event is an array with its class's name first, or, from vLLM 0.26 on, a map with its class's name under "type". A field
/// that is missing at an array's end or in a map has its default. Unknown fields are skipped.
///
/// # Errors
/// [`DecodeError`] if the payload has another shape, or exceeds `limits`.
pub fn decode_batch(payload: &[u8], limits: &Limits) -> Result<Batch, DecodeError> {
    let wrong = |wrong| Err(DecodeError { offset: 0, wrong });
    if payload.len() > limits.batch_bytes {
        return wrong(Wrong::TooMany { what: "bytes", count: payload.len(), most: limits.batch_bytes });
    }
    let mut reader = Reader::new(payload);
    let fields = reader.array("a batch")?;
    if fields < 2 {
        return wrong(Wrong::Missing { field: if fields == 0 { "ts" } else { "events" } });
    }
    let time = reader.float("ts")?;
    let count = reader.array_of("events", limits.events)?;
    let mut events = Vec::new();
    for _ in 0..count {
        events.extend(event(&mut reader, limits)?);
    }
    let ranked = fields > 2 && !reader.nil();
    let data_parallel_rank = if ranked { Some(reader.unsigned_32("data_parallel_rank")?) } else { None };
    reader.skip_all(fields.saturating_sub(3), limits.depth)?;
    reader.end()?;
    let unknown = count - events.len();
    Ok(Batch { time, events, unknown, data_parallel_rank })
}

/// Reads one event. `None` if its class is unknown.
fn event(reader: &mut Reader<'_>, limits: &Limits) -> Result<Option<Event>, DecodeError> {
    if reader.is_map() { from_map(reader, limits) } else { from_array(reader, limits) }
}

fn from_array(reader: &mut Reader<'_>, limits: &Limits) -> Result<Option<Event>, DecodeError> {
    let start = reader.offset();
    let length = reader.array("an event")?;
    let Some(values) = length.checked_sub(1) else {
        return Err(DecodeError { offset: start, wrong: Wrong::Missing { field: "type" } });
    };
    let class = reader.text("an event's class")?;
    let Some(order) = order(class) else {
        reader.skip_all(values, limits.depth)?;
        return Ok(None);
    };
    let mut fields = Fields::default();
    for name in order.iter().take(values) {
        fields.read(name, reader, limits)?;
    }
    reader.skip_all(values.saturating_sub(order.len()), limits.depth)?;
    fields.event(class, start).map(Some)
}

fn from_map(reader: &mut Reader<'_>, limits: &Limits) -> Result<Option<Event>, DecodeError> {
    let start = reader.offset();
    let pairs = reader.map("an event")?;
    // vLLM writes the class first, but others may not. So it is searched before any field is read.
    let class = class_of(reader.clone(), pairs, start, limits)?;
    let Some(order) = order(class) else {
        reader.skip_all(pairs.saturating_mul(2), limits.depth)?;
        return Ok(None);
    };
    let mut fields = Fields::default();
    for _ in 0..pairs {
        let name =
            if reader.is_text() { reader.text("a field's name")? } else { skipped_key(reader, limits)? };
        if order.contains(&name) {
            fields.read(name, reader, limits)?;
        } else {
            reader.skip(limits.depth)?;
        }
    }
    fields.event(class, start).map(Some)
}

fn class_of<'a>(
    mut reader: Reader<'a>,
    pairs: usize,
    start: usize,
    limits: &Limits,
) -> Result<&'a str, DecodeError> {
    for _ in 0..pairs {
        let name =
            if reader.is_text() { reader.text("a field's name")? } else { skipped_key(&mut reader, limits)? };
        if name == "type" {
            return reader.text("an event's class");
        }
        reader.skip(limits.depth)?;
    }
    Err(DecodeError { offset: start, wrong: Wrong::Missing { field: "type" } })
}

/// Skips a key that is no text, and returns a name that no field has.
fn skipped_key<'a>(reader: &mut Reader<'a>, limits: &Limits) -> Result<&'a str, DecodeError> {
    reader.skip(limits.depth)?;
    Ok("")
}
