//! An engine's two links to the daemon, without I/O.
//!
//! A link is told events and answers with actions; it has no socket, clock, thread or lock. Drivers carry the actions out:
//! [`Scheduler`](crate::Scheduler) in its caller's thread, [`Worker`](crate::Worker) in the thread that moves blocks.
//!
//! Rules between a link and its driver:
//!
//! 1. Actions are carried out in the order in which they were given. One that ends at once is over before the next begins:
//!    above all raising the fence (with the GPU's memory written), writing flags, and sending (handed to the connection, not
//!    necessarily out).
//! 2. Copies of this process and mappings answer by an event. They may take any time; the link does not rely on their being
//!    over. (The drivers carry them out at once, and hand the event in.)
//! 3. An event names the connection, copy or process that it is of. The link ignores those that it does not know any more, but
//!    for a pool that is mapped too late, which it has unmapped; the driver ignores actions that name a connection that it has not.
//! 4. Within a turn: jobs, then answers, then ends of processes, then the step, then `Tick`. Timers run in `Tick` alone, so
//!    that a process that was stopped itself takes the answers that lie in its socket before it looks at its clock. A load
//!    is released after its request was handed to the connection.
//! 5. The driver forgets processes for which `needs` is false (the mover after each turn, the
//!    scheduler as it connects), and wakes at `wake_at` at the latest.
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
