//! The other daemons of a cluster: as the running daemon sees them, and whether the addresses of `--peers` answer.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use kvlane_proto::v1::{ClusterStatus, MemberStatus};
use kvlane_server::{ClusterOptions, Directory, dial};

use crate::{doctor::finding::Finding, serve_options::cluster::ClusterFlags};

const SUBJECT: &str = "cluster";
/// A daemon that answers takes milliseconds.
const DIAL_PATIENCE: Duration = Duration::from_secs(2);
/// As many as a daemon dials.
const DIALLED_MAX: usize = 32;

/// The flags of `kvlane serve` that say how it reaches other daemons.
#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    /// Look for the daemons of a cluster too, with the flags of `kvlane serve`: HOST:PORT of each, or a name of them all
    #[arg(long, env = "KVLANE_PEERS", value_name = "HOST:PORT", value_delimiter = ',')]
    peers: Option<Vec<String>>,
    /// Or for the replicas of its index
    #[arg(long, env = "KVLANE_INDEX", value_name = "HOST:PORT", value_delimiter = ',')]
    index: Option<Vec<String>>,
    /// Where the others are to reach the daemon of this host
    #[arg(long, env = "KVLANE_CLUSTER_LISTEN", value_name = "HOST:PORT", value_delimiter = ',')]
    cluster_listen: Option<Vec<String>>,
    /// The addresses under which they reach it
    #[arg(long, env = "KVLANE_CLUSTER_ADVERTISE", value_name = "HOST:PORT", value_delimiter = ',')]
    cluster_advertise: Option<Vec<String>>,
    /// A file with the secret that all of them share
    #[arg(long, env = "KVLANE_CLUSTER_TOKEN_FILE", value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
    /// The certificate of this host's daemon (PEM)
    #[arg(long, env = "KVLANE_CLUSTER_TLS_CERTIFICATE", value_name = "FILE")]
    cluster_tls_certificate: Option<PathBuf>,
    /// The key of that certificate
    #[arg(long, env = "KVLANE_CLUSTER_TLS_KEY", value_name = "FILE")]
    cluster_tls_key: Option<PathBuf>,
    /// The authority that has signed the others' certificates
    #[arg(long, env = "KVLANE_CLUSTER_TLS_AUTHORITY", value_name = "FILE")]
    cluster_tls_authority: Option<PathBuf>,
}

impl ClusterArgs {
    fn resolve(&self) -> Result<Option<ClusterOptions>> {
        ClusterFlags {
            peers: self.peers.clone(),
            index: self.index.clone(),
            listen: self.cluster_listen.clone(),
            advertise: self.cluster_advertise.clone(),
            token_file: self.cluster_token_file.clone(),
            certificate: self.cluster_tls_certificate.clone(),
            key: self.cluster_tls_key.clone(),
            authority: self.cluster_tls_authority.clone(),
            transport: None,
            socket_threads: None,
            answer_ms: None,
        }
        .resolve()
    }
}

/// `running`: the cluster of the daemon that runs here.
pub(crate) fn examine(args: &ClusterArgs, running: Option<&ClusterStatus>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = running.into_iter().flat_map(judge_running).collect();
    match args.resolve() {
        Ok(Some(options)) => {
            let known: BTreeSet<SocketAddr> =
                running.into_iter().flat_map(known).filter_map(|it| it.address.parse().ok()).collect();
            findings.extend(examine_peers(&options, &known));
        }
        Ok(None) => {}
        Err(error) => findings.push(
            Finding::problem(SUBJECT, format!("{error:#}"))
                .means("`kvlane serve` does not start with these flags")
                .advice("change the flag or the variable that is named; docs/cluster.md has an example"),
        ),
    }
    findings
}

/// The daemons and replicas that a daemon dials.
fn known(cluster: &ClusterStatus) -> impl Iterator<Item = &MemberStatus> {
    cluster.members.iter().chain(&cluster.replicas)
}

fn judge_running(cluster: &ClusterStatus) -> Vec<Finding> {
    let mut findings: Vec<Finding> = known(cluster).map(judge_member).collect();
    let flag = if cluster.replicas.is_empty() { "--peers" } else { "--index" };
    findings.extend(cluster.unresolved.iter().map(|name| unresolved(flag, name)));
    if findings.is_empty() {
        findings.push(
            Finding::note(SUBJECT, "the daemon knows no other one")
                .means("--peers leads only to itself")
                .advice("name the other daemons in its --peers"),
        );
    }
    findings
}

fn unresolved(flag: &str, name: &str) -> Finding {
    Finding::note(SUBJECT, format!("{flag} {name}"))
        .means("no daemon is found by that name")
        .advice("correct the name, or see that this host's DNS knows it")
}

fn judge_member(member: &MemberStatus) -> Finding {
    let MemberStatus { address, name, software, trouble, .. } = member;
    let own = env!("CARGO_PKG_VERSION");
    if !member.is_reached {
        let why = if trouble.is_empty() { "it was not dialled yet" } else { trouble };
        return not_reached(address, why);
    }
    if !trouble.is_empty() {
        return Finding::note(SUBJECT, format!("{address} ({name}): {trouble}"))
            .means("it is left out for a while, and prompts that only it has are computed")
            .advice("look at its log, its load and its version, and at the network");
    }
    if name.is_empty() {
        // A daemon sends a beat every second to those that it has dialled itself.
        return Finding::note(SUBJECT, format!("{address} is reached, and has not reached back"))
            .means("it answers only daemons that it has dialled itself")
            .advice(format!(
                "some seconds after a start this is usual; else write the same --peers there, let it reach this daemon's \
                 --cluster-listen, and run `kvlane doctor` beside {address}"
            ));
    }
    if software != own {
        return Finding::note(
            SUBJECT,
            format!("{address} ({name}) is kvlane {software}, this binary is {own}"),
        )
        .means("they share a version of the protocol, but not all of their fixes and features")
        .advice("run one version of kvlane in the cluster");
    }
    let answers = match member.round_trip_us {
        0 => String::new(),
        us => format!(", answers in {us} us"),
    };
    Finding::ok(SUBJECT, format!("{address} ({name}) is reached and reaches back{answers}"))
}

fn not_reached(address: impl std::fmt::Display, why: &str) -> Finding {
    Finding::note(SUBJECT, format!("{address} is not reached: {why}"))
        .means("prompts that only it has are computed")
        .advice(
            "see that it runs, listens there, has the same token and TLS, and that no firewall is between",
        )
}

/// Dials the daemons that the flags name, except those that the running daemon has dialled already.
fn examine_peers(options: &ClusterOptions, known: &BTreeSet<SocketAddr>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let own = if options.advertise.is_empty() { &options.listen } else { &options.advertise };
    let mut others = BTreeSet::new();
    let (Directory::Peers(names) | Directory::Index(names)) = &options.directory;
    let flag = if matches!(options.directory, Directory::Index(_)) { "--index" } else { "--peers" };
    for name in names {
        match name.to_socket_addrs() {
            Ok(found) => others.extend(found.filter(|address| !own.contains(address))),
            Err(error) => findings.push(unresolved(flag, &format!("{name}: {error}"))),
        }
    }
    findings.extend(judge_own(own, &others));
    let to_dial: Vec<SocketAddr> =
        others.into_iter().filter(|it| !known.contains(it)).take(DIALLED_MAX).collect();
    if to_dial.is_empty() {
        return findings;
    }
    match dial(options, &to_dial, DIAL_PATIENCE) {
        Ok(outcomes) => {
            findings.extend(to_dial.iter().zip(outcomes).map(|(address, why)| judge_dialled(*address, why)));
        }
        Err(error) => findings.push(
            Finding::problem(SUBJECT, error.to_string())
                .means("`kvlane serve` does not start with these flags")
                .advice("see that the files of --cluster-tls-* are there and belong together"),
        ),
    }
    findings
}

/// Names may lead to other hosts, which `kvlane serve` does not know before it has resolved them.
fn judge_own(own: &[SocketAddr], others: &BTreeSet<SocketAddr>) -> Option<Finding> {
    let here = own.first().filter(|_| own.iter().all(|address| address.ip().is_loopback()))?;
    let there = others.iter().find(|address| !address.ip().is_loopback())?;
    Some(
        Finding::note(
            SUBJECT,
            format!("{here} is an address of this host alone, and {there} of another one"),
        )
        .means("the daemon there cannot reach the one here, and so does not answer it")
        .advice("write an address that other hosts reach in --cluster-listen, and --cluster-token-file"),
    )
}

fn judge_dialled(address: SocketAddr, why: Option<String>) -> Finding {
    match why {
        None => {
            Finding::ok(SUBJECT, format!("{address} answers, with the same token and version of the fabric"))
        }
        Some(why) => not_reached(address, &why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Verdict;

    fn member() -> MemberStatus {
        MemberStatus {
            address: "192.0.2.8:9555".into(),
            name: "host-8".into(),
            software: env!("CARGO_PKG_VERSION").into(),
            is_reached: true,
            round_trip_us: 300,
            trouble: String::new(),
        }
    }

    fn args(peers: &str) -> ClusterArgs {
        ClusterArgs {
            peers: Some(vec![peers.into()]),
            index: None,
            cluster_listen: None,
            cluster_advertise: None,
            cluster_token_file: None,
            cluster_tls_certificate: None,
            cluster_tls_key: None,
            cluster_tls_authority: None,
        }
    }

    #[test]
    fn a_member_is_in_order_if_both_reach_each_other_with_one_version() {
        let found = judge_member(&member());
        assert_eq!(found.verdict, Verdict::Ok);
        assert_eq!(found.found, "192.0.2.8:9555 (host-8) is reached and reaches back, answers in 300 us");
        for (other, expected) in [
            (
                MemberStatus { is_reached: false, trouble: "it has another token".into(), ..member() },
                "is not reached: it has another token",
            ),
            (MemberStatus { is_reached: false, ..member() }, "it was not dialled yet"),
            (
                MemberStatus { name: String::new(), software: String::new(), ..member() },
                "has not reached back",
            ),
            (
                MemberStatus { trouble: "it does not answer in time".into(), ..member() },
                "(host-8): it does not answer in time",
            ),
            (MemberStatus { software: "99.0.0".into(), ..member() }, "is kvlane 99.0.0"),
        ] {
            let found = judge_member(&other);
            assert_eq!(found.verdict, Verdict::Note);
            assert!(found.found.contains(expected) && !found.advice.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn names_without_addresses_and_a_cluster_of_one_are_notes() {
        let nobody = judge_running(&ClusterStatus::default());
        assert_eq!(nobody[0].found, "the daemon knows no other one");
        let unresolved = vec!["cache.example:9555: no such name".into()];
        let found = judge_running(&ClusterStatus { unresolved, ..ClusterStatus::default() });
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].found, "--peers cache.example:9555: no such name");
    }

    #[test]
    fn what_serve_refuses_is_a_problem_with_its_sentence() {
        let open =
            ClusterArgs { cluster_listen: Some(vec!["0.0.0.0:9555".into()]), ..args("192.0.2.8:9555") };
        let alone = args("192.0.2.8:9555");
        for (args, expected) in [(open, "write --cluster-token-file"), (alone, "of this host alone")] {
            let found = &examine(&args, None)[..];
            assert!(matches!(found, [one] if one.verdict == Verdict::Problem), "{found:?}");
            assert!(found[0].found.contains(expected), "{found:?}");
        }
    }

    #[test]
    fn an_own_address_that_others_cannot_reach_is_found_once_names_are_resolved() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (here, there) = (address("127.0.0.1:9555"), address("192.0.2.8:9555"));
        let found = judge_own(&[here], &BTreeSet::from([there])).unwrap();
        assert_eq!(
            found.found,
            "127.0.0.1:9555 is an address of this host alone, and 192.0.2.8:9555 of another one"
        );
        assert!(judge_own(&[here], &BTreeSet::from([address("127.0.0.1:1")])).is_none());
        assert!(judge_own(&[there], &BTreeSet::from([address("192.0.2.9:9555")])).is_none());
    }

    #[test]
    fn without_a_daemon_at_its_address_a_peer_is_a_note_and_one_that_is_known_is_not_dialled() {
        let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = unused.local_addr().unwrap();
        drop(unused);
        let found = examine(&args(&address.to_string()), None);
        assert!(matches!(&found[..], [one] if one.verdict == Verdict::Note), "{found:?}");
        assert!(found[0].found.starts_with(&format!("{address} is not reached: ")), "{found:?}");
        let running = ClusterStatus {
            members: vec![MemberStatus { address: address.to_string(), ..member() }],
            ..ClusterStatus::default()
        };
        let found = examine(&args(&address.to_string()), Some(&running));
        assert!(matches!(&found[..], [one] if one.verdict == Verdict::Ok), "{found:?}");
    }
}
