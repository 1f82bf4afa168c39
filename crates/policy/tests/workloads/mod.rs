//! Generated traces that stand for kinds of traffic, the same for the same seed on every machine. Policies are judged
//! on them, so the constants of a policy must not be tuned on them.
#![allow(dead_code)] // Each program that includes this file uses a part of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use kvlane_policy::{Trace, spread};

/// The seeds of the traces that figures are given for.
pub(crate) const CHAT_SEED: u64 = 20_261_126;
pub(crate) const SHARED_PROMPTS_SEED: u64 = 20_261_127;
pub(crate) const AGENTS_SEED: u64 = 20_261_128;

/// Requests as they are made: time in ms, ids of blocks from the head.
pub(crate) type Requests = Vec<(u64, Vec<u64>)>;

/// Chance that follows from a seed.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(spread(seed))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        spread(self.0)
    }

    /// 0 to `end`, which is not included.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// True once in so many.
    pub(crate) fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    /// Above 0, at most 1.
    fn share(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Exponential, of this mean.
    fn waiting(&mut self, mean: f64) -> u64 {
        (-self.share().ln() * mean) as u64
    }

    /// Log-normal: half are below `median`; two in three are within a factor of e^`spread`.
    fn log_normal(&mut self, median: f64, spread: f64) -> u64 {
        let normal = (-2.0 * self.share().ln()).sqrt() * (std::f64::consts::TAU * self.share()).cos();
        (median * (normal * spread).exp()) as u64
    }
}

/// Ids that no block had before.
struct Ids(u64);

impl Ids {
    fn take(&mut self, count: u64) -> std::ops::Range<u64> {
        self.0 += count;
        self.0 - count..self.0
    }
}

/// Many conversations at once. Each begins with one of three short system prompts and a question, sometimes a long
/// document; half end after the first answer, the others go on after thinking, a minute or so, with the whole conversation so
/// far and something new.
pub(crate) fn chat(seed: u64, references: usize) -> Requests {
    let mut dice = Dice::new(seed);
    let mut ids = Ids(1 << 32);
    let systems: Vec<Vec<u64>> = (0..3).map(|_| ids.take(2).collect()).collect();
    // When something happens, by number: a conversation goes on, or, the one without blocks, a new one begins.
    let mut due = BinaryHeap::from([Reverse((0, 0))]);
    let mut conversations: Vec<Vec<u64>> = vec![Vec::new()];
    let mut requests = Requests::new();
    let mut made = 0;
    while made < references
        && let Some(Reverse((now, number))) = due.pop()
    {
        let (number, goes_on) = if number == 0 {
            due.push(Reverse((now + 1 + dice.waiting(700.0), 0)));
            let mut blocks = systems[dice.below(3) as usize].clone();
            let first = if dice.one_in(5) { dice.log_normal(40.0, 0.7) } else { dice.log_normal(5.0, 0.8) };
            blocks.extend(ids.take(first.clamp(1, 200)));
            conversations.push(blocks);
            (conversations.len() - 1, !dice.one_in(2))
        } else {
            (number, !dice.one_in(6))
        };
        made += conversations[number].len();
        requests.push((now, conversations[number].clone()));
        if goes_on && conversations[number].len() < 400 {
            let more = dice.log_normal(3.0, 0.7).clamp(1, 60);
            conversations[number].extend(ids.take(more));
            let thinking = dice.log_normal(60_000.0, 1.0);
            due.push(Reverse((now + 2000 + thinking, number)));
        } else {
            conversations[number] = Vec::new();
        }
    }
    requests
}

/// 400 system prompts of 4 to 60 blocks, the popular ones asked for far more often than the others (Zipf), each time with
/// something of its own behind. One question in ten is asked once more soon.
pub(crate) fn shared_prompts(seed: u64, references: usize) -> Requests {
    let mut dice = Dice::new(seed);
    let mut ids = Ids(2 << 32);
    let systems: Vec<Vec<u64>> = (0..400)
        .map(|_| {
            let length = 4 + dice.below(57);
            ids.take(length).collect()
        })
        .collect();
    let weights: Vec<f64> = (1..=systems.len()).map(|rank| (rank as f64).powf(-0.9)).collect();
    let total: f64 = weights.iter().sum();
    let mut requests = Requests::new();
    let mut again: BinaryHeap<Reverse<(u64, Vec<u64>)>> = BinaryHeap::new();
    let (mut now, mut made) = (0, 0);
    while made < references {
        now += 1 + dice.waiting(200.0);
        while again.peek().is_some_and(|Reverse((at, _))| *at <= now)
            && let Some(Reverse(request)) = again.pop()
        {
            made += request.1.len();
            requests.push(request);
        }
        let mut point = dice.share() * total;
        let rank = weights.iter().position(|weight| {
            point -= weight;
            point <= 0.0
        });
        let mut blocks = systems[rank.unwrap_or(0)].clone();
        blocks.extend(ids.take(dice.log_normal(8.0, 0.8).clamp(1, 100)));
        if dice.one_in(10) {
            again.push(Reverse((now + dice.waiting(30_000.0), blocks.clone())));
        }
        made += blocks.len();
        requests.push((now, blocks));
    }
    requests
}

/// Agents of eight kinds, each kind with its tools described in 12 blocks. A task has a prompt of its own and many calls a
/// few seconds apart, each with all that was said before; now and then a helper looks into something from the beginning of
/// the task. Then the task is over and never asked for again.
pub(crate) fn agents(seed: u64, references: usize) -> Requests {
    struct Task {
        blocks: Vec<u64>,
        beginning: usize,
        calls: u64,
    }
    let mut dice = Dice::new(seed);
    let mut ids = Ids(3 << 32);
    let tools: Vec<Vec<u64>> = (0..8).map(|_| ids.take(12).collect()).collect();
    let mut due = BinaryHeap::from([Reverse((0, 0))]);
    let mut tasks = vec![Task { blocks: Vec::new(), beginning: 0, calls: 0 }];
    let mut requests = Requests::new();
    let mut made = 0;
    while made < references
        && let Some(Reverse((now, number))) = due.pop()
    {
        if number == 0 {
            due.push(Reverse((now + 1 + dice.waiting(9000.0), 0)));
            let mut blocks = tools[dice.below(8) as usize].clone();
            blocks.extend(ids.take(dice.log_normal(12.0, 0.6).clamp(2, 100)));
            let beginning = blocks.len();
            tasks.push(Task { blocks, beginning, calls: 1 + dice.waiting(14.0).min(120) });
            due.push(Reverse((now, tasks.len() - 1)));
            continue;
        }
        let task = &mut tasks[number];
        made += task.blocks.len();
        requests.push((now, task.blocks.clone()));
        task.calls -= 1;
        if task.calls == 0 {
            task.blocks = Vec::new();
            continue;
        }
        if dice.one_in(6) {
            let mut helper = task.blocks[..task.beginning].to_vec();
            helper.extend(ids.take(dice.log_normal(6.0, 0.6).clamp(1, 40)));
            made += helper.len();
            requests.push((now, helper));
        }
        task.blocks.extend(ids.take(dice.log_normal(2.0, 0.7).clamp(1, 30)));
        due.push(Reverse((now + 1000 + dice.log_normal(5000.0, 0.9), number)));
    }
    requests
}

/// Two halves whose classes have changed places. Prompts are short (4 blocks) or long (40); in the first half the short ones
/// come back, each three times within the next few hundred requests, and the long ones never; in the second half the long
/// ones do and the short ones never.
pub(crate) fn turned(seed: u64, references: usize) -> (Requests, Requests) {
    let mut ids = Ids(4 << 32);
    let mut half = |seed: u64, short_returns: bool| {
        let mut dice = Dice::new(seed);
        let mut due: BinaryHeap<Reverse<(u64, Vec<u64>, u64)>> = BinaryHeap::new();
        let mut requests = Requests::new();
        let (mut step, mut made) = (0, 0);
        while made < references / 2 {
            step += 1;
            while due.peek().is_some_and(|Reverse((at, ..))| *at <= step)
                && let Some(Reverse((_, blocks, left))) = due.pop()
            {
                made += blocks.len();
                requests.push((step * 100, blocks.clone()));
                if left > 1 {
                    due.push(Reverse((step + 1 + dice.waiting(300.0), blocks, left - 1)));
                }
            }
            // As many blocks of the one length as of the other.
            let is_short = !dice.one_in(11);
            let blocks: Vec<u64> = ids.take(if is_short { 4 } else { 40 }).collect();
            if is_short == short_returns {
                due.push(Reverse((step + 1 + dice.waiting(300.0), blocks.clone(), 3)));
            }
            made += blocks.len();
            requests.push((step * 100, blocks));
        }
        requests
    };
    (half(seed, true), half(seed + 1, false))
}

/// The requests in turn, one after the other's end.
pub(crate) fn joined(parts: &[&Requests]) -> Requests {
    let mut all = Requests::new();
    for part in parts {
        let begin = all.last().map_or(0, |(at, _)| at + 1000);
        all.extend(part.iter().map(|(at, blocks)| (begin + at, blocks.clone())));
    }
    all
}

/// `prompts` prompts of `length` blocks that come in turns, for ever: LRU hits nothing if they do not all fit.
pub(crate) fn endless_loop(prompts: u64, length: u64, references: usize) -> Requests {
    let rounds = (0..references as u64 / length).map(|turn| {
        let first = (5 << 32) + turn % prompts * length;
        (turn * 100, (first..first + length).collect())
    });
    rounds.collect()
}

/// Prompts of `length` blocks that never come back; two calls with another `name` have none in common.
pub(crate) fn never_again(name: u64, length: u64, references: usize) -> Requests {
    let requests = (0..references as u64 / length).map(|turn| {
        let first = ((6 + name) << 32) + turn * length;
        (turn * 100, (first..first + length).collect())
    });
    requests.collect()
}

/// As what a replay reads.
pub(crate) fn trace(requests: &Requests) -> Trace {
    let mut trace = Trace::new();
    for (at, blocks) in requests {
        trace.push(Duration::from_millis(*at), blocks);
    }
    trace
}
