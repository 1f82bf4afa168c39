//! What an exporter is told when it starts.

use crate::endpoint::Endpoint;

/// Where to export, and under which name.
#[derive(Debug, Clone)]
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
