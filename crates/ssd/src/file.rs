//! [`TierFile`]: makes or opens the file of one device, recognises its superblock, and locks it.
//!
//! A new file is made under another name, complete with its superblock, and then renamed. So under its own name it is
//! either complete or not there. The lock keeps a second daemon out.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use crate::error::OpenError;
use crate::layout::{FORMAT_VERSION, LayoutError, PAGE_BYTES, Superblock};
use crate::options::DeviceOptions;
use crate::pages::Pages;

/// Name of the file if the option names a directory.
const FILE_NAME: &str = "kvlane-ssd.data";
/// A killed daemon holds the lock until the kernel has ended its transfers, so wait this long for it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Segment sizes of new files in bytes. Between the two, a file has `SEGMENTS` to twice as many.
const LARGEST_SEGMENT: u64 = 64 << 20;
const SMALLEST_SEGMENT: u64 = 1 << 20;
const SEGMENTS: u64 = 16;
/// One is open, one is being emptied, one is free for the copies, and one holds records.
const LEAST_SEGMENTS: u64 = 4;

/// An open file of a tier. Its lock lasts until all clones of the descriptor are closed, the kernel's among them.
pub(crate) struct TierFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) superblock: Superblock,
    /// Whether the page cache is bypassed.
    pub(crate) direct: bool,
    /// Fallbacks and repairs, for the log and the status.
    pub(crate) notes: Vec<String>,
    /// The file existed before, so it may hold blocks.
    pub(crate) warm: bool,
}

impl TierFile {
    /// Opens the file, or makes it if it does not exist or is empty.
    pub(crate) fn open(
        device: &DeviceOptions,
        segment_bytes: Option<u64>,
        buffered: bool,
    ) -> Result<TierFile, OpenError> {
        let named = &device.path;
        // A trailing slash names a folder.
        if named.as_os_str().as_bytes().ends_with(b"/") && !named.exists() {
            return Err(OpenError::NoFolder { folder: named.clone() });
        }
        let path = if named.is_dir() { named.join(FILE_NAME) } else { named.clone() };
        // Follow links now, because a new file is renamed to this path and would replace a link.
        let path = path.canonicalize().unwrap_or(path);
        let caching = if buffered { Caching::PageCache } else { Caching::Direct };
        match path.metadata() {
            Ok(found) if !found.is_file() => Err(OpenError::NotAFile { path }),
            Ok(found) if found.len() > 0 => open(path, device.capacity, segment_bytes, caching),
            Ok(_) => make(path, device.capacity, segment_bytes, caching),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make(path, device.capacity, segment_bytes, caching)
            }
            Err(source) => Err(OpenError::of_system(path, "cannot look at it", source)),
        }
    }
}

/// Whether transfers should bypass the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caching {
    /// Direct I/O if the file system has it, or else the page cache.
    Direct,
    /// The page cache, as an option asks.
    PageCache,
}

/// Whether [`open_file`] makes a file that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Create,
    Fail,
}

/// The number of segments of a new file, and their size in bytes. `Err` holds the smallest possible capacity in bytes.
fn geometry(capacity: u64, segment_bytes: Option<u64>) -> Result<(u32, u64), u64> {
    let room = capacity.saturating_sub(Superblock::SEGMENTS_START);
    let fitting = (room / SEGMENTS + 1).next_power_of_two() / 2;
    let segment_bytes = segment_bytes.unwrap_or(fitting.clamp(SMALLEST_SEGMENT, LARGEST_SEGMENT));
    let segments = room / segment_bytes;
    if segments < LEAST_SEGMENTS {
        return Err(Superblock::SEGMENTS_START + LEAST_SEGMENTS * segment_bytes);
    }
    // No file system holds 2^31 segments of the smallest size.
    Ok((segments.min(i32::MAX as u64) as u32, segment_bytes))
}

/// Opens a file that exists and is not empty, if its superblock agrees with the options.
fn open(
    path: PathBuf,
    capacity: Option<u64>,
    segment_bytes: Option<u64>,
    caching: Caching,
) -> Result<TierFile, OpenError> {
    let (file, direct, mut notes) = open_file(&path, Missing::Fail, caching)
        .map_err(|source| OpenError::of_system(path.clone(), "cannot open it", source))?;
    lock(&file, &path)?;
    let fail = |what| {
        let path = path.clone();
        move |source| OpenError::of_system(path, what, source)
    };
    let mut start = Pages::new(2 * PAGE_BYTES as usize);
    let read = read_full(&file, start.bytes_mut(), 0).map_err(fail("cannot read it"))?;
    let superblock = match recognise(&start.bytes()[..read]) {
        Ok(superblock) => superblock,
        Err(LayoutError::OtherKind) => return Err(OpenError::NotOurs { path }),
        Err(_) => return Err(OpenError::Damaged { path }),
    };
    if superblock.version != FORMAT_VERSION {
        return Err(OpenError::OtherVersion { path, found: superblock.version, known: FORMAT_VERSION });
    }
    if let Some(asked) = segment_bytes.filter(|asked| *asked != superblock.segment_bytes) {
        let found = superblock.segment_bytes;
        return Err(OpenError::OtherGeometry { path, of: "a segment", found, asked });
    }
    // A file holds whole segments, so the requested capacity may exceed it by less than one segment.
    let found = superblock.file_bytes().unwrap_or_default();
    if let Some(asked) = capacity.filter(|asked| *asked < found || *asked - found >= superblock.segment_bytes)
    {
        return Err(OpenError::OtherGeometry { path, of: "of capacity", found, asked });
    }
    let length = file.metadata().map_err(fail("cannot look at it"))?.len();
    if length < found {
        let note = format!("the file was cut to {length} bytes and is made {found} bytes long again");
        // Log "the file was cut to <length> bytes and is made <found> bytes long again": blocks in the part that
        // was cut off are lost. Do: find out what cut the file.
        tracing::warn!(path = %path.display(), "{note}");
        notes.push(note);
        reserve(&file, &path, found, &mut notes)?;
    }
    Ok(TierFile { path, file, superblock, direct, notes, warm: true })
}

/// The superblock, from either of its copies in the first two pages.
fn recognise(start: &[u8]) -> Result<Superblock, LayoutError> {
    let mut copies = start.chunks(PAGE_BYTES as usize).map(Superblock::decode);
    let first = copies.next().unwrap_or(Err(LayoutError::OtherKind));
    let second = copies.next().unwrap_or(Err(LayoutError::OtherKind));
    match (first, second) {
        (Ok(superblock), _) | (_, Ok(superblock)) => Ok(superblock),
        // One copy of our kind is enough to say that the file is ours, though damaged.
        (Err(LayoutError::OtherKind), error) | (error, _) => error,
    }
}

/// Makes the file under another name, then renames it, so that under its own name it is complete or not there.
fn make(
    path: PathBuf,
    capacity: Option<u64>,
    segment_bytes: Option<u64>,
    caching: Caching,
) -> Result<TierFile, OpenError> {
    let fail = |what| {
        let path = path.clone();
        move |source| OpenError::of_system(path, what, source)
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("."), Path::to_path_buf);
    if let Some(bytes) = segment_bytes
        && !(bytes.is_multiple_of(PAGE_BYTES) && (4 * PAGE_BYTES..=1 << 30).contains(&bytes))
    {
        return Err(OpenError::SegmentBytes(bytes));
    }
    let free = free_bytes(&parent).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => OpenError::NoFolder { folder: parent.clone() },
        _ => fail("cannot look at its file system")(error),
    })?;
    let capacity = capacity.unwrap_or(free / 10 * 8);
    let (segments, segment_bytes) = geometry(capacity, segment_bytes)
        .map_err(|least| OpenError::TooSmall { path: path.clone(), capacity, least })?;
    let device_id = kvlane_memory::random().map_err(fail("cannot draw its identity"))?;
    let superblock = Superblock { version: FORMAT_VERSION, device_id, segment_bytes, segments };
    let bytes = superblock.file_bytes().unwrap_or(u64::MAX);

    let mut new_name = path.file_name().unwrap_or_default().to_os_string();
    new_name.push(".kvlane-new");
    let new_path = path.with_file_name(new_name);
    let (file, direct, mut notes) =
        open_file(&new_path, Missing::Create, caching).map_err(fail("cannot make it"))?;
    lock(&file, &path)?;
    if !is_named(&file, &new_path) {
        // Another process made and renamed it while this one waited for the lock.
        return Err(OpenError::InUse { path });
    }
    let made = (|| {
        // The previous holder of the lock may have made the file after this process looked for it.
        let exists = match path.metadata() {
            Ok(found) if found.len() > 0 => return Err(OpenError::InUse { path: path.clone() }),
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(fail("cannot look at it")(error)),
        };
        file.set_len(0).map_err(fail("cannot empty it"))?;
        reserve(&file, &path, bytes, &mut notes)?;
        let mut start = superblock.encode();
        start.extend_from_within(..);
        write_full(&file, Pages::with(&start).bytes(), 0).map_err(fail("cannot write its superblock"))?;
        file.sync_all().map_err(fail("cannot write its superblock"))?;
        give_name(&new_path, &path, exists).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => OpenError::InUse { path: path.clone() },
            _ => fail("cannot give it its name")(error),
        })
    })();
    if let Err(error) = made {
        // This process made it a moment ago, and it holds nothing.
        let _ = std::fs::remove_file(&new_path);
        return Err(error);
    }
    if let Ok(directory) = File::open(&parent) {
        // Sync the name. If that fails, a power failure loses the file, and the next start makes an empty tier.
        let _ = directory.sync_all();
    }
    Ok(TierFile { path, file, superblock, direct, notes, warm: false })
}

/// Renames the new file. Replaces a file at `path` only if `exists`, that is, if an empty one was found.
fn give_name(new_path: &Path, path: &Path, exists: bool) -> io::Result<()> {
    if exists {
        return std::fs::rename(new_path, path);
    }
    let here = rustix::fs::CWD;
    match rustix::fs::renameat_with(here, new_path, here, path, rustix::fs::RenameFlags::NOREPLACE) {
        // The file system does not know the flag. The lock, and the check of the name under it, stand in for it.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => std::fs::rename(new_path, path),
        renamed => Ok(renamed?),
    }
}

/// Opens a file. Returns it, whether it has direct I/O, and a note that says why not.
fn open_file(path: &Path, missing: Missing, caching: Caching) -> io::Result<(File, bool, Vec<String>)> {
    let options = |flags: i32| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(missing == Missing::Create).truncate(false).mode(0o600);
        options.custom_flags(libc::O_CLOEXEC | flags);
        options
    };
    let direct = match caching {
        Caching::PageCache => Err(io::Error::other("it is switched off")),
        Caching::Direct => options(libc::O_DIRECT).open(path).and_then(|file| {
            // Try a read, because some file systems accept the flag and refuse the transfers.
            match file.read_at(Pages::new(PAGE_BYTES as usize).bytes_mut(), 0) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(error),
                _ => Ok(file),
            }
        }),
    };
    match direct {
        Ok(file) => Ok((file, true, Vec::new())),
        Err(refused) => {
            let file = options(0).open(path)?;
            let note = format!("no direct I/O, transfers go through the page cache: {refused}");
            Ok((file, false, vec![note]))
        }
    }
}

fn lock(file: &File, path: &Path) -> Result<(), OpenError> {
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOCK_POLL_INTERVAL),
            Err(Errno::WOULDBLOCK) => return Err(OpenError::InUse { path: path.to_path_buf() }),
            Err(errno) => {
                return Err(OpenError::of_system(path.to_path_buf(), "cannot lock it", errno.into()));
            }
        }
    }
}

/// Whether `path` still names this open file.
fn is_named(file: &File, path: &Path) -> bool {
    let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
    let (here, there) = (file.metadata().map(identity), path.metadata().map(identity));
    matches!((here, there), (Ok(here), Ok(there)) if here == there)
}

/// Sets the file's length, and reserves its room if the file system can.
fn reserve(file: &File, path: &Path, bytes: u64, notes: &mut Vec<String>) -> Result<(), OpenError> {
    let io_error =
        |errno: Errno| OpenError::of_system(path.to_path_buf(), "cannot reserve its room", errno.into());
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let note = "the file system reserves no room, so writes may fail when it is full";
                notes.push(note.to_owned());
                return rustix::fs::ftruncate(file, bytes).map_err(io_error);
            }
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                let free = path.parent().and_then(|parent| free_bytes(parent).ok()).unwrap_or(0);
                return Err(OpenError::NoSpace { path: path.to_path_buf(), capacity: bytes, free });
            }
            Err(errno) => return Err(io_error(errno)),
        }
    }
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Reads until the buffer is full or the file ends. Returns the bytes read.
pub(crate) fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], offset + read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// Writes the whole buffer.
pub(crate) fn write_full(file: &File, buffer: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(buffer, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_shrink_with_the_capacity() {
        const MIB: u64 = 1 << 20;
        let start = Superblock::SEGMENTS_START;
        assert_eq!(geometry(start + 64 * 1024 * MIB, None), Ok((1024, 64 * MIB)));
        assert_eq!(geometry(start + 1024 * MIB, None), Ok((16, 64 * MIB)));
        assert_eq!(geometry(start + 1023 * MIB, None), Ok((31, 32 * MIB)));
        assert_eq!(geometry(start + 4 * MIB, None), Ok((4, MIB)));
        assert_eq!(geometry(start + 4 * MIB - 1, None), Err(start + 4 * MIB));
        assert_eq!(geometry(0, None), Err(start + 4 * MIB));
        assert_eq!(geometry(start + 4 * MIB, Some(64 << 10)), Ok((64, 64 << 10)));
        assert_eq!(geometry(start + 3 * MIB, Some(MIB)), Err(start + 4 * MIB));
    }

    #[test]
    fn a_file_that_somebody_made_meanwhile_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tier");
        let first = make(path.clone(), Some(5 << 20), None, Caching::PageCache).unwrap();
        // The second one saw no file before, either.
        let second = make(path.clone(), Some(5 << 20), None, Caching::PageCache);
        assert!(matches!(second, Err(OpenError::InUse { .. })));
        assert!(is_named(&first.file, &path));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left behind");
        let new_path = directory.path().join("tier.kvlane-new");
        std::fs::write(&new_path, "another").unwrap();
        let renamed = give_name(&new_path, &path, false);
        assert_eq!(renamed.map_err(|error| error.kind()), Err(io::ErrorKind::AlreadyExists));
        assert!(is_named(&first.file, &path));
    }
}
