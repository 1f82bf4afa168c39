//! `kvlane route`: one OpenAI endpoint in front of vLLM's prefill and decode engines.
//!
//! A *node* is an engine's HTTP server, or one data-parallel rank of it. A *leg* is a request of the router to one node: a
//! client's request has one leg, or a prefill leg and a decode leg.
//!
//! A request's way:
//! - [`proxy`]: accepts requests over HTTP, sends their legs to nodes, and streams the answers back.
//! - [`body`]: scans request bodies without parsing them into trees. Pure.
//! - [`schedule`]: chooses the nodes of a request, by prefix and load. Pure.
//! - [`legs`]: builds the body of each leg. Pure.
//! - [`ids`]: makes the request ids that engines get. Pure.
//! - [`answers`]: finds where an engine's answer ends. Pure.
//!
//! The nodes:
//! - [`members`]: keeps the list of nodes, and probes them.
//! - [`address`]: the address of a node.
//! - [`loads`]: polls the nodes' own load metrics.
//! - [`knowledge`]: tracks which blocks of prompts each node holds, by its engine's KV events.
//! - [`balance`]: decides which nodes prefill and which decode, as the work changes. Pure.
//! - [`balancing`]: the thread that runs [`balance`].
//!
//! For operators:
//! - [`admin`]: the pages of the admin port.
//! - [`metrics`]: the page that Prometheus reads.
//! - [`counters`], [`beats_refused`]: counts since the start.
//! - [`decisions`]: the last choices of nodes.
//! - [`role_records`]: the last changes of roles.
//! - [`webhook`]: POSTs the balancer's records to an operator's program.
//!
//! [`shared`] holds the state that the threads share.
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
mod export;
mod health;
pub mod ids;
pub mod knowledge;
pub mod legs;
pub mod live;
pub mod loads;
pub mod members;
pub mod metrics;
mod node_page;
mod pool_info;
pub mod proxy;
pub mod recording;
mod request_metrics;
mod request_rows;
pub mod role_records;
pub mod schedule;
pub mod shared;
mod traces;
pub mod webhook;
