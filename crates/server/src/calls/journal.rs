//! ReadJournal: which blocks of an engine's groups became visible or died.

use kvlane_proto::{
    packed::{self, ChangeKind, pack_changes},
    v1::{self, reply::Body as Answer},
};
use kvlane_store::{Change, JournalEntry, SpaceId};

use super::context::Context;
use crate::refusal::Refusal;

/// Most entries in one answer, or a few more: an entry comes once for each group that uses its space.
const ENTRIES_MAX: usize = 1 << 14;

/// The next entries, of the engine's own spaces.
pub(crate) fn read(context: &Context<'_>, read: &v1::ReadJournal) -> Result<Answer, Refusal> {
    context.owner()?;
    let open = context.shared.engines.opened(&context.greeted.info.engine_id);
    let spaces: Vec<SpaceId> = open.iter().map(|group| group.space).collect();
    // While a worker is missing, the engine has no open spaces. Nothing is read, so that the cursor stays.
    let most = if spaces.is_empty() { 0 } else { (read.max as usize).clamp(1, ENTRIES_MAX) };
    let mut found = Vec::new();
    let result = context.shared.store.read_journal(read.cursor, &spaces, most, &mut found);
    let entries = pack_changes(found.into_iter().map(packed));
    Ok(Answer::JournalEntries(v1::JournalEntries {
        cursor: result.cursor,
        start_again: result.start_again,
        has_more: result.has_more && most > 0,
        entries,
    }))
}

fn packed((group, entry): (usize, JournalEntry)) -> packed::Change {
    let kind = match entry.change {
        Change::Visible => ChangeKind::Visible,
        Change::Gone => ChangeKind::Gone,
    };
    // The number fits, because an engine has at most 64 groups.
    packed::Change { kind, group: group as u8, hash: entry.hash.0 }
}
