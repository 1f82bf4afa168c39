//! The flags of `kvlane serve` about other daemons.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::ValueEnum;
use kvlane_server::{ClusterOptions, Directory, Transport};
use serde::Deserialize;

use crate::reach::{Reach, ReachFlags};

const DEFAULT_LISTEN: &str = "127.0.0.1:9555";
const DEFAULT_ANSWER_MS: u32 = 1;
/// Addresses are dialled one by one, and each is a thread.
const NAMES_MAX: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ClusterTransportArg {
    Auto,
    Tcp,
}

/// The flags that the user gave.
#[derive(Debug)]
pub(crate) struct ClusterFlags {
    pub(crate) peers: Option<Vec<String>>,
    pub(crate) index: Option<Vec<String>>,
    pub(crate) listen: Option<Vec<String>>,
    pub(crate) advertise: Option<Vec<String>>,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) authority: Option<PathBuf>,
    pub(crate) transport: Option<ClusterTransportArg>,
    pub(crate) socket_threads: Option<u8>,
    pub(crate) answer_ms: Option<u32>,
}

impl ClusterFlags {
    /// None without `--peers` and `--index`.
    pub(crate) fn resolve(self) -> Result<Option<ClusterOptions>> {
        let (flag, names, what) = match (&self.peers, &self.index) {
            (Some(_), Some(_)) => {
                bail!("--peers and --index exclude each other: an index also says which daemons there are")
            }
            (Some(peers), None) => ("--peers", peers.clone(), "daemons"),
            (None, Some(index)) => ("--index", index.clone(), "replicas"),
            (None, None) => {
                if let Some(flag) = self.given_alone() {
                    bail!("{flag} is of no use without --peers or --index");
                }
                return Ok(None);
            }
        };
        if names.is_empty() || names.len() > NAMES_MAX {
            bail!("{flag} names {} {what}: write 1 to {NAMES_MAX}, each HOST:PORT", names.len());
        }
        if let Some(bad) = names.iter().find(|name| !is_host_and_port(name)) {
            bail!("{flag} '{bad}' is not HOST:PORT");
        }
        let reach = ReachFlags {
            prefix: "--cluster-",
            listen: self.listen.unwrap_or_else(|| vec![DEFAULT_LISTEN.into()]),
            advertise: self.advertise.unwrap_or_default(),
            token_file: self.token_file,
            certificate: self.certificate,
            key: self.key,
            authority: self.authority,
        };
        let Reach { listen, advertise, token, tls } = reach.resolve()?;
        let own = |addresses: &[SocketAddr]| addresses.iter().copied().find(|own| own.ip().is_loopback());
        let elsewhere = |may_be_name| {
            names.iter().find(|name| is_address_elsewhere(name) || may_be_name && !is_loopback(name))
        };
        if let (Some(own), Some(name)) = (own(&advertise), elsewhere(true)) {
            bail!(
                "--cluster-advertise {own} is an address of this host alone, and {flag} {name} of another one: write the \
                 address under which that host reaches this one"
            );
        }
        if advertise.is_empty()
            && listen.iter().all(|own| own.ip().is_loopback())
            && let (Some(own), Some(name)) = (own(&listen), elsewhere(self.index.is_some()))
        {
            bail!(
                "--cluster-listen {own} is an address of this host alone, and {flag} {name} of another one: write an address \
                 in --cluster-listen that other hosts reach, and --cluster-token-file"
            );
        }
        let answer = self.answer_ms.unwrap_or(DEFAULT_ANSWER_MS);
        if !(1..=1000).contains(&answer) {
            bail!("--cluster-answer-ms {answer} is not from 1 to 1000");
        }
        let socket_threads = self.socket_threads.unwrap_or(1);
        if !(1..=16).contains(&socket_threads) {
            bail!("--cluster-socket-threads {socket_threads} is not from 1 to 16");
        }
        let tcp = self.transport == Some(ClusterTransportArg::Tcp);
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Some(ClusterOptions {
            listen,
            advertise,
            token,
            tls,
            transport: tcp.then_some(Transport::TCP),
            socket_threads: socket_threads.into(),
            directory: if self.index.is_some() { Directory::Index(names) } else { Directory::Peers(names) },
            answer_within: Duration::from_millis(answer.into()),
            name,
        }))
    }

    fn given_alone(&self) -> Option<&'static str> {
        [
            (self.listen.is_some(), "--cluster-listen"),
            (self.advertise.is_some(), "--cluster-advertise"),
            (self.token_file.is_some(), "--cluster-token-file"),
            (self.certificate.is_some(), "--cluster-tls-certificate"),
            (self.key.is_some(), "--cluster-tls-key"),
            (self.authority.is_some(), "--cluster-tls-authority"),
            (self.transport.is_some(), "--cluster-transport"),
            (self.socket_threads.is_some(), "--cluster-socket-threads"),
            (self.answer_ms.is_some(), "--cluster-answer-ms"),
        ]
        .into_iter()
        .find_map(|(is_given, flag)| is_given.then_some(flag))
    }
}

fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// False for names, which are resolved later.
fn is_address_elsewhere(name: &str) -> bool {
    name.parse::<SocketAddr>().is_ok_and(|address| !address.ip().is_loopback())
}

fn is_loopback(peer: &str) -> bool {
    let address: Result<SocketAddr, _> = peer.parse();
    address.map_or_else(|_| peer.starts_with("localhost:"), |address| address.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(peers: &[&str]) -> ClusterFlags {
        ClusterFlags {
            peers: (!peers.is_empty()).then(|| peers.iter().map(ToString::to_string).collect()),
            index: None,
            listen: None,
            advertise: None,
            token_file: None,
            certificate: None,
            key: None,
            authority: None,
            transport: None,
            socket_threads: None,
            answer_ms: None,
        }
    }

    fn refused(flags: ClusterFlags) -> String {
        format!("{:#}", flags.resolve().unwrap_err())
    }

    #[test]
    fn without_peers_there_is_no_cluster_and_its_flags_are_mistakes() {
        assert!(flags(&[]).resolve().unwrap().is_none());
        let answer = ClusterFlags { answer_ms: Some(3), ..flags(&[]) };
        assert_eq!(refused(answer), "--cluster-answer-ms is of no use without --peers or --index");
    }

    #[test]
    fn nothing_listens_beyond_this_host_without_a_token() {
        let open = |file| ClusterFlags {
            listen: Some(vec!["0.0.0.0:9555".into()]),
            advertise: Some(vec!["192.0.2.7:9555".into()]),
            token_file: file,
            ..flags(&["192.0.2.8:9555"])
        };
        assert!(
            refused(open(None)).starts_with("--cluster-listen 0.0.0.0:9555 can be reached from other hosts")
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(refused(open(Some(file.path().into()))).contains("there is nothing in it"));
        std::fs::write(file.path(), "  a secret\n").unwrap();
        let options = open(Some(file.path().into())).resolve().unwrap().unwrap();
        assert_eq!((&*options.token, options.answer_within), ("a secret", Duration::from_millis(1)));
        let own = flags(&["localhost:1"]).resolve().unwrap().unwrap();
        assert_eq!(own.listen, ["127.0.0.1:9555".parse().unwrap()]);
    }

    #[test]
    fn addresses_that_lead_nowhere_are_named() {
        for bad in ["host", "host:", ":1", "host:0", "host:70000"] {
            assert_eq!(refused(flags(&[bad])), format!("--peers '{bad}' is not HOST:PORT"));
        }
        let listen = ClusterFlags { listen: Some(vec!["nowhere".into()]), ..flags(&["b:1"]) };
        assert!(refused(listen).starts_with("--cluster-listen 'nowhere' is not HOST:PORT"));
        let advertise =
            ClusterFlags { advertise: Some(vec!["127.0.0.1:1".into()]), ..flags(&["192.0.2.8:1"]) };
        assert!(refused(advertise).ends_with("write the address under which that host reaches this one"));
        assert!(refused(flags(&["localhost:1", "192.0.2.8:1"])).starts_with(
            "--cluster-listen 127.0.0.1:9555 is an address of this host alone, and --peers 192.0.2.8:1 of another one"
        ));
        let tls = ClusterFlags { key: Some("key.pem".into()), ..flags(&["b:1"]) };
        assert!(refused(tls).ends_with("write all three"));
    }

    #[test]
    fn an_index_and_peers_exclude_each_other_and_an_index_is_told_an_address() {
        let index = |name: &str| ClusterFlags { index: Some(vec![name.into()]), ..flags(&[]) };
        let both = ClusterFlags { peers: Some(vec!["b:1".into()]), ..index("c:1") };
        assert!(refused(both).starts_with("--peers and --index exclude each other"));
        assert_eq!(refused(index("c")), "--index 'c' is not HOST:PORT");
        assert!(
            refused(index("192.0.2.8:1"))
                .starts_with("--cluster-listen 127.0.0.1:9555 is an address of this")
        );
        let options = index("localhost:9556").resolve().unwrap().unwrap();
        assert_eq!(options.directory, Directory::Index(vec!["localhost:9556".into()]));
    }
}
