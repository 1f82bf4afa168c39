//! The flags of `kvlane serve` about SSDs.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;
use kvlane_server::{SsdOptions, SsdPath};
use kvlane_ssd::DeviceOptions;
use serde::Deserialize;

use crate::size::Size;

const DEFAULT_STAGING: u64 = 64 << 20;
/// Staging below this holds too few transfers to keep a device busy.
const LEAST_STAGING: u64 = 4 << 20;

#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum SsdPathArg {
    Auto,
    Direct,
    Staged,
}

/// The flags beside --ssd, as the user gave them.
pub(super) struct SsdFlags {
    pub(super) write_rate: Option<Size>,
    pub(super) path: Option<SsdPathArg>,
    pub(super) staging: Option<Size>,
}

impl SsdFlags {
    /// The tier on these SSDs, if there is one.
    pub(super) fn resolve(self, paths: &[String]) -> Result<Option<SsdOptions>> {
        let SsdFlags { write_rate, path, staging } = self;
        if paths.is_empty() {
            let given = [
                ("--ssd-write-rate", write_rate.is_some()),
                ("--ssd-path", path.is_some()),
                ("--ssd-staging", staging.is_some()),
            ];
            if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
                bail!("{flag} is of no use without --ssd");
            }
            return Ok(None);
        }
        if write_rate.is_some_and(|rate| rate.0 == 0) {
            bail!("--ssd-write-rate 0 would keep nothing: leave it out for no limit");
        }
        let path = match path.unwrap_or(SsdPathArg::Auto) {
            SsdPathArg::Auto => SsdPath::Auto,
            SsdPathArg::Direct => SsdPath::Direct,
            SsdPathArg::Staged => SsdPath::Staged,
        };
        Ok(Some(SsdOptions {
            devices: paths.iter().map(|text| device(text)).collect::<Result<_>>()?,
            write_rate: write_rate.map(|rate| rate.0),
            path,
            staging_bytes: staging_bytes(staging, paths.len() as u64)?,
        }))
    }
}

/// Staging memory of each of so many SSDs. All of it has to fit into the memory that is available.
fn staging_bytes(given: Option<Size>, ssds: u64) -> Result<u64> {
    let Some(Size(bytes)) = given else { return Ok(DEFAULT_STAGING) };
    if bytes < LEAST_STAGING {
        bail!(
            "--ssd-staging {} is too small: write at least {}, or --ssd-path direct for none",
            Size(bytes),
            Size(LEAST_STAGING)
        );
    }
    if let Some(available) = kvlane_memory::available_memory()
        && bytes.saturating_mul(ssds) > available
    {
        bail!(
            "--ssd-staging {} for each of {ssds} SSDs is more than the {} of memory that are available: write a smaller size",
            Size(bytes),
            Size(available)
        );
    }
    Ok(bytes)
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

    #[test]
    fn staging_that_holds_nothing_or_more_than_memory_is_refused() {
        let refused =
            |size: &str, ssds| staging_bytes(Some(size.parse().unwrap()), ssds).unwrap_err().to_string();
        assert!(refused("0", 1).contains("--ssd-path direct"), "{}", refused("0", 1));
        assert!(refused("4000gb", 1).contains("write a smaller size"));
        assert!(refused("100gb", 1 << 40).contains("write a smaller size"));
        assert_eq!(staging_bytes(Some("8mib".parse().unwrap()), 2).unwrap(), 8 << 20);
        assert_eq!(staging_bytes(None, 1).unwrap(), DEFAULT_STAGING);
    }

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
