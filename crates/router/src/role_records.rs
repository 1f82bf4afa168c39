//! Keeps and logs the last changes of roles and states, so that operators can see why an engine has its role.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use serde_json::{Value, json};

use crate::{
    balance::{Act, Group, GroupReport, Indicators, NAMES, State},
    schedule::{NodeId, Role},
};

/// Most records that are kept.
const RECORDS_MAX: usize = 200;

/// A change of a role, a wish for more or fewer nodes, or a state that began.
#[derive(Debug, Clone)]
struct Record {
    at: SystemTime,
    group: Group,
    state: State,
    scores: (Option<f64>, Option<f64>),
    act: Option<(&'static str, Option<Arc<str>>, Role)>,
}

/// The last [`RECORDS_MAX`] records, and counts since the start.
#[derive(Debug, Default)]
pub(crate) struct Records {
    records: VecDeque<Record>,
    /// Changes of a node's role.
    pub(crate) turns: u64,
    /// Times that one node more, or one less, was wanted.
    pub(crate) scale_ups: u64,
    pub(crate) scale_downs: u64,
}

impl Records {
    /// Logs and keeps the results of one balancing tick. Returns them as JSON. `name` is the name of a node.
    pub(crate) fn note(
        &mut self,
        report: &GroupReport,
        name: impl Fn(NodeId) -> Option<Arc<str>>,
    ) -> Vec<Value> {
        let mut pages = Vec::new();
        let GroupReport { group, state, scores, is_new, acts, missing } = report;
        let shown = |score: Option<f64>| score.map_or("none".to_owned(), |score| format!("{score:.2}"));
        let (prefill, decode) = (shown(scores.0), shown(scores.1));
        if *is_new {
            // Log: the balancer sees another state of this group (docs/balance.md); the scores say how busy each
            // role is.
            tracing::info!(group = &*group.name, model = &*group.model, state = state.name(), %prefill, %decode, "balance state changed");
            pages.push(self.push(report, None));
        }
        for (role, indicator) in missing {
            // Log: an indicator with a weight in `[balance]` is in no engine's metrics. Do: use engines that
            // report it, or set its weight to 0.
            tracing::warn!(
                once = true,
                group = &*group.name,
                model = &*group.model,
                "no {role} engine reports its {indicator}, which has a weight: the other indicators count instead"
            );
        }
        for act in acts {
            let (what, node, role) = match *act {
                Act::Drain(id, role) => ("drains before it changes to", name(id), role),
                Act::Turn(id, role) => ("changes to", name(id), role),
                Act::ScaleUp(role) => ("one more wanted:", None, role),
                Act::ScaleDown(role) => ("one less would do:", None, role),
            };
            match *act {
                Act::Turn(..) => self.turns += 1,
                Act::ScaleUp(_) => self.scale_ups += 1,
                Act::ScaleDown(_) => self.scale_downs += 1,
                Act::Drain(..) => {}
            }
            let node_name = node.as_deref().unwrap_or("");
            // Log "drains before it changes to <role>": the node finishes its requests, and takes the new role
            // afterwards (`--balance`).
            // Log "changes to <role>": the node takes requests of its new role from now on (`--balance`).
            // Log "one more wanted: <role>": the group is overloaded. Do: start one more engine of this role; the
            // webhook has the record too.
            // Log "one less would do: <role>": the group has had little to do for minutes. Do: stop one engine of
            // this role if you want to save it.
            tracing::info!(node = node_name, group = &*group.name, model = &*group.model, %prefill, %decode, "{what} {role}");
            pages.push(self.push(report, Some((what, node, role))));
        }
        pages
    }

    fn push(&mut self, report: &GroupReport, act: Option<(&'static str, Option<Arc<str>>, Role)>) -> Value {
        if self.records.len() == RECORDS_MAX {
            self.records.pop_front();
        }
        let record = Record {
            at: SystemTime::now(),
            group: report.group.clone(),
            state: report.state,
            scores: report.scores,
            act,
        };
        let page = record.page();
        self.records.push_back(record);
        page
    }

    /// The last `most` records as JSON, newest first.
    pub(crate) fn page(&self, most: usize) -> Value {
        self.records.iter().rev().take(most).map(Record::page).collect()
    }
}

impl Record {
    fn page(&self) -> Value {
        let at = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        json!({
            "time": at,
            "group": &*self.group.name,
            "connector": self.group.connector,
            "model": &*self.group.model,
            "state": self.state.name(),
            "prefill_score": self.scores.0,
            "decode_score": self.scores.1,
            "what": self.act.as_ref().map(|(what, ..)| what.trim_end_matches(':')),
            "node": self.act.as_ref().and_then(|(_, node, _)| node.as_deref()),
            "role": self.act.as_ref().map(|(_, _, role)| role.name()),
        })
    }
}

/// A node's score and its indicators, as JSON.
pub(crate) fn score_page(score: Option<(Option<f64>, Indicators)>) -> Value {
    let Some((score, indicators)) = score else { return Value::Null };
    let known: serde_json::Map<String, Value> = NAMES
        .iter()
        .zip(indicators)
        .filter_map(|(name, value)| Some(((*name).to_owned(), json!(value?))))
        .collect();
    json!({ "score": score, "indicators": known })
}
