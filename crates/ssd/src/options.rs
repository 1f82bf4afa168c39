//! Options of a tier: its files, limits and I/O interface.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::io::WrapIo;
use crate::way::SsdPath;

/// The file that stands for one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// A file, which is made if it does not exist or is empty; or a directory, for the file `kvlane-ssd.data` in it.
    pub path: PathBuf,
    /// Size of the file in bytes. None: the size of the existing file, or 80 % of the free space for a new one.
    pub capacity: Option<u64>,
}

/// Argument of [`SsdTier::open`](crate::SsdTier::open).
#[derive(Clone)]
pub struct Options {
    /// 1 to 255 files, each on a device of its own; blocks are spread over them.
    pub devices: Vec<DeviceOptions>,
    /// Write limit of each device, in bytes a second.
    pub write_rate: Option<u64>,
    /// How often the open segment's table is written, so that a restart after a crash scans less.
    pub checkpoint_interval: Duration,
    /// Segment size of new files in bytes. None: a sixteenth of the capacity as a power of two, 1 MiB to 64 MiB. A block
    /// must fit into a segment.
    pub segment_bytes: Option<u64>,
    /// Limit, for each device, of bytes that were accepted and are not written yet.
    pub backlog_bytes: u64,
    /// Whether transfers go straight to and from the pool, or through staging memory.
    pub path: SsdPath,
    /// Bytes of staging memory of each device, if it uses any.
    pub staging_bytes: u64,
    /// Use threads even if io_uring is available.
    pub threads: bool,
    /// Use the page cache even if direct I/O is available.
    pub buffered: bool,
    /// A layer between the tier and its devices, for tests.
    pub wrap_io: Option<Arc<dyn WrapIo>>,
}

impl Options {
    /// The defaults, with these devices.
    pub fn new(devices: Vec<DeviceOptions>) -> Options {
        Options {
            devices,
            write_rate: None,
            checkpoint_interval: Duration::from_secs(30),
            segment_bytes: None,
            backlog_bytes: 256 << 20,
            path: SsdPath::Auto,
            staging_bytes: 64 << 20,
            threads: false,
            buffered: false,
            wrap_io: None,
        }
    }
}
