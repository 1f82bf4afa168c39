//! The balancer: changes which nodes prefill and which decode as the work changes. It is FlowKV's load-aware scheduling
//! (arXiv 2504.03775), with definite rules where the paper leaves them open.
//!
//! ```text
//!  a sample of each node -> indicators -> windows -> scores -> means of both roles -> levels -> state -> acts
//! ```
//! Pure. [`Balancer`] decides for one group of nodes: the caller passes views of the nodes and the time, and carries out the
//! acts that come back. [`Balancers`] is that caller: it takes the views from the scheduler and changes roles there.

mod balancer;
mod groups;
mod indicators;
mod level;
mod missing;
mod settings;

pub use balancer::{Act, Balancer, State, View};
pub use groups::{Balancers, Group, GroupReport};
pub use indicators::{Capacity, Indicators, NAMES, Sample, score};
pub use level::{Level, Thresholds};
pub use settings::{BalanceSettings, RoleSettings};
