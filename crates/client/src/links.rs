//! An engine's two links to the daemon, the scheduler's and a worker's: state machines without I/O.
//!
//! A link takes events and returns actions. It has no socket, clock, thread or lock. A driver feeds it and carries its actions
//! out: [`Scheduler`](crate::Scheduler) in its caller's thread, [`Worker`](crate::Worker) in its mover thread.
//!
//! ```text
//!   lookup: the daemon leases blocks --> hit --> promised to vLLM --> load: the worker copies --> lease released
//! ```
//! # What keeps a promised hit true when the daemon dies
//! vLLM cannot take a promised hit back, so from the lookup to the end of the load:
//!
//! - **The bytes are verified, leased and mapped before the promise.** The daemon answers a lookup with sealed blocks in RAM,
//!   under a lease. It answers none before every worker of the engine has mapped its pool. It neither evicts nor overwrites
//!   leased blocks.
//! - **The mapping outlives the daemon.** The kernel keeps the pool's memory as long as a worker maps it. A worker that loses
//!   the daemon keeps the pool of that run, up to eight such pools ([`promises`]). It unmaps a pool only after that daemon's
//!   process has ended. In addition, a step must have said that the scheduler promises nothing of that run any more, or the
//!   engine must have been idle for a minute.
//! - **The worker can copy by itself.** If the daemon refuses a load, dies or is silent, the worker copies the blocks from its
//!   own mapping (worker/loads.rs). The load fails only if that copy fails, or the worker is closed.
//! - **The scheduler makes no new promise of a run that it has left** ([`gone`](scheduler::SchedulerLink::gone)).
//!
//! # Rules between a link and its driver
//!
//! 1. The driver carries actions out in their order. An action that no event answers is over before the next one begins:
//!    above all raising the fence (with the GPU's memory written), writing flags, and sending (the connection has the bytes,
//!    though they may not be on the wire).
//! 2. An event answers each copy of this process and each mapping. They may take any time, and the link does not rely on their
//!    being over. (The drivers carry them out at once, and feed the event in.)
//! 3. An event names its connection, copy or process. The link ignores events of those that it no longer knows, with one
//!    exception: it has a pool unmapped that was mapped too late. The driver ignores actions whose connection is gone.
//! 4. A turn feeds jobs, then answers, then ends of processes, then the step, then `Tick`. Timers run in `Tick` alone. So a
//!    process that was itself stopped reads the answers in its socket before it reads its clock. A load is released after its
//!    request was handed to the connection.
//! 5. The driver stops watching processes for which `needs` is false (the mover after each turn, the scheduler as it connects).
//!    It wakes at `wake_at` at the latest.
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
