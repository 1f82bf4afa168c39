//! `kvlane drop`.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use clap::Args;
use kvlane_proto::v1::Status;

use crate::status::{DaemonArgs, ONLY_ON_THE_SSD, hex};

#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The namespace, as `kvlane status` prints it; the first digits are enough where they name one only
    namespace: String,
}

/// The daemon's blocks of a namespace, summed over its layouts.
#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    name: String,
    blocks: u64,
    ssd_blocks: u64,
}

/// Drops what one namespace holds.
pub(crate) fn run(args: &DropArgs) -> Result<()> {
    // Every name begins with the empty text. So an unset variable of a script would drop the only namespace.
    if args.namespace.is_empty() {
        bail!("'' names no namespace: see `kvlane status`");
    }
    let mut tool = args.daemon.connect()?;
    let status = tool.status()?;
    let wanted = args.namespace.to_ascii_lowercase();
    let all = by_namespace(&status);
    let found: Vec<_> = all.iter().filter(|(namespace, _)| hex(*namespace).starts_with(&wanted)).collect();
    let (namespace, held) = match (found.as_slice(), whole_name(&wanted)) {
        ([(namespace, held)], _) => (**namespace, held.describe(&hex(*namespace))),
        // The namespace may have no blocks, for example of an engine that has saved nothing. The daemon refuses unknown ones.
        ([], Some(namespace)) => (namespace, format!("namespace {}", hex(&namespace))),
        _ => bail!(
            "'{}' names {} of the {} namespaces: see `kvlane status`",
            args.namespace,
            found.len(),
            all.len()
        ),
    };
    tool.drop_namespaces(&[namespace])?;
    println!("dropped {held}");
    Ok(())
}

/// The namespaces of a status, each once.
fn by_namespace(status: &Status) -> BTreeMap<[u8; 16], Held> {
    let mut all: BTreeMap<[u8; 16], Held> = BTreeMap::new();
    for found in &status.namespaces {
        let Ok(namespace) = found.namespace.as_ref().try_into() else { continue };
        let held = all.entry(namespace).or_default();
        if held.name.is_empty() {
            held.name.clone_from(&found.name);
        }
        held.blocks += found.blocks;
        held.ssd_blocks += found.ssd_blocks;
    }
    all
}

impl Held {
    fn describe(&self, namespace: &str) -> String {
        let name = if self.name.is_empty() { ONLY_ON_THE_SSD } else { &self.name };
        format!("{} blocks in RAM and {} on the SSD of {namespace} {name}", self.blocks, self.ssd_blocks)
    }
}

/// A namespace from all its digits.
fn whole_name(digits: &str) -> Option<[u8; 16]> {
    let is_whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_whole.then(|| u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)).flatten()
}

#[cfg(test)]
mod tests {
    use kvlane_proto::v1::NamespaceStatus;

    use super::*;

    #[test]
    fn a_namespace_of_several_layouts_is_one() {
        let of = |byte: u8, name: &str, blocks, ssd_blocks| NamespaceStatus {
            namespace: vec![byte; 16].into(),
            name: name.into(),
            blocks,
            ssd_blocks,
            ..Default::default()
        };
        let status = Status {
            namespaces: vec![of(1, "m", 2, 1), of(1, "m", 3, 0), of(1, "", 0, 7), of(2, "", 0, 4)],
            ..Default::default()
        };
        let all = by_namespace(&status);
        assert_eq!(all.len(), 2);
        assert_eq!(all[&[1; 16]], Held { name: "m".into(), blocks: 5, ssd_blocks: 8 });
        assert!(all[&[2; 16]].describe("02").contains("4 on the SSD of 02 (only on the SSD)"));
    }

    #[test]
    fn only_all_digits_are_a_name() {
        assert_eq!(whole_name("000102030405060708090a0b0c0d0e0f"), Some(std::array::from_fn(|at| at as u8)));
        for other in ["", "00", "+00102030405060708090a0b0c0d0e0f", "000102030405060708090a0b0c0d0e0g"] {
            assert_eq!(whole_name(other), None, "{other}");
        }
    }
}
