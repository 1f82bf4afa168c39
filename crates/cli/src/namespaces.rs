//! `kvlane drop`.

use anyhow::{Result, bail};
use clap::Args;

use crate::status::{DaemonArgs, hex};

#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The namespace, as `kvlane status` prints it; the first digits are enough where they name one only. All 32 digits also name one that only the SSD knows
    namespace: String,
}

/// Drops what one namespace holds.
pub(crate) fn run(args: &DropArgs) -> Result<()> {
    let mut tool = args.daemon.connect()?;
    let status = tool.status()?;
    let wanted = args.namespace.to_ascii_lowercase();
    let found: Vec<_> = status.namespaces.iter().filter(|n| hex(&n.namespace).starts_with(&wanted)).collect();
    let (name, held) = match (found.as_slice(), whole_name(&wanted)) {
        ([known], _) => {
            let mut name = [0; 16];
            name.copy_from_slice(&known.namespace);
            (name, format!("{} blocks of {} ({})", known.blocks, hex(&name), known.name))
        }
        // The pool knows nothing of it, but the SSD may: the daemon says if it can have none.
        ([], Some(name)) => (name, format!("what the SSD has of {}", hex(&name))),
        _ => bail!(
            "'{}' names {} of the {} namespaces: see `kvlane status`; one that only the SSD knows takes all 32 digits",
            args.namespace,
            found.len(),
            status.namespaces.len()
        ),
    };
    tool.drop_namespaces(&[name])?;
    println!("dropped {held}");
    Ok(())
}

/// A namespace from all its digits.
fn whole_name(digits: &str) -> Option<[u8; 16]> {
    let is_whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_whole.then(|| u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_digits_are_a_name() {
        assert_eq!(whole_name("000102030405060708090a0b0c0d0e0f"), Some(std::array::from_fn(|at| at as u8)));
        for other in ["", "00", "+00102030405060708090a0b0c0d0e0f", "000102030405060708090a0b0c0d0e0g"] {
            assert_eq!(whole_name(other), None, "{other}");
        }
    }
}
