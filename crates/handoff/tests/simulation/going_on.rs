//! The application of a decode engine. It leaves a landing's blocks alone until the landing is over, checks that those which
//! arrived are right, and reuses all of them at once.

use std::time::Duration;

use kvlane_handoff::{HandoffId, Outcome, Wanted};

use crate::agents::Agent;
use crate::engine::{Owner, hash, word};
use crate::faults::Fault;
use crate::world::{Event, World};

pub(crate) struct Task {
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    /// Blocks that it gets in all; more than are wanted where the request needs room for what it computes itself.
    pub(crate) room: usize,
    /// Of the engine, from `first_block` on.
    pub(crate) blocks: Vec<u32>,
    pub(crate) ends_by: Duration,
    /// The prompt is computed as it is wanted, and nothing goes wrong.
    pub(crate) has_to_land: bool,
    /// [`Fault::FreesEarly`].
    pub(crate) is_gone: bool,
}

impl World {
    pub(crate) fn begin_task(
        &mut self,
        at: Agent,
        id: HandoffId,
        wanted: Wanted,
        room: usize,
        has_to_land: bool,
    ) {
        let ends_by = self.now + wanted.patience + self.stop_bound();
        let (content, first_block, end_block) = (wanted.content, wanted.first_block, wanted.end_block);
        let engine = &mut self.engines[at.engine];
        if !engine.landings.begin(self.now, id, wanted) {
            return;
        }
        let blocks = Vec::new();
        let task =
            Task { content, first_block, end_block, room, blocks, ends_by, has_to_land, is_gone: false };
        engine.tasks.insert(id, task);
        self.after(0, 60, Event::Room(at, id));
    }

    /// The engine has some blocks for it.
    pub(crate) fn give_room(&mut self, at: Agent, id: HandoffId) {
        let engine = &mut self.engines[at.engine];
        let Some(task) = engine.tasks.get(&id).filter(|task| !task.is_gone) else { return };
        let left = task.room - task.blocks.len();
        let count = if self.dice.one_in(2) { left as u64 } else { self.dice.between(1, 3).min(left as u64) };
        let owner = Owner::Task(id);
        let blocks: Vec<u32> = (0..count).map_while(|_| engine.allocate(owner, &mut self.dice)).collect();
        engine.landings.give_room(id, &blocks);
        let Some(task) = engine.tasks.get_mut(&id) else { return };
        task.blocks.extend(&blocks);
        if task.blocks.len() < task.room {
            self.after(1, 60, Event::Room(at, id));
        }
    }

    pub(crate) fn give_up_landing(&mut self, at: Agent, id: HandoffId) {
        let engine = &mut self.engines[at.engine];
        engine.landings.give_up(id);
        if self.fault != Fault::FreesEarly {
            return;
        }
        let Some(task) = engine.tasks.get_mut(&id) else { return };
        task.is_gone = true;
        std::mem::take(&mut task.blocks).into_iter().for_each(|block| engine.free(block));
    }

    /// Takes what has arrived of hand-offs that are over.
    pub(crate) fn take_over(&mut self, at: Agent) -> Result<(), String> {
        let engine = &mut self.engines[at.engine];
        let standing = |id| engine.landings.status(id);
        let over: Vec<_> = engine.tasks.keys().filter_map(|id| Some((*id, standing(*id)?))).collect();
        for (id, standing) in over {
            let Some(outcome) = standing.outcome else { continue };
            let Some(task) = engine.tasks.remove(&id) else { continue };
            engine.landings.forget(id);
            *self.seen.ends.entry(name(&outcome)).or_default() += 1;
            if task.ends_by < self.now {
                return Err(format!("{id:?} ended late at the engine that goes on: {outcome:?}"));
            }
            if task.has_to_land && outcome != Outcome::Landed {
                return Err(format!("{id:?} did not land although nothing went wrong: {outcome:?}"));
            }
            if task.is_gone {
                continue;
            }
            let arrived = task.first_block..standing.end_block;
            if standing.end_block < task.first_block
                || arrived.len() > task.blocks.len()
                || standing.end_block > task.end_block
            {
                return Err(format!("{id:?}: {arrived:?} arrived in {} blocks", task.blocks.len()));
            }
            if outcome == Outcome::Landed && standing.end_block != task.end_block {
                return Err(format!("{id:?} landed, and block {} is not there", standing.end_block));
            }
            for (of_prompt, block) in arrived.clone().zip(&task.blocks) {
                self.seen.cached += 1;
                for (number, rank) in (0..).zip(&engine.ranks) {
                    let right = (0..engine.shape.regions)
                        .map(|region| word(id, task.content, number, region, of_prompt));
                    if !right.eq(rank.memory[*block as usize].iter().copied()) {
                        return Err(format!("{id:?}: block {of_prompt} has a wrong byte in rank {number}"));
                    }
                }
            }
            for (block, told) in &standing.hashes {
                self.seen.hashes += 1;
                if !arrived.contains(block) || *told != hash(id, *block) {
                    return Err(format!("{id:?}: a hash is told of block {block}, whose it is not"));
                }
            }
            task.blocks.into_iter().for_each(|block| engine.free(block));
        }
        Ok(())
    }
}

fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Unreachable(_) => "Unreachable".into(),
        other => format!("{other:?}"),
    }
}
