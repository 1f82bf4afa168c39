//! Nodes by the addresses of a DNS name: a resolver's answers become nodes of the scheduler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use kvlane_router::{
    members::{DnsName, Membership, MembershipOptions, Resolve, Resolving, Spec},
    schedule::{Role, Scheduler, SchedulerSettings},
    shared::{ProxySettings, Shared},
};

type Found = io::Result<Vec<IpAddr>>;

/// Answers one thing after the other, then fails; and tells when it is asked.
struct Scripted {
    answers: Mutex<Vec<Found>>,
    asked: mpsc::Sender<String>,
}

impl Resolve for Scripted {
    fn resolve<'r>(&'r self, host: &'r str, _: u16) -> Resolving<'r> {
        let _ = self.asked.send(host.to_owned());
        let answer = self.answers.lock().unwrap().pop();
        Box::pin(async move { answer.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into())) })
    }
}

#[test]
fn a_failed_look_up_changes_nothing_and_each_rank_is_a_node() {
    let shared = Shared::new(ProxySettings::default(), Scheduler::new(SchedulerSettings::default()), 1);
    let hosts = ["127.0.0.1", "::1", "127.0.0.1"].map(|host| host.parse().unwrap());
    let (asked, asks) = mpsc::channel();
    let resolver = Arc::new(Scripted { answers: Mutex::new(vec![Ok(hosts.to_vec())]), asked });
    let like = Spec { group: "a".into(), ..Spec::new("http://engines:9".parse().unwrap(), Role::Decode) };
    let names = vec![DnsName { like, ranks: 2 }];
    let options = MembershipOptions { names, resolver: Some(resolver), ..MembershipOptions::default() };
    let members = Membership::start(&shared, options).unwrap();
    let patience = Duration::from_secs(30);
    for _ in 0..2 {
        assert_eq!(asks.recv_timeout(patience).unwrap(), "engines");
    }
    // It was asked for the second time, and has failed: what the first answer named is there.
    members.stop();
    let mut nodes: Vec<String> = shared.with_scheduler(|scheduler| {
        scheduler.nodes().map(|(_, node)| format!("{} {} {}", node.name, node.role, node.group)).collect()
    });
    nodes.sort();
    let expected = ["127.0.0.1:9#0", "127.0.0.1:9#1", "[::1]:9#0", "[::1]:9#1"];
    assert_eq!(nodes, expected.map(|at| format!("http://{at} decode a")));
}
