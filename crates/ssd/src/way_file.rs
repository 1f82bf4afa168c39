//! [`RatesFile`]: the rates of both ways, remembered beside the tier's file, so that a restart need not measure again.
//!
//! They count for 30 days, as long as kernel, device, the device's queue limits and the size of the staging memory are the same:
//!
//! ```text
//!  {"version":1,"kernel":"6.18.1","device":"254:0","queue":{"max_segments":"254",..},
//!   "staging":67108864,"direct":1190000000,"staged":3930000000}
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};

use crate::way::PathRates;

const VERSION: u32 = 1;
/// A cloud volume keeps its name when its throughput is changed, so rates do not count for ever.
const AGE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// A file of ours has less than 1 kB.
const BYTES_MAX: u64 = 16 << 10;
/// Limits from which the kernel decides how it cuts requests.
const LIMITS: [&str; 5] =
    ["max_segments", "max_segment_size", "max_sectors_kb", "logical_block_size", "nr_requests"];

/// Where the rates of a tier's file are remembered, and what they depend on.
#[derive(Debug)]
pub(crate) struct RatesFile {
    path: PathBuf,
    facts: Facts,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    kernel: String,
    /// Major and minor number.
    device: String,
    /// Empty if the file system has no single block device.
    queue: BTreeMap<String, String>,
    /// Bytes of staging memory: with less of it fewer reads are in flight.
    staging: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Remembered {
    version: u32,
    kernel: String,
    device: String,
    queue: BTreeMap<String, String>,
    staging: u64,
    direct: u64,
    staged: u64,
}

impl RatesFile {
    /// The one beside this file of a tier.
    pub(crate) fn beside(path: &Path, file: &File, staging_bytes: u64) -> RatesFile {
        let number = file.metadata().map(|found| found.dev()).unwrap_or_default();
        let device = format!("{}:{}", major(number), minor(number));
        let facts = Facts {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            queue: queue_limits(&device),
            device,
            staging: staging_bytes,
        };
        RatesFile { path: rates_path(path), facts }
    }

    /// The remembered rates. None if there are none, if they are old, or of another kernel, device or size of staging memory.
    pub(crate) fn read(&self) -> Option<PathRates> {
        match self.parse() {
            Ok(found) => {
                let Remembered { kernel, device, queue, staging, .. } = found;
                let facts = Facts { kernel, device, queue, staging };
                let counts = found.version == VERSION && facts == self.facts;
                counts.then_some(PathRates { direct: found.direct, staged: found.staged })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                // Log: the rates of an earlier start cannot be read; the daemon measures again. Do: nothing, or
                // remove the file if the line comes again.
                tracing::warn!(path = %self.path.display(), %error, "remembered SSD rates unreadable; measuring again");
                None
            }
        }
    }

    fn parse(&self) -> io::Result<Remembered> {
        let mut text = String::new();
        // Without waiting: a stranger may have put a pipe there.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&self.path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
        }
        let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
        if age > AGE_MAX {
            return Err(io::ErrorKind::NotFound.into());
        }
        file.take(BYTES_MAX).read_to_string(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Remembers rates, for later starts. Without the file they measure again, so a failure is only logged.
    pub(crate) fn write(&self, rates: PathRates) {
        if let Err(error) = self.try_write(rates) {
            tracing::debug!(path = %self.path.display(), %error, "SSD rates not remembered");
        }
    }

    fn try_write(&self, rates: PathRates) -> io::Result<()> {
        let Facts { kernel, device, queue, staging } = self.facts.clone();
        let remembered = Remembered {
            version: VERSION,
            kernel,
            device,
            queue,
            staging,
            direct: rates.direct,
            staged: rates.staged,
        };
        let mut unfinished = self.path.clone().into_os_string();
        unfinished.push(".new");
        let _ = fs::remove_file(&unfinished);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        file.write_all(serde_json::to_string(&remembered)?.as_bytes())?;
        fs::rename(&unfinished, &self.path)
    }
}

/// The file beside a tier's file.
pub(crate) fn rates_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".rates.json");
    name.into()
}

/// The limits of a block device's queue, by name. A partition has those of its disk.
fn queue_limits(device: &str) -> BTreeMap<String, String> {
    let folder = Path::new("/sys/dev/block").join(device);
    let read = |name: &str| {
        let own = fs::read_to_string(folder.join("queue").join(name));
        let text = own.or_else(|_| fs::read_to_string(folder.join("../queue").join(name))).ok()?;
        Some((name.to_owned(), text.trim().to_owned()))
    };
    LIMITS.iter().filter_map(|name| read(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates_file() -> (tempfile::TempDir, RatesFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks");
        let file = File::create(&path).unwrap();
        (folder, RatesFile::beside(&path, &file, 64))
    }

    #[test]
    fn rates_are_read_as_they_were_written() {
        let (_folder, file) = rates_file();
        assert_eq!(file.read(), None);
        let rates = PathRates { direct: 5, staged: u64::MAX };
        file.write(PathRates { direct: 1, staged: 2 });
        file.write(rates);
        assert_eq!(file.read(), Some(rates));
    }

    #[test]
    fn rates_of_another_kernel_device_or_version_do_not_count() {
        let (_folder, file) = rates_file();
        file.write(PathRates { direct: 1, staged: 2 });
        let text = fs::read_to_string(&file.path).unwrap();
        for (ours, other) in [
            (format!("\"kernel\":\"{}", file.facts.kernel), "\"kernel\":\"1.2".to_owned()),
            (format!("\"device\":\"{}", file.facts.device), "\"device\":\"999:1".to_owned()),
            ("\"version\":1".to_owned(), "\"version\":2".to_owned()),
            ("\"staging\":64".to_owned(), "\"staging\":32".to_owned()),
            ("\"queue\":{".to_owned(), "\"queue\":{\"more\":\"1\",".to_owned()),
        ] {
            let changed = text.replace(&ours, &other).replace(",}", "}");
            assert_ne!(changed, text);
            fs::write(&file.path, changed).unwrap();
            assert_eq!(file.read(), None, "{other}");
        }
    }

    #[test]
    fn rates_of_a_month_ago_do_not_count() {
        let (_folder, file) = rates_file();
        let rates = PathRates { direct: 1, staged: 2 };
        file.write(rates);
        for (days, counts) in [(29, true), (31, false)] {
            let then = std::time::SystemTime::now() - Duration::from_secs(days * 24 * 60 * 60);
            File::options().write(true).open(&file.path).unwrap().set_modified(then).unwrap();
            assert_eq!(file.read(), counts.then_some(rates), "{days} days");
        }
    }

    #[test]
    fn what_is_no_rates_file_is_passed_over_and_replaced() {
        let (_folder, file) = rates_file();
        for garbage in ["", "{", "[1]", "{\"version\":1}", &"x".repeat(1 << 20)] {
            fs::write(&file.path, garbage).unwrap();
            assert_eq!(file.read(), None);
        }
        fs::write(&file.path, [0xff, 0xfe]).unwrap();
        assert_eq!(file.read(), None);
        let rates = PathRates { direct: 3, staged: 4 };
        file.write(rates);
        assert_eq!(file.read(), Some(rates));
    }
}
