//! Problems in plain words, each with an action for the operator.

use std::sync::atomic::Ordering;

use kvlane_door::{
    Problems,
    Severity::{Critical, Info, Warning},
};

use crate::{
    schedule::{Node, NodeState},
    shared::Shared,
};

/// So large a share of the answers may be errors of 500 and above.
const ERRORS_MAX: f64 = 0.05;
/// A sum of a rate a second, from which on the event has happened. A single event may sum up to a little less than 1,
/// because samples are a little more than a second apart.
const EVENT_MIN: f64 = 0.5;

/// All problems of this moment, the worst first. `recent` is the sum of a series over the last ten minutes.
pub(super) fn problems(shared: &Shared, recent: impl Fn(&'static str) -> f64) -> Problems {
    let mut found = Problems::default();
    let mut say = |is_there, severity, text, action| found.add(is_there, severity, text, action);
    let count = |is: fn(&Node) -> bool| {
        shared.with_scheduler(|scheduler| scheduler.nodes().filter(|(_, node)| is(node)).count())
    };
    let all = count(|_| true);
    let (ready, suspect) =
        (count(|node| node.state == NodeState::Ready), count(|node| node.state == NodeState::Suspect));
    say(
        ready == 0,
        Critical,
        if all == 0 {
            "The router knows no engine.".into()
        } else {
            format!("None of {all} engines is ready.")
        },
        "kvlane route list and the engines' logs say why. Clients get 503.",
    );
    let (requests, errors) = (recent("requests"), recent("errors"));
    say(
        errors >= EVENT_MIN && errors > ERRORS_MAX * requests,
        Critical,
        format!("{errors:.0} of {requests:.0} answers of the last ten minutes were errors of 500 and above."),
        "The table of engines below, and their logs, say where.",
    );
    say(
        ready > 0 && suspect > 0,
        Warning,
        format!("{suspect} of {all} engines do not answer probes."),
        "Look at their logs. They get requests only if no other engine could serve them.",
    );
    let alone = count(|node| node.breaker.is_open());
    say(
        alone > 0,
        Warning,
        format!("{alone} of {all} engines get no requests, because they failed."),
        "Look at their logs. The router tries them again by itself.",
    );
    let stopped = count(|node| node.pairing.is_stopped());
    say(
        stopped > 0,
        Warning,
        format!("{stopped} prefill engines hand nothing over, so that decode engines compute all."),
        "Look at their logs, and check that both engines of a pair have the same connector.",
    );
    let failed = shared.counters.names_failed.load(Ordering::Relaxed);
    say(
        failed > 0,
        Info,
        format!("{failed} DNS lookups of engines' names have failed since the start."),
        "The router's log names them.",
    );
    let refused = recent("refused") + recent("shed");
    say(
        refused >= EVENT_MIN,
        Info,
        format!("{refused:.0} requests of the last ten minutes were refused for lack of an engine."),
        "Add engines, or allow longer queues: docs/choosing.md, Policies.",
    );
    found
}
