//! The drop table's bytes: namespaces that were dropped, and up to which generation their records do not count.

use std::collections::BTreeMap;

use kvlane_block::Namespace;

use super::error::LayoutError;
use super::fields::{Reader, Writer};
use super::units::{DeviceId, GENERATIONS, PAGE_BYTES};

const KIND: &[u8; 8] = b"kvlnDROP";
/// Bytes of an entry: namespace (16), generation (8).
const ENTRY: usize = 24;

/// The drop table. Two copies of it stand between the superblock and the segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drops {
    /// The superblock's; a table of another file does not count.
    pub device_id: [u8; 16],
    /// Raised by each write; the copy with the higher number counts.
    pub sequence: u64,
    /// No record of a segment of this generation or a lower one counts, whatever its namespace.
    pub all_up_to: u64,
    /// Records of a namespace do not count up to its generation. [`Drops::OF_THIS_RUN`] stands for the highest
    /// generation that the next start finds.
    pub namespaces: BTreeMap<Namespace, u64>,
}

impl Drops {
    /// Generation of a drop whose end is not known yet: it covers every record that the next start finds.
    pub const OF_THIS_RUN: u64 = u64::MAX;
    /// Offset of each copy in the file.
    pub(crate) const COPIES: [u64; 2] = [2 * PAGE_BYTES, 9 * PAGE_BYTES];
    /// Room of one copy, in bytes.
    pub(crate) const COPY_BYTES: u64 = 7 * PAGE_BYTES;
    /// Limit of the namespaces in one copy.
    pub(crate) const NAMESPACES_MAX: usize = (Self::COPY_BYTES as usize - 16 - 16 - 8 - 8 - 4) / ENTRY;

    /// A table without drops.
    pub fn none(device_id: [u8; 16]) -> Drops {
        Drops { device_id, sequence: 0, all_up_to: 0, namespaces: BTreeMap::new() }
    }

    /// The table's bytes, without padding to whole pages.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(KIND);
        out.raw(&self.device_id).u64(self.sequence).u64(self.all_up_to);
        out.u32(self.namespaces.len() as u32);
        for (namespace, generation) in &self.namespaces {
            out.raw(&namespace.0).u64(*generation);
        }
        out.finish()
    }

    /// Decodes one copy. Whether it belongs to this file is for the caller to check.
    pub fn decode(bytes: &[u8]) -> Result<Drops, LayoutError> {
        let mut fields = Reader::new(KIND, bytes)?;
        let mut found = Drops::none(fields.array::<16>()?);
        (found.sequence, found.all_up_to) = (fields.u64()?, fields.u64()?);
        let count = fields.u32()?;
        for entry in fields.items::<ENTRY>(count)? {
            let (namespace, generation) = entry.split_at(16);
            let namespace = Namespace::from_bytes(namespace).map_err(|_| LayoutError::Fields)?;
            let generation = generation.first_chunk().ok_or(LayoutError::Fields)?;
            found.namespaces.insert(namespace, u64::from_le_bytes(*generation));
        }
        fields.end()?;
        let can_be = |generation: &u64| *generation < GENERATIONS || *generation == Self::OF_THIS_RUN;
        let sound = found.namespaces.len() == count as usize
            && found.sequence < GENERATIONS
            && found.namespaces.values().chain([&found.all_up_to]).all(can_be);
        if sound { Ok(found) } else { Err(LayoutError::Fields) }
    }

    /// Whether the namespace's records in a segment of this generation count.
    pub fn counts(&self, namespace: &Namespace, generation: u64) -> bool {
        let dropped = self.namespaces.get(namespace).copied().unwrap_or(0);
        generation > self.all_up_to.max(dropped)
    }

    pub(crate) fn is_of(&self, device_id: &DeviceId) -> bool {
        self.device_id == *device_id
    }
}
