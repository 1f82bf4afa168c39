//! ReadJournal: which blocks of an engine's groups became visible or went.

use kvlane_proto::{
    packed::{self, ChangeKind, pack_changes},
    v1::{self, reply::Body as Answer},
};
use kvlane_store::{Change, JournalEntry, SpaceId};

use super::context::Context;
use crate::refusal::Refusal;

/// Entries in one answer, about; an entry is told once for each group whose space it is of.
const ENTRIES_MAX: usize = 1 << 14;

/// The next entries, of the engine's own spaces.
pub(crate) fn read(context: &Context<'_>, read: &v1::ReadJournal) -> Result<Answer, Refusal> {
    context.owner()?;
    let open = context.shared.engines.opened(&context.greeted.info.engine_id);
    let spaces: Vec<SpaceId> = open.iter().map(|group| group.space).collect();
    // While a worker is missing it is not known which spaces are meant: the cursor stays.
    let most = if spaces.is_empty() { 0 } else { (read.max as usize).clamp(1, ENTRIES_MAX) };
    let mut found = Vec::new();
    let told = context.shared.store.read_journal(read.cursor, &spaces, most, &mut found);
    let entries = pack_changes(found.into_iter().map(packed));
    Ok(Answer::JournalEntries(v1::JournalEntries {
        cursor: told.cursor,
        start_again: told.start_again,
        has_more: told.has_more && most > 0,
        entries,
    }))
}

fn packed((group, entry): (usize, JournalEntry)) -> packed::Change {
    let kind = match entry.change {
        Change::Visible => ChangeKind::Visible,
        Change::Gone => ChangeKind::Gone,
    };
    // An engine has 64 groups at most.
    packed::Change { kind, group: group as u8, hash: entry.hash.0 }
}
