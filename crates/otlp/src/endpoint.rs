//! The address of a collector.

use std::{fmt, str::FromStr};

use http::Uri;
use thiserror::Error;

/// Where a collector takes OTLP over HTTP, such as `http://127.0.0.1:4318`.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Scheme, host and port, and a path without a slash at its end.
    base: String,
}

/// Why an address is none. The address is left out, because it may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadEndpoint {
    /// Neither http nor https.
    #[error("it has no scheme: write http://HOST:4318 or https://HOST:4318")]
    Scheme,
    /// A user or a password stands before the host.
    #[error(
        "it holds credentials: write them as a header into a file, and name that with --otlp-headers-file"
    )]
    Credentials,
    /// Not an address, or one with a query.
    #[error("it is no address: write http://HOST:4318, without a query")]
    Malformed,
}

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        let (scheme, rest) = text.split_once("://").ok_or(BadEndpoint::Scheme)?;
        if !["http", "https"].contains(&scheme) {
            return Err(BadEndpoint::Scheme);
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.contains('@') {
            return Err(BadEndpoint::Credentials);
        }
        let uri: Uri = text.parse().map_err(|_| BadEndpoint::Malformed)?;
        if uri.host().is_none_or(str::is_empty) || uri.query().is_some() || text.contains('#') {
            return Err(BadEndpoint::Malformed);
        }
        Ok(Self { base: text.trim_end_matches('/').to_owned() })
    }
}

impl Endpoint {
    /// The address for a signal: "traces" or "metrics".
    pub fn of(&self, signal: &str) -> String {
        format!("{}/v1/{signal}", self.base)
    }

    /// Whether it takes TLS.
    pub fn is_secure(&self) -> bool {
        self.base.starts_with("https:")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_the_path_of_each_signal() {
        for text in ["http://127.0.0.1:4318", "http://127.0.0.1:4318/"] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.of("traces"), "http://127.0.0.1:4318/v1/traces");
            assert!(!endpoint.is_secure());
        }
        let endpoint: Endpoint = "https://collector.example/otlp/".parse().unwrap();
        assert_eq!(endpoint.of("metrics"), "https://collector.example/otlp/v1/metrics");
        assert!(endpoint.is_secure());
    }

    #[test]
    fn mistakes_say_what_to_write_and_never_what_was_written() {
        for (text, wanted) in [
            ("collector:4318", BadEndpoint::Scheme),
            ("grpc://collector:4317", BadEndpoint::Scheme),
            ("", BadEndpoint::Scheme),
            ("http://me:secret@collector:4318", BadEndpoint::Credentials),
            ("https://secret@collector", BadEndpoint::Credentials),
            ("http://", BadEndpoint::Malformed),
            ("http://a b", BadEndpoint::Malformed),
            ("http://collector/?key=secret", BadEndpoint::Malformed),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert_eq!(error, wanted, "{text}");
            assert!(!error.to_string().contains("secret"));
        }
    }
}
