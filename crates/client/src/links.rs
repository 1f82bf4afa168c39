//! An engine's two links to the daemon, the scheduler's and a worker's: state machines without I/O.
//!
//! A link takes events and returns actions. It has no socket, clock, thread or lock. A driver feeds it and carries its actions
//! out: [`Scheduler`](crate::Scheduler) in its caller's thread, [`Worker`](crate::Worker) in its mover thread.
//!
//! ```text
//!   lookup: the daemon leases blocks --> hit --> promised to vLLM --> load: the worker copies --> lease released
//! ```
//! # What keeps a promised hit true when the daemon dies
//! A promised hit that fails costs a request: by default vLLM fails it (`kv_load_failure_policy`). So from the lookup to the end
//! of the load (a *run* is one start of the daemon, with a pool of its own):
//!
//! - **The bytes are verified, leased and mapped before the promise.** The daemon answers a lookup with sealed blocks in RAM,
//!   under a lease. It offers no hit until every worker of the engine has mapped its pool. It neither evicts nor overwrites
//!   leased blocks.
//! - **The mapping outlives the daemon.** The kernel keeps the pool's memory as long as a worker maps it. A worker that loses
//!   the daemon keeps the pool of that run mapped ([`promises`]). It unmaps the pool when the daemon's process has ended, and
//!   no promise on it is open: the scheduler has said so with a step, or the engine has run no step for a minute. (An idle
//!   engine has no request that waits for a load. While its process is stopped, the minute does not pass.)
//! - **The worker can copy by itself.** If the daemon refuses a load, dies or is silent, the worker copies the blocks from its
//!   own mapping (worker/loads.rs). The load fails only if that copy fails, or the worker is closed. The blocks stay as they
//!   were: a dead daemon writes nothing, and one that lives keeps the leases of a process that may still copy.
//! - **The scheduler makes no new promise of a run that it has left** ([`gone`](scheduler::SchedulerLink::gone)).
//!
//! One bound breaks this: a worker keeps eight former pools. If nine daemons die between two steps of the scheduler, the worker
//! unmaps the oldest pool. Copies from it that run keep their view. A load that has not begun fails.
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
