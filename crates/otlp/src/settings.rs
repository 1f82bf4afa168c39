//! Settings of an exporter: the collector, its secrets, and the name of this program there.

use std::fmt;

use crate::endpoint::Endpoint;

/// Where to export, and under which name.
#[derive(Clone)]
pub struct Settings {
    /// The collector that takes all spans and metrics.
    pub endpoint: Endpoint,
    /// Headers of each request, such as a key. They are never logged.
    pub headers: Vec<(String, String)>,
    /// The authority (PEM) that signed the collector's certificate; None for those that the host trusts.
    pub authority: Option<Vec<u8>>,
    /// `service.name` of all spans and metrics: "kvlane" or "kvlane-router".
    pub service: &'static str,
    /// `service.instance.id`: tells this process from others.
    pub instance: String,
}

/// Without the headers' values, which are secret.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("headers", &names)
            .finish_non_exhaustive()
    }
}
