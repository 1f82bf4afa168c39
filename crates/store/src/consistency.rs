//! The index checked against itself, for tests.

use std::collections::HashMap;

use kvlane_memory::{PAGE_BYTES, PoolPage};

use crate::api::{SpaceId, StoredBlock};
use crate::entries::{CopyState, NONE, State};
use crate::index::Index;
use crate::rows::Row;

impl Index {
    /// Checks everything that the index keeps twice: links, counts, order, extents, leases. Walks all of it. The
    /// error says what disagrees.
    pub fn check_consistency(&self) -> Result<(), String> {
        let mut children: HashMap<u32, u32> = HashMap::new();
        let mut leases: HashMap<StoredBlock, u32> = HashMap::new();
        let mut extents: Vec<(PoolPage, u64)> = Vec::new();
        let mut rows: HashMap<(SpaceId, Row), u32> = HashMap::new();
        for (id, space) in self.spaces.with_ids() {
            rows.extend(space.rows.iter().map(|(slot, row)| ((id, row), slot)));
        }
        let mut sealed: HashMap<SpaceId, u64> = HashMap::new();
        let (mut blocks, mut leased, mut claimed) = (0, 0, 0);
        let (mut copies, mut copied_bytes) = (0, 0);
        for block in self.leases.iter().flat_map(|lease| &lease.blocks) {
            *leases.entry(*block).or_default() += 1;
        }
        let entries: Vec<_> = self.entries.iter().collect();
        for &(slot, entry) in &entries {
            if entry.parent != NONE {
                *children.entry(entry.parent).or_default() += 1;
                let parent = self.entries.at(entry.parent);
                let same_space = parent.space == entry.space && parent.state != State::Free;
                expect(same_space, || format!("slot {slot} hangs on slot {}: {parent:?}", entry.parent))?;
            }
            let found = self.entries.find(entry.space, &entry.hash);
            expect(found == Some(slot), || format!("slot {slot} is found as {found:?}"))?;
            let named = leases.remove(&self.entries.block(slot)).unwrap_or(0);
            expect(entry.leases == named, || format!("{named} leases name {entry:?}"))?;
            let is_block = entry.state != State::Gap;
            let is_copy = entry.copy != CopyState::Own;
            expect(self.policy.contains(slot) == (is_block && !is_copy), || {
                format!("the policy and {entry:?}")
            })?;
            expect(self.copies.contains(slot) == is_copy, || format!("the copies and {entry:?}"))?;
            blocks += usize::from(is_block && !is_copy);
            copies += usize::from(is_copy);
            copied_bytes += if is_copy { self.spaces[entry.space].room_bytes() } else { 0 };
            leased += u64::from(entry.leases > 0);
            claimed += usize::from(entry.state == State::Claimed);
            let has_claim = self.claims.contains_key(&slot);
            expect(has_claim == (entry.state == State::Claimed), || format!("claims and {entry:?}"))?;
            if entry.state == State::Gap {
                let idle = entry.row == Row::NONE
                    && entry.children > 0
                    && entry.checks == 0
                    && entry.leases == 0
                    && !is_copy;
                expect(idle, || format!("gap at slot {slot}: {entry:?}"))?;
                continue;
            }
            let space = &self.spaces[entry.space];
            let of = rows.remove(&(entry.space, entry.row));
            expect(of == Some(slot), || format!("{:?} of slot {slot} is of {of:?}", entry.row))?;
            let pages = space.rows.shards(entry.row).map(|(page, _)| page);
            extents.extend(pages.zip(space.shard_bytes.iter().copied()));
            *sealed.entry(entry.space).or_default() += u64::from(entry.state == State::Sealed);
        }
        for &(slot, entry) in &entries {
            let count = children.remove(&slot).unwrap_or(0);
            expect(entry.children == count, || format!("{count} children hang on {entry:?}"))?;
        }
        expect(rows.is_empty(), || format!("rows without a block: {rows:?}"))?;
        expect(self.policy.len() == blocks, || format!("the policy has {} of {blocks}", self.policy.len()))?;
        expect(self.copies.len() == copies, || format!("{copies} copies, not {}", self.copies.len()))?;
        expect(self.copies.bytes() == copied_bytes, || {
            format!("copies of {copied_bytes} bytes, not {}", self.copies.bytes())
        })?;
        expect(self.leases.blocks == leased, || format!("{leased} leased, not {}", self.leases.blocks))?;
        expect(self.claims.len() == claimed, || format!("{claimed} claimed, not {}", self.claims.len()))?;
        for (id, space) in self.spaces.with_ids() {
            let blocks = sealed.get(&id).copied().unwrap_or(0);
            expect(space.sealed == blocks, || format!("{blocks} sealed, not {}", space.sealed))?;
        }

        extents.extend(self.limbo.iter().map(|extent| (extent.page, extent.bytes)));
        extents.sort_unstable();
        let limbo: u64 = self.limbo.iter().map(|extent| extent.bytes).sum();
        expect(limbo == self.limbo.bytes(), || format!("{limbo} in limbo, not {}", self.limbo.bytes()))?;
        let whole_pages = |bytes: u64| bytes.next_multiple_of(PAGE_BYTES);
        let used: u64 = extents.iter().map(|&(_, bytes)| whole_pages(bytes)).sum();
        let allocated = self.extents.used_bytes();
        expect(used == allocated, || format!("{used} bytes in extents, {allocated} allocated"))?;
        for pair in extents.windows(2) {
            let end = pair[0].0.offset().0 + whole_pages(pair[0].1);
            expect(end <= pair[1].0.offset().0, || format!("extents overlap: {pair:?}"))?;
        }
        Ok(())
    }
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
