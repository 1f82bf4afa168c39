//! Hardware and libraries that this version does not use: RDMA, libfabric, GDRCopy.

use std::path::Path;

use crate::doctor::{files, finding::Finding};

const NOT_YET: &str = "kvlane does not use it yet";

/// A text for each that is there, else None.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// A text for each port.
    rdma: Vec<String>,
    libfabric: Option<String>,
    gdrcopy: bool,
}

impl Facts {
    pub(crate) fn read(root: &Path) -> Self {
        let devices = files::names(root, "sys/class/infiniband").into_iter();
        Self {
            rdma: devices.flat_map(|device| ports(root, &device)).collect(),
            libfabric: library(root, "libfabric.so.1"),
            gdrcopy: root.join("dev/gdrdrv").exists(),
        }
    }
}

fn ports(root: &Path, device: &str) -> Vec<String> {
    let folder = format!("sys/class/infiniband/{device}/ports");
    let describe = |port: String| {
        let file = |name: &str| files::text(root, &format!("{folder}/{port}/{name}"));
        let state = file("state").unwrap_or_default();
        // "4: ACTIVE"
        let state = state.split_once(": ").map_or(&*state, |(_, word)| word).to_owned();
        let facts: Vec<String> =
            [Some(state), file("rate"), file("link_layer")].into_iter().flatten().collect();
        format!("{device} port {port} {}", facts.join(", "))
    };
    files::names(root, &folder).into_iter().map(describe).collect()
}

/// Path of a library in the dynamic loader's cache. The library is not loaded.
fn library(root: &Path, name: &str) -> Option<String> {
    let cache = std::fs::read(root.join("etc/ld.so.cache")).ok()?;
    let ending = format!("/{name}");
    let paths = cache.split(|byte| *byte == 0).filter(|text| text.ends_with(ending.as_bytes()));
    paths.filter_map(|path| std::str::from_utf8(path).ok()).map(str::to_owned).next()
}

/// All findings are in order, because kvlane uses none of these.
pub(crate) fn judge(facts: &Facts) -> Vec<Finding> {
    let seen = |subject: &str, found: String| Finding::ok(subject, format!("{found}; {NOT_YET}"));
    let rdma = if facts.rdma.is_empty() { "no devices".into() } else { facts.rdma.join(" | ") };
    let libfabric = facts.libfabric.clone().unwrap_or_else(|| "not installed".into());
    let gdrcopy = if facts.gdrcopy { "/dev/gdrdrv is there" } else { "no /dev/gdrdrv" };
    vec![seen("rdma", rdma), seen("libfabric", libfabric), seen("gdrcopy", gdrcopy.into())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    #[test]
    fn all_of_it_there() {
        let root = tree(&[
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n"),
            ("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
            (
                "etc/ld.so.cache",
                "ld.so\0libfabric.so.1\0/opt/amazon/efa/lib/libfabric.so.1\0/lib/other.so.1\0",
            ),
            ("dev/gdrdrv", ""),
        ]);
        let found = judge(&Facts::read(root.path()));
        assert!(found.iter().all(|each| each.verdict == Verdict::Ok && each.found.ends_with(NOT_YET)));
        let said: Vec<&str> = found.iter().map(|each| each.found.split(';').next().unwrap()).collect();
        let rdma = "mlx5_0 port 1 ACTIVE, 400 Gb/sec (4X NDR), InfiniBand | mlx5_1 port 1 DOWN";
        let wanted = [rdma, "/opt/amazon/efa/lib/libfabric.so.1", "/dev/gdrdrv is there"];
        assert_eq!(said, wanted);
    }

    #[test]
    fn none_of_it_there() {
        let found = judge(&Facts::read(tree(&[]).path()));
        let said: Vec<&str> = found.iter().map(|each| each.found.split(';').next().unwrap()).collect();
        assert_eq!(said, ["no devices", "not installed", "no /dev/gdrdrv"]);
        assert!(found.iter().all(|each| each.verdict == Verdict::Ok));
    }
}
