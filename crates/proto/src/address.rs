//! The address of a daemon: a Unix socket or a TCP address, and the text form of both.

use std::{fmt, net::SocketAddr, net::ToSocketAddrs, path::PathBuf, str::FromStr};

use thiserror::Error;

/// The address that a daemon listens at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket. Engines connect here, because only this carries descriptors and credentials.
    Unix(PathBuf),
    /// A TCP address, for tools only.
    Tcp(SocketAddr),
}

/// Why a text is no usable address.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AddressError {
    /// The text is neither `unix:PATH`, a path, nor `HOST:PORT`.
    #[error("'{0}' is no address: write unix:PATH, PATH or HOST:PORT")]
    Unknown(String),
    /// The host's name does not resolve, now or at all.
    #[error("'{0}' names a host that is not known here: write its number, or unix:PATH")]
    UnknownHost(String),
    /// The path is longer than the kernel allows for a socket.
    #[error(
        "'{path}' is too long for a socket: it has {length} bytes, and the kernel allows {UNIX_PATH_MAX}; choose a shorter path"
    )]
    PathTooLong {
        /// As the user wrote it.
        path: String,
        /// Length of the path in bytes.
        length: usize,
    },
}

const UNIX_PATH_MAX: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        // Refuses a URL, which would otherwise be a path that begins with the folder "http:".
        if text.contains("://") {
            return Err(AddressError::Unknown(text.into()));
        }
        // A text with a slash is a path, because neither a host nor a port has one.
        let path = text.strip_prefix("unix:").or_else(|| text.contains('/').then_some(text));
        if let Some(path) = path {
            if path.is_empty() {
                return Err(AddressError::Unknown(text.into()));
            }
            if path.len() > UNIX_PATH_MAX {
                return Err(AddressError::PathTooLong { path: path.into(), length: path.len() });
            }
            return Ok(Self::Unix(path.into()));
        }
        let unknown = match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                AddressError::UnknownHost
            }
            _ => return Err(AddressError::Unknown(text.into())),
        };
        let found = text.to_socket_addrs().ok().and_then(|mut found| found.next());
        found.map(Self::Tcp).ok_or_else(|| unknown(text.into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_parse_and_print_alike() {
        for text in ["unix:/run/kvlane.sock", "127.0.0.1:50055", "[::1]:80"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for path in ["/run/x", "./x", "run/x"] {
            assert_eq!(path.parse::<Address>().unwrap(), Address::Unix(path.into()));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for text in ["", "unix:", "localhost", "127.0.0.1:notaport", "127.0.0.1:99999", ":80", "http://x:80"]
        {
            assert!(text.parse::<Address>().unwrap_err().to_string().contains(&format!("'{text}'")));
        }
        let long = format!("unix:/{}", "x".repeat(200));
        assert!(matches!(long.parse::<Address>(), Err(AddressError::PathTooLong { length: 201, .. })));
    }
}
