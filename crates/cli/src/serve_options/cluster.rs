//! The flags of `kvlane serve` about other daemons.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::ValueEnum;
use kvlane_server::{ClusterOptions, Tls, Transport};
use serde::Deserialize;

use crate::secret_file;

const DEFAULT_LISTEN: &str = "127.0.0.1:9555";
const DEFAULT_ANSWER_MS: u32 = 1;
/// Addresses are dialled one by one, and each is a thread.
const PEERS_MAX: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ClusterTransportArg {
    Auto,
    Tcp,
}

/// The flags that the user gave.
#[derive(Debug)]
pub(super) struct ClusterFlags {
    pub(super) peers: Option<Vec<String>>,
    pub(super) listen: Option<Vec<String>>,
    pub(super) advertise: Option<Vec<String>>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) certificate: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    pub(super) authority: Option<PathBuf>,
    pub(super) transport: Option<ClusterTransportArg>,
    pub(super) answer_ms: Option<u32>,
}

impl ClusterFlags {
    /// None without `--peers`.
    pub(super) fn resolve(self) -> Result<Option<ClusterOptions>> {
        let Some(peers) = self.peers else {
            if let Some(flag) = self.given_without_peers() {
                bail!("{flag} is of no use without --peers");
            }
            return Ok(None);
        };
        if peers.is_empty() || peers.len() > PEERS_MAX {
            bail!("--peers names {} daemons: write 1 to {PEERS_MAX}, each HOST:PORT", peers.len());
        }
        if let Some(bad) = peers.iter().find(|peer| !is_host_and_port(peer)) {
            bail!("--peers '{bad}' is not HOST:PORT");
        }
        let listen = self.listen.unwrap_or_else(|| vec![DEFAULT_LISTEN.into()]);
        let listen = addresses("--cluster-listen", &listen)?;
        if listen.is_empty() {
            bail!("--cluster-listen is empty: the other daemons reach this one there");
        }
        let advertise = addresses("--cluster-advertise", &self.advertise.unwrap_or_default())?;
        let tls = match (self.certificate, self.key, self.authority) {
            (None, None, None) => None,
            (Some(certificate), Some(key), Some(authority)) => Some(Tls { certificate, key, authority }),
            _ => bail!(
                "--cluster-tls-certificate, --cluster-tls-key and --cluster-tls-authority go together: write all three"
            ),
        };
        let token = match &self.token_file {
            Some(file) => secret_file::lines("--cluster-token-file", file)?.swap_remove(0),
            None => String::new(),
        };
        if token.is_empty()
            && let Some(open) = listen.iter().find(|address| !address.ip().is_loopback())
        {
            bail!(
                "--cluster-listen {open} can be reached from other hosts: write --cluster-token-file with a secret that only \
                 the cluster's daemons know, or listen on 127.0.0.1"
            );
        }
        if let Some(all) = listen.iter().find(|address| address.ip().is_unspecified())
            && advertise.is_empty()
        {
            bail!(
                "--cluster-listen {all}: write --cluster-advertise with the addresses under which the others reach this host"
            );
        }
        let reaches_hosts = |peer: &String| !is_loopback(peer);
        if let Some(own) = advertise.iter().find(|own| own.ip().is_loopback())
            && let Some(peer) = peers.iter().find(|peer| reaches_hosts(peer))
        {
            bail!(
                "--cluster-advertise {own} is an address of this host alone, and --peers {peer} of another one"
            );
        }
        let answer = self.answer_ms.unwrap_or(DEFAULT_ANSWER_MS);
        if !(1..=1000).contains(&answer) {
            bail!("--cluster-answer-ms {answer} is not from 1 to 1000");
        }
        let tcp = self.transport == Some(ClusterTransportArg::Tcp);
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Some(ClusterOptions {
            listen,
            advertise,
            token,
            tls,
            transport: tcp.then_some(Transport::TCP),
            peers,
            answer_within: Duration::from_millis(answer.into()),
            name,
        }))
    }

    fn given_without_peers(&self) -> Option<&'static str> {
        [
            (self.listen.is_some(), "--cluster-listen"),
            (self.advertise.is_some(), "--cluster-advertise"),
            (self.token_file.is_some(), "--cluster-token-file"),
            (self.certificate.is_some(), "--cluster-tls-certificate"),
            (self.key.is_some(), "--cluster-tls-key"),
            (self.authority.is_some(), "--cluster-tls-authority"),
            (self.transport.is_some(), "--cluster-transport"),
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

fn is_loopback(peer: &str) -> bool {
    let address: Result<SocketAddr, _> = peer.parse();
    address.map_or_else(|_| peer.starts_with("localhost:"), |address| address.ip().is_loopback())
}

/// The addresses of texts, each HOST:PORT.
fn addresses(flag: &str, texts: &[String]) -> Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for text in texts {
        match text.to_socket_addrs().ok().and_then(|mut found| found.next()) {
            Some(address) => addresses.push(address),
            None => bail!("{flag} '{text}' is not HOST:PORT, or the host has no address"),
        }
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(peers: &[&str]) -> ClusterFlags {
        ClusterFlags {
            peers: (!peers.is_empty()).then(|| peers.iter().map(ToString::to_string).collect()),
            listen: None,
            advertise: None,
            token_file: None,
            certificate: None,
            key: None,
            authority: None,
            transport: None,
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
        assert_eq!(refused(answer), "--cluster-answer-ms is of no use without --peers");
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
        assert!(refused(advertise).contains("is an address of this host alone"));
        let tls = ClusterFlags { key: Some("key.pem".into()), ..flags(&["b:1"]) };
        assert!(refused(tls).ends_with("write all three"));
    }
}
