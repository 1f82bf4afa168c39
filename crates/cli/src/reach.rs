//! Where other hosts reach this process, and how it proves itself: flags that `kvlane serve` and `kvlane index` share.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Result, bail};
use kvlane_server::Tls;

use crate::secret_file;

/// As the user gave them.
#[derive(Debug, Default)]
pub(crate) struct ReachFlags {
    /// The flags begin with it: `--cluster-` or `--`.
    pub(crate) prefix: &'static str,
    pub(crate) listen: Vec<String>,
    pub(crate) advertise: Vec<String>,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) authority: Option<PathBuf>,
}

/// The same, checked.
#[derive(Debug)]
pub(crate) struct Reach {
    pub(crate) listen: Vec<SocketAddr>,
    pub(crate) advertise: Vec<SocketAddr>,
    pub(crate) token: String,
    pub(crate) tls: Option<Tls>,
}

impl ReachFlags {
    pub(crate) fn resolve(self) -> Result<Reach> {
        let prefix = self.prefix;
        let listen = addresses(&format!("{prefix}listen"), &self.listen)?;
        if listen.is_empty() {
            bail!("{prefix}listen is empty: the others reach this process there");
        }
        let advertise = addresses(&format!("{prefix}advertise"), &self.advertise)?;
        let tls = match (self.certificate, self.key, self.authority) {
            (None, None, None) => None,
            (Some(certificate), Some(key), Some(authority)) => Some(Tls { certificate, key, authority }),
            _ => bail!(
                "{prefix}tls-certificate, {prefix}tls-key and {prefix}tls-authority go together: write all three"
            ),
        };
        let token = match &self.token_file {
            Some(file) => secret_file::lines(&format!("{prefix}token-file"), file)?.swap_remove(0),
            None => String::new(),
        };
        if token.is_empty()
            && let Some(open) = listen.iter().find(|address| !address.ip().is_loopback())
        {
            bail!(
                "{prefix}listen {open} can be reached from other hosts: write {prefix}token-file with a secret that only \
                 the cluster's daemons know, or listen on 127.0.0.1"
            );
        }
        if let Some(all) = listen.iter().find(|address| address.ip().is_unspecified())
            && advertise.is_empty()
        {
            bail!(
                "{prefix}listen {all}: write {prefix}advertise with the addresses under which the others reach this host"
            );
        }
        Ok(Reach { listen, advertise, token, tls })
    }
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
