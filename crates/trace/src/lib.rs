//! Recorded requests: what a recorder keeps of each, and the lines of a trace file. Pure: no I/O, no clock.
//!
//! ```text
//!   lookup --> Recorder: numbers its blocks --> open, until its request ends --> ring --> kvlane record --> a line
//!   end    ----------------- lengths ------------------'                          '- the oldest go if no reader comes
//! ```
//! - [`BlockNumbers`] gives each block a number by its first appearance, so that a trace has no hash.
//! - [`Recorder`] joins lookups and ends of requests, for several readers.
//! - [`mod@file`] reads and writes the lines.
#![forbid(unsafe_code)]

pub mod file;
mod numbers;
mod recorder;
mod runs;

pub use numbers::{BlockNumbers, GENERATION_MAX};
pub use recorder::{Ended, Grade, Leg, Lengths, LookedUp, Read, Recorded, Recorder, TierBlocks, Whole};
pub use runs::{Run, ids};
