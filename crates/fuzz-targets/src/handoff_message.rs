//! Any bytes as a hand-off message to an engine's scheduler and rank: refused, or decoded to a message that encodes to the same
//! meaning, and that none of the four state machines panics on.
use std::time::Duration;

use kvlane_fabric::{EngineId, MESSAGE_BYTES_MAX};
use kvlane_handoff::{
    Computed, HandoffId, LandingOptions, Landings, LendingOptions, Lendings, Message, Offering, Reading,
    Wanted, engine_of,
};

const STRANGER: EngineId = EngineId { engine_id: 1, boot_nonce: 1 };
const NOW: Duration = Duration::from_secs(1);

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(message) = Message::decode(bytes) else { return };
    let again = message.encode();
    assert!(again.len() <= MESSAGE_BYTES_MAX);
    assert_eq!(Message::decode(&again).as_ref(), Ok(&message));
    // For a hand-off that both sides have in progress, so that the message is not ignored at once.
    let id = message.id().unwrap_or(HandoffId([0; 16]));
    let ranks = vec![Vec::new()];
    let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], ranks.clone());
    lendings.begin(NOW, id, [0; 16]);
    lendings.message(NOW, STRANGER, message.clone());
    lendings.rank_said(0, &message);
    lendings.tick(NOW * 60);
    let mut landings = Landings::new(LandingOptions::default(), [0; 16], Vec::new(), ranks);
    let address = ([127, 0, 0, 1], 1).into();
    let wanted =
        Wanted { address, content: [0; 16], first_block: 1, end_block: 9, patience: NOW, budget: NOW };
    landings.begin(NOW, id, wanted);
    landings.dialled(NOW, address, &Ok(STRANGER));
    landings.give_room(id, &[1, 2, 3]);
    landings.message(NOW, STRANGER, message.clone());
    landings.rank_said(NOW, 0, message.clone());
    let status = landings.status(id);
    assert!(status.is_none_or(|status| (1..=9).contains(&status.end_block)));
    let mut offering = Offering::default();
    offering.computed(id, Computed { first_block: 0, blocks: vec![1, 2, 3], regions: 0..1, hash: None });
    offering.scheduler_said(message.clone());
    let mut reading = Reading::new(2);
    let Message::Room { source, first_block, .. } = &message else {
        if let Message::Offer(offer) = message {
            reading.offer(NOW, STRANGER, offer);
            reading.tick(NOW * 60);
            assert_eq!(reading.live(), 0, "nobody wants it");
        }
        return;
    };
    let (source, first_block) = (engine_of(source), *first_block);
    reading.scheduler_said(message);
    assert_eq!(reading.live(), usize::from(source.is_some()), "{first_block}");
}
