//! Subcommands that are written in Python: they run in the interpreter beside this binary.

use std::{env, ffi::OsString, os::unix::process::CommandExt, path::PathBuf, process::Command};

use anyhow::{Result, anyhow};
use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct PythonArgs {
    /// Arguments for the Python module
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// The interpreter beside this binary, else `python3` on PATH.
pub(crate) fn interpreter() -> PathBuf {
    let beside = env::current_exe().ok().and_then(|exe| exe.parent().map(|folder| folder.join("python3")));
    beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("python3"))
}

/// Replaces this process by `python -m MODULE ARGS`. Returns only if that fails.
pub(crate) fn run(module: &str, args: &PythonArgs) -> Result<()> {
    let python = interpreter();
    let error = Command::new(&python).arg("-m").arg(module).args(&args.args).exec();
    Err(anyhow!(
        "cannot run {} -m {module} ({error}): install kvlane's wheel where Python 3.10 or newer is",
        python.display()
    ))
}
