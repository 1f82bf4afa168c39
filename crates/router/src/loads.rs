//! Polls the nodes' own load metrics: `GET /metrics` of vLLM's server, every two seconds.
//!
//! The router's own counters are exact and immediate. The nodes' metrics only add the requests that others than this router send
//! to them. The router polls no more often than it probes, because engines have become unresponsive when their metrics were
//! polled too often.

use std::{
    collections::HashMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_door::RuntimeThread;
use thiserror::Error;
use tokio::{
    task::JoinHandle as Task,
    time::{MissedTickBehavior, interval},
};

use crate::{
    address::Address,
    node_page::{self, PageError},
    pool_info::pool_of,
    schedule::{NodeId, Reported},
    shared::Shared,
};

/// Time between two polls of a node.
const PERIOD: Duration = Duration::from_secs(2);
/// Failed polls in a row after which the last answer no longer counts.
const MISSES_MAX: u32 = 3;
/// Larger counts of requests are absurd, and are cut to this.
const REQUESTS_MAX: u64 = 1 << 32;
/// Longest page of metrics that the router reads.
const BYTES_MAX: usize = 4 << 20;

/// The polling thread.
#[derive(Debug)]
pub struct Loads(RuntimeThread);

/// Why a node's load is not known.
#[derive(Debug, Error)]
enum LoadError {
    #[error(transparent)]
    Page(#[from] PageError),
    #[error("its page of metrics has neither vllm:num_requests_running nor vllm:num_requests_waiting")]
    NotThere,
}

/// A node's totals since its engine started. None if its page lacks them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineTotals {
    preemptions: Option<f64>,
    steps: Option<f64>,
    tokens: Option<f64>,
}

impl EngineTotals {
    /// Preemptions a second, and tokens a step (0 without a step), since `before`, which was so many seconds ago. None of totals
    /// that a page lacks, or that an engine's restart has reset.
    fn since(&self, before: &Self, seconds: f64) -> (Option<f64>, Option<f64>) {
        let grown = |now: Option<f64>, then: Option<f64>| Some(now? - then?).filter(|grown| *grown >= 0.0);
        let preempted = grown(self.preemptions, before.preemptions).map(|count| count / seconds.max(1e-3));
        let steps = grown(self.steps, before.steps);
        // No steps: none of the token budget was used.
        let mean = |(tokens, steps): (f64, f64)| if steps > 0.0 { tokens / steps } else { 0.0 };
        (preempted, grown(self.tokens, before.tokens).zip(steps).map(mean))
    }
}

/// Reads a page of metrics in Prometheus' text format. Counts are summed over the engines that it lists; the used part of the
/// cache is the largest of theirs. None if it has no count of requests. With `rank`, only this data-parallel rank counts.
pub fn read(page: &str, rank: Option<u32>) -> Option<(Reported, EngineTotals)> {
    let label = rank.map(|rank| format!("engine=\"{rank}\""));
    let mut found = None;
    let (mut reported, mut totals) = (Reported::default(), EngineTotals::default());
    let is_of_rank = |line: &&str| label.as_ref().is_none_or(|label| line.contains(label.as_str()));
    for line in page.lines().filter(|line| line.starts_with("vllm:")).filter(is_of_rank) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        // The value stands behind the labels, which may contain spaces and brackets. A time may follow it.
        let rest = line.rsplit_once('}').map_or(&line[name.len()..], |(_, rest)| rest);
        let Some(value) = rest.split_whitespace().next().and_then(|value| value.parse::<f64>().ok()) else {
            continue;
        };
        // NaN and negative values become 0.
        let count = (value as u64).min(REQUESTS_MAX);
        match name {
            "vllm:num_requests_running" | "vllm:num_requests_waiting" => {
                reported.requests = reported.requests.saturating_add(count);
                if name == "vllm:num_requests_waiting" {
                    reported.waiting = Some(reported.waiting.unwrap_or(0).saturating_add(count));
                }
                found = Some(());
            }
            "vllm:kv_cache_usage_perc" => {
                let percent = ((value * 100.0) as u64).min(100);
                reported.cache_percent = Some(reported.cache_percent.unwrap_or(0).max(percent));
            }
            "vllm:num_preemptions_total" => {
                totals.preemptions = Some(totals.preemptions.unwrap_or(0.0) + value)
            }
            "vllm:iteration_tokens_total_sum" => totals.tokens = Some(totals.tokens.unwrap_or(0.0) + value),
            "vllm:iteration_tokens_total_count" => totals.steps = Some(totals.steps.unwrap_or(0.0) + value),
            _ => {}
        }
    }
    found.map(|()| (reported, totals))
}

impl Loads {
    /// Polls all nodes, also those that join later, until it is stopped.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let shared = Arc::clone(shared);
        Ok(Self(RuntimeThread::start("kvlane-loads", move || async move { poll_all(&shared).await })?))
    }

    /// Stops the thread, also in the middle of a poll.
    pub fn stop(self) {
        self.0.stop();
    }
}

async fn poll_all(shared: &Arc<Shared>) {
    let mut polls: HashMap<NodeId, Task<()>> = HashMap::new();
    let mut period = interval(PERIOD / 4);
    loop {
        period.tick().await;
        let there: HashMap<NodeId, Arc<Address>> = shared.addresses().into_iter().collect();
        polls.retain(|id, task| {
            let stays = there.contains_key(id);
            if !stays {
                task.abort();
            }
            stays
        });
        for (id, address) in there {
            polls.entry(id).or_insert_with(|| tokio::spawn(poll_node(Arc::clone(shared), id, address)));
        }
    }
}

/// Polls one node. Runs forever.
async fn poll_node(shared: Arc<Shared>, id: NodeId, address: Arc<Address>) {
    let mut period = interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut misses, mut is_logged) = (0, false);
    let mut before: Option<(EngineTotals, Instant)> = None;
    loop {
        period.tick().await;
        let own_before = shared.own_requests(id);
        match fetch(&address).await {
            Ok(((mut reported, totals), pool)) => {
                misses = 0;
                shared.observe_pool(id, pool.as_deref());
                if let Some((before, at)) = before.replace((totals, Instant::now())) {
                    (reported.preempted, reported.step_tokens) =
                        totals.since(&before, at.elapsed().as_secs_f64());
                }
                shared.observe_load(id, Some((reported, own_before)));
            }
            Err(error) => {
                misses += 1;
                if misses == MISSES_MAX {
                    shared.observe_load(id, None);
                }
                if misses >= MISSES_MAX && !is_logged {
                    is_logged = true;
                    // Log: three reads of the engine's `/metrics` failed; the router counts its own requests
                    // only. Do: see whether the engine serves `/metrics` at this address.
                    tracing::warn!(
                        once = true,
                        node = %address,
                        %error,
                        "cannot read the node's metrics: requests that others send to it do not count"
                    );
                }
            }
        }
    }
}

/// Fetches a node's metrics: its load, and its pool.
async fn fetch(address: &Address) -> Result<((Reported, EngineTotals), Option<String>), LoadError> {
    let page = node_page::get(address, "/metrics", BYTES_MAX).await?;
    let page = String::from_utf8_lossy(&page.body);
    let load = read(&page, address.rank).ok_or(LoadError::NotThere)?;
    Ok((load, pool_of(&page, address.rank)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_vllm_is_read_and_others_say_nothing() {
        let page = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a } b\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"a\"} 2.0 1700000000\n\
            vllm:num_requests_waiting{engine=\"0\"} 4.0\n\
            vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 4.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n";
        let read = |page, rank| read(page, rank).map(|(reported, _)| reported);
        let told = |requests, waiting, cache_percent| Reported {
            requests,
            waiting,
            cache_percent,
            ..Reported::default()
        };
        assert_eq!(read(page, None), Some(told(9, Some(4), Some(50))));
        assert_eq!(read(page, Some(1)), Some(told(2, None, Some(50))));
        assert_eq!(read(page, Some(2)), None);
        assert_eq!(read("vllm:num_requests_running 1", None), Some(told(1, None, None)));
        let odd =
            "vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\nvllm:num_requests_waiting{ +Inf";
        assert!(read(odd, None).is_some_and(|reported| reported.requests == 0));
        for nothing in ["", "process_open_fds 3", "vllm:num_requests_running", "vllm:kv_cache_usage_perc 0.5"]
        {
            assert_eq!(read(nothing, None), None, "{nothing}");
        }
    }

    #[test]
    fn rates_are_of_the_time_since_the_last_page_and_none_of_a_node_that_started_anew() {
        let page = |preemptions: f64, tokens: f64, steps: f64| {
            let page = format!(
                "vllm:num_requests_running 1\nvllm:num_preemptions_total{{engine=\"0\"}} {preemptions}\n\
                 vllm:iteration_tokens_total_sum{{engine=\"0\"}} {tokens}\n\
                 vllm:iteration_tokens_total_bucket{{engine=\"0\",le=\"1\"}} 7\n\
                 vllm:iteration_tokens_total_count{{engine=\"0\"}} {steps}\n"
            );
            read(&page, None).unwrap().1
        };
        assert_eq!(page(7.0, 900.0, 10.0).since(&page(1.0, 100.0, 6.0), 2.0), (Some(3.0), Some(200.0)));
        assert_eq!(page(7.0, 900.0, 10.0).since(&page(7.0, 900.0, 10.0), 2.0), (Some(0.0), Some(0.0)));
        assert_eq!(page(0.0, 5.0, 1.0).since(&page(7.0, 900.0, 10.0), 2.0), (None, None));
        let nothing = read("vllm:num_requests_running 1", None).unwrap().1;
        assert_eq!(page(1.0, 1.0, 1.0).since(&nothing, 2.0), (None, None));
        let odd = page(f64::NAN, f64::INFINITY, 3.0).since(&page(1.0, 1.0, 1.0), 0.0);
        assert_eq!(odd, (None, Some(f64::INFINITY)), "what is absurd is bounded where it is used");
    }
}
