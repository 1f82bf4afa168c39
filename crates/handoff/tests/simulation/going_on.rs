//! The application of a decode engine. It leaves a landing's blocks alone until the landing is over, checks that those which
//! arrived are right, and reuses all of them at once. Some tasks have few blocks: they check those that have arrived, as if
//! they saved them elsewhere, and give them as room for the prompt's next ones.

use std::time::Duration;

use kvlane_handoff::{HandoffId, Outcome, Wanted};

use crate::agents::Agent;
use crate::engine::{Owner, Rank, hash, word};
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
    /// Most blocks at once of a task that gives them as room again; None: it has room for all.
    pub(crate) overflows: Option<usize>,
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
        (room, overflows): (usize, Option<usize>),
        has_to_land: bool,
    ) {
        let ends_by = self.now + wanted.patience + self.stop_bound();
        let (content, first_block, end_block) = (wanted.content, wanted.first_block, wanted.end_block);
        let engine = &mut self.engines[at.engine];
        if !engine.landings.begin(self.now, id, wanted) {
            return;
        }
        let (blocks, is_gone) = (Vec::new(), false);
        let room = if overflows.is_some() { (end_block - first_block) as usize } else { room };
        let task =
            Task { content, first_block, end_block, room, blocks, overflows, ends_by, has_to_land, is_gone };
        engine.tasks.insert(id, task);
        self.after(0, 60, Event::Room(at, id));
    }

    /// The engine has some blocks for it.
    pub(crate) fn give_room(&mut self, at: Agent, id: HandoffId) -> Result<(), String> {
        let again = self.pass_on(at, id)?;
        let engine = &mut self.engines[at.engine];
        let Some(task) = engine.tasks.get_mut(&id).filter(|task| !task.is_gone) else { return Ok(()) };
        let left = again.len().min(task.room - task.blocks.len());
        task.blocks.extend(&again[..left]);
        engine.landings.give_room(id, &again[..left]);
        again[left..].iter().for_each(|block| engine.free(*block));
        let Some(task) = engine.tasks.get(&id) else { return Ok(()) };
        let held = task.blocks.iter().filter(|block| **block != PASSED).count();
        let room = task.overflows.map_or(usize::MAX, |most| most - held.min(most));
        let left = (task.room - task.blocks.len()).min(room);
        let count = if self.dice.one_in(2) { left as u64 } else { self.dice.between(1, 3).min(left as u64) };
        let owner = Owner::Task(id);
        let blocks: Vec<u32> = (0..count).map_while(|_| engine.allocate(owner, &mut self.dice)).collect();
        engine.landings.give_room(id, &blocks);
        let Some(task) = engine.tasks.get_mut(&id) else { return Ok(()) };
        task.blocks.extend(&blocks);
        if task.blocks.len() < task.room {
            self.after(1, 60, Event::Room(at, id));
        }
        Ok(())
    }

    /// Of a task that overflows: checks the blocks that have arrived, and returns them for the prompt's next ones.
    fn pass_on(&mut self, at: Agent, id: HandoffId) -> Result<Vec<u32>, String> {
        let early = u32::from(self.fault == Fault::RecyclesEarly);
        let engine = &mut self.engines[at.engine];
        let status = engine.landings.status(id).filter(|status| status.outcome.is_none());
        let (Some(status), Some(task)) = (status, engine.tasks.get_mut(&id)) else { return Ok(Vec::new()) };
        if task.overflows.is_none() || task.is_gone {
            return Ok(Vec::new());
        }
        let mut again = Vec::new();
        for of_prompt in task.first_block..status.end_block + early {
            let Some(block) = task.blocks.get_mut((of_prompt - task.first_block) as usize) else { break };
            let block = std::mem::replace(block, PASSED);
            if block == PASSED {
                continue;
            }
            if of_prompt < status.end_block {
                self.seen.passed += 1;
                check_block(&engine.ranks, id, task.content, of_prompt, block)?;
            }
            again.push(block);
        }
        for block in &again {
            engine.free(*block);
            engine.owners[*block as usize] = Owner::Task(id);
        }
        Ok(again)
    }

    pub(crate) fn give_up_landing(&mut self, at: Agent, id: HandoffId) {
        let engine = &mut self.engines[at.engine];
        engine.landings.give_up(id);
        if self.fault != Fault::FreesEarly {
            return;
        }
        let Some(task) = engine.tasks.get_mut(&id) else { return };
        task.is_gone = true;
        let blocks = std::mem::take(&mut task.blocks).into_iter().filter(|block| *block != PASSED);
        blocks.for_each(|block| engine.free(block));
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
            for (of_prompt, block) in arrived.clone().zip(&task.blocks).filter(|(_, block)| **block != PASSED)
            {
                self.seen.cached += 1;
                check_block(&engine.ranks, id, task.content, of_prompt, *block)?;
            }
            for (block, told) in &standing.hashes {
                self.seen.hashes += 1;
                self.seen.early_hashes += u64::from(!arrived.contains(block));
                if *told != hash(id, *block) {
                    return Err(format!("{id:?}: a hash is told of block {block}, whose it is not"));
                }
            }
            let blocks = task.blocks.into_iter().filter(|block| *block != PASSED);
            blocks.for_each(|block| engine.free(block));
        }
        Ok(())
    }
}

/// In the place of a block that was given as room again.
const PASSED: u32 = u32::MAX;

/// Whether a block has the bytes of this block of the prompt in each rank.
fn check_block(
    ranks: &[Rank],
    id: HandoffId,
    content: [u8; 16],
    of_prompt: u32,
    block: u32,
) -> Result<(), String> {
    for (number, rank) in (0..).zip(ranks) {
        let memory = &rank.memory[block as usize];
        let right = (0..memory.len() as u32).map(|region| word(id, content, number, region, of_prompt));
        if !right.eq(memory.iter().copied()) {
            return Err(format!("{id:?}: block {of_prompt} has a wrong byte in rank {number}"));
        }
    }
    Ok(())
}

fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Unreachable(_) => "Unreachable".into(),
        other => format!("{other:?}"),
    }
}
