//! The picture, drawn by the Python package.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::python;

/// The trace's name as a PNG in the current folder.
pub(super) fn default_path(trace: &Path) -> PathBuf {
    PathBuf::from(trace.file_stem().unwrap_or(trace.as_os_str())).with_extension("png")
}

/// Draws the JSON of a report into a PNG, by this module of `kvlane.bench`.
pub(super) fn draw(path: &Path, report: &Value, module: &str) -> Result<()> {
    let interpreter = python::interpreter();
    let mut drawing = Command::new(&interpreter)
        .args(["-m", &format!("kvlane.bench.{module}")])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", interpreter.display()))?;
    if let Some(mut stdin) = drawing.stdin.take() {
        // If Python ends early, its stderr has the reason.
        let _ = write!(stdin, "{report}");
    }
    let output = drawing.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = stderr.trim().lines().next_back().unwrap_or("no reason given").to_owned();
    if reason.contains("No module named 'kvlane") {
        bail!(
            "{} has no package kvlane: put a Python that has it first on PATH, or install kvlane's wheel there",
            interpreter.display()
        );
    }
    bail!("{}: {reason}", path.display())
}
