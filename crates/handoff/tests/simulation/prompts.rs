//! The application of a prefill engine: prompts, whose blocks stay pinned while a hand-off may read them.

use std::time::Duration;

use kvlane_handoff::{Computed, HandoffId};

use crate::agents::Agent;
use crate::engine::{Owner, hash, word};
use crate::faults::Fault;
use crate::world::{Event, World};

pub(crate) struct Prompt {
    pub(crate) content: [u8; 16],
    /// Of the engine, by block of the prompt.
    pub(crate) blocks: Vec<u32>,
    pub(crate) total: u32,
    /// Parts that ranks are computing.
    pub(crate) in_steps: usize,
    /// The hand-off reads nothing any more.
    pub(crate) is_free: bool,
    pub(crate) ends_by: Duration,
}

impl World {
    pub(crate) fn begin_prompt(&mut self, at: Agent, id: HandoffId, content: [u8; 16], total: u32) {
        let ends_by = self.now + self.lending_bound();
        let engine = &mut self.engines[at.engine];
        if !engine.used.insert(id) || !engine.lendings.begin(self.now, id, content) {
            return;
        }
        let (blocks, in_steps, is_free) = (Vec::new(), 0, false);
        engine.prompts.insert(id, Prompt { content, blocks, total, in_steps, is_free, ends_by });
        self.after(0, 20, Event::Step(at, id));
    }

    /// The engine's next step computes some more.
    pub(crate) fn step(&mut self, at: Agent, id: HandoffId) {
        let calm = self.is_calm;
        let engine = &mut self.engines[at.engine];
        let Some(prompt) = engine.prompts.get(&id) else { return };
        if !engine.lendings.is_open(id) {
            return;
        }
        let (first_block, total) = (prompt.blocks.len() as u32, prompt.total);
        let count = self.dice.between(1, 4).min(u64::from(total - first_block));
        let owner = Owner::Prompt(id);
        let blocks: Vec<u32> = (0..count).map_while(|_| engine.allocate(owner, &mut self.dice)).collect();
        let Some(prompt) = engine.prompts.get_mut(&id) else { return };
        prompt.blocks.extend(&blocks);
        let end = prompt.blocks.len() as u32;
        let ahead = self.dice.below(3) as u32;
        engine.lendings.progress(id, ahead, u64::from(end));
        if !blocks.is_empty() {
            let hash = (!self.dice.one_in(4)).then(|| hash(id, end - 1));
            let (ranks, all) = (engine.ranks.len() as u32, engine.shape.regions);
            // The first regions may be offered while the step computes the others.
            let first_part = if self.dice.one_in(3) { 1 } else { all };
            let parts = [0..first_part, first_part..all];
            let parts = || parts.iter().filter(|part| !part.is_empty());
            prompt.in_steps += ranks as usize * parts().count();
            // A step goes on in all ranks at about the same time.
            for rank in 0..ranks {
                let mut at_ms = 1;
                for regions in parts() {
                    let (blocks, regions) = (blocks.clone(), regions.clone());
                    let hash = hash.filter(|_| regions.end == all);
                    let computed = Computed { first_block, blocks, regions, hash };
                    let event = Event::Computed(Agent { rank: Some(rank), ..at }, id, computed);
                    self.after(at_ms, at_ms + 4, event);
                    at_ms += 5;
                }
            }
        }
        if end < total {
            let slow = !calm && self.dice.one_in(20);
            let most = if slow { 400 } else { 30 };
            self.after(11, most, Event::Step(at, id));
        }
    }

    /// A rank has computed some, or some regions of them: its memory holds them from now on, and they may be offered.
    pub(crate) fn computed(&mut self, at: Agent, id: HandoffId, computed: Computed) -> Result<(), String> {
        let engine = &mut self.engines[at.engine];
        let Some(prompt) = engine.prompts.get_mut(&id) else { return Ok(()) };
        prompt.in_steps -= 1;
        let (content, number) = (prompt.content, at.rank.unwrap_or(0));
        let rank = &mut engine.ranks[number as usize];
        for (of_prompt, block) in (computed.first_block..).zip(&computed.blocks) {
            if engine.owners[*block as usize] != Owner::Prompt(id) {
                return Err(format!("{id:?}: block {block} was used otherwise while it was computed"));
            }
            for region in computed.regions.clone() {
                rank.memory[*block as usize][region as usize] = word(id, content, number, region, of_prompt);
            }
        }
        rank.offering.computed(id, computed);
        self.release_prompt(at, id);
        Ok(())
    }

    /// What the hand-offs do not need any more is given back.
    pub(crate) fn take_free(&mut self, at: Agent) -> Result<(), String> {
        let mut to_release = Vec::new();
        let engine = &mut self.engines[at.engine];
        for id in engine.lendings.take_free() {
            let Some(prompt) = engine.prompts.get_mut(&id) else {
                if self.fault == Fault::UnpinsEarly {
                    continue;
                }
                return Err(format!("{id:?} was free, and nothing of it was pinned"));
            };
            if prompt.is_free {
                return Err(format!("{id:?} was free twice"));
            }
            if prompt.ends_by < self.now {
                return Err(format!("{id:?} ended late at the engine that computes"));
            }
            prompt.is_free = true;
            to_release.push(id);
        }
        if self.fault == Fault::UnpinsEarly {
            let over = engine.prompts.iter_mut().filter(|(id, _)| !engine.lendings.is_open(**id));
            for (id, prompt) in over.filter(|(_, prompt)| !prompt.is_free) {
                prompt.is_free = true;
                to_release.push(*id);
            }
        }
        for id in to_release {
            self.release_prompt(at, id);
        }
        Ok(())
    }

    /// A step that goes on still writes into its blocks, whoever reads them.
    fn release_prompt(&mut self, at: Agent, id: HandoffId) {
        let engine = &mut self.engines[at.engine];
        if engine.prompts.get(&id).is_none_or(|prompt| !prompt.is_free || prompt.in_steps > 0) {
            return;
        }
        let Some(prompt) = engine.prompts.remove(&id) else { return };
        prompt.blocks.into_iter().for_each(|block| engine.free(block));
    }
}
