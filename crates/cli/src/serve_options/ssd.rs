//! The flags of `kvlane serve` about SSDs.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use kvlane_server::SsdOptions;
use kvlane_ssd::DeviceOptions;

use crate::size::Size;

/// The tier on SSDs, if there is one.
pub(super) fn options(paths: &[String], write_rate: Option<Size>) -> Result<Option<SsdOptions>> {
    if paths.is_empty() {
        if write_rate.is_some() {
            bail!("--ssd-write-rate is of no use without --ssd");
        }
        return Ok(None);
    }
    if write_rate.is_some_and(|rate| rate.0 == 0) {
        bail!("--ssd-write-rate 0 would keep nothing: leave it out for no limit");
    }
    Ok(Some(SsdOptions {
        devices: paths.iter().map(|text| device(text)).collect::<Result<_>>()?,
        write_rate: write_rate.map(|rate| rate.0),
    }))
}

const EXAMPLE_SSD: &str = "/ssd/kvlane:200gb";

/// Parses PATH or PATH:CAPACITY. A text behind the last colon that begins with a digit is the capacity. Another text belongs to
/// the path if it has a slash or the whole is an existing path; otherwise it is a mistake.
fn device(text: &str) -> Result<DeviceOptions> {
    let (path, capacity) = match text.rsplit_once(':') {
        Some((path, size)) if size.starts_with(|first: char| first.is_ascii_digit()) => {
            let size: Size =
                size.parse().map_err(|why| anyhow!("--ssd '{text}': '{size}' is no size: {why}"))?;
            (path, Some(size.0))
        }
        // Otherwise a mistyped size would become a file of that name with most of the disk.
        Some((_, rest)) if !rest.contains('/') && !Path::new(text).exists() => {
            bail!(
                "--ssd '{text}': '{rest}' is no size; write PATH:CAPACITY such as {EXAMPLE_SSD}, or PATH alone"
            )
        }
        _ => (text, None),
    };
    if path.is_empty() {
        bail!("--ssd '{text}' names no path");
    }
    Ok(DeviceOptions { path: path.into(), capacity })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `--ssd /disk:abc` made a file of that name with most of the disk.
    #[test]
    fn a_mistyped_capacity_is_no_part_of_the_path() {
        for text in ["/disk:abc", "/disk:-1", "/disk:"] {
            let error = device(text).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("--ssd '{text}': ")) && error.contains("is no size"),
                "{error}"
            );
        }
        assert_eq!(device("/a:b/c").unwrap().path, Path::new("/a:b/c"));
        assert_eq!(device("/disk:1gb").unwrap().capacity, Some(1_000_000_000));
        let there = tempfile::Builder::new().prefix("with:colon").tempdir().unwrap();
        assert_eq!(device(there.path().to_str().unwrap()).unwrap().path, there.path());
    }
}
