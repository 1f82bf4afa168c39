//! The kernel's files under a root, which is `/` but in tests.

use std::{fs, path::Path};

/// A file's text without the white space around it; None if the file cannot be read.
pub(crate) fn text(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned())
}

/// A file that holds one number.
pub(crate) fn number(root: &Path, path: &str) -> Option<u64> {
    text(root, path)?.parse().ok()
}

/// The names in a folder, sorted; empty if there is no such folder.
pub(crate) fn names(root: &Path, path: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(root.join(path)) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Whether this process has a capability, by its number in linux/capability.h.
pub(crate) fn has_capability(root: &Path, number: u32) -> bool {
    let status = text(root, "proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.unwrap_or(0) >> number & 1 == 1
}

/// A made-up tree of files.
#[cfg(test)]
pub(crate) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}
