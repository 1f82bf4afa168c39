//! Lookup: finds the longest visible prefix of a prompt, and leases its blocks.

use std::time::Instant;

use kvlane_policy::{PrefixGroup, longest_hit};

use crate::api::{Hit, HitGroup, LookupGroup, OwnerId};
use crate::entries::{NONE, State, fingerprint};
use crate::index::Index;
use crate::needs::needs;

impl Index {
    /// The longest prefix of at most `max_tokens` that every group can give, with a lease on its blocks. None is a
    /// miss. Only visible blocks count; see [`LookupGroup`] for what a group needs.
    pub fn lookup(
        &mut self,
        owner: OwnerId,
        groups: &[LookupGroup<'_>],
        max_tokens: u64,
        now: Instant,
    ) -> Option<Hit> {
        let needs = needs(groups, max_tokens)?;
        // The slot of each block that was found, by group and block.
        let mut found: Vec<Vec<u32>> = needs.iter().map(|need| vec![NONE; need.blocks as usize]).collect();
        let entries = &self.entries;
        // Blocks saved one after the other usually have consecutive slots, upwards or downwards. So the guess repeats the
        // step between the last two, whichever group they were of.
        let (mut last, mut guess) = (NONE, NONE);
        let tokens = longest_hit(&needs, max_tokens, |group, block| {
            let LookupGroup { space, hashes, .. } = groups[group];
            let Some(slot) = entries.find_near(guess, space, &hashes[block as usize]) else { return false };
            if entries.at(slot).state != State::Sealed {
                return false;
            }
            (last, guess) = (slot, slot.wrapping_mul(2).wrapping_sub(last));
            found[group][block as usize] = slot;
            true
        });

        for (group, need) in groups.iter().zip(&needs) {
            let hit_blocks = tokens / u64::from(need.tokens_per_block);
            let space = &mut self.spaces[group.space];
            space.hit_blocks += hit_blocks;
            space.missed_blocks += need.blocks - hit_blocks;
        }
        if tokens == 0 {
            self.note_missed(groups, &needs, 0);
            return None;
        }
        let mut leased = Vec::new();
        let mut hit_groups = Vec::with_capacity(groups.len());
        for ((group, need), slots) in groups.iter().zip(&needs).zip(&found) {
            let first_block = need.first_block(tokens);
            let end = tokens / u64::from(need.tokens_per_block);
            let slots = &slots[first_block as usize..end as usize];
            let beyond = group.hashes.get(end as usize..).unwrap_or_default();
            let stored = beyond.iter().take_while(|hash| self.is_visible(group.space, hash)).count();
            let stored_blocks = end + stored as u64;
            self.hit_copies(slots, need.window_blocks == 0);
            self.policy.touch(slots, &self.entries);
            self.references += slots.len() as u64;
            let pages = self.lease_blocks(group.space, slots, &mut leased);
            let block_bytes = self.spaces[group.space].block_bytes();
            hit_groups.push(HitGroup { first_block, stored_blocks, pages, block_bytes });
        }
        let lease = self.leases.insert(owner, now, leased);
        self.note_missed(groups, &needs, tokens);
        Some(Hit { tokens, lease, groups: hit_groups })
    }

    /// Reports the requested blocks beyond a hit of `tokens` to the policy.
    fn note_missed(&mut self, groups: &[LookupGroup<'_>], needs: &[PrefixGroup], tokens: u64) {
        for (group, need) in groups.iter().zip(needs) {
            let end = (tokens / u64::from(need.tokens_per_block)) as usize;
            let beyond = group.hashes.get(end..).unwrap_or_default();
            self.references += beyond.len() as u64;
            self.policy.missed(end, &mut beyond.iter().map(|hash| fingerprint(group.space, hash)));
        }
    }
}
