//! Reads a file of secrets (--api-key-file, --cluster-token-file), which only this process's user and root may read or change.

use std::{
    fs::{File, Metadata},
    io::Read,
    os::unix::fs::MetadataExt,
    path::Path,
};

use anyhow::{Context, Result, bail};
use rustix::process::{getegid, geteuid, getgroups};

/// The secrets of the file that `flag` names, one a line; at least one.
pub(crate) fn lines(flag: &str, file: &Path) -> Result<Vec<String>> {
    let text = read(file).with_context(|| format!("{flag} {}", file.display()))?;
    let lines: Vec<String> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if lines.is_empty() {
        bail!("{flag} {}: there is nothing in it; write one secret a line", file.display());
    }
    Ok(lines)
}

/// The text of the file.
fn read(file: &Path) -> Result<String> {
    let mut opened = File::open(file).context("cannot be read")?;
    // Checks the opened file, because another file may have taken its name since.
    let found = opened.metadata().context("cannot be read")?;
    let groups = getgroups().context("the kernel does not tell this process's groups")?;
    let is_own_group =
        |group: u32| getegid().as_raw() == group || groups.iter().any(|own| own.as_raw() == group);
    if let Some(why) = exposed(&found, geteuid().as_raw(), is_own_group) {
        bail!("{why}; secrets are for this process's user alone: chmod 600 {}", file.display());
    }
    let mut text = String::new();
    opened.read_to_string(&mut text).context("cannot be read")?;
    Ok(text)
}

/// Why other users may read or change a file with these metadata, as a sentence; None if they may not.
/// A file of root's may be readable by a group of this process, because Kubernetes mounts a secret so (0440) in a pod with an
/// `fsGroup`.
fn exposed(found: &Metadata, user: u32, is_own_group: impl Fn(u32) -> bool) -> Option<String> {
    let (mode, owner, group) = (found.mode() & 0o777, found.uid(), found.gid());
    let is_mount = owner == 0 && is_own_group(group);
    let allowed = if is_mount { 0o740 } else { 0o700 };
    if owner != 0 && owner != user {
        Some(format!("it belongs to the user {owner}, and this process runs as {user}"))
    } else if mode & !allowed != 0 {
        Some(format!("its mode is {mode:04o}, so other users may read or change it"))
    } else {
        None
    }
}
