//! What `kvlane route` is made of: one OpenAI endpoint before prefill and decode engines.
//!
//! - [`address`]: where a node is reached.
//! - [`admin`]: what operators see.
//! - [`answers`]: where engines' answers end. Pure.
//! - [`balance`]: which nodes prefill and which decode, as the work changes. Pure.
//! - [`balancing`]: has nodes change their roles.
//! - [`beats_refused`]: nodes' beats that do not count.
//! - [`body`]: request bodies, which are scanned and not parsed into trees.
//! - [`counters`]: what has happened since the start.
//! - [`decisions`]: the last choices.
//! - [`ids`]: what engines get as a request's id.
//! - [`knowledge`]: what nodes have of prompts, by what their engines tell.
//! - [`legs`]: what a prefill node and a decode node are asked.
//! - [`loads`]: asks nodes how much they have to do.
//! - [`members`]: which nodes there are, and whether they answer.
//! - [`metrics`]: what Prometheus reads.
//! - [`proxy`]: takes requests over HTTP, and brings the nodes' answers back.
//! - [`role_records`]: the last changes of roles.
//! - [`schedule`]: which nodes a request goes to. Pure.
//! - [`shared`]: the state that the threads share.
//! - [`webhook`]: tells an operator's program what the balancer did.
#![forbid(unsafe_code)]

pub mod address;
pub mod admin;
pub mod answers;
pub mod balance;
pub mod balancing;
pub mod beats_refused;
pub mod body;
pub mod counters;
pub mod decisions;
pub mod ids;
pub mod knowledge;
pub mod legs;
pub mod loads;
pub mod members;
pub mod metrics;
mod node_page;
mod pool_info;
pub mod proxy;
mod request_metrics;
mod request_rows;
pub mod role_records;
pub mod schedule;
pub mod shared;
pub mod webhook;
