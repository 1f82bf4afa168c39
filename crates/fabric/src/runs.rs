//! Ranges that are contiguous on both sides.

/// A byte in registered memory: of which region, and how far from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The region, by its number at its owner.
    pub region: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// A range that is contiguous here and there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Where it begins here.
    pub local: Place,
    /// Where it begins at the peer.
    pub remote: Place,
    /// Bytes.
    pub len: u64,
}

impl Place {
    fn moved(self, by: u64) -> Place {
        Place { offset: self.offset + by, ..self }
    }

    fn continues(self, before: Place, len: u64) -> bool {
        self.region == before.region && Some(self.offset) == before.offset.checked_add(len)
    }
}

impl Run {
    /// The first `len` bytes, and the rest.
    ///
    /// # Panics
    /// If the run is shorter.
    pub fn split(self, len: u64) -> (Run, Run) {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        let rest = Run { local: self.local.moved(len), remote: self.remote.moved(len), len: self.len - len };
        (Run { len, ..self }, rest)
    }
}

/// Appends a run; it becomes one with the last where it continues that on both sides. Empty ones are left out.
pub(crate) fn append(runs: &mut Vec<Run>, run: Run) {
    if run.len == 0 {
        return;
    }
    match runs.last_mut() {
        Some(last)
            if run.local.continues(last.local, last.len)
                && run.remote.continues(last.remote, last.len)
                && last.len.checked_add(run.len).is_some() =>
        {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}
