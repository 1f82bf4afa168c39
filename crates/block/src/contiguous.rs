//! Runs of bytes that are contiguous on two sides, and the one rule by which neighbouring runs are merged.

/// The position of a byte on one side: an address, an offset, or a region with an offset in it.
pub trait Position: Copy + Eq {
    /// The position `bytes` further on; None if there is none.
    fn after(self, bytes: u64) -> Option<Self>;
}

impl Position for u64 {
    fn after(self, bytes: u64) -> Option<u64> {
        self.checked_add(bytes)
    }
}

/// A run of bytes that is contiguous on two sides, such as in an engine and in the pool. Each user has a type of its own,
/// whose fields name the two sides.
pub trait Contiguous: Copy {
    /// Position on one side.
    type One: Position;
    /// Position on the other side.
    type Other: Position;

    /// Start of the run on either side.
    fn begin(&self) -> (Self::One, Self::Other);

    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// A run of this length from the same start.
    fn with_bytes(self, bytes: u64) -> Self;

    /// Whether `next` starts where this run ends, on both sides, and the sum of both lengths fits.
    fn is_continued_by(&self, next: &Self) -> bool {
        let (one, other) = self.begin();
        let (next_one, next_other) = next.begin();
        one.after(self.bytes()) == Some(next_one)
            && other.after(self.bytes()) == Some(next_other)
            && self.bytes().checked_add(next.bytes()).is_some()
    }
}

/// Appends a run, or merges it into the last one if it continues that on both sides. Empty runs are left out.
pub fn push_run<R: Contiguous>(runs: &mut Vec<R>, next: R) {
    if next.bytes() == 0 {
        return;
    }
    match runs.last_mut() {
        Some(last) if last.is_continued_by(&next) => *last = last.with_bytes(last.bytes() + next.bytes()),
        _ => runs.push(next),
    }
}

/// Merges neighbours that continue each other on both sides. The bytes and their order stay the same.
pub fn merge<R: Contiguous>(runs: impl IntoIterator<Item = R>) -> Vec<R> {
    let runs = runs.into_iter();
    let mut merged = Vec::with_capacity(runs.size_hint().0);
    runs.for_each(|run| push_run(&mut merged, run));
    merged
}
