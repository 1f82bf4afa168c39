//! Windows: lets one peer read ranges of registered memory until the owner closes the window.
//!
//! ```text
//!  the owner                                                    the peer
//!   open_window(peer, ranges) --> number, generation, ranges -->  reads name number and generation,
//!                                                                 and an offset that counts through the ranges in order
//!   close_window: refuses requests from now on, waits until
//!   nothing is read for the peer any more, and returns:
//!   the memory may be reused
//! ```
//! Windows and regions share one space of numbers and generations. A carrier reaches the bytes of a window by the keys of the
//! regions that its ranges lie in.

use std::sync::Arc;

use thiserror::Error;

use crate::descriptor::{MemoryKind, REGIONS_MAX};

/// Most ranges of one window.
pub const WINDOW_RANGES_MAX: usize = 1 << 16;
/// Most ranges of all windows that one process opens for one peer. The peer keeps 24 bytes for each.
pub(crate) const PEER_RANGES_MAX: usize = 1 << 20;
/// Bytes of a [`WindowDescriptor`] on the wire.
pub const WINDOW_DESCRIPTOR_BYTES: usize = 24;
const MAGIC: [u8; 4] = *b"KVFW";
const VERSION: u8 = 1;

/// Bytes of a registered region that a window shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowRange {
    /// The region, by its number at its owner.
    pub region: u32,
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Never 0 in an open window.
    pub len: u64,
}

/// Names a window to the peer that may read through it. The caller transports it. It holds no address.
///
/// ```text
///  0      4      5      6        8          12          16           24
///  +------+------+------+--------+----------+-----------+------------+
///  | KVFW | ver  | kind | 0      | number   | generation| len        |
///  +------+------+------+--------+----------+-----------+------------+
///  kind: 0 the host's memory, 1 a CUDA GPU's
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowDescriptor {
    /// A transfer names it in place of a region's number.
    pub number: u32,
    /// How often the number was used before.
    pub generation: u32,
    /// Bytes of all ranges together.
    pub len: u64,
    /// The kind of memory that all ranges lie in.
    pub kind: MemoryKind,
}

/// Why bytes are no window descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoWindow {
    /// The length, the magic, the kind or the number is none of a window descriptor.
    #[error("not a window's descriptor of kvlane")]
    Malformed,
    /// Another version of kvlane made it.
    #[error(
        "a window's descriptor of version {0}, this is version {VERSION}: use the same version of kvlane on both sides"
    )]
    Version(u8),
}

impl WindowDescriptor {
    /// Encodes it, as drawn above.
    pub fn to_bytes(&self) -> [u8; WINDOW_DESCRIPTOR_BYTES] {
        let mut bytes = [0; WINDOW_DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        (bytes[4], bytes[5]) = (VERSION, u8::from(self.kind == MemoryKind::Cuda));
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.generation.to_le_bytes());
        bytes[16..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Decodes bytes of any origin.
    pub fn from_bytes(bytes: &[u8]) -> Result<WindowDescriptor, NoWindow> {
        let bytes: &[u8; WINDOW_DESCRIPTOR_BYTES] = bytes.try_into().map_err(|_| NoWindow::Malformed)?;
        if bytes[..4] != MAGIC {
            return Err(NoWindow::Malformed);
        }
        if bytes[4] != VERSION {
            return Err(NoWindow::Version(bytes[4]));
        }
        let kind = match bytes[5] {
            0 => MemoryKind::Host,
            1 => MemoryKind::Cuda,
            _ => return Err(NoWindow::Malformed),
        };
        let short = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let len = u64::from(short(16)) | u64::from(short(20)) << 32;
        // The bound on numbers bounds what a sender of descriptors can make this side remember.
        match short(8) {
            number @ 0..REGIONS_MAX => Ok(WindowDescriptor { number, generation: short(12), len, kind }),
            _ => Err(NoWindow::Malformed),
        }
    }
}

/// The ranges of a window. An offset in the window counts through them in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranges {
    all: Arc<[WindowRange]>,
    /// By range: the offset in the window at which it ends.
    ends: Arc<[u64]>,
}

impl Ranges {
    /// None: there are no ranges or more than [`WINDOW_RANGES_MAX`], one is empty, or their bytes overflow a u64.
    pub(crate) fn new(ranges: Vec<WindowRange>) -> Option<Ranges> {
        let mut end = 0u64;
        let ends: Option<Arc<[u64]>> = ranges
            .iter()
            .map(|range| {
                end = end.checked_add(range.len).filter(|_| range.len > 0)?;
                Some(end)
            })
            .collect();
        let ends = ends.filter(|ends| (1..=WINDOW_RANGES_MAX).contains(&ends.len()))?;
        Some(Ranges { all: ranges.into(), ends })
    }

    pub(crate) fn all(&self) -> &[WindowRange] {
        &self.all
    }

    /// Bytes of all ranges together.
    pub(crate) fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// `len` bytes of the window from `offset` on, as parts of its ranges. None: the window ends before.
    pub(crate) fn cut(&self, offset: u64, len: u64) -> Option<impl Iterator<Item = WindowRange> + '_> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len())?;
        let first = self.ends.partition_point(|end| *end <= offset);
        let parts = self.all[first..].iter().zip(&self.ends[first..]);
        Some(parts.map_while(move |(range, range_end)| {
            let begin = range_end - range.len;
            let from = begin.max(offset);
            let until = (*range_end).min(end);
            (from < until).then(|| WindowRange {
                region: range.region,
                offset: range.offset + (from - begin),
                len: until - from,
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<WindowRange>> {
        let range = (0..3u32, 0..1000u64, 1..50u64);
        vec(range.prop_map(|(region, offset, len)| WindowRange { region, offset, len }), 1..20)
    }

    proptest! {
        /// Byte for byte as if each were looked up alone.
        #[test]
        fn a_part_of_a_window_is_those_bytes_of_its_ranges(all in ranges(), from in 0..1000u64, len in 0..400u64) {
            let bytes = |range: &WindowRange| {
                let range = *range;
                (range.offset..range.offset + range.len).map(move |at| (range.region, at))
            };
            let every: Vec<(u32, u64)> = all.iter().flat_map(bytes).collect();
            let ranges = Ranges::new(all).unwrap();
            prop_assert_eq!(ranges.len(), every.len() as u64);
            let cut: Option<Vec<WindowRange>> = ranges.cut(from, len).map(Iterator::collect);
            let wanted = every.get(from as usize..(from + len) as usize);
            prop_assert_eq!(cut.as_ref().map(|cut| cut.iter().flat_map(bytes).collect()), wanted.map(<[_]>::to_vec));
            prop_assert!(cut.unwrap_or_default().iter().all(|part| part.len > 0));
        }

        #[test]
        fn any_bytes_describe_a_window_or_none(bytes in vec(any::<u8>(), 0..30), at in any::<[u32; 4]>()) {
            let _ = WindowDescriptor::from_bytes(&bytes);
            let [number, generation, len, kind] = at;
            let number = number % REGIONS_MAX;
            let kind = if kind % 2 == 0 { MemoryKind::Host } else { MemoryKind::Cuda };
            let window = WindowDescriptor { number, generation, len: u64::from(len) << 9, kind };
            prop_assert_eq!(WindowDescriptor::from_bytes(&window.to_bytes()), Ok(window));
        }
    }

    #[test]
    fn ranges_that_make_no_sense_make_no_window() {
        let range = |len| WindowRange { region: 0, offset: 0, len };
        assert_eq!(Ranges::new(Vec::new()), None);
        assert_eq!(Ranges::new(vec![range(0)]), None);
        assert_eq!(Ranges::new(vec![range(u64::MAX), range(1)]), None);
        assert_eq!(Ranges::new(vec![range(1); WINDOW_RANGES_MAX + 1]), None);
        assert!(Ranges::new(vec![range(u64::MAX)]).unwrap().cut(u64::MAX, 1).is_none());
        let other = WindowDescriptor { number: 0, generation: 0, len: 1, kind: MemoryKind::Host };
        let mut bytes = other.to_bytes();
        bytes[4] = 9;
        assert_eq!(WindowDescriptor::from_bytes(&bytes), Err(NoWindow::Version(9)));
        // Each number is something that its reader remembers.
        let last = WindowDescriptor { number: REGIONS_MAX - 1, ..other };
        assert_eq!(WindowDescriptor::from_bytes(&last.to_bytes()), Ok(last));
        let beyond = WindowDescriptor { number: REGIONS_MAX, ..other };
        assert_eq!(WindowDescriptor::from_bytes(&beyond.to_bytes()), Err(NoWindow::Malformed));
    }
}
