//! What tier to open.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::io::WrapIo;

/// One file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// A file, which is made if it does not exist or is empty; or a directory, in which it is `kvlane-ssd.data`.
    pub path: PathBuf,
    /// Bytes of the file. None: those of the file that is there, or 80 % of what is free.
    pub capacity: Option<u64>,
}

/// What tier to open.
#[derive(Clone)]
pub struct Options {
    /// Files on as many devices; blocks are spread over them. At least one.
    pub devices: Vec<DeviceOptions>,
    /// Most bytes written a second, on each device.
    pub write_rate: Option<u64>,
    /// How often the tables of unfinished segments are written, so that a restart after a crash reads less.
    pub checkpoint_interval: Duration,
    /// Bytes of a segment in new files. None: a sixteenth of the capacity as a power of two, 1 MiB to 64 MiB. A block
    /// must fit into a segment.
    pub segment_bytes: Option<u64>,
    /// Bytes of blocks, for each device, that were accepted and are not written yet.
    pub backlog_bytes: u64,
    /// Use threads where io_uring would be possible.
    pub threads: bool,
    /// Go through the page cache where direct I/O would be possible.
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
            threads: false,
            buffered: false,
            wrap_io: None,
        }
    }
}
