//! Ranges of this process's memory: the host's ([`Piece`]), or the host's or a GPU's ([`Spot`]).

/// Bytes of the host's memory, which a socket or a system call reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Piece {
    pub(crate) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    pub(crate) fn overlaps(self, other: Piece) -> bool {
        self.address < other.address + other.len && other.address < self.address + self.len
    }

    /// The bytes after the first `by`.
    pub(crate) fn after(self, by: usize) -> Piece {
        debug_assert!(by <= self.len);
        Piece { address: self.address + by, len: self.len - by }
    }
}

/// Bytes of the host's memory or of a GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) piece: Piece,
    /// The number of the GPU. None: the host.
    pub(crate) gpu: Option<u16>,
}

impl Spot {
    pub(crate) fn overlaps(&self, other: Spot) -> bool {
        self.gpu == other.gpu && self.piece.overlaps(other.piece)
    }

    fn begin(&self) -> (Option<u16>, usize) {
        (self.gpu, self.piece.address)
    }

    fn end(&self) -> (Option<u16>, usize) {
        (self.gpu, self.piece.address + self.piece.len)
    }
}

/// Several ranges of memory, sorted and without overlaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spots<'a>(&'a [Spot]);

impl<'a> Spots<'a> {
    /// One range, by itself sorted and without overlaps.
    pub(crate) fn one(spot: &'a Spot) -> Spots<'a> {
        Spots(std::slice::from_ref(spot))
    }

    /// Ranges that [`disjoint`] has sorted and joined.
    pub(crate) fn of(disjoint: &'a [Spot]) -> Spots<'a> {
        debug_assert!(disjoint.is_sorted_by(|one, next| one.end() <= next.begin()));
        Spots(disjoint)
    }

    /// Whether they share a byte with this range.
    pub(crate) fn overlap(self, spot: Spot) -> bool {
        let first = self.0.partition_point(|known| known.end() <= spot.begin());
        self.0.get(first).is_some_and(|known| known.overlaps(spot))
    }

    pub(crate) fn to_vec(self) -> Vec<Spot> {
        self.0.to_vec()
    }

    /// Whether they share a byte with this range of the host's memory.
    pub(crate) fn overlap_host(self, piece: Piece) -> bool {
        self.overlap(Spot { piece, gpu: None })
    }
}

/// Sorts ranges, and joins those that overlap or touch.
pub(crate) fn disjoint(mut spots: Vec<Spot>) -> Vec<Spot> {
    spots.sort_unstable_by_key(|spot| spot.begin());
    let mut joined: Vec<Spot> = Vec::with_capacity(spots.len());
    for spot in spots {
        match joined.last_mut() {
            Some(last) if last.gpu == spot.gpu && spot.begin() <= last.end() => {
                let end = last.end().1.max(spot.end().1);
                last.piece.len = end - last.piece.address;
            }
            _ => joined.push(spot),
        }
    }
    joined
}

/// The sum of their lengths.
pub(crate) fn bytes_of<'a>(spots: impl IntoIterator<Item = &'a Spot>) -> u64 {
    spots.into_iter().map(|spot| spot.piece.len as u64).sum()
}

/// Takes the first `bytes` bytes out of the ranges. None: they have fewer, and stay as they are.
pub(crate) fn take_bytes(spots: &mut Vec<Spot>, bytes: u64) -> Option<Vec<Spot>> {
    let mut left = bytes;
    let mut taken = Vec::new();
    while left > 0 {
        let spot = spots.get(taken.len())?;
        let len = (spot.piece.len as u64).min(left) as usize;
        taken.push(Spot { piece: Piece { len, ..spot.piece }, ..*spot });
        left -= len as u64;
    }
    let whole = taken.last().zip(spots.get(taken.len().wrapping_sub(1)));
    let cut = whole.filter(|(last, spot)| last.piece.len < spot.piece.len).map(|(last, _)| last.piece.len);
    match cut {
        Some(by) => {
            spots.drain(..taken.len() - 1);
            spots[0].piece = spots[0].piece.after(by);
        }
        None => drop(spots.drain(..taken.len())),
    }
    Some(taken)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_taken_and_what_is_left_are_all_bytes_in_order(
            lens in vec(1..50usize, 0..12), share in 0..1100u64,
        ) {
            let spot = |(number, len): (usize, usize)| {
                Spot { piece: Piece { address: number * 100, len }, gpu: (number % 2 == 0).then_some(number as u16 % 3) }
            };
            let spots: Vec<Spot> = lens.into_iter().enumerate().map(spot).collect();
            let each_byte = |spots: &[Spot]| -> Vec<(usize, Option<u16>)> {
                let bytes = |spot: &Spot| {
                    let gpu = spot.gpu;
                    (spot.piece.address..spot.piece.address + spot.piece.len).map(move |byte| (byte, gpu))
                };
                spots.iter().flat_map(bytes).collect()
            };
            let (all, bytes) = (each_byte(&spots), bytes_of(&spots) * share / 1000);
            let mut left = spots.clone();
            match take_bytes(&mut left, bytes) {
                Some(taken) => {
                    prop_assert_eq!(bytes_of(&taken), bytes);
                    prop_assert!(taken.iter().chain(&left).all(|spot| spot.piece.len > 0));
                    prop_assert_eq!([each_byte(&taken), each_byte(&left)].concat(), all);
                }
                None => {
                    prop_assert!(bytes > bytes_of(&spots));
                    prop_assert_eq!(left, spots);
                }
            }
        }
    }
}
