//! NUMA nodes, and the one that each GPU is near.

use std::path::Path;

use crate::doctor::{files, finding::Finding};

/// The kernel's facts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Nodes that have memory, as the kernel writes them: "0-1".
    nodes: Option<String>,
    /// Each GPU's number and node; None if the kernel does not know the node.
    gpus: Vec<(u32, Option<u64>)>,
}

/// `gpus` are numbers with PCI ids.
pub(crate) fn read<'a>(root: &Path, gpus: impl Iterator<Item = (u32, &'a str)>) -> Facts {
    // The kernel writes -1 for an unknown node, which does not parse as a number here.
    let node = |id: &str| files::number(root, &format!("sys/bus/pci/devices/{id}/numa_node"));
    Facts {
        nodes: files::text(root, "sys/devices/system/node/has_memory").filter(|nodes| !nodes.is_empty()),
        gpus: gpus.map(|(ordinal, id)| (ordinal, node(id))).collect(),
    }
}

/// Always in order, because kvlane works with one node and with several.
pub(crate) fn judge(facts: &Facts) -> Finding {
    let Some(nodes) = &facts.nodes else {
        return Finding::ok("numa", "the kernel tells of no nodes");
    };
    let several = nodes.contains(['-', ',']);
    let mut found = vec![format!("memory on node{} {nodes}", if several { "s" } else { "" })];
    found.extend(facts.gpus.iter().filter_map(|(gpu, node)| Some(format!("gpu {gpu} on node {}", (*node)?))));
    let finding = Finding::ok("numa", found.join(", "));
    if several {
        finding.means(
            "`--numa auto` puts an equal part of the pool on each node; blocks are not placed near the GPU that they \
             are for",
        )
    } else {
        finding
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    #[test]
    fn nodes_and_the_gpus_on_them() {
        let root = tree(&[
            ("sys/devices/system/node/has_memory", "0-1\n"),
            ("sys/bus/pci/devices/0000:1b:00.0/numa_node", "0\n"),
            ("sys/bus/pci/devices/0000:9b:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:aa:00.0/numa_node", "-1\n"),
        ]);
        let gpus = [(0, "0000:1b:00.0"), (1, "0000:9b:00.0"), (2, "0000:aa:00.0"), (3, "0000:ff:00.0")];
        let found = judge(&read(root.path(), gpus.into_iter()));
        assert_eq!(found.found, "memory on nodes 0-1, gpu 0 on node 0, gpu 1 on node 1");
        assert!(found.means.contains("--numa auto"));
    }

    #[test]
    fn one_node_or_none() {
        let root = tree(&[("sys/devices/system/node/has_memory", "0\n")]);
        let found = judge(&read(root.path(), std::iter::empty()));
        assert_eq!((found.found.as_str(), found.means.as_str()), ("memory on node 0", ""));
        let found = judge(&read(tree(&[]).path(), std::iter::empty()));
        assert_eq!(found.verdict, Verdict::Ok);
    }
}
