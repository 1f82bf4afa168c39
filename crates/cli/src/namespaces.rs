//! `kvlane drop`.

use anyhow::{Result, bail};
use clap::Args;

use crate::status::{DaemonArgs, hex};

#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The namespace, as `kvlane status` prints it; the first digits are enough where they name one only
    namespace: String,
}

/// Drops what one namespace holds.
pub(crate) fn run(args: &DropArgs) -> Result<()> {
    let mut tool = args.daemon.connect()?;
    let status = tool.status()?;
    let wanted = args.namespace.to_ascii_lowercase();
    let found: Vec<_> = status.namespaces.iter().filter(|n| hex(&n.namespace).starts_with(&wanted)).collect();
    let [namespace] = found.as_slice() else {
        bail!(
            "'{}' names {} of the {} namespaces: see `kvlane status`",
            args.namespace,
            found.len(),
            status.namespaces.len()
        );
    };
    let mut name = [0; 16];
    name.copy_from_slice(&namespace.namespace);
    tool.drop_namespaces(&[name])?;
    println!("dropped {} blocks of {} ({})", namespace.blocks, hex(&name), namespace.name);
    Ok(())
}
