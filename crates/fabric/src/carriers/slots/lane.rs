//! What passes through slots on one connection, in order.

use std::collections::VecDeque;

use super::slot::Slot;
use crate::identity::Identity;
use crate::ranges::{Piece, Spot, bytes_of};
use crate::transfers::Token;
use crate::wire::Fate;

/// Slots that one connection has at a time in each direction: bytes are copied to or from one while the socket has another,
/// and a peer that is slow has no more than these.
pub(super) const SLOTS_A_LINK: usize = 4;

/// A part of a frame's bytes, no more of which are on GPUs than a slot holds, and its slot.
#[derive(Debug)]
pub(crate) struct SlotPart {
    pub(crate) slot: Slot,
    pub(crate) spots: Vec<Spot>,
}

impl SlotPart {
    /// For the socket.
    pub(crate) fn host_pieces(&self) -> Vec<Piece> {
        self.slot.host_pieces(&self.spots)
    }

    pub(crate) fn bytes(&self) -> u64 {
        bytes_of(&self.spots)
    }
}

/// Bytes that leave a GPU's memory.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) what: Frame,
    /// Not copied yet.
    pub(crate) left: VecDeque<Spot>,
    /// Being copied into their slots, in the order in which they go out.
    pub(crate) copying: VecDeque<SlotPart>,
    /// The driver could not copy some; nothing more goes out.
    pub(crate) has_failed: bool,
}

/// What goes ahead of the bytes.
#[derive(Debug)]
pub(crate) enum Frame {
    /// A write of ours, with its runs as they go over the wire, and how many they are.
    Write { token: Token, entries: Vec<u8>, runs: usize },
    /// An answer to the peer's read of this token; a frame for each part.
    Data { token: u64 },
}

/// Bytes of one frame that go to a GPU's memory.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) token: u64,
    /// Still to come, beside those of the part that is filled.
    pub(crate) left: VecDeque<Spot>,
    /// Being copied out of their slots.
    pub(crate) copying: Vec<SlotPart>,
    pub(crate) has_failed: bool,
}

/// Of one connection. Bytes that come are those of the last frame in `incoming`.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// Slots whose bytes the socket has not taken, and what the link has written when it has.
    pub(crate) written: VecDeque<(u64, Slot)>,
    pub(crate) incoming: VecDeque<Incoming>,
    /// What the socket receives into.
    pub(crate) filling: Option<SlotPart>,
    /// Of a peer that is served: who, and which connection of its.
    pub(crate) of: Option<(Identity, u64)>,
}

impl Lane {
    pub(crate) fn is_empty(&self) -> bool {
        self.outgoing.is_empty() && self.written.is_empty() && self.incoming.is_empty()
    }

    /// Whether one more slot is for this connection.
    pub(super) fn may_send_more(&self) -> bool {
        let copying: usize = self.outgoing.iter().map(|outgoing| outgoing.copying.len()).sum();
        copying + self.written.len() < SLOTS_A_LINK
    }

    /// The same for what comes.
    pub(super) fn may_receive_more(&self) -> bool {
        let copying: usize = self.incoming.iter().map(|incoming| incoming.copying.len()).sum();
        copying + usize::from(self.filling.is_some()) < SLOTS_A_LINK
    }

    /// Whether bytes are to come next for which there is no slot yet.
    pub(crate) fn awaits_slot(&self) -> bool {
        self.filling.is_none() && self.incoming.back().is_some_and(|incoming| !incoming.left.is_empty())
    }

    /// Whether bytes are to be copied next for which there is no slot yet.
    pub(super) fn awaits_slot_to_send(&self) -> bool {
        self.may_send_more() && self.outgoing.iter().any(|outgoing| !outgoing.left.is_empty())
    }

    /// Whether a driver copies something.
    pub(super) fn is_copying(&self) -> bool {
        self.outgoing.iter().any(|outgoing| !outgoing.copying.is_empty())
            || self.incoming.iter().any(|incoming| !incoming.copying.is_empty())
    }

    /// Pieces that are to be sent for the peer or for us.
    pub(crate) fn queued(&self) -> usize {
        self.outgoing.iter().map(|outgoing| outgoing.left.len() + 1).sum()
    }

    /// All memory that it is still to read or write.
    pub(super) fn spots(&self) -> impl Iterator<Item = &Spot> {
        let out = self.outgoing.iter().flat_map(|outgoing| {
            outgoing.left.iter().chain(outgoing.copying.iter().flat_map(|part| &part.spots))
        });
        let come = self.incoming.iter().flat_map(|incoming| {
            incoming.left.iter().chain(incoming.copying.iter().flat_map(|part| &part.spots))
        });
        out.chain(come).chain(self.filling.iter().flat_map(|part| &part.spots))
    }
}

impl Outgoing {
    pub(crate) fn new(what: Frame, spots: Vec<Spot>) -> Outgoing {
        Outgoing { what, left: spots.into(), copying: VecDeque::new(), has_failed: false }
    }

    /// The driver could not do it.
    pub(crate) fn fail(&mut self) {
        self.has_failed = true;
        self.left.clear();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left.is_empty() && self.copying.is_empty()
    }
}

impl Incoming {
    pub(crate) fn new(token: u64, spots: Vec<Spot>) -> Incoming {
        Incoming { token, left: spots.into(), copying: Vec::new(), has_failed: false }
    }

    pub(crate) fn fate(&self) -> Fate {
        if self.has_failed { Fate::GpuFailed } else { Fate::Placed }
    }
}

/// The next part: as many of the bytes as have room where those on GPUs take so many.
pub(super) fn take_part(left: &mut VecDeque<Spot>, slot_bytes: u64) -> Vec<Spot> {
    let mut room = slot_bytes as usize;
    let mut part = Vec::new();
    while let Some(spot) = left.front_mut() {
        let len = if spot.gpu.is_some() { spot.piece.len.min(room) } else { spot.piece.len };
        if len == 0 && spot.piece.len > 0 {
            break;
        }
        part.push(Spot { piece: Piece { len, ..spot.piece }, ..*spot });
        room -= if spot.gpu.is_some() { len } else { 0 };
        if len == spot.piece.len {
            left.pop_front();
        } else {
            spot.piece = spot.piece.after(len);
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_all_bytes_in_order_and_none_has_more_than_a_slot(
            spots in vec((any::<bool>(), 1..300usize), 0..40), slot_bytes in 1..200u64,
        ) {
            let mut address = 0;
            let spot = |(is_on_gpu, len): (bool, usize)| {
                address += 1000;
                Spot { piece: Piece { address, len }, gpu: is_on_gpu.then_some(0) }
            };
            let spots: Vec<Spot> = spots.into_iter().map(spot).collect();
            let each_byte = |spots: &[Spot]| -> Vec<(usize, Option<u16>)> {
                let bytes = |spot: &Spot| {
                    let gpu = spot.gpu;
                    (spot.piece.address..spot.piece.address + spot.piece.len).map(move |byte| (byte, gpu))
                };
                spots.iter().flat_map(bytes).collect()
            };
            let mut left: VecDeque<Spot> = spots.clone().into();
            let mut came = Vec::new();
            while !left.is_empty() {
                let part = take_part(&mut left, slot_bytes);
                let on_gpu: usize = part.iter().filter(|spot| spot.gpu.is_some()).map(|spot| spot.piece.len).sum();
                prop_assert!(on_gpu as u64 <= slot_bytes && !part.is_empty());
                came.extend(each_byte(&part));
            }
            prop_assert_eq!(came, each_byte(&spots));
        }
    }
}
