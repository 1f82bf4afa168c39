//! The address of a node: its server's URL, and its rank if the server has several.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use hyper::Uri;
use thiserror::Error;

/// The address of a node: `http://HOST:PORT`, then the path before `/v1` if there is one. `#RANK` follows if the node is one
/// data-parallel rank of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// Value of the Host header: `HOST`, or `HOST:PORT`.
    pub authority: String,
    /// Host name or IP address, without brackets.
    pub host: String,
    /// TCP port. 80 if the text names none.
    pub port: u16,
    /// Path before `/v1`, without a slash at its end. Mostly empty.
    pub path: String,
    /// Data-parallel rank, if the server has several. Requests name it in the header `x-data-parallel-rank`.
    pub rank: Option<u32>,
}

/// A text is not the address of a node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text} is no address of a node: {why}; write it as http://HOST:PORT")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |why| AddressError { text: text.into(), why };
        let (text, rank) = match text.split_once('#') {
            Some((server, rank)) => {
                let digits = rank.bytes().all(|byte| byte.is_ascii_digit());
                let number = rank.parse().ok().filter(|_| digits);
                (server, Some(number.ok_or_else(|| wrong("the part after # is not the number of a rank"))?))
            }
            None => (text, None),
        };
        let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = with_scheme.parse().map_err(|_| wrong("it cannot be read"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong("the router speaks only http to nodes"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("it has a user's name"));
        }
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if bare.is_empty() {
            return Err(wrong("it names no host"));
        }
        Ok(Self {
            authority: authority.as_str().to_owned(),
            host: bare.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            path: uri.path().trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            rank,
        })
    }
}

impl Address {
    /// Whether both name the same server, whatever their ranks.
    pub fn is_same_server(&self, other: &Self) -> bool {
        (&self.host, self.port, &self.path) == (&other.host, other.port, &other.path)
    }

    /// The same address on another host.
    pub fn at_host(&self, host: IpAddr) -> Self {
        let authority = SocketAddr::new(host, self.port).to_string();
        Self { authority, host: host.to_string(), ..self.clone() }
    }

    /// The address of one rank of the same server.
    pub fn with_rank(&self, rank: u32) -> Self {
        Self { rank: Some(rank), ..self.clone() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)?;
        self.rank.map_or(Ok(()), |rank| write!(f, "#{rank}"))
    }
}
