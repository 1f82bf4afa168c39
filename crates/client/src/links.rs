//! An engine's two links to the daemon, the scheduler's and a worker's: state machines without I/O.
//!
//! A link takes events and returns actions. It has no socket, clock, thread or lock. A driver feeds it and carries its actions
//! out: [`Scheduler`](crate::Scheduler) in its caller's thread, [`Worker`](crate::Worker) in its mover thread.
//!
//! ```text
//!   lookup: the daemon leases blocks --> hit --> promised to vLLM --> load: the worker copies --> lease released
//! ```
//! # What keeps a promised hit true when the daemon dies
//! vLLM cannot take a promised hit back, so from the lookup to the end of the load (a *run* is one start of the daemon, with
//! a pool of its own):
//!
//! - **The bytes are verified, leased and mapped before the promise.** The daemon answers a lookup with sealed blocks in RAM,
//!   under a lease. It offers no hit until every worker of the engine has mapped its pool. It neither evicts nor overwrites
//!   leased blocks.
//! - **The mapping outlives the daemon.** The kernel keeps the pool's memory as long as a worker maps it. A worker that loses
//!   the daemon keeps the pool of that run mapped ([`promises`]). It unmaps the pool when no promise on it can be open: the
//!   daemon's process has ended, and a step has said that the scheduler promises nothing of that run any more. An engine that
//!   runs no step for a minute has no open promise either.
//! - **The worker can copy by itself.** If the daemon refuses a load, dies or is silent, the worker copies the blocks from its
//!   own mapping (worker/loads.rs). The load fails only if that copy fails, or the worker is closed.
//! - **The scheduler makes no new promise of a run that it has left** ([`gone`](scheduler::SchedulerLink::gone)).
//!
//! One bound breaks this: a worker keeps eight former pools. If a ninth daemon dies before the scheduler's next step, the worker
//! unmaps the oldest pool, and a load of it that has not begun fails. vLLM then computes its blocks.
//!
//! # Rules between a link and its driver
//!
//! 1. The driver carries actions out in their order. It completes an action before it begins the next: the fence is raised
//!    and the GPU sees it, the flags are written, the connection has the bytes to send (which may not be on the wire).
//! 2. Copies of this process and mappings are the exception. They may take any time, and an event reports the end of each.
//! 3. An event names its connection, copy or process. The link ignores events of those that it no longer knows, with one
//!    exception: it has a pool unmapped that was mapped too late. The driver ignores actions whose connection is gone.
//! 4. In a turn the driver feeds jobs first, then the daemon's answers, ends of processes, the step, and `Tick` last. Timers
//!    run in `Tick` alone. So an engine that was stopped for a while reads the answers in its socket before it concludes that
//!    the daemon is silent.
//! 5. The driver watches the daemon's process as long as `needs` is true for it, and reports its end. It feeds a `Tick` at
//!    `wake_at` at the latest.
//! 6. `now` never goes back. It is an `Instant`; simulations add durations to one.

pub mod backoff;
mod connection;
pub mod flags;
pub mod group;
pub mod ids;
pub mod pace;
pub mod promises;
pub mod scheduler;
pub mod standing;
pub mod worker;
