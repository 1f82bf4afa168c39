//! News of regions and windows as bytes: what a process tells each connected peer about its registered memory.
//!
//! ```text
//!  | number u32 | generation u32 | kind u8 | access u8 | memory u16 | keys u8 | 0 x 3 | len u64 | keys... |
//!  kind:      0 host memory, 1 a CUDA GPU's, 255 unregistered: nothing else counts then
//!  access:    0 read, 1 read and write, 2 read through windows only
//!  memory:    the NUMA node, or the owner's number of the GPU
//!  each key:  | carrier u8 | len u8 | bytes that only that carrier understands |
//!
//!  a window:  | number u32 | generation u32 | kind u8: 2 host memory, 3 a CUDA GPU's | more u8 | memory u16 | ranges u32 |
//!             | 0 u64 | ranges: each | region u32 | 0 u32 | offset u64 | len u64 |
//!  more:      1 more ranges of the same window follow at once, 0 these were the last
//! ```
//! All numbers are little-endian. Keys are sent only after the proof, and never stand in a descriptor.

use super::frame::WORDS_BYTES_MAX;
use crate::descriptor::{Access, MemoryKind, REGIONS_MAX, RegionDescriptor};
use crate::region_news::{Keys, RegionNews};
use crate::transfers::Memory;
use crate::window::WindowRange;
use crate::wire::{BadFrame, word};

const HEAD_BYTES: usize = 24;
const GONE: u8 = 255;
/// Added to the code of the memory's kind, for windows.
const WINDOW: u8 = 2;
const RANGE_BYTES: usize = 24;
/// Ranges in one piece of news, so that it fits a frame.
const RANGES_AT_ONCE: usize = (WORDS_BYTES_MAX - HEAD_BYTES) / RANGE_BYTES;
/// Most bytes of one key.
pub(crate) const KEY_BYTES_MAX: usize = 255;
/// Most keys of a region, at most one per carrier.
pub(crate) const KEYS_MAX: usize = 16;

/// A window as one or more pieces of news, as many as its ranges need.
pub(crate) fn window_news(
    number: u32,
    generation: u32,
    memory: Memory,
    ranges: &[WindowRange],
) -> Vec<RegionNews> {
    let parts = ranges.chunks(RANGES_AT_ONCE);
    let last = parts.len().saturating_sub(1);
    let one = |(index, part): (usize, &[WindowRange])| RegionNews::Window {
        number,
        generation,
        memory,
        ranges: part.to_vec(),
        has_more: index < last,
    };
    parts.enumerate().map(one).collect()
}

/// Packs news into the bodies of as few frames as possible.
pub(crate) fn encode_regions(news: &[RegionNews]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut frame = Vec::new();
    for news in news {
        let bytes = news.encode();
        if frame.len() + bytes.len() > WORDS_BYTES_MAX {
            frames.push(std::mem::take(&mut frame));
        }
        frame.extend(bytes);
    }
    if !frame.is_empty() {
        frames.push(frame);
    }
    frames
}

/// The sender has proved the secret, but may still send any bytes.
pub(crate) fn decode_regions(mut bytes: &[u8]) -> Result<Vec<RegionNews>, BadFrame> {
    let mut news = Vec::new();
    while !bytes.is_empty() {
        let (one, rest) = RegionNews::decode(bytes)?;
        news.push(one);
        bytes = rest;
    }
    Ok(news)
}

impl RegionNews {
    fn encode(&self) -> Vec<u8> {
        let (region, memory, keys) = match self {
            RegionNews::Here { region, memory, keys } => (*region, *memory, keys.as_slice()),
            RegionNews::Window { number, generation, memory, ranges, has_more } => {
                return encode_window(*number, *generation, *memory, ranges, *has_more);
            }
            RegionNews::Gone { number, generation } => {
                let mut bytes = number.to_le_bytes().to_vec();
                bytes.extend(generation.to_le_bytes());
                bytes.push(GONE);
                bytes.resize(HEAD_BYTES, 0);
                return bytes;
            }
        };
        debug_assert!(keys.len() <= KEYS_MAX && keys.iter().all(|(_, key)| key.len() <= KEY_BYTES_MAX));
        let mut bytes = region.number.to_le_bytes().to_vec();
        bytes.extend(region.generation.to_le_bytes());
        bytes.push(u8::from(region.kind == MemoryKind::Cuda));
        bytes.push(region.access.code());
        let (Memory::Host(memory) | Memory::Gpu(memory)) = memory;
        bytes.extend(memory.to_le_bytes());
        bytes.extend([keys.len() as u8, 0, 0, 0]);
        bytes.extend(region.len.to_le_bytes());
        for (code, key) in keys {
            bytes.extend([*code, key.len() as u8]);
            bytes.extend(key);
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<(RegionNews, &[u8]), BadFrame> {
        const CUT: BadFrame = BadFrame("a list of regions that is cut off");
        let (head, mut rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(CUT)?;
        let short = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (number, generation) = (short(0), short(4));
        // Bounds how much a peer can make this side remember.
        if number >= REGIONS_MAX {
            return Err(BadFrame("a region of too high a number"));
        }
        let node = u16::from_le_bytes([head[10], head[11]]);
        let (kind, memory) = match head[8] {
            0 => (MemoryKind::Host, Memory::Host(node)),
            1 => (MemoryKind::Cuda, Memory::Gpu(node)),
            WINDOW | 3 => return decode_window(head, rest),
            GONE => return Ok((RegionNews::Gone { number, generation }, rest)),
            _ => return Err(BadFrame("a region of no known kind")),
        };
        let access = Access::of_code(head[9]).ok_or(BadFrame("a region of no known access"))?;
        let count = usize::from(head[12]);
        if count > KEYS_MAX {
            return Err(BadFrame("a region with too many keys"));
        }
        let mut keys = Keys::with_capacity(count);
        for _ in 0..count {
            let ([code, len], behind) = rest.split_first_chunk::<2>().ok_or(CUT)?;
            let (key, behind) = behind.split_at_checked(usize::from(*len)).ok_or(CUT)?;
            keys.push((*code, key.into()));
            rest = behind;
        }
        let len = word(head, 16);
        let region = RegionDescriptor { number, generation, kind, access, len };
        Ok((RegionNews::Here { region, memory, keys }, rest))
    }
}

fn encode_window(
    number: u32,
    generation: u32,
    memory: Memory,
    ranges: &[WindowRange],
    has_more: bool,
) -> Vec<u8> {
    debug_assert!((1..=RANGES_AT_ONCE).contains(&ranges.len()));
    let (kind, memory) = match memory {
        Memory::Host(node) => (WINDOW, node),
        Memory::Gpu(gpu) => (WINDOW + 1, gpu),
    };
    let mut bytes = Vec::with_capacity(HEAD_BYTES + ranges.len() * RANGE_BYTES);
    bytes.extend(number.to_le_bytes());
    bytes.extend(generation.to_le_bytes());
    bytes.extend([kind, u8::from(has_more)]);
    bytes.extend(memory.to_le_bytes());
    bytes.extend((ranges.len() as u32).to_le_bytes());
    bytes.extend([0; 8]);
    for WindowRange { region, offset, len } in ranges {
        bytes.extend(region.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(offset.to_le_bytes());
        bytes.extend(len.to_le_bytes());
    }
    bytes
}

fn decode_window<'a>(head: &[u8; HEAD_BYTES], rest: &'a [u8]) -> Result<(RegionNews, &'a [u8]), BadFrame> {
    let short = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let node = u16::from_le_bytes([head[10], head[11]]);
    let memory = if head[8] == WINDOW { Memory::Host(node) } else { Memory::Gpu(node) };
    let has_more = match head[9] {
        0 => false,
        1 => true,
        _ => return Err(BadFrame("a window that neither ends nor goes on")),
    };
    let count = short(12) as usize;
    if !(1..=RANGES_AT_ONCE).contains(&count) {
        return Err(BadFrame("a window of no or too many ranges at once"));
    }
    let (ranges, rest) =
        rest.split_at_checked(count * RANGE_BYTES).ok_or(BadFrame("a list of regions that is cut off"))?;
    let range = |bytes: &[u8]| WindowRange {
        region: word(bytes, 0) as u32,
        offset: word(bytes, 8),
        len: word(bytes, 16),
    };
    let ranges = ranges.chunks_exact(RANGE_BYTES).map(range).collect();
    Ok((RegionNews::Window { number: short(0), generation: short(4), memory, ranges, has_more }, rest))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn news() -> impl Strategy<Value = RegionNews> {
        let key = (any::<u8>(), vec(any::<u8>(), 0..40).prop_map(Vec::into_boxed_slice));
        let number = || 0..REGIONS_MAX;
        let here =
            ((number(), any::<u32>(), any::<u64>()), any::<(bool, bool, u16)>(), vec(key, 0..=KEYS_MAX))
                .prop_map(|((number, generation, len), (is_gpu, may_write, memory), keys)| {
                    let kind = if is_gpu { MemoryKind::Cuda } else { MemoryKind::Host };
                    let access = if may_write { Access::ReadWrite } else { Access::Read };
                    let memory = if is_gpu { Memory::Gpu(memory) } else { Memory::Host(memory) };
                    let region = RegionDescriptor { number, generation, kind, access, len };
                    RegionNews::Here { region, memory, keys }
                });
        let gone =
            (number(), any::<u32>()).prop_map(|(number, generation)| RegionNews::Gone { number, generation });
        let range = (0..REGIONS_MAX, any::<u64>(), any::<u64>())
            .prop_map(|(region, offset, len)| WindowRange { region, offset, len });
        let window = ((number(), any::<u32>()), any::<(bool, bool, u16)>(), vec(range, 1..10)).prop_map(
            |((number, generation), (is_gpu, has_more, memory), ranges)| {
                let memory = if is_gpu { Memory::Gpu(memory) } else { Memory::Host(memory) };
                RegionNews::Window { number, generation, memory, ranges, has_more }
            },
        );
        prop_oneof![here, gone, window]
    }

    proptest! {
        #[test]
        fn news_of_regions_are_read_as_they_were_written(news in vec(news(), 0..400)) {
            let frames = encode_regions(&news);
            prop_assert!(frames.iter().all(|frame| (1..=WORDS_BYTES_MAX).contains(&frame.len())));
            let read: Vec<RegionNews> =
                frames.iter().flat_map(|frame| decode_regions(frame).unwrap_or_default()).collect();
            prop_assert_eq!(read, news);
        }

        #[test]
        fn a_window_of_many_ranges_is_told_in_parts_of_which_each_fits_a_frame(count in 1usize..9000) {
            let ranges: Vec<WindowRange> =
                (0..count as u64).map(|at| WindowRange { region: 3, offset: at, len: 1 }).collect();
            let news = window_news(7, 8, Memory::Host(1), &ranges);
            let read: Vec<RegionNews> =
                encode_regions(&news).iter().flat_map(|frame| decode_regions(frame).unwrap_or_default()).collect();
            prop_assert_eq!(&read, &news);
            let parts = read.iter().map(|news| match news {
                RegionNews::Window { ranges, has_more, .. } => (ranges.clone(), *has_more),
                _ => (Vec::new(), true),
            });
            let (read, more): (Vec<_>, Vec<bool>) = parts.unzip();
            prop_assert_eq!(read.concat(), ranges);
            prop_assert_eq!(more.iter().filter(|more| !**more).count(), 1);
            prop_assert_eq!(more.last(), Some(&false));
        }

        #[test]
        fn any_bytes_are_news_of_regions_or_none(bytes in vec(prop_oneof![0..2u8, any::<u8>()], 0..200)) {
            if let Ok(news) = decode_regions(&bytes) {
                let again = encode_regions(&news).concat();
                prop_assert_eq!(decode_regions(&again), Ok(news));
            }
        }
    }
}
