//! Recovery: reads what a file holds when it is opened, and fills the index and the log with it.
//!
//! ```text
//!  each segment: head ---------> generation; without one: the foot's, if the first record has it; else free
//!                foot, table --> records up to the foot's `scan_from`
//!                scan ---------> records from there on, or from page 1 without a table, by their headers
//!  in the order of the generations: the block's latest record counts, unless the drop table says otherwise
//! ```
//!
//! - A segment whose generation cannot be read is left alone in this run. Its generation might be the next one that a
//!   new head would get, and drops of the previous run may reach up to it.
//! - A full segment without a complete table gets one written (`tail`).
//! - If the drop table is more than half full, segments without a record that counts are erased, so that it can shrink.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvlane_block::{BlockKey, Namespace};

use crate::drops::DropTable;
use crate::file::{TierFile, read_full, write_full};
use crate::holdings::Holdings;
use crate::index::{Index, Location};
use crate::layout::{
    Drops, PAGE_BYTES, RecordHeader, SegmentFoot, SegmentHead, SegmentNumber, Superblock, Table,
};
use crate::log::Log;
use crate::pages::Pages;

/// Segments that are read in parallel.
const THREADS: usize = 8;
/// Segments whose records are in memory at once.
const BATCH: usize = 64;
/// Pages that the scan reads at once after a page without a header, or among small records.
const WINDOW_PAGES: u32 = 256;
/// Records up to this many pages are small: to read them whole takes less time than a request for each header.
const SMALL_RECORD_PAGES: u32 = 16;

/// Outcome of the recovery of one file.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) from_tables: u64,
    pub(crate) by_scan: u64,
    /// Segments that could not be read; their blocks are misses.
    pub(crate) unreadable: u32,
    /// Those of them whose generation is unknown.
    pub(crate) unread: u32,
    /// Segments that may hold records, none of which counts.
    pub(crate) void: Vec<SegmentNumber>,
    /// Namespaces that each segment may hold, whether or not their records count.
    pub(crate) holdings: Holdings,
}

/// A record that a table or a header names.
#[derive(Debug, Clone, Copy)]
struct FoundRecord {
    key: BlockKey,
    /// First page of the record in its segment.
    page: u32,
    pages: u32,
}

/// The records of one segment.
#[derive(Debug, Default)]
struct Contents {
    from_table: usize,
    /// Those of the table, in the order of their pages, then those of the scan.
    records: Vec<FoundRecord>,
    /// Namespaces that have records in the segment, those without a record that counts included.
    namespaces: BTreeSet<Namespace>,
    /// Namespaces outside the list may have records too.
    is_partial: bool,
    /// End of the records and tables that were found, if the last table does not cover the whole segment.
    tail: Option<u32>,
}

/// Begins a run. Recovers `file`, erases void segments if the drop table is short of room, and limits the previous
/// run's drops to the generations before this run. `device` is the file's number in the index.
pub(crate) fn begin_run(
    file: &TierFile,
    device: u8,
    drops: &DropTable,
    index: &mut Index,
    log: &mut Log,
) -> io::Result<Found> {
    log.observe_generation(drops.highest());
    let mut found = recover(file, device, drops, index, log);
    if found.unread > file.superblock.segments / 2 {
        return Err(io::Error::other("most of it cannot be read: mend the device, or remove the file"));
    }
    let needed =
        drops.needed(log.last_generation(), |namespace, up_to| found.holdings.may_hold(namespace, up_to));
    if needed > Drops::NAMESPACES_MAX / 2 && found.unreadable == 0 {
        for segment in std::mem::take(&mut found.void) {
            let generation = log.take_generation();
            if let Err(error) = erase(file, segment, generation) {
                // Log: a part of the file that holds only dropped blocks could not be written; the daemon goes
                // on. Do: look at the disk's own health and at dmesg.
                tracing::warn!(path = %file.path.display(), segment = segment.0, %error, "erasing dropped blocks failed");
                break;
            }
            found.holdings.erased(segment, generation);
        }
    }
    let may_hold = |namespace: &Namespace, up_to| found.holdings.may_hold(namespace, up_to);
    if found.unread == 0 {
        drops.end_former_run(log.last_generation(), may_hold).map_err(|error| {
            let sentence = format!("cannot note which namespaces were dropped: {error}");
            io::Error::new(error.kind(), sentence)
        })?;
    } else {
        // The previous run's highest generation is unknown, so its drops stay unlimited. They also void what this run
        // writes of their namespaces: those blocks are cold once after the next start.
        // Log: a part of the file could not be read, so older drops cannot be closed; later blocks of those
        // namespaces do not survive a restart. Do: look at the disk.
        tracing::warn!(
            path = %file.path.display(), unread_segments = found.unread,
            "drops of the previous run stay open; blocks of dropped namespaces will be cold after the next restart"
        );
    }
    Ok(found)
}

/// Reads all segments of `file`, and fills the index and the log with the records that count.
pub(crate) fn recover(
    file: &TierFile,
    device: u8,
    drops: &DropTable,
    index: &mut Index,
    log: &mut Log,
) -> Found {
    let superblock = &file.superblock;
    let holdings = Holdings::new(superblock.segments);
    let mut found =
        Found { from_tables: 0, by_scan: 0, unreadable: 0, unread: 0, void: Vec::new(), holdings };
    let all: Vec<SegmentNumber> = (0..superblock.segments).map(SegmentNumber).collect();
    let mut generations: Vec<(u64, SegmentNumber)> = Vec::new();
    for (segment, generation) in all.iter().zip(in_parallel(&all, |segment| generation(file, *segment))) {
        match generation {
            Ok(Some(generation)) => generations.push((generation, *segment)),
            Ok(None) => {}
            Err(error) => {
                // Log: the head of a part of the file cannot be read; its blocks are misses, and the part is not
                // written. Do: look at the disk's own health.
                tracing::warn!(
                    path = %file.path.display(), segment = segment.0, %error,
                    "SSD segment unreadable; leaving it unused until a start of the daemon can read it; if none can, \
                     mend the device, or remove the file to use all of it again"
                );
                (found.unreadable, found.unread) = (found.unreadable + 1, found.unread + 1);
                found.holdings.unreadable();
                log.exclude(*segment);
            }
        }
    }
    // Go in the order of the generations, so that the latest record of a block replaces earlier ones in the index.
    generations.sort_unstable();
    for batch in generations.chunks(BATCH) {
        let contents = in_parallel(batch, |&(generation, segment)| contents(file, segment, generation));
        for (&(generation, segment), contents) in batch.iter().zip(contents) {
            let mut contents = contents.unwrap_or_else(|error| {
                // Log: a part of the file cannot be read; its blocks are misses and are computed again. Do: look
                // at the disk's own health.
                tracing::warn!(
                    path = %file.path.display(), segment = segment.0, %error,
                    "SSD segment unreadable; its blocks are misses"
                );
                found.unreadable += 1;
                Contents { is_partial: true, ..Contents::default() }
            });
            let namespaces = std::mem::take(&mut contents.namespaces);
            found.holdings.found(segment, generation, namespaces, contents.is_partial);
            let all = contents.records.len();
            contents.records.retain(|record| drops.counts(&record.key.space.namespace, generation));
            // Records of the table come first in the list, but only the count of each kind matters from here on.
            contents.from_table = contents.from_table.saturating_sub(all - contents.records.len());
            if contents.records.is_empty() {
                log.observe_generation(generation);
                found.void.push(segment);
                continue;
            }
            found.from_tables += contents.from_table as u64;
            found.by_scan += (contents.records.len() - contents.from_table) as u64;
            for &FoundRecord { key, page, pages } in &contents.records {
                index.insert(&key, Location { device, segment, page, pages });
            }
            log.add_recovered(segment, generation, contents.tail);
        }
    }
    found
}

fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return results };
            results.push((index, work(item)));
        }
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..THREADS.min(items.len()))
            .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, run).ok())
            .collect();
        let mut results = run();
        for helper in helpers {
            match helper.join() {
                Ok(more) => results.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The generation of a segment; None if it holds nothing that may count.
fn generation(file: &TierFile, segment: SegmentNumber) -> io::Result<Option<u64>> {
    let superblock = &file.superblock;
    let mut page = Pages::new(PAGE_BYTES as usize);
    read(file, &mut page, PAGE_BYTES as usize, superblock.offset(segment, 0))?;
    let head = SegmentHead::decode(page.bytes());
    if let Ok(head) = head
        && superblock.is_of(&head.device_id)
        && head.segment == segment
    {
        return Ok(Some(head.generation));
    }
    // The segment was never used, or its head is damaged. The foot may be of an earlier use of the segment. Then the
    // first record has another generation and nothing counts, because the drop table may have lost the drops of that
    // earlier use.
    let Some(foot) = foot(file, segment)? else { return Ok(None) };
    read(file, &mut page, PAGE_BYTES as usize, superblock.offset(segment, 1))?;
    let first = header(file, superblock, segment, 1, page.bytes())?;
    Ok(first.filter(|(header, _)| header.generation == foot.generation).map(|_| foot.generation))
}

/// Voids the records of a segment for good: writes a head with a new generation, and zeros over the foot.
fn erase(file: &TierFile, segment: SegmentNumber, generation: u64) -> io::Result<()> {
    let superblock = &file.superblock;
    let head = SegmentHead { device_id: superblock.device_id, segment, generation };
    let last_page = superblock.segment_pages() - 1;
    write_full(&file.file, Pages::with(&head.encode()).bytes(), superblock.offset(segment, 0))?;
    let nothing = Pages::new(PAGE_BYTES as usize);
    write_full(&file.file, nothing.bytes(), superblock.offset(segment, last_page))
}

/// The segment's foot, of any generation, if it is intact.
fn foot(file: &TierFile, segment: SegmentNumber) -> io::Result<Option<SegmentFoot>> {
    let superblock = &file.superblock;
    let mut page = Pages::new(PAGE_BYTES as usize);
    let last_page = superblock.segment_pages() - 1;
    read(file, &mut page, PAGE_BYTES as usize, superblock.offset(segment, last_page))?;
    let foot = SegmentFoot::decode(page.bytes()).ok();
    Ok(foot.filter(|foot| superblock.is_of(&foot.device_id) && foot.segment == segment))
}

/// The records of a segment: from its table, and by a scan of the pages that the table may not cover.
fn contents(file: &TierFile, segment: SegmentNumber, generation: u64) -> io::Result<Contents> {
    let superblock = &file.superblock;
    let last_page = superblock.segment_pages() - 1;
    let foot = foot(file, segment)?.filter(|foot| foot.generation == generation);
    let mut contents = Contents::default();
    let mut scan_from = 1;
    if let Some(foot) = foot
        && let Some(table) = table(file, segment, &foot)?
    {
        let inside = |page: u32, pages: u32| {
            page >= 1 && pages >= 2 && page.checked_add(pages).is_some_and(|end| end <= last_page)
        };
        contents.records = table
            .records
            .iter()
            .filter(|record| inside(record.page, record.pages))
            .map(|record| {
                let space = table.spaces[record.space as usize];
                let key = BlockKey { space, hash: record.hash };
                FoundRecord { key, page: record.page, pages: record.pages }
            })
            .collect();
        contents.from_table = contents.records.len();
        contents.is_partial = !table.spaces.contains(&Table::NAMES_ALL);
        let named = table.spaces.iter().filter(|space| **space != Table::NAMES_ALL);
        contents.namespaces = named.map(|space| space.namespace).collect();
        scan_from = foot.scan_from.max(1);
    }
    if scan_from < last_page {
        let table_end = foot
            .map_or(1, |foot| foot.table_page.saturating_add(foot.table_bytes.div_ceil(PAGE_BYTES as u32)));
        let mut scanned = scan(file, superblock, segment, generation, scan_from)?;
        scanned.retain(|found| contents.records.iter().all(|known| known.page != found.page));
        contents.namespaces.extend(scanned.iter().map(|record| record.key.space.namespace));
        contents.records.extend(scanned);
        let end = contents.records.iter().map(|record| record.page + record.pages).max().unwrap_or(1);
        contents.tail = Some(end.max(table_end.min(last_page)));
    }
    Ok(contents)
}

fn table(file: &TierFile, segment: SegmentNumber, foot: &SegmentFoot) -> io::Result<Option<Table>> {
    let superblock = &file.superblock;
    let pages = foot.table_bytes.div_ceil(PAGE_BYTES as u32);
    let end = foot.table_page.checked_add(pages);
    if foot.table_page == 0 || end.is_none_or(|end| end >= superblock.segment_pages()) {
        return Ok(None);
    }
    let bytes = pages as usize * PAGE_BYTES as usize;
    let mut buffer = Pages::new(bytes);
    read(file, &mut buffer, bytes, superblock.offset(segment, foot.table_page))?;
    let table = Table::decode(buffer.bytes()).ok();
    Ok(table.filter(|table| superblock.is_of(&table.device_id) && table.generation == foot.generation))
}

/// The records from page `from` on, by their headers. A complete record may follow one whose write was cut off, so
/// after a page without a header the scan tries every page.
fn scan(
    file: &TierFile,
    superblock: &Superblock,
    segment: SegmentNumber,
    generation: u64,
    from: u32,
) -> io::Result<Vec<FoundRecord>> {
    let last_page = superblock.segment_pages() - 1;
    let mut window = Pages::new((WINDOW_PAGES as u64 * PAGE_BYTES) as usize);
    let (mut start, mut end) = (0, 0);
    let mut page = from;
    let mut in_windows = false;
    let mut records = Vec::new();
    while page < last_page {
        if !(start..end).contains(&page) {
            // Read one page while headers lead from large record to large record, and else a window.
            let pages = if in_windows { WINDOW_PAGES } else { 1 }.min(last_page - page);
            read(file, &mut window, pages as usize * PAGE_BYTES as usize, superblock.offset(segment, page))?;
            (start, end) = (page, page + pages);
        }
        let at = (page - start) as usize * PAGE_BYTES as usize;
        let bytes = &window.bytes()[at..(end - start) as usize * PAGE_BYTES as usize];
        match header(file, superblock, segment, page, bytes)? {
            Some((header, pages)) if header.generation == generation => {
                records.push(FoundRecord { key: header.key, page, pages });
                page += pages;
                in_windows = pages <= SMALL_RECORD_PAGES;
            }
            _ => {
                page += 1;
                in_windows = true;
            }
        }
    }
    Ok(records)
}

/// The header at `page`, and the pages of its record. `bytes` are the page and what was read behind it; a longer header
/// is read from the file.
fn header(
    file: &TierFile,
    superblock: &Superblock,
    segment: SegmentNumber,
    page: u32,
    bytes: &[u8],
) -> io::Result<Option<(RecordHeader, u32)>> {
    let last_page = superblock.segment_pages() - 1;
    let Some(pages) = RecordHeader::claimed_pages(bytes) else { return Ok(None) };
    if pages > u64::from(last_page - page) {
        return Ok(None);
    }
    let length = (pages * PAGE_BYTES) as usize;
    let decoded = if length <= bytes.len() {
        RecordHeader::decode(&bytes[..length])
    } else {
        let mut buffer = Pages::new(length);
        read(file, &mut buffer, length, superblock.offset(segment, page))?;
        RecordHeader::decode(buffer.bytes())
    };
    let Ok(header) = decoded else { return Ok(None) };
    let ours = superblock.is_of(&header.device_id) && header.segment == segment && header.page == page;
    let pages = header.pages().filter(|pages| *pages <= last_page - page);
    Ok(pages.filter(|_| ours).map(|pages| (header, pages)))
}

fn read(file: &TierFile, pages: &mut Pages, bytes: usize, offset: u64) -> io::Result<()> {
    let read = read_full(&file.file, &mut pages.bytes_mut()[..bytes], offset)?;
    if read < bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use kvlane_block::{BlockHash, CutDigest, Space};

    use super::*;
    use crate::layout::{FORMAT_VERSION, ShardSum, TableRecord, table_bytes};

    /// The number of blocks that are found in a segment without a head. Its foot and table have generation 3, and its
    /// first record has generation `first`.
    fn found_by_foot(first: u64) -> usize {
        let (device_id, segment, segment_bytes) = ([7; 16], SegmentNumber(0), 8 * PAGE_BYTES);
        let superblock = Superblock { version: FORMAT_VERSION, device_id, segment_bytes, segments: 1 };
        let memory: File =
            rustix::fs::memfd_create("kvlane-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        memory.set_len(superblock.file_bytes().unwrap()).unwrap();
        let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([1; 16]) };
        let key = BlockKey { space, hash: BlockHash([2; 16]) };
        let record = TableRecord { hash: key.hash, space: 0, page: 1, pages: 2 };
        let table = Table { device_id, generation: 3, spaces: vec![space], records: vec![record] };
        let (table_page, table_bytes) = (4, table_bytes(1, 1) as u32);
        let foot = SegmentFoot { device_id, segment, generation: 3, table_page, table_bytes, scan_from: 7 };
        let (page, shards) = (1, vec![ShardSum { bytes: 100, crc: 0 }]);
        let header = RecordHeader { device_id, generation: first, segment, page, key, shards };
        for (page, bytes) in [(1, header.encode()), (4, table.encode()), (7, foot.encode())] {
            write_full(&memory, &bytes, superblock.offset(segment, page)).unwrap();
        }
        let path = PathBuf::from("a file in memory");
        let file = TierFile { path, file: memory, superblock, direct: false, notes: Vec::new(), warm: true };
        let (mut index, mut log) = (Index::new(), Log::new(1, 8));
        index.add_device(1);
        begin_run(&file, 0, &DropTable::read(&file).unwrap(), &mut index, &mut log).unwrap();
        index.blocks()
    }

    fn in_memory(superblock: Superblock, bytes: u64) -> TierFile {
        let file: File =
            rustix::fs::memfd_create("kvlane-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(bytes).unwrap();
        let path = PathBuf::from("a file in memory");
        TierFile { path, file, superblock, direct: false, notes: Vec::new(), warm: true }
    }

    /// Blocks that are found, and segments that are free, when a run begins with this file.
    fn found_in(file: &TierFile) -> (usize, u32) {
        let superblock = &file.superblock;
        let (mut index, mut log) = (Index::new(), Log::new(superblock.segments, superblock.segment_pages()));
        index.add_device(superblock.segments);
        begin_run(file, 0, &DropTable::read(file).unwrap(), &mut index, &mut log).unwrap();
        (index.blocks(), log.free_segments())
    }

    /// A device could not read the newest segment's head once. The previous run's drops were limited by the generations
    /// of the other segments, and the next start found dropped blocks again.
    #[test]
    fn what_was_dropped_stays_away_where_a_head_cannot_be_read_at_one_start() {
        let (device_id, segment_bytes, segments) = ([7; 16], 8 * PAGE_BYTES, 3);
        let superblock = Superblock { version: FORMAT_VERSION, device_id, segment_bytes, segments };
        let all = superblock.file_bytes().unwrap();
        let file = in_memory(superblock, all);
        let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([1; 16]) };
        for number in 0..segments {
            let (segment, generation, page) = (SegmentNumber(number), u64::from(number) + 1, 1);
            let key = BlockKey { space, hash: BlockHash([number as u8; 16]) };
            let shards = vec![ShardSum { bytes: 100, crc: 0 }];
            let header = RecordHeader { device_id, generation, segment, page, key, shards };
            let head = SegmentHead { device_id, segment, generation };
            write_full(&file.file, &head.encode(), superblock.offset(segment, 0)).unwrap();
            write_full(&file.file, &header.encode(), superblock.offset(segment, page)).unwrap();
        }
        DropTable::read(&file).unwrap().drop_namespace(space.namespace, |_, _| true).unwrap();
        // Behind its end nothing of a file can be read.
        let (mut bytes, end) = (vec![0; all as usize], superblock.offset(SegmentNumber(2), 0));
        read_full(&file.file, &mut bytes, 0).unwrap();
        file.file.set_len(end).unwrap();
        let (blocks, free) = found_in(&file);
        assert_eq!((blocks, free), (0, 2), "nobody writes to a segment whose generation is not known");
        write_full(&file.file, &bytes[end as usize..], end).unwrap();
        for _ in 0..2 {
            assert_eq!(found_in(&file), (0, 3));
        }
    }

    /// Tables of earlier builds named only namespaces with records that counted. So a drop's entry was removed because
    /// no table named it. Once a bit of that table flipped, the segment's headers brought the dropped blocks back.
    #[test]
    fn a_segment_may_hold_anything_unless_its_table_names_all_that_it_holds() {
        let (device_id, segment_bytes, segments) = ([7; 16], 8 * PAGE_BYTES, 1);
        let superblock = Superblock { version: FORMAT_VERSION, device_id, segment_bytes, segments };
        let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([1; 16]) };
        let record = TableRecord { hash: BlockHash([2; 16]), space: 0, page: 1, pages: 2 };
        for (spaces, may_hold) in [(vec![space], true), (vec![space, Table::NAMES_ALL], false)] {
            let file = in_memory(superblock, superblock.file_bytes().unwrap());
            let (table_page, table_bytes) = (4, table_bytes(1, spaces.len()) as u32);
            let foot = SegmentFoot {
                device_id,
                segment: SegmentNumber(0),
                generation: 1,
                table_page,
                table_bytes,
                scan_from: 7,
            };
            let table = Table { device_id, generation: 1, spaces, records: vec![record] };
            let head = SegmentHead { device_id, segment: SegmentNumber(0), generation: 1 };
            for (page, bytes) in [(0, head.encode()), (4, table.encode()), (7, foot.encode())] {
                write_full(&file.file, &bytes, superblock.offset(SegmentNumber(0), page)).unwrap();
            }
            let (mut index, mut log) = (Index::new(), Log::new(1, 8));
            index.add_device(1);
            let drops = DropTable::read(&file).unwrap();
            let found = recover(&file, 0, &drops, &mut index, &mut log);
            assert_eq!(index.blocks(), 1);
            assert!(found.holdings.may_hold(&space.namespace, 1));
            assert_eq!(found.holdings.may_hold(&Namespace([3; 16]), 1), may_hold);
        }
    }

    #[test]
    fn without_a_head_a_foot_counts_only_if_the_first_record_is_of_its_generation() {
        assert_eq!(found_by_foot(3), 1);
        // The segment was used again; what the foot names may have been dropped, and the file forgotten that.
        assert_eq!(found_by_foot(4), 0);
    }
}
