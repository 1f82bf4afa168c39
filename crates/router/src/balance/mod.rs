//! Which nodes prefill and which decode, as the work changes: FlowKV's load-aware scheduling (arXiv 2504.03775), made
//! definite where the paper leaves it open.
//!
//! ```text
//!  samples of each node -> indicators -> windows -> scores -> means of both roles -> levels -> state -> what is done
//! ```
//! All of it is pure: who calls it brings samples and the time, and carries out what is answered.

mod balancer;
mod indicators;
mod level;
mod look;
mod settings;
mod untold;

pub use balancer::{Act, Balancer, State, View};
pub use indicators::{Capacity, Indicators, NAMES, Sample, score};
pub use level::{Level, Thresholds};
pub use look::{Balancers, Group, Looked};
pub use settings::{RoleSettings, Settings};
