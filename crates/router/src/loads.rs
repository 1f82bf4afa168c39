//! Reads what nodes themselves say of their load: `GET /metrics` of vLLM's server, every two seconds.
//!
//! Own counters are exact and at once; what is read here only adds what others than this router send to a node. No oftener than
//! probes come: engines have become unresponsive by being asked for their metrics too often.

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

/// Between two questions to a node.
const PERIOD: Duration = Duration::from_secs(2);
/// Periods without an answer after which the last one counts no more.
const MISSES_MAX: u32 = 3;
/// No node has more requests.
const REQUESTS_MAX: u64 = 1 << 32;
/// Longest page of metrics.
const BYTES_MAX: usize = 4 << 20;

/// The asking thread.
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

/// What a node has counted since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counted {
    preemptions: Option<f64>,
    steps: Option<f64>,
    tokens: Option<f64>,
}

impl Counted {
    /// Preemptions a second and tokens a step (0 without one), since `before`, so many seconds ago. None of what is not told, and of a node that
    /// has started anew.
    fn since(&self, before: &Self, seconds: f64) -> (Option<f64>, Option<f64>) {
        let grown = |now: Option<f64>, then: Option<f64>| Some(now? - then?).filter(|grown| *grown >= 0.0);
        let preempted = grown(self.preemptions, before.preemptions).map(|count| count / seconds.max(1e-3));
        let steps = grown(self.steps, before.steps);
        // Who has made no step has used nothing of its budget.
        let mean = |(tokens, steps): (f64, f64)| if steps > 0.0 { tokens / steps } else { 0.0 };
        (preempted, grown(self.tokens, before.tokens).zip(steps).map(mean))
    }
}

/// What a page of metrics in Prometheus' text format says, summed over the engines that it lists. None if it says nothing of it.
/// Of a server with several data-parallel ranks, only what it says of `rank`, if one is given.
pub fn read(page: &str, rank: Option<u32>) -> Option<(Reported, Counted)> {
    let label = rank.map(|rank| format!("engine=\"{rank}\""));
    let mut found = None;
    let (mut reported, mut counted) = (Reported::default(), Counted::default());
    let is_of_rank = |line: &&str| label.as_ref().is_none_or(|label| line.contains(label.as_str()));
    for line in page.lines().filter(|line| line.starts_with("vllm:")).filter(is_of_rank) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        // Behind the labels, which may hold spaces and brackets; a time may follow.
        let rest = line.rsplit_once('}').map_or(&line[name.len()..], |(_, rest)| rest);
        let Some(value) = rest.split_whitespace().next().and_then(|value| value.parse::<f64>().ok()) else {
            continue;
        };
        // Not a number and less than nothing become 0.
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
                counted.preemptions = Some(counted.preemptions.unwrap_or(0.0) + value)
            }
            "vllm:iteration_tokens_total_sum" => counted.tokens = Some(counted.tokens.unwrap_or(0.0) + value),
            "vllm:iteration_tokens_total_count" => counted.steps = Some(counted.steps.unwrap_or(0.0) + value),
            _ => {}
        }
    }
    found.map(|()| (reported, counted))
}

impl Loads {
    /// Asks all nodes that there are, and those that join later, until it is stopped.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let shared = Arc::clone(shared);
        Ok(Self(RuntimeThread::start("kvlane-loads", move || async move { follow(&shared).await })?))
    }

    /// Asks no more.
    pub fn stop(self) {
        self.0.stop();
    }
}

async fn follow(shared: &Arc<Shared>) {
    let mut asking: HashMap<NodeId, Task<()>> = HashMap::new();
    let mut period = interval(PERIOD / 4);
    loop {
        period.tick().await;
        let there: HashMap<NodeId, Arc<Address>> = shared.addresses().into_iter().collect();
        asking.retain(|id, task| {
            let stays = there.contains_key(id);
            if !stays {
                task.abort();
            }
            stays
        });
        for (id, address) in there {
            asking.entry(id).or_insert_with(|| tokio::spawn(ask_for_ever(Arc::clone(shared), id, address)));
        }
    }
}

async fn ask_for_ever(shared: Arc<Shared>, id: NodeId, address: Arc<Address>) {
    let mut period = interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut misses, mut is_said) = (0, false);
    let mut before: Option<(Counted, Instant)> = None;
    loop {
        period.tick().await;
        let own_before = shared.own_requests(id);
        match told_by(&address).await {
            Ok(((mut reported, counted), pool)) => {
                misses = 0;
                shared.observe_pool(id, pool.as_deref());
                if let Some((before, at)) = before.replace((counted, Instant::now())) {
                    (reported.preempted, reported.step_tokens) =
                        counted.since(&before, at.elapsed().as_secs_f64());
                }
                shared.observe_load(id, Some((reported, own_before)));
            }
            Err(error) => {
                misses += 1;
                if misses == MISSES_MAX {
                    shared.observe_load(id, None);
                }
                if misses >= MISSES_MAX && !is_said {
                    is_said = true;
                    tracing::warn!(
                        node = %address,
                        %error,
                        "a node's own metrics cannot be read: what others send to it does not count. Said once"
                    );
                }
            }
        }
    }
}

/// What a node's page of metrics says: of its load, and of its pool.
async fn told_by(address: &Address) -> Result<((Reported, Counted), Option<String>), LoadError> {
    let page = node_page::get(address, "/metrics", BYTES_MAX).await?;
    let page = String::from_utf8_lossy(&page.body);
    let told = read(&page, address.rank).ok_or(LoadError::NotThere)?;
    Ok((told, pool_of(&page, address.rank)))
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
