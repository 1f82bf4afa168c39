//! Bytes that are contiguous on two sides, and the one rule by which neighbours become one.

/// Where a byte is: an address, an offset, or a region with an offset in it.
pub trait Position: Copy + Eq {
    /// The position so many bytes further on; None where there is none.
    fn after(self, bytes: u64) -> Option<Self>;
}

impl Position for u64 {
    fn after(self, bytes: u64) -> Option<u64> {
        self.checked_add(bytes)
    }
}

/// Bytes that are contiguous on two sides, such as in an engine and in the pool. Each user has a type with names for the
/// sides that say what they are there.
pub trait Contiguous: Copy {
    /// How one side names a byte.
    type One: Position;
    /// How the other side does.
    type Other: Position;

    /// Where the bytes begin on either side.
    fn begin(&self) -> (Self::One, Self::Other);

    /// How many bytes these are.
    fn bytes(&self) -> u64;

    /// As many bytes from the same beginning.
    fn with_bytes(self, bytes: u64) -> Self;

    /// Whether both sides go on with `next` where these bytes end, and the lengths of both together are a length.
    fn is_continued_by(&self, next: &Self) -> bool {
        let (one, other) = self.begin();
        let (next_one, next_other) = next.begin();
        one.after(self.bytes()) == Some(next_one)
            && other.after(self.bytes()) == Some(next_other)
            && self.bytes().checked_add(next.bytes()).is_some()
    }
}

/// Appends a run; it becomes one with the last where it continues that on both sides. Empty ones are left out.
pub fn push_run<R: Contiguous>(runs: &mut Vec<R>, next: R) {
    if next.bytes() == 0 {
        return;
    }
    match runs.last_mut() {
        Some(last) if last.is_continued_by(&next) => *last = last.with_bytes(last.bytes() + next.bytes()),
        _ => runs.push(next),
    }
}

/// The same bytes in the same order, where neighbours that continue each other on both sides are one.
pub fn merge<R: Contiguous>(runs: impl IntoIterator<Item = R>) -> Vec<R> {
    let runs = runs.into_iter();
    let mut merged = Vec::with_capacity(runs.size_hint().0);
    runs.for_each(|run| push_run(&mut merged, run));
    merged
}
