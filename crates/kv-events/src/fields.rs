//! The fields of an event, whether it is written as an array or as a map.

use crate::event::{BlockRemoved, BlockStored, Event, ExternalHash, ExtraKey};
use crate::reader::Reader;
use crate::{DecodeError, Limits, Wrong};

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";

/// The order of an array's fields, after the class's name. Newer fields follow them, and are skipped.
const STORED_ORDER: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED_ORDER: &[&str] = &["block_hashes", "medium", "group_idx"];

/// The order of a known event's fields in an array.
pub(crate) fn order(class: &str) -> Option<&'static [&'static str]> {
    match class {
        STORED => Some(STORED_ORDER),
        REMOVED => Some(REMOVED_ORDER),
        CLEARED => Some(&[]),
        _ => None,
    }
}

/// The fields of an event that have been read so far.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    hashes: Option<Vec<ExternalHash>>,
    parent: Option<ExternalHash>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    lora_id: Option<i64>,
    medium: Option<String>,
    lora_name: Option<String>,
    extra_keys: Vec<Vec<ExtraKey>>,
    group: Option<u32>,
    kind: Option<String>,
    window: Option<u32>,
}

impl Fields {
    /// Reads the value of one field, or skips it if the field is not kept.
    pub(crate) fn read(
        &mut self,
        name: &str,
        reader: &mut Reader<'_>,
        limits: &Limits,
    ) -> Result<(), DecodeError> {
        match name {
            "block_hashes" => self.hashes = Some(hashes(reader, limits)?),
            "token_ids" => self.tokens = Some(tokens(reader, limits)?),
            "block_size" => self.block_size = Some(reader.unsigned_32("block_size")?),
            "parent_block_hash" => self.parent = optional(reader, hash)?,
            "lora_id" => self.lora_id = optional(reader, |reader| reader.integer("lora_id"))?,
            "medium" => self.medium = optional(reader, |reader| Ok(reader.text("medium")?.to_owned()))?,
            "lora_name" => {
                self.lora_name = optional(reader, |reader| Ok(reader.text("lora_name")?.to_owned()))?;
            }
            "group_idx" => self.group = optional(reader, |reader| reader.unsigned_32("group_idx"))?,
            "kv_cache_spec_kind" => {
                self.kind = optional(reader, |reader| Ok(reader.text("kv_cache_spec_kind")?.to_owned()))?;
            }
            "kv_cache_spec_sliding_window" => {
                self.window = optional(reader, |reader| reader.unsigned_32("kv_cache_spec_sliding_window"))?;
            }
            "extra_keys" => self.extra_keys = extra_keys(reader, limits)?,
            _ => reader.skip(limits.depth)?,
        }
        Ok(())
    }

    /// Makes the event, of a known class, from its fields. It began at `offset`.
    pub(crate) fn event(self, class: &str, offset: usize) -> Result<Event, DecodeError> {
        let missing = |field| DecodeError { offset, wrong: Wrong::Missing { field } };
        if class == CLEARED {
            return Ok(Event::Cleared);
        }
        let hashes = self.hashes.ok_or_else(|| missing("block_hashes"))?;
        if class == REMOVED {
            return Ok(Event::Removed(BlockRemoved { hashes, medium: self.medium, group: self.group }));
        }
        Ok(Event::Stored(BlockStored {
            hashes,
            parent: self.parent,
            tokens: self.tokens.ok_or_else(|| missing("token_ids"))?,
            block_size: self.block_size.ok_or_else(|| missing("block_size"))?,
            lora_id: self.lora_id,
            medium: self.medium,
            lora_name: self.lora_name,
            extra_keys: self.extra_keys,
            group: self.group,
            kind: self.kind,
            window: self.window,
        }))
    }
}

fn optional<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<Option<T>, DecodeError> {
    if reader.nil() { Ok(None) } else { read(reader).map(Some) }
}

fn hash(reader: &mut Reader<'_>) -> Result<ExternalHash, DecodeError> {
    let offset = reader.offset();
    let bytes = match reader.number_or_bytes("a block's hash")? {
        Ok(number) => return Ok(ExternalHash::Number(number)),
        Err(bytes) => bytes,
    };
    if let Ok(short) = bytes.try_into() {
        return Ok(ExternalHash::Short(short));
    }
    match bytes.try_into() {
        Ok(long) => Ok(ExternalHash::Long(long)),
        Err(_) => Err(DecodeError { offset, wrong: Wrong::HashLength { bytes: bytes.len() } }),
    }
}

/// The vector grows with the hashes that were read, and not at once: a hash takes 33 bytes here, and one on the wire may be a
/// single byte.
fn hashes(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<ExternalHash>, DecodeError> {
    let count = reader.array_of("hashes of blocks", limits.hashes)?;
    (0..count).map(|_| hash(reader)).collect()
}

fn tokens(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<u32>, DecodeError> {
    let count = reader.array_of("tokens", limits.tokens)?;
    (0..count).map(|_| reader.unsigned_32("a token")).collect()
}

/// The extra keys of each block. vLLM writes nil for a block that has none.
fn extra_keys(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<Vec<ExtraKey>>, DecodeError> {
    if reader.nil() {
        return Ok(Vec::new());
    }
    let count = reader.array_of("blocks with extra keys", limits.hashes)?;
    let blocks: Vec<_> = (0..count).map(|_| keys_of_a_block(reader, limits)).collect::<Result<_, _>>()?;
    Ok(if blocks.iter().all(Vec::is_empty) { Vec::new() } else { blocks })
}

fn keys_of_a_block(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<ExtraKey>, DecodeError> {
    if reader.nil() {
        return Ok(Vec::new());
    }
    if !reader.is_array() {
        return Ok(vec![extra_key(reader, limits)?]);
    }
    let count = reader.array_of("extra keys", limits.hashes)?;
    (0..count).map(|_| extra_key(reader, limits)).collect()
}

fn extra_key(reader: &mut Reader<'_>, limits: &Limits) -> Result<ExtraKey, DecodeError> {
    if reader.is_text() {
        return Ok(ExtraKey::Text(reader.text("an extra key")?.to_owned()));
    }
    reader.skip(limits.depth)?;
    Ok(ExtraKey::Other)
}
