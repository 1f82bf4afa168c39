//! The queue of slots on one connection, in both directions and in order.

use std::collections::VecDeque;

use super::slot::Slot;
use crate::identity::Identity;
use crate::ranges::{Piece, Spot, bytes_of};
use crate::transfers::Token;
use crate::wire::Fate;

/// Slots that one connection holds at a time per direction. The driver copies one while the socket has another, and a slow
/// peer holds no more than these.
pub(super) const SLOTS_A_LINK: usize = 4;

/// A part of a frame's bytes with its slot, which holds those of the bytes that are on GPUs.
#[derive(Debug)]
pub(crate) struct SlotPart {
    pub(crate) slot: Slot,
    pub(crate) spots: Vec<Spot>,
}

impl SlotPart {
    /// Where the socket reads or writes the part: GPU bytes in the slot, host bytes in place.
    pub(crate) fn host_pieces(&self) -> Vec<Piece> {
        self.slot.host_pieces(&self.spots)
    }

    pub(crate) fn bytes(&self) -> u64 {
        bytes_of(&self.spots)
    }
}

/// Bytes that leave a GPU's memory, as one WRITE or as the answer to one READ.
#[derive(Debug)]
pub(crate) struct StagedSend {
    pub(crate) frame: StagedFrame,
    /// The driver has not begun to copy these.
    pub(crate) left: VecDeque<Spot>,
    /// Being copied into their slots, in sending order.
    pub(crate) copying: VecDeque<SlotPart>,
    /// The driver failed to copy a part, so no further part is sent.
    pub(crate) has_failed: bool,
}

/// The head that is sent before each part.
#[derive(Debug)]
pub(crate) enum StagedFrame {
    /// A WRITE of this process. `entries`: its runs in wire format; `runs`: how many.
    Write { token: Token, entries: Vec<u8>, runs: usize },
    /// The answer to the peer's READ with this token. Each part goes in a frame of its own.
    Data { token: u64 },
}

/// Bytes of one frame that go to a GPU's memory.
#[derive(Debug)]
pub(crate) struct StagedReceive {
    pub(crate) token: u64,
    /// Bytes still to come, without those of the part being filled.
    pub(crate) left: VecDeque<Spot>,
    /// Being copied from their slots to the GPU.
    pub(crate) copying: Vec<SlotPart>,
    pub(crate) has_failed: bool,
}

/// Both directions of one connection. The bytes that come next belong to the last frame in `incoming`.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) outgoing: VecDeque<StagedSend>,
    /// Slots whose bytes the socket has not taken yet. The number is the link's `written` count at which it has.
    pub(crate) written: VecDeque<(u64, Slot)>,
    pub(crate) incoming: VecDeque<StagedReceive>,
    /// The part that the socket receives into.
    pub(crate) filling: Option<SlotPart>,
    /// The peer that is served, and its connection. None: this process made the connection.
    pub(crate) of: Option<(Identity, u64)>,
}

impl Lane {
    pub(crate) fn is_empty(&self) -> bool {
        self.outgoing.is_empty() && self.written.is_empty() && self.incoming.is_empty()
    }

    /// Whether this connection may take one more slot for sending.
    pub(super) fn may_send_more(&self) -> bool {
        let copying: usize = self.outgoing.iter().map(|outgoing| outgoing.copying.len()).sum();
        copying + self.written.len() < SLOTS_A_LINK
    }

    /// Whether this connection may take one more slot for receiving.
    pub(super) fn may_receive_more(&self) -> bool {
        let copying: usize = self.incoming.iter().map(|incoming| incoming.copying.len()).sum();
        copying + usize::from(self.filling.is_some()) < SLOTS_A_LINK
    }

    /// Whether the next bytes of the socket have no slot yet.
    pub(crate) fn awaits_slot(&self) -> bool {
        self.filling.is_none() && self.incoming.back().is_some_and(|incoming| !incoming.left.is_empty())
    }

    /// Whether bytes wait for a slot, to be copied from the GPU.
    pub(super) fn awaits_slot_to_send(&self) -> bool {
        self.may_send_more() && self.outgoing.iter().any(|outgoing| !outgoing.left.is_empty())
    }

    /// Whether a copy of the driver is in flight.
    pub(super) fn is_copying(&self) -> bool {
        self.outgoing.iter().any(|outgoing| !outgoing.copying.is_empty())
            || self.incoming.iter().any(|incoming| !incoming.copying.is_empty())
    }

    /// Pieces that wait to be sent, for the peer or for this process; each send counts as one more.
    pub(crate) fn queued(&self) -> usize {
        self.outgoing.iter().map(|outgoing| outgoing.left.len() + 1).sum()
    }

    /// All memory that is still to be read or written.
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

impl StagedSend {
    pub(crate) fn new(frame: StagedFrame, spots: Vec<Spot>) -> StagedSend {
        StagedSend { frame, left: spots.into(), copying: VecDeque::new(), has_failed: false }
    }

    /// The driver failed: drops what was not copied.
    pub(crate) fn fail(&mut self) {
        self.has_failed = true;
        self.left.clear();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left.is_empty() && self.copying.is_empty()
    }
}

impl StagedReceive {
    pub(crate) fn new(token: u64, spots: Vec<Spot>) -> StagedReceive {
        StagedReceive { token, left: spots.into(), copying: Vec::new(), has_failed: false }
    }

    pub(crate) fn fate(&self) -> Fate {
        if self.has_failed { Fate::GpuFailed } else { Fate::Placed }
    }
}

/// Takes the next part off `left`: as many bytes as fit while those on GPUs stay within one slot.
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
